"""The scripts in docs/examples: two lines are other ones than with DeepSpeed, and losses those of the same script in memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs

EXAMPLES = programs.ROOT / "docs" / "examples"
NAMES = ("deepspeed_cifar", "deepspeed_gpt")


def losses(script: Path, folder: Path, config: Path, *more: str) -> list[str]:
    """The lines with a loss that a script prints; each has all digits."""
    command = [sys.executable, str(script), "--config", str(config), *more]
    environment = {**programs.ONE_THREAD, "PYTHONPATH": str(programs.ROOT)}
    done = programs.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize("name", NAMES)
def test_two_lines_are_other_ones_than_with_deepspeed(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    code = text.partition('"""\n\n')[2]
    assert code.count("from tiered import zero") == code.count("zero.initialize(") == 1
    rest = code.replace("from tiered import zero", "").replace("zero.initialize(", "").replace('files("tiered.data")', "")
    assert "tiered" not in rest
    assert "zero." not in rest


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_the_same_script_in_memory(tmp_path: Path, name: str) -> None:
    """The same source, with ``initialize`` of plain torch."""
    script, config = EXAMPLES / f"{name}.py", EXAMPLES / f"{name}.json"
    small = ["--pictures", "96", "--epochs", "1"] if name.endswith("cifar") else ["--steps", "4", "--width", "64"]
    plain = tmp_path / "plain.py"
    plain.write_text(
        script.read_text().replace("from tiered import zero", "from tests.integrations.deepspeed import in_memory as zero")
    )
    paged = losses(script, tmp_path, config, *small)
    assert paged == losses(plain, tmp_path, config, *small)
    assert len(paged) == (6 if name.endswith("cifar") else 8)
    assert float(paged[-1].split()[1]) < float(paged[0].split()[1])


def test_a_second_run_goes_on(tmp_path: Path) -> None:
    """Also with what an earlier process left in the store."""
    script, config = EXAMPLES / "deepspeed_gpt.py", EXAMPLES / "deepspeed_gpt.json"
    found: Any = []
    for steps in 2, 4:
        found += losses(script, tmp_path, config, "--steps", str(steps), "--width", "64")
    (tmp_path / "other").mkdir()
    assert found == losses(script, tmp_path / "other", config, "--steps", "4", "--width", "64")
    assert json.loads((tmp_path / "checkpoints" / "global_step4" / "tiered.json").read_text())["generations"] == [2]
