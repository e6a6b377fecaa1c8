"""Import the config files that frameworks publish, and record how each field is classified.

    python benchmarks/published_configs.py REPOSITORIES [--only OWNER/NAME]

REPOSITORIES is a directory of git repositories named OWNER+NAME, bare or not. What is recorded are facts: which files
there are at which commit, the names of their fields, which list of ours each is in, and the limits of the run: what it
asks for and is not modelled, whether that holds memory, and at least how many bytes; the program and the releases that
were taken, and what the file leaves open, with the share of the peak that it moves. The files stay where they are.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.errors import InputError, Unavailable
from memcalc.estimation.limits import resolved
from memcalc.importers.field_tables import ImportedConfig
from memcalc.importers.loading import import_file, list_config_json, load

RECORD = Path(__file__).parent / "recordings" / "published-configs.json"


SCRIPTS = (".sh",)
BESIDE = (".json", ".yaml", ".yml")  # files that scripts name
MOST_BESIDE = 65_536  # bytes of such a file; larger ones are data


class Source(NamedTuple):
    """Where files are published."""

    repository: str
    folder: str
    revision: str = "HEAD"
    suffixes: tuple[str, ...] = (".yaml", ".yml", ".json", ".toml", ".sh")


SOURCES = (
    Source("axolotl-ai-cloud/axolotl", "examples"),
    Source("axolotl-ai-cloud/axolotl", "deepspeed_configs"),
    Source("hiyouga/LLaMA-Factory", "examples"),
    Source("huggingface/alignment-handbook", "recipes"),
    Source("huggingface/open-r1", "recipes"),
    Source("huggingface/accelerate", "examples"),
    Source("huggingface/trl", "examples/accelerate_configs"),
    Source("deepspeedai/DeepSpeedExamples", "training", suffixes=(".json",)),
    Source("Lightning-AI/litgpt", "config_hub"),
    Source("pytorch/torchtitan", "torchtitan", "v0.2.2"),  # the last with configurations that are no programs
    Source("pytorch/torchtune", "recipes/configs"),
    Source("NVIDIA/Megatron-LM", "examples"),
    Source("NVIDIA/NeMo", "examples/nlp/language_modeling"),
    Source("NVIDIA/NeMo-Framework-Launcher", "launcher_scripts/conf/training"),
    Source("bigscience-workshop/bigscience", "train", suffixes=(".slurm",)),
    Source("EleutherAI/gpt-neox", "configs"),
    Source("jiaweizzhao/GaLore", "configs"),
    Source("Guitaricet/relora", "configs"),
    Source("lm-sys/FastChat", "scripts", suffixes=SCRIPTS),
    Source("haotian-liu/LLaVA", "scripts", suffixes=SCRIPTS),
    Source("artidoro/qlora", "scripts", suffixes=SCRIPTS),
    Source("QwenLM/Qwen", "finetune", suffixes=SCRIPTS),
    Source("ymcui/Chinese-LLaMA-Alpaca", "scripts/training", suffixes=SCRIPTS),
    Source("shibing624/MedicalGPT", "scripts", suffixes=SCRIPTS),
    Source("OptimalScale/LMFlow", "scripts", suffixes=SCRIPTS),
    Source("OpenBMB/MiniCPM", "finetune", suffixes=SCRIPTS),
    Source("OpenGVLab/InternVL", "internvl_chat/shell/internvl2.5/2nd_finetune", suffixes=SCRIPTS),
    Source("01-ai/Yi", "finetune/scripts", suffixes=SCRIPTS),
    Source("allenai/open-instruct", "scripts/train/dgx-spark", suffixes=SCRIPTS),
)

# What such files leave to the command line is given so, to see whether the rest can be sized.
GIVEN = (
    (re.compile(r"does not set the number of GPUs"), "data_parallel=8"),
    (re.compile(r"needs several ranks for FSDP2"), "data_parallel=8"),
    (re.compile(r"leaves bf16\.enabled"), "dtype=bf16"),
    (re.compile(r"leaves deepspeed to"), "zero_stage=2"),
    (re.compile(r"\(missing vocab_size\)"), "vocab_size=50304"),
    (re.compile(r"\(missing num_layers"), "preset=llama-3-8b"),
    (re.compile(r"is not in memcalc's catalogue or in the local hub cache"), "preset=llama-3-8b"),
)
SIZES = re.compile(r"\(missing ([\w, ]+)\)")


def main() -> None:
    """Record all sources, or some again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repositories", type=Path)
    parser.add_argument("--only", action="append", help="a repository; of the others what is recorded stays")
    arguments = parser.parse_args()
    known = json.loads(RECORD.read_text()) if arguments.only else []
    found = []
    for repository in dict.fromkeys(source.repository for source in SOURCES):
        if arguments.only and repository not in arguments.only:
            found += [facts for facts in known if facts["repository"] == repository]
        else:
            sources = (source for source in SOURCES if source.repository == repository)
            found += [facts for source in sources for facts in read(source, arguments.repositories)]
    lines = ",\n".join(json.dumps(facts, ensure_ascii=False, separators=(",", ":")) for facts in found)
    RECORD.write_text(f"[\n{lines}\n]\n")
    print(f"{len(found)} files in {RECORD}")


def read(source: Source, root: Path) -> Iterator[dict[str, Any]]:
    """The facts of each file of a source that is a configuration we read."""
    repository = root / source.repository.replace("/", "+")
    if (repository / "repo").is_dir():
        repository /= "repo"

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(repository), *words], check=True, stdout=subprocess.PIPE).stdout

    commit = git("rev-parse", f"{source.revision}^{{commit}}").decode().strip()
    listed = git("ls-tree", "-r", "--name-only", "-z", commit, source.folder).decode().split("\0")
    paths = [path for path in listed if path.endswith(source.suffixes) and "data" not in Path(path).stem]
    beside: list[str] = []
    if source.suffixes == SCRIPTS:
        for line in git("ls-tree", "-r", "-l", "-z", commit).decode().split("\0"):
            entry, _, path = line.partition("\t")
            size = entry.split()[3] if entry else ""  # not a number for an object that the repository lacks
            if path.endswith(BESIDE) and size.isdecimal() and int(size) <= MOST_BESIDE:
                beside.append(path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in [*paths, *beside]:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(git("show", f"{commit}:{path}"))
        for path in paths:
            facts = facts_of(folder / path)
            if facts is not None:
                yield {"repository": source.repository, "commit": commit, "path": path, **facts}


def facts_of(path: Path) -> dict[str, Any] | None:
    """Return the classified fields of a file, missing fields, and whether it can be estimated; None for other files."""
    try:
        imported = import_file(path) or list_config_json(path)
    except (InputError, Unavailable) as error:
        return {"framework": None, "refused": str(error).replace(str(path), path.name), "limits": []}
    if imported is None:
        return None
    given: list[str] = []
    missing = {field for field, _ in imported.missing}
    while True:
        try:
            spec = load(path, given)
        except (InputError, Unavailable) as error:
            sizes = SIZES.search(str(error))
            missing |= {f"model.{size}" for size in sizes[1].split(", ")} if sizes else set()
            more = next((each for words, each in GIVEN if words.search(str(error)) and each not in given), None)
            if more is None:
                reason = str(error).replace(str(path), path.name)
                return {**lists_of(imported, missing), "given": given, "refused": reason, "limits": []}
            given.append(more)
        else:
            limits = [resolved(spec, limit) for limit in spec.origin.limits]
            held = [[limit.feature, limit.holds_memory, limit.at_least_bytes] for limit in limits]
            return {
                **lists_of(imported, missing),
                "given": given,
                "refused": None,
                "limits": held,
                "program": spec.training.framework,
                "versions": {} if (found := spec.training.versions) is None else found.model_dump(exclude_none=True),
                "assumed": [[each.field, each.taken, round(each.share, 4)] for each in spec.origin.assumptions],
            }


def lists_of(imported: ImportedConfig, missing: set[str]) -> dict[str, Any]:
    """The names of the fields in each of the lists."""
    return {
        "framework": imported.framework.name,
        "mapped": [path for path, _, _ in imported.mapped],
        "no_effect": [path for path, _ in imported.no_effect],
        "not_modelled": [path for path, _ in imported.not_modelled],
        "unknown": list(imported.unknown),
        "missing": sorted(missing),
    }


if __name__ == "__main__":
    main()
