"""axolotl's autograd functions for linear layers with adapters: of q, k and v; of attention's output; of a gated MLP.

A function saves its input, the input after dropout, and copies of the adapters in the input's dtype; that of the MLP
also gate and up, which its backward overwrites with their gradients. So neither the adapters' results nor the MLP's
product are saved.

Source: axolotl 0.19 kernels/lora.py (LoRA_QKV, LoRA_O, LoRA_MLP, matmul_lora), kernels/swiglu.py and quantize.py.
"""

from __future__ import annotations

from typing import NamedTuple

from memcalc.operators.lora_linear import LoraLinear, scales
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import PREPARED, BackwardMemory, ForwardMemory, Node, Shape, Steps, Tensor
from memcalc.spec.finetuning import FUSED_PARTS

LORA = "axolotl 0.19 kernels/lora.py"
DEQUANTIZE = "axolotl 0.19 kernels/quantize.py, _ctypes_nf4_dequant"
ACTIVATION = "axolotl 0.19 kernels/swiglu.py, geglu.py"


class AdaptedLayer(NamedTuple):
    """A linear layer with an adapter."""

    module: str  # its name
    weight: Shape  # axes of its weight, [out, in]
    out: Shape  # axes of its output

    @property
    def adapter(self) -> tuple[tuple[str, Shape], ...]:
        """The adapter's matrices: module and axes."""
        return (f"{self.module}.lora_A", ("r", self.weight[1])), (f"{self.module}.lora_B", (self.weight[0], "r"))


class AdapterGradients(NamedTuple):
    """Storages of an adapter's gradients in a function's backward."""

    steps: Steps  # what computes them allocates and frees
    parameters: tuple[int, ...]  # the gradients in the adapter's dtype
    casts: Steps  # the engine's casts to that dtype
    product: int  # the output's gradient times B, live until backward returns


class FusedLora(LoraLinear):
    """The functions, with or without a 4-bit base model."""

    def fuses(self, part: str) -> bool:
        """Return whether one function runs this part of a layer, of `FUSED_PARTS`: if all its layers have adapters."""
        adapters = self.adapters
        return adapters is not None and part in adapters.fused and set(FUSED_PARTS[part]) <= set(adapters.targets)

    def fused_qkv(self, x: Tensor, name: str, layers: tuple[AdaptedLayer, ...]) -> tuple[Tensor, ...]:
        """Queries, keys and values. Backward always computes the input's gradient."""
        dropped = self._after_dropout(x, name)
        outputs = tuple(self._multiplied(x, dropped, layer) for layer in layers)
        adapters = [self._adapter_gradients(layer, x) for layer in layers]
        gradient, of_dropped = self._input_gradients(x, dropped, name)
        steps: list[tuple[int, int]] = [step for each in adapters for step in each.steps]
        for number, layer in enumerate(layers):
            whole, freed = self._dequantized_again(layer)
            steps += [*whole, *(((gradient, 1),) if not number else ()), *freed]
        steps += ((index, 1) for index in of_dropped)
        gradients = (gradient, *of_dropped)
        given = (x, dropped)
        return self._function(name, given, outputs, layers, adapters=adapters, steps=tuple(steps), prepared=gradients)

    def fused_output(self, x: Tensor, layer: AdaptedLayer) -> Tensor:
        """Attention's output projection. The gradient of the input after dropout is scaled into a further tensor."""
        name = layer.module
        dropped = self._after_dropout(x, name)
        y = self._multiplied(x, dropped, layer)
        adapter = self._adapter_gradients(layer, x)
        gradient, of_dropped = self._input_gradients(x, dropped, name)
        whole, freed = self._dequantized_again(layer)
        steps = (*adapter.steps, *whole, (gradient, 1), *freed)
        for index in of_dropped:
            unscaled = self.tape.store(f"{name}: gradient before scaling", x.shape, x.dtype, LORA)
            steps += ((unscaled, 1), (index, 1), (unscaled, -1))
        gradients = (gradient, *of_dropped)
        given = (x, dropped)
        return self._function(name, given, (y,), (layer,), adapters=[adapter], steps=steps, prepared=gradients)[0]

    def fused_mlp(self, x: Tensor, name: str, layers: tuple[AdaptedLayer, AdaptedLayer, AdaptedLayer]) -> Tensor:
        """down(act(gate(x)) * up(x)); saves gate and up.

        In backward the gradient of the product becomes the product, gate and up become their gradients. The input's
        gradient is computed only if needed.
        """
        tape = self.tape
        of_gate, of_up, of_down = layers
        dropped = self._after_dropout(x, name)
        gate, up = (self._multiplied(x, dropped, layer) for layer in (of_gate, of_up))
        hidden = tape.new(f"{name} product", gate.shape, gate.dtype, ACTIVATION, grad=False)
        tape.record(Node(f"{name} product", (gate, up), (hidden,), (), (None, None)))
        y = self._multiplied(hidden, hidden, of_down)
        again = tape.store(f"{name}: gradient of the product, then the product", hidden.shape, hidden.dtype, LORA)
        low = tape.store(f"{name}: gradient times lora_B", (*x.shape[:2], "r"), x.dtype, LORA)
        whole, freed = self._dequantized_again(of_down)
        steps = (*whole, (again, 1), *freed, (low, 1), (low, -1))
        adapters = [self._adapter_gradients(layer, x) for layer in layers]
        for each in reversed(adapters):
            steps += each.steps
        prepared: tuple[int, ...] = ()
        if x.grad:
            gradient, of_dropped = self._input_gradients(x, dropped, name)
            prepared = (gradient, *of_dropped)
            whole, freed = self._dequantized_again(of_up)
            steps += (*whole, (gradient, 1), *freed)
            whole, freed = self._dequantized_again(of_gate)
            steps += (*whole, *freed, *((index, 1) for index in of_dropped))
        (total,) = self._function(
            name,
            (x, dropped),
            (y,),
            layers,
            adapters=adapters,
            steps=(*steps, (again, -1)),
            prepared=prepared,
            kept=(gate.storage, up.storage),
        )
        tape.still_referenced(gate, up, hidden)  # variables of its forward
        return total

    def _after_dropout(self, x: Tensor, name: str) -> Tensor:
        """Return the input after dropout, which the function's layers share."""
        assert self.adapters is not None
        return self.dropout(x, f"{name} adapter dropout", self.adapters.dropout)

    def _multiplied(self, x: Tensor, dropped: Tensor, layer: AdaptedLayer) -> Tensor:
        """x W^T, to which dropped A^T B^T is added in place; casts of A and B are live until the end (matmul_lora)."""
        tape, adapters = self.tape, self.adapters
        assert adapters is not None
        module, tokens = layer.module, x.shape[:2]
        whole: tuple[Tensor, ...] = ()
        if adapters.quantizes(module):
            index, scale = self._dequantized(layer)
            whole = (Tensor(index, layer.weight, self.parameters, grad=False),)
            tape.record(Node(f"{module} dequantization", (), whole, (), (), forward=ForwardMemory(temporaries=scale)))
        y = tape.new(f"{module} output", layer.out, x.dtype, LORA, grad=False)
        self._run_matmul(module, (x, *whole), y)
        casts = self._adapter_casts(layer, x.dtype)
        for cast in casts:
            tape.record(Node(tape.storages[cast.storage].name, (), (cast,), (), ()))
        low = tape.new(f"{module}.lora_A output", (*tokens, "r"), x.dtype, LORA, grad=False)
        self._run_matmul(f"{module}.lora_A", (dropped, *casts[:1]), low)
        self._run_matmul(f"{module}.lora_B", (low, *casts), Tensor(y.storage, y.shape, y.dtype, grad=False))
        return y

    def _run_matmul(self, module: str, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        """Record a matmul within the function, which autograd does not see."""
        nothing = (None,) * len(inputs)
        self.tape.record(Node(module, inputs, (y,), (), nothing, module=module, multiplies=True))

    def _adapter_casts(self, layer: AdaptedLayer, dtype: str) -> tuple[Tensor, ...]:
        """Return new copies of A and B in another dtype, if theirs differs."""
        assert self.adapters is not None
        if self.adapters.dtype == dtype:
            return ()
        return tuple(
            self.tape.new(f"{module}.weight in {dtype}", shape, dtype, LORA, grad=False)
            for module, shape in layer.adapter
        )

    def _dequantized(self, layer: AdaptedLayer) -> tuple[int, tuple[int, ...]]:
        """Return storages for a 4-bit weight in its original dtype, and for its scales where these are quantized."""
        adapters, tape = self.adapters, self.tape
        assert adapters is not None
        assert adapters.quantized is not None
        whole = tape.store(f"{layer.module}.weight dequantized", layer.weight, self.parameters, DEQUANTIZE)
        if not adapters.quantized.nested:
            return whole, ()
        rule = operator_workspaces.named(scales, weight=layer.weight, block_size=adapters.quantized.block_size)
        name = f"{layer.module}.weight scales in fp32"
        return whole, (tape.store(name, (), "uint8", DEQUANTIZE, rule=rule),)

    def _dequantized_again(self, layer: AdaptedLayer) -> tuple[Steps, Steps]:
        """Return what backward allocates and frees before, and what it frees after it has multiplied by a weight."""
        assert self.adapters is not None
        if not self.adapters.quantizes(layer.module):
            return (), ()
        whole, scale = self._dequantized(layer)
        return ((whole, 1), *((index, sign) for index in scale for sign in (1, -1))), ((whole, -1),)

    def _adapter_gradients(self, layer: AdaptedLayer, x: Tensor) -> AdapterGradients:
        """Return the gradients of an adapter, computed in the input's dtype and cast by the engine."""
        adapters, tape, dtype = self.adapters, self.tape, x.dtype
        assert adapters is not None
        low = (*x.shape[:2], "r")
        product = tape.store(f"{layer.module}: gradient times lora_B", low, dtype, LORA)
        other = tape.store(f"{layer.module}: lora_A times input", low, dtype, LORA)
        parameters = tuple(
            self.parameter_gradient(module, "weight", shape, adapters.dtype) for module, shape in layer.adapter
        )
        made = parameters
        casts: Steps = ()
        if adapters.dtype != dtype:
            made = tuple(
                tape.store(f"{module}.weight gradient in {dtype}", shape, dtype, LORA)
                for module, shape in layer.adapter
            )
            casts = tuple(
                step for pair in zip(parameters, made, strict=True) for step in zip(pair, (1, -1), strict=True)
            )
        steps = ((product, 1), *((index, 1) for index in made), (other, 1), (other, -1))
        return AdapterGradients(steps, parameters, casts, product)

    def _input_gradients(self, x: Tensor, dropped: Tensor, name: str) -> tuple[int, tuple[int, ...]]:
        """Return storages for the gradients of the input and, with dropout, of the input after it."""
        names = (f"gradient of {name} input", f"gradient of {name} input after dropout")
        first, *others = (self.tape.store(each, x.shape, x.dtype, LORA) for each in names[: 1 if dropped is x else 2])
        return first, tuple(others)

    def _function(
        self,
        name: str,
        given: tuple[Tensor, Tensor],
        outputs: tuple[Tensor, ...],
        layers: tuple[AdaptedLayer, ...],
        *,
        adapters: list[AdapterGradients],
        steps: Steps,
        prepared: tuple[int, ...],
        kept: tuple[int, ...] = (),
    ) -> tuple[Tensor, ...]:
        """Record the function's node in the graph: its saved tensors and its backward.

        Args:
            name: its name.
            given: its input, and the input after dropout, or the same without.
            outputs: its results.
            layers: its layers.
            adapters: gradients of their adapters.
            steps: backward's allocations and frees, the adapters' products with gradients excepted.
            prepared: input gradients among them.
            kept: further saved tensors.
        """
        x = given[0]
        inputs = tuple(dict.fromkeys(given))
        results = tuple(Tensor(y.storage, y.shape, y.dtype) for y in outputs)
        casts = tuple(cast.storage for layer in layers for cast in self._adapter_casts(layer, x.dtype))
        parameters = tuple(index for each in adapters for index in each.parameters)
        node = Node(
            name,
            inputs,
            results,
            (*dict.fromkeys(tensor.storage for tensor in inputs), *kept, *casts),
            (PREPARED,) * len(inputs),
            forward=ForwardMemory(also=casts),
            backward=BackwardMemory(
                prepares=(*steps, *((each.product, -1) for each in adapters)),
                prepared=prepared if x.grad else (),
                summed=parameters,
                summed_later=tuple(step for each in adapters for step in each.casts),
                python_function=True,
            ),
            parameters=parameters,
            module=layers[0].module,
        )
        self.tape.record(node)
        return results
