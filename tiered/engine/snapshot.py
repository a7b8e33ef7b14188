"""All of a store as it is at one moment, written to the bottom while leases go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import filterfalse, islice
from typing import Protocol

from tiered.engine.requests import Request
from tiered.engine.residency import Copy, Entry, State
from tiered.engine.scheduler import Scheduler
from tiered.engine.state import ActiveSnapshot, EngineState
from tiered.errors import CommitError, LeaseConflict
from tiered.types import Key, Slot, Urgency

__all__ = ["Draft", "Flush"]


class Draft(Protocol):
    """Learns where every tensor is. All calls are made under the engine's lock."""

    def begin(self, entries: Iterator[Entry], frozen: dict[Key, None]) -> None:
        """Learn of all tensors; those of ``frozen`` are not at the bottom yet."""

    def add(self, entry: Entry) -> None:
        """Learn that a tensor of ``frozen`` is at the bottom now, as it was."""

    def end(self) -> None:
        """Learn that all of them are."""

    def drop(self) -> None:
        """Learn that the snapshot failed, at whatever point; may come twice."""


class Flush(Request):
    """Writes every tensor that is not temporary to the bottom, as it is when the flush begins: at once, or when another flush
    has ended.

    ``frozen`` are the tensors that are not there yet: a request that would change one waits for its write-back, and for no
    other's. Tensors that are there may change, because what is at the bottom is never written over. A tensor that is replaced
    or deleted meanwhile is set aside.

    Where ``cancelled()`` becomes true before the end, the flush fails: whoever asked for it does something else by now.

    A tensor that is not leased but still referenced from an ended lease is first copied to a slot of its own: bytes that are
    being written must not change. An open WRITE lease is an error.
    """

    deferred = True

    def __init__(
        self,
        draft: Draft,
        duplicate: Callable[[Copy, Slot, int], None],
        urgency: Urgency = Urgency.DEMAND,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(urgency)
        self._cancelled = cancelled
        self.begun = False
        self._active = ActiveSnapshot({}, duplicate, draft.add)
        self._draft = draft
        self._seen = self._disturbed = 0  # how many were frozen, and what had disturbed them, when it looked last

    def __str__(self) -> str:
        return "a flush"

    @property
    def frozen(self) -> dict[Key, None]:
        """The tensors that are not at the bottom yet."""
        return self._active.frozen

    @property
    def unwanted(self) -> bool:
        return self.abandoned or self._cancelled()

    def attempt(self, scheduler: Scheduler) -> bool:
        state = scheduler.state
        if state.snapshot is not None and state.snapshot is not self._active:
            return False
        try:
            if state.snapshot is None:
                self._begin(scheduler)
            elif self._nothing_new(scheduler):
                return False
            self._go_on(scheduler)
            if self._active.frozen:
                return False
            self._draft.end()
        except BaseException:
            self.abandon(state)
            raise
        state.snapshot = None
        return True

    def abandon(self, state: EngineState) -> None:
        if state.snapshot is self._active:
            state.snapshot = None
            for entry in [state.directory.entry(key) for key in self._active.frozen]:
                if entry.aside and not entry.in_flight:
                    state.directory.forget(entry.key)
        if not self.done:
            self._draft.drop()
            self.error, self.done = CommitError("this commit was cancelled: an exception struck the waiting caller"), True

    def _begin(self, scheduler: Scheduler) -> None:
        state = scheduler.state
        if state.spoiled:
            for entry in state.directory.entries():
                for copy in entry.copies if not entry.temporary else ():
                    if copy is not None:
                        state.refuse_spoiled(copy)
        left = {entry.key for entry in state.directory.set_aside_entries()}  # by a flush that was given up
        entries = []
        for entry in state.directory.entries():
            if entry.temporary:
                left.add(entry.key)
            else:
                entries.append(entry)
        for copy in state.unsaved.values():
            if copy.writers:
                raise LeaseConflict(f"tensor {copy.key!r} has an open WRITE lease: end it before a commit")
            copy.failure = None
        self._active.frozen = dict.fromkeys(filterfalse(left.__contains__, state.unsaved))
        state.snapshot = self._active
        self._draft.begin(iter(entries), self._active.frozen)
        self.begun = True
        self.notify()

    def _go_on(self, scheduler: Scheduler) -> None:
        """Have those written back that are not yet. Raises the error that kept one from it."""
        state, frozen = scheduler.state, self._active.frozen
        for key in list(frozen):
            copy = state.unsaved[key]
            if copy.failure is not None:
                failure, copy.failure = copy.failure, None  # a later request tries again
                raise failure
        for key in list(frozen):
            copy = state.unsaved[key]
            if copy.state is State.DIRTY and not copy.in_flight:
                scheduler.save(copy, self)
            else:
                state.transfers.raise_urgency(key, self.urgency)
        self.progress = self._seen = len(frozen)
        self._disturbed = state.disturbances

    def _nothing_new(self, scheduler: Scheduler) -> bool:
        """Whether nothing changed since the last look. Looking at ten thousand tensors at the end of each one's transfer would
        take longer than the transfers."""
        state, frozen = scheduler.state, self._active.frozen
        self.progress = len(frozen)
        moving = False
        for key in islice(frozen, 4):
            moving = moving or state.unsaved[key].state is State.WRITEBACK
        return moving and self._disturbed == state.disturbances and 0.9 * self._seen < self.progress
