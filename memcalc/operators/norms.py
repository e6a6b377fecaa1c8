"""Fused LayerNorm and RMSNorm."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.operators.base import Base
from memcalc.programs import operator_workspaces
from memcalc.programs.tape import NEW, BackwardMemory, ForwardMemory, Node, Shape, Tensor
from memcalc.spec.recipes import DTYPE_BYTES


class Norms(Base):
    """Fused LayerNorm and RMSNorm."""

    def layer_norm(
        self,
        x: Tensor,
        module: str,
        width: str,
        tensors: tuple[str, ...] = ("weight", "bias"),
        out: Shape | None = None,
        heads: str = "",
        computed: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """LayerNorm; saves x, and mean and reciprocal deviation in fp32 (ATen native/cuda/layer_norm_kernel.cu).

        Args:
            x: the input.
            module: name of the norm.
            width: the last axis.
            tensors: its parameters.
            out: axes of the result, where they differ from those of x.
            heads: the second-to-last axis, if each of its entries has a norm with a separate weight.
            computed: the weight and bias, where they are computed from the parameters; saved.
        """
        return self._fused_norm(
            x, module, width, ("mean", "reciprocal deviation"), tensors, out, heads=heads, computed=computed
        )

    def rms_norm(
        self, x: Tensor, module: str, width: str, tensors: tuple[str, ...] = ("weight",), out: Shape | None = None
    ) -> Tensor:
        """torch.nn.RMSNorm, fused since torch 2.9; saves x and the reciprocal deviation in fp32."""
        return self._fused_norm(x, module, width, ("reciprocal deviation",), tensors, out)

    def _fused_norm(
        self,
        x: Tensor,
        module: str,
        width: str,
        statistics: tuple[str, ...],
        tensors: tuple[str, ...],
        out: Shape | None,
        *,
        heads: str = "",
        computed: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """A fused norm; `out`: the output's shape where it is viewed with other axes.

        Forward and backward copy an input that is not contiguous (`expect_contiguous`).
        """
        tape, citation = self.tape, "ATen native/cuda/layer_norm_kernel.cu: x, mean and rstd are saved"
        weight, dtype = (heads, width) if heads else (width,), self.parameters
        if self.autocast and dtype != "fp32" and not computed:  # autocast's fp32 list; arguments from the last on
            computed = tuple(self._in_fp32(module, name, weight) for name in reversed(tensors))[::-1]
            tensors, dtype = (), "fp32"
        if self.autocast:
            x = self.cast(x, "fp32")
        in_order: tuple[int, ...] = ()
        if x.strided:
            in_order = (tape.store(f"{module} input in order", x.shape, x.dtype, citation),)
        y = tape.new(f"{module} output", out or x.shape, x.dtype, "torch.nn.functional.layer_norm, rms_norm")
        kept = [tape.store(f"{module} {name}", x.shape[:-1], "fp32", citation) for name in statistics]
        item_bytes = DTYPE_BYTES[dtype]
        rule = operator_workspaces.named(
            operator_workspaces.norm_backward,
            rows=tuple(x.shape[: -2 if heads else -1]),
            width=width,
            item_bytes=item_bytes,
            buffers=len(computed or tensors),
        )
        scratch = tape.store(f"{module} partial sums", (), "uint8", citation, rule=rule)
        affine = computed or tuple(Tensor(-1, weight, self.parameters) for _ in tensors)
        # A frozen weight has no gradient, so no partial sums over rows are allocated.
        tensors = tensors if self.trains(module) else ()
        gradients = tuple(self.parameter_gradient(module, t, weight, self.parameters) for t in tensors)
        node = Node(
            module,
            (x, *computed),
            (y,),
            (x.storage, *kept, *(each.storage for each in computed)),
            (NEW, *(NEW if each.grad else None for each in computed)),
            forward=ForwardMemory(also=(*in_order, *kept), first=in_order),
            backward=BackwardMemory(
                prepares=tuple((index, 1) for index in in_order),
                temporaries=(scratch,) if tensors or any(each.grad for each in computed) else (),
            ),
            parameters=gradients,
            module=module,
        )
        node.variables = (Tensor(x.storage, x.shape, x.dtype), *tape.variables_of(node)[1 : 1 + len(kept)], *affine)
        tape.record(node)
        return y

    def _in_fp32(self, module: str, tensor: str, shape: Shape) -> Tensor:
        """Return a copy of a 16-bit parameter in fp32, which the norm saves; its gradient is cast back."""
        tape, trains = self.tape, self.trains(module)
        name = f"{module}.{tensor} in fp32"
        # A copy of a parameter is no activation: a temporary, as in the trace.
        copied = tape.store(name, shape, "fp32", "aten::_to_copy", component=Component.TEMPORARIES)
        y = Tensor(copied, shape, "fp32", grad=trains)
        gradients = (self.parameter_gradient(module, tensor, shape, self.parameters),) if trains else ()
        tape.record(Node(name, (), (y,), (), (), parameters=gradients))
        return y
