"""What an engine prints and writes."""

from __future__ import annotations

import csv
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed.training import Net, batch, engine_of, train
from tiered import MisuseError, UncommittedWarning, zero
from tiered.integrations.deepspeed.engine import _tell_dropped


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("tiered: ") for line in capsys.readouterr().out.splitlines()]


def test_the_table_is_printed_once_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(tmp_path, zero_optimization={"stage": 3, "sub_group_size": 1e9}, dump_state=True)
    lines = lines_of(capsys)
    (row,) = [line for line in lines if line.startswith("zero_optimization.sub_group_size ")]
    assert re.search(r" 1e\+09 +unneeded +updates are made in chunks", row)
    (said,) = [line for line in lines if "samples a step" in line]
    assert said.endswith(f"the store in {tmp_path}/store, DRAM 1.0 MiB; 8 samples a step in 2 passes, fp32")
    assert '  "train_micro_batch_size_per_gpu": 4,' in lines
    train(engine)
    assert lines_of(capsys) == []  # steps_per_print was left out
    engine.destroy()


def test_what_is_printed_at_start_is_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine_of(tmp_path, zero_optimization={"stage": 3, "sub_group_size": 1e9}).destroy()
    first, second = lines_of(capsys)
    assert re.match(r"\d+ keys honoured, 1 not needed \(zero_optimization\.sub_group_size\); tiered deepspeed-config ", first)
    assert "samples a step" in second


def test_what_no_checkpoint_has_is_told_at_the_first_destroy(tmp_path: Path) -> None:
    _tell_dropped.cache_clear()
    for number in range(2):
        engine = engine_of(tmp_path / str(number))
        train(engine)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            engine.destroy()
        assert [one.category for one in found] == [UncommittedWarning] * (1 - number)
        assert all("last save_checkpoint" in str(one.message) and one.filename == __file__ for one in found)


def test_lines_between_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(tmp_path, steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True)
    lines_of(capsys)
    train(engine, passes=10)
    lines = lines_of(capsys)
    assert len(lines) == 6
    for number, (step, times, memory) in enumerate(zip(lines[::3], lines[1::3], lines[2::3], strict=True)):
        assert re.fullmatch(rf"step={2 * number + 2}, skipped=0, lr=\[0\.01\], [\d.]+ samples/s", step)
        found = re.fullmatch(r"time \(ms\) \| forward: ([\d.]+) \| backward: ([\d.]+) \| step: ([\d.]+)", times)
        assert found
        assert all(float(milliseconds) > 0 for milliseconds in found.groups())
        assert re.match(r"memory \| dram: .*, peak .* \| nvme: ", memory)
    engine.destroy()


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_files(tmp_path: Path) -> None:
    log = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "mine"}
    fp16 = {"enabled": True, "initial_scale_power": 5}
    engine = engine_of(tmp_path, csv_monitor=log, wall_clock_breakdown=True, fp16=fp16)
    seen = train(engine, passes=4)
    engine.destroy()
    folder = tmp_path / "logs" / "mine"
    names = {path.stem.removeprefix("Train_Samples_") for path in folder.iterdir()}
    times = {f"elapsed_time_ms_{phase}" for phase in ("forward", "backward", "step")}
    assert names == {"train_loss", "lr", "loss_scale", *times}
    assert rows_of(folder / "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.01"], ["16", "0.01"]]
    assert rows_of(folder / "Train_Samples_loss_scale.csv")[1:] == [["8", "32.0"], ["16", "32.0"]]
    losses = rows_of(folder / "Train_Samples_train_loss.csv")
    assert losses[0] == ["step", "train_loss"]
    expected = [(seen[0] + seen[1]) / 2, (seen[4] + seen[5]) / 2]
    assert [float(value) for _, value in losses[1:]] == pytest.approx(expected)

    engine = engine_of(tmp_path, csv_monitor=log)  # goes on in the same files
    train(engine, passes=2)
    engine.destroy()
    assert rows_of(folder / "Train_Samples_lr.csv")[3:] == [["8", "0.01"]]


def test_tensorboard_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in its place says what it was told; without one the error names the package."""
    events: list[tuple[str, float, int]] = []
    folders = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            folders.append(log_dir)

        def add_scalar(self, name: str, value: float, at: int) -> None:
            events.append((name, value, at))

        def flush(self) -> None: ...

        def close(self) -> None:
            folders.append("closed")

    fake: Any = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    log = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = engine_of(tmp_path, tensorboard=log)
    train(engine, passes=2)
    engine.destroy()
    assert folders == [str(tmp_path / "job"), "closed"]
    assert [name for name, *_ in events] == ["Train/Samples/train_loss", "Train/Samples/lr"]
    assert events[1][1:] == (0.01, 8)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MisuseError, match="pip install tensorboard"):
        engine_of(tmp_path, tensorboard=log)


def operations(samples: int) -> int:
    """Of forward and backward of ``Net``: each product of matrices, and in backward two for each of them. GELU, embedding and
    norm are not counted by torch."""
    tokens = samples * 6
    return sum(3 * 2 * tokens * inputs * outputs for inputs, outputs in ((32, 64), (64, 32), (32, 17)))


@pytest.mark.parametrize("detailed", [True, False])
def test_operations_are_counted_in_one_pass(tmp_path: Path, detailed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "profile.txt"
    profile: dict[str, Any] = {"enabled": True, "profile_step": 2, "detailed": detailed, "top_modules": 2, "module_depth": 1}
    engine = engine_of(tmp_path, flops_profiler={**profile, "output_file": str(file) if detailed else None})
    assert engine.wall_clock_breakdown()
    lines_of(capsys)
    train(engine, passes=2)
    assert not file.exists()
    train(engine, 2, 4)
    lines = file.read_text().splitlines() if detailed else lines_of(capsys)
    assert lines[0].endswith("operations of forward and backward, step 2")
    assert re.match(rf"parameters 4,8\d\d, operations {operations(4):,} in ", lines[1])
    if detailed:
        assert lines[2] == f"depth 0: Net {operations(4):,} (100%)"
        assert re.match(r"depth 1: Net\.body [\d,]+ \(88%\), Net\.head [\d,]+ \(12%\)", lines[3])
    assert len(lines) == (4 if detailed else 2)
    engine.destroy()


def test_counting_ends_with_an_exception(tmp_path: Path) -> None:
    class Failing(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            found = super().forward(x, y)
            found.register_hook(lambda grad: 1 // 0)
            return found

    torch.manual_seed(0)
    engine = engine_of(tmp_path, Failing(), flops_profiler={"enabled": True})
    loss = engine(*batch(0))
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None  # type: ignore[no-untyped-call]
    engine.destroy()


def test_only_the_first_rank_says_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiered import TieredStore
    from tiered.integrations.deepspeed.config import Log, Reports
    from tiered.integrations.deepspeed.monitors import MonitoredStep, Monitors

    with TieredStore.open(None, dram="1MiB") as store:
        reports = Reports(steps=1, wall_clock=True, memory=True, csv=Log(True, str(tmp_path), "other"))
        second = Monitors(reports, store, torch.nn.Linear(1, 1), first=False)
        second.stepped(MonitoredStep(1, 8, 0, [0.1]))
        second.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "other").exists()
    assert zero.Engine
