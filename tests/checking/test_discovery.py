"""Which files `check` takes for configurations."""

import os
from pathlib import Path
from typing import Any

import pytest

from memcalc.checking.check import check
from memcalc.checking.discovery import find_configs, is_config
from memcalc.checking.policy import Limits
from memcalc.errors import InputError

CONFIGS = {
    "block.yaml": "name: x\nmodel:\n  l: 2\n",
    "comment.yml": "model:   # ours\n  l: 2\n",
    "flow.yaml": "model: {l: 2, d: 64}\n",
    "broken.yaml": "model:\n  l: [2\n",
    "preset.yaml": "preset: gpt3\n",
    "reference.yaml": "hf_config: config.json\n",
    "config.json": '{"model_type": "llama"}',
    "cut_config.json": '{"model_type": "llama", "hidden',
    "marked.yaml": "\ufeffmodel:\n  l: 2\n",
    "unclosed.yaml": "model: [2\n",
    "unreadable.yml": "on: push: [\n",
    "template_of_one.yaml": "model:\n  l: {{ layers }}\n  {% if wide %}\n",
    "quoted.yaml": '"model":\n  l: 2\n',
}
OTHERS = {
    "name.yaml": "model: gpt-4\n",
    "inner.yaml": "job:\n  model:\n    l: 2\n",
    "workflow.yml": "on: push\n",
    "package.json": '{"model_type": "llama"}',
    "README.md": "model:\n",
    "tokenizer_config.json": '{"vocab": 1}',
    "bad_config.json": "{",
    "empty.yaml": "",
    "helm.yaml": "{{- if .Values.on }}\nkind: Pod\n{{- end }}\n",
    "jinja.yml": "{% for gpu in gpus %}\n- gpu: {{ gpu }}\n{% endfor %}\n",
    "erb.yml": "a: 1\n<% 2.times do %>\n- b\n<% end %>\n",
    "several.yaml": "a: 1\n---\nb: !include c.yaml\n",
    "lock.yaml": "a: " + "x" * 65_536 + ": [\n",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(CONFIGS[name])

    assert is_config(str(tmp_path / name))


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(OTHERS[name])

    assert not is_config(str(tmp_path / name))


def test_directories_are_searched_in_order_and_the_rest_is_counted(tmp_path: Path) -> None:
    for folder in ("b", "a", ".git"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.yaml").write_text(CONFIGS["block.yaml"])
        (tmp_path / folder / "notes.md").write_text("")
    (tmp_path / "c.yaml").write_text(CONFIGS["block.yaml"])
    found = find_configs([tmp_path])

    assert [Path(file).relative_to(tmp_path).as_posix() for file in found.files] == [
        "c.yaml",
        "a/run.yaml",
        "b/run.yaml",
    ]
    assert found.skipped == 2


def test_a_named_file_is_always_taken_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("")

    assert find_configs([path, path, "absent.yaml"]) == ([str(path), "absent.yaml"], 0, [])


def test_a_disk_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files that are not excluded count, so a large repository can be narrowed down."""
    monkeypatch.setattr("memcalc.checking.discovery.MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("data\n")

    with pytest.raises(InputError, match=r"more than 3 files to search\. Name the directories that have your configs"):
        find_configs([tmp_path])
    assert find_configs([tmp_path], lambda path: path.endswith("0.txt")).skipped == 3


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "run.yaml").write_text("preset: gpt2\n")

    assert find_configs([tmp_path]) == ([str(tmp_path / "run.yaml")], 1, [])
    named = check([tmp_path / "pipe.yaml"], Limits(gpu="t4")).outcomes[0]
    assert named.message == "this is a pipe or a device, not a file. Write `-` to read standard input."


def test_unreadable_files_are_reported_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be listed, and a file that cannot be opened, may hold what does not fit."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "secret.yaml").write_text("preset: gpt2\n")
    list_folder, read_text = os.scandir, Path.read_text

    def scandir(path: Any = ".") -> Any:
        if os.fspath(path) == str(closed):
            raise PermissionError(13, "Permission denied", path)
        return list_folder(path)

    def read(self: Path, *arguments: Any, **options: Any) -> str:
        if self.name == "secret.yaml":
            raise PermissionError(13, "Permission denied", str(self))
        return read_text(self, *arguments, **options)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "read_text", read)

    assert find_configs([tmp_path]) == ([str(tmp_path / "secret.yaml"), str(closed)], 0, [])
    report = check([closed], Limits(gpu="t4"))
    assert report.exit_code == 2
    assert (
        report.outcomes[0].message
        == "the directory cannot be listed: Permission denied. Check the permissions, or leave the directory out."
    )


def test_directories_behind_links_are_reported(tmp_path: Path) -> None:
    """They may lead to data sets, or back: they are not entered, and nobody is to think that they were."""
    (tmp_path / "in").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.yaml").write_text("preset: gpt2\n")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")

    assert find_configs([tmp_path / "in"]) == ([], 0, [str(tmp_path / "in" / "link")])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("args.txt", "--num-layers 2\n--hidden-size 64\n"),
        ("train.json", '{"model_name_or_path": "gpt2", "per_device_train_batch_size": 2}'),
        ("lit.yaml", "checkpoint_dir: checkpoints/gpt2\ntrain: {micro_batch_size: 1}\n"),
    ],
)
def test_what_is_read_where_it_is_named_is_found_in_a_directory(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)

    assert find_configs([tmp_path]).files == [str(tmp_path / name)]


def test_a_text_about_arguments_is_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("We pass --num-layers 2 and --hidden-size 64.\n")

    assert find_configs([tmp_path]).files == []


def test_braces_stand_for_each_of_their_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell: one that is missing is named, and a file of that very name is itself."""
    for name in ("a.yaml", "b-1.yaml", "b-2.yaml"):
        (tmp_path / name).write_text("preset: gpt2\n")
    monkeypatch.chdir(tmp_path)

    assert find_configs(["{a,c}.yaml", "{b,d}-*.yaml"]).files == [
        "a.yaml",
        "c.yaml",
        "b-1.yaml",
        "b-2.yaml",
        "d-*.yaml",
    ]
    (tmp_path / "{a,c}.yaml").write_text("preset: gpt2\n")
    assert find_configs(["{a,c}.yaml"]).files == ["{a,c}.yaml"]
