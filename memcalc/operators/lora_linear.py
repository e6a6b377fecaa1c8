"""Linear layers of a frozen base model: 4-bit quantized, and with LoRA adapters."""

from __future__ import annotations

from typing import Unpack

from memcalc.operators.base import DERIVATIVES
from memcalc.operators.fake_quantized_linear import FakeQuantizedLinear
from memcalc.operators.linear import LinearOptions
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import CAST, NEW, REDUCED, BackwardMemory, ForwardMemory, Node, Rule, Shape, Tensor
from memcalc.spec.finetuning import MAGNITUDE, QKV
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.workspaces import Script, ceil_div, nf4

DORA = "torchtune 0.6.1 modules/peft/dora.py, DoRALinear"
LITGPT = "LitGPT 0.5.13 litgpt/lora.py, LoRAQKVLinear"
BITSANDBYTES = "bitsandbytes 0.50 backends/cuda/ops.py, _dequant_linear_fallback; autograd/_functions.py, MatMul4Bit"

TORCHAO = "torchao 0.13 dtypes/nf4tensor.py, NF4Tensor.get_original_weight"

IN_REGISTERS, IN_REGISTERS_FP32 = 4, 7  # tokens: _GEMM_4BIT_CUSTOM_FLOOR_M; _gemm_4bit_use_custom_cuda


class LoraLinear(FakeQuantizedLinear):
    """Linear layers of bitsandbytes (QLoRA) and PEFT; without frozen parameters nn.Linear.

    Source: PEFT 0.21 tuners/lora/layer.py.
    """

    def linear(
        self,
        x: Tensor,
        module: str,
        weight: Shape,
        out: Shape,
        *,
        bias: bool,
        copies_gradient: bool = False,
        **options: Unpack[LinearOptions],
    ) -> Tensor:
        """See `FakeQuantizedLinear.linear`; adds the adapter's x A^T B^T, scaled.

        `copies_gradient`: whether the output's gradient is transposed, so each matmul's backward copies it.
        """
        adapters, copies = self.adapters, copies_gradient
        if adapters is None:
            return self._in_order(super().linear(x, module, weight, out, bias=bias, **options), module, copies=copies)
        if adapters.quantized is not None and adapters.quantizes(module):
            quantized = self._nf4_tensor if adapters.quantized.torchao else self._quantized
            base = quantized(x, module, weight, out)
        else:
            base = super().linear(x, module, weight, out, bias=bias, **options)
        base = self._in_order(base, module, copies=copies)
        if module.rpartition(".")[2] not in adapters.targets:
            return base
        if adapters.joined is not None:
            return self._litgpts_adapter(x, base, module, weight, out)
        return self._adapter(x, base, module, weight, out, copies=copies)

    def _in_order(self, y: Tensor, module: str, *, copies: bool) -> Tensor:
        """Return a matmul's output, with a copy of its gradient if its backward needs one."""
        return self.restrided_view(y, f"{module} output") if copies else y

    def _quantized(self, x: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """Dequantize the weight to the dtype of the matmul, in forward and again in backward; saves no activation.

        Forward dequantizes it in the dtype of the input, which autocast casts with it; backward in the weight's
        original dtype, then casts it to that of the output (_dequant_linear_fallback; MatMul4Bit.backward).
        """
        adapters, tape = self.adapters, self.tape
        assert adapters is not None
        assert adapters.quantized is not None
        given, multiplied = x, adapters.quantized.compute or self.compute
        result = self.compute if self.autocast else multiplied
        x = self.cast(x, multiplied, f"{module} input in {multiplied}")
        whole = tape.store(f"{module}.weight dequantized", weight, result, BITSANDBYTES)
        block_size, item_bytes = adapters.quantized.block_size, DTYPE_BYTES[multiplied]
        given_whole = {"weight": weight, "x": x.shape, "block_size": block_size, "item_bytes": item_bytes}
        rule = operator_workspaces.named(dequantized, **given_whole)
        made: tuple[int, ...] = (
            tape.store(f"{module}.weight dequantized in forward", weight, multiplied, BITSANDBYTES, rule=rule),
        )
        if multiplied != result:  # autocast casts both
            made = (*made, tape.store(f"{module} input in {result}", x.shape, result, BITSANDBYTES), whole)
        again: tuple[tuple[int, int], ...] = ((whole, 1),)
        original = adapters.quantized.original or self.parameters
        if original != result:
            wide = tape.store(f"{module}.weight dequantized in {original}", weight, original, BITSANDBYTES)
            again = ((wide, 1), (whole, 1), (wide, -1))
        prepares = again
        if adapters.quantized.nested:
            rule = operator_workspaces.named(scales, weight=weight, block_size=block_size)
            around_zero, shifted = (
                tape.store(f"{module}.weight {name}", (), "uint8", BITSANDBYTES, rule=rule)
                for name in ("scales around zero in fp32", "scales in fp32")
            )
            made = (around_zero, shifted, *made)
            # Backward adds the mean of the scales in place.
            prepares = ((shifted, 1), again[0], (shifted, -1), *again[1:])
        y = tape.new(f"{module} output", out, result, BITSANDBYTES)
        node = Node(
            module,
            (x,),
            (y,),
            (),
            (NEW if x.dtype == result else CAST,),
            forward=ForwardMemory(first=made),
            backward=BackwardMemory(prepares=prepares, between=((whole, -1),)),
            module=module,
            multiplies=True,
        )
        tape.record(node)
        y = self.cast(y, given.dtype, f"{module} output in {given.dtype}")
        tape.still_referenced(given, x)  # bitsandbytes/nn/modules.py, Linear4bit.forward: its argument and its cast
        return y

    def _nf4_tensor(self, x: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """Dequantize torchao's weight in forward and again in backward; saves no activation (nf4tensor.LinearNF4)."""
        tape = self.tape
        whole = self._nf4_dequantized(f"{module}.weight dequantized in forward", weight, x.dtype)
        again = tape.store(f"{module}.weight dequantized", weight, x.dtype, TORCHAO)
        steps = tape.store(f"{module}.weight dequantization", (), "uint8", TORCHAO, rule=_nf4_rule(weight, x.dtype))
        y = tape.new(f"{module} output", out, x.dtype, TORCHAO)
        node = Node(
            module,
            (x, whole),
            (y,),
            (),
            (NEW, None),
            backward=BackwardMemory(prepares=((steps, 1), (again, 1), (steps, -1)), between=((again, -1),)),
            module=module,
            multiplies=True,
        )
        tape.record(node)
        return y

    def _nf4_dequantized(self, name: str, weight: Shape, dtype: str) -> Tensor:
        """Return torchao's weight in a dtype; what computes it is allocated before it, and freed after."""
        scratch = self.tape.store(f"{name}: steps", (), "uint8", TORCHAO, rule=_nf4_rule(weight, dtype))
        whole = self.table(name, weight, dtype, TORCHAO)
        self.tape.nodes[-1].forward = ForwardMemory(first=(scratch,))
        return whole

    def _adapter(self, x: Tensor, base: Tensor, module: str, weight: Shape, out: Shape, *, copies: bool) -> Tensor:
        """result + B(A(dropout(x))) * scaling, in the adapter's dtype or, under autocast, the autocast dtype."""
        adapters, tape = self.adapters, self.tape
        assert adapters is not None
        quantized = adapters.quantizes(module)
        dtype = base.dtype
        if adapters.quantized is not None and quantized and not adapters.quantized.torchao:
            base = self.copy(base, f"{module} output, cloned", out)  # tuners/lora/bnb.py
        into = x
        if not (quantized and self.autocast):
            into = self.cast(x, adapters.input_dtype or adapters.dtype, f"{module} input for the adapter")
        dropped = self.dropout(into, f"{module} adapter dropout", adapters.dropout)
        low = self._matrix(dropped, f"{module}.lora_A", ("r", weight[1]), (*x.shape[:2], "r"))
        high = self._in_order(self._matrix(low, f"{module}.lora_B", (weight[0], "r"), out), module, copies=copies)
        if adapters.magnitudes:
            y = self._with_magnitude(base, high, module, weight)
            tape.still_referenced(x, into, low)
            return y
        scaled = self.scale(high, f"{module} adapter output")
        if quantized and not self.autocast:
            scaled = self.cast(scaled, dtype, f"{module} adapter output in {dtype}")
        total = self.add(base, scaled, f"{module} with adapter")
        y = total if quantized else self.cast(total, dtype, f"{module} with adapter in {dtype}")
        tape.still_referenced(x, into)  # references: the caller's argument, and the variable that replaces it
        return y

    def _with_magnitude(self, base: Tensor, high: Tensor, module: str, weight: Shape) -> Tensor:
        """base + (m - 1) * base + m * high * scaling, for the magnitude m over the norm of each row of W + B A.

        The adapter's matrix is its output for the identity, and stays allocated until the layer returns; no gradient
        flows through the norm. torchtune 0.6.1 modules/peft/dora.py, DoRALinear.forward.
        """
        adapters, tape, dtype = self.adapters, self.tape, base.dtype
        assert adapters is not None
        out, into = weight
        identity = self.table(f"{module} identity", (into, into), dtype, DORA)
        low = self.table(f"{module}.lora_A of the identity", (into, "r"), dtype, DORA, of=(identity,))
        matrix = self.table(f"{module} adapter as a matrix", (into, out), dtype, DORA, of=(low,))
        whole: tuple[Tensor, ...] = ()
        if adapters.quantizes(module):
            whole = (self._nf4_dequantized(f"{module}.weight dequantized for its norm", weight, dtype),)
        norm = self.table(f"{module} norms of rows", (out,), dtype, DORA, of=(matrix, *whole))
        names = (f"{module} adapter, scaled", f"{module} sum of weights")
        sums = tuple(tape.store(name, weight, dtype, DORA) for name in names)
        tape.nodes[-1].forward = ForwardMemory(temporaries=sums)
        share = tape.new(f"{module} magnitude over norm", (out,), dtype, DORA)
        trained = f"{module}.{MAGNITUDE}"
        gradient = self.parameter_gradient(trained, "weight", (out,), adapters.dtype)
        tape.record(Node(trained, (), (share,), (norm.storage,), (), parameters=(gradient,), module=trained))
        beyond = self.shift(share, f"{module} magnitude beyond 1")
        first = self._scaled_columns(base, beyond, f"{module} output, scaled")
        second = self.scale(self._scaled_columns(high, share, f"{module} adapter output, scaled"), f"{module} adapter")
        total = self.add(first, second, f"{module} change")
        y = self.add(total, base, f"{module} with adapter")
        tape.still_referenced(identity, low, matrix, *whole, norm, share, base, high, total)
        return y

    def _scaled_columns(self, x: Tensor, columns: Tensor, name: str) -> Tensor:
        """x times a number for each feature; saves both. The numbers' gradient is first as large as x, then summed."""
        saved = (x.storage, columns.storage) if x.grad else (x.storage,)
        return self.result(name, x.shape, x.dtype, (x, columns), saved, (NEW, REDUCED))

    def _litgpts_adapter(self, x: Tensor, base: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """pretrained + B(A(dropout(x))) * scaling; of q, k and v together B is a convolution over groups of ranks.

        LitGPT 0.5.13 litgpt/lora.py, LoRALinear.forward and LoRAQKVLinear.forward.
        """
        adapters = self.adapters
        assert adapters is not None
        dropped = self.dropout(x, f"{module} adapter dropout", adapters.dropout)
        tokens = x.shape[:-1]
        if module.rpartition(".")[2] == "qkv_proj":
            low = self._matrix(dropped, f"{module}.lora_A", ("r_qkv", weight[1]), (*tokens, "r_qkv"))
            high = self._convolution(low, f"{module}.lora_B")
            if len(adapters.joined or ()) < len(QKV):
                high = self._padded_with_zeros(high, f"{module} adapter output, zeros for the rest", out)
        else:
            low = self._matrix(dropped, f"{module}.lora_A", ("r", weight[1]), (*tokens, "r"))
            high = self._matrix(low, f"{module}.lora_B", (weight[0], "r"), out)
        scaled = self.scale(high, f"{module} adapter output")
        total = self.add(base, scaled, f"{module} with adapter")
        self.tape.still_referenced(x, base, scaled)
        return total

    def _convolution(self, x: Tensor, module: str) -> Tensor:
        """Apply a convolution of size 1 with a trained weight; save x. With grouped heads the parts are joined."""
        adapters, frozen, tape = self.adapters, self.parameters, self.tape
        assert adapters is not None
        weight: Shape = ("d_qkv", "r")
        self.parameters = adapters.dtype
        try:
            gradient = self.parameter_gradient(module, "weight", weight, adapters.dtype)
            dtype = self.compute if self.autocast else x.dtype
            casts = [] if adapters.dtype == dtype else [self.cast_weight(module, "weight", weight, gradient)]
        finally:
            self.parameters = frozen
        x = self.autocast_input(x, module)
        shape = (*x.shape[:-1], "d_qkv")
        y = tape.new(f"{module} output", shape, dtype, LITGPT)
        parts = tape.store(f"{module} outputs, in parts", shape, dtype, LITGPT)
        node = Node(
            module,
            (*casts, x),
            (y,),
            (x.storage, *(cast.storage for cast in casts)),
            (NEW,) * (len(casts) + 1),
            forward=ForwardMemory(first=(parts,) if adapters.joins_unequal_parts else ()),
            parameters=() if casts else (gradient,),
            module=module,
        )
        tape.record(node)
        return y

    def _padded_with_zeros(self, x: Tensor, name: str, out: Shape) -> Tensor:
        """Copy x into zeros (index_copy); save x, for its shape, and its index."""
        tape = self.tape
        y = tape.new(name, out, x.dtype, DERIVATIVES)
        where = tape.store(f"{name}: where", ("d_qkv",), "int64", LITGPT)
        tape.record(
            Node(name, (x,), (y,), (x.storage, where), (NEW,), forward=ForwardMemory(also=(where,), first=(y.storage,)))
        )
        return y

    def _matrix(self, x: Tensor, module: str, weight: Shape, out: Shape) -> Tensor:
        """One of the adapter's two linear layers, which train in the adapter's dtype."""
        adapters, frozen = self.adapters, self.parameters
        assert adapters is not None
        self.adapters, self.parameters = None, adapters.dtype
        try:
            return super().linear(x, module, weight, out, bias=False)
        finally:
            self.adapters, self.parameters = adapters, frozen


def _nf4_rule(weight: Shape, dtype: str) -> Rule:
    return operator_workspaces.named(nf4_dequantization, weight=weight, item_bytes=DTYPE_BYTES[dtype])


@operator_workspaces.most_of
def nf4_dequantization(values: operator_workspaces.Values, weight: Shape, item_bytes: int) -> Script:
    """indices of 8 bytes of a weight's n elements, and twice its n values: 8·n + 2·w·n, and its scales

    torchao 0.13 dtypes/nf4tensor.py, NF4Tensor.get_original_weight.
    """
    return nf4.dequantized(operator_workspaces.product(values, weight), item_bytes)


def dequantized(values: operator_workspaces.Values, weight: Shape, x: Shape, block_size: int, item_bytes: int) -> int:
    """bytes of the whole weight; none for up to 4 tokens, or 7 in fp32: their kernel dequantizes in registers

    bitsandbytes 0.50 backends/cuda/ops.py, gemm_4bit. Some GPUs have kernels for up to 1536 tokens with some shapes.
    """
    tokens = operator_workspaces.product(values, x) // values[weight[1]]
    most = IN_REGISTERS_FP32 if item_bytes == DTYPE_BYTES["fp32"] else IN_REGISTERS
    if tokens <= most and values[weight[1]] % block_size == 0:
        return 0
    return item_bytes * operator_workspaces.product(values, weight)


def scales(values: operator_workspaces.Values, weight: Shape, block_size: int) -> int:
    """4·(n/block), rounded up: the 8-bit scales, dequantized to fp32

    bitsandbytes 0.50 functional.py, dequantize_4bit.
    """
    return 4 * ceil_div(operator_workspaces.product(values, weight), block_size)
