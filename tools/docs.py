"""Regenerate the parts of README.md and docs/ that are output: `python tools/docs.py` (or `--check`).

Three kinds of text are output, and nobody types them:

- what follows a `$ command` line in a ```console block, up to the next such line;
- what follows a `>>>` line in a ```pycon block;
- what stands between `<!-- generated: NAME WORDS -->` and `<!-- end -->`; NAME is a function in TABLES below.
"""

from __future__ import annotations

import argparse
import difflib
import doctest
import io
import json
import os
import re
import statistics
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import memcalc  # noqa: E402 -- from this checkout, installed or not
from memcalc.checking.settings import CheckSettings, RuleSettings  # noqa: E402
from memcalc.cli.app import main as run_memcalc  # noqa: E402
from memcalc.cli.streams import ReaderGone  # noqa: E402
from memcalc.documents.schema import result_schema  # noqa: E402
from memcalc.errors import DoesNotFit, InputError, OutOfMemory, Unavailable  # noqa: E402
from memcalc.frameworks.releases import RELEASES  # noqa: E402
from memcalc.importers.registry import FRAMEWORKS  # noqa: E402
from memcalc.ledger.component import Component  # noqa: E402
from memcalc.ledger.row_drafts import SETUP_PHASES, STEP_PHASES  # noqa: E402
from memcalc.report import labels  # noqa: E402
from memcalc.spec.fields import BLOCKS, NESTED, SYMBOLS  # noqa: E402
from memcalc.spec.hardware.gpus import all_gpus  # noqa: E402
from memcalc.spec.presets import preset_names  # noqa: E402
from memcalc.spec.recipes import ALIASES, RECIPES, Recipe  # noqa: E402
from tools import (  # noqa: E402
    any_models,
    dry_runs,
    families,
    fit,
    formulas,
    generation,
    offload,
    program_defaults,
    programs,
    published_configs,
    real_gpus,
    recorded_tables,
    request_order_cases,
    sampled_runs,
    trainer,
    world_sizes,
)
from tools.accuracy import cases, summarized  # noqa: E402
from tools.estimate_vs_trace import agreement_summary, agreement_table, need_summary  # noqa: E402
from tools.fake_vs_null import beside_summary, beside_table  # noqa: E402
from tools.float8 import float8_summary, float8_table  # noqa: E402
from tools.markdown import table  # noqa: E402
from tools.measured_runs import measured_table, missed_table, probe_table, seconds_table  # noqa: E402
from tools.peers import peers_table  # noqa: E402
from tools.published import MIB, TERMS, mean_and_worst, megatron_peaks, without  # noqa: E402
from tools.sharded import sharded_runs  # noqa: E402
from tools.tensor_parallel import split_summary, split_table  # noqa: E402

WIDTH = 100
BLOCK = re.compile(r"^```(console|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"^(<!-- generated: ([^\n]+) -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
SEPARATOR = "=-=-= end of a command =-=-="
ENVIRONMENT = {
    "COLUMNS": str(WIDTH),
    "NO_COLOR": "1",
    "TERM": "dumb",
    "PYTHONPATH": str(ROOT),
    "PYTHONIOENCODING": "utf-8",
}
PLAIN = re.compile(r"memcalc(?:(?: |\\\n)+[\w=.,:/+-]+)+", re.ASCII)  # a command without syntax of the shell
MEMCALC = f'memcalc() {{ {sys.executable} -m memcalc "$@"; }}\n'


def documents() -> list[Path]:
    """The Markdown files that have generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def refreshed(text: str, keep: Collection[str] = (), *, forks: bool = False) -> str:
    """A document with every generated part regenerated.

    Args:
        text: the document.
        keep: names of parts that stay as they are.
        forks: run commands without a shell's syntax in forks of this process, where their modules are imported already.
    """

    def part(match: re.Match[str]) -> str:
        name, *words = match[2].split()
        return match[0] if name in keep else match[1] + generated(name, *words) + match[3]

    text = GENERATED.sub(part, text)
    blocks = list(BLOCK.finditer(text))
    sessions = {"console": console_session, "pycon": python_session}
    if forks:  # one by one: a fork has none of the other threads, which may hold locks
        sessions["console"] = forked_session
        bodies = iter([sessions[block[1]](block[2]) for block in blocks])
        return BLOCK.sub(lambda block: f"```{block[1]}\n{next(bodies)}```", text)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each console session waits for processes of its own
        bodies = iter(list(pool.map(lambda block: sessions[block[1]](block[2]), blocks)))
    return BLOCK.sub(lambda block: f"```{block[1]}\n{next(bodies)}```", text)


def generated(name: str, *words: str) -> str:
    """Return the text between the comments of one generated part."""
    return TABLES[name](*words)


def console_session(session: str) -> str:
    """A shell session with its output: one shell for the session, so that `$ echo $?` says what it should."""
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", session, re.MULTILINE)
    if not commands:
        raise SystemExit(f"a console block without a `$ command`:\n{session}")
    script = MEMCALC + "".join(f"{command}\ns=$?; echo '{SEPARATOR}'; (exit $s)\n" for command in commands)
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    outputs = process.stdout.split(f"{SEPARATOR}\n")
    if "Traceback" in process.stdout or len(outputs) != len(commands) + 1:
        raise SystemExit(f"{session}\nended in\n{process.stdout}")
    return "\n".join(f"$ {command}\n{tidy(output)}" for command, output in zip(commands, outputs[:-1], strict=True))


def forked_session(session: str) -> str:
    """The same as `console_session`, in forks of this process if no command needs a shell."""
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", session, re.MULTILINE)
    if not commands or not all(PLAIN.fullmatch(command) for command in commands):
        return console_session(session)
    words = [command.replace("\\\n", "").split()[1:] for command in commands]
    return "\n".join(f"$ {command}\n{tidy(forked(each))}" for command, each in zip(commands, words, strict=True))


def forked(arguments: list[str]) -> str:
    """The output of a memcalc command in a fork of this process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(theirs, 1)
            os.dup2(theirs, 2)
            os.chdir(ROOT)
            os.environ.update(ENVIRONMENT)
            warnings.resetwarnings()
            sys.stdin, sys.stdout, sys.stderr = (
                open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 -- file descriptors
                for number, mode in enumerate("rww")
            )
            run_memcalc(arguments)
        except BaseException:  # noqa: BLE001 -- as Python shows what ends a program
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as file:  # noqa: PTH123 -- a file descriptor
        output = file.read()
    os.waitpid(child, 0)
    if "Traceback" in output:
        raise SystemExit(f"memcalc {' '.join(arguments)}\nended in\n{output}")
    return output


def tidy(output: str) -> str:
    """Output without blanks at the ends of lines and without empty lines around it."""
    lines = "\n".join(line.rstrip() for line in output.splitlines()).strip("\n")
    return f"{lines}\n" if lines else ""


def python_session(session: str) -> str:
    """An interactive Python session with its output."""
    names: dict[str, object] = {}
    lines = []
    for example in doctest.DocTestParser().get_examples(session):
        source = example.source.splitlines()
        lines += [f">>> {source[0]}", *(f"... {line}" for line in source[1:])]
        with redirect_stdout(io.StringIO()) as output:
            exec(compile(example.source, "<docs>", "single"), names)  # noqa: S102 -- our own documentation
        lines += output.getvalue().splitlines()
    return "".join(f"{line}\n" for line in lines)


def presets_table() -> str:
    """Every preset with its sizes, from the presets themselves."""

    def row(name: str) -> list[object]:
        spec = memcalc.load(name)
        model = spec.model
        parameters = memcalc.estimate(spec).parameters
        return [
            f"[`{name}`](../../configs/{name}.yaml)",
            f"{parameters:,}",
            model.num_layers,
            model.hidden_size,
            f"{model.num_attention_heads} / {model.num_key_value_heads}",
            f"{model.vocab_size:,}",
        ]

    return table(
        ["preset", "parameters", "layers", "hidden size", "heads / key-value heads", "vocabulary"],
        [row(name) for name in preset_names()],
    )


def cards_table() -> str:
    """Every GPU with its memory, from the table of GPUs."""
    return table(
        ["GPU", "maker's name", "advertised bytes", "usable bytes"],
        [[f"`{card.name}`", card.label, f"{card.advertised_bytes:,}", f"{card.usable_bytes:,}"] for card in all_gpus()],
    )


def releases_table() -> str:
    """What releases of packages changed that decides memory."""
    return table(
        ["package", "since", "change", "source"],
        [
            [package.name, release, change.change, f"`{change.source}`"]
            for package in RELEASES.values()
            for release, change in package.changes.items()
        ],
    )


def fields_table(block: str) -> str:
    """The fields of one block of a configuration, from the Pydantic model that reads it."""
    model = (BLOCKS | NESTED)[block]
    schema = model.model_json_schema()["properties"]
    symbols = {field: symbol for symbol, field in SYMBOLS.get(block, {}).items()}

    def row(name: str) -> list[str]:
        shown = f"`{name}`" + (f" or `{symbols[name]}`" if name in symbols else "")
        field = schema[name]
        default = f"`{json.dumps(field['default'])}`" if field.get("default") not in (None, "") else ""
        return [shown, values(field), default.replace('"', ""), field.get("description", "")]

    return table(["field", "values", "default", "description"], [row(name) for name in schema if name not in NESTED])


def values(field: dict[str, Any]) -> str:
    """What a field accepts, in words, from its JSON Schema."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(values(option) for option in field["anyOf"] if option.get("type") != "null")
    words = {"boolean": "true, false", "array": "list"}
    kind = str(field.get("type", "block"))
    return words.get(kind, kind)


def importer_table(*words: str) -> str:
    """What every field of another framework's configuration means, from the table that reads it."""
    framework = next(framework for framework in FRAMEWORKS if framework.name == " ".join(words))
    rows = [
        [
            f"`{path}`",
            meaning.kind,
            f"`{meaning.meaning}`" if meaning.meaning.startswith(OUR_BLOCKS) else meaning.meaning,
        ]
        for path, meaning in framework.fields.items()
    ]
    return f"Fields of {framework.version}.\n\n" + table(["field", "type", "meaning"], rows)


def components_table() -> str:
    """Every component with its letter and label, from the words of the screens."""
    rows = [[labels.letter(part), labels.label(part), f"`{part}`", labels.meaning(part)] for part in Component]
    outside = ("cached_segments", "device_context", "communication_library")
    rows += [[labels.letter(part), labels.label(part), f"`{part}`", labels.meaning(part)] for part in outside]
    return table(["letter", "label", "JSON key", "description"], rows)


PHASES = {
    "model": "the model is built and its weights are on the GPU",
    "optimizer": "master weights and other copies are made; optimizer state appears in the first step",
    "input": "token ids and labels are on the GPU",
    "zero_grad": "gradients of the step before are freed or set to zero",
    "forward": "layers compute and save activations for backward",
    "loss": "the loss is computed from the logits",
    "backward": "gradients are produced and activations freed",
    "optimizer_step": "the optimizer updates weights and states",
}


def phases_table() -> str:
    """The phases of a training run, in their order."""
    return table(["phase", "what happens"], [[f"`{phase}`", PHASES[phase]] for phase in (*SETUP_PHASES, *STEP_PHASES)])


EXIT_CODES: tuple[tuple[object, str], ...] = (
    (0, "success; `estimate`, `measure` and `diff` return 0 whether or not the run fits"),
    (
        DoesNotFit.exit_code,
        """`check` found a config that does not fit or that grew; `fit` and `recompute` found nothing that fits; the run
        of `dry-run --assert-fits` does not fit. Also for CANNOT SAY; `check`, `fit` and `recompute` then return 0 with
        `--accept-unknown`""",
    ),
    (
        InputError.exit_code,
        """invalid input: one message on standard error with the place, the value, the rule and the remedy. `check`
        prints one for each invalid config. Also: `oom` found no out-of-memory message, `sweep` no valid configuration,
        and the command of `dry-run --assert-fits` failed with exit code 1""",
    ),
    (
        Unavailable.exit_code,
        """the command cannot run on this machine, or cannot save its result; the reasons are below""",
    ),
    (OutOfMemory.exit_code, "a measured run or dry run ran out of memory; its record is kept"),
    (70, "a bug of memcalc, with its traceback"),
    (124, "`dry-run --timeout` was reached"),
    (129, "ended by SIGHUP, after temporary files were removed"),
    (130, "interrupted"),
    (ReaderGone.exit_code, "the reader of standard output closed it, as `head` does"),
    (143, "ended by SIGTERM, after temporary files were removed"),
    ("other", "the exit code of the command that `dry-run` ran; 128 + n if signal n ended it"),
)


def exit_codes_table() -> str:
    """Every exit code, from the errors that have one."""
    return table(["code", "meaning"], [[code, " ".join(meaning.split())] for code, meaning in EXIT_CODES])


def documents_table() -> str:
    """The documents that `--format json` prints, from the schema of results."""
    rows = [
        [
            found["title"].removesuffix("Document") or "Estimate",
            found["description"],
            ", ".join(f"`{key}`" for key in found["properties"]),
        ]
        for found in result_schema()["anyOf"]
    ]
    return table(["document", "description", "keys"], rows)


def document_keys() -> str:
    """The keys of the document of an estimate, with their types."""
    found = result_schema()["anyOf"][0]["properties"]
    return table(
        ["key", "type", "description"],
        [[f"`{key}`", json_type(field), field.get("description", "")] for key, field in found.items()],
    )


def json_type(field: dict[str, Any]) -> str:
    """The type of a field of a JSON Schema in a few labels."""
    if "anyOf" in field:
        return " or ".join(json_type(option) for option in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {json_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


def settings_table() -> str:
    """The settings of `check`, from the Pydantic model that reads them."""
    in_rules = RuleSettings.model_fields.keys() - {"paths"}  # there, patterns

    def row(name: str, field: Any) -> list[str]:
        return [f"`{name}`", "yes" if name in in_rules else "", RULES_PATHS if name == "rules" else field.description]

    return table(["setting", "in rules", "description"], [row(*item) for item in CheckSettings.model_fields.items()])


RULES_PATHS = "limits for some paths, named by `paths`; they override those above, later rules earlier ones"


OUR_BLOCKS = ("model.", "training.", "parallelism.")


def recipes_table() -> str:
    """Bytes a parameter by recipe, and when the fp32 gradients live."""
    aliases = {name: alias for alias, name in ALIASES.items()}

    def precision(dtype: str | None) -> str:
        return {"compute": "dtype", None: "-"}.get(dtype, str(dtype))

    def row(name: str, recipe: Recipe) -> list[object]:
        return [
            f"`{name}`" + (f" or `{aliases[name]}`" if name in aliases else ""),
            precision(recipe.weights),
            precision(recipe.gradients),
            precision(recipe.main_gradients),
            LIVES[recipe.main_gradients_live],
            precision(recipe.master),
            precision(recipe.moments),
            recipe.textbook_bytes,
            recipe.imitates,
        ]

    head = (
        "recipe,weights,gradients,fp32 gradients,fp32 gradients live,master weights,moments,bytes per parameter,as in"
    )
    return table(head.split(","), [row(name, recipe) for name, recipe in RECIPES.items()])


LIVES = {
    "never": "-",
    "always": "always",
    "backward": "from backward to zero_grad",
    "step": "inside the optimizer step",
}


def accuracy_summary() -> str:
    """One line for each file of recordings."""
    rows = []
    for file, group in groupby(cases(), key=lambda case: case.file):
        several = list(group)
        found = summarized(several)
        link = f"[{file}](../../benchmarks/recordings/{file})"
        role = "**held out**" if several[0].held_out else "written against"
        rows.append([link, role, several[0].device, found.runs, f"{found.median:.3%}", f"{found.worst:.3%}"])
    return table(["recordings", "the formulas were", "device", "runs", "median error", "maximum error"], rows)


def accuracy_table(which: str) -> str:
    """One line for each recorded run that was (not) held out, the worst first."""
    ordered = sorted(
        (case for case in cases() if case.held_out is (which == "held-out")), key=lambda case: -abs(case.error)
    )
    return table(
        ["run", "on", "measured bytes", "estimated bytes", "error", "error in requested bytes"],
        [
            [
                f"`{case.run}`",
                case.card,
                f"{case.measured:,}",
                f"{case.estimated:,}",
                f"{case.error:+.3%}",
                f"{case.requested[1] - case.requested[0]:+,}",
            ]
            for case in ordered
        ],
    )


def accuracy_requested() -> str:
    """How far the estimate is from the requested bytes, in one sentence."""
    both = [case.requested for case in cases()]
    errors = [abs(estimated / requested - 1) for requested, estimated in both]
    near = sum(abs(estimated - requested) < NEXT_TO_NOTHING for requested, estimated in both)
    return (
        f"Of the {len(both)} runs, {near} are within {NEXT_TO_NOTHING:,} bytes; "
        f"the median error is {statistics.median(errors):.5%} and the maximum error {max(errors):.3%}.\n"
    )


def accuracy_reserved() -> str:
    """How reserved memory compares with allocated memory in the recordings, and with the estimate's factor."""
    several = cases()
    factors = sorted(case.reserved[0] / case.measured for case in several)
    above = sum(case.reserved[0] > case.reserved[1] for case in several)
    return (
        f"In the {len(several)} recorded runs, peak reserved memory is {factors[0]:.3f} to "
        f"{factors[-1]:.3f} times the allocated peak, median {statistics.median(factors):.3f}; "
        f"in {above} of them it exceeds the estimate.\n"
    )


def policies_table() -> str:
    """Reserved over allocated memory of recorded traces, by allocator."""
    runs = json.loads((ROOT / "benchmarks" / "recordings" / "policies.json").read_text())

    def cell(trial: dict[str, Any]) -> str:
        ratio = trial["peak_reserved_bytes"] / trial["peak_allocated_bytes"]
        return f"{ratio:.3f}" if trial["fits"] else "out"

    policies = [(trial["allocator"], trial["settings"]) for trial in runs[0]["trials"]]
    heads = [f"`{policy}`" + (f" `{settings}`" if settings else "") for policy, settings in policies]
    rows = [
        [
            f"`{run['run']}`",
            f"`{run['gpu']}`",
            f"{run['events']:,}",
            f"{run['trials'][0]['peak_allocated_bytes'] / 2**30:.2f}",
            *map(cell, run["trials"]),
        ]
        for run in runs
    ]
    columns = zip(*(run["trials"] for run in runs), strict=True)
    middle = [
        f"{statistics.median([t['peak_reserved_bytes'] / t['peak_allocated_bytes'] for t in column if t['fits']]):.3f}"
        for column in columns
    ]
    rows.append(["median of completed runs", "", "", "", *middle])
    return table(["run", "GPU", "events", "allocated, GiB", *heads], rows)


NEXT_TO_NOTHING = 20_000  # bytes of a peak of gigabytes


STEP = ("forward", "loss", "backward", "optimizer_step")
SHOWN_PHASES = ("model", "optimizer", *(f"{phase}_{step}" for step in (1, 2) for phase in STEP))


def accuracy_phases() -> str:
    """The error of each phase of the held-out runs."""

    def row(run: str, found: dict[str, tuple[int, int]]) -> list[str]:
        return [f"`{run}`", *(f"{found[phase][1] / found[phase][0] - 1:+.2%}" for phase in SHOWN_PHASES)]

    return table(["run", *SHOWN_PHASES], [row(case.run, case.phases) for case in cases() if case.held_out])


def accuracy_megatron() -> str:
    """One line for each stage of the published Megatron-LM runs."""
    return table(
        ["run", "measured MiB", "estimated MiB", "error"],
        [
            [
                peak.run,
                f"{peak.measured / MIB:,.2f}",
                f"{peak.ledger.peak_bytes / MIB:,.2f}",
                f"{peak.error:+.4%}",
            ]
            for peak in megatron_peaks()
        ],
    )


def accuracy_megatron_experts() -> str:
    """The same for models with experts and latent attention."""
    peaks = megatron_peaks("megatron-b200-experts")
    rows = [
        [peak.run, f"{peak.measured / MIB:,.2f}", f"{peak.ledger.peak_bytes / MIB:,.2f}", f"{peak.error:+.3%}"]
        for peak in peaks
    ]
    return table(["run", "measured MiB", "estimated MiB", "error"], rows)


def accuracy_megatron_terms() -> str:
    """What the estimate of those runs would be off by without each of its terms."""
    peaks = megatron_peaks()
    found = mean_and_worst([peak.error for peak in peaks])
    rows = [["nothing", "", f"{found[0]:.4%}", f"{found[1]:.4%}"]]
    for term in TERMS:
        found = mean_and_worst([without(peak, term) for peak in peaks])
        rows.append([term.name, term.reason, f"{found[0]:.4%}", f"{found[1]:.4%}"])
    return table(["omitted term", "source", "mean error", "maximum error"], rows)


def accuracy_sharded() -> str:
    """One line for each recorded rank of many, the worst first."""
    return table(
        ["run", "held out", "measured bytes", "estimated bytes", "error"],
        [
            [
                f"`{run.case}`",
                "yes" if run.held_out else "",
                f"{run.measured:,}",
                f"{run.ledger.peak_bytes:,}",
                f"{run.error:+.3%}",
            ]
            for run in sorted(sharded_runs(), key=lambda run: -abs(run.error))
        ],
    )


def accuracy_sharded_summary() -> str:
    """Median and maximum error of the recorded ranks, by engine and by what trains."""
    errors: dict[tuple[str, str, bool], list[float]] = {}
    for run in sharded_runs():
        kind = (run.engine, run.spec.training.finetune, run.held_out)
        errors.setdefault(kind, []).append(abs(run.error))
    rows = [
        [
            engine,
            finetune,
            "**held out**" if held_out else "written against",
            len(own),
            f"{statistics.median(own):.3%}",
            f"{max(own):.3%}",
        ]
        for (engine, finetune, held_out), own in sorted(errors.items())
    ]
    return table(["engine", "finetune", "the formulas were", "runs", "median error", "maximum error"], rows)


TABLES: dict[str, Callable[..., str]] = {
    **dry_runs.TABLES,
    **programs.TABLES,
    **program_defaults.TABLES,
    "releases": releases_table,
    "accuracy-drawn": sampled_runs.drawn_summary,
    "accuracy-drawn-worst": sampled_runs.drawn_worst,
    "accuracy-families": sampled_runs.grid_families,
    "accuracy-settings": sampled_runs.grid_settings,
    "accuracy-measured": measured_table,
    "accuracy-missed": missed_table,
    "measured-seconds": seconds_table,
    "probe": probe_table,
    **families.TABLES,
    **trainer.TABLES,
    **fit.TABLES,
    **formulas.TABLES,
    **request_order_cases.TABLES,
    **generation.TABLES,
    **offload.TABLES,
    **published_configs.TABLES,
    **real_gpus.TABLES,
    "agreement": agreement_table,
    "beside": beside_table,
    "float8": float8_table,
    "float8-summary": float8_summary,
    "split": split_table,
    "split-summary": split_summary,
    "beside-summary": beside_summary,
    "agreement-summary": agreement_summary,
    "agreement-need": need_summary,
    "peers": peers_table,
    "accuracy-megatron": accuracy_megatron,
    "accuracy-megatron-experts": accuracy_megatron_experts,
    "accuracy-megatron-terms": accuracy_megatron_terms,
    "accuracy-phases": accuracy_phases,
    "accuracy-requested": accuracy_requested,
    "accuracy-reserved": accuracy_reserved,
    "accuracy-sentence": sampled_runs.drawn_sentence,
    "accuracy-summary": accuracy_summary,
    "accuracy-table": accuracy_table,
    "accuracy-sharded": accuracy_sharded,
    "accuracy-sharded-summary": accuracy_sharded_summary,
    "cards": cards_table,
    "components": components_table,
    "documents": documents_table,
    "document-keys": document_keys,
    "exit-codes": exit_codes_table,
    "phases": phases_table,
    "fields": fields_table,
    "policies": policies_table,
    **any_models.TABLES,
    **recorded_tables.TABLES,
    **world_sizes.TABLES,
    "importer": importer_table,
    "presets": presets_table,
    "recipes": recipes_table,
    "settings": settings_table,
}


def main() -> None:
    """Rewrite what is stale, or with --check only say so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if anything is stale")
    parser.add_argument("pages", nargs="*", type=Path, help="only these pages, e.g. docs/reference/commands.md")
    options = parser.parse_args()
    check, stale = options.check, False
    for path in [page.resolve() for page in options.pages] or documents():
        old = path.read_text()
        new = refreshed(old)
        if old == new:
            continue
        stale = True
        name = str(path.relative_to(ROOT))
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, name))
        if not check:
            path.write_text(new)
    sys.exit(check and stale)


if __name__ == "__main__":
    main()
