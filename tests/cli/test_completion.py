"""``tiered completion``: the scripts load in their shells, and bash completes with one of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tiered.cli.main import main

TRY = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMPREPLY=()
$(complete -p tiered | sed -E 's/.*-F (\\S+) .*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["bench", ""], "io step store train"),
        (["train", "--update-t"], "--update-tier"),
        (["train", "--update", ""], "in_backward on_fetch"),
        (["ls", "my"], "my-store"),
        (["generate", "my"], "my-store"),
        (["bench", "io", "--drive", "my"], "my-store"),
        (["train", "--text", "my"], "my-store my.txt"),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else " ".join(value),
)
def test_bash(words: list[str], completed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-store").mkdir()
    (tmp_path / "my.txt").touch()
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run(
        ["bash", "-c", TRY, "bash", str(script), "tiered", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert " ".join(sorted(done.stdout.split())) == completed, done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    done = subprocess.run(["zsh", "-n"], input=capsys.readouterr().out, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "'fish' is none of bash, zsh" in capsys.readouterr().err
