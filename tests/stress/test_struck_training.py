"""Promise 20, of training: an exception that a signal handler raises at any moment of a step.

A child trains. A timer goes off in the middle of a step, and its handler raises. Then the same process calls ``zero.rollback``
and goes on, and two steps are bit for bit those of a run that nothing struck, with nothing held at the end; or the store says
that it is condemned, and goes on when it was opened again. Each strike line by line: ``tests/zero/test_interrupted.py``.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.quick import quick
from tests.stress.children import forked
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tests.zero.striking import KINDS, ZERO, Struck, StruckError, Trainer, outcome, struck_after

PROMISE = "20 (an exception anywhere in a training step)"
PATIENCE = 150.0
"""Seconds without a word from the child, which says one after each strike, that are a hang."""
CONDEMNED = 0.02
"""Share of strikes after which a store may have to be opened again."""


def duration(trainer: Trainer) -> float:
    """Seconds of a step."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        trainer.step(Trainer.WARM)
        found.append(time.perf_counter() - began)
        trainer.rollback()
    return statistics.median(found)


def training(folder: Path, kind: str, count: int) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        source, trainer = random.Random(f"{kind} {count}"), Trainer(folder, kind)
        seconds, struck = duration(trainer), 0
        while struck < count:
            moment, error = source.uniform(0, seconds), source.choice([Struck, StruckError])
            where = struck_after(moment, error, lambda: trainer.step(Trainer.WARM))
            if where is None:
                trainer.rollback()
                continue
            struck += 1
            found = outcome(trainer)
            if found == "condemned":
                trainer.reopen()
                trainer.goes_on()
            place = "in tiered.zero" if where.startswith(ZERO) else "in the store" if where else "in torch or the model"
            child.say(json.dumps([place, Path(where).name, found]))
            if found not in ("right", "condemned"):
                break
        trainer.close()
        child.say("done")

    return body


@pytest.mark.parametrize("kind", quick(KINDS, ["checkpoint", "in backward", "micro batch", "scaled"]))
@counts(1, 80)
def test_struck_at_random_moments(tmp_path: Path, kind: str, count: int, tally: Tally) -> None:
    with forked(training(tmp_path / "store", kind, count), patience=PATIENCE) as running:
        running.wait_for("done")
        assert running.wait_end() == 0, running.said[-1]
    outcomes: Counter[tuple[str, str]] = Counter()
    for place, file, found in map(json.loads, running.said[:-1]):
        assert found in ("right", "condemned"), f"struck {place}, {file}: {found}"
        tally.count(f"a signal {place}", 1)
        outcomes[place, found] += 1
    print(f"{kind}: " + ", ".join(f"{number} {found} after one {place}" for (place, found), number in sorted(outcomes.items())))
    condemned = sum(number for (_, found), number in outcomes.items() if found == "condemned")
    assert condemned <= max(1, CONDEMNED * count), f"{condemned} of {count} strikes condemned the store"
