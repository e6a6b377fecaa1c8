"""Programs of transformers that read values of the device: masks, generation, images of several sizes, experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from memcalc.nullcuda.result import DONE
from tests.nullcuda.scripts import Ended, Script


@pytest.fixture(scope="module")
def ended(run_all: Callable[..., dict[str, Ended]]) -> dict[str, Ended]:
    """How each script that is run with the usual options ended."""
    return run_all({"text": TEXT, "experts": EXPERTS}, "torch,transformers")


PRELUDE = """
import json, sys, torch, transformers
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
SIZES = dict(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=16384)

def peak_of(call):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before
"""

TEXT = (
    PRELUDE
    + """
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(eos_token_id=2, pad_token_id=0, **SIZES)).cuda().bfloat16()
ids = torch.randint(3, 1000, (1, 16384)).cuda()
def step(mask):
    model(input_ids=ids, attention_mask=mask).logits.sum().backward()
    model.zero_grad()
step(None)
full, padded = torch.ones_like(ids), torch.ones_like(ids)
padded[0, :7] = 0
peaks = [peak_of(lambda: step(mask)) for mask in (None, full, padded)]
prompt = torch.randint(3, 1000, (2, 16)).cuda()
shapes = [list(model.generate(prompt, max_new_tokens=8, do_sample=sample).shape) for sample in (False, True)]
model.generation_config.eos_token_id = [500, 501]
shapes.append(list(model.generate(prompt, max_new_tokens=8).shape))
print(json.dumps([peaks, shapes]))
"""
)


@pytest.mark.long
def test_a_full_mask_is_none_and_generation_ends(ended: dict[str, Ended]) -> None:
    """Without attention_mask and with a full one of 16,384 tokens the peaks are byte-exact.

    A padded one keeps a mask of s x s.

    Generation ends after 8 tokens; or where the tokens that unknown scores choose, 500 and 501, end a sequence.
    """
    text = ended["text"]

    assert text.code == 0
    (none, full, padded), shapes = json.loads(text.out)
    assert full == none
    assert padded - none >= 16384**2  # a byte for each pair of positions at least
    assert shapes == [[2, 24], [2, 24], [2, 17]]
    assert [read.location for process in text.run.processes for read in process.unknown_reads] == []


# Bytes of the tensors that live, as operators give them: what kernels take inside differs between devices.
LIVE = (
    PRELUDE
    + """
import weakref
from torch.utils._python_dispatch import TorchDispatchMode
device = sys.argv[1]

class Live(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.now, self.most, self.known = 0, 0, set()
    def forget(self, key, size):
        self.now -= size
        self.known.discard(key)
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.device.type == device:
                storage = each.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return found

config = transformers.LlamaConfig(eos_token_id=None, pad_token_id=0, attn_implementation="eager", **SIZES)
model = transformers.LlamaForCausalLM(config).to(device)
prompt = torch.randint(3, 1000, (4, 16)).to(device)

def generated():
    return model.generate(prompt, max_new_tokens=32, do_sample=True)

def grpo(optimizer):
    for _ in range(2):
        with torch.no_grad():
            tokens = generated()
            rewards = (tokens[:, 16:] % 2 == 0).float().mean(-1)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        if not torch.isfinite(advantages).all():
            raise ValueError("rewards")
        scores = model(input_ids=tokens).logits[:, 15:-1].log_softmax(-1)
        chosen = scores.gather(-1, tokens[:, 16:, None]).squeeze(-1)
        ended = (tokens[:, 16:] == 0).int().cumsum(-1) > 0
        (-(chosen * advantages[:, None])[~ended]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def evaluated():
    model.eval()
    words = [row.tolist() for row in generated()]
    assert all(len(row) == 48 for row in words)
    with torch.no_grad():
        return model(input_ids=torch.tensor(words, device=device)).logits.argmax(-1).eq(prompt[0, 0]).sum().item()

peaks = {}
for name, call in (("generate", generated), ("grpo", lambda: grpo(torch.optim.AdamW(model.parameters(), foreach=False))), ("evaluate", evaluated)):
    with Live() as live:
        call()
    peaks[name] = live.most
print(json.dumps(peaks))
"""
)


@pytest.mark.long
def test_programs_that_generate_hold_what_they_hold_with_values(dry_run: Script, dry_run_here: Any) -> None:
    """Generation of 32 tokens, two steps of GRPO, evaluation with generation: on the null device and on the CPU.

    On the CPU every value is real. The tokens differ, and so do the few that end a sequence: 0.1 %.
    """
    result = dry_run(LIVE, "cuda")
    on_card = json.loads((dry_run_here / "out").read_text())
    assert dry_run(LIVE, "cpu").outcome == DONE
    on_cpu = json.loads((dry_run_here / "out").read_text())

    assert result.outcome == DONE
    assert on_card == pytest.approx(on_cpu, rel=0.001)
    assert min(on_card.values()) > 500_000  # weights of 64 x 1000 x 4 bytes and more are read, caches are held


IMAGES = (
    PRELUDE
    + """
rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
vision = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=64, window_size=112,
              fullatt_block_indexes=[1])
config = transformers.Qwen2_5_VLConfig(text_config=SIZES | {"rope_parameters": rope}, vision_config=vision, image_token_id=990,
                                       video_token_id=991, vision_start_token_id=992, vision_end_token_id=993)
model = transformers.Qwen2_5_VLForConditionalGeneration(config).to(sys.argv[1])
grid = torch.tensor([[1, 8, 12], [1, 16, 4]], device=sys.argv[1])
ids = torch.randint(0, 900, (1, 48), device=sys.argv[1])
ids[0, 3] = ids[0, 28] = 992
ids[0, 4:28] = ids[0, 29:45] = 990
shapes = []
for module in model.modules():
    module.register_forward_hook(lambda module, given, out: shapes.append(list(out.shape)) if isinstance(out, torch.Tensor) else None)
pixels = torch.randn(160, 3 * 2 * 14 * 14, device=sys.argv[1])
model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == 990).int(), labels=ids,
      pixel_values=pixels, image_grid_thw=grid).loss.backward()
print(json.dumps(shapes))
"""
)


@pytest.mark.long
def test_images_of_several_sizes_are_split_as_on_a_cpu(dry_run: Script, dry_run_here: Any, null_python: str) -> None:
    """Qwen2.5-VL reads the sizes of its images from the device (grid_thw); every module gives the CPU's shapes."""
    result = dry_run(IMAGES, "cuda")
    on_card = json.loads((dry_run_here / "out").read_text())
    assert dry_run(IMAGES, "cpu").outcome == DONE
    on_cpu = json.loads((dry_run_here / "out").read_text())

    assert on_card == on_cpu
    assert len(on_card) > 50
    assert result.outcome == DONE
    assert result.processes[0].unknown_reads == ()


EXPERTS = (
    PRELUDE
    + """
config = transformers.Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, **SIZES)
model = transformers.Qwen3MoeForCausalLM(config).cuda()
model.set_experts_implementation("eager")
rows = []
original = torch.nn.functional.linear
def linear(given, weight, *rest):
    if weight.shape == (64, 64) and given.dim() == 2:
        rows.append(len(given))
    return original(given, weight, *rest)
experts = sys.modules[type(model.model.layers[0].mlp.experts).__module__]
experts.nn.functional.linear = linear
ids = torch.randint(3, 1000, (2, 64)).cuda()
model(input_ids=ids, labels=ids).loss.backward()
print(json.dumps(rows))
"""
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("routing", "rows"),
    [
        pytest.param("balanced", [32] * 8 * 2, id="balanced"),
        pytest.param("worst-case", [128] * 2 * 2, id="worst-case", marks=pytest.mark.long),
    ],
)
def test_experts_get_balanced_counts_or_all_tokens(
    ended: dict[str, Ended], dry_run: Script, dry_run_here: Any, routing: str, rows: list[int]
) -> None:
    """128 tokens with 2 of 8 experts each, in 2 layers: 32 rows for each expert, or all 128 for the same two."""
    if routing == "balanced":  # as in a run without this option
        result, out = ended["experts"].run, ended["experts"].out
    else:
        result = dry_run(EXPERTS, routing=routing)
        out = (dry_run_here / "out").read_text()

    assert result.outcome == DONE
    assert json.loads(out) == rows
    assert "experts or tokens were chosen by unknown scores 2 times" in " ".join(result.warnings)
