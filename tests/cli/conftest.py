"""What is alike in all tests of commands that run in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import programs
from tiered.cli.train import run


@pytest.fixture(scope="module", autouse=True)
def little_text() -> Iterator[None]:
    """As in processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SAMPLE", programs.TEXT)
        yield
