"""What a program learns from the device where kernels compute nothing: small integers are true, unknown masks full."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from memcalc.nullcuda import run
from memcalc.nullcuda.result import DONE
from tests.nullcuda.scripts import Ended, Script


@pytest.fixture(scope="module")
def ended(run_all: Callable[..., dict[str, Ended]]) -> dict[str, Ended]:
    """How each script that is run with the usual options ended."""
    return run_all(
        {
            "same": SAME,
            "routed": ROUTED,
            "reads": READS,
            "reused": REUSED,
            "expanded": EXPANDED,
            "legacy": LEGACY,
            "mapped": MAPPED,
            "finite": FINITE,
            "stale": STALE,
            "others": OTHERS,
        }
    )


MASKS = """
import json, torch
x = torch.randn(64, 8, device="cuda", requires_grad=True)
mask = torch.randn(64, 8, device="cuda") > 0
picked = x[mask]
picked.sum().backward()
filled = torch.zeros(64, 8, device="cuda")
filled[mask] = picked.detach()
print(json.dumps([list(picked.shape), list(mask.nonzero().shape), len(torch.where(mask)), list(x.masked_select(mask).shape),
                  bool(mask.all()), bool(mask.any()), bool(torch.isnan(x).any()), list(x.grad.shape), mask.nonzero().stride()]))
"""


@pytest.mark.long
def test_unknown_masks_are_full(dry_run_here: Path, null_python: str) -> None:
    """64 x 8 = 512 elements; an index has two numbers, which the kernel stores by dimension: stride 512 between them."""
    (dry_run_here / "script.py").write_text(MASKS)
    with (dry_run_here / "out").open("w") as out:
        result = run([null_python, "script.py"], "h100-80gb", stdout=out)

    assert result.outcome == DONE
    found = json.loads((dry_run_here / "out").read_text())
    assert found == [[512], [512, 2], 2, [512], True, False, False, [64, 8], [1, 512]]
    assert "elements were selected by an unknown mask" in " ".join(result.warnings)


SAME = """
import json, torch, torch.nn.functional as F

def values(device):
    mask = torch.ones(2, 64, dtype=torch.long).to(device)
    padded = torch.ones(2, 64, dtype=torch.long, device=device).tril(10)
    grid = torch.tensor([[1, 4, 6], [2, 8, 8]], device=device)
    lengths = torch.empty(3, dtype=torch.int32, device=device)
    lengths[0] = 0
    lengths[1:] = grid.prod(-1).cumsum(0)
    experts = torch.arange(24, device=device).remainder(5).view(12, 2)
    labels = torch.full((8,), -100, device=device)
    labels[3:5] = 7
    counts = torch.bincount(experts.flatten(), minlength=8)
    turned = torch.zeros_like(grid).index_add_(0, torch.tensor([1], device=device), grid[:1])
    turned[turned > 3] = -1
    turned.t()[0] += 5
    host = torch.zeros(2, 3, dtype=torch.long)
    host.copy_(turned)
    rows = torch.randn(6, 4, device=device)
    yield (mask.sum() == mask.numel()).item(), bool(mask.all()), bool(padded.all()), padded.sum(-1).tolist()
    yield grid.prod(-1).tolist(), [list(part.shape) for part in torch.randn(152, 2, device=device).split(grid.prod(-1).tolist())]
    yield torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).tolist(), lengths.cpu().tolist(), int(lengths.diff().max())
    yield counts.tolist(), F.one_hot(experts, 8).sum((0, 1)).tolist(), (counts > 0).nonzero().tolist()
    yield torch.histc(experts.flatten().int() if device == "cuda" else experts.flatten().float(), bins=8, min=0, max=7).tolist()
    yield [list(part) for part in (torch.where(experts == 3)[0].tolist(), experts.flatten().argsort(stable=True).tolist())]
    yield (labels != -100).sum().item(), torch.unique(labels).tolist(), labels[labels != -100].tolist(), torch.equal(labels, labels.clone())
    yield turned.tolist(), host.tolist(), torch.isin(turned, torch.tensor([5], device=device)).tolist()
    yield list(rows[torch.tensor([True, False, True, True, False, False], device=device)].shape), torch.tensor(2.5, device=device).item()
    rewards = torch.tensor([1.0, 2.0, 4.5], device=device)
    yield lengths.float().mean().item(), (rewards - rewards.mean()).tolist(), bool((rewards > 4).any())
    yield (torch.tensor(True, device=device) | (rows.sum() > 0)).item(), [int(number) for number in torch.arange(3, device=device)]

class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))

kept = torch.cuda.memory_allocated()
on_cpu, on_card = list(values("cpu")), list(values("cuda"))
with Watching(), Watching():
    watched = list(values("cuda"))
with torch.inference_mode():
    inferred = list(values("cuda"))
print(json.dumps([on_cpu, on_card, watched, inferred]))
assert torch.cuda.memory_allocated() == kept
"""


def test_small_integers_have_the_values_that_a_cpu_computes(ended: dict[str, Ended]) -> None:
    """The same program on both: masks, image sizes, sequence lengths, counts of experts, labels, writes into views.

    Again where modes of Python see every operator, and in inference mode.
    """
    same = ended["same"]

    assert same.code == 0
    on_cpu, on_card, watched, inferred = json.loads(same.out)
    assert on_card == on_cpu
    assert watched == on_cpu
    assert inferred == on_cpu
    assert same.run.warnings == ()


ROUTED = """
import json, torch
experts = torch.randn(64, 8, device="cuda").topk(2, dim=-1).indices
counts = torch.bincount(experts.flatten(), minlength=8)
token = torch.softmax(torch.randn(3, 1000, device="cuda"), -1).multinomial(1)
order = torch.randn(100, 6, device="cuda").sort(dim=0).indices
few = (torch.randn(300, 8, device="cuda").mean(0, keepdim=True) * torch.ones(6, 8, device="cuda")).topk(2).indices
given = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]], device="cuda").topk(1).indices
print(json.dumps([counts.tolist(), token.tolist(), sorted(order[:, 0].tolist()), experts[0].tolist(),
                  few.flatten().bincount(minlength=8).tolist(), given.tolist()]))
"""


@pytest.mark.parametrize(
    ("routing", "counts", "tokens", "few"),
    [
        ("balanced", [16] * 8, [[500], [501], [502]], [1, 1, 1, 1, 2, 2, 2, 2]),
        pytest.param(
            *("worst-case", [0, 0, 0, 0, 64, 64, 0, 0], [[500]] * 3, [0, 0, 0, 0, 6, 6, 0, 0]), marks=pytest.mark.long
        ),
    ],
)
def test_unknown_scores_choose_by_rule(
    ended: dict[str, Ended],
    dry_run: Script,
    dry_run_here: Path,
    routing: str,
    counts: list[int],
    tokens: list[list[int]],
    few: list[int],
) -> None:
    """64 tokens with 2 of 8 experts each: 16 for each expert, or all 64 for the same two.

    Also where the scores are as few as tensors with values have: 6 tokens, 12 choices among 8. Known scores choose.
    """
    if routing == "balanced":  # as in a run without this option
        result, out = ended["routed"].run, ended["routed"].out
    else:
        result = dry_run(ROUTED, routing=routing)
        out = (dry_run_here / "out").read_text()

    found = json.loads(out)
    assert found == [counts, tokens, list(range(100)), [4, 5], few, [[1], [0]]]
    assert [warning.partition(":")[0] for warning in result.warnings] == [
        "experts or tokens were chosen by unknown scores 4 times"
    ]


READS = """
import torch
x = torch.randn(1024, device="cuda")
for _ in range(3):
    x.sum().item()
total = x.sum()
if total > 1 or torch.arange(3, device="cuda")[2] == 2:
    print("known")
"""


def test_unknown_reads_are_said_once_a_line(ended: dict[str, Ended]) -> None:
    reads = ended["reads"]

    assert reads.out == "known\n"
    (process,) = reads.run.processes
    assert [(read.location, read.count) for read in process.unknown_reads] == [
        ("reads.py:5 <module>", 3),
        ("reads.py:7 <module>", 1),
    ]
    assert process.small_reads == 4
    assert reads.run.warnings[0] == (
        "reads.py:5 <module> read a value that kernels should have computed 3 times: the null device "
        "returned 0, so branches on it may differ on a real GPU"
    )


REUSED = """
import torch
first = torch.full((1000,), 7, device="cuda")
address = first.data_ptr()
del first
again = torch.empty(1000, dtype=torch.long, device="cuda")
assert again.data_ptr() == address
print(again.max().item())
large = torch.arange(1 << 21, device="cuda")
print((large == 5).sum().item(), large[5].item())
"""


def test_values_go_with_their_tensor(ended: dict[str, Ended]) -> None:
    """Memory that is used again has none of the old, and tensors of over a million elements have none at all."""
    reused = ended["reused"]

    assert reused.out.split() == ["0", "0", "0"]
    assert sum(read.count for read in reused.run.processes[0].unknown_reads) == 3


EXPANDED = """
import torch
tokens = torch.zeros(1, 1024, dtype=torch.long)
tokens[:, :576] = 5
image = (tokens.to("cuda") == 5).unsqueeze(-1).expand(1, 1024, 2048)
hidden = torch.randn(1, 1024, 2048, device="cuda", requires_grad=True)
features = torch.randn(576, 2048, device="cuda", requires_grad=True)
hidden.masked_scatter(image, features).sum().backward()
print(hidden.masked_select(image).numel(), tuple(features.grad.shape))
"""


def test_an_expanded_mask_has_the_values_of_what_it_repeats(ended: dict[str, Ended]) -> None:
    """576 of 1,024 tokens stand for an image: two million elements, of a thousand that are stored."""
    assert ended["expanded"].out.split("\n")[0] == f"{576 * 2048} (576, 2048)"


SORTS = """
import torch
for n in (100, 5000, 100_000):
    torch.sort(torch.zeros(n, device="cuda"), stable=True)
    torch.cumsum(torch.zeros(n, device="cuda"), 0)
    torch.topk(torch.zeros(n, device="cuda"), 5)
    torch.unique(torch.zeros(n, dtype=torch.long, device="cuda"))
    torch.nn.Embedding(100, 8, device="cuda")(torch.zeros(n, dtype=torch.long, device="cuda")).sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.long
@pytest.mark.parametrize("card", ["rtx-4090", "b200", "v100-16gb"])
def test_sorts_run_on_gpus_without_kernels_of_their_own(dry_run_here: Path, null_python: str, card: str) -> None:
    """CUB knows the architectures that PyTorch was compiled for: 8.9 takes the kernels of 8.6."""
    (dry_run_here / "script.py").write_text(SORTS)

    assert run([null_python, "script.py"], card).outcome == DONE


LEGACY = """
import torch
for like in (torch.arange(3, device="cuda"), torch.zeros(4, device="cuda"), torch.zeros(999, device="cuda")):
    made = (like.new_tensor([1, 2]), like.new([1, 2]), like.new(2, 3), like.new_zeros(2))
    assert all(each.is_cuda and each.dtype == like.dtype for each in made)
    assert made[0].tolist() == made[1].tolist() == [1, 2]
    assert like.new_tensor([1.5], dtype=torch.float64, device="cpu").item() == 1.5
"""


def test_tensors_make_others_of_their_type(ended: dict[str, Ended]) -> None:
    """Those methods of PyTorch look at the highest dispatch key, which must not be the one that values have."""
    assert ended["legacy"].code == 0


MAPPED = """
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

def padded(device):
    mask = torch.ones(2, 8, dtype=torch.long, device=device).tril(5).bool()
    batch, key = torch.arange(2, device=device), torch.arange(8, device=device)
    over_keys = torch.vmap(lambda b, k: mask[b, k], in_dims=(None, 0))
    with TransformGetItemToIndex():
        return torch.vmap(over_keys, in_dims=(0, None))(batch, key).tolist()

assert padded("cuda") == padded("cpu")
"""


def test_masks_that_vmap_makes_are_known(ended: dict[str, Ended]) -> None:
    """transformers 4.53 to 4.57 make a padded mask so, with a higher-order operator."""
    assert ended["mapped"].code == 0


FINITE = """
import torch
gradient = torch.randn(1000, device="cuda", dtype=torch.bfloat16)
norm = gradient.float().norm()
known = torch.tensor([1.0, float("inf"), float("nan")], device="cuda")
overflows = torch.isfinite(gradient.amax()).logical_and(torch.isfinite(gradient.amin())).logical_not()
print(overflows.item(), (~norm.isfinite()).any().item(), gradient.isfinite().all().item(), known.isfinite().tolist(),
      torch.isinf(norm).item(), torch.isnan(norm).item(), torch.arange(2, device="cuda").isfinite().tolist())
"""


def test_what_no_kernel_computed_is_finite(ended: dict[str, Ended]) -> None:
    """DeepSpeed skips each step with a gradient that is not, and would come to none."""
    finite = ended["finite"]

    assert finite.code == 0
    assert finite.out.strip() == "False False True [True, False, False] False False [True, True]"


STALE = """
import torch
big = torch.randn(300, device="cuda")
for make in (lambda: torch.randn(300).cuda(), lambda: torch.tensor(7.0).cuda(), lambda: torch.arange(9).cuda()):
    given = make()
    address = given.data_ptr()
    del given
    total = big.sum()
    assert total.data_ptr() == address
    print(total.item())
"""


def test_what_the_host_wrote_goes_with_its_tensor(ended: dict[str, Ended]) -> None:
    """The sum takes the memory of what was freed, and has nothing of its bytes."""
    stale = ended["stale"]

    assert stale.out.split() == ["0.0"] * 3
    assert sum(read.count for read in stale.run.processes[0].unknown_reads) == 3


OTHERS = """
import torch

@torch.library.custom_op("others::update", mutates_args=("state", "parts"))
def update(gradient: torch.Tensor, state: torch.Tensor, parts: list[torch.Tensor]) -> None:
    pass  # launches a kernel

for dtype in (torch.long, torch.float32):
    for n in (4, 300):
        state, part = torch.ones(2, n, dtype=dtype, device="cuda"), torch.ones(n, dtype=dtype, device="cuda")
        update(torch.randn(4, device="cuda"), state, [part])
        print(state.sum().item(), part[0].item(), (state > 1).any().item())
"""


def test_what_operators_of_other_packages_write_is_unknown(ended: dict[str, Ended]) -> None:
    """bitsandbytes' 8-bit optimizers are such an operator. What is computed from it is unknown, too."""
    others = ended["others"]

    assert others.code == 0
    assert sum(read.count for read in others.run.processes[0].unknown_reads) == 3 * 4
