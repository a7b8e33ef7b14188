"""Plugin for DeepSpeed's suite, with and without a store: processes of tests are forks of pytest's, which know the shim, and
the compiled operators are loaded before, once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch.multiprocessing
from deepspeed.accelerator import get_accelerator

for _name in ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder"):
    _builder = get_accelerator().create_op_builder(_name)
    if _builder is not None and _builder.is_compatible():
        _builder.load()

_set = torch.multiprocessing.set_start_method


def _fork(method: str, *given: Any, **options: Any) -> None:
    """Set the way to start processes; the suite's harness takes a server of forks, and says that forks will do."""
    _set("fork" if method == "forkserver" else method, *given, **options)


torch.multiprocessing.set_start_method = _fork


def pytest_collection_finish() -> None:
    """Have ``pytest.fail`` in a process of a test come back as an AssertionError: it is no Exception, and would end the process
    without an answer, for which the suite's harness waits. Files of tests in one process do not import the harness."""
    if "unit.common" not in sys.modules:
        return
    harness: Any = sys.modules["unit.common"].DistributedTest
    run = harness.run

    def answering(self: Any, **given: Any) -> None:
        try:
            run(self, **given)
        except pytest.fail.Exception as failure:
            raise AssertionError(failure.msg) from None

    harness.run = answering
