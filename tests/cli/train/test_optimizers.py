"""``tiered train --optimizer``: each as in memory, and stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.train.trainings import TINY, losses, same, stop_at, values
from tests.quick import quick
from tiered import TieredStore, zero
from tiered.cli.main import main
from tiered.cli.train.optimizers import kind_named
from tiered.cli.train.options import OPTIMIZERS
from tiered.zero.rules.known import CHOICES, KNOWN, KnownOptimizer

PARAMETERS = 117_504
"""The model of TINY has a few more."""


COMPARED = [name for name in OPTIMIZERS if kind_named(name).known.in_torch is not None]


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
    assert report["compared"]["optimizer states"]["numbers"] >= (kind_named(name).bytes_kept - 4) / 4 * PARAMETERS


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in COMPARED])
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
            assert main([*run, str(tmp_path / "whole"), "--json", str(tmp_path / "whole.json")]) == 0
        assert f"of parameters and states of {name}" in capsys.readouterr().out
        with monkeypatch.context() as patch:
            stop_at(patch, len(checks) // 2)
            assert main([*run, str(tmp_path / "parts")]) == 130
        capsys.readouterr()
        resume = ["train", str(tmp_path / "parts"), "--existing", "resume"]
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
    assert tuple(CHOICES) == OPTIMIZERS
    assert set(COMPARED) == set(OPTIMIZERS) - {"lion", "adamw_bf16", "adamw8bit", "adamw4bit"}


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.rule.__name__)
def test_an_optimizer_updates_by_its_rule(known: KnownOptimizer, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 16, dtype=torch.bfloat16))
    with TieredStore.open(tmp_path / "store", dram="8MiB") as store:
        made = getattr(zero, known.optimizer)([weight], **known.settings, **known.arguments, store=store)
        assert isinstance(made, zero.Optimizer)
        assert type(made.rule(0)) is known.rule
        assert {name: made.param_groups[0][name] for name in known.settings} == known.settings


def test_bytes_of_states() -> None:
    kept = {name: round((kind_named(name).bytes_kept - 4) / 4, 6) for name in OPTIMIZERS}
    assert kept == {
        **dict.fromkeys(("adamw", "adam", "nadam", "radam", "adamax"), 2),
        **dict.fromkeys(("sgd", "adagrad", "rmsprop", "lion"), 1),
        "adafactor": round(2 / 1024, 6),
        "adamw_bf16": 1,
        "adamw8bit": round(2 / 4 + 2 / 256, 6),
        "adamw4bit": round(1 / 4 + 2 / 128, 6),
    }
