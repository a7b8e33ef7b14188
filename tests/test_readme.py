"""The README's programs run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 2
    assert all(len(program.splitlines()) <= 25 for program in PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS, ids=["store", "training"])
def test_program(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
