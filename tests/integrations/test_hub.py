"""Models of the Hugging Face hub by name, with the real ``huggingface_hub`` against a small server of files on the loopback."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("transformers")
pytest.importorskip("huggingface_hub")

from tests import programs
from tests.cli.test_generate import llama
from tests.programs import ONE_THREAD
from tiered.errors import MisuseError
from tiered.integrations.hub import folder_of, is_hub_name

NOT_NEEDED = "consolidated.safetensors", "pytorch_model.bin", "README.md"
NOWHERE = "http://127.0.0.1:9"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the folders in ``root`` as models ``org/FOLDER`` at the address that is given; and the files that were fetched."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked = re.fullmatch(r"(?:/api/models)?/org/([\w-]+)/(revision|tree|resolve)/[\w]+(?:/(.*))?", path)
            files = {file.name: file.read_bytes() for file in (root / asked[1]).glob("*")} if asked else {}
            if asked is None or not files or (asked[3] and asked[3] not in files):
                self.send_error(404)
                return
            contents = files.get(asked[3], b"")
            if asked[2] == "revision":
                siblings = [{"rfilename": one} for one in files]
                contents = json.dumps({"id": asked[1], "sha": COMMIT, "siblings": siblings}).encode()
            elif asked[2] == "tree":
                contents = json.dumps(
                    [{"type": "file", "path": one, "size": len(all_), "oid": digest(all_)} for one, all_ in files.items()]
                ).encode()
            elif body:
                fetched.append(asked[3])
            self.send_response(200)
            self.send_header("Content-Length", str(len(contents)))
            self.send_header("ETag", f'"{digest(contents)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(contents)

        def log_message(self, *given: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", fetched
        finally:
            server.shutdown()


def digest(contents: bytes) -> str:
    return hashlib.sha1(contents).hexdigest()


MAIN = "import json, sys; from tiered.cli.main import main; print([main(words) for words in json.loads(sys.argv[1])])"


def run(folder: Path, endpoint: str, *commands: list[str], offline: bool = False) -> subprocess.CompletedProcess[str]:
    """Run commands in ``folder``, one after the other. The library reads its variables when it is imported, so in a process of
    its own that has not imported it yet."""
    around = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    around |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1" if offline else "0")
    command = [sys.executable, "-c", MAIN, json.dumps(commands)]
    return programs.run(command, cwd=folder, env=ONE_THREAD | around, text=True, capture_output=True, timeout=300)


PLAN = ["plan", "org/tiny", "--no-measure", "--context", "16", "--dram", "8MiB"]
IMPORT = ["import", "org/tiny", "store", "--dram", "8MiB"]


class Found(NamedTuple):
    """What was ``fetched`` of a hub with ``weights``, and what commands of models that are there, and of others, told
    ``online`` and then ``offline``; and the ``folder`` in which they ran."""

    folder: Path
    weights: set[str]
    fetched: list[str]
    online: subprocess.CompletedProcess[str]
    offline: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A model in several safetensors files, beside files that nobody needs; and one without a configuration."""
    folder, root = tmp_path_factory.mktemp("commands"), tmp_path_factory.mktemp("served")
    llama().save_pretrained(root / "tiny", max_shard_size="60KB")
    weights = {path.name for path in (root / "tiny").glob("*.safetensors")}
    assert len(weights) > 1
    for name in NOT_NEEDED:
        (root / "tiny" / name).write_bytes(b"not needed")
    (root / "bare").mkdir()
    (root / "bare" / "README.md").write_bytes(b"no configuration")
    missing = ["plan", "org/other"], ["import", "org/other", "other"], ["plan", "org/bare"]
    with hub(root) as (endpoint, fetched):
        online = run(folder, endpoint, PLAN, IMPORT, *missing)
    offline = run(folder, NOWHERE, PLAN, [*IMPORT, "--existing", "overwrite"], ["plan", "org/never"], offline=True)
    return Found(folder, weights, fetched, online, offline)


def test_plan_fetches_the_configuration_and_import_the_weights(found: Found) -> None:
    online, offline, fetched = found.online, found.offline, found.fetched
    assert online.stdout.endswith("[0, 0, 1, 1, 1]\n"), online.stderr
    assert online.stdout.startswith("model     tiny of ")
    assert "LlamaForCausalLM of " in online.stdout
    assert fetched[0] == "config.json"
    assert not set(NOT_NEEDED) & set(fetched)
    assert set(fetched) >= {"model.safetensors.index.json", *found.weights}
    assert len(fetched) == len(set(fetched))
    assert offline.stdout.endswith("[0, 0, 1]\n"), offline.stderr  # from the cache


def test_one_line_says_how_to_get_what_is_not_there(found: Found) -> None:
    other, again, bare = (line for line in found.online.stderr.splitlines() if line.startswith("tiered: "))
    assert other == again
    assert other.startswith("tiered: org/other is no folder here, and the hub does not give it (")
    assert "404" in other
    assert other.endswith("; to get it: hf download org/other --local-dir other, and name that folder")
    assert "org/bare has no config.json on the hub" in bare
    assert "hf download org/never" in found.offline.stderr.splitlines()[-1]
    assert not (found.folder / "other").exists()


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MisuseError, match=r"org/tiny is no folder here, .* needs huggingface_hub: pip install '\.\[hf\]'"):
        folder_of("org/tiny", "config")
    assert folder_of(tmp_path, "config") == tmp_path


def test_what_is_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/tiny")
    assert is_hub_name("meta-llama/Llama-3.1-8B")
    for other in "tiny", "./org/tiny", "/org/tiny", "~/org", "a/b/c", "org/tiny/", "../tiny", Path("org/tiny"):
        assert not is_hub_name(other)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").write_text("")
    assert not is_hub_name("org/tiny")
