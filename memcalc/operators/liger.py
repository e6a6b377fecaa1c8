"""Liger's kernels for norms, RoPE and gated MLPs (liger-kernel 0.8, arXiv 2410.10989)."""

from __future__ import annotations

from memcalc.operators.base import Base
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import IN_PLACE, SAME, BackwardMemory, ForwardMemory, Node, Tensor

SOURCE = "liger-kernel 0.8 ops/{}.py"


class LigerKernels(Base):
    """Liger's kernels, which save their inputs and write gradients in place."""

    def liger_rms_norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """RMSNorm; saves x and one reciprocal deviation per row. The input gradient overwrites the output gradient.

        The weight gradient is first summed per multiprocessor, in fp32.
        """
        tape, citation = self.tape, SOURCE.format("rms_norm")
        y = tape.new(f"{module} output", x.shape, x.dtype, citation)
        deviation = tape.store(f"{module} reciprocal deviation", x.shape[:-1], "fp32", citation)
        rule = operator_workspaces.named(operator_workspaces.liger_norm_backward, width=width)
        sums = tape.store(f"{module} sums by multiprocessor", (), "uint8", citation, rule=rule)
        trains = self.trains(module)
        gradients = (self.parameter_gradient(module, "weight", (width,), self.parameters),) if trains else ()
        node = Node(
            module,
            (x,),
            (y,),
            (x.storage, deviation),
            (SAME,),
            forward=ForwardMemory(also=(deviation,)),
            backward=BackwardMemory(temporaries=(sums,) if trains else ()),
            parameters=gradients,
            module=module,
        )
        weight = Tensor(-1, (width,), self.parameters)
        node.variables = (Tensor(x.storage, x.shape, x.dtype), weight, *tape.variables_of(node)[1:])
        tape.record(node)
        return y

    def liger_rope(self, x: Tensor, name: str) -> Tensor:
        """Apply RoPE in place, in backward too; saves the cos/sin cache."""
        turned = Tensor(x.storage, x.shape, x.dtype, grad=x.grad)
        self.tape.record(Node(f"rotated {name}", (x,), (turned,), (), (SAME,)))
        self.tape.also_saves(Tensor(-1, ("s", "d_h"), x.dtype))
        return turned

    def liger_swiglu(self, gate: Tensor, up: Tensor, name: str) -> Tensor:
        """silu(gate) * up without storing silu(gate); saves gate and up, which backward overwrites with gradients."""
        y = self.tape.new(name, up.shape, up.dtype, SOURCE.format("swiglu"))
        self.tape.record(Node(name, (gate, up), (y,), (gate.storage, up.storage), (IN_PLACE, IN_PLACE)))
        return y
