"""Tensors filled by slice assignment."""

from __future__ import annotations

from memcalc.operators.base import Base
from memcalc.programs.tape import NEW, BackwardMemory, Node, Shape, Tensor

COPY_SLICES = "torch 2.13 torch/csrc/autograd/functions/tensor.cpp, CopySlices"


class SliceAssignment(Base):
    """Tensors filled by slice assignment."""

    def written(self, parts: tuple[Tensor, ...], out: Shape, name: str) -> Tensor:
        """A new tensor into which the parts are copied one at a time (whole[...].copy_(part)).

        Backward of each copy clones the gradient of the full tensor, then that of the slice, and fills the slice with
        zeros. The zeros are omitted for the first part, since the tensor before it needs no gradient.
        """
        tape, dtype = self.tape, parts[0].dtype
        storage = tape.store(name, out, dtype, "aten::new_empty")
        whole: Tensor | None = None
        for part in parts:
            y = Tensor(storage, out, dtype)
            copied = f"{name}: gradient of a part"
            if whole is None:
                copy = tape.store(f"{name}: gradient, copied", out, dtype, COPY_SLICES)
                node = Node(copied, (part,), (y,), (), (NEW,), backward=BackwardMemory(prepares=((copy, 1),)))
            else:
                zeros = (tape.store(f"{name}: zeros", part.shape, dtype, COPY_SLICES),)
                node = Node(copied, (whole, part), (y,), (), (NEW, NEW), backward=BackwardMemory(temporaries=zeros))
            tape.record(node)
            whole = y
        assert whole is not None
        return whole
