"""The one engine thread and the one lock: admits transfers, starts them by urgency, applies their completions.

A *request* is something a caller wants (a lease, room for a put, a delete, a flush). ``attempt`` is called under the lock, by
the caller first and by the engine after every change, until it is done: it is the whole of a request's logic. Admitting a
transfer means: its slot is allocated, the residency edge is taken, and it stands in its link's queue. Only the engine thread
calls links, outside the lock; so a caller whose tensors are resident never waits for I/O nor for another thread.

Lock order: there is one lock (``commits`` only serialises whole commits, and is taken before it). Finalizers of tensors run inside the garbage collector, perhaps while this very thread holds
the lock: they only put on a ``queue.SimpleQueue`` (and poke the engine's eventfd when somebody waits for room).
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tiered.errors import CapacityError, StoreClosed, TieredError
from tiered.interfaces import EvictionPolicy, Link, Tier
from tiered.requests import Lease, Prefetch, Request
from tiered.residency import Copy, Directory, Entry, State
from tiered.stats import FlowStatistics, LinkStatistics, TierStatistics
from tiered.types import Access, Candidate, Completion, Direction, Key, Slot, Transfer, Urgency

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
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # it is full, hence readable

    def clear(self) -> None:
        try:
            while len(os.read(self._read, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
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
    """Tiers from the top (0) to the bottom; ``links[i]`` joins tier i and tier i + 1; ``policies[i]`` chooses tier i's victims."""

    def __init__(
        self, tiers: Sequence[Tier], links: Sequence[Link], policies: Sequence[EvictionPolicy], config: EngineConfig
    ) -> None:
        assert len(links) == len(tiers) - 1 and len(policies) == len(tiers)
        self.tiers, self.links, self.policies, self.config = list(tiers), list(links), list(policies), config
        self.bottom = len(tiers) - 1
        self.directory = Directory(len(tiers), self._vacated)
        self.generation = 1  # of the commit that is open
        self.lock = threading.Lock()
        self.commits = threading.Lock()  # one commit at a time; taken before ``lock``
        self.hits = self.misses = self.leases = self.evictions = 0
        self.prefetched = self.prefetched_unused = 0
        self.stalled_for_reads = self.stalled_for_room = 0.0
        self._changed = threading.Condition(self.lock)
        self._wake = _Wake()
        self._dead: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._resident: list[dict[Key, Copy]] = [{} for _ in tiers]
        self._orphans: set[Copy] = set()
        self._used = [0] * len(tiers)
        self._peak = [0] * len(tiers)
        self._largest = 1
        self._requests: list[Request] = []
        self._sequence = 0
        self._queues: list[list[Transfer]] = [[] for _ in links]
        self._transfers: dict[int, tuple[Entry, Transfer]] = {}
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
        limit = time.monotonic() + (self.config.deadline if deadline is None else deadline)
        with self.lock:
            self._refuse_stopped()
            self._bury()
            request.sequence = self._sequence = self._sequence + 1
            at_once = self._attempt(request)
            if isinstance(request, Lease):
                self.leases += 1
                self.hits += at_once
                self.misses += not at_once
            if not at_once:
                self._wait_queued(request, limit)
            elif any(self._queues):
                self._wake.set()
        if request.error is not None:
            raise request.error

    def _wait_queued(self, request: Request, limit: float) -> None:
        self._requests.append(request)
        began = time.monotonic()
        self._wake.set()
        try:
            while not request.done:
                self._refuse_stopped()
                before, for_room = time.monotonic(), request.waits_for_room
                if before >= limit:
                    raise CapacityError(self._why_stuck(request, limit - began))
                self._changed.wait(min(limit - before, 5.0))
                waited = time.monotonic() - before
                if for_room:
                    self.stalled_for_room += waited
                else:
                    self.stalled_for_reads += waited
        except BaseException:
            request.abandon(self)
            raise
        finally:
            if request in self._requests:
                self._requests.remove(request)

    def hint(self, keys: Sequence[Key], tier: int) -> None:
        """Prefetch; never waits, never raises on full. A newer hint replaces what older ones have not begun."""
        with self.lock:
            self._refuse_stopped()
            self._bury()
            self._requests = [r for r in self._requests if not isinstance(r, Prefetch)]
            for key in keys:
                request = Prefetch(key, tier)
                request.sequence = self._sequence = self._sequence + 1
                if not self._attempt(request):
                    self._requests.append(request)
            if any(self._queues):
                self._wake.set()

    def release(self, copies: Sequence[Copy], access: Access) -> None:
        """End leases."""
        with self.lock:
            for copy in copies:
                self.directory.release(copy, access)
            self._bury()
            if self._requests or (access is Access.WRITE and self._wants_cleaning()):
                self._wake.set()

    def alias_died(self, copy: Copy) -> None:
        """A view of ``copy``'s memory was collected. Runs inside the garbage collector: no locks here."""
        self._dead.put(copy)
        if self._requests and os.getpid() == self._pid:
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
            self._bury()
            for index, completion in completions:
                self._complete(index, completion)
            finished = self._advance()
            self._clean_ahead()
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
                    waiting = self._queues[index]
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

    def _complete(self, index: int, completion: Completion) -> None:
        entry, transfer = self._transfers.pop(completion.tag)
        self._flows[index][transfer.direction].end(time.monotonic(), transfer.nbytes, completion.error)
        if transfer.direction is Direction.UP:
            self.directory.end_fill(entry, index, completion.error)
            if completion.error is None:
                self.policies[index].touched(entry.key)
            else:
                for request in self._requests:
                    request.failed(entry.key, completion.error)
        else:
            self.directory.end_writeback(entry, index, completion.error, completion.checksums, transfer.generation)
            if completion.error is None:
                self.policies[index + 1].touched(entry.key)

    def _advance(self) -> bool:
        """Attempt every waiting request, the urgent and the old first."""
        finished = False
        for request in sorted(self._requests, key=lambda r: (r.urgency, r.sequence)):
            if request.done or self._attempt(request):
                finished = True
                if isinstance(request, Prefetch):
                    self._requests.remove(request)
        return finished

    def _attempt(self, request: Request) -> bool:
        if request.done:
            return True
        request.waits_for_room = False
        try:
            request.done = request.attempt(self)
        except TieredError as error:
            request.error, request.done = error, True
        return request.done

    # -- admission, under the lock (called by requests) -------------------------------------------------------------------

    def bring(self, entry: Entry, tier: int, request: Request) -> bool:
        """Whether ``entry`` has a valid copy in ``tier``; if not, admit the next transfer on its way there."""
        copy = entry.copies[tier]
        if copy is not None:
            if copy.state is State.FILLING:
                self._hurry(entry.key, request.urgency)
            return copy.valid
        for below in range(tier + 1, len(self.tiers)):
            source = entry.copies[below]
            if source is None:
                continue
            if source.valid:
                if not entry.written:
                    self._admit_fill(entry, below - 1, request)
            else:
                self._hurry(entry.key, request.urgency)
            return False
        for above in range(tier - 1, -1, -1):
            source = entry.copies[above]
            if source is not None and source.state is State.DIRTY and source.idle:
                self.admit_writeback(entry, above, request)
                return False
        return False

    def _admit_fill(self, entry: Entry, tier: int, request: Request) -> None:
        slot = self.room(tier, entry.nbytes, request)
        if slot is None:
            return
        source = entry.copies[tier + 1]
        assert source is not None
        copy = self.directory.begin_fill(entry, tier, slot)
        self._resident[tier][entry.key] = copy
        if request.urgency is Urgency.PREFETCH:
            copy.prefetched = True
            self.prefetched += 1
        self._enqueue(entry, tier, Direction.UP, slot, source.slot, request.urgency, source)

    def admit_writeback(self, entry: Entry, tier: int, request: Request) -> bool:
        """Queue a write-back of ``entry`` from ``tier`` to the one below, if that has room."""
        below = tier + 1
        lower = self.room(below, entry.nbytes, request)
        if lower is None:
            if below == self.bottom:
                why = getattr(self.tiers[below], "refusal", None) or f"tier {self.tiers[below].name} is full"
                raise CapacityError(f"no room for tensor {entry.key!r} ({entry.nbytes:,} bytes): {why}")
            return False
        source = entry.copies[tier]
        assert source is not None
        copy = self.directory.begin_writeback(entry, tier, lower)
        self._resident[below][entry.key] = copy
        urgency = request.urgency
        self._enqueue(entry, tier, Direction.DOWN, source.slot, lower, urgency, None)
        return True

    def _enqueue(
        self, entry: Entry, index: int, way: Direction, upper: Slot, lower: Slot, urgency: Urgency, source: Copy | None
    ) -> None:
        self._sequence += 1
        generation = source.generation if source is not None else self.generation
        checksums = source.checksums if source is not None else b""
        transfer = Transfer(
            self._sequence, entry.key, way, upper, lower, entry.nbytes, urgency, entry.tensor_id, generation, checksums
        )
        self._transfers[transfer.tag] = (entry, transfer)
        self._queues[index].append(transfer)

    def _hurry(self, key: Key, urgency: Urgency) -> None:
        for waiting in self._queues:
            for transfer in waiting:
                if transfer.key == key and transfer.urgency > urgency:
                    transfer.urgency = urgency

    def room(self, tier: int, nbytes: int, request: Request) -> Slot | None:
        """A slot in ``tier``, evicting CLEAN copies for it and, for DEMAND, writing DIRTY ones back; None: not yet.

        Raises CapacityError when it could never fit, and the error of a failed write-back when only that stands in the way.
        """
        space = self.tiers[tier]
        if nbytes > space.capacity:
            raise CapacityError(
                f"{nbytes:,} bytes can never fit into tier {space.name} ({space.capacity:,} bytes): "
                f"open the store with at least {nbytes:,} bytes there, or split the tensor"
            )
        prefetch = request.urgency is Urgency.PREFETCH
        if prefetch and (self._reads_queued(tier) or self._slack(tier, request) - nbytes < self._largest):
            return None  # the link is busy, or a demand could find no room
        slot = space.allocate(nbytes)
        while slot is None and tier < self.bottom:
            candidates = self._evictable(tier, request)
            chosen = self.policies[tier].victims(1, [Candidate(c.key, c.slot.nbytes) for c in candidates])
            if not chosen:
                break
            self._evict(self._resident[tier][chosen[0]])
            slot = space.allocate(nbytes)
        if slot is not None:
            self._used[tier] += slot.nbytes
            self._peak[tier] = max(self._peak[tier], self._used[tier])
            return slot
        request.waits_for_room = True
        if tier < self.bottom and not prefetch:
            self._clean(tier, nbytes, request)
        return None

    def _reads_queued(self, tier: int) -> bool:
        return tier < self.bottom and any(t.direction is Direction.UP for t in self._queues[tier])

    def _evictable(self, tier: int, request: Request) -> list[Copy]:
        """CLEAN and idle; not what this or an older request still wants; for a prefetch, not what was just prefetched."""
        wanted: set[Key] = set(request.wants())
        for other in self._requests:
            if other.sequence < request.sequence and other.urgency <= request.urgency:
                wanted.update(other.wants())
        prefetch = request.urgency is Urgency.PREFETCH
        return [
            copy
            for copy in self._resident[tier].values()
            if copy.state is State.CLEAN
            and copy.idle
            and copy.key not in wanted
            and not (prefetch and copy.prefetched)
        ]

    def _slack(self, tier: int, request: Request) -> int:
        """Bytes that ``request`` could have at once: free, or in CLEAN copies that it may evict."""
        free = self.tiers[tier].capacity - self._used[tier]
        return free + sum(copy.slot.nbytes for copy in self._evictable(tier, request))

    def _evict(self, copy: Copy) -> None:
        self.evictions += 1
        if copy.prefetched:
            self.prefetched_unused += 1
        self.directory.evict(copy)

    def _dirty(self, tier: int) -> list[Copy]:
        """Copies that may be written back now, the policy's next victims first."""
        dirty = [c for c in self._resident[tier].values() if c.state is State.DIRTY and c.idle]
        if not dirty:
            return []
        total = sum(c.slot.nbytes for c in dirty)
        order = self.policies[tier].victims(total, [Candidate(c.key, c.slot.nbytes) for c in dirty])
        assert order is not None
        return [self._resident[tier][key] for key in order]

    def _under_way(self, tier: int) -> int:
        """Bytes of ``tier`` that write-backs in flight will make CLEAN."""
        return sum(c.slot.nbytes for c in self._resident[tier].values() if c.state is State.WRITEBACK)

    def _clean(self, tier: int, nbytes: int, request: Request) -> None:
        """Write back, at ``request``'s urgency, DIRTY copies that make ``nbytes`` evictable."""
        for transfer in self._queues[tier]:
            if transfer.direction is Direction.DOWN and transfer.urgency > request.urgency:
                transfer.urgency = request.urgency
        coming = self._under_way(tier)
        failure: TieredError | None = None
        for copy in self._dirty(tier):
            if coming >= nbytes:
                return
            if copy.failure is not None:
                failure = copy.failure
                continue
            if self.admit_writeback(self.directory.entry(copy.key), tier, request):
                coming += copy.slot.nbytes
        if coming == 0 and failure is not None:
            for copy in self._dirty(tier):
                copy.failure = None  # a later request tries again
            raise failure

    # -- background write-backs -------------------------------------------------------------------------------------------

    def _shortage(self, tier: int) -> int:
        """Bytes missing to the reserve of free or CLEAN room in ``tier``, counting what write-backs will bring."""
        ready = self.tiers[tier].capacity - self._used[tier]
        for copy in self._resident[tier].values():
            if copy.state is State.WRITEBACK or (copy.state is State.CLEAN and copy.idle):
                ready += copy.slot.nbytes
        return int(self.tiers[tier].capacity * self.config.reserve) - ready

    def _wants_cleaning(self) -> bool:
        return any(
            self._shortage(tier) > 0 and any(c.failure is None for c in self._dirty(tier)) for tier in range(self.bottom)
        )

    def _clean_ahead(self) -> None:
        if self._stopping:
            return
        for tier in range(self.bottom):
            shortage = self._shortage(tier)
            if shortage <= 0:
                continue
            background = Request(Urgency.WRITEBACK)
            background.sequence = self._sequence = self._sequence + 1
            for copy in self._dirty(tier):
                if shortage <= 0:
                    break
                if copy.failure is not None:
                    continue
                try:
                    if not self.admit_writeback(self.directory.entry(copy.key), tier, background):
                        break
                except CapacityError as error:
                    copy.failure = error
                    break
                shortage -= copy.slot.nbytes

    # -- slots -----------------------------------------------------------------------------------------------------------

    def install(self, copy: Copy) -> None:
        """A copy that did not come by a transfer (put, restore, move) is resident from here on."""
        self._resident[copy.tier][copy.key] = copy
        self.policies[copy.tier].touched(copy.key)
        self._largest = max(self._largest, copy.slot.nbytes)
        if self._wants_cleaning():
            self._wake.set()

    def give_back(self, tier: int, slot: Slot) -> None:
        """Free a slot that ``room`` gave and nothing was put into."""
        self.tiers[tier].free(slot)
        self._used[tier] -= slot.nbytes

    def account_restored(self, tier: int, slot: Slot) -> None:
        """``slot`` was claimed from the tier while opening."""
        self._used[tier] += slot.nbytes
        self._peak[tier] = max(self._peak[tier], self._used[tier])

    def _vacated(self, copy: Copy) -> None:
        self._resident[copy.tier].pop(copy.key, None)
        self.policies[copy.tier].forgotten(copy.key)
        if copy.aliases:
            self._orphans.add(copy)
        else:
            self.give_back(copy.tier, copy.slot)

    def _bury(self) -> None:
        """Count aliases that died since; give back the slots of orphans that have none left."""
        while True:
            try:
                copy = self._dead.get_nowait()
            except queue.Empty:
                return
            copy.aliases -= 1
            if copy.aliases == 0 and copy in self._orphans:
                self._orphans.remove(copy)
                self.give_back(copy.tier, copy.slot)

    # -- what is the matter ------------------------------------------------------------------------------------------------

    def _why_stuck(self, request: Request, waited: float) -> str:
        tier = request.tier
        space = self.tiers[tier]
        held = [c for c in (*self._resident[tier].values(), *self._orphans) if c.tier == tier and (c.leased or c.aliases)]
        held.sort(key=lambda c: -c.slot.nbytes)
        names = ", ".join(
            f"{c.key!r} ({c.slot.nbytes:,} bytes, {'leased' if c.leased else 'still referenced after its lease'})"
            for c in held[:8]
        )
        more = f" and {len(held) - 8} more" if len(held) > 8 else ""
        return (
            f"{request} waited {waited:.1f} s for tier {space.name}: {self._used[tier]:,} of {space.capacity:,} bytes are in "
            f"use, held by {names or 'transfers in flight'}{more}. Release leases and the tensors they gave, "
            f"or open the store with more room"
        )

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        rows = []
        for index, tier in enumerate(self.tiers):
            orphans = sum(copy.tier == index for copy in self._orphans)
            held = sum(bool(c.aliases) and not c.leased for c in self._resident[index].values()) + orphans
            copies = len(self._resident[index])
            rows.append(TierStatistics(tier.name, tier.capacity, self._used[index], self._peak[index], copies, held))
        return tuple(rows)

    def link_statistics(self) -> tuple[LinkStatistics, ...]:
        now = time.monotonic()
        return tuple(
            LinkStatistics(link.src, link.dst, flows[Direction.UP].snapshot(now), flows[Direction.DOWN].snapshot(now))
            for link, flows in zip(self.links, self._flows, strict=True)
        )

    def unsaved(self) -> list[Copy]:
        """Copies above the bottom that the tiers below have not got."""
        found = (entry.unsaved for entry in self.directory.entries())
        return [copy for copy in found if copy is not None]

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
