"""Promise 16: a training that is killed and resumed, again and again, ends bit for bit as one that was left alone.

``tiered train`` runs in a forked child that is killed at a random one of the calls that change a file or wake a thread: while
the model is written, in a step, in a commit of the background, in the last one. The next child resumes, or begins anew where
nothing was committed yet, until one comes to the end.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cli.train.trainings import TINY, losses, same, values
from tests.stress import syscalls
from tests.stress.syscalls import Child, Ended
from tests.stress.tally import Tally, counts
from tiered.cli.main import main
from tiered.cli.train.options import OPTIMIZERS
from tiered.format.generations import generations, load

PROMISE = "16 (kill and resume is the run that was never killed)"
STEPS = 12
TRAINING = ["train", *TINY, "--layers", "1", "--steps", str(STEPS), "--warmup", "2", "--lr", "3e-3"]
KINDS = {
    "on_fetch": ["--commit-every", "1", "--accumulate", "2"],
    "in_backward": ["--commit-every", "2", "--update", "in_backward"],
}
pytestmark = syscalls.needs_notifications


def job(arguments: Sequence[object]) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        with open(os.devnull, "w") as nothing:
            sys.stdout = nothing
            child.say(f"exit code {main(list(map(str, arguments)))}")

    return body


def killed_at(arguments: Sequence[object], number: int) -> Ended:
    """0: not at all."""
    return syscalls.run(
        job(arguments), syscalls.CHANGING, lambda call: syscalls.kill if call.number == number else syscalls.go_on
    )


def killed(folder: Path, name: str, more: Sequence[str], count: int, source: random.Random, tally: Tally) -> int:
    """Compare a training that is killed ``count`` times with one that is not. Returns how many went on from a commit."""
    whole, here = folder / f"{name} whole", folder / name
    report, expected, resumed = folder / f"{name}.json", folder / f"{name} whole.json", 0
    dry = killed_at([*TRAINING, *more, whole, "--json", expected], 0)
    assert dry.said == ["exit code 0"], dry
    numbers, state = losses(expected), values(whole)
    kills = 0
    while True:
        begun = here.exists() and bool(generations(here))
        if begun and load(here).meta["step"] == STEPS:  # type: ignore[union-attr] # all steps, perhaps not the last update
            shutil.rmtree(here)
            continue
        resumed += begun
        arguments = ["train", "--existing", "resume"] if begun else [*TRAINING, *more]
        arguments += ["--json", report, here]
        ended = killed_at(arguments, source.randint(1, dry.calls // 2) if kills < count else 0)
        if ended.status == -9:
            tally.count("SIGKILL of a training", 1)
            kills += 1
            continue
        assert ended.said == ["exit code 0"], f"after {kills} kills: {ended}"
        assert losses(report) == numbers, f"after {kills} kills"
        assert same(values(here), state), f"after {kills} kills"
        if kills == count:
            return resumed
        shutil.rmtree(here)


@counts(6, 100)
def test_killed_at_random_moments(tmp_path: Path, count: int, tally: Tally) -> None:
    """Half of them in the training whose units are updated within backward."""
    source = random.Random(count)
    resumed = sum(killed(tmp_path, kind, more, count // 2, source, tally) for kind, more in KINDS.items())
    assert resumed > count // 3, "most kills came before the first commit"


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_killed_with_each_optimizer(optimizer: str, tmp_path: Path, tally: Tally) -> None:
    more = ["--commit-every", "1", "--optimizer", optimizer]
    assert killed(tmp_path, optimizer, more, 20, random.Random(optimizer), tally) > 20 // 3
