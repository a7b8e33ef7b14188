"""Sums up what tests of faults counted, wherever they ran (pytest -n runs them in processes of their own); begins with the
files that take longest; and garbage collections leave out what is there before a file's first test, and what tests import."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.stress.tally import TALLY

HERE = Path(__file__).parent
SLOW = (
    *("test_docs.py", "zero/test_device.py", "planning/test_plan.py", "zero/test_ranks.py", "planning/test_steps.py"),
    *("zero/paging/test_written.py", "zero/test_rank_commits.py", "integrations/test_transformers.py"),
    *("cli/train/test_train_ranks.py", "zero/paging/test_parameters.py", "zero/test_compile.py", "zero/paging/test_experts.py"),
    *("zero/paging/test_paging.py", "stress/test_errors.py", "stress/test_sanitizers.py", "stress/test_small_tensors.py"),
    *("zero/test_few_bytes.py", "zero/test_rules.py", "bench/test_gpu_steps.py", "bench/test_calls.py", "io/test_build.py"),
    *("zero/test_rank_features.py", "cli/train/test_train.py", "earlier/test_earlier.py", "store/test_striping.py"),
    *("store/test_chains.py", "integrations/test_import_model.py", "zero/test_rank_trouble.py", "stress/test_power_loss.py"),
    *("integrations/deepspeed/test_engine.py", "zero/checkpoint/test_checkpoint.py", "links/test_disk.py"),
    *("store/test_verify.py", "zero/paging/test_stored_gradients.py", "integrations/test_kv_cache.py", "cli/test_generate.py"),
    *("format/test_manifest.py", "zero/test_interrupted.py", "integrations/test_experts_generate.py", "stress/test_ranks.py"),
    *("zero/paging/test_torch_modules.py", "integrations/deepspeed/test_ranks.py", "stress/test_notebook.py"),
    *("stress/test_kill.py", "stress/test_struck.py", "cli/test_plan.py", "test_packaging.py", "cli/train/test_resume.py"),
    *("stress/test_identity.py", "integrations/test_generation_families.py", "zero/paging/test_torch_operations.py"),
)
"""Files that take five seconds of processor time or ten in all, the longest first. A process that began one of them last would
keep the others waiting."""

FROZEN: list[int] = []
"""How many modules there were each time when what there was was left out of garbage collections."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of pytest-xdist: files with many tests first, which are the quick ones


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {HERE / name: at for at, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.path, len(SLOW)))


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Some tests are the first that compile or plan, for which torch imports as much again."""
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > FROZEN[-1] + 100:
        freeze()


def freeze() -> None:
    """Most of a collection is otherwise going through what torch has made, and what earlier files left to libraries: a tenth of
    a second at first, more than half of one after many files, in hundreds of tests."""
    gc.collect()
    gc.freeze()
    FROZEN.append(len(sys.modules))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counted: dict[str, Counter[str]] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", None) == "teardown":
            for tally in (value for name, value in report.user_properties if name == TALLY):
                counted.setdefault(tally["what"], Counter()).update({n: tally[n] for n in ("injected", "fired", "runs")})
    for what in sorted(counted, key=lambda what: (int(re.split(r"\D", what)[0]), what)):
        found = counted[what]
        if found["injected"]:
            terminalreporter.write_line(
                f"faults: promise {what}: {found['injected']:,} injected, {found['fired']:,} fired"
            )
        if found["runs"]:
            terminalreporter.write_line(f"runs: promise {what}: {found['runs']:,} passed")
