"""The one engine thread and the one lock: who waits, what is started when, what its end changes.

A *request* is something a caller wants (a lease, room for a put, a delete, a flush). It is attempted under the lock, by the
caller first and by the engine after every change, until it is done. Only the engine thread calls links, outside the lock; so a
caller whose tensors are resident never waits for I/O nor for another thread.

There is one lock (``commits`` only serialises whole commits, and is taken before it). Finalizers of tensors run inside the
garbage collector, perhaps while this thread holds the lock: they only put on a ``queue.SimpleQueue``, and poke the engine.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tiered.admission import Admission
from tiered.ahead import Ahead
from tiered.errors import CapacityError, StoreClosed, TieredError
from tiered.explain import why_stuck
from tiered.flow import Flow
from tiered.flush import Flush
from tiered.interfaces import EvictionPolicy, Link, Streams, Tier
from tiered.prefetch import Plan, Touch
from tiered.requests import Lease, Prefetch, Request
from tiered.residency import Copy
from tiered.stats import LinkStatistics
from tiered.timeline import Recorder
from tiered.types import Access, Direction, Fence, Key, Slot, Then, Transfer
from tiered.wakeup import OwnedWakeup, wait_for

__all__ = ["Engine", "EngineConfig"]


@dataclass(frozen=True)
class EngineConfig:
    """``deadline``: seconds that a request waits at most before it raises and says who holds the room.

    ``reserve``: share of each tier that background write-backs keep free or CLEAN, so that what comes finds room. ``clock``
    gives seconds.
    """

    deadline: float = 60.0
    reserve: float = 0.5
    clock: Callable[[], float] = time.monotonic


class Engine:
    """Links, time and waiting around an ``Admission``. ``links[i]`` joins tier i and tier i + 1, from the top.

    A fence guards a slot: its memory is used anew only after what was queued on a device with it has run. Fences are made and
    waited for here alone. On a tier without streams there are none.
    """

    def __init__(
        self, tiers: Sequence[Tier], links: Sequence[Link], policies: Sequence[EvictionPolicy], config: EngineConfig
    ) -> None:
        assert len(links) == len(tiers) - 1
        self.links, self.config = list(links), config
        self.admission = Admission(tiers, policies, config.reserve)
        self.lock = threading.RLock()
        self.commits = threading.Lock()  # one commit at a time; taken before ``lock``
        self.hits = self.misses = self.leases = self.wakes = 0
        self.stalled_for_reads = self.stalled_for_room = 0.0
        self.recorder: Recorder | None = None
        self._views: dict[int, tuple[weakref.ref[object], Copy, object]] = {}
        self._streams: list[Streams | None] = [getattr(tier, "streams", None) for tier in tiers]
        if any(streams is not None for streams in self._streams):
            self.admission.left = self._alias_left
        self._changed = threading.Condition(self.lock)
        self._wake = OwnedWakeup()
        self._flows = [{direction: Flow() for direction in Direction} for _ in links]
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
        asked = self.config.clock()
        with self.lock:
            try:  # Ctrl-C may come anywhere in here
                at_once = self._submit(request)
                if not at_once:
                    self._wait_for(request, asked, self.config.deadline if deadline is None else deadline)
                self._count(request, asked, at_once)
            except BaseException:
                self._give_up(request)
                raise
            finally:
                self._forget(request)
        request.raise_error()

    def begin(self, flush: Flush) -> None:
        """Return when it has begun; somebody has to ``wait`` for its end."""
        with self.lock:
            flush.on_done = self._changed.notify_all
            self._submit(flush)
            while not (flush.begun or flush.done):
                self._refuse_stopped()
                wait_for(self._changed, 5.0)

    def behind(self, name: str, work: Callable[[], int], keep: Callable[[Future[int]], None]) -> None:
        """``work`` in a thread of its own; ``keep`` is given its future before it starts."""
        future = Future[int]()
        future.set_running_or_notify_cancel()
        keep(future)

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=name).start()

    async def arrive(self, request: Request) -> None:
        """``wait`` for a coroutine: no thread is blocked, and cancelling undoes what was granted meanwhile."""
        asked = self.config.clock()
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        def give_up() -> None:
            self._give_up(request)
            self._forget(request)

        def notify() -> None:  # under the lock
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop was closed meanwhile: nobody will ever resume the coroutine
                give_up()

        try:
            with self.lock:
                request.on_done = notify
                at_once = self._submit(request)
                for_room = request.waits_for_room
            if not at_once:
                patience, left = None if math.isinf(self.config.deadline) else self.config.deadline, math.nan
                # Not wait_for: before Python 3.12 that forgets a cancellation which comes together with the result.
                while not done.done() and left != request.left:
                    left = request.left
                    await asyncio.wait((done,), timeout=patience)
            with self.lock:
                waited = self.config.clock() - asked
                if not request.done:
                    self._refuse_stopped()
                    raise CapacityError(why_stuck(self.admission, request, waited))
                if not at_once:
                    self._stalled(request, waited, for_room)
                self._count(request, asked, at_once)
        except GeneratorExit:  # the event loop has gone, and the collector runs this, perhaps in a thread that has the lock
            self.later(give_up)
            raise
        except BaseException:
            with self.lock:
                give_up()
            raise
        request.raise_error()

    def _submit(self, request: Request) -> bool:
        """Attempt ``request`` in the caller's thread; what is not done at once waits among the others. Under the lock."""
        self._refuse_stopped()
        admission = self.admission
        admission.bury()
        admission.number(request)
        done = request.done or (not request.deferred and admission.attempt(request))
        if not done and request not in admission.requests:
            admission.requests.append(request)
        admission.look_ahead()
        if admission.anything_to_do:
            self._poke()
        return done

    def _count(self, request: Request, asked: float, at_once: bool) -> None:
        if not isinstance(request, Lease):
            return
        self.leases, self.hits, self.misses = self.leases + 1, self.hits + at_once, self.misses + (not at_once)
        if self.admission.ahead is not None and request.copies:
            self.admission.ahead.touched(asked, self.config.clock())
        if self.recorder is not None and request.copies:
            self.recorder.granted(request.sequence, request.keys, request.tier, request.access, asked)

    def _stalled(self, request: Request, seconds: float, for_room: bool) -> None:
        if for_room:
            self.stalled_for_room += seconds
        else:
            self.stalled_for_reads += seconds
        if self.recorder is not None:
            self.recorder.stalled(request.sequence, str(request), seconds, for_room)

    def _wait_for(self, request: Request, began: float, patience: float) -> None:
        left = request.left
        while not request.done:
            self._refuse_stopped()
            if request.left != left:
                began, left = self.config.clock(), request.left
            before, for_room = self.config.clock(), request.waits_for_room
            if before - began >= patience:
                raise CapacityError(why_stuck(self.admission, request, before - began))
            wait_for(self._changed, min(began + patience - before, 5.0))
            self._stalled(request, self.config.clock() - before, for_room)

    def _give_up(self, request: Request) -> None:
        request.abandon(self.admission)
        self._poke()  # for those who wait for what it had

    def _forget(self, request: Request) -> None:
        if request in self.admission.requests:
            self.admission.requests.remove(request)

    def hint(self, keys: Sequence[Key], tier: int) -> None:
        """Prefetch; never waits, never raises on full. A newer hint replaces what older ones have not begun."""
        with self.lock:
            waiting = self.admission.requests
            waiting[:] = [request for request in waiting if not isinstance(request, Prefetch)]
            self._submit(Prefetch(keys, tier))

    def sizes(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Bytes of each tensor that there is."""
        with self.lock:
            entries = ((key, self.admission.directory.find(key)) for key in set(keys))
            return {key: entry.nbytes for key, entry in entries if entry is not None}

    def follow(
        self,
        order: Sequence[Touch],
        policies: Callable[[Plan], Sequence[EvictionPolicy]],
        rooms: Sequence[int],
        then: Then = "again",
    ) -> int:
        """Evict, and fetch into ``rooms[i]`` bytes of tier i, along ``order`` from here on until it ends, or, where it is
        empty, no longer; how many touches it planned anew."""
        with self.lock:
            self._refuse_stopped()
            admission = self.admission
            planned, ahead = len(order), admission.ahead
            try:
                if not order:
                    ahead = None
                elif ahead is not None:
                    planned = ahead.replan(order, then)
                else:
                    ahead = Ahead(Plan(order, then), [place.tier.name for place in admission.places], self._costs)
                if ahead is not None:
                    ahead.rooms = rooms
                admission.follow(ahead, admission.own if ahead is None else policies(ahead.plan))
            except BaseException:  # Ctrl-C in the middle: a plan that is half another one is worse than none
                admission.follow(None, admission.own)
                raise
            admission.look_ahead()
            self._poke()
            return planned

    def _costs(self) -> list[tuple[float, float]]:
        """Seconds per byte of each link, up and down, as measured; 0 where nothing moved yet."""
        return [(flows[Direction.UP].cost, flows[Direction.DOWN].cost) for flows in self._flows]

    # -- leases begin and end ----------------------------------------------------------------------------------------------

    def enter(self, copies: Sequence[Copy], tier: int) -> object:
        """What the caller computes from here on runs after what the copies' fences stand for; the stream it computes on."""
        streams = self._streams[tier]
        if streams is None:
            return None
        stream = streams.current()
        for copy in copies:
            for fence in copy.fences:
                streams.wait(stream, fence)
        return stream

    def guard(self, tier: int, slot: Slot) -> None:
        """What the caller computes from here on runs after what was queued with the memory of ``slot``, now its own. Under the
        lock."""
        streams = self._streams[tier]
        if streams is not None:
            for fence in self.admission.places[tier].guards(slot):
                streams.wait(streams.current(), fence)

    def fences(self, tier: int) -> tuple[Fence, ...]:
        """A fence that passes when all that the caller has queued so far has run."""
        streams = self._streams[tier]
        return () if streams is None else (streams.record(streams.current()),)

    def release(self, copies: Sequence[Copy], access: Access, stream: object = None) -> None:
        """End leases that ``stream`` computed with. In a forked child they are the parent's, and go on."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            self._released(copies, access, stream)
            self.admission.bury()
            if self.admission.anything_to_do:
                self._poke()

    def release_later(self, copies: Sequence[Copy], access: Access, stream: object = None) -> None:
        """``release`` for where the garbage collector may be at work; whoever comes next finds them ended."""
        self.later(lambda: self._released(copies, access, stream))

    def _released(self, copies: Sequence[Copy], access: Access, stream: object) -> None:
        fence = None
        for copy in copies:
            streams = self._streams[copy.tier]
            if streams is not None:
                fence = fence or streams.record(stream)
                copy.fences = (*(f for f in copy.fences if not f.query()), fence)
            self.admission.directory.release(copy, access)

    def later(self, work: Callable[[], None]) -> None:
        """Have ``work`` done under the lock before anything else is. Takes no lock, as a finalizer must not."""
        if os.getpid() == self._pid:
            self.admission.later(work)
            self._wake.set()

    def watch(self, owner: object, copy: Copy, stream: object) -> None:
        """Count ``copy``'s alias, used on ``stream``, as gone when ``owner`` is collected."""
        view = weakref.ref(owner, self._view_died)  # weakref.finalize does the same, and takes three times as long
        self._views[id(view)] = (view, copy, stream)  # owners need not be hashable, and weak references are as their owners

    def _view_died(self, view: weakref.ref[object]) -> None:
        _, copy, stream = self._views.pop(id(view))
        self.alias_died(copy, stream)

    def alias_died(self, copy: Copy, stream: object = None) -> None:
        """A view of ``copy``'s memory, used on ``stream``, was collected. Runs inside the garbage collector: no locks here."""
        self.admission.alias_died(copy, stream)
        if self.admission.requests and os.getpid() == self._pid:
            self._wake.set()

    def _alias_left(self, copy: Copy, stream: object) -> None:
        """Under the lock, some time after the view died: a fence made now is late enough, too."""
        streams = self._streams[copy.tier]
        if streams is not None:
            copy.fences = (*(f for f in copy.fences if not f.query()), streams.record(stream))

    # -- the end -----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the thread after every transfer in flight; what is not started never will be. Idempotent."""
        if self._thread is None:
            self._close_links()
            return
        with self.lock:
            self._stopping = True
            self._wake_everybody()
        self._wake.set()
        if os.getpid() == self._pid:
            while self._thread.is_alive():
                self._thread.join(1.0)

    def stop_elsewhere(self, stop: Callable[[], None]) -> bool:
        """Whether this is the engine's own thread, which cannot wait for its end: then ``stop`` runs in another one.

        The collector may find a store that nobody closed wherever it happens to run.
        """
        if threading.current_thread() is not self._thread:
            return False
        threading.Thread(target=stop, name="tiered-close").start()
        return True

    def _wake_everybody(self) -> None:
        self._changed.notify_all()
        for request in list(self.admission.requests):
            request.notify()

    def _poke(self) -> None:
        self.wakes += 1
        self._wake.set()

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
                if not moved and any(fd == self._wake.fileno() for fd, _ in poller.poll(1000)):
                    self._wake.clear()
        except BaseException as error:
            with self.lock:
                self._broken = error
                self._wake_everybody()
        finally:
            self._close_links()

    def turn(self) -> bool:
        """One round: completions, requests, background write-backs, starts. True when anything moved. (Tests call it bare.)"""
        completions = [(index, done) for index, link in enumerate(self.links) for done in link.poll(0.0)]
        with self.lock:
            self.admission.bury()
            for index, completion in completions:
                transfer = self.admission.complete(index, completion)
                self._flows[index][transfer.direction].end(self.config.clock(), transfer.nbytes, completion.error)
                if self.recorder is not None:
                    link = self.links[index]
                    self.recorder.transferred(link.src, link.dst, transfer, completion.error)
            finished = self.admission.advance()
            if not self._stopping:
                self.admission.background.start(self.admission)
            if completions or finished:
                self._changed.notify_all()
        started = self._pump()
        return bool(completions or finished or started)

    def _pump(self) -> bool:
        """Hand queued transfers to their links, most urgent first. Outside the lock: a link may hash and submit here."""
        started = False
        for index, link in enumerate(self.links):
            with self.lock:
                promotions = self.admission.traffic.promotions[index]
                self.admission.traffic.promotions[index] = {}
                if not self._started(index):
                    self.admission.traffic.idle(index)
            for tag, urgency in promotions.items():
                link.promote(tag, urgency)
                with self.lock:
                    self.admission.traffic.promoted(tag, urgency)
            while True:
                with self.lock:
                    transfer = None if self._stopping else self.admission.traffic.take(index)
                    if transfer is None:
                        break
                    transfer.after = self._after(index, transfer)
                    self._flows[index][transfer.direction].begin(self.config.clock())
                    if self.recorder is not None:
                        self.recorder.started(transfer.tag)
                if link.start(transfer):
                    started = True
                    continue
                with self.lock:  # a link may be full one way, and take what goes the other
                    self._flows[index][transfer.direction].active -= 1
                    self.admission.traffic.put_back(index, transfer)
        return started

    def _after(self, index: int, transfer: Transfer) -> tuple[Fence, ...]:
        """What has to run on the upper tier's device before a link may touch the slot there."""
        if self._streams[index] is None:
            return ()
        place = self.admission.places[index]
        fences = (*place.copies[transfer.key].fences, *place.guards(transfer.upper))
        return tuple(fence for fence in fences if not fence.query())

    def _started(self, index: int) -> int:
        return sum(flow.active for flow in self._flows[index].values())

    # -- looking in --------------------------------------------------------------------------------------------------------

    def link_statistics(self) -> tuple[LinkStatistics, ...]:
        now = self.config.clock()
        return tuple(
            LinkStatistics(link.src, link.dst, flows[Direction.UP].snapshot(now), flows[Direction.DOWN].snapshot(now))
            for link, flows in zip(self.links, self._flows, strict=True)
        )

    def record(self, limit: int) -> Recorder | None:
        """Write down what happens, up to ``limit`` events, until ``stop_recording``; None: somebody does already."""
        with self.lock:
            self.admission.bury()
            if self.recorder is not None:
                return None
            self.recorder = self.admission.traffic.recorder = Recorder(self.admission.places, self.config.clock, limit)
            return self.recorder

    def stop_recording(self) -> None:
        """Under the lock."""
        self.recorder = self.admission.traffic.recorder = None

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
