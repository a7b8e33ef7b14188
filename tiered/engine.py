"""The one engine thread and the one lock: who waits, what is started when, what its end changes.

A *request* is something a caller wants (a lease, room for a put, a delete, a flush). It is attempted under the lock, by the
caller first and by the engine after every change, until it is done. Only the engine thread calls links, outside the lock; so a
caller whose tensors are resident never waits for I/O nor for another thread.

There is one lock (``commits`` only serialises whole commits, and is taken before it). Finalizers of tensors run inside the
garbage collector, perhaps while this very thread holds the lock: they only put on a ``queue.SimpleQueue``, and poke the engine
when somebody waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tiered.admission import Admission
from tiered.errors import CapacityError, StoreClosed, TieredError
from tiered.interfaces import EvictionPolicy, Link, Tier
from tiered.requests import Lease, Prefetch, Request
from tiered.residency import Copy
from tiered.stats import FlowStatistics, LinkStatistics
from tiered.types import Access, Direction, Key

__all__ = ["Engine", "EngineConfig"]


@dataclass(frozen=True)
class EngineConfig:
    """``deadline``: seconds that a request waits at most before it raises and says who holds the room.

    ``reserve``: share of each tier that background write-backs keep free or CLEAN, so that what comes finds room.
    """

    deadline: float = 60.0
    reserve: float = 0.5


class _Wake:
    """An fd that another thread makes readable; safe inside finalizers and signal handlers."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it is full, hence readable
            os.write(self._write, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def __del__(self) -> None:  # not before: a finalizer may poke as long as it holds the engine
        os.close(self._read)
        os.close(self._write)


class _Flow:
    """Counters of one direction of one link."""

    def __init__(self) -> None:
        self.transfers = self.bytes = self.failed = self.active = 0
        self.busy, self.since = 0.0, 0.0

    def begin(self, now: float) -> None:
        if self.active == 0:
            self.since = now
        self.active += 1

    def end(self, now: float, nbytes: int, error: TieredError | None) -> None:
        self.active -= 1
        if self.active == 0:
            self.busy += now - self.since
        if error is None:
            self.transfers += 1
            self.bytes += nbytes
        else:
            self.failed += 1

    def snapshot(self, now: float) -> FlowStatistics:
        busy = self.busy + (now - self.since if self.active else 0.0)
        return FlowStatistics(self.transfers, self.bytes, self.failed, busy)


class Engine:
    """Links, time and waiting around an ``Admission``. ``links[i]`` joins tier i and tier i + 1, from the top."""

    def __init__(
        self, tiers: Sequence[Tier], links: Sequence[Link], policies: Sequence[EvictionPolicy], config: EngineConfig
    ) -> None:
        assert len(links) == len(tiers) - 1
        self.links, self.config = list(links), config
        self.admission = Admission(tiers, policies, config.reserve)
        self.lock = threading.Lock()
        self.commits = threading.Lock()  # one commit at a time; taken before ``lock``
        self.hits = self.misses = self.leases = 0
        self.stalled_for_reads = self.stalled_for_room = 0.0
        self._changed = threading.Condition(self.lock)
        self._wake = _Wake()
        self._flows = [{direction: _Flow() for direction in Direction} for _ in links]
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stopping = False
        self._broken: BaseException | None = None

    # -- called by any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tiered-engine", daemon=True)
        self._thread.start()

    def wait(self, request: Request, deadline: float | None = None) -> None:
        """Get ``request`` done, or raise its error; waits at most ``deadline`` seconds (default: the configured ones)."""
        began = time.monotonic()
        patience = self.config.deadline if deadline is None else deadline
        with self.lock:
            at_once = self._submit(request)
            if isinstance(request, Lease):
                self.leases += 1
                self.hits += at_once
                self.misses += not at_once
            if not at_once:
                try:
                    self._wait_for(request, began, patience)
                except BaseException:
                    request.abandon(self.admission)
                    self._wake.set()  # for those who wait for what it had
                    raise
                finally:
                    if request in self.admission.requests:
                        self.admission.requests.remove(request)
        if request.error is not None:
            raise request.error

    def _submit(self, request: Request) -> bool:
        """Attempt ``request`` in the caller's thread; what is not done at once waits among the others. Under the lock."""
        self._refuse_stopped()
        self.admission.bury()
        self.admission.number(request)
        done = self.admission.attempt(request)
        if not done:
            self.admission.requests.append(request)
        if self.admission.requests or any(self.admission.queues) or self.admission.wants_cleaning:
            self._wake.set()
        return done

    def _wait_for(self, request: Request, began: float, patience: float) -> None:
        left = request.left
        while not request.done:
            self._refuse_stopped()
            if request.left != left:
                began, left = time.monotonic(), request.left
            before, for_room = time.monotonic(), request.waits_for_room
            if before - began >= patience:
                raise CapacityError(self.admission.why_stuck(request, before - began))
            self._changed.wait(min(began + patience - before, 5.0))
            waited = time.monotonic() - before
            if for_room:
                self.stalled_for_room += waited
            else:
                self.stalled_for_reads += waited

    def hint(self, keys: Sequence[Key], tier: int) -> None:
        """Prefetch; never waits, never raises on full. A newer hint replaces what older ones have not begun."""
        with self.lock:
            waiting = self.admission.requests
            waiting[:] = [request for request in waiting if not isinstance(request, Prefetch)]
            for key in keys:
                self._submit(Prefetch(key, tier))

    def release(self, copies: Sequence[Copy], access: Access) -> None:
        """End leases."""
        with self.lock:
            for copy in copies:
                self.admission.released(copy, access)
            self.admission.bury()
            if self.admission.requests or self.admission.wants_cleaning:
                self._wake.set()

    def alias_died(self, copy: Copy) -> None:
        """A view of ``copy``'s memory was collected. Runs inside the garbage collector: no locks here."""
        self.admission.alias_died(copy)
        if self.admission.requests and os.getpid() == self._pid:
            self._wake.set()

    def stop(self) -> None:
        """End the thread after every transfer in flight; what is not started never will be. Idempotent."""
        if self._thread is None:
            self._close_links()
            return
        with self.lock:
            self._stopping = True
            self._changed.notify_all()
        self._wake.set()
        if os.getpid() == self._pid:
            while self._thread.is_alive():
                self._thread.join(1.0)

    def _refuse_stopped(self) -> None:
        if self._broken is not None:
            raise TieredError(f"the engine stopped on an internal error: {self._broken!r}") from self._broken
        if self._stopping:
            raise StoreClosed("the store is closed")

    # -- the engine thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake.fileno(), select.POLLIN)
        for link in self.links:
            poller.register(link.fileno(), select.POLLIN)
        try:
            while True:
                moved = self.turn()
                with self.lock:
                    finished = self._stopping and not any(self._started(i) for i in range(len(self.links)))
                if finished:
                    break
                if not moved:
                    poller.poll(1000)
                self._wake.clear()
        except BaseException as error:
            with self.lock:
                self._broken = error
                self._changed.notify_all()
        finally:
            self._close_links()

    def turn(self) -> bool:
        """One round: completions, requests, background write-backs, starts. True when anything moved. (Tests call it bare.)"""
        completions = [(index, done) for index, link in enumerate(self.links) for done in link.poll(0.0)]
        with self.lock:
            self.admission.bury()
            for index, completion in completions:
                transfer = self.admission.complete(index, completion)
                self._flows[index][transfer.direction].end(time.monotonic(), transfer.nbytes, completion.error)
            finished = self.admission.advance()
            if not self._stopping:
                self.admission.clean_ahead()
            if completions or finished:
                self._changed.notify_all()
        started = self._pump()
        return bool(completions or finished or started)

    def _pump(self) -> bool:
        """Hand queued transfers to their links, most urgent first. Outside the lock: a link may hash and submit here."""
        started = False
        for index, link in enumerate(self.links):
            while True:
                with self.lock:
                    waiting = self.admission.queues[index]
                    if not waiting or self._stopping:
                        break
                    transfer = min(waiting, key=lambda t: (t.urgency, t.tag))
                    waiting.remove(transfer)
                    self._flows[index][transfer.direction].begin(time.monotonic())
                if not link.start(transfer):
                    with self.lock:
                        self._flows[index][transfer.direction].active -= 1
                        waiting.append(transfer)
                    break
                started = True
        return started

    def _started(self, index: int) -> int:
        return sum(flow.active for flow in self._flows[index].values())

    # -- looking in --------------------------------------------------------------------------------------------------------

    def link_statistics(self) -> tuple[LinkStatistics, ...]:
        now = time.monotonic()
        return tuple(
            LinkStatistics(link.src, link.dst, flows[Direction.UP].snapshot(now), flows[Direction.DOWN].snapshot(now))
            for link, flows in zip(self.links, self._flows, strict=True)
        )

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
