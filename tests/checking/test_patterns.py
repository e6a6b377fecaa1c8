"""Patterns of paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.checking.patterns import alternatives, matches


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a.yaml", "a.yaml", True),
        ("./a.yaml", "a.yaml", True),
        ("*.yaml", "a.yaml", True),
        ("*.yaml", "b/a.yaml", False),  # * stays within a directory
        ("**/*.yaml", "a.yaml", True),
        ("**/*.yaml", "b/c/a.yaml", True),
        ("configs/**", "configs/b/a.yaml", True),
        ("configs", "configs/b/a.yaml", True),  # a directory means what is in it
        ("configs/", "configs/a.yaml", True),
        ("configs", "configs2/a.yaml", False),
        ("configs/*", "configs/b/a.yaml", True),  # b is a directory that matches
        ("run-?.yaml", "run-1.yaml", True),
        ("run-?.yaml", "run-10.yaml", False),
        ("run-[12].yaml", "run-2.yaml", True),
        ("run-[!12].yaml", "run-2.yaml", False),
        ("run-[!12].yaml", "run-3.yaml", True),
        ("a.yaml", "aXyaml", False),  # a dot is a dot
        ("a[.yaml", "a[.yaml", True),
        ("[z-a].yaml", "[z-a].yaml", True),  # no range: itself
        ("configs/{a,b}.yaml", "configs/b.yaml", True),
        ("configs/{a,b}.yaml", "configs/c.yaml", False),
        ("{a,b/*}/{c,}d", "b/x/d/e.yaml", True),
        ("{a}.yaml", "{a}.yaml", True),  # no choice: itself, as in a shell
    ],
)
def test_matches(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_alternatives_are_written_out_as_in_a_shell() -> None:
    assert alternatives("x{a,{b,c}*}{1,2}") == ("xa1", "xa2", "xb*1", "xb*2", "xc*1", "xc*2")
    assert alternatives("{a,b}" * 40) == ("{a,b}" * 40,)  # a trillion of them: itself


@given(st.text(max_size=20), st.text(max_size=20))
def test_what_a_pattern_means_it_means_with_all_that_lies_below(pattern: str, path: str) -> None:
    """And no pattern is a traceback."""
    assert matches(pattern, f"{path}/below") or not matches(pattern, path)


@given(st.text(alphabet="ab/.-", min_size=1, max_size=12))
def test_a_path_without_signs_matches_itself(path: str) -> None:
    assert matches(path, path.removeprefix("./").rstrip("/"))
