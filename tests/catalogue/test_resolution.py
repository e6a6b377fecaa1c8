"""Hub ids: the local hub cache, a hub that answers, one that refuses, and one that is off."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from memcalc.catalogue.resolution import is_hub_id, refuse_url, resolve, resolve_offline, similar_ids
from memcalc.errors import InputError

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CONFIG |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("Qwen/Qwen1.5-0.5B", True),
        ("configs/gpt2.yaml", False),
        ("models/config.json", False),
        ("llama-3-8b", False),
        ("a/b/c", False),
        ("../b", False),
        ("./b", False),
        ("a/b..c", False),
    ],
)
def test_what_can_be_a_hub_id(name: str, is_one: bool) -> None:
    assert is_hub_id(name) == is_one


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", "Write the model's hub id: Qwen/Qwen3-8B."),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main?x=1", "Write the model's hub id: Qwen/Qwen3-8B."),
        ("https://example.org/config.json", "Download the file and name it, or write a hub id"),
        ("s3://bucket/model", "Download the file and name it"),
    ],
)
def test_an_address_is_refused_with_what_to_write(url: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        refuse_url(url)

    assert "a URL is neither a file nor a hub id" in str(caught.value)
    assert remedy in str(caught.value)


def test_similar_ids_have_the_same_words_or_are_spelled_alike() -> None:
    assert similar_ids("qwen3-32b")[0] == "Qwen/Qwen3-32B"
    assert "meta-llama/Llama-3.1-8B" in similar_ids("meta-lama/Llama-3.1-8B")
    assert similar_ids("xyzzy") == []


def cached(folder: Path, hub_id: str, commit: str = COMMIT) -> None:
    """A model's directory as huggingface_hub makes it."""
    model = folder / f"models--{hub_id.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").write_text(json.dumps(CONFIG))


def test_the_local_hub_cache_is_read_without_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path, "me/mine")
    cached(tmp_path, "me/other", "../../etc")

    found = resolve_offline("me/mine")

    assert found is not None
    assert (found.config, found.origin, found.entry) == (CONFIG, "the local hub cache", None)
    assert resolve_offline("me/other") is None


def test_without_a_connection_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.catalogue.resolution.is_offline", lambda: True)
    with pytest.raises(InputError, match=r"me/none: not in memcalc's catalogue .*, and the hub is off\. Unset HF_HUB_"):
        resolve("me/none")

    monkeypatch.setattr("memcalc.catalogue.resolution.is_offline", lambda: False)
    monkeypatch.setattr("memcalc.catalogue.resolution.can_download", lambda: False)
    with pytest.raises(InputError, match=r"Did you mean Qwen/Qwen3-32B .*pip install 'huggingface-hub"):
        resolve("me/Qwen3-32B")


class Hub(BaseHTTPRequestHandler):
    """The hub's answers to requests for config.json: one model, one that is gated, one without the file."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        codes = {"me/gated": (403, "GatedRepo"), "me/empty": (404, "EntryNotFound"), "me/none": (401, "RepoNotFound")}
        name = "/".join(self.path.split("/")[1:3])
        status, code = codes.get(name, (200, ""))
        content = json.dumps(CONFIG).encode() if status == 200 else b"{}"
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"1"')
        size = 10**10 if name == "me/huge" else len(content)
        self.send_header("Content-Length", str(size))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Suppress the HTTP server's log."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def asked(endpoint: str, cache: Path, *models: str) -> list[str]:
    """Return the resolution of each model in a fresh process with its hub at `endpoint`."""
    program = """
import sys
from memcalc.catalogue.resolution import resolve
from memcalc.errors import MemcalcError
for name in sys.argv[1:]:
    try:
        found = resolve(name)
        print(found.origin, found.config["hidden_size"])
    except MemcalcError as error:
        print(error.exit_code, error)
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *models], capture_output=True, text=True, env=environment, cwd=ROOT, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_hub_is_asked_last_and_its_answer_is_kept(hub: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    names = ("me/mine", "me/gated", "me/empty", "me/none", "me/huge")
    found, gated, empty, none, huge = asked(hub, tmp_path, *names)

    assert found == "the hub 64"
    assert gated.startswith("3 me/gated is gated: ")
    assert "hf auth login" in gated
    assert empty.startswith("2 me/empty: this model has no config.json on the hub.")
    assert none.startswith("2 me/none: the hub has no public model of this id.")
    assert huge.startswith("2 me/huge: its config.json has 10,000,000,000 bytes on the hub, and the limit is")
    nobody = "http://127.0.0.1:9"  # the port of "discard", where no server is
    kept, lost, again, close = asked(
        nobody, tmp_path, "me/mine", "me/lost", "me/again", "meta-llama/Llama-3.1-8B-Instrct"
    )
    assert kept == "the local hub cache 64"
    assert lost.startswith("3 me/lost is not in memcalc's catalogue or in the local hub cache, and the hub cannot be ")
    assert again.startswith("3 me/again is not in")
    assert "Did you mean meta-llama/Llama-3.1-8B-Instruct or " in close
