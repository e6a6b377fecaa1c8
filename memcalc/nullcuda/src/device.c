/* libmemcalcnull.so: the memory accounts of the null device. Everything that the stub libraries share is here.
 *
 * Rules:
 * - Memory is a count against the GPU's capacity, and address space without memory behind it (PROT_NONE): a program
 *   that looked at it from the host would crash, as it would with a real card.
 * - Kernels return at once and compute nothing. What the host reads back is zeros, except for what it wrote there
 *   itself shortly before (see kept.c). Every such reading is counted.
 * - Events are complete at once; or, with events=delayed, only when the host waits for them (see clock.c).
 */
#define _GNU_SOURCE
#include "null.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

/* cudaMalloc maps physical memory in pages of this size (cuMemGetAllocationGranularity since Pascal). */
#define PAGE (2 * MIB)

/* Address space for cudaMalloc, in multiples of the GPU's memory: fragmentation must never make it fail. */
#define ADDRESS_SPACE 8

/* The driver reserves address space in multiples of this, aligned to it, and allocates the rest of one to requests that
 * fit (benchmarks/recordings/gpu: all 99 segments of an H100's `shuffled` snapshots, driver 580, are at the addresses
 * that this gives). */
#define CHUNK (32 * MIB)
#define HOST_PAGE 4096 /* a chunk is cut from a mapping that is one chunk larger, less a page of the host */

#define MOST_DEVICES 64

struct block {
    size_t offset, size;
};

struct blocks {
    struct block *at; /* by offset */
    size_t count, room;
};

struct range {
    char *base;
    size_t size;
    int device; /* of the memory mapped into it; -1: none yet */
    struct range *next;
};

static struct {
    char *base;           /* address space of this device */
    size_t span;
    struct blocks blocks; /* what was allocated */
    struct blocks chunks; /* the address space reserved for it */
    size_t in_use, most;  /* bytes; the reserve included */
} devices[MOST_DEVICES];

/* The same counters in a memory-mapped file, which survives if the process is killed. */
struct books {
    int64_t devices, communicator_bytes, steps;
    int64_t most[MOST_DEVICES];
    int64_t ooms[MOST_DEVICES]; /* out-of-memory errors of PyTorch's allocator */
};
static struct books *books; /* NULL: no file */

static struct null_card card;
static int visible;
static struct range *reserved; /* address ranges of cuMemAddressReserve */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread int current;

struct null_counts null_counts;

static const char *property(const char *name) {
    const char *text = getenv("MEMCALC_NULL_PROPERTIES");
    size_t length = strlen(name);
    for (const char *at = text; at != NULL && (at = strstr(at, name)) != NULL; at += length)
        if ((at == text || at[-1] == ' ') && at[length] == '=') return at + length + 1;
    return NULL;
}

static size_t number(const char *name) {
    const char *text = property(name);
    return text == NULL ? 0 : strtoull(text, NULL, 10);
}

/* CUDA_VISIBLE_DEVICES as the driver reads it: ids up to the first invalid one. */
static int count_visible(int gpus) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (text == NULL) return gpus;
    int count = 0;
    while (count < gpus && *text != '\0') {
        char *end;
        long id = strtol(text, &end, 10);
        if (end == text || id < 0 || id >= gpus) break;
        count++;
        text = *end == ',' ? end + 1 : end;
    }
    return count;
}

static void begin(void) {
    card = (struct null_card){
        .major = number("major"),
        .minor = number("minor"),
        .multiprocessors = number("multiprocessors"),
        .threads = number("threads"),
        .blocks = number("blocks"),
        .gpus = number("gpus"),
        .memory = number("memory"),
        .reserve = number("reserve"),
        .shared_block = number("shared_block"),
        .shared_sm = number("shared_sm"),
        .l2 = number("l2"),
        .nccl_first = number("nccl_first"),
        .nccl_further = number("nccl_further"),
        .delayed = number("delayed") != 0,
    };
    const char *name = property("name"); /* the last property, because it contains spaces */
    snprintf(card.name, sizeof card.name, "%s", name == NULL ? "" : name);
    if (card.gpus > MOST_DEVICES) card.gpus = MOST_DEVICES;
    if (card.memory == 0) {
        fprintf(stderr, "memcalc: the null device was loaded without MEMCALC_NULL_PROPERTIES, so it has no card.\n");
        card.gpus = 0;
    }
    visible = count_visible(card.gpus);
    for (int i = 0; i < visible; i++) {
        size_t span = card.memory / CHUNK * CHUNK * ADDRESS_SPACE;
        char *base = mmap(NULL, span + CHUNK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) {
            fprintf(stderr, "memcalc: no address space for the null device; is there a limit (ulimit -v)?\n");
            visible = i;
            break;
        }
        devices[i].base = (char *)(((uintptr_t)base + CHUNK - 1) / CHUNK * CHUNK);
        devices[i].span = span;
        devices[i].in_use = devices[i].most = card.reserve;
    }
}

static void lock_books(void) {
    pthread_once(&once, begin);
    pthread_mutex_lock(&lock);
}

const struct null_card *null_card(void) {
    pthread_once(&once, begin);
    return &card;
}

/* PyTorch's kernels are compiled for a list of architectures, and CUB selects algorithms by them. A GPU loads the
 * newest one that is not newer than itself. The hook sets that architecture; before, it is the GPU's own. */
static int kernel_version;
API void null_set_kernel_version(int version) { kernel_version = version; }
int null_kernel_version(void) {
    return kernel_version != 0 ? kernel_version : 10 * null_card()->major + null_card()->minor;
}

int null_device_count(void) {
    pthread_once(&once, begin);
    return visible;
}

int null_current(void) { return current; }

int null_set_current(int device) {
    if (device < 0 || device >= null_device_count()) return INVALID_DEVICE;
    current = device;
    return SUCCESS;
}

/* ---- memory of the device */

static void add(int device, size_t size) {
    devices[device].in_use += size;
    if (devices[device].in_use > devices[device].most) devices[device].most = devices[device].in_use;
    if (books != NULL) {
        books->most[device] = (int64_t)devices[device].most;
        books->communicator_bytes = null_counts.communicator_bytes;
    }
}

static int commit(int device, size_t size) {
    if (devices[device].in_use + size > card.memory) return OUT_OF_MEMORY;
    add(device, size);
    return SUCCESS;
}

static void leave_books(void) { books = NULL; } /* a forked child has its own counters */

/* Write the counters to a file from now on: 64-bit integers, as in struct books. */
API int null_keep_books(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return 0;
    struct books *made = MAP_FAILED;
    if (posix_fallocate(file, 0, sizeof *made) == 0) /* on a full disk a hole would be SIGBUS */
        made = mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (made == MAP_FAILED) return 0;
    static bool forks;
    lock_books();
    if (!forks) forks = pthread_atfork(NULL, NULL, leave_books) == 0;
    made->devices = visible;
    for (int i = 0; i < visible; i++) made->most[i] = (int64_t)devices[i].most;
    made->communicator_bytes = null_counts.communicator_bytes;
    books = made;
    pthread_mutex_unlock(&lock);
    return 1;
}

/* Number of optimizer steps of the process, as counted by the hook. */
API void null_note_steps(int64_t steps) {
    lock_books();
    if (books != NULL) books->steps = steps;
    pthread_mutex_unlock(&lock);
}

/* Count an out-of-memory error, reported by the hook. */
API void null_note_oom(int device) {
    lock_books();
    if (books != NULL && device >= 0 && device < visible) books->ooms[device]++;
    pthread_mutex_unlock(&lock);
}

int null_commit(int device, size_t size) {
    lock_books();
    int result = device < 0 || device >= visible ? INVALID_DEVICE : commit(device, size);
    pthread_mutex_unlock(&lock);
    return result;
}

void null_release(int device, size_t size) {
    lock_books();
    devices[device].in_use -= size;
    pthread_mutex_unlock(&lock);
}

/* The first mapping at or after an offset. */
static size_t first_from(const struct blocks *blocks, size_t offset) {
    size_t low = 0, high = blocks->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks->at[middle].offset < offset) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int insert(struct blocks *blocks, struct block block) {
    if (blocks->count == blocks->room) {
        size_t room = blocks->room * 2 + 64;
        struct block *at = realloc(blocks->at, room * sizeof *at);
        if (at == NULL) return OUT_OF_MEMORY;
        blocks->at = at;
        blocks->room = room;
    }
    size_t index = first_from(blocks, block.offset);
    memmove(blocks->at + index + 1, blocks->at + index, (blocks->count - index) * sizeof *blocks->at);
    blocks->at[index] = block;
    blocks->count++;
    return SUCCESS;
}

static void erase(struct blocks *blocks, size_t index) {
    memmove(blocks->at + index, blocks->at + index + 1, (--blocks->count - index) * sizeof *blocks->at);
}

/* The lowest free range of a size in a chunk; the end of the chunk if there is none. */
static size_t room_in(const struct blocks *blocks, struct block chunk, size_t size) {
    size_t offset = chunk.offset, end = chunk.offset + chunk.size;
    for (size_t i = first_from(blocks, offset); i < blocks->count && blocks->at[i].offset < end; i++) {
        if (blocks->at[i].offset - offset >= size) return offset;
        offset = blocks->at[i].offset + blocks->at[i].size;
    }
    return end - offset >= size ? offset : end;
}

/* A new chunk, from the top of the address space down: the highest free range that fits, at any start, because
 * mappings are trimmed to whole chunks afterwards. */
static int take_chunk(int device, size_t size, size_t *offset) {
    struct blocks *chunks = &devices[device].chunks;
    size = (size + CHUNK - 1) / CHUNK * CHUNK;
    size_t wanted = size + CHUNK - HOST_PAGE, end = devices[device].span, i = chunks->count;
    while (i > 0 && end - (chunks->at[i - 1].offset + chunks->at[i - 1].size) < wanted) end = chunks->at[--i].offset;
    if (end < wanted) return OUT_OF_MEMORY;
    *offset = (end - wanted + CHUNK - 1) / CHUNK * CHUNK;
    return insert(chunks, (struct block){*offset, size});
}

/* The driver's choice of an address: the lowest chunk with enough free space, else a new chunk. */
static int place(int device, size_t size, void **out) {
    struct blocks *blocks = &devices[device].blocks, *chunks = &devices[device].chunks;
    size_t offset = 0;
    int found = 0;
    for (size_t i = 0; i < chunks->count && !found; i++) {
        offset = room_in(blocks, chunks->at[i], size);
        found = offset < chunks->at[i].offset + chunks->at[i].size;
    }
    if (!found && take_chunk(device, size, &offset) != SUCCESS) return OUT_OF_MEMORY;
    if (insert(blocks, (struct block){offset, size}) != SUCCESS) return OUT_OF_MEMORY;
    *out = devices[device].base + offset;
    return SUCCESS;
}

/* An empty chunk is unmapped. */
static void leave(int device, size_t offset) {
    struct blocks *blocks = &devices[device].blocks, *chunks = &devices[device].chunks;
    size_t index = first_from(chunks, offset + 1) - 1;
    struct block chunk = chunks->at[index];
    size_t first = first_from(blocks, chunk.offset);
    if (first == blocks->count || blocks->at[first].offset >= chunk.offset + chunk.size) erase(chunks, index);
}

int null_malloc(int device, size_t size, void **out) {
    *out = NULL;
    if (size == 0) return SUCCESS;
    size = (size + PAGE - 1) / PAGE * PAGE;
    lock_books();
    int result = device >= visible ? INVALID_DEVICE : commit(device, size);
    if (result == SUCCESS && (result = place(device, size, out)) != SUCCESS) devices[device].in_use -= size;
    pthread_mutex_unlock(&lock);
    return result;
}

static int owner(const char *address) {
    for (int i = 0; i < visible; i++)
        if (address >= devices[i].base && address < devices[i].base + devices[i].span) return i;
    return -1;
}

static struct block *around(int device, const char *address) {
    size_t offset = address - devices[device].base, next = first_from(&devices[device].blocks, offset + 1);
    struct block *block = devices[device].blocks.at + next - 1;
    return next > 0 && offset < block->offset + block->size ? block : NULL;
}

int null_free(void *address) {
    if (address == NULL) return SUCCESS;
    lock_books();
    int device = owner(address);
    struct block *block = device < 0 ? NULL : around(device, address);
    size_t size = 0;
    if (block != NULL && devices[device].base + block->offset == address) {
        size_t offset = block->offset;
        size = block->size;
        devices[device].in_use -= size;
        erase(&devices[device].blocks, block - devices[device].blocks.at);
        leave(device, offset);
    }
    pthread_mutex_unlock(&lock);
    if (size == 0) return INVALID_VALUE;
    null_clear(address, size);
    return SUCCESS;
}

void *null_reserve(size_t size) {
    char *base = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct range *range = malloc(sizeof *range);
    if (base == MAP_FAILED || range == NULL) return NULL;
    range->base = (char *)(((uintptr_t)base + PAGE - 1) / PAGE * PAGE);
    range->size = size;
    range->device = -1;
    lock_books();
    range->next = reserved;
    reserved = range;
    pthread_mutex_unlock(&lock);
    return range->base;
}

void null_unreserve(void *address, size_t size) {
    lock_books();
    for (struct range **at = &reserved; *at != NULL; at = &(*at)->next)
        if ((*at)->base == address) {
            struct range *gone = *at;
            *at = gone->next;
            munmap(gone->base, gone->size);
            free(gone);
            break;
        }
    pthread_mutex_unlock(&lock);
    (void)size;
}

static struct range *range_of(const char *address) {
    struct range *range = reserved;
    while (range != NULL && !(address >= range->base && address < range->base + range->size)) range = range->next;
    return range;
}

int null_device_of(const void *address) {
    pthread_once(&once, begin);
    int device = owner(address);
    if (device >= 0 || reserved == NULL) return device;
    pthread_mutex_lock(&lock);
    struct range *range = range_of(address);
    pthread_mutex_unlock(&lock);
    return range == NULL ? -1 : range->device;
}

void null_map(void *address, int device) {
    lock_books();
    struct range *range = range_of(address);
    if (range != NULL) range->device = device;
    pthread_mutex_unlock(&lock);
}

size_t null_extent(const void *address, void **base) {
    lock_books();
    int device = owner(address);
    struct block *block = device < 0 ? NULL : around(device, address);
    struct range *range = block == NULL ? range_of(address) : NULL;
    size_t size = block != NULL ? block->size : range != NULL ? range->size : 0;
    *base = block != NULL ? devices[device].base + block->offset : range != NULL ? range->base : NULL;
    pthread_mutex_unlock(&lock);
    return size;
}

size_t null_in_use(int device) {
    lock_books();
    size_t in_use = device < visible ? devices[device].in_use : 0;
    pthread_mutex_unlock(&lock);
    return in_use;
}

void null_communicator(int ranks) {
    lock_books();
    if (ranks > 1 && current < visible) {
        /* Buffers are outside PyTorch's allocator. If they do not fit, the balance is negative: the next allocation
         * fails, as PyTorch's does when NCCL took the memory first. */
        size_t size = null_counts.communicators++ == 0 ? card.nccl_first : card.nccl_further;
        null_counts.communicator_bytes += size;
        add(current, size);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- for the hook in the instrumented process, through ctypes */

API size_t null_most(int device) {
    lock_books();
    size_t most = device < visible ? devices[device].most : 0;
    pthread_mutex_unlock(&lock);
    return most;
}

API void null_read_counts(struct null_counts *out) {
    lock_books();
    *out = null_counts;
    pthread_mutex_unlock(&lock);
}

/* ---- the rest */

void *null_sibling(const char *soname) {
    Dl_info self;
    char path[4096];
    if (dladdr((void *)null_sibling, &self) == 0) return NULL;
    const char *slash = strrchr(self.dli_fname, '/');
    int folder = slash == NULL ? 0 : (int)(slash + 1 - self.dli_fname);
    snprintf(path, sizeof path, "%.*s%s", folder, self.dli_fname, soname);
    return dlopen(path, RTLD_NOW | RTLD_GLOBAL);
}

#define MOST_UNMODELLED 256
static const char *unmodelled[MOST_UNMODELLED];
static int unmodelled_count;

void null_unmodelled(const char *library, const char *function, int *seen) {
    (void)library;
    if (*seen) return;
    lock_books();
    if (!*seen && unmodelled_count < MOST_UNMODELLED) unmodelled[unmodelled_count++] = function;
    *seen = 1;
    pthread_mutex_unlock(&lock);
}

API const char *null_unmodelled_name(int index) { return index < unmodelled_count ? unmodelled[index] : NULL; }

/* CUdevice_attribute of the CUDA driver API reference. cudaDeviceAttr has the same numbers. */
int null_attribute(int attribute) {
    const struct null_card *c = null_card();
    switch (attribute) {
        case 1: return 1024;             /* MAX_THREADS_PER_BLOCK: on every GPU since Fermi */
        case 2: case 3: return 1024;     /* MAX_BLOCK_DIM_X, _Y */
        case 4: return 64;               /* MAX_BLOCK_DIM_Z */
        case 5: return 2147483647;       /* MAX_GRID_DIM_X */
        case 6: case 7: return 65535;    /* MAX_GRID_DIM_Y, _Z */
        case 8: return 48 * KIB;         /* MAX_SHARED_MEMORY_PER_BLOCK, without opting in */
        case 9: return 64 * KIB;         /* TOTAL_CONSTANT_MEMORY */
        case 10: return 32;              /* WARP_SIZE */
        case 12: case 82: return 65536;  /* MAX_REGISTERS_PER_BLOCK, _PER_MULTIPROCESSOR */
        case 16: return c->multiprocessors;
        case 33: return null_current() + 1; /* PCI_BUS_ID */
        case 38: return (int)c->l2;
        case 39: return c->threads;      /* MAX_THREADS_PER_MULTIPROCESSOR */
        case 75: return c->major;
        case 76: return c->minor;
        case 81: return (int)c->shared_sm;
        case 97: return (int)c->shared_block;
        case 106: return c->blocks;      /* MAX_BLOCKS_PER_MULTIPROCESSOR */
        case 111: return KIB;            /* RESERVED_SHARED_MEMORY_PER_BLOCK */
        /* Properties that are 0 for a data-center GPU. */
        case 18: return 0;               /* INTEGRATED */
        case 20: return 0;               /* COMPUTE_MODE: default */
        case 34: case 50: return 0;      /* PCI_DEVICE_ID, PCI_DOMAIN_ID */
        case 84: case 85: return 0;      /* MULTI_GPU_BOARD, its group */
        case 88: return 0;               /* PAGEABLE_MEMORY_ACCESS */
        case 100: return 0;              /* PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES */
        case 13: return 1500000;         /* CLOCK_RATE in kHz: read by cost models only, the same for every GPU */
        case 36: return 1500000;         /* MEMORY_CLOCK_RATE: the same */
        case 37: return 4096;            /* GLOBAL_MEMORY_BUS_WIDTH in bits: the same */
        case 120: return 0;              /* NUMA_CONFIG */
        case 132: return 0;              /* MULTICAST_SUPPORTED: symmetric memory then does without */
        case 134: return -1;             /* NUMA_ID */
        default: return 1;               /* features: present */
    }
}
