"""What is printed of a store's names and meta does nothing to a terminal, fits on it, and can be said in ASCII."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.cli.train.test_train import ONE_THREAD, command
from tests.store.test_verify import flip, place
from tiered import TieredStore
from tiered.cli.main import main
from tiered.cli.output import table
from tiered.errors import shortened, shown

NASTY = "\x1b[2Jgew\u00e9cht\r\n\x07\x9b31m\u202e\u2028\x7f"
LONG = "n" * 100_000
META = {NASTY: NASTY, "step": NASTY, "long": LONG}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with TieredStore.open(tmp_path / "state", dram="2MiB") as store:
        for name in NASTY, LONG, "plain":
            store.put(name, torch.ones(3))
        store.put(f"{NASTY}/checkpoint", torch.ones(3))
        store.commit(META)
    return tmp_path / "state"


def printable(text: str) -> list[str]:
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]
    return lines


def test_ls_shows_control_characters_and_no_more_than_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(folder)]) == 0
    out = capsys.readouterr().out
    lines = printable(out)
    assert max(map(len, lines)) < 1200
    assert len(out) < 5000
    assert "\\x1b[2Jgew\u00e9cht\\r\\n\\x07\\x9b31m\\u202e\\u2028\\x7f " in out
    assert f"{'n' * 49}...{'n' * 48}  float32" in out


def test_json_has_all_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(folder), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    found = json.loads(out)
    assert {one["name"] for one in found["tensors"]} == {NASTY, LONG, "plain", f"{NASTY}/checkpoint"}
    assert found["generations"][0]["meta"] == META


@pytest.mark.parametrize(
    "terminal",
    [
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "latin-1"},
        pytest.param({"PYTHONIOENCODING": "ascii"}, marks=pytest.mark.soak),  # test_verify.py has both of these
        pytest.param({"PYTHONIOENCODING": "ascii:surrogateescape"}, marks=pytest.mark.soak),  # as the C locale is
    ],
    ids=str,
)
def test_on_a_terminal_that_has_ascii_only(folder: Path, terminal: dict[str, str]) -> None:
    others = ("LC_", "LANG") if "LC_ALL" in terminal else ()
    environment = {key: value for key, value in ONE_THREAD.items() if not key.startswith(others)} | terminal
    done = programs.run(command("ls", folder), capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"\x1b" not in done.stdout
    assert b"plain" in done.stdout


def test_verify_names_what_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in NASTY, LONG:
        flip(folder / "data.0", place(folder, name))
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    lines = printable(out)
    assert max(map(len, lines)) < 1200
    assert "\\x1b[2Jgew" in out
    assert f"{'n' * 49}...{'n' * 48}'" in out


def test_errors_name_what_is_in_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a name that is taken, of one in a header, of a field that there is not, of a file that an index names."""
    model = tmp_path / "model"
    model.mkdir()

    def saved(header: object, name: str = "model.safetensors") -> None:
        text = json.dumps(header).encode()
        (model / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))

    def refused(*words: object) -> str:
        assert main(list(map(str, words))) == 1
        (line,) = printable(capsys.readouterr().err.removesuffix("\n"))
        assert len(line) < 5000
        return line

    info = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    for name in NASTY, LONG:
        saved({name: info})
        assert "already has a tensor named" in refused("import", model, folder, "--dram", "2MiB")
        saved({name: {**info, "dtype": name}})
        assert "is of type" in refused("import", model, folder, "--dram", "2MiB")
        saved({"w": {**info, name: 1}})
        assert "unknown field" in refused("import", model, folder, "--dram", "2MiB")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": NASTY}}))
    assert "which is missing" in refused("import", model, folder, "--dram", "2MiB")
    saved({"w": {**info, "shape": [4]}}, NASTY)
    assert "has 12 bytes" in refused("import", model, folder, "--dram", "2MiB")
    out = tmp_path / "out"
    assert "no checkpoint of a model named 'x'; it has: " in refused("export", folder, "--out", out, "--model", "x")
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "most", "says"),
    [
        ("abc", 3, "abc"),
        ("abcdefghijk", 10, "abcd...ijk"),
        ("abcdefghijk", 9, "abc...ijk"),
        ("a\\b \u00e9\u65e5", 100, "a\\b \u00e9\u65e5"),
        ("\0\n\t\x7f", 100, "\\x00\\n\\t\\x7f"),
        ("\ud800\U000e0001\u00a0", 100, "\\ud800\\U000e0001\\xa0"),
        ("", 100, ""),
    ],
)
def test_shown(text: str, most: int, says: str) -> None:
    assert shown(text, most) == says
    assert len(shown(text * 1000, 20)) <= 20
    assert len(shortened(text * 1000, 21)) <= 21


def test_a_table_is_as_wide_as_its_cells_may_be() -> None:
    lines = table([("name", "size"), (LONG, "1"), (NASTY, "2")]).split("\n")
    assert [len(line) for line in lines] == [106, 106, 106]
    printable("\n".join(lines))
