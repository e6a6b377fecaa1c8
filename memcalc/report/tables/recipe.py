"""The words of the headline that are memcalc's own: what each recipe and each kind of modules means."""

from __future__ import annotations

from memcalc.report.grid import Column, TextTable
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES, Recipe
from memcalc.spec.spec import Spec


def recipe_grid(spec: Spec) -> TextTable:
    """Return the bytes per parameter of every recipe under Adam, copy by copy; that of the run is bold."""
    dtype = spec.training.dtype
    rows = [
        (
            name,
            *_copies(recipe, dtype if name != "fp32" else "fp32"),
            str(recipe.textbook_bytes),
            recipe.imitates,
        )
        for name, recipe in RECIPES.items()
    ]
    heads = ("weights", "gradients", "in fp32", "master", "moments", "total")
    columns = (Column("recipe"), *(Column(head, right=True) for head in heads))
    strong = frozenset(number for number, name in enumerate(RECIPES) if name == spec.training.recipe)
    title = f"Recipes: bytes per parameter under Adam, in {dtype}"
    return TextTable(title, (*columns, Column("imitates", wrap=True)), rows, strong)


def _copies(recipe: Recipe, dtype: str) -> tuple[str, ...]:
    """Bytes of each copy of a parameter; "-": there is none."""

    def size(precision: str | None) -> str:
        if precision is None:
            return "-"
        return str(DTYPE_BYTES[dtype if precision == "compute" else precision])

    copies = (recipe.weights, recipe.gradients, recipe.main_gradients, recipe.master)
    moment = size(recipe.moments)
    return *map(size, copies), f"{moment} + {moment}"


MODULES_TEXT = (
    "plain modules: the papers' block in plain PyTorch; what autograd saves depends on the modules.",
    "transformers modules: Hugging Face's implementation (--set implementation=huggingface).",
)
