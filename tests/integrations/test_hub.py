"""Models of the Hugging Face hub by name, with the real ``huggingface_hub`` against a small server of files on the loopback."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("huggingface_hub")

from tests.cli.test_generate import llama
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
    its own."""
    around = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    around |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1" if offline else "0")
    command = [sys.executable, "-c", MAIN, json.dumps(commands)]
    return subprocess.run(command, cwd=folder, env={**os.environ, **around}, text=True, capture_output=True, timeout=300)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model in several safetensors files, beside files that nobody needs; and one without a configuration."""
    tiny = tmp_path / "served" / "tiny"
    llama().save_pretrained(tiny, max_shard_size="60KB")
    assert len(list(tiny.glob("*.safetensors"))) > 1
    for name in NOT_NEEDED:
        (tiny / name).write_bytes(b"not needed")
    bare = tmp_path / "served" / "bare"
    bare.mkdir()
    (bare / "README.md").write_bytes(b"no configuration")
    return tmp_path / "served"


PLAN = ["plan", "org/tiny", "--no-measure", "--context", "16", "--dram", "8MiB"]
IMPORT = ["import", "org/tiny", "store", "--dram", "8MiB"]


def test_plan_fetches_the_configuration_and_import_the_weights(root: Path, tmp_path: Path) -> None:
    with hub(root) as (endpoint, fetched):
        done = run(tmp_path, endpoint, PLAN, IMPORT)
        assert done.stdout.endswith("[0, 0]\n"), done.stderr
        assert done.stdout.startswith("model     tiny of ")
        assert "LlamaForCausalLM of " in done.stdout
        assert fetched[0] == "config.json"
        assert not set(NOT_NEEDED) & set(fetched)
        assert set(fetched) >= {"model.safetensors.index.json", *(path.name for path in (root / "tiny").glob("model-*"))}
        assert len(fetched) == len(set(fetched))
    done = run(tmp_path, NOWHERE, PLAN, [*IMPORT, "--existing", "overwrite"], offline=True)  # from the cache
    assert done.stdout.endswith("[0, 0]\n"), done.stderr


def test_one_line_says_how_to_get_what_is_not_there(root: Path, tmp_path: Path) -> None:
    with hub(root) as (endpoint, _):
        done = run(tmp_path, endpoint, ["plan", "org/other"], ["import", "org/other", "store"], ["plan", "org/bare"])
    assert done.stdout == "[1, 1, 1]\n"
    other, again, bare = (line for line in done.stderr.splitlines() if line.startswith("tiered: "))
    assert other == again
    assert other.startswith("tiered: org/other is no folder here, and the hub does not give it (")
    assert "404" in other
    assert other.endswith("; to get it: hf download org/other --local-dir other, and name that folder")
    assert "org/bare has no config.json on the hub" in bare
    done = run(tmp_path, NOWHERE, ["plan", "org/never"], offline=True)
    assert done.stdout == "[1]\n"
    assert "hf download org/never" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "store").exists()


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
