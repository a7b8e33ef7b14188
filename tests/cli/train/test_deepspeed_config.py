"""``tiered deepspeed-config``: the table of a configuration, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.deepspeed.documented import DOCUMENTED, SHAPES
from tiered.cli.main import main


def run(tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    code = main(["deepspeed-config", str(file), *more])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("name", SHAPES)
def test_one_that_runs(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(tmp_path, SHAPES[name], capsys)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("keys, none is refused")


def test_one_with_refused_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(tmp_path, {**SHAPES["transformers zero2"], "wandb": {"enabled": True}}, capsys)
    assert (code, err) == (1, "")
    (line,) = [line for line in out.splitlines() if line.startswith("wandb ")]
    assert " refused " in line
    assert "it sends data to a service" in line
    assert out.splitlines()[-1] == "refused: wandb"
    (auto,) = [line for line in out.splitlines() if line.startswith("optimizer.params.lr ")]
    assert auto.endswith("filled at start")


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(tmp_path, DOCUMENTED, capsys, "--json", "--ranks", "1")
    report = json.loads(out)
    assert code == 1
    assert {row["verdict"] for row in report["keys"]} == {"honoured", "unneeded", "refused"}
    assert report["refused"] == [row["key"] for row in report["keys"] if row["verdict"] == "refused"]
    assert "bf16.enabled" in report["refused"]  # fp16 is enabled, too
    report_file = tmp_path / "report.json"
    code, out, _ = run(tmp_path, DOCUMENTED, capsys, "--json", str(report_file))
    assert json.loads(report_file.read_text())["keys"] == report["keys"]
    assert out


def test_batch_sizes_are_those_of_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert run(tmp_path, sizes, capsys, "--ranks", "4")[0] == 0
    code, out, _ = run(tmp_path, sizes, capsys)
    assert code == 1
    assert "refused: train_batch_size is 8, and" in out


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({"train_batch_size": "x"}, "'train_batch_size' is a whole number"),
        ([], "has list in place"),
    ],
)
def test_an_error_is_one_line(tmp_path: Path, config: Any, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(tmp_path, config, capsys)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert says in line


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepspeed-config", "missing.json"]) == 1
    assert capsys.readouterr().err == "tiered: cannot read the configuration missing.json: No such file or directory\n"
