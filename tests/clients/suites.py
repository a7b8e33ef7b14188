"""The suites of clients, and a run of one: which tests pass in memory, which of these with tensors in a store, and why others
do not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.differences import DIFFERENCES, Difference, reason_of

__all__ = ["SUITES", "Outcome", "Result", "Suite", "run"]

PLUGINS = Path(__file__).parent / "plugins"
ROOT = PLUGINS.parents[2]

FAMILIES = ("bert", "electra", "gemma2", "gpt2", "llama", "mamba", "mixtral", "opt", "qwen3", "t5", "vit", "wav2vec2")
"""Of transformers, whose tests that all models share are run: encoders, decoders, both, experts, states, images and sound."""


@dataclass(frozen=True)
class Suite:
    """Files of tests of one client. ``sources``: folders of the checkout that Python imports from; ``version``: a file with the
    client's version, and what finds it there; ``shim``: the plugin that has the client use a store;
    ``before``: one that both runs have; ``one_in``: of how many tests one is run, drawn by their names; ``options``: those of
    pytest."""

    name: str
    client: str
    files: tuple[str, ...]
    shim: str
    sources: tuple[str, ...] = ("src",)
    version: tuple[str, str] = ("", "")
    variables: Mapping[str, str] = field(default_factory=dict)
    before: str | None = None
    one_in: int = 1
    options: tuple[str, ...] = ()


SUITES = (
    Suite(
        "accelerate",
        "accelerate",
        tuple(f"tests/test_{name}.py" for name in ("optimizer", "scheduler", "state_checkpointing", "hooks")),
        "tiered_accelerate",
        version=("src/accelerate/__init__.py", r'__version__ = "(.*?)"'),
    ),
    *(
        Suite(
            name,
            "lightning",
            ("tests/tests_pytorch/models/test_restore.py", "tests/tests_pytorch/checkpointing/test_trainer_checkpoint.py"),
            "tiered_lightning",
            version=("src/version.info", r"(\S+)"),
            variables={"TIERED_CHECKPOINTS": checkpoints},
        )
        for name, checkpoints in (("lightning", "whole"), ("lightning-commits", "commits"))
    ),
    *(
        Suite(
            f"deepspeed-{name}",
            "deepspeed",
            (f"tests/unit/{folder}/test_{name}.py",),
            "tiered_deepspeed",
            sources=(".", "tests"),
            version=("version.txt", r"(\S+)"),
            variables={"DS_ACCELERATOR": "cpu"},
            before="deepspeed_operators",
        )
        for folder, name in (
            ("runtime", "ds_config_dict"),
            ("runtime", "ds_config_model"),
            ("runtime", "ds_initialize"),
            ("runtime", "lr_schedulers"),
            ("checkpoint", "zero_optimizer"),
        )
    ),
    *(
        Suite(
            f"transformers-{name}" + ("-commits" if (name, checkpoints) == ("trainer_checkpointing", "commits") else ""),
            "transformers",
            (f"tests/trainer/test_{name}.py",),
            "tiered_transformers",
            version=("src/transformers/__init__.py", r'__version__ = "(.*?)"'),
            variables={"HF_HUB_OFFLINE": "1", "TIERED_CHECKPOINTS": checkpoints},
        )
        for name, checkpoints in (
            *(("trainer_checkpointing", checkpoints) for checkpoints in ("whole", "commits")),
            *((name, "commits") for name in ("trainer_optimizers", "trainer_resume", "trainer_evaluation", "trainer_callback")),
            *((name, "commits") for name in ("trainer_data", "gradient_clipping")),
        )
    ),
    Suite(
        "transformers-models",
        "transformers",
        tuple(f"tests/models/{family}/test_modeling_{family}.py" for family in FAMILIES),
        "tiered_models",
        version=("src/transformers/__init__.py", r'__version__ = "(.*?)"'),
        variables={"HF_HUB_OFFLINE": "1"},
        options=("-k", "ModelTest"),
    ),
    Suite(
        "peft-custom_models",
        "peft",
        ("tests/test_custom_models.py",),
        "tiered_peft",
        version=("src/peft/__init__.py", r'__version__ = "(.*?)"'),
        one_in=40,
        options=("-o", "addopts="),  # which measure coverage
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a test: "passed", "failed", "skipped", or "ended" where its process ended in it."""

    outcome: str
    what: str = ""
    engaged: bool = False


@dataclass
class Result:
    """What a suite showed. ``differ``: tests that pass in memory and not here, with what they show and the reason, None where
    there is none. ``stopped``: the runs that the limit of time ended, "in memory" or "here"."""

    suite: str
    version: str = ""
    skipped: str = ""
    stopped: tuple[str, ...] = ()
    in_memory: dict[str, Outcome] = field(default_factory=dict)
    here: dict[str, Outcome] = field(default_factory=dict)
    differ: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    @property
    def passed(self) -> list[str]:
        """Return the tests that pass in memory."""
        return [test for test, found in self.in_memory.items() if found.outcome == "passed"]

    @property
    def same(self) -> list[str]:
        """Return those of them that pass here."""
        return [test for test in self.passed if test not in self.differ]

    @property
    def unexplained(self) -> dict[str, str]:
        return {test: what for test, (what, reason) in self.differ.items() if reason is None}


def run(suite: Suite, folder: Path | None, *, limit: float, known: Sequence[Difference] = DIFFERENCES) -> Result:
    """Run ``suite`` of the checkout in ``folder`` twice, as it is and with its shim, each at most ``limit`` seconds."""
    if folder is None:
        return Result(suite.name, skipped="no checkout")
    file, pattern = suite.version
    text = (folder / file).read_text() if file and (folder / file).is_file() else ""
    found = re.search(pattern, text) if pattern else None
    result = Result(suite.name, version=found[1] if found else "unknown")
    files = [folder / name for name in suite.files if (folder / name).is_file()]
    if not files:
        result.skipped = f"the checkout has none of {', '.join(suite.files)}"
        return result
    result.in_memory, in_time = _outcomes(suite, folder, files, None, limit)
    if not in_time:
        result.stopped += ("in memory",)
    if not result.in_memory:
        result.skipped = "no test began"
        return result
    result.here, in_time = _outcomes(suite, folder, files, suite.shim, limit)
    if not in_time:
        result.stopped += ("here",)
    for test in result.passed:
        here = result.here.get(test, Outcome("missing", "the run with the shim did not come to it"))
        if here.outcome != "passed":
            what = f"{here.outcome}: {here.what}"
            result.differ[test] = (what, reason_of(suite.name, test, what, tuple(known)))
    return result


def _outcomes(
    suite: Suite, folder: Path, files: Sequence[Path], shim: str | None, limit: float
) -> tuple[dict[str, Outcome], bool]:
    """Run ``files`` in a process of its own; return what became of each test, and whether the run ended within ``limit``."""
    in_time = True
    with tempfile.TemporaryDirectory(prefix="clients-", ignore_cleanup_errors=True) as scratch:
        written = Path(scratch, "outcomes")
        plugins = [part for name in ("tiered_outcomes", suite.before, shim) if name for part in ("-p", name)]
        sources = [str(PLUGINS), *(str(folder / name) for name in suite.sources), str(ROOT)]
        variables = {
            **os.environ,
            **suite.variables,
            "PYTHONPATH": os.pathsep.join(sources),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TIERED_OUTCOMES": str(written),
            "TIERED_ENGAGED": str(Path(scratch, "engaged")),
            "TIERED_ONE_IN": str(suite.one_in),
            "TMPDIR": scratch,
            "OMP_NUM_THREADS": "1",
        }
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *suite.options, *plugins]
        command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
        with Path(scratch, "log").open("w+") as log:
            process = subprocess.Popen(command, cwd=scratch, env=variables, stdout=log, stderr=log, start_new_session=True)
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                in_time = False
                print(f"{suite.name}: stopped after {limit:.0f} s", file=sys.stderr)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if not written.exists():
                log.seek(0)
                print(log.read()[-2000:], file=sys.stderr)
                return {}, in_time
        return _read(written, folder), in_time


def _read(written: Path, folder: Path) -> dict[str, Outcome]:
    """Return what the plugin wrote, with paths as from ``folder``. A test that only began ended its process; the worst of what
    it reported counts."""
    order = ("ended", "passed", "skipped", "failed")
    found: dict[str, Outcome] = {}
    for line in written.read_text().splitlines():
        one = json.loads(line)
        test = one["test"]
        if one["outcome"] == "began":
            found[test] = Outcome("ended", "its process ended")
            continue
        before = found.get(test, Outcome("ended"))
        if order.index(one["outcome"]) > order.index(before.outcome):
            found[test] = Outcome(one["outcome"], one["what"].replace(f"{folder}/", ""), one["engaged"])
    return found
