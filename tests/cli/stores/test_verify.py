"""``tiered verify``: exit codes, what is printed, what is written."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests import programs
from tests.cli.train.test_train import ONE_THREAD, command, failure, message
from tests.store.test_verify import LARGE, flip, made, place
from tiered import TieredStore
from tiered.cli.main import main
from tiered.types import PIECE_BYTES


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "store"))


def test_sound(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "generation 2: 5 tensors sound, 8.1 MiB",
        "generation 1: 4 tensors sound, 8.0 MiB",
        f"{folder}: sound; 8.1 MiB read, 5 different tensors in 2 generations",
    ]
    assert shown.err.splitlines()[-1] == "read 8.1 MiB of 8.1 MiB"


def test_damaged(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / "data.0", place(folder, "large") + LARGE - 1)
    flip(folder / "manifest.1", 200)
    assert main(["verify", str(folder), "--json", str(tmp_path / "it.json")]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 5
    where = place(folder, "large") + 2 * PIECE_BYTES
    assert shown[0].startswith(f"damaged: a file of generation 1: {folder}/manifest.1: ")
    assert shown[1:] == [
        "damaged: tensor 'large' of generation 2 (written in 1): "
        f"{folder}/data.0 at byte {where}, 12345 bytes: wrong checksum",
        "generation 2: 1 of 5 tensors damaged, 8.1 MiB",
        "generation 1: its manifest cannot be read",
        f"{folder}: DAMAGED; 8.1 MiB read, 4 different tensors in 2 generations",
    ]
    report = json.loads((tmp_path / "it.json").read_text())
    assert report["sound"] is False
    assert report["folder"] == str(folder)
    assert report["damages"][1] == {
        "what": "wrong checksum",
        "path": f"{folder}/data.0",
        "offset": where,
        "bytes": 12_345,
        "key": "large",
        "generations": [2],
        "written": 1,
    }
    assert report["generations"] == [
        {"number": 2, "tensors": 5, "bytes": LARGE + 60_000, "damaged": 1, "obstacle": None},
        {"number": 1, "tensors": None, "bytes": None, "damaged": None, "obstacle": None},
    ]


def test_a_damaged_header(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tensors are there, and nothing opens."""
    flip(folder / "data.0", 20)
    assert main(["verify", str(folder)]) == 1
    why = f"cannot be opened ({folder}/data.0: the header is damaged (its checksum does not match))"
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"generation 2: {why}; 5 tensors sound, 8.1 MiB",
        f"generation 1: {why}; 4 tensors sound, 8.0 MiB",
        f"{folder}: DAMAGED; 8.1 MiB read, 5 different tensors in 2 generations",
    ]


def test_one_generation_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--generation", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sound"] is True
    assert (report["bytes_read"], report["tensors"]) == (LARGE + 32_000, 3)


def test_several_drives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in "ab"]
    folder = made(tmp_path / "store", paths)
    given = f"--paths {paths[0]} {paths[1]}"
    assert f"have to be named: {given}" in failure(capsys, "verify", folder)
    assert main(["verify", str(folder), *given.split()]) == 0


def test_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TieredStore.open(tmp_path / "new", dram="32MiB"):  # without a commit
        assert f"tiered: {tmp_path / 'new'} is in use by process" in failure(capsys, "verify", tmp_path / "new")
    with TieredStore.open(folder, dram="32MiB"):
        assert main(["verify", str(folder)]) == 0
    assert "is not a tiered store" in failure(capsys, "verify", tmp_path / "none")
    assert "a store's folder is '', which is not the name" in failure(capsys, "verify", "")
    assert "there are: 1, 2" in failure(capsys, "verify", folder, "--generation", 3)
    assert "No such file" in failure(capsys, "verify", folder, "--json", tmp_path / "no" / "it.json")


@pytest.mark.parametrize(
    ("encoding", "damage"),
    [
        ("utf-8:strict", True),
        ("ascii:strict", True),
        ("utf-8:surrogateescape", False),
        *(
            pytest.param(encoding, damage, marks=pytest.mark.soak)
            for encoding, damage in (("utf-8:strict", False), ("ascii:strict", False), ("utf-8:surrogateescape", True))
        ),
    ],
)
def test_names_that_cannot_be_printed(original: Path, tmp_path: Path, encoding: str, damage: bool) -> None:
    """Whatever bytes a folder's name is made of, sound or damaged."""
    folder = Path(shutil.copytree(original, tmp_path / "bad\udcff"))
    report = tmp_path / "it\udcff.json"
    words = [os.fsencode(word) for word in command("verify", folder, "--json", report)]
    if damage:
        flip(folder / "data.0", 20)
    done = programs.run(words, capture_output=True, env=ONE_THREAD | {"PYTHONIOENCODING": encoding})
    assert done.returncode == damage, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout.count(rb"bad\udcff") == (4 if damage else 1)
    assert json.loads(report.read_text())["sound"] is not damage


@pytest.mark.parametrize("arguments", [["verify"], ["verify", "x", "--generation", "0"], ["verify", "x", "--quickly"]])
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert not capsys.readouterr().out


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    assert "examples:\n  tiered verify" in capsys.readouterr().out


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped(folder: Path, signum: int, code: int) -> None:
    """Between two pieces: the last line of progress would be printed at the end only."""
    program = f"""if True:
        import os, signal, sys
        from tiered.store.pieces import PieceReader
        real = PieceReader.wait
        def interrupted(reader):
            os.kill(os.getpid(), {int(signum)})
            return real(reader)
        PieceReader.wait = interrupted
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from tiered.cli.main import main
        sys.exit(main(["verify", {str(folder)!r}]))
    """
    done = programs.run([*command()[:1], "-c", program], capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == code, done.stderr
    assert message(done.stderr) == "tiered: stopped; nothing was changed"
    assert not done.stdout
