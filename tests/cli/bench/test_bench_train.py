"""``tiered bench train``: three trainings with the same numbers, what each of them took, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import programs
from tests.cli.train.test_train import MIB, ONE_THREAD, command, failure, message
from tiered.cli.bench import series, trainer
from tiered.cli.bench import train as bench_train
from tiered.cli.bench.trainer import PHASES, BenchTraining, TrainerOptions, Variant, first_line, training
from tiered.cli.main import main

MODEL = ["--layers", 2, "--width", 96, "--heads", 4, "--context", 16, "--batch", 2]
TINY = ["bench", "train", *MODEL, "--dram", "1MiB"]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process benches, it benches in forked processes; a command in an interpreter of its own starts others."""
    monkeypatch.setattr(trainer, "subprocess", SimpleNamespace(Popen=programs.Popen, PIPE=subprocess.PIPE))


def found(folder: Path, capsys: pytest.CaptureFixture[str], *more: object, alone: bool = False) -> dict[str, Any]:
    """``alone``: in an interpreter of its own, as all that it starts."""
    words = [*TINY, "--rounds", 2, "--drive", folder, "--json", folder / "it.json", *more]
    if alone:
        done = subprocess.run(command(*words), capture_output=True, text=True, env=ONE_THREAD, timeout=300)
        assert done.returncode == 0, done.stderr
        shown = done.stdout
    else:
        assert main(list(map(str, words))) == 0
        shown = capsys.readouterr().out
    assert "seconds per step" in shown
    assert shown.count("bit by bit") == 2
    report: dict[str, Any] = json.loads((folder / "it.json").read_text())
    assert [path.name for path in folder.iterdir()] == ["it.json"]
    return report


@pytest.mark.parametrize(
    ("more", "alone"),
    [
        pytest.param([], False, marks=pytest.mark.soak),
        (["--accumulate", 2], False),
        pytest.param(["--micro-batch", 2], False, marks=pytest.mark.soak),
        (["--update", "in_backward"], False),
        pytest.param([], True, marks=pytest.mark.soak),
    ],
    ids=["plain", "accumulated", "split", "in_backward", "alone"],
)
def test_the_same_numbers(more: list[object], alone: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = found(tmp_path, capsys, *more, alone=alone)
    memory, dram, disk = (report["variants"][name] for name in ("memory", "dram", "disk"))
    for variant in memory, dram, disk:
        assert variant["differs"] is None
        assert len(variant["losses"]) == bench_train.WARM_UP + 2
        assert all(len(losses) == (2 if "--accumulate" in more else 1) for losses in variant["losses"])
        assert set(variant["phases"]) == set(PHASES)
        assert variant["peak_rss"] > variant["baseline_rss"] > 0
    assert all((norm is None) == ("in_backward" in more) for norm in disk["norms"])
    assert memory["by_memory"] == {"median": 1, "min": 1, "max": 1}
    assert memory["phases"]["waiting"]["max"] == 0
    assert memory["pool"] is None
    assert memory["bytes_per_parameter"]["read"]["max"] == dram["bytes_per_parameter"]["read"]["max"] == 0
    assert disk["bytes_per_parameter"]["read"]["min"] > 1
    assert disk["pool"]["peak_bytes"] <= disk["pool"]["budget_bytes"] == MIB < dram["pool"]["peak_bytes"]


def test_a_difference_is_found() -> None:
    nan = float("nan")
    ours = [{"losses": [1.0, nan], "norm": 0.5}, {"losses": [1.0], "norm": None}]
    assert bench_train._difference(ours, [{"losses": [1.0, nan], "norm": 0.5}, {"losses": [1.0], "norm": None}]) is None
    other = [{"losses": [1.0, nan], "norm": 0.5}, {"losses": [1.0000000000000002], "norm": None}]
    assert bench_train._difference(ours, other) == "step 2: 1.0, not 1.0000000000000002"


class TestRefused:
    @pytest.mark.parametrize(
        ("more", "why"),
        [
            (["--update", "in_backward", "--accumulate", 2], "leave out --accumulate"),
            (["--layers", 100_000, "--width", 4000], "lower --layers or --width"),
            (["--text", "/nowhere"], "training on disk: cannot read the text /nowhere"),
            (["--dram", "512KiB"], "the smallest is 1,048,576 bytes"),
        ],
    )
    def test_with_a_reason(self, more: list[object], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        import re

        capsys.readouterr()
        assert main(list(map(str, [*TINY, *more, "--drive", tmp_path]))) == 1
        shown = capsys.readouterr().err.splitlines()[-1]
        assert re.search(why, shown), shown
        assert not list(tmp_path.iterdir())

    def test_full_disk(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(series, "free_on", lambda folder: 1000)
        assert "of disk" in failure(capsys, *TINY, "--drive", tmp_path)

    def test_bad_usage_is_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "train", "--width", "100", "--heads", "3"]) == 2
        assert "--width 100 is not a multiple of --heads 3" in capsys.readouterr().err

    def test_help_has_an_example(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "train", "--help"]) == 0
        assert "examples:\n  tiered bench train" in capsys.readouterr().out


def test_a_training_that_was_killed_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = TrainerOptions(str(tmp_path), None, 2, 96, 4, 16, 2, 1, 1, MIB, "on_fetch", "auto", 1)
    with training(options, Variant("in memory", "memory")) as process:
        process.begin()
        process.child.kill()
        process.child.wait()
        with pytest.raises(Exception, match="training in memory was killed by signal 9, perhaps because memory ran out"):
            process.step()


@pytest.mark.soak
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop(signum: int, code: int, tmp_path: Path) -> None:
    arguments = command(*TINY, "--rounds", 1_000_000, "--drive", tmp_path)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD) as running:
        try:
            assert running.stderr is not None
            assert any("round " in line for line in running.stderr)
            children = psutil.Process(running.pid).children()
            assert len(children) == 3
            running.send_signal(signum)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == code, errors
    assert message(errors.splitlines()[-1]) == "tiered: stopped; the scratch files are removed"
    assert not list(tmp_path.iterdir())
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_within_a_step(
    signum: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the last of the three trains, which ignores it: it is not asked."""
    step, children = BenchTraining.step, list[psutil.Process]()

    def asking(process: BenchTraining) -> dict[str, Any]:
        children.append(psutil.Process(process.child.pid))
        if len(children) == 3:
            os.kill(os.getpid(), signum)
        return step(process)

    monkeypatch.setattr(BenchTraining, "step", asking)
    assert main(list(map(str, [*TINY, "--drive", tmp_path]))) == code
    shown = capsys.readouterr()
    assert message(shown.err.splitlines()[-1]) == "tiered: stopped; the scratch files are removed"
    assert not shown.out
    assert not list(tmp_path.iterdir())
    assert len(set(children)) == 3
    assert not any(child.is_running() for child in children)


def test_one_that_lost_its_parent_ends(tmp_path: Path) -> None:
    options = TrainerOptions(str(tmp_path), None, 2, 96, 4, 16, 2, 1, 1, MIB, "on_fetch", "auto", 1)
    arguments = [sys.executable, "-m", "tiered.cli.bench.trainer"]
    given = first_line(options, Variant("on disk", "disk"), ())
    done = programs.run(arguments, input=given, capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
