"""The document that a script's training command gives its program: options, the files that they name, and overrides."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.frameworks.draft import FRAMEWORK, DeferredValue
from memcalc.importers.accelerate_file import LAUNCHED, config_of_flags
from memcalc.importers.deepspeed_file import find_referenced
from memcalc.importers.file_format import FileFormat
from memcalc.importers.huggingface import TRAINING_ARGUMENTS
from memcalc.importers.launch.command import (
    ENVIRONMENT,
    TITANS,
    Command,
    Count,
    command_of,
    gpus_of,
    is_command_line,
    visible_gpus,
)
from memcalc.importers.registry import recognized
from memcalc.importers.shell.marks import is_open
from memcalc.importers.shell.options import OptionReader
from memcalc.importers.shell.script import Script, read_script
from memcalc.importers.shell.tokens import ShellError
from memcalc.spec.limits import Limit
from memcalc.spec.yaml_source import parse_yaml

_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_OVERRIDE = re.compile(r"~?(\w[\w.]*)=(.*)", re.DOTALL)
_PLAIN = re.compile(r"[\w.+-]{1,40}|[\[{].*", re.ASCII | re.DOTALL)
_OF_CONFIG = ("config", "job.config-file")  # options that name the program's file; of TRL, torchtune, torchtitan
_RANKS = {"num_processes", "num_machines"}
# Options without which a program with a model and an output directory may not train.
_TRAINS = ("per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps", "do_train")
# Options of training loops around Accelerate, DeepSpeed or Ray, which Trainer does not run: transformers
# examples/pytorch/language-modeling/run_clm_no_trainer.py, allenai/open-instruct open_instruct, and
# deepspeedai/DeepSpeedExamples applications/DeepSpeed-Chat/training, where --deepspeed names no file.
_LOOPS = ("with_tracking", "checkpointing_steps", "mixer_list", "dataset_mixer_list", "zero_stage")
_SET = "set by other commands"
_MOST = 20  # trainings of a script that are compared
_MULTI = "several GPUs in one process (torch.nn.DataParallel, or device_map)"
_WRAPS = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
_FSDP_1 = {"fsdp_version": 1, "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True, **_WRAPS}
_FSDP_2 = {"fsdp_version": 2, **_WRAPS}
# trl/accelerate_configs at 1.16, without fields that have no effect.
_TRLS: dict[str, dict[str, Any]] = {
    "single_gpu": {"distributed_type": "NO"},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    **{f"zero{n}": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": n}} for n in (1, 2, 3)},
    **{f"fsdp{n}": {"distributed_type": "FSDP", "fsdp_config": each} for n, each in ((1, _FSDP_1), (2, _FSDP_2))},
}


class Launch(NamedTuple):
    """What a script's training command says.

    Args:
        document: the configuration of its program, as in a file of the program's framework.
        gpus: the number of processes, each on one GPU; None if the machine decides it.
        fields: memcalc's fields that the command decides, by path.
        notes: notes for the user.
        limits: features of the command that are not modelled.
        program: the program.
    """

    document: dict[str, Any]
    gpus: Count
    fields: Mapping[str, Any]
    notes: tuple[str, ...]
    limits: tuple[Limit, ...]
    program: str


def launched(text: str, folder: str, given: Mapping[str, Any], parsed: Callable[[Any], Any]) -> Launch | None:
    """Return what the training command of a script says; None if it has none that memcalc can read.

    Args:
        text: the script.
        folder: its directory; files are found by their path relative to it, or to one above.
        given: memcalc fields that the user sets.
        parsed: function that returns the mapping in the file at a path; None if there is none.

    Raises:
        InputError: a file does not exist, a number of processes is wrong, or several commands differ.
    """
    try:
        script = read_script(text, is_command_line, ENVIRONMENT)
        reader = OptionReader(script.marks)
        commands = [
            found
            for words, environment in zip(script.commands, script.environments, strict=True)
            if (found := command_of(words, environment, reader)) is not None
        ]
    except (ShellError, RecursionError):
        return None
    builder = _Builder(script, folder, given, parsed)
    trainings: list[Launch] = []
    faults: list[InputError] = []
    for command in commands:
        try:
            launch = builder.launch(command)
        except InputError as error:
            faults.append(error)
            continue
        if launch is not None and launch not in trainings:
            trainings.append(launch)
        if len(trainings) > _MOST:
            break
    if faults and not trainings:
        raise faults[0]
    return _single(trainings, [f"another command is not counted: {fault.problem}" for fault in faults])


def _single(trainings: Sequence[Launch], notes: Sequence[str]) -> Launch | None:
    """Return the launch of trainings that need the same memory: their options differ in fields without an effect.

    Raises:
        InputError: they differ in others.
    """
    if not trainings:
        return None
    first = trainings[0]._replace(notes=(*trainings[0].notes, *notes))
    names = list(dict.fromkeys(name for each in trainings for name in each.document))
    differing = [
        name for name in names if any(each.document.get(name) != first.document.get(name) for each in trainings)
    ]
    counted = [name for name in differing if not all(_has_no_effect(each, name) for each in trainings)]
    if any(each.gpus != first.gpus for each in trainings):
        counted.append("the number of GPUs")
    if counted or len(trainings) > _MOST:
        programs = ", ".join(dict.fromkeys(each.program for each in trainings))
        fields = ", ".join((counted or differing)[:6])
        raise InputError(
            f"the script starts {len(trainings)} trainings ({programs}) that differ in {fields}.",
            "Copy the command of one of them to a file, and name that.",
        )
    document = {name: DeferredValue(_SET) if name in differing else first.document[name] for name in names}
    return first._replace(document=document)


def _has_no_effect(launch: Launch, name: str) -> bool:
    framework = recognized(launch.document)
    meaning = framework.meaning(name) if framework else None
    return meaning is None or meaning.kind == "no effect"


class _Builder:
    """Builder of the documents of a script's commands; see `launched`."""

    def __init__(self, script: Script, folder: str, given: Mapping[str, Any], parsed: Callable[[Any], Any]) -> None:
        self.script = script
        self.marks = script.marks
        self.folder = folder
        self.given = given
        self.parsed = parsed

    def launch(self, command: Command) -> Launch | None:
        """Return what a command says; None if it does not train, or not in a way that memcalc reads."""
        document = self.document(command)
        if not document or document.get("do_train") is False:
            return None
        config: dict[str, Any] = {}
        if command.launcher in ("accelerate", "trl", "axolotl"):
            config = self.accelerate(command, document)
        if command.launcher == "trl":
            document.setdefault("output_dir", "trainer_output")  # TrainingArguments' default
        framework = recognized(document)
        trains = command.launcher == "trl" or any(name in document for name in _TRAINS)
        if framework is None or (framework is TRAINING_ARGUMENTS and not trains):
            return None
        if framework is TRAINING_ARGUMENTS:
            self.refuse_loop(command, document)
        self.insert_files(document)
        limits: list[Limit] = []
        if framework.meaning(LAUNCHED) is not None and config.keys() - _RANKS:
            document[LAUNCHED] = config
        elif config.get("distributed_type") in ("FSDP", "DEEPSPEED"):
            limits.append(Limit(f"the Accelerate config of {framework.name}", holds_memory=True, overcounts="all"))
        for name in [name for name in document if name.startswith("no_") and document[name] is True]:
            if framework.meaning(name) is None and framework.meaning(name[3:]) is not None:  # of HfArgumentParser
                del document[name]
                document[name[3:]] = False
        known = self.given.get("parallelism.data_parallel") or self.given.get("parallelism.gpus")
        gpus = None if known else gpus_of(command, config, self.marks)
        if command.launcher == "python" and visible_gpus(command, self.marks) > 1:
            limits.append(Limit(_MULTI, holds_memory=True))
        fields = {FRAMEWORK: command.program.split()[1]} if command.launcher == "trl" else {}
        notes = self.notes(command, gpus, config, framework)
        return Launch(document, gpus, fields, notes, tuple(limits), self.marks.shown(command.program))

    def insert_files(self, document: dict[str, Any]) -> None:
        """Replace the name of an FSDP config by the file, and of a DeepSpeed config by what the script writes."""
        if isinstance(document.get("fsdp_config"), str):
            document["fsdp_config"] = dict(self.file(document["fsdp_config"], "FSDP config"))
        written = [each for each in self.script.json_documents() if "zero_optimization" in each]
        named = document.get("deepspeed")
        if isinstance(named, str) and len(written) == 1 and find_referenced(self.folder, named) is None:
            document["deepspeed"] = written[0]

    def refuse_loop(self, command: Command, document: Mapping[str, Any]) -> None:
        """Reject a program with a training loop of its own.

        Raises:
            InputError: an option shows that it does not run Trainer.
        """
        found = [f"--{name}" for name in _LOOPS if name in document]
        found += ["--deepspeed"] * (document.get("deepspeed") is True)
        if found or "no_trainer" in command.program:
            by = f" ({found[0]})" if found else ""
            raise InputError(
                f"{self.marks.shown(command.program)} has a training loop of its own{by}, not Trainer's.",
                "Describe the run in YAML with training.framework: accelerate, or run it without a GPU: "
                "`memcalc dry-run --gpu GPU -- COMMAND`.",
            )

    def notes(self, command: Command, gpus: Count, config: Mapping[str, Any], framework: FileFormat) -> tuple[str, ...]:
        """Return notes about a command's launcher."""
        program = self.marks.shown(command.program)
        by = "" if program.startswith(command.launcher) else f", started by {command.launcher}"
        on = f" on {gpus} GPU{'s' * (gpus > 1)}" if isinstance(gpus, int) else ""
        notes = [f"read from the command of {program}{by}{on}"]
        if framework is TRAINING_ARGUMENTS and command.launcher != "trl":
            notes.append(f"assuming that {program} runs Trainer or a trainer of TRL, because it has their options")
        if command.launcher in ("accelerate", "trl") and not config.keys() - _RANKS:
            notes.append(
                "the machine's default config of Accelerate is not known; assuming DDP. Name one: --config_file"
            )
        return tuple(notes)

    def document(self, command: Command) -> dict[str, Any]:
        """Return the program's configuration: its file, overridden by its options and by words such as `name=value`."""
        document: dict[str, Any] = {}
        words = list(command.words)
        options = dict(command.options)
        for name in _OF_CONFIG:
            words += options.pop(name, ())
        if command.program == TITANS and isinstance(file := command.environment.get("CONFIG_FILE"), str):
            words.append(file)
        for at, word in enumerate(words):
            if word.endswith(_CONFIGS) or (at == 0 and command.program.startswith("tune run")):
                document |= self.file(word, "config")
        if command.launcher == "litgpt":
            kind = command.program.partition("_")[2]
            document.setdefault("train", {})
            named = "checkpoint_dir" if "finetune" in command.program else "model_name"
            document.update((named, word) for word in words[:1] if not word.endswith(_CONFIGS))
            if kind in ("", "lora") and named == "checkpoint_dir":  # `litgpt finetune` is that of LoRA
                document.setdefault("lora_r", 8)
        for word in words:
            match = _OVERRIDE.fullmatch(word)
            if match:
                _place(document, match[1], self.value((match[2],)))
        for name, given in options.items():
            _place(document, name if is_open(name) else name.replace("-", "_"), self.value(given))
        return document

    def accelerate(self, command: Command, document: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of Accelerate's launcher: its file, overridden by its options."""
        flags = {name.replace("-", "_"): self.value(words) for name, words in command.launch.items()}
        if command.launcher == "trl":  # in its options, or in its file
            flags = {name: document.pop(name) for name in (LAUNCHED, "num_processes") if name in document}
        elif command.launcher == "axolotl":
            return {"num_processes": document.pop("num_processes")} if "num_processes" in document else {}
        named = flags.pop("config_file", None) or flags.pop(LAUNCHED, None)
        if command.launcher == "trl" and named in _TRLS:
            config = {"mixed_precision": "bf16", "num_processes": 8, **_TRLS[named]}
        else:
            config = {} if named is None else dict(self.file(str(named), "Accelerate config"))
        return config_of_flags(config, flags)

    def file(self, name: str, kind: str) -> Mapping[str, Any]:
        """Return a file that the command names.

        Raises:
            InputError: it is not there, or is not a mapping.
        """
        path = None if is_open(name) or isinstance(name, DeferredValue) else find_referenced(self.folder, name)
        found = None if path is None else self.parsed(path)
        if not isinstance(found, Mapping):
            shown = self.marks.shown(name)
            where = "is not in the script's directory or one above" if path is None else "cannot be read"
            own = path is None and not shown.endswith(_CONFIGS) and kind == "config"  # of torchtune's package
            copy = f"Copy it with `tune cp {shown} .` and name the copy."
            remedy = copy if own else "Correct the path in the script, or put the file there."
            raise InputError(f"the {kind} {shown} {where}.", remedy)
        return found

    def value(self, words: tuple[str, ...]) -> Any:
        """Return an option's words as YAML has them; without words it is a switch."""
        if any(map(is_open, words)):
            return DeferredValue(" ".join(map(self.marks.shown, words)))
        if not words:
            return True
        return _scalar(words[0]) if len(words) == 1 else [_scalar(word) for word in words]


def _scalar(word: str) -> Any:
    if not _PLAIN.fullmatch(word):
        return word
    try:
        return parse_yaml(f"x: {word}", "").data["x"]
    except (InputError, RecursionError, TypeError):
        return word


def _place(document: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its dotted path; of torchtune's components, a string replaces the name of the component."""
    *outer, name = path.split(".")
    block = document
    for part in outer:
        inner = block.get(part)
        block[part] = dict(inner) if isinstance(inner, Mapping) else {}
        block = block[part]
    inner = block.get(name)
    if isinstance(inner, Mapping) and "_component_" in inner and isinstance(value, str):
        block[name] = {**inner, "_component_": value}
    else:
        block[name] = value
