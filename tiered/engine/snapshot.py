"""All of a store as it is at one moment, at the bottom, while the store goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from tiered.engine.requests import Request
from tiered.engine.residency import Copy, Entry, State
from tiered.errors import CommitError, LeaseConflict
from tiered.types import Key, Slot, Urgency

if TYPE_CHECKING:
    from tiered.engine.scheduler import Admission

__all__ = ["Draft", "Flush", "came_down"]

class Draft(Protocol):
    """Who learns where everything is. All calls are made under the engine's lock."""

    def begin(self, entries: Iterator[Entry], frozen: dict[Key, None]) -> None:
        """This is all that there is; those of ``frozen`` are not at the bottom yet."""

    def add(self, entry: Entry) -> None:
        """One of ``frozen`` is at the bottom now, as it was."""

    def end(self) -> None:
        """All of them are."""

    def drop(self) -> None:
        """It came to nothing, at whatever point; may come twice."""


class Flush(Request):
    """Every tensor at the bottom as it is when this begins, which is at once, or when another one has ended.

    ``frozen`` are those that are not there yet: who would change one waits for its write-back, and for no other's. Those that
    are there may change, for what is at the bottom is never written over. What is replaced or deleted meanwhile is set aside.

    Where it is ``given_up()`` before it has ended, it comes to nothing: whoever asked for it does something else by now.

    A tensor that is not leased but still referenced from an ended lease is first copied to a slot of its own: bytes on
    their way out must not change. An open WRITE lease is an error.
    """

    deferred = True

    def __init__(
        self,
        draft: Draft,
        duplicate: Callable[[Copy, Slot, int], None],
        urgency: Urgency = Urgency.DEMAND,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(urgency)
        self._given_up = given_up
        self.frozen: dict[Key, None] = {}
        self.begun = False
        self._draft, self._duplicate = draft, duplicate
        self._seen = self._disturbed = 0  # how many were frozen, and what had disturbed them, when it looked last

    def __str__(self) -> str:
        return "a flush"

    @property
    def unwanted(self) -> bool:
        return super().unwanted or self._given_up()

    def attempt(self, admission: Admission) -> bool:
        if admission.flush is not None and admission.flush is not self:
            return False
        try:
            if admission.flush is None:
                self._begin(admission)
            elif self._nothing_new(admission):
                return False
            self._go_on(admission)
            if self.frozen:
                return False
            self._draft.end()
        except BaseException:
            self.abandon(admission)
            raise
        admission.flush = None
        return True

    def abandon(self, admission: Admission) -> None:
        if admission.flush is self:
            admission.flush = None
            for entry in [admission.directory.entry(key) for key in self.frozen]:
                if entry.aside and not entry.in_flight:
                    admission.directory.forget(entry.key)
        if not self.done:
            self._draft.drop()
            self.error, self.done = CommitError("this commit was given up: an exception struck who waited for it"), True

    def keeps(self, admission: Admission, entry: Entry, request: Request) -> bool:
        """Whether ``entry`` is frozen, and ``request`` has to wait for its write-back.

        Who only does away with it need not: it is set aside. (Who puts another tensor in its place has taken room for that
        already, which the write-back may need.)
        """
        if entry.key not in self.frozen:
            return False
        copy = admission.unsaved[entry.key]
        if request.replaces and not entry.in_flight:
            self._set_aside(admission, entry)
            return False
        if copy.state is State.DIRTY and not copy.in_flight and copy.failure is None:
            self._write_back(admission, copy, request)
        else:
            admission.traffic.hurry(entry.key, request.urgency)
        return True

    def saved(self, entry: Entry) -> None:
        """A frozen tensor is at the bottom."""
        del self.frozen[entry.key]
        self._draft.add(entry)

    def _set_aside(self, admission: Admission, entry: Entry) -> None:
        copies = [copy for copy in entry.copies if copy is not None]
        del self.frozen[entry.key]
        unsaved = admission.unsaved.pop(entry.key)
        admission.directory.set_aside(entry)
        for copy in copies:
            admission.background.forget(copy)
            admission.places[copy.tier].rename(copy, entry.key)
        admission.unsaved[entry.key] = unsaved
        self.frozen[entry.key] = None

    def _begin(self, admission: Admission) -> None:
        if admission.spoils:
            for entry in admission.directory.entries():
                for copy in entry.copies:
                    if copy is not None:
                        admission.refuse_spoiled(copy)
        left = {entry.key for entry in admission.directory.set_aside_entries()}  # by a flush that was given up
        for copy in admission.unsaved.values():
            if copy.writers:
                raise LeaseConflict(f"tensor {copy.key!r} has an open WRITE lease: end it before a commit")
            copy.failure = None
        self.frozen = dict.fromkeys(key for key in admission.unsaved if key not in left)
        admission.flush = self
        self._draft.begin(admission.directory.entries(), self.frozen)
        self.begun = True
        self.notify()

    def _go_on(self, admission: Admission) -> None:
        """Have those written back that are not yet. Raises what kept one from it."""
        for key in list(self.frozen):
            copy = admission.unsaved[key]
            if copy.failure is not None:
                failure, copy.failure = copy.failure, None  # a later request tries again
                raise failure
        for key in list(self.frozen):
            copy = admission.unsaved[key]
            if copy.state is State.DIRTY and not copy.in_flight:
                self._write_back(admission, copy, self)
            else:
                admission.traffic.hurry(key, self.urgency)
        self.left = self._seen = len(self.frozen)
        self._disturbed = admission.disturbances

    def _nothing_new(self, admission: Admission) -> bool:
        """Looking at ten thousand tensors at the end of each one's transfer would take longer than the transfers."""
        self.left = len(self.frozen)
        moving = any(admission.unsaved[key].state is State.WRITEBACK for key in islice(self.frozen, 4))
        return moving and self._disturbed == admission.disturbances and 0.9 * self._seen < self.left

    def _write_back(self, admission: Admission, copy: Copy, request: Request) -> None:
        entry = admission.directory.entry(copy.key)
        self.tier = copy.tier
        if copy.aliases and not copy.leased:
            slot = admission.room(copy.tier, entry.nbytes, request)
            if slot is None:
                return
            self._duplicate(copy, slot, entry.nbytes)
            copy = admission.directory.move(copy, slot)
            admission.install(copy)
        snapshot = None
        if copy.aliases and copy.tier + 1 == admission.bottom:
            # Under a READ lease, too, somebody may write. That is not to be stored, but must not make checksums wrong.
            snapshot = admission.room(copy.tier, entry.nbytes, request)
            if snapshot is None:
                return
            self._duplicate(copy, snapshot, entry.nbytes)
        admission.admit_writeback(entry, copy.tier, request, snapshot)


def came_down(admission: Admission, entry: Entry) -> None:
    """A write-back of ``entry`` ended, well or not, and perhaps not at the bottom."""
    flush = admission.flush
    if entry.unsaved is None:
        if admission.arrived is not None:
            admission.arrived(entry)
        if flush is not None and entry.key in flush.frozen:
            flush.saved(entry)
    if entry.aside and not entry.in_flight and (flush is None or entry.key not in flush.frozen):
        admission.directory.forget(entry.key)
