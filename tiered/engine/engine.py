"""The engine: one thread, one lock and the fences around an ``EngineState``.

A *request* is something a caller wants (a lease, room for a put, a delete, a flush). A request that needs no transfer is done
in the caller's thread, under the lock; every other one by the engine's thread, which attempts the request after each change
until it is done. Only the engine's thread calls links, outside the lock; so a caller whose tensors are resident never waits for
I/O nor for another thread.

There is one lock (``commits`` only serialises whole commits, and is taken before it). Finalizers of tensors run inside the
garbage collector, perhaps while this thread holds the lock: they only append to a deque.

A Python signal handler runs in the main thread, between two bytecodes, and may raise; it never strikes the engine's thread. A
caller's thread changes state under the lock between ``state.changing = True`` and ``= False``: whoever takes the lock next and
finds it true waits until the engine's thread has counted everything anew. Where that fails the store must be reopened.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tiered.engine.background import ReadAhead, WriteBehind
from tiered.engine.claims import Token
from tiered.engine.policy import FollowedOrder, OrderPlan, Touch
from tiered.engine.requests import Lease, Offload, Prefetch, Request, RequestQueue, Work, why_stuck
from tiered.engine.residency import Copy
from tiered.engine.scheduler import Scheduler
from tiered.engine.snapshot import Flush
from tiered.engine.state import EngineState
from tiered.errors import CapacityError, InterruptedStore, LeaseConflict, MisuseError, StoreClosed, TieredError
from tiered.interfaces import EvictionPolicy, Link, Streams, Tier
from tiered.system import OwnedWakeup, wait_for
from tiered.telemetry import LinkStatistics, Recorder
from tiered.types import Direction, Fence, Key, Slot, Then, Transfer, Urgency
from tiered.workers import Worker

__all__ = ["Engine", "EngineConfig"]

logger = logging.getLogger("tiered")

_UP, _DOWN = Direction.UP, Direction.DOWN  # before Python 3.12 enums look members up slowly

LOOKS_EVERY = 20
"""Milliseconds between two searches for views that died, while a request waits."""
LATE = 5.0
"""Seconds after which a request that waits for room, without progress, says who holds it."""
GRACE = 0.5
"""Seconds beyond its deadline that a request waits for a first attempt by the engine, should that be busy or blocked."""


@dataclass(frozen=True)
class EngineConfig:
    """Configuration. ``deadline``: seconds that a request waits at most before it raises and names the holders of the room.

    ``reserve``: share of each tier that background write-backs keep free or CLEAN, so that arrivals find room. ``clock``
    returns seconds. ``eviction`` makes a policy for a tier, for when an existing one may be inconsistent.
    """

    deadline: float = 60.0
    reserve: float = 0.5
    clock: Callable[[], float] = time.monotonic
    eviction: Callable[[], EvictionPolicy] | None = None


class Engine:
    """Links, time and waiting around an ``EngineState``. ``links[i]`` joins tier i and tier i + 1, from the top.

    A fence guards a slot: its memory is reused only after the device work that used it has run. Fences are made and waited for
    here alone. A tier without streams has none.
    """

    def __init__(
        self, tiers: Sequence[Tier], links: Sequence[Link], policies: Sequence[EvictionPolicy], config: EngineConfig
    ) -> None:
        assert len(links) == len(tiers) - 1
        self.links, self.config = list(links), config
        self.state = EngineState(tiers, policies, config.eviction)
        self.scheduler = Scheduler(self.state)
        self.requests = RequestQueue(self.scheduler)
        self.write_behind = WriteBehind(self.scheduler, config.reserve)
        self.read_ahead: ReadAhead | None = None
        self.lock = threading.RLock()
        self._of_thread = threading.local()
        self.commits = threading.Lock()  # one commit at a time; taken before ``lock``
        self.hits = self.misses = self.leases = self.wakes = 0
        self.stalled_for_reads = self.stalled_for_room = 0.0
        self.recorder: Recorder | None = None
        self._records: Callable[[], Token | None] = lambda: None
        self._streams: list[Streams | None] = [getattr(tier, "streams", None) for tier in tiers]
        if any(streams is not None for streams in self._streams):
            self.state.fence = self._fence
        self._owned: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self._changed = threading.Condition(self.lock)
        self._wake = OwnedWakeup()
        self._woken = False  # since the engine's thread looked last
        self._due = True  # whether requests may have what they lack, beside what wakes the thread
        self._again = True  # whether the thread has to take another turn before it sleeps
        self._counters = self.state.transfers.counters
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._ended = False  # whether one of these three is why no call is answered
        self._stopping = False
        self._broken: BaseException | None = None
        self._unrepairable: BaseException | None = None
        self.end_struck: Callable[[], bool] = lambda: False
        """Ends leases that only the traceback of an exception refers to; returns whether there were any."""

    # -- called by any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread. Raises TieredError where the system has no thread left."""
        thread = threading.Thread(target=self._run, name="tiered-engine", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise TieredError(f"the system starts no more threads ({error}): end some, or raise ulimit -u") from error
        self._thread = thread

    def wait(self, request: Request, deadline: float | None = None) -> None:
        """Wait until ``request`` is done, or raise its error; at most ``deadline`` seconds (default: the configured ones)."""
        asked = self.config.clock()
        patience = self.config.deadline if deadline is None else deadline
        if self._owned():
            self.refuse_nested()
        with self.lock:
            try:  # an exception of a signal handler may strike anywhere in here
                at_once = self._submit(request)
                late = not at_once and not self._wait_for(request, asked, patience)
                if not late:
                    self._count(request, asked, at_once)
            except BaseException:
                request.abandoned = True
                self._withdraw(request)
                raise
        if late:
            self._tell_and_wait(request, asked, patience)
        if isinstance(request.error, LeaseConflict) and not request.deferred and self.end_struck():
            request.error, request.done = None, False  # the conflicting lease had no holder any more
            self.wait(request, deadline)
        elif request.error is not None:
            request.raise_error()

    def _tell_and_wait(self, request: Request, asked: float, patience: float) -> None:
        """Say who holds the room that ``request`` has waited for, and wait on. Handlers of the logger run outside the lock."""
        try:
            with self.lock:
                why = why_stuck(self.state, request, self.config.clock() - asked)
            logger.warning("%s (it waits %.0f s at most)", why, patience)
            with self.lock:
                self._wait_for(request, self.config.clock() - LATE, patience, told=True)
                self._count(request, asked, False)
        except BaseException:
            with self.lock:
                request.abandoned = True
                self._withdraw(request)
            raise

    def _withdraw(self, request: Request) -> None:
        """Withdraw an abandoned request. The engine undoes what it began; a request that has not begun just leaves the
        queue."""
        if request.deferred and self._thread is not None:
            self._poke()
        elif request in self.requests.waiting:
            self.requests.waiting.remove(request)
            request.abandon(self.state)

    def refuse_nested(self) -> None:
        """Raise MisuseError where this thread is inside another call of the store: a signal handler makes this one."""
        if self._owned():
            raise MisuseError(
                "a signal handler interrupted a call of this store and calls it, too: have the handler set a flag or raise, "
                "and use the store after that"
            )

    def launch(self, worker: Worker) -> None:
        """Have the engine's thread start the worker. Raises TieredError where the system has no thread left."""
        if self._thread is None:
            worker.start()
            return
        start = Work("the start of a thread", worker.start)
        self.wait(start)
        start.raise_failure()

    def begin(self, flush: Flush) -> None:
        """Submit a flush and return when it has begun; a caller must ``wait`` for its end."""
        with self.lock:
            flush.on_done = self._changed.notify_all
            self._submit(flush)
            while not (flush.begun or flush.done):
                self._refuse_stopped()
                wait_for(self._changed, 5.0)

    async def arrive(self, request: Request) -> None:
        """Wait as ``wait`` does, in a coroutine: no thread is blocked, and cancellation undoes a grant made meanwhile."""
        asked = self.config.clock()
        self.refuse_nested()
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        def give_up() -> None:
            request.abandoned = True
            self._withdraw(request)

        def notify() -> None:  # under the lock
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop was closed meanwhile: the coroutine is never resumed
                request.abandoned = True
                request.abandon(self.state)

        try:
            with self.lock:
                request.on_done = notify
                at_once = self._submit(request)
            if not at_once:
                patience, progress = None if math.isinf(self.config.deadline) else self.config.deadline, math.nan
                # Not wait_for: before Python 3.12 it loses a cancellation that arrives together with the result.
                if patience is None or patience > LATE:
                    await asyncio.wait((done,), timeout=LATE)
                    if not done.done() and request.full_tiers:
                        with self.lock:
                            why = why_stuck(self.state, request, self.config.clock() - asked)
                        logger.warning("%s (it waits %.0f s at most)", why, self.config.deadline)
                while not done.done() and progress != request.progress:
                    progress = request.progress
                    await asyncio.wait((done,), timeout=patience)
            with self.lock:
                waited = self.config.clock() - asked
                if not request.done:
                    self._refuse_stopped()
                    raise CapacityError(why_stuck(self.state, request, waited))
                if not at_once:
                    self._stalled(request, waited, request.short)
                self._count(request, asked, at_once)
        except GeneratorExit:  # the event loop is gone, and the collector runs this, perhaps in a thread that holds the lock
            self.later(give_up)
            raise
        except BaseException:
            with self.lock:
                give_up()
            raise
        request.raise_error()

    def _submit(self, request: Request) -> bool:
        """Attempt ``request`` in the caller's thread, as far as that needs no transfer, no eviction and no wait; queue it if it
        is not done then. Called under the lock."""
        if self._ended:
            self._refuse_stopped()
        state, queue = self.state, self.requests
        if state.changing:
            self._wait_for_recount()
        if state.claims.ended:
            state.reap()
        request.sequence = next(state.numbers)
        try:
            request.done = request.done or request.attempt_here(state)
        except TieredError as error:
            request.error, request.done = error, True
        done = request.done
        if not done and self._thread is None and not request.deferred:  # without an engine's thread the caller decides here
            done = queue.attempt(request)
        if not done:
            if request not in queue.waiting:
                queue.waiting.append(request)
        elif not (self._anything_to_do() or (self.read_ahead is not None and self.read_ahead.due())):
            return True
        if self._thread is None:
            self._look_ahead()
        self._poke()
        return done

    def _anything_to_do(self) -> bool:
        """Return whether the engine's thread has anything to decide or to start."""
        state = self.state
        if self.requests.waiting or state.transfers.waiting or state.doomed_due or any(state.transfers.promotions):
            return True
        return state.writeback_due and self.write_behind.due

    def _look_ahead(self) -> None:
        """Admit the fetches that are due; end following where the order has ended."""
        if self.read_ahead is not None and self.read_ahead.attempt():
            self._follow(None)

    def _follow(self, read_ahead: ReadAhead | None) -> None:
        """Evict and read ahead along the order of ``read_ahead`` from now on; None ends following."""
        self.read_ahead = read_ahead
        order = None if read_ahead is None else read_ahead.order
        self.state.follow(order, self.state.own_policies if order is None else order.policies())

    def _wait_for_recount(self) -> None:
        """Wait for the recount after an exception struck the lock's last owner within a change."""
        if self._thread is None:
            self._recount()
        began = self.config.clock()
        while self.state.changing:
            self._refuse_stopped()
            if self.config.clock() - began > self.config.deadline + GRACE:
                raise CapacityError(
                    "an exception struck a call, and the engine has to count the tensors anew before the next one; but it "
                    "waits for a transfer that does not end: the disk is too slow, or does not answer"
                )
            self._poke()
            wait_for(self._changed, 0.5)

    def _recount(self) -> None:
        """Count everything anew, in the engine's thread. Where that fails, no state can be trusted."""
        try:
            for streams in filter(None, self._streams):
                streams.synchronize()  # fences may be lost, so none may be needed
            self.state.recount()
        except BaseException as error:
            self._unrepairable, self._ended = error, True
            self._wake_everybody()
        self._changed.notify_all()
        self._refuse_stopped()

    def _count(self, request: Request, asked: float, at_once: bool) -> None:
        if not isinstance(request, Lease):
            return
        self.leases, self.hits, self.misses = self.leases + 1, self.hits + at_once, self.misses + (not at_once)
        if self.read_ahead is not None and request.copies:
            self.read_ahead.touched(asked, self.config.clock())
        if self.recorder is not None and request.copies:
            self.recorder.granted(request.sequence, request.keys, request.tier, request.access, asked)

    def _stalled(self, request: Request, seconds: float, for_room: bool) -> None:
        if not request.moves:
            return
        if for_room:
            self.stalled_for_room += seconds
        else:
            self.stalled_for_reads += seconds
        if self.recorder is not None:
            self.recorder.stalled(request.sequence, str(request), seconds, for_room)

    def _wait_for(self, request: Request, began: float, patience: float, told: bool = False) -> bool:
        """Wait until ``request`` is done; return False, unless ``told``, where it has waited for room for ``LATE`` seconds."""
        left = request.progress
        while not request.done:
            if self._ended:
                self._refuse_stopped()
            if request.progress != left:
                began, left = self.config.clock(), request.progress
            before = self.config.clock()
            if before - began >= patience + (0.0 if request.tried or self._thread is None else GRACE):
                raise CapacityError(why_stuck(self.state, request, before - began))
            if not told and request.full_tiers and before - began >= LATE:
                return False
            wait_for(self._changed, min(max(began + patience - before, 0.05), LATE))
            self._stalled(request, self.config.clock() - before, request.short)
            request.short = bool(request.full_tiers)
        return True

    def hint(self, keys: Sequence[Key], tier: int, urgency: Urgency = Urgency.PREFETCH) -> None:
        """Prefetch ``keys``; never waits, and never raises where a tier is full. Replaces older hints of this urgency that have
        not begun: those of this thread, and of threads that have ended."""
        self.refuse_nested()
        try:
            mine = self._of_thread.token
        except AttributeError:
            mine = self._of_thread.token = Token()
        with self.lock:
            waiting = self.requests.waiting
            waiting[:] = [
                other
                for other in waiting
                if not isinstance(other, Prefetch)
                or other.urgency is not urgency
                or other.thread is None
                or other.thread() not in (mine, None)
            ]
            self.state.unknown_hints += list(map(self.state.directory.find, keys)).count(None)
            self._submit(Prefetch(keys, tier, urgency, weakref.ref(mine)))

    def ahead(self, keys: Sequence[Key], tier: int) -> None:
        """Prefetch ``keys`` beside the hints that there are."""
        self.refuse_nested()
        with self.lock:
            self._submit(Prefetch(keys, tier))

    def present(self, keys: Iterable[Key], tier: int) -> set[Key]:
        """Return those of ``keys`` of which ``tier`` has the bytes."""
        found = set()
        with self.lock:
            for key in keys:
                entry = self.state.directory.find(key)
                copy = None if entry is None else entry.copies[tier]
                if copy is not None and copy.valid:
                    found.add(key)
        return found

    def offload(self, keys: Sequence[Key], tier: int) -> Offload:
        """Move ``keys`` down to ``tier``; return the request, which is done. Hints are given up, and fetches along an order
        that is followed wait for the next touch. Raises what the request raises."""
        self.refuse_nested()
        with self.lock:
            waiting = self.requests.waiting
            waiting[:] = [request for request in waiting if not isinstance(request, Prefetch)]
            if self.read_ahead is not None:
                self.read_ahead.paused = True
        request = Offload(keys, tier)
        self.wait(request)
        return request

    def sizes(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Return the bytes of each tensor that exists."""
        with self.lock:
            entries = ((key, self.state.directory.find(key)) for key in set(keys))
            return {key: entry.nbytes for key, entry in entries if entry is not None}

    def follow(
        self,
        order: Sequence[Touch],
        policies: Callable[[OrderPlan], Sequence[EvictionPolicy]],
        rooms: Sequence[int],
        then: Then = "again",
    ) -> int:
        """Evict, and read ahead into ``rooms[i]`` bytes of tier i, along ``order`` until it ends; an empty order ends
        following. Return the number of touches that were planned anew."""
        planned = len(order)

        def work() -> None:
            nonlocal planned
            sizeless = {touch.key for touch in order if not touch.nbytes}  # a trace knows sizes, also of what comes and goes
            self.state.unknown_hints += list(map(self.state.directory.find, sizeless)).count(None)
            ahead = self.read_ahead if order else None
            try:
                if ahead is not None and not ahead.order.plan.over:
                    planned = ahead.replan(order, then)
                    ahead.order.rooms, ahead.order.choose = rooms, policies
                elif order:
                    ahead = ReadAhead(self.scheduler, FollowedOrder(OrderPlan(order, then), rooms, policies), self._costs)
                self._follow(ahead)
            except BaseException:  # a mixture of two plans is worse than none
                self._follow(None)
                raise
            self._look_ahead()

        request = Work("following an order", work)
        self.wait(request)
        request.raise_failure()
        return planned

    def _costs(self) -> list[tuple[float, float]]:
        """Return the measured seconds per byte of each link, up and down; 0 where nothing moved yet."""
        found = []
        for flows in self._counters:
            found.append((flows[_UP].cost, flows[_DOWN].cost))
        return found

    # -- leases begin and end ----------------------------------------------------------------------------------------------

    def enter(self, copies: Sequence[Copy], tier: int) -> object:
        """Make the caller's stream wait for the fences of the copies; return that stream."""
        streams = self._streams[tier]
        if streams is None:
            return None
        stream = streams.current()
        for copy in copies:
            for fence in copy.fences:
                streams.wait(stream, fence)
        return stream

    def guard(self, tier: int, slot: Slot) -> object:
        """Make the caller's stream wait for earlier work in the memory of ``slot``, which is the caller's now; return that
        stream."""
        streams = self._streams[tier]
        if streams is None:
            return None
        stream = streams.current()
        with self.lock:
            guards = self.state.pools[tier].guards(slot)
        for fence in guards:
            streams.wait(stream, fence)
        return stream

    def fences(self, tier: int) -> tuple[Fence, ...]:
        """Return a fence that passes when all work that the caller has queued so far has run."""
        streams = self._streams[tier]
        return () if streams is None else (streams.record(streams.current()),)

    def released(self) -> None:
        """Apply the death of a token whose hold others may wait for. Does nothing in a forked child, whose parent has the
        hold."""
        if os.getpid() != self._pid or self._owned():
            return
        with self.lock:
            if self.state.claims.ended and not self.state.changing:
                self.state.reap()
            if self.state.changing or self._anything_to_do():
                self._poke()

    def look(self) -> None:
        """Apply everything that ended, so that the counts are up to date."""
        self.refuse_nested()
        with self.lock:
            if self.state.changing:
                self._wait_for_recount()
            self.state.reap()

    def later(self, work: Callable[[], None]) -> None:
        """Run ``work``, perhaps twice, under the lock before anything else. Takes no lock, as a finalizer must not."""
        if os.getpid() == self._pid:
            self.state.later(work)

    def _fence(self, tier: int, stream: object) -> Fence | None:
        """Return a fence that passes when all work that ``stream`` has now has run."""
        streams = self._streams[tier]
        return None if streams is None else streams.record(stream)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the thread after every transfer in flight; queued transfers are never started. Idempotent."""
        if self._thread is None:
            self._close_links()
            return
        with self.lock:
            self._stopping = self._ended = True
            self._wake_everybody()
            self._wake.set()
        if os.getpid() == self._pid:
            while self._thread.is_alive():
                self._thread.join(1.0)
            with self.lock:  # callers that wake the thread hold it
                self._wake.close()

    def stop_elsewhere(self, stop: Callable[[], None]) -> bool:
        """Return whether this is the engine's own thread, which cannot wait for its own end: then ``stop`` runs in another one.

        The collector may find a store that nobody closed in any thread.
        """
        if threading.current_thread() is not self._thread:
            return False
        threading.Thread(target=stop, name="tiered-close").start()
        return True

    def _wake_everybody(self) -> None:
        self._changed.notify_all()
        for request in list(self.requests.waiting):
            request.notify()

    def _poke(self) -> None:
        """Wake the engine's thread, unless that was done since the thread looked last. Called under the lock."""
        if not self._woken:
            self.wakes += 1
            self._wake.set()
            self._woken = True  # after it: an exception that strikes in between must not leave the thread asleep

    def _refuse_stopped(self) -> None:
        if self._unrepairable is not None:
            raise InterruptedStore(
                f"an exception struck a call of this store, and the state that it left cannot be repaired "
                f"({self._unrepairable!r}): close the store and reopen it; the last commit holds"
            ) from self._unrepairable
        if self._broken is not None:
            raise TieredError(f"the engine stopped on an internal error: {self._broken!r}") from self._broken
        if self._stopping:
            raise StoreClosed("the store is closed")

    # -- the engine thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller, wake = select.poll(), self._wake.fileno()
        poller.register(wake, select.POLLIN)
        for link in self.links:
            poller.register(link.fileno(), select.POLLIN)
        try:
            while True:
                self.turn()
                if self._stopping:
                    with self.lock:
                        if not any(self.state.transfers.started):
                            break
                if self._again:
                    continue
                for descriptor, _ in self._sleep(poller):
                    self._woken = self._woken or descriptor == wake
        except BaseException as error:
            with self.lock:
                self._broken, self._ended = error, True
                self._wake_everybody()
        finally:
            self._close_links()

    def _sleep(self, poller: select.poll) -> list[tuple[int, int]]:
        """Sleep until there is something to do. The death of a view wakes nobody (no code runs then); so while a request waits,
        the thread looks for dead views every LOOKS_EVERY milliseconds."""
        for _ in range(1000 // LOOKS_EVERY):
            found = poller.poll(LOOKS_EVERY if self.requests.waiting else 1000)
            if found or self.state.claims.ended:
                return found
            if not self.requests.waiting:
                break
        self._due = True  # what makes room beside the engine, such as a commit that drops an old one, wakes nobody
        return []

    def turn(self) -> bool:
        """Run one round: completions, requests, background write-backs, starts. Return whether anything moved. (Tests call
        it.)

        Requests are attempted where something changed since the last round: to attempt them in vain takes longer than to wait
        for a transfer.
        """
        completions = []
        for index, link in enumerate(self.links):
            for done in link.poll(0.0):
                completions.append((index, done))
        with self.lock:
            state = self.state
            due, self._due = self._due or self._woken or bool(completions), False
            if self._woken:
                self._wake.clear()
                self._woken = False
            if state.changing:
                self._recount()
                due = True
            if state.claims.ended:
                state.reap()
                due = True
            for index, completion in completions:
                transfer = self.scheduler.complete(index, completion, self.config.clock())
                if self.recorder is not None:
                    link = self.links[index]
                    self.recorder.transferred(link.src, link.dst, transfer, completion.error)
            if state.doomed and (completions or state.doomed_due):
                state.delete_doomed()
                due = True
            finished = due and bool(self.requests.waiting) and self.requests.advance()
            if due and self.read_ahead is not None:
                self._look_ahead()
            if state.writeback_due and not self._stopping:
                self.write_behind.start()
            if completions or finished:
                self._changed.notify_all()
        started = bool(state.transfers.waiting or any(state.transfers.promotions)) and self._pump()
        ahead = self.read_ahead
        if finished:  # a request that is done may have what another one lacks
            self._due = ahead is not None or bool(self.requests.waiting)
        elif started:  # what was started leaves room in the link for fetches ahead
            self._due = (ahead is not None and ahead.link_is_busy) or self.requests.any_ahead
        self._again = bool(completions or started or self._due)
        return bool(completions or finished or started)

    def _pump(self) -> bool:
        """Hand queued transfers to their links, most urgent first. Outside the lock, because a link may hash and submit
        here."""
        started, transfers = False, self.state.transfers
        for index, link in enumerate(self.links):
            queue = transfers.queues[index]
            if not (queue.length or transfers.promotions[index]):
                continue
            with self.lock:
                promotions, transfers.promotions[index] = transfers.promotions[index], {}
                if not transfers.started[index]:
                    transfers.idle(index)
            for tag, urgency in promotions.items():
                link.promote(tag, urgency)
                with self.lock:
                    transfers.promoted(tag, urgency)
            while queue.length and not self._stopping:
                with self.lock:
                    transfer = transfers.take(index, self.config.clock())
                    if transfer is None:
                        break
                    if self._streams[index] is not None:
                        transfer.after = self._after(index, transfer)
                    if self.recorder is not None:
                        self.recorder.started(transfer.tag)
                if link.start(transfer):
                    started = True
                    continue
                with self.lock:  # the link may be full in one direction only
                    transfers.put_back(index, transfer)
        return started

    def _after(self, index: int, transfer: Transfer) -> tuple[Fence, ...]:
        """Return the fences that a link must wait for before it may touch the slot in the upper tier."""
        pool = self.state.pools[index]
        fences = (*pool.copies[transfer.key].fences, *pool.guards(transfer.upper))
        return tuple(fence for fence in fences if not fence.query())

    # -- looking in --------------------------------------------------------------------------------------------------------

    def link_statistics(self) -> tuple[LinkStatistics, ...]:
        now = self.config.clock()
        return tuple(
            LinkStatistics(link.src, link.dst, flows[Direction.UP].snapshot(now), flows[Direction.DOWN].snapshot(now))
            for link, flows in zip(self.links, self._counters, strict=True)
        )

    def record(self, limit: int, token: Token) -> Recorder | None:
        """Record events, up to ``limit``, until ``stop_recording``, or until another recording begins after the death of
        ``token``; None: a recording is running."""
        self.look()
        with self.lock:
            if self.recorder is not None and self._records() is not None:
                return None
            self._records = weakref.ref(token)
            self.recorder = self.state.transfers.recorder = Recorder(self.state.pools, self.config.clock, limit)
            return self.recorder

    def stop_recording(self) -> None:
        """End the recording. Called under the lock."""
        self.recorder = self.state.transfers.recorder = None

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
