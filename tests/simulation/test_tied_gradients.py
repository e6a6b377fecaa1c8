"""The gradients of a tied embedding and head meet in one tensor; autograd's input buffer decides how many exist."""

import pytest

import memcalc

# One layer and few tokens: backward is highest where the embedding's gradient joins the head's.
SIZES = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 50_000}
TABLE = 50_000 * 64


@pytest.mark.parametrize(
    ("recipe", "tables"),
    [
        # What waits is the transpose of a product, a view: embedding's, and a third for the sum of both, in bf16.
        (
            "pure",
            {
                "embed_tokens gradient before the sum": 2 * TABLE,
                "embed_tokens sum with the tied head's gradient": 2 * TABLE,
            },
        ),
        # What waits is the head's cast to fp32, to which the embedding's is added in place.
        ("amp", {"embed_tokens gradient before the sum": 4 * TABLE}),
    ],
)
def test_the_sum_is_a_third_tensor_unless_autocast_copied_the_first_one(recipe: str, tables: dict[str, int]) -> None:
    run = {"model": SIZES, "training": {"b": 1, "s": 8, "recipe": recipe}}

    alive = memcalc.estimate(run).ledger.live_rows("backward_1")

    assert {
        row.tensor: row.bytes for row in alive if "before the sum" in row.tensor or "sum with" in row.tensor
    } == tables
