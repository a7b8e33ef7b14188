"""How many faults a test injected, and how many of them really happened; or how often it ran what is no fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

__all__ = ["TALLY", "Tally", "counts"]


@dataclass
class Tally:
    """Of one test. ``what`` names the promise (docs/reliability.md). A fault that never fired is a test that tests nothing."""

    what: str
    injected: int = 0
    fired: int = 0
    runs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, fired: int) -> None:
        """One fault more, of a ``kind``; it happened ``fired`` times."""
        self.injected += 1
        self.fired += bool(fired)
        self.kinds[kind] += bool(fired)

    def ran(self) -> None:
        """Once more something went as it should without a fault: an open, a refusal, a test under a sanitizer."""
        self.runs += 1

    def as_property(self) -> dict[str, str | int]:
        return {"what": self.what, "injected": self.injected, "fired": self.fired, "runs": self.runs}

    def refuse_silence(self) -> None:
        assert self.injected or self.runs, "no fault was injected, and nothing counted"
        idle = sorted(kind for kind, fired in self.kinds.items() if not fired)
        assert self.fired == self.injected, f"{self.injected} faults were injected, {self.fired} fired; never: {idle}"


TALLY = "tally"
"""The name under which a test's report has its tally: reports reach the run that sums up, whichever process the test was in."""


def counts(quick: int, full: int) -> pytest.MarkDecorator:
    """The test's ``count``: ``quick`` in every run, ``full`` in the long one."""
    return pytest.mark.parametrize("count", [quick, pytest.param(full, marks=pytest.mark.soak)])
