"""Run ``tiered`` in a process of its own: what it printed, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.limited import enter

__all__ = ["tiered"]


def tiered(*words: str, group: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Run a command, in ``group`` where there is a cgroup. Ends the program where it fails, after what it said of that."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tiered.cli", *words, "--json", str(report)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: enter(group))
        if done.returncode:
            sys.exit(f"tiered {words[0]} ended with {done.returncode}")
        found: dict[str, Any] = json.loads(report.read_text())
        return done.stdout, found
