/* Values that programs read: small tensors of integers and booleans, and short lists of numbers, have real values.
 *
 * Kernels compute nothing on the null device. Each small tensor on it has a shadow: the bytes of its storage in host
 * memory. A tensor that has or may get a shadow carries a dispatch key that nothing else in PyTorch uses, so that the
 * dispatcher brings every operator on it here, and no other operator pays for it. The operator still runs on the
 * device, so that the requests to the allocator do not change; then its CPU kernel runs on the shadows, and its output
 * is the shadow of the result.
 *
 * Inside of `__torch_dispatch__`, of a mode or of a tensor subclass, PyTorch switches off every key above its own, KEY
 * too (torch/csrc/utils/python_arg_parser.cpp). So the tensors carry a second one, LOW_KEY, which is lower: calls that
 * KEY handled do not reach it, all others do.
 *
 * A value has one of three levels:
 *   known    the host wrote it, or it was computed from such values;
 *   assumed  an index into unknown scores, such as of routed experts, and what was computed from it (see choose);
 *   unknown  computed from scores in other ways: 0, and a read is reported (src/kept.c).
 *
 * Built against the headers of torch: c10/core/DispatchKey.h has the order of the keys, of which
 * TESTING_ONLY_GenericWrapper is the highest that a tensor can carry, and CustomRNGKeyId one of those between Python's
 * and the devices' own (torch 2.6 to 2.15).
 */
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

/* Of libmemcalcnull.so (null.h is C). */
extern "C" {
void null_copy(void *to, const void *from, size_t size);
void null_clear(void *address, size_t size);
bool null_recall(void *to, const void *address, size_t size);
void null_reads_are_known(bool known);
}

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using Stack = std::vector<IValue>;
using Tensor = at::Tensor;

constexpr int64_t LARGEST = 1 << 20;       /* elements of a tensor of integers or booleans that has a shadow */
constexpr int64_t LARGEST_VIEW = 1 << 26;  /* elements of a view of one, where they are repeated: an expanded mask */
constexpr int64_t LARGEST_FLOATS = 256;    /* of a tensor of floats: a number, a short list */
constexpr auto KEY = DispatchKey::TESTING_ONLY_GenericWrapper;
constexpr auto LOW_KEY = DispatchKey::CustomRNGKeyId;
const DispatchKeySet BELOW_KEY(DispatchKeySet::FULL_AFTER, KEY);
const DispatchKeySet BELOW_LOW_KEY(DispatchKeySet::FULL_AFTER, LOW_KEY);
const DispatchKeySet BELOW_SELECT(DispatchKeySet::FULL_AFTER, DispatchKey::BackendSelect);

/* While one of these is active (a mode, a tensor subclass, functorch), the operator comes back without it. */
const DispatchKeySet INTERPRETERS({DispatchKey::Python, DispatchKey::FuncTorchDynamicLayerFrontMode,
                                   DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::Functionalize});

enum Level { KNOWN, ASSUMED, UNKNOWN };

struct Shadow {
    c10::weak_intrusive_ptr<c10::StorageImpl> owner;
    Tensor bytes;  /* on the CPU, as many as the storage has */
    Tensor levels; /* of each byte; undefined: all are of `level` */
    Level level;
};

std::unordered_map<const c10::StorageImpl *, Shadow> shadows;
size_t swept_at = 256; /* entries at which those of dead storages are removed */
std::mutex lock;
std::atomic<long long> choices{0}; /* tensors of indices that were assumed */
bool crowded = false;              /* every row chooses the same indices, instead of round-robin */
std::vector<std::unique_ptr<torch::Library>> registered;

/* ---- tensors and their shadows */

DispatchKeySet &keys_of(c10::TensorImpl *tensor) {
    struct Open : c10::TensorImpl {
        static DispatchKeySet c10::TensorImpl::*member() { return &Open::key_set_; }
    };
    return tensor->*Open::member();
}

bool on_device(const Tensor &tensor) {
    const auto keys = tensor.key_set(); /* plain memory of a GPU, neither sparse nor a subclass */
    return keys.has_backend(c10::BackendComponent::CUDABit) && keys.has(DispatchKey::Dense) && !keys.has(DispatchKey::Python) &&
           tensor.has_storage();
}

bool countable(const Tensor &tensor) {
    if (c10::isIntegralType(tensor.scalar_type(), true)) {
        const int64_t held = static_cast<int64_t>(tensor.storage().nbytes()) / static_cast<int64_t>(tensor.itemsize());
        return tensor.numel() <= LARGEST || (held <= LARGEST && tensor.numel() <= LARGEST_VIEW);
    }
    return c10::isFloatingType(tensor.scalar_type()) && tensor.numel() <= LARGEST_FLOATS;
}

void mark(const Tensor &tensor) {
    auto &keys = keys_of(tensor.unsafeGetTensorImpl());
    keys = keys.add(KEY).add(LOW_KEY);
}

Shadow *find(const Tensor &tensor) { /* under the lock */
    const auto *storage = tensor.storage().unsafeGetStorageImpl();
    auto entry = shadows.find(storage);
    if (entry == shadows.end()) return nullptr;
    if (entry->second.owner.expired() || entry->second.bytes.numel() != static_cast<int64_t>(storage->nbytes())) {
        shadows.erase(entry);
        return nullptr;
    }
    return &entry->second;
}

void forget(const Tensor &tensor) {
    std::lock_guard<std::mutex> guard(lock);
    shadows.erase(tensor.storage().unsafeGetStorageImpl());
}

/* The host's tensor of the same elements within a storage's bytes. */
Tensor view(const Tensor &bytes, const Tensor &tensor) {
    auto host = at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
    host.unsafeGetTensorImpl()->set_storage_keep_dtype(bytes.storage());
    host.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    return host;
}

/* The level of each of a tensor's elements, at its first byte. */
Tensor levels_of(const Tensor &levels, const Tensor &tensor) {
    const auto size = static_cast<int64_t>(tensor.itemsize());
    auto strides = tensor.strides().vec();
    for (auto &stride : strides) stride *= size;
    return levels.as_strided(tensor.sizes(), strides, tensor.storage_offset() * size);
}

/* A tensor's value and its level; a copy if it will be written to. */
Tensor value_of(const Tensor &tensor, bool written, Level &level) {
    std::lock_guard<std::mutex> guard(lock);
    if (Shadow *shadow = find(tensor)) {
        level = shadow->level;
        if (shadow->levels.defined() && tensor.numel() > 0)
            level = static_cast<Level>(levels_of(shadow->levels, tensor).max().item<uint8_t>());
        auto host = view(shadow->bytes, tensor);
        return written ? host.clone() : host;
    }
    level = UNKNOWN;
    auto host = at::zeros(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
    /* Bytes that the host or a collective wrote and no operator has read. */
    if (tensor.numel() > 0 && tensor.is_contiguous() && null_recall(host.data_ptr(), tensor.data_ptr(), host.nbytes()))
        level = KNOWN;
    return tensor.numel() > 0 ? host : (level = KNOWN, host);
}

bool covers_storage(const Tensor &tensor) {
    return tensor.is_contiguous() && tensor.storage_offset() == 0 && tensor.nbytes() == tensor.storage().nbytes();
}

void remember(const Tensor &tensor, const Tensor &host, Level level) {
    std::lock_guard<std::mutex> guard(lock);
    Shadow *shadow = find(tensor);
    if (shadow == nullptr) {
        const auto &storage = tensor.storage();
        if (static_cast<int64_t>(storage.nbytes()) > 8 * LARGEST) return; /* a small part of something large */
        if (shadows.size() > swept_at) {
            for (auto entry = shadows.begin(); entry != shadows.end();)
                entry = entry->second.owner.expired() ? shadows.erase(entry) : std::next(entry);
            swept_at = 2 * shadows.size() + 256;
        }
        auto bytes = at::zeros({static_cast<int64_t>(storage.nbytes())}, at::TensorOptions().dtype(at::kByte));
        c10::weak_intrusive_ptr<c10::StorageImpl> owner(storage.getWeakStorageImpl());
        shadow = &shadows.insert_or_assign(storage.unsafeGetStorageImpl(), Shadow{owner, bytes, Tensor(), UNKNOWN}).first->second;
    }
    view(shadow->bytes, tensor).copy_(host);
    if (covers_storage(tensor)) {
        shadow->levels = Tensor();
        shadow->level = level;
    } else if (shadow->levels.defined() || shadow->level != level) {
        if (!shadow->levels.defined()) shadow->levels = at::zeros_like(shadow->bytes).fill_(static_cast<int>(shadow->level));
        levels_of(shadow->levels, tensor).fill_(static_cast<int>(level));
    }
}

/* ---- operators */

struct Rules {
    bool aten = false;      /* its CPU kernel may run in place of the device's */
    bool collective = false; /* writes to its inputs, and its schema does not declare it */
    bool leaf = false;      /* has a kernel for the device, and is not made of other operators */
    bool view = false;      /* its results share the storage of its inputs */
    bool overwrites = false; /* what was in `self` before is not read */
    bool dynamic = false;   /* the size of its results depends on values */
    bool ruled = false;     /* its kernel decides its result for unknown values (hook/memcalc_masks.py) */
    bool seeded = false;
    bool chooses = false;   /* its last result is a tensor of indices */
};

constexpr const char *CHOOSING[] = {"topk",    "sort",        "sort.stable", "argmax",     "argmin", "max.dim",
                                   "min.dim", "multinomial", "kthvalue",    "median.dim", "mode"};

const Rules &rules_of(const OperatorHandle &op) {
    static std::unordered_map<const c10::FunctionSchema *, Rules> known;
    static std::mutex own;
    static const std::unordered_set<std::string> overwriting = {"aten::copy_", "aten::fill_", "aten::zero_"};
    std::lock_guard<std::mutex> guard(own);
    const auto *schema = &op.schema();
    auto found = known.find(schema);
    if (found != known.end()) return found->second;
    Rules rules;
    const auto &name = schema->name();
    rules.aten = name.rfind("aten::", 0) == 0;
    rules.collective = name.rfind("c10d::", 0) == 0;
    rules.overwrites = overwriting.count(name) > 0;
    /* copy_ has one kernel for every device (aten/src/ATen/native/native_functions.yaml). */
    rules.leaf = (op.hasKernelForDispatchKey(DispatchKey::CUDA) || rules.overwrites) && name != "aten::record_stream";
    for (const std::string chooser : CHOOSING)
        rules.chooses |= "aten::" + chooser == name + (schema->overload_name().empty() ? "" : "." + schema->overload_name());
    rules.ruled = name == "aten::all" || name == "aten::nonzero" || name == "aten::isfinite";
    for (const auto &result : schema->returns())
        rules.view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    for (auto tag : op.getTags()) {
        rules.dynamic |= tag == at::Tag::dynamic_output_shape;
        rules.seeded |= tag == at::Tag::nondeterministic_seeded;
    }
    rules.overwrites |= rules.aten && rules.seeded && name.back() == '_'; /* random_, normal_, uniform_ ... */
    return known.emplace(schema, rules).first->second;
}

const at::Generator &dice() { /* a program's own generators must not advance */
    static at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
    return generator;
}

/* One call of an operator, on the host. */
struct Call {
    const OperatorHandle &op;
    const Rules &rules;
    Stack arguments, host;
    bool possible = true;
    Level level = KNOWN;

    Call(const OperatorHandle &operator_, const Rules &rules_, const Stack &stack)
        : op(operator_), rules(rules_),
          arguments(stack.end() - static_cast<long>(operator_.schema().arguments().size()), stack.end()) {}

    bool written(size_t i) const {
        const auto *alias = op.schema().arguments()[i].alias_info();
        return alias != nullptr && alias->isWrite();
    }

    Tensor translate(const Tensor &tensor, size_t i) {
        if (!tensor.defined()) return tensor;
        if (tensor.device().is_cpu()) {
            possible &= !written(i) || rules.overwrites;
            return tensor;
        }
        if (!on_device(tensor) || !countable(tensor)) {
            possible = false;
            return tensor;
        }
        Level own;
        auto value = value_of(tensor, written(i), own);
        const bool unread = written(i) && (op.schema().arguments()[i].is_out() || rules.overwrites);
        if (!unread) level = std::max(level, own);
        return value;
    }

    void prepare() {
        possible = rules.aten;
        bool drawn = false;
        for (size_t i = 0; i < arguments.size() && possible; i++) {
            const IValue &given = arguments[i];
            const auto type = op.schema().arguments()[i].type()->str();
            if (given.isTensor())
                host.emplace_back(translate(given.toTensor(), i));
            else if (given.isTensorList()) {
                c10::List<Tensor> list;
                for (const Tensor &tensor : given.toTensorVector()) list.push_back(translate(tensor, i));
                host.emplace_back(std::move(list));
            } else if (given.isList() && type == "Tensor?[]") {
                c10::List<std::optional<Tensor>> list;
                for (const IValue &item : given.toListRef())
                    list.push_back(item.isTensor() ? std::optional<Tensor>(translate(item.toTensor(), i)) : std::nullopt);
                host.emplace_back(std::move(list));
            } else if (given.isDevice())
                host.emplace_back(given.toDevice().is_cuda() ? at::Device(at::kCPU) : given.toDevice());
            else if (type == "Generator?") {
                host.emplace_back(dice());
                drawn = true;
            } else if (given.isStorage() || given.isStream())
                possible = false;
            else
                host.push_back(given);
        }
        if (rules.seeded && !drawn) possible = false;
    }

    /* The CPU kernel; arguments on the host receive what the kernel writes to them. */
    bool compute(Stack &results) {
        struct Silent : c10::WarningHandler {
            void process(const c10::Warning &) override {}
        } silent;
        c10::WarningUtils::WarningHandlerGuard quiet(&silent);
        at::NoGradGuard without_graph;
        try {
            results = host;
            op.callBoxed(&results);
            return true;
        } catch (const std::exception &) {
            return false;
        }
    }

    /* Some CPU kernels take floats only, as histc's: the values of integers up to 2^53 are the same. */
    bool compute_in_floats(Stack &results) {
        for (size_t i = 0; i < host.size(); i++)
            if (host[i].isTensor() && host[i].toTensor().defined()) {
                if (written(i)) return false;
                if (c10::isIntegralType(host[i].toTensor().scalar_type(), true)) host[i] = host[i].toTensor().to(at::kDouble);
            }
        return compute(results);
    }

    template <typename Do> void each_written(Do &&act) const {
        for (size_t i = 0; i < arguments.size(); i++) {
            if (!written(i)) continue;
            const bool computed = possible && i < host.size(); /* not before prepare() */
            const IValue ours = computed ? host[i] : IValue();
            if (arguments[i].isTensor()) act(arguments[i].toTensor(), ours);
            else if (arguments[i].isTensorList()) {
                const auto real = arguments[i].toTensorVector();
                const auto values = computed ? ours.toTensorVector() : std::vector<Tensor>();
                for (size_t k = 0; k < real.size(); k++) act(real[k], k < values.size() ? IValue(values[k]) : IValue());
            }
        }
    }
};

bool keepable(const Tensor &tensor) { return tensor.defined() && on_device(tensor) && countable(tensor); }

void keep(const Tensor &real, const Tensor &host, Level level) {
    if (!keepable(real) || !host.defined() || real.sizes() != host.sizes()) return;
    mark(real);
    remember(real, host, level);
}

/* A new tensor of the device for a result with a size that depends on values; for nonzero in the layout of its
 * kernel. */
Tensor on_device_as(const Tensor &host, at::Device device, bool by_column) {
    const auto options = at::TensorOptions().dtype(host.scalar_type()).device(device);
    return by_column ? at::empty({host.size(1), host.size(0)}, options).t() : at::empty(host.sizes(), options);
}

bool small(const Stack &results) {
    for (const IValue &result : results)
        if (result.isTensor() && result.toTensor().defined() && result.toTensor().numel() > LARGEST) return false;
    return true;
}

thread_local bool chosen_by_known = false; /* the operator under way has known scores */

/* Operators on tensors that carry the keys. below: those that come after the one that brought the operator here. */
void handle(const OperatorHandle &op, DispatchKeySet below, Stack *stack) {
    const Rules &rules = rules_of(op);
    if (rules.view || (rules.aten && !rules.leaf)) {
        op.redispatchBoxed(below, stack);
        return;
    }
    Call call(op, rules, *stack);
    if (!rules.aten) { /* another package's, or a collective: the stubs handle it */
        std::vector<Tensor> given;
        for (const IValue &argument : call.arguments) {
            if (argument.isTensor()) given.push_back(argument.toTensor());
            else if (argument.isTensorList()) for (const Tensor &tensor : argument.toTensorVector()) given.push_back(tensor);
            else if (argument.isList())
                for (const IValue &item : argument.toListRef())
                    if (item.isTensorList()) for (const Tensor &tensor : item.toTensorVector()) given.push_back(tensor);
        }
        for (const Tensor &tensor : given) {
            if (!tensor.defined() || !on_device(tensor)) continue;
            std::lock_guard<std::mutex> guard(lock);
            if (Shadow *shadow = find(tensor))
                null_copy(tensor.storage().mutable_data(), shadow->bytes.data_ptr(), shadow->bytes.numel());
        }
        op.redispatchBoxed(below, stack);
        if (rules.collective) for (const Tensor &tensor : given) if (tensor.defined() && on_device(tensor)) forget(tensor);
        call.each_written([&](const Tensor &tensor, const IValue &) {
            if (!tensor.defined() || !on_device(tensor)) return;
            forget(tensor);
            /* The stubs know the result of a collective, but not of another package's kernels. */
            if (!rules.collective) null_clear(tensor.storage().mutable_data(), tensor.storage().nbytes());
        });
        return;
    }
    call.prepare();
    const bool known = call.possible && call.level != UNKNOWN;
    Stack results;
    if (rules.dynamic && known && call.compute(results)) {
        const auto device = call.arguments[0].toTensor().device();
        stack->resize(stack->size() - call.arguments.size());
        for (IValue &result : results) {
            const Tensor host = result.toTensor();
            const Tensor real = on_device_as(host, device, op.schema().name() == "aten::nonzero");
            keep(real, host, call.level);
            stack->emplace_back(real);
        }
        return;
    }
    const size_t bottom = stack->size() - call.arguments.size();
    {
        struct Known {
            explicit Known(bool known) { null_reads_are_known(chosen_by_known = known); }
            ~Known() { null_reads_are_known(chosen_by_known = false); }
        } guard(known);
        op.redispatchBoxed(below, stack);
    }
    const Stack real(stack->begin() + static_cast<long>(bottom), stack->end());
    const bool done = call.possible && !(rules.ruled && !known) && !rules.dynamic && small(real) &&
                      (call.compute(results) || call.compute_in_floats(results));
    call.each_written([&](const Tensor &tensor, const IValue &host) {
        if (!tensor.defined() || !on_device(tensor)) return;
        if (done && host.isTensor() && keepable(tensor) && host.toTensor().sizes() == tensor.sizes())
            keep(tensor, host.toTensor(), call.level);
        else
            forget(tensor);
    });
    if (!done) return;
    for (size_t i = 0; i < real.size() && i < results.size(); i++) {
        const auto *alias = op.schema().returns()[i].alias_info();
        if (alias != nullptr) continue; /* one of its arguments */
        if (rules.chooses && !known && i + 1 == real.size()) continue; /* indices: see choose */
        if (real[i].isTensor()) {
            if (results[i].isTensor()) keep(real[i].toTensor(), results[i].toTensor(), call.level);
        } else if (real[i].isTensorList()) {
            const auto ours = results[i].toTensorVector();
            const auto theirs = real[i].toTensorVector();
            for (size_t k = 0; k < theirs.size() && k < ours.size(); k++) keep(theirs[k], ours[k], call.level);
        } else
            (*stack)[bottom + i] = results[i]; /* a number: a previous read of it may be older */
    }
}

void handle_high(const OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
    if (keys.has_any(INTERPRETERS))
        op.redispatchBoxed(keys & BELOW_KEY, stack);
    else
        handle(op, (keys & BELOW_KEY).remove(LOW_KEY), stack);
}

void handle_low(const OperatorHandle &op, DispatchKeySet keys, Stack *stack) { handle(op, keys & BELOW_LOW_KEY, stack); }

/* For LOW_KEY the dispatcher takes an operator's kernel for every backend (CompositeExplicitAutograd) rather than what
 * is registered for all operators, even where there is one for the device: these get a registration each. */
void handle_kernels_of_the_device(torch::Library &library) {
    for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0) continue;
        const auto op = c10::Dispatcher::singleton().findOp(name);
        if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(LOW_KEY) || !rules_of(*op).leaf) continue;
        const auto overload = name.overload_name.empty() ? "" : "." + name.overload_name;
        library.impl((name.name.substr(6) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&handle_low>());
    }
}

/* ---- where known values begin */

/* The same as PyTorch's own kernels (build/aten/src/ATen/RegisterBackendSelect.cpp), and the key for small results.
 *
 * Not those of one float without dimensions that come by empty: fused optimizers count their steps in such, one for each
 * parameter, which would cost every step 10 %. Copies (`to`, `torch.tensor`) come by empty_strided. */
Tensor marked(Tensor tensor, bool copies) {
    const bool counter = !copies && tensor.dim() == 0 && !c10::isIntegralType(tensor.scalar_type(), true);
    if (on_device(tensor) && countable(tensor) && !counter) mark(tensor);
    return tensor;
}

DispatchKeySet backend(std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device) {
    return DispatchKeySet(c10::computeDispatchKey(dtype, layout, device));
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
    return marked(at::_ops::empty_memory_format::redispatch(backend(dtype, layout, device), size, dtype, layout, device,
                                                            pinned, format), false);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pinned) {
    return marked(at::_ops::empty_strided::redispatch(backend(dtype, layout, device), size, stride, dtype, layout, device,
                                                      pinned), true);
}

/* Indices into unknown scores: experts, next tokens. Round-robin, so that each is chosen equally often: row r of k
 * choices among n takes r*k, r*k+1, ...; starting in the middle, where vocabularies have no special tokens. */
Tensor indices(const Tensor &like, int64_t dim, int64_t n, bool has_dim) {
    const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
    const int64_t k = has_dim ? like.size(dim) : 1;
    auto sizes = like.sizes().vec();
    if (has_dim) std::swap(sizes[dim], sizes.back());
    auto flat = at::arange(like.numel(), options);
    if (crowded && k > 0) flat = flat.remainder(k);
    flat = flat.add(n / 2).remainder(std::max<int64_t>(n, 1)).view(sizes);
    return has_dim ? flat.transpose(dim, static_cast<int64_t>(sizes.size()) - 1) : flat;
}

void choose(const OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
    const auto &arguments = op.schema().arguments();
    const auto first = stack->end() - static_cast<long>(arguments.size());
    const Tensor input = first->toTensor();
    bool flat = false, keeps = op.schema().name() != "aten::max" && op.schema().name() != "aten::min";
    int64_t dim = -1;
    for (size_t i = 0; i < arguments.size(); i++) {
        const IValue &given = first[static_cast<long>(i)];
        if (arguments[i].name() == "dim") {
            flat = given.isNone();
            if (given.isInt()) dim = given.toInt();
        } else if (arguments[i].name() == "keepdim")
            keeps = given.toBool();
    }
    static thread_local int depth = 0; /* some are made of others */
    struct Inside {
        Inside() { depth++; }
        ~Inside() { depth--; }
    } inside;
    op.redispatchBoxed(keys & BELOW_SELECT, stack);
    const Tensor found = stack->back().toTensor();
    if (keys.has_any(INTERPRETERS) || chosen_by_known || !on_device(input) || !on_device(found) || found.scalar_type() != at::kLong ||
        found.numel() > LARGEST || input.dim() == 0)
        return;
    if (input.key_set().has(LOW_KEY)) { /* handled at LOW_KEY while a mode is active */
        std::lock_guard<std::mutex> guard(lock);
        const Shadow *shadow = find(found);
        if (shadow != nullptr && shadow->level != UNKNOWN) return;
    }
    if (dim < 0) dim += input.dim();
    const bool has_dim = keeps && !flat && found.dim() == input.dim();
    mark(found);
    remember(found, indices(found, dim, flat ? input.numel() : input.size(dim), has_dim), ASSUMED);
    choices += depth == 1;
}

/* Values that no kernel computed count as finite, because programs skip the step of a gradient that is not. The same
 * operators as PyTorch's own (aten/src/ATen/native/TensorCompare.cpp), which has no CUDA version. */
Tensor isfinite(const Tensor &self) {
    if (!c10::isFloatingType(self.scalar_type())) return self.eq(self);
    const auto found = self.eq(self).mul(self.abs().ne(std::numeric_limits<double>::infinity()));
    if (!keepable(found)) return found;
    {
        std::lock_guard<std::mutex> guard(lock);
        const Shadow *shadow = find(found);
        if (shadow != nullptr && shadow->level != UNKNOWN) return found;
    }
    mark(found);
    remember(found, at::zeros(found.sizes(), at::TensorOptions().dtype(at::kBool)).fill_(true), ASSUMED);
    return found;
}

void assume_choices(torch::Library &library) {
    for (const char *name : CHOOSING) {
        const auto op = c10::Dispatcher::singleton().findSchema(
            {std::string("aten::") + std::string(name).substr(0, std::string(name).find('.')),
             std::string(name).find('.') == std::string::npos ? "" : std::string(name).substr(std::string(name).find('.') + 1)});
        if (op && !op->hasKernelForDispatchKey(DispatchKey::BackendSelect))
            library.impl(name, torch::CppFunction::makeFromBoxedFunction<&choose>());
    }
}

}  // namespace

/* Start tracking values. crowded: indices of unknown scores are the same for every row. */
EXPORT int values_begin(int same_for_all) {
    struct Silent : c10::WarningHandler {
        void process(const c10::Warning &) override {}
    } silent;
    c10::WarningUtils::WarningHandlerGuard quiet(&silent); /* of kernels that are overridden */
    crowded = same_for_all != 0;
    try {
        registered.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__));
        registered.back()->impl("isfinite", TORCH_FN(isfinite));
        registered.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__));
        registered.back()->fallback(torch::CppFunction::makeFromBoxedFunction<&handle_high>());
        registered.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "_", LOW_KEY, __FILE__, __LINE__));
        registered.back()->fallback(torch::CppFunction::makeFromBoxedFunction<&handle_low>());
        registered.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", LOW_KEY, __FILE__, __LINE__));
        handle_kernels_of_the_device(*registered.back());
        registered.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", DispatchKey::BackendSelect, __FILE__, __LINE__));
        registered.back()->impl("empty.memory_format", TORCH_FN(empty));
        registered.back()->impl("empty_strided", TORCH_FN(empty_strided));
        assume_choices(*registered.back());
        return 1;
    } catch (const std::exception &error) {
        fprintf(stderr, "memcalc: values are not known: %s\n", error.what());
        return 0;
    }
}

EXPORT long long values_choices(void) { return choices; }

/* Remove the keys from a tensor, or restore them. Returns whether it had them. */
EXPORT int values_carry(void *tensor, int carries) {
    auto &keys = keys_of(static_cast<c10::TensorImpl *>(tensor));
    const bool had = keys.has(KEY);
    keys = carries ? keys.add(KEY).add(LOW_KEY) : keys.remove(KEY).remove(LOW_KEY);
    return had;
}
