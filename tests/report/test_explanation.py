import re

import pytest

from memcalc.errors import InputError
from memcalc.ledger.result import Result
from memcalc.ledger.row_drafts import phase_names
from memcalc.report.tables.explanation import chapters, explainable, parameter_grid, phase_runs
from memcalc.spec.loading import load

PHASES = phase_names(2)


@pytest.mark.parametrize(
    ("alive", "text"),
    [
        (PHASES, "always"),
        (("forward_1",), "forward_1"),
        (("forward_1", "loss_1", "backward_1", "forward_2"), "forward_1 to backward_1, forward_2"),
        ((), "never"),
    ],
)
def test_phases_in_a_row_are_one_run(alive: tuple[str, ...], text: str) -> None:
    assert phase_runs(alive, PHASES) == text


def test_a_component_alone(result: Result) -> None:
    (chapter,) = chapters(result, "activations", "GiB")

    assert chapter.heading == "activations: saved for backward; 0.03 GiB at the peak"
    assert chapter.groups[0].entries[0].formula == "2·b·s·d = 2 · 2 · 1024 · 2048 = 8,388,608 bytes each"


def test_every_row_is_explained_once(result: Result) -> None:
    entries = [
        entry for chapter in chapters(result, "all", "GiB") for group in chapter.groups for entry in group.entries
    ]

    assert len(entries) == len(result.ledger.rows)


def test_a_component_without_rows_is_said_to_be_empty(result: Result) -> None:
    (chapter,) = chapters(result, "inputs", "GiB")

    assert chapter.groups == []


@pytest.mark.parametrize(("word", "name"), [("Optimizer-State", "optimizer_state"), ("all", "all")])
def test_spellings(word: str, name: str) -> None:
    assert explainable(word) == name


def test_an_unknown_component_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=re.escape("--explain wieghts: unknown component. Choose all, ")):
        explainable("wieghts")


@pytest.mark.parametrize(("name", "total"), [("gpt3", "174,604,259,328"), ("llama-3-8b", "8,030,261,248")])
def test_the_parameter_table_sums_to_the_model(name: str, total: str) -> None:
    rows = parameter_grid(load(name).model).rows

    assert rows[-1][-1] == f"{sum(int(row[-1].replace(',', '')) for row in rows[:-1]):,}"
    assert rows[-1][-1] == total
