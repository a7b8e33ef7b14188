"""``tiered train --optimizer``: each as in memory, and stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.train.trainings import TINY, losses, same, stop_at, values
from tests.quick import quick
from tiered.cli.main import main
from tiered.cli.train.optimizers import kind_of
from tiered.cli.train.options import OPTIMIZERS, WITHOUT_REFERENCE, Options, default_of
from tiered.zero.optimizers.optimizer import NAMED

PARAMETERS = 117_504
"""The model of TINY has a few more."""


def options(**changes: Any) -> Options:
    return Options(**{name: default_of(name) for name in Options.__dataclass_fields__} | changes)


COMPARED = [name for name in OPTIMIZERS if name not in WITHOUT_REFERENCE]


@pytest.mark.parametrize("name", quick(COMPARED, COMPARED[::2]))
def test_same_numbers_as_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(["train", "--check", *TINY, "--optimizer", name, "--steps", "3", "--json", "report.json"]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(Path("report.json").read_text())
    assert report["identical"]
    assert report["compared"]["optimizer states"]["numbers"] >= kind_of(options(optimizer=name)).states * PARAMETERS


@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_no_reference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--check", *TINY, "--optimizer", name]) == 2
    assert f"torch has no {name}" in capsys.readouterr().err


def test_a_name_that_is_none_is_told_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--optimizer", "adadelta"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in OPTIMIZERS)


@pytest.mark.parametrize("name", quick(["lion", "sgd", "adamw8bit"], ["adamw8bit"]))
def test_stopped_and_resumed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["train", *TINY, "--optimizer", name, "--lr", "1e-3", "--steps", "4"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with monkeypatch.context() as patch:
            checks = stop_at(patch, 0)
            assert main([*run, "--dir", str(tmp_path / "whole"), "--json", str(tmp_path / "whole.json")]) == 0
        assert f"of parameters and states of {name}" in capsys.readouterr().out
        with monkeypatch.context() as patch:
            stop_at(patch, len(checks) // 2)
            assert main([*run, "--dir", str(tmp_path / "parts")]) == 130
        capsys.readouterr()
        resume = ["train", "--resume", "--dir", str(tmp_path / "parts")]
        assert main([*resume, "--optimizer", "adamw"]) != 0
        said = capsys.readouterr().err
        assert "--optimizer adamw would make this a different training" in said
        assert f"this one has --optimizer {name}" in said
        assert main([*resume, "--json", str(tmp_path / "parts.json")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert losses(tmp_path / "parts.json") == losses(tmp_path / "whole.json")
    assert same(values(tmp_path / "parts"), values(tmp_path / "whole"))
    assert len([key for key in values(tmp_path / "whole") if key.endswith("#0")]) > 0


def test_names() -> None:
    from tiered import zero

    without = {"Muon"}  # for matrices alone: it needs a second optimizer beside it
    assert {kind_of(options(optimizer=name)).ours.__name__ for name in OPTIMIZERS} == set(NAMED) - without
    assert all(issubclass(getattr(zero, name), zero.Optimizer) for name in NAMED)
