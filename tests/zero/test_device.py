"""``on_device.py``, in a process of its own: torch asks once, at its first backward, which devices there are."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests import fake_device, programs

PYTEST = """if True:
    import sys
    from tests import programs
    programs.fork_from_here()  # the ranks, too
    import pytest
    sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the device")
@pytest.mark.skipif(fake_device.UNUSABLE is not None, reason=str(fake_device.UNUSABLE))
@pytest.mark.parametrize(
    "more", [["-k", "not ranks"], pytest.param(["-m", "soak or not soak"], marks=pytest.mark.soak)], ids=["one rank", "all"]
)
def test_parameters_that_compute_on_a_device(tmp_path: Path, more: list[str]) -> None:
    cases = Path(__file__).with_name("on_device.py")
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'within'}", *more]
    command = [sys.executable, "-c", PYTEST, *options, str(cases)]
    ended = programs.run(command, cwd=cases.parents[2], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2_000:]
    assert " passed" in ended.stdout
