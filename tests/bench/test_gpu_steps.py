"""What ``make gpu`` does on a GPU, rehearsed at tiny sizes on the stand-in: by the programs that it runs there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu_steps import DONE, NOT_REACHED, OUT_OF_TIME, RUNNING, read
from bench.gpu_train import TWICE, WARM_UP, enough
from tests import fake_device, programs

ENOUGH = 200.0
"""Seconds for all steps, of which they need a tenth."""
PLACES = ("device", "states", "dram", "nvme", "fsdp2")


def states(page: str) -> dict[str, str]:
    """What the page says of each step."""
    table = page.partition("## Steps")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| (\S+) \| [^|]+ \| (.+?) \| .*$", table, re.MULTILINE))


def section(page: str, title: str) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_all_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if isinstance(fake_device.built(), str):
        pytest.skip(f"no fake device: {fake_device.UNUSABLE or 'it cannot be built here'}")
    steps = [*(f"train-{place}" for place in PLACES), "tests", "generate", "copies", "rows"]
    where = ["--out", str(tmp_path / "out"), "--dir", str(tmp_path), "--name", "page", "--seconds", str(ENOUGH)]
    command = [sys.executable, "-m", "bench.gpu_steps", "--device", "stand-in", *where, "--only", *steps]
    process = programs.Popen(command, cwd=programs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed, _ = process.communicate()
    logs = "".join(f"\n{log.name}:\n{log.read_text()}" for log in sorted((tmp_path / "out").glob("*/*.log")))
    page = (tmp_path / "out" / "page.md").read_text()
    assert states(page) == dict.fromkeys(steps, DONE), f"{printed}\n{page}\n{logs}"
    assert process.returncode == 0
    files = {step: tmp_path / "out" / "page" / f"{step}.json" for step in steps}
    found: dict[str, dict[str, Any]] = {step: json.loads(file.read_text()) for step, file in files.items() if file.exists()}

    chosen = found["train-device"]["chosen"]
    assert chosen["state"] == 12 * found["train-device"]["parameters"]
    assert chosen["needed"] == TWICE * chosen["state"] / chosen["rate"]
    measured = dict(chosen["measured"])
    assert measured[chosen["sequences"]] >= chosen["needed"] or chosen["sequences"] == chosen["most"]
    assert f"**{chosen['sequences']} sequences**" in page

    losses = {place: [step["loss"] for step in found[f"train-{place}"]["steps"]] for place in PLACES}
    assert len(losses["device"]) == WARM_UP + 2
    assert losses["states"] == losses["dram"] == losses["nvme"] == losses["device"]
    first, last = (float.fromhex(losses["fsdp2"][at]) for at in (0, -1))  # on the CPU, by other kernels
    assert abs(first - float.fromhex(losses["device"][0])) < 0.01
    assert abs(last - float.fromhex(losses["device"][-1])) < 0.01
    for place in PLACES:
        one = found[f"train-{place}"]
        many = chosen["sequences"]
        assert [step["sequences"] for step in one["steps"]] == [many, many, 1, many, 1]
        assert all(step["seconds"] > 0 for step in one["steps"])
        assert one["peak"]["host"] > 0
    moved = found["train-nvme"]["steps"][-1]
    assert all(moved[link] > 0 for link in ("dram to hbm", "hbm to dram", "nvme to dram", "dram to nvme"))
    assert found["train-nvme"]["budgets"]["dram"] < found["train-nvme"]["state"]
    assert len(re.findall(r"^\| (?:device|states|dram|nvme|fsdp2) \|", section(page, "Training"), re.MULTILINE)) >= 10
    assert section(page, "Training").count(f"{WARM_UP + 2} of {WARM_UP + 2} the same") >= 4

    assert section(page, "Tests that never ran on a GPU").strip() == "1 tests: 1 passed."
    assert section(page, "Rows that had other bits").strip() == "1 rows: 1 identical."
    ways = found["generate"]["ways"]
    assert ways["tiered"]["tokens"] == ways["in device memory"]["tokens"]
    assert found["generate"]["weights"] < 2 * found["generate"]["budget"] + 2
    assert "OTHER TOKENS" not in page
    assert len(found["copies"]["by_size"]) == 6
    assert "NVMe to DRAM to HBM" in section(page, "Copies by size")
    assert not list(tmp_path.glob("bench-gpu-*"))


def test_the_script_makes_no_environment_where_there_is_one(tmp_path: Path) -> None:
    """And gives its arguments to the program; of a step that fails the page says why."""
    asked = {"PYTHON": sys.executable, "REHEARSE": "1", "OUT": str(tmp_path), "DIR": str(tmp_path), "LIMIT": str(int(ENOUGH))}
    command = ["bash", "bench/gpu.sh", "--only", "tests", "--tests", str(tmp_path / "test_fails.py")]
    (tmp_path / "test_fails.py").write_text("def test_one(): pass\n\ndef test_two():\n    assert 1 == 2\n")
    environment = programs.ONE_THREAD | {"PYTHONPATH": str(programs.ROOT)} | asked
    process = subprocess.run(command, cwd=programs.ROOT, env=environment, capture_output=True, text=True)
    (path,) = tmp_path.glob("gpu_*.md")
    page = path.read_text()
    assert process.returncode == 1, process.stdout + process.stderr
    assert re.fullmatch(r"failed: 1 failed, 1 passed.*", states(page)["tests"]), page
    shown = section(page, "Tests that never ran on a GPU")
    assert "2 tests: 1 passed, 1 failed." in shown
    assert re.search(r"- failed: `\S*test_fails.py::test_two`", shown)
    assert f"environment: {sys.executable}" in process.stdout


PROGRAM = """
import json, os, signal, subprocess, sys, time
sys.path.insert(0, os.getcwd())
from bench import gpu_steps

def short(given):
    given.json.write_text(json.dumps({"short": 1}))
    return 0

def hangs(given):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sleeping = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", sleeping], start_new_session=True)
    given.folder.joinpath("much").write_bytes(bytes(1000))
    given.json.write_text(json.dumps({"pids": [os.getpid(), child.pid], "folder": str(given.folder)}))
    time.sleep(1000)

weight, *rest = sys.argv[1:]
gpu_steps.STEPS = tuple(
    gpu_steps.Step(name, name, share, work)
    for name, share, work in (("first", 1, short), ("hangs", float(weight), hangs), ("last", 1000, short))
)
sys.exit(gpu_steps.main(rest))
"""


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., Any]:
    """Start the steps ``first``, ``hangs`` and ``last``; the second has a share of so many thousandths of the last one's."""

    def start(weight: float, program: str = PROGRAM) -> Any:
        (tmp_path / "program.py").write_text(program)
        where = ["--out", str(tmp_path), "--dir", str(tmp_path), "--name", "page", "--seconds", "2000"]
        command = [sys.executable, str(tmp_path / "program.py"), str(weight), *where, "--least", "0", "--grace", "0.1"]
        return programs.Popen(command, cwd=programs.ROOT, stdout=subprocess.DEVNULL)

    return start


def until(found: Callable[[], Any]) -> Any:
    """What ``found`` returns, once that is something."""
    end = time.monotonic() + ENOUGH
    while not (answer := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return answer


def hung(folder: Path) -> dict[str, Any]:
    """What the step that hangs has written, once it has."""
    found: dict[str, Any] = until(lambda: read(folder / "page" / "hangs.json"))
    return found


def are_over(pids: list[int]) -> bool:
    """Whether there are no such processes, or only what their parents have not asked for."""
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
    return True


def test_a_step_beyond_its_limit_is_killed_with_what_it_started(tmp_path: Path, started: Callable[[float], Any]) -> None:
    process = started(2)  # about 4 s
    written = hung(tmp_path)
    assert process.wait() == 1
    page = (tmp_path / "page.md").read_text()
    assert states(page) == {"first": DONE, "hangs": OUT_OF_TIME, "last": DONE}
    assert json.loads((tmp_path / "page" / "last.json").read_text()) == {"short": 1}
    until(lambda: are_over(written["pids"]))  # killed, and perhaps not gone yet
    assert not Path(written["folder"]).exists()


def test_results_are_kept_when_time_ends(tmp_path: Path, started: Callable[[float], Any]) -> None:
    process = started(1000)
    written = hung(tmp_path)
    assert states((tmp_path / "page.md").read_text()) == {"first": DONE, "hangs": RUNNING, "last": NOT_REACHED}
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 1
    assert states((tmp_path / "page.md").read_text()) == {"first": DONE, "hangs": OUT_OF_TIME, "last": NOT_REACHED}
    assert json.loads((tmp_path / "page" / "first.json").read_text()) == {"short": 1}
    until(lambda: are_over(written["pids"]))
    assert not Path(written["folder"]).exists()


def test_a_signal_while_a_step_is_forked_leaves_no_process(tmp_path: Path, started: Callable[..., Any]) -> None:
    struck = "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))\nsys.exit("
    process = started(1000, PROGRAM.replace("sys.exit(gpu_steps.main", struck + "gpu_steps.main"))
    assert process.wait() == 1
    here = str(tmp_path / "program.py")
    assert [one.pid for one in psutil.process_iter(["cmdline"]) if here in (one.info["cmdline"] or ())] == []
    assert states((tmp_path / "page.md").read_text())["first"] == OUT_OF_TIME


@pytest.mark.parametrize(
    ("needed", "most", "fits", "right"),
    [
        *((0.1, 48, 48, 1), (0.34, 48, 48, 1), (0.36, 48, 48, 2), (2.1, 48, 48, 13)),
        *((2.1, 8, 48, 8), (2.1, 48, 5, 5), (0.9, 48, 5, 5)),
    ],
)
def test_the_fewest_sequences_that_compute_long_enough(needed: float, most: int, fits: int, right: int) -> None:
    """0.2 s and 0.15 s a sequence, as long as they fit the device."""
    asked = []

    def measure(number: int) -> float | None:
        asked.append(number)
        return 0.2 + 0.15 * number if number <= fits else None

    assert enough(measure, needed, most)[0] == right
    assert len(asked) <= 6
    assert len(set(asked)) == len(asked)
