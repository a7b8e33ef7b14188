"""What may move where, and in which order: evictions, transfers, write-backs. Decides; touches no link and no thread.

Everything here runs under the engine's lock. Admitting a transfer means: its slot is allocated, the residency edge is taken,
and it stands in its link's queue, from which the engine starts it.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

from tiered.errors import CapacityError, TieredError
from tiered.interfaces import EvictionPolicy, Tier
from tiered.requests import Request
from tiered.residency import Copy, Directory, Entry, State
from tiered.stats import TierStatistics
from tiered.types import Access, Completion, Direction, Key, Slot, Transfer, Urgency

__all__ = ["Admission"]

PACKINGS = 4
"""How often a request may evict what it has itself, to fit better among the same neighbours."""


class Admission:
    """Tiers from the top (0) to the bottom; ``policies[i]`` chooses tier i's victims.

    ``reserve`` is the share of each tier that background write-backs keep free or CLEAN, so that what comes finds room.
    ``queues[i]`` are the transfers admitted and not yet started between tier i and tier i + 1.
    """

    def __init__(self, tiers: Sequence[Tier], policies: Sequence[EvictionPolicy], reserve: float) -> None:
        assert len(policies) == len(tiers)
        self.tiers, self.policies, self.reserve = list(tiers), list(policies), reserve
        self.bottom = len(tiers) - 1
        self.directory = Directory(len(tiers), self._vacated)
        self.generation = 1  # of the commit that is open
        self.requests: list[Request] = []  # those that wait
        self.queues: list[list[Transfer]] = [[] for _ in range(self.bottom)]
        self.evictions = self.prefetched = self.prefetched_unused = 0
        self._sequence = 0
        self._dead: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._resident: list[dict[Key, Copy]] = [{} for _ in tiers]
        self._orphans: set[Copy] = set()
        self._slots: list[set[Slot]] = [set() for _ in tiers]  # all that are allocated
        self._used = [0] * len(tiers)
        self._peak = [0] * len(tiers)
        self._largest = 1
        self.wants_cleaning = False  # something changed since background write-backs were last considered
        self._transfers: dict[int, tuple[Entry, Transfer]] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    def number(self, request: Request) -> None:
        """Give ``request`` its place in the order of arrival."""
        self._sequence += 1
        request.sequence = self._sequence

    def attempt(self, request: Request) -> bool:
        """Whether ``request`` is done, now at the latest; its error, if any, is kept in it."""
        if request.done:
            return True
        request.waits_for_room = False
        try:
            request.done = request.attempt(self)
        except TieredError as error:
            request.error, request.done = error, True
        return request.done

    def advance(self) -> bool:
        """Attempt every waiting request, the urgent and the old first; whether one got done."""
        finished = False
        for request in sorted(self.requests, key=lambda r: (r.urgency, r.sequence)):
            if self.attempt(request):
                finished = True
                self.requests.remove(request)  # at once: the engine must not turn and turn until the caller has woken
        return finished

    # -- admission (called by requests) ------------------------------------------------------------------------------------

    def bring(self, entry: Entry, tier: int, request: Request) -> bool:
        """Whether ``entry`` has a valid copy in ``tier``; if not, admit the next transfer on its way there."""
        copy = entry.copies[tier]
        if copy is not None:
            if copy.state is State.FILLING:
                self.hurry(entry.key, request.urgency)
            return copy.valid
        for below in range(tier + 1, len(self.tiers)):
            source = entry.copies[below]
            if source is None:
                continue
            if source.valid:
                if not entry.written:
                    self._admit_fill(entry, below - 1, request)
            else:
                self.hurry(entry.key, request.urgency)
            return False
        for above in range(tier - 1, -1, -1):
            source = entry.copies[above]
            if source is not None and source.state is State.DIRTY and source.idle:
                if source.failure is not None:
                    error, source.failure = source.failure, None  # a later request tries again
                    raise error
                self.admit_writeback(entry, above, request)
                return False
        self.hurry(entry.key, request.urgency)
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
        self.queues[index].append(transfer)

    def busy(self, entry: Entry, request: Request) -> bool:
        """Whether transfers of ``entry`` are under way, which ``request`` has to wait for."""
        if entry.in_flight:
            self.hurry(entry.key, request.urgency)
        return entry.in_flight

    def hurry(self, key: Key, urgency: Urgency) -> None:
        """Transfers of ``key`` that are not started yet inherit ``urgency``."""
        for waiting in self.queues:
            for transfer in waiting:
                if transfer.key == key and transfer.urgency > urgency:
                    transfer.urgency = urgency

    def room(self, tier: int, nbytes: int, request: Request) -> Slot | None:
        """A slot in ``tier``, evicting CLEAN copies for it and, for DEMAND, writing DIRTY ones back; None: not yet.

        Raises CapacityError when it could never fit, and the error of a failed write-back when only that stands in the way.
        """
        space = self.tiers[tier]
        if nbytes > space.capacity:
            # A disk's capacity is what it has now: when a neighbour filled it, its own answer says more.
            slot = space.allocate(nbytes) if tier == self.bottom else None
            if slot is None:
                why = getattr(space, "refusal", None)
                raise CapacityError(
                    f"no room for {nbytes:,} bytes: {why}"
                    if why
                    else f"{nbytes:,} bytes can never fit into tier {space.name} ({space.capacity:,} bytes): "
                    f"open the store with at least {nbytes:,} bytes there, or split the tensor"
                )
            self._account(tier, slot)
            return slot
        prefetch = request.urgency is Urgency.PREFETCH
        if prefetch and (self._reads_queued(tier) or self._slack(tier, request) - nbytes < self._largest):
            return None  # the link is busy, or a demand could find no room
        slot = space.allocate(nbytes)
        if slot is None and tier < self.bottom:
            slot = self._evict_for(tier, nbytes, request)
        if slot is not None:
            self._account(tier, slot)
            return slot
        request.waits_for_room = True
        if tier < self.bottom and not prefetch:
            self._clean(tier, nbytes, request)
        return None

    def _evict_for(self, tier: int, nbytes: int, request: Request) -> Slot | None:
        """Evict, the policy's next victims first, until ``nbytes`` fit in one piece; nobody when that would not be enough.

        Evicting in vain would be worse than waste: two requests could take turns at it for ever.
        """
        victims = self._evictable(tier, request)
        if not self._would_fit(tier, nbytes, victims):
            # What the request has here already may lie in the middle: then it packs anew, at most PACKINGS times.
            others = self._wanted(tier, self._older(request))
            own = [self._resident[tier][key] for key in request.wants() if key in self._resident[tier] and key not in others]
            victims += [copy for copy in own if copy not in victims]
            neighbours = frozenset(self._slots[tier] - {copy.slot for copy in victims})
            tried = request.packed.count(neighbours)
            packable = tried < PACKINGS and all(copy.state is State.CLEAN and copy.idle for copy in own)
            if not packable or not self._would_fit(tier, nbytes, victims):
                return None
            request.packed = [neighbours] * (tried + 1)
            for copy in victims:
                self._evict(copy)
            victims = []
        slot = self.tiers[tier].allocate(nbytes)
        for key in self._order(tier, victims):
            if slot is not None:
                break
            self._evict(self._resident[tier][key])
            slot = self.tiers[tier].allocate(nbytes)
        return slot

    def _would_fit(self, tier: int, nbytes: int, without: Sequence[Copy]) -> bool:
        """Whether there were ``nbytes`` in one piece if the copies ``without`` were gone."""
        staying = self._slots[tier] - {copy.slot for copy in without}
        end = 0
        for slot in sorted(staying, key=lambda slot: slot.offset):
            if slot.offset - end >= nbytes:
                return True
            end = slot.offset + slot.nbytes
        return self.tiers[tier].capacity - end >= nbytes

    def _order(self, tier: int, copies: Sequence[Copy]) -> list[Key]:
        """All of ``copies``, the policy's next victims first."""
        total = sum(copy.slot.nbytes for copy in copies)
        order = self.policies[tier].victims(total, {copy.key: copy for copy in copies})
        assert order is not None
        return order

    def _reads_queued(self, tier: int) -> bool:
        return tier < self.bottom and any(t.direction is Direction.UP for t in self.queues[tier])

    def _evictable(self, tier: int, request: Request) -> list[Copy]:
        """CLEAN and idle; not what this or an older request still wants; for a prefetch, not what was just prefetched."""
        wanted = self._wanted(tier, [request, *self._older(request)])
        prefetch = request.urgency is Urgency.PREFETCH
        return [
            copy
            for copy in self._resident[tier].values()
            if copy.state is State.CLEAN
            and copy.idle
            and copy.key not in wanted
            and not (prefetch and copy.prefetched)
        ]

    def _older(self, request: Request) -> list[Request]:
        return [r for r in self.requests if r.sequence < request.sequence and r.urgency <= request.urgency]

    def _wanted(self, tier: int, requests: Sequence[Request]) -> set[Key]:
        return {key for r in requests for key in r.wants() if self._on_its_way(key, tier, r.tier)}

    def _on_its_way(self, key: Key, tier: int, target: int) -> bool:
        """Whether a copy in ``tier`` has still to serve a request for ``target``: none between them has the bytes yet."""
        entry = self.directory.find(key)
        return entry is not None and not any(copy is not None and copy.valid for copy in entry.copies[target:tier])

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
        return [self._resident[tier][key] for key in self._order(tier, dirty)]

    def _under_way(self, tier: int) -> int:
        """Bytes of ``tier`` that write-backs in flight will make CLEAN."""
        return sum(c.slot.nbytes for c in self._resident[tier].values() if c.state is State.WRITEBACK)

    def _clean(self, tier: int, nbytes: int, request: Request) -> None:
        """Write back, at ``request``'s urgency, DIRTY copies that make ``nbytes`` evictable."""
        for transfer in self.queues[tier]:
            if transfer.direction is Direction.DOWN and transfer.urgency > request.urgency:
                transfer.urgency = request.urgency
        coming = self._under_way(tier)
        failure: TieredError | None = None
        for copy in self._dirty(tier):
            if coming >= nbytes:
                return
            if copy.failure is not None and not isinstance(copy.failure, CapacityError):  # there may be room by now
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
        return int(self.tiers[tier].capacity * self.reserve) - ready

    def clean_ahead(self) -> None:
        """Start background write-backs where a tier's reserve is short; nothing to do when nothing changed."""
        if not self.wants_cleaning:
            return
        self.wants_cleaning = False
        for tier in range(self.bottom):
            shortage = self._shortage(tier)
            if shortage <= 0:
                continue
            background = Request(Urgency.WRITEBACK)
            self.number(background)
            for copy in self._dirty(tier):
                if shortage <= 0:
                    break
                if copy.failure is not None:
                    continue
                try:
                    if not self.admit_writeback(self.directory.entry(copy.key), tier, background):
                        break
                except TieredError as error:  # a request that needs the room will meet it
                    copy.failure = error
                    continue
                shortage -= copy.slot.nbytes

    # -- slots -----------------------------------------------------------------------------------------------------------

    def install(self, copy: Copy) -> None:
        """A copy that did not come by a transfer (put, restore, move) is resident from here on."""
        self._resident[copy.tier][copy.key] = copy
        self.policies[copy.tier].touched(copy.key)
        self._largest = max(self._largest, copy.slot.nbytes)
        self.wants_cleaning = True

    def released(self, copy: Copy, access: Access) -> None:
        """A lease ended."""
        self.directory.release(copy, access)
        if access is Access.WRITE:
            self.wants_cleaning = True

    def give_back(self, tier: int, slot: Slot) -> None:
        """Free a slot that ``room`` gave and nothing was put into."""
        self.tiers[tier].free(slot)
        self._slots[tier].remove(slot)
        self._used[tier] -= slot.nbytes

    def account_restored(self, tier: int, slot: Slot) -> None:
        """``slot`` was claimed from the tier while opening."""
        self._account(tier, slot)

    def _account(self, tier: int, slot: Slot) -> None:
        self._slots[tier].add(slot)
        self._used[tier] += slot.nbytes
        self._peak[tier] = max(self._peak[tier], self._used[tier])

    def _vacated(self, copy: Copy) -> None:
        self._resident[copy.tier].pop(copy.key, None)
        self.policies[copy.tier].forgotten(copy.key)
        if copy.aliases:
            self._orphans.add(copy)
        else:
            self.give_back(copy.tier, copy.slot)

    def alias_died(self, copy: Copy) -> None:
        """A view of ``copy``'s memory was collected. Runs inside the garbage collector: it only puts on a queue."""
        self._dead.put(copy)

    def bury(self) -> None:
        """Count aliases that died since; give back the slots of orphans that have none left."""
        while True:
            try:
                copy = self._dead.get_nowait()
            except queue.Empty:
                return
            copy.aliases -= 1
            self.wants_cleaning = True
            if copy.aliases == 0 and copy in self._orphans:
                self._orphans.remove(copy)
                self.give_back(copy.tier, copy.slot)

    # -- the ends of transfers -------------------------------------------------------------------------------------------

    def complete(self, index: int, completion: Completion) -> Transfer:
        """Apply what link ``index`` reported."""
        entry, transfer = self._transfers.pop(completion.tag)
        self.wants_cleaning = True
        if transfer.direction is Direction.UP:
            self.directory.end_fill(entry, index, completion.error)
            if completion.error is None:
                self.policies[index].touched(entry.key)
            else:
                for request in self.requests:
                    request.failed(entry.key, completion.error)
        else:
            self.directory.end_writeback(entry, index, completion.error, completion.checksums, transfer.generation)
            if completion.error is None:
                self.policies[index + 1].touched(entry.key)
        return transfer

    # -- what is the matter ------------------------------------------------------------------------------------------------

    def why_stuck(self, request: Request, waited: float) -> str:
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

    def unsaved(self) -> list[Copy]:
        """Copies above the bottom that the tiers below have not got."""
        found = (entry.unsaved for entry in self.directory.entries())
        return [copy for copy in found if copy is not None]
