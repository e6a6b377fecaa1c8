"""Commands and variables of shell scripts, parsed without running them."""

import subprocess

import pytest

from memcalc.importers.shell.arithmetic import computed
from memcalc.importers.shell.conditions import decided
from memcalc.importers.shell.script import read_script
from memcalc.importers.shell.syntax import parse
from memcalc.importers.shell.tokens import ShellError


def shown(text: str) -> list[list[str]]:
    script = read_script(text, lambda word: " " in word and ".py" in word)
    return [[script.marks.shown(word) for word in words] for words in script.commands]


# Each prints its words: what bash makes of them is what we must make of them.
SAME_AS_BASH = {
    "assignments": "A=1; export B=2 C='3 4'; readonly D=$A$B; declare -i E=5; local_=6\nrun $A $B $C \"$C\" $D $E $local_",
    "defaults": ': ${TP:=4}\n: "${PP:=$TP}"\nA=\nrun $TP $PP ${A:-7} ${A-8} ${B-9} ${A:+x} ${TP:+y} ${C=$((2 + 3))} $C',
    "arrays": 'X=( a "b c" )\nX+=( d # e )\n f )\nX+=("${X[@]}")\nrun ${X[@]} "${X[@]}" "${X[*]}" ${X}',
    "strings grow": "X=a; X+=b; X+=' c'; run $X \"$X\"",
    "arithmetic": "A=7; B=$(( A * 2 + (3 - 1) ** 2 )); run $B $((A/2)) $(( $A % 4 )) $(( A > 3 ? 10 : 20 )) $((-A / 2))",
    "continued lines": "run a \\\n  b \\\n  # c\nrun d#e \"f\\\ng\" 'h\\\ni'",
    "quotes": 'A=\'x y\'; run "$A" \'$A\' \\$A a"$A"b a$A\'\'b "" "a\\"b" "\\x"',
    "branches": 'A=b\nif [ "$A" = a ]; then X=1; elif [[ $A == b* && -n $A ]]; then X=2; else X=3; fi\nrun $X',
    "numbers": "A=4\nif [ $A -gt 3 ] && [ $A -le 4 ]; then run big; fi\nif (( A < 4 )); then run small; else run no; fi",
    "empty": 'A=""\nif [ -z "$A" ]; then run empty; fi\n[ -n "$A" ] && run full\n[ -n "$A" ] || run not\ntrue && run yes',
    "not": 'if ! [[ "a" != "b" ]]; then run 1; else run 2; fi',
    "case": 'case "7B" in 1B|3B) X=1;; 7*) X=2 ;; *) X=3;; esac\nrun $X',
    "functions": 'f() { run "$1" ${2:-none}; }\nfunction g { f $1 x; return; run never; }\nf "a b"; g c',
    "subshells": "A=1; (A=2; run $A); run $A; { A=3; }; run $A",
    "ends": "run a; exit 0; run b",
    "eval": 'A="run \'b c\' d"; eval $A; eval "run \\$A"',
    "other blanks": "run a\u00a0b \u2028c d\u3000 \u2003 e\x0bf\n",
    "redirections": "run a 2>&1 >/dev/stdout; run b > /dev/stdout 2>/dev/null",
}


@pytest.mark.parametrize("case", SAME_AS_BASH)
def test_it_is_what_bash_makes_of_it(case: str) -> None:
    text = SAME_AS_BASH[case]
    printing = "run() { printf '%s\\0' run \"$@\"; printf '\\1'; }\n"
    told = subprocess.run(["bash", "-c", printing + text], check=False, capture_output=True, text=True).stdout
    expected = [line.split("\0")[:-1] for line in told.split("\1")[:-1]]
    found = [words for words in shown(text) if words[0] == "run"]

    assert expected
    assert found == expected


def test_what_the_caller_gives_stays_open() -> None:
    assert shown("A=$1; B=${10}; run $A ${B} $C ${2:-x} ${D:-$A} $(date) `pwd`/a $#") == [
        ["run", "$1", "${10}", "$C", "x", "$1", "$(date)", "`pwd`/a", "$#"]
    ]


def test_branches_that_the_text_does_not_decide_leave_what_differs_open() -> None:
    text = """
    SAME=0; KEPT=1
    if [ "$1" = small ]; then SIZE=1; SAME=2; else SIZE=3; SAME=2; fi
    if [ ! -f there ]; then KEPT=9; exit 1; fi
    run $SIZE $SAME $KEPT
    """

    assert shown(text) == [["run", "$SIZE", "2", "1"]]


def test_a_loop_over_the_scripts_own_options_finds_none() -> None:
    assert shown("TP=1\nwhile [ $# -gt 0 ]; do case $1 in --tp) TP=$2; shift;; esac; shift; done\nrun $TP") == [
        ["run", "1"]
    ]


def test_command_lines_within_words_and_documents() -> None:
    text = """
    CMD="python train.py --a 'b c' $1"
    srun --x bash -c "cd y; $CMD --node \\$RANK"
    srun bash -x -lc '$CMD'
    sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=2
python $A.py "d e"
EOF
    """

    assert shown(text) == [
        ["python", "train.py", "--a", "b c", "$1", "--node", "$RANK"],
        ["python", "train.py", "--a", "'b", "c'", "$1"],
        ["python", "$A.py", "d e"],
    ]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("2 ** 3 ** 2", 512),
        ("7 / 2 - 7 % 4", 0),
        ("1 < 2 && 3 == 4", 0),
        ("!0 || 0", 1),
        ("1 / 0", None),
        ("1 +", None),
        ("a", None),
        ("(" * 3000, None),
        ("9 ** 63", None),
    ],
)
def test_arithmetic(expression: str, value: int | None) -> None:
    assert computed(expression) == value


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        ("a = a", True),
        ("a != a", False),
        ("fp8 == fp*", True),
        ("3 -ge 4", False),
        ("x -ge 4", None),
        ("-f file", None),
        ("-n a && -z a", False),
        ("-f file && -z a", False),
        ("-f file || -n a", True),
        ("! ( a = b )", True),
    ],
)
def test_conditions(words: str, holds: bool | None) -> None:
    assert decided(words.split(), patterns=True) is holds


@pytest.mark.parametrize(
    "text", ["'", '"$(', "${A", "if true; then", "case a in", "X=(", "(" * 500, "if " * 500, "a; }; fi )"]
)
def test_what_is_no_script_is_refused(text: str) -> None:
    with pytest.raises(ShellError):
        parse(text)


def test_lines_of_dos_end_as_others() -> None:
    assert shown("A=1 \\\r\n  B=2\r\npython pretrain.py --a $A\r\n") == shown(
        "A=1 \\\n  B=2\npython pretrain.py --a $A\n"
    )
