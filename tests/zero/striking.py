"""Exceptions that strike anywhere in a training step, as signal handlers raise them, and what ought to hold afterwards.

``Trainer`` trains a small model from a commit on. ``undisturbed`` is what two steps after that commit give. A strike comes in
the first of them, from a line tracer (deterministic) or from a timer (a real signal); then ``zero.rollback`` and both steps.
"""

from __future__ import annotations

import dis
import functools
import gc
import importlib
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import tiered
from tests.zero.models import Tied, parameter_groups
from tests.zero.paging.splitting import Language
from tiered import Eviction, MisuseError, TieredError, TieredStore, zero
from tiered.store.activations import hooks_active

__all__ = [
    *("KINDS", "PACKAGE", "TIGHT", "ZERO", "Result", "Struck", "StruckError", "Trainer", "condemned", "described", "outcome"),
    *("shuffled", "struck_after", "struck_at"),
]

PACKAGE = str(Path(tiered.__file__).parent)
ZERO = str(Path(PACKAGE) / "zero")
KINDS = ["plain", "checkpoint", "reentrant", "in backward", "micro batch", "stored as bf16", "scaled", "averaged"]
TIGHT = ["tight", "tight checkpoint", "tight reentrant"]
"""With the smallest memory that a store takes, into which the model does not fit."""


class Struck(BaseException):
    """What the handler raises: torch calls no hook after it."""


class StruckError(Exception):
    """The same for handlers that raise an ordinary exception."""


@dataclass
class Result:
    """Of two steps, all of it."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: list[torch.Tensor] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Result)
        return (
            self.losses == other.losses
            and list(self.values) == list(other.values)
            and all(torch.equal(value, other.values[name]) for name, value in self.values.items())
            and len(self.moments) == len(other.moments)
            and all(torch.equal(a, b) for a, b in zip(self.moments, other.moments, strict=True))
        )

    def difference(self, other: Result) -> str:
        if self.losses != other.losses:
            return f"losses {self.losses} where {other.losses} are right"
        wrong = [name for name, value in self.values.items() if not torch.equal(value, other.values[name])]
        return f"parameters {wrong}" if wrong else "moments"


@functools.cache
def freeze() -> None:
    """Collections do not look again at what is there already, modules of torch's for the most part: that takes 0.1 s each."""
    importlib.import_module("torch._dynamo")  # as the first optimizer does
    gc.collect()
    gc.freeze()


class Trainer:
    """A model of some ``kind`` in a store of its own, committed after ``WARM`` steps."""

    WARM = 2

    def __init__(self, folder: Path, kind: str) -> None:
        freeze()
        self.kind, self.folder = kind, folder
        self._make("refuse")
        for number in range(self.WARM):
            self.step(number)
        self.commit()
        self.right = self.two_steps()
        self.rollback()
        if kind not in TIGHT:
            assert self.two_steps() == self.right
            self.rollback()

    def _make(self, existing: str) -> None:
        kind = self.kind
        self.store = TieredStore.open(self.folder, dram="1MiB" if kind in TIGHT else "1.25MiB", eviction=Eviction(deadline=20))
        torch.manual_seed(7)
        mode = next((mode for mode in ("checkpoint", "reentrant") if kind.endswith(mode)), "plain")
        self.model: Any = Language(layers=2) if kind == "micro batch" else Tied(128 if kind in TIGHT else 48, 2, mode)
        policy = zero.Policy(torch.bfloat16) if kind == "stored as bf16" else zero.Policy()
        zero.page(self.model, self.store, policy=policy, micro_batch=2 if kind == "micro batch" else 1, existing=existing)
        update = "in_backward" if kind == "in backward" else "on_fetch"
        self.optimizer = zero.AdamW(parameter_groups(self.model), lr=1e-3, update=update)
        self.scaler = zero.GradScaler(init_scale=2.0**8, growth_interval=3) if kind == "scaled" else None
        self.ema = zero.EMA(self.model, 0.9, use_buffers=True) if kind == "averaged" else None

    def reopen(self) -> None:
        """As a store that is condemned tells to."""
        self.store.close()
        self._make("resume")
        zero.resume(self.model, self.optimizer, scaler=self.scaler)

    def commit(self) -> None:
        zero.commit(self.model, self.optimizer, scaler=self.scaler)

    def rollback(self) -> None:
        zero.rollback(self.model, self.optimizer, scaler=self.scaler)

    def loss(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)  # of dropout
        return self.model.loss(seed, 4) if self.kind == "micro batch" else self.model.loss(seed)

    def step(self, number: int) -> list[float]:
        """Of two batches, clipped; of one where updates come within backward."""
        seen = []
        self.optimizer.zero_grad()
        for seed in (2 * number, 2 * number + 1)[: 1 if self.kind == "in backward" else 2]:
            loss = self.loss(seed)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            seen.append(loss.item())
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.kind != "in backward":
            seen.append(self.optimizer.clip_grad_norm_(0.5).item())
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
            with self.ema.applied():
                seen.append(self.loss(number).item())
        return seen

    def two_steps(self) -> Result:
        losses = self.step(self.WARM) + self.step(self.WARM + 1)
        values = {name: value.clone() for name, value in self.model.state_dict().items()}
        if self.ema is not None:
            with self.ema.applied():
                values |= {f"average of {name}": value.clone() for name, value in self.model.state_dict().items()}
        state = self.optimizer.state_dict()["state"]
        moments = [state[number][name] for number in sorted(state) for name in ("exp_avg", "exp_avg_sq")]
        return Result(losses, values, moments)

    def goes_on(self) -> None:
        """After ``rollback``: both steps are those of a run that nothing struck, and nothing is held."""
        found = self.two_steps()
        assert found == self.right, found.difference(self.right)
        self.rollback()
        self.nothing_is_held()
        assert hooks_active() is None

    def nothing_is_held(self) -> None:
        gc.collect()
        held = self.store.statistics().tiers[0].held
        assert held == 0, f"{held} copies are held: {self.store._engine.state.pools[0].holders()}"

    def close(self) -> None:
        self.store.close()


@functools.cache
def exits(code: CodeType) -> frozenset[int]:
    """Where the instructions begin that call ``__exit__`` of a ``with``."""
    instructions = [(one.opname, one.argval, one.offset) for one in dis.get_instructions(code)]
    found = [offset for name, _, offset in instructions if name == "PUSH_EXC_INFO"]
    for number, (name, _, offset) in enumerate(instructions):
        rest = [one[:2] for one in instructions[number + (name == "SWAP") :] if one[0] != "PRECALL"][:4]
        if rest == [("LOAD_CONST", None)] * 3 + [("CALL", 2)]:
            found.append(offset)
    return frozenset(found)


class Lines:
    """Counts the lines that run in files below ``within``, and raises at one of them. Tracing slows all down by a factor of
    about ten, and changes nothing else."""

    def __init__(self, within: str, at: tuple[str, int, int] | None, error: type[BaseException]) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()
        self.within, self.at, self.error, self.fired, self.next = within, at, error, False, False

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if self.next:
            self.strike()
        if not frame.f_code.co_filename.startswith(self.within):
            return None
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.seen[place] += 1
            if self.at is not None and not self.fired and (*place, self.seen[place]) == self.at:
                # No signal is seen between a body of ``with`` and ``__exit__``, and an exception from a tracer on the way of
                # another one out of it stays the thread's handled exception for good (CPython 3.11 to 3.13). So strike there.
                self.next = frame.f_lasti in exits(frame.f_code)
                if not self.next:
                    self.strike()
        return self

    def strike(self) -> None:
        self.next, self.fired = False, True
        raise self.error("on purpose")


@contextmanager
def struck_at(
    at: tuple[str, int, int] | None, *, within: str = ZERO, error: type[BaseException] = Struck
) -> Iterator[Lines]:
    """Raise at the n-th run of a line: (file, line, n). None: only count."""
    lines = Lines(within, at, error)
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        yield lines
    except (Struck, StruckError):
        pass
    except MisuseError as error:  # what an object raises as it takes over a state is said with its name
        if not isinstance(error.__cause__, StruckError):
            raise
    finally:
        sys.settrace(before)


def struck_after(seconds: float, error: type[BaseException], call: Callable[[], object]) -> str | None:
    """Raise from a signal handler in the middle of ``call``: the innermost line of the package then, "" where there is none.
    None: the call ended before."""
    where: list[str] = []
    armed = True

    def handler(*_: object) -> None:
        if armed:
            where.append(innermost_running())
            raise error("on purpose")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-5))
            call()
        finally:
            armed = False
    except (Struck, StruckError):
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    return where[0] if where else None


def innermost_running() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def condemned(error: BaseException) -> bool:
    return type(error).__name__ == "InterruptedStore"


def outcome(trainer: Trainer) -> str:
    """Of what struck: "right", "condemned" (the store says: reopen), or what is wrong."""
    try:
        trainer.rollback()
        trainer.goes_on()
    except AssertionError as error:
        return f"wrong: {error}"
    except TieredError as error:
        return "condemned" if condemned(error) else f"refused: {type(error).__name__}: {error}"
    except Exception as error:
        return f"broken: {type(error).__name__}: {error}"
    return "right"


def shuffled(places: Counter[tuple[str, int]], seed: int) -> list[tuple[str, int, int]]:
    """One run of each line, at random."""
    source = random.Random(seed)
    found = [(name, line, source.randint(1, times)) for (name, line), times in sorted(places.items())]
    source.shuffle(found)
    return found


def described(place: tuple[str, int, int], error: type[BaseException]) -> str:
    return f"{error.__name__} at {Path(place[0]).name}:{place[1]}, time {place[2]}"
