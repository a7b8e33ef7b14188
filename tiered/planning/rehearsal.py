"""Steps that are played in a simulated store: the bytes that they move, the time that they take, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from tiered.engine.claims import Token
from tiered.planning.notes import (
    AheadNote,
    CreateNote,
    DeleteNote,
    EndNote,
    LeaseNote,
    Operation,
    PauseNote,
    StepNotes,
    WorkNote,
)
from tiered.planning.simulated import DriveRates, SimulatedStore
from tiered.store import Touch
from tiered.zero.paging.step_trace import LONGEST, Prefetch

__all__ = ["COUNTED", "WARM_UP", "Rehearsed", "Seconds", "rehearse"]

WARM_UP, COUNTED = 2, 2
"""Steps that are played before those that count, and those that count. The order of the first is known, which a training has to
see once; what it leaves in memory is soon the same."""


class Seconds(Protocol):
    """What steps take of the processor: each operation the kind of work, and seconds; and ``lost`` seconds that the store's
    thread takes from work of a kind to move so many bytes in so many transfers beside it."""

    def lost(self, nbytes: float, transfers: int, beside: str) -> float: ...

    def __call__(self, operation: Operation, /) -> tuple[str, float]: ...


@dataclass(frozen=True)
class Offloading:
    """What of the activations goes through the store in a step: bytes that are put there and that come back, ``hidden`` of them
    without waiting for the drive; ``waited``: seconds that a step waits for room in forward and for bytes in backward."""

    stored: float = 0.0
    restored: float = 0.0
    hidden: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class Rehearsed:
    """One step, on average over those that count. Bytes of the drive; ``seconds`` in all; ``by_work`` seconds of the processor
    by kind; ``waiting`` for reads and for room; ``busy``: seconds that the drive worked; ``peak``: bytes of the pool in use at
    most; ``touches``: leases and creations; ``offloading``: what of these were activations."""

    read: float
    written: float
    seconds: float
    waiting: float
    busy: float
    peak: int
    touches: int
    by_work: dict[str, float] = field(default_factory=dict)
    offloading: Offloading = field(default_factory=Offloading)


class _NoTime:
    """Takes no time for anything: the drive sets the pace."""

    def lost(self, nbytes: float, transfers: int, beside: str) -> float:
        return 0.0

    def __call__(self, operation: Operation) -> tuple[str, float]:
        return "none", 0.0


no_time = _NoTime()


def rehearse(
    step: StepNotes,
    dram: int,
    drive: DriveRates,
    seconds: Seconds = no_time,
    *,
    prefetch: Prefetch = "on",
    warm_up: int = WARM_UP,
    counted: int = COUNTED,
) -> Rehearsed:
    """Play a step some times in a store of ``dram`` bytes. Raises CapacityError where it does not fit."""
    with closing(SimulatedStore(dram, drive)) as store:
        store.place(step.initial)
        order = [Touch(key, use=use, nbytes=nbytes) for key, use, nbytes in zip(*step.touches(), strict=True)]
        if len(order) < LONGEST:  # of others a training sees no end
            store.follow(order, prefetch=prefetch)
        works = [seconds(operation) for operation in step.operations]
        computing = _computing(works)
        for _ in range(warm_up):
            _play(store, step, seconds, works, computing, {}, {})
        before, began, busy = store.moved, store.clock.now, store.drive.busy
        stalled = store.statistics().stalled
        work: dict[str, float] = {}
        touches, saved = 0, dict[str, float]()
        for _ in range(counted):
            touches += _play(store, step, seconds, works, computing, work, saved)
        after, seen = store.moved, store.statistics()
        return Rehearsed(
            read=(after[0] - before[0]) / counted,
            written=(after[1] - before[1]) / counted,
            seconds=(store.clock.now - began) / counted,
            waiting=(seen.stalled - stalled) / counted,
            busy=(store.drive.busy - busy) / counted,
            peak=seen.tier("dram").peak,
            touches=touches // counted,
            by_work={kind: total / counted for kind, total in work.items()},
            offloading=Offloading(**{kind: total / counted for kind, total in saved.items()}),
        )


def _play(
    store: SimulatedStore, step: StepNotes, seconds: Seconds, works: Sequence[tuple[str, float]], computing: Sequence[str],
    work: dict[str, float], saved: dict[str, float],
) -> int:
    open_leases: dict[int, AbstractContextManager[Any]] = {}
    lifetimes: dict[str, Token] = {}
    touches = 0
    begins = free = store.clock.now  # of the network: when the next gather may begin, and when the last exchange has ended
    moved, transfers = sum(store.moved), store.transfers
    for operation, (kind, taken), beside in zip(step.operations, works, computing, strict=True):
        if (now := store.transfers) > transfers:
            lost = seconds.lost(sum(store.moved) - moved, now - transfers, beside)
            moved, transfers = sum(store.moved), now
            if lost:
                work["transfers"] = work.get("transfers", 0.0) + lost
                store.compute(lost)
        if taken and kind == "network":  # it goes on beside computing, for the unit that follows
            free = max(begins, free) + taken
            taken, begins = max(0.0, free - store.clock.now), max(free, store.clock.now)
        if taken:
            work[kind] = work.get(kind, 0.0) + taken
            store.compute(taken)
        if isinstance(operation, LeaseNote):
            touches += len(operation.keys)
            access = "write" if operation.write else "read"
            nbytes = step.activations.get(operation.keys[0], 0) if operation.keys else 0
            there, waited = bool(nbytes) and store.has_in_memory(operation.keys[0]), store.waited
            lease = open_leases[operation.number] = store.lease(list(operation.keys), access=access)
            lease.__enter__()
            if nbytes:
                _add(saved, restored=nbytes, hidden=nbytes if there else 0, waited=store.waited - waited)
        elif isinstance(operation, EndNote):
            open_leases.pop(operation.number).__exit__(None, None, None)
        elif isinstance(operation, CreateNote):
            touches += 1
            waited = store.waited
            if operation.temporary:
                lifetimes[operation.key] = store.make_temporary(operation.key, operation.nbytes)
            else:
                store.make(operation.key, operation.nbytes)
            if operation.key in step.activations:
                _add(saved, stored=operation.nbytes, waited=store.waited - waited)
        elif isinstance(operation, DeleteNote):
            if lifetimes.pop(operation.key, None) is None:
                store.delete(operation.key)
        elif isinstance(operation, AheadNote):
            store.hint(operation.keys)
        else:
            assert isinstance(operation, PauseNote | WorkNote)
    return touches


def _computing(works: Sequence[tuple[str, float]]) -> list[str]:
    """Return, for each piece of work, which kind of computing comes next, itself included: what is moved before goes on beside
    that."""
    found, kind = list[str](), ""
    for next_kind, taken in reversed(works):
        if taken and next_kind not in ("store", "network"):
            kind = next_kind
        found.append(kind)
    return found[::-1]


def _add(to: dict[str, float], **more: float) -> None:
    for name, value in more.items():
        to[name] = to.get(name, 0.0) + value
