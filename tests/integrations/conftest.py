"""What the tests of other libraries share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """One thread, because the models are too small for more; of the libraries only errors, and no progress bars. A library that
    no test has imported is not imported here."""
    threads, transformers, datasets = torch.get_num_threads(), _imported("transformers"), _imported("datasets")
    torch.set_num_threads(1)
    level = transformers.logging.get_verbosity() if transformers else None
    if transformers:
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
    if datasets:
        datasets.disable_progress_bars()
    yield
    torch.set_num_threads(threads)
    if transformers:
        transformers.logging.set_verbosity(level)


def _imported(name: str) -> Any:
    return sys.modules.get(name)
