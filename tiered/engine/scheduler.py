"""The decisions over all tiers: bring a tensor up, make room, choose victims, admit transfers, apply their ends.

Everything here runs under the engine's lock and touches no link and no thread. To admit a transfer means: its slot is
allocated, the residency edge is taken, and the transfer stands in its link's queue, from which the engine starts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tiered.engine.pool import MOVED, sized
from tiered.engine.residency import Copy, Entry, Evictability, State
from tiered.engine.state import EngineState, RoomSearch, Ticket
from tiered.errors import CapacityError
from tiered.types import AHEAD, Completion, Direction, Key, Slot, Transfer, Urgency

__all__ = ["QUEUED", "Scheduler"]

QUEUED, QUEUED_SHARE = 2 << 20, 16
"""Bytes of transfers up that a prefetch has wait for a link, and their part of the upper tier, at most, or one: each that is
admitted alone costs a turn of the engine, which takes longer than the transfer of a small tensor."""

PACK_ATTEMPTS = 4
"""How often a request may evict its own copies, to fit better among the same neighbours."""

ALL_PACK_ATTEMPTS = 16
"""How often it may while others' tensors are on their way to the tier. Where these leave for the request and come back to other
places, the neighbours change each time: two requests could take turns at it for ever."""


_FILLING, _UP = State.FILLING, Direction.UP  # see residency
_USED, _CLEAN, _FRESH, _DIRTY, _WRITING = Evictability
_LEAVING = frozenset({_CLEAN, _WRITING})
_PREFETCH, _SPECULATIVE = Urgency.PREFETCH, Urgency.SPECULATIVE


class Scheduler:
    """Decides for ``state`` which tensor moves where: by each tier's policy, by the plan of an order that is followed, and by
    who waits for what."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.exhausted: dict[int, int] | None = None
        """While requests are attempted in their order: tier -> the fewest bytes for which a demand found no copy that may
        leave. Those after it may push out no more than it may, so they need not look. None elsewhere."""

    # -- bringing tensors up -----------------------------------------------------------------------------------------------

    def bring(self, entry: Entry, tier: int, ticket: Ticket) -> bool:
        """Return whether ``entry`` has a valid copy in ``tier``; if not, admit the next transfer on its way there."""
        state = self.state
        copy = entry.copies[tier]
        if copy is not None:
            if copy.state is _FILLING:
                state.transfers.raise_urgency(entry.key, ticket.urgency)
            return copy.valid
        for below in range(tier + 1, len(entry.copies)):
            source = entry.copies[below]
            if source is None:
                continue
            if source.valid:
                if source.unsealed:
                    raise state.why_spoiled(source)
                if not entry.writers:
                    self._admit_fill(entry, below - 1, ticket)
            else:
                state.transfers.raise_urgency(entry.key, ticket.urgency)
            return False
        for above in range(tier - 1, -1, -1):
            source = entry.copies[above]
            if source is not None and source.state is State.DIRTY and source.still:
                if source.failure is not None:
                    error, source.failure = source.failure, None  # a later request tries again
                    raise error
                self.admit_writeback(entry, above, ticket)
                return False
        state.transfers.raise_urgency(entry.key, ticket.urgency)
        return False

    def _admit_fill(self, entry: Entry, tier: int, ticket: Ticket) -> None:
        state = self.state
        if (slot := self.room(tier, entry.nbytes, ticket, entry.key)) is None:
            return
        if (source := entry.copies[tier + 1]) is None:  # the room for what left here was made by evicting the source
            state.pools[tier].give_back(slot)
            return
        copy = state.directory.begin_fill(entry, tier, slot)
        if ticket.urgency is _PREFETCH:
            copy.prefetched = True
            state.prefetched += 1
        elif ticket.urgency is _SPECULATIVE:
            copy.speculated = True
            state.speculated += 1
        state.enqueue(entry, tier, _UP, slot, source.slot, ticket.urgency, source)

    # -- writing back ------------------------------------------------------------------------------------------------------

    def admit_writeback(self, entry: Entry, tier: int, ticket: Ticket, snapshot: Slot | None = None) -> bool:
        """Queue a write-back of ``entry`` from ``tier`` to the tier below, if that has room.

        With ``snapshot``, a slot with the same bytes, the transfer reads that slot instead, because somebody could change the
        copy meanwhile; the slot is given back after the transfer.
        """
        state, below = self.state, tier + 1
        lower = None
        source = entry.copies[tier]
        assert source is not None
        try:
            if source.unsealed:
                raise state.why_spoiled(source)
            lower = self.room(below, entry.nbytes, ticket, entry.key)
            if lower is None and below == state.bottom:
                under = state.pools[below].tier
                why = getattr(under, "refusal", None) or f"tier {under.name} is full"
                raise CapacityError(f"no room for {sized(entry.nbytes, entry.key)}: {why}")
        finally:
            if lower is None and snapshot is not None:
                state.give_back(tier, snapshot)
        if lower is None:
            return False
        state.directory.begin_writeback(entry, tier, lower)
        tag = state.enqueue(entry, tier, Direction.DOWN, snapshot or source.slot, lower, ticket.urgency, None)
        if snapshot is not None:
            state.transfers.snapshots[tag] = (tier, snapshot)
        return True

    def busy(self, entry: Entry, ticket: Ticket) -> bool:
        """Whether transfers of ``entry`` are under way, or have to be, for which ``ticket`` has to wait."""
        if self._frozen(entry, ticket):
            return True
        in_flight = entry.in_flight
        if in_flight:
            self.state.transfers.raise_urgency(entry.key, ticket.urgency)
        return in_flight

    def _frozen(self, entry: Entry, ticket: Ticket) -> bool:
        """Whether a snapshot needs ``entry`` as it is, so that ``ticket`` has to wait for its write-back.

        A request that only does away with the tensor need not wait: the tensor is set aside. (A put has taken room for its new
        tensor already, which the write-back may need.)
        """
        state, snapshot = self.state, self.state.snapshot
        if snapshot is None or entry.key not in snapshot.frozen:
            return False
        copy = state.unsaved[entry.key]
        if ticket.replaces and not entry.in_flight:
            state.set_aside(entry)
            return False
        if copy.state is State.DIRTY and not copy.in_flight and copy.failure is None:
            self.save(copy, ticket)
        else:
            state.transfers.raise_urgency(entry.key, ticket.urgency)
        return True

    def save(self, copy: Copy, ticket: Ticket) -> None:
        """Queue the write-back of ``copy``, which the active snapshot needs; first duplicate bytes that somebody can change."""
        state, snapshot = self.state, self.state.snapshot
        assert snapshot is not None
        entry = state.directory.entry(copy.key)
        if copy.aliases and not copy.leased:
            slot = self.room(copy.tier, entry.nbytes, ticket, entry.key)
            if slot is None:
                return
            snapshot.duplicate(copy, slot, entry.nbytes)
            copy = state.directory.move(copy, slot)
            state.install(copy)
        duplicate = None
        if copy.aliases and copy.tier + 1 == state.bottom:
            # Under a READ lease, too, somebody may write. That is not to be stored, but must not make checksums wrong.
            duplicate = self.room(copy.tier, entry.nbytes, ticket, entry.key)
            if duplicate is None:
                return
            snapshot.duplicate(copy, duplicate, entry.nbytes)
        self.admit_writeback(entry, copy.tier, ticket, duplicate)

    # -- room --------------------------------------------------------------------------------------------------------------

    def room(self, tier: int, nbytes: int, ticket: Ticket, key: Key | None) -> Slot | None:
        """Return a slot in ``tier`` for ``key``. None: not yet, but room is made as far as ``ticket`` may push others out.

        Raises CapacityError when the tier could never hold ``nbytes``, and the error of a failed write-back when only that
        stands in the way.
        """
        state = self.state
        pool = state.pools[tier]
        if tier < state.bottom and nbytes > pool.tier.capacity:
            raise CapacityError(pool.why_never(nbytes, key))
        if ticket.urgency in AHEAD and not self._may_prefetch(tier, nbytes, ticket):
            return None
        state.writeback_due = True  # there is less room
        if (search := ticket.search) is None:
            search = ticket.search = RoomSearch()
        if search.next.get(tier) and pool.free < nbytes < ticket.lacking and state.order is None:
            slot = self._take_next(tier, nbytes, ticket, search)
            if slot is not None:
                return slot
        slot = pool.allocate(nbytes, 0)
        dropped: list[Copy] | None = None
        if slot is None and state.order is not None and state.order.plans(tier):
            slot, dropped = self.take_planned_room(tier, nbytes, ticket)
        if slot is None and pool.memory is not None and nbytes <= pool.free:
            slot = pool.allocate(nbytes, MOVED if tier < state.bottom else math.inf)
        if slot is None and tier < state.bottom:
            slot = self.make_room(tier, nbytes, ticket, dropped)
        if slot is None:
            if nbytes > pool.tier.capacity:  # only now: to ask a disk for its capacity is a system call
                raise CapacityError(pool.why_never(nbytes, key))
            ticket.full_tiers = (*ticket.full_tiers, tier)
        return slot

    def refuse_full(self, tier: int, nbytes: int, key: Key | None) -> None:
        """Raise CapacityError where waiting brings no room: nothing leaves the bottom, unless somebody still looks at it."""
        pool = self.state.pools[tier]
        if tier == self.state.bottom and not pool.aliased_evicted:
            raise CapacityError(pool.why_full(nbytes, key))

    def _may_prefetch(self, tier: int, nbytes: int, ticket: Ticket) -> bool:
        """Whether a prefetch may take room: not while the link has enough to do, nor where a demand waits for room, or would. A
        speculative one also waits until nothing else comes up its link, so that a demand never finds many of them there."""
        state = self.state
        pool = state.pools[tier]
        if ticket.urgency is Urgency.SPECULATIVE and tier < state.bottom and state.transfers.inbound[tier].transfers:
            return False
        queued = state.transfers.queues[tier].read_bytes if tier < state.bottom else 0
        if queued and queued + pool.rounded(nbytes) > min(QUEUED, pool.tier.capacity // QUEUED_SHARE):
            return False
        for other in state.waiting:
            if tier in other.full_tiers and other.urgency < ticket.urgency:
                return False
        bytes_of = pool.bytes_of
        ready = pool.free + bytes_of[_CLEAN]
        if ticket.needed_at is None:
            for key in state.wanted(tier, ticket, too=False):
                copy = pool.evictable.get(key)
                ready -= copy.slot.nbytes if copy is not None and copy.evictability is _CLEAN else 0
        else:  # along a known order dirty copies are written back for the prefetch
            ready += bytes_of[_FRESH] + bytes_of[_DIRTY] + bytes_of[_WRITING]
        return ready - nbytes >= pool.largest

    # -- victims -----------------------------------------------------------------------------------------------------------

    def take_planned_room(self, tier: int, nbytes: int, ticket: Ticket) -> tuple[Slot | None, list[Copy]]:
        """Evict copies that the plan dropped and that lie together, and return their room: nothing is moved. Where they have
        none, also return those that may leave."""
        pool = self.state.pools[tier]
        if not (dropped := pool.dropped()):
            return None, []
        acceptable = self._acceptable(tier, ticket)
        size = pool.rounded(nbytes)
        for copy in dropped:
            if copy.slot.nbytes == size and acceptable(copy):
                return self._evict_for_its_slot(copy), []
        leaving = [copy for copy in dropped if acceptable(copy)]
        found = pool.together(size, leaving)
        for copy in found or ():
            self.evict(copy)
        return pool.allocate(nbytes, 0) if found else None, leaving

    def make_room(self, tier: int, nbytes: int, ticket: Ticket, dropped: list[Copy] | None) -> Slot | None:
        """Evict the policy's first victims once all of them are clean, and none before. Where a plan drops copies from the
        tier, those of them that may leave are ``dropped``, and leave first.

        To evict in vain would be worse than waste: two requests could take turns at it for ever.
        """
        state, search = self.state, ticket.search
        assert search is not None
        pool = state.pools[tier]
        exhausted = self.exhausted if ticket.urgency is Urgency.DEMAND else None
        # To choose among ten thousand copies at the end of each transfer would take longer than the transfers.
        if search.pushes(tier, ticket) and pool.free + pool.bytes_of[_CLEAN] + pool.bytes_of[_FRESH] < nbytes:
            return None
        if exhausted is not None and nbytes >= exhausted.get(tier, math.inf):
            return None
        if state.asked is ticket and state.order is None and ticket.lacking > nbytes:  # it lacks others beside this tensor
            if (slot := self._take_next(tier, nbytes, ticket, search)) is not None:
                return slot
            if search.leaving and tier + 1 == state.bottom:
                return None  # what was chosen for all of the request is on its way out
        acceptable = self._acceptable(tier, ticket)
        chosen: list[Copy] | None = None
        if state.order is None and (one := pool.large_victim(nbytes, _clean(acceptable))) is not None:
            if one.slot.nbytes == pool.rounded(nbytes):
                return self._evict_for_its_slot(one)
            chosen = [one]
        if dropped is not None:
            chosen = pool.enough(nbytes, dropped)
            if chosen is None and ticket.needed_at is not None:
                return None  # a fetch along an order takes the room of nothing else, and has nothing of its own to evict
        if chosen is None:
            chosen = pool.victims(nbytes, lambda copy: copy.evictability is not _FRESH and acceptable(copy))
        if chosen is None and ticket.urgency not in AHEAD:
            chosen = pool.victims(nbytes, acceptable)
            chosen = chosen or pool.victims(nbytes, acceptable, math.inf)
        if chosen is None:
            chosen = self.evict_own_to_fit(tier, nbytes, ticket)
        if chosen is None:
            self.hurry_writebacks(tier, ticket)
            if exhausted is not None:
                exhausted[tier] = min(nbytes, exhausted.get(tier, nbytes))
            return None
        if state.order is not None:
            for copy in chosen:
                pool.mark_victim(copy)
        unsaved = [copy for copy in chosen if copy.dirty]
        try:
            for copy in unsaved:
                self._write_out(copy, ticket)
        except CapacityError:  # the tier below is full: then something clean, even if it is needed sooner
            clean = pool.victims(nbytes, lambda copy: not copy.dirty and acceptable(copy))
            moving = state.transfers.inbound[tier].transfers or pool.bytes_of[_WRITING]
            if clean is None and not moving:
                raise
            if clean is None:
                return None  # what moves will be clean
            chosen, unsaved = clean, []
        if unsaved:
            search.push(tier, unsaved, pool.tier.capacity)
            return None
        return self._evict_for_room(tier, nbytes, chosen)

    def _take_next(self, tier: int, nbytes: int, ticket: Ticket, search: RoomSearch) -> Slot | None:
        """Evict the next of the copies that the policy chose for the whole of ``ticket``, and return its room, if that is as
        large as ``nbytes`` need. None: the policy has to be asked for this tensor alone, or ``search.leaving`` has copies.

        (To ask it for each of hundreds of tensors would take longer than all the rest of their fetches.)
        """
        state = self.state
        pool = state.pools[tier]
        if (leaving := search.next.get(tier)) is None:
            leaving = search.next[tier] = self._leaving(tier, ticket, search)[::-1]
        if nbytes >= search.vain.get(tier, math.inf):
            return None
        size, wrote = pool.rounded(nbytes), search.wrote and tier + 1 == state.bottom
        others: list[Copy] = []
        while leaving:
            copy = leaving.pop()
            if copy.evictability is not _CLEAN:
                continue
            if copy.slot.nbytes == size:
                leaving += reversed(others)
                return self._evict_for_its_slot(copy)
            if wrote:
                others.append(copy)
        # All that were chosen to be written leave, for one tensor of the request or for another; but none in vain.
        slot = self._evict_for_room(tier, nbytes, others) if others and pool.suffice(nbytes, others) else None
        leaving += reversed(others)
        if wrote and slot is None:
            search.vain[tier] = nbytes
        return slot

    def _leaving(self, tier: int, ticket: Ticket, search: RoomSearch) -> list[Copy]:
        """Return the clean ones among the policy's first victims for all that ``ticket`` lacks. Above the disk, a demand has
        the dirty ones written back, all at once: they are chosen again only when the last of them has been."""
        state = self.state
        pool, acceptable = state.pools[tier], self._acceptable(tier, ticket)
        if tier + 1 < state.bottom or ticket.urgency in AHEAD:
            found = pool.first(ticket.lacking, _clean(acceptable))
            return found if sum(copy.slot.nbytes for copy in found) >= ticket.lacking else []
        there = [copy for copy in search.leaving if pool.evictable.get(copy.key) is copy]  # an exception may have struck since
        chosen = [copy for copy in there if copy.evictability in _LEAVING and acceptable(copy)]
        if not any(copy.evictability is _WRITING for copy in chosen):
            missing = ticket.lacking - (0 if search.wrote else pool.free)  # which lies apart, perhaps
            chosen = pool.first(missing, lambda copy: copy.evictability is not _FRESH and acceptable(copy))
            unsaved = self._write_out_all([copy for copy in chosen if copy.dirty], ticket)
            if unsaved:
                search.wrote = True
                search.push(tier, unsaved, pool.tier.capacity)
        search.leaving = chosen if any(copy.evictability is _WRITING for copy in chosen) else []
        return [copy for copy in chosen if copy.evictability is _CLEAN]

    def _write_out_all(self, copies: Sequence[Copy], ticket: Ticket) -> list[Copy]:
        """Have ``copies`` written back for ``ticket``, as far as the tier below has room; return those that are."""
        for count, copy in enumerate(copies):
            try:
                self._write_out(copy, ticket)
            except CapacityError:  # who asks for one tensor alone says why
                return list(copies[:count])
        return list(copies)

    def _acceptable(self, tier: int, ticket: Ticket) -> Callable[[Copy], bool]:
        """Return which copies may leave for ``ticket``.

        Not what the request or one before it still wants, and not what cannot be written back; for a hint, nothing that costs a
        write; for a fetch along a known order, nothing that is needed sooner, and for a speculative one, nothing that is
        expected to be.
        """
        state = self.state
        order, needed_at = state.order, ticket.needed_at
        wanted = state.wanted(tier, ticket, too=True)
        hint = ticket.urgency in AHEAD and needed_at is None
        speculative = ticket.urgency is Urgency.SPECULATIVE

        def acceptable(copy: Copy) -> bool:
            if copy.key in wanted or copy.stuck:
                return False
            if needed_at is not None and order is not None:
                return order.plan.next_use(copy.key) > needed_at  # it is asked of copies only that the plan dropped
            if speculative and order is not None and order.plan.expected(copy.key) <= ticket.expected_at:
                return False
            return not (hint and copy.dirty)

        return acceptable

    def evict_own_to_fit(self, tier: int, nbytes: int, ticket: Ticket) -> list[Copy] | None:
        """Evict copies that the request itself has in ``tier``, where they lie in the middle; they come back afterwards."""
        state = self.state
        pool = state.pools[tier]
        others = state.wanted(tier, ticket, too=False)
        own = [pool.copies[key] for key in ticket.wants() if key in pool.copies and key not in others]
        if not own or any(copy.evictability is _USED or copy.stuck for copy in own):
            return None
        acceptable = self._acceptable(tier, ticket)
        others_too = [copy for copy in pool.evictable.values() if acceptable(copy) and copy not in own]
        if not pool.would_fit(nbytes, [*others_too, *own]):
            return None
        if any(copy.dirty for copy in (*others_too, *own)):
            return [*others_too, *own]  # they are written back first
        neighbours = pool.neighbours([*others_too, *own])
        assert ticket.search is not None
        attempts, moving = ticket.search.pack_attempts, state.transfers.inbound[tier].transfers
        tried = attempts.count(neighbours)
        if tried >= PACK_ATTEMPTS or (moving and len(attempts) >= ALL_PACK_ATTEMPTS):
            return None
        attempts.append(neighbours)
        for copy in own:
            self.evict(copy)
        if tried == 0:
            return others_too
        for copy in others_too:  # as few of them as make way for this tensor were too few for the next
            self.evict(copy)
        return []

    def _write_out(self, copy: Copy, ticket: Ticket) -> None:
        """Have ``copy`` written back, so that it can leave for ``ticket``."""
        state = self.state
        if copy.state is State.DIRTY:
            writer = ticket
            if ticket.urgency in AHEAD:
                writer = Ticket(Urgency.WRITEBACK)
                writer.sequence = next(state.numbers)
            self.admit_writeback(state.directory.entry(copy.key), copy.tier, writer)
        else:
            state.transfers.raise_urgency(copy.key, ticket.urgency)

    def hurry_writebacks(self, tier: int, ticket: Ticket) -> None:
        """Make write-backs from ``tier`` as urgent as ``ticket``: all that may leave is too little.

        Raises the error that keeps other copies from leaving, where nothing is under way.
        """
        state = self.state
        pool = state.pools[tier]
        if ticket.urgency in AHEAD:
            return
        for transfer in [t for t in state.transfers.queues[tier] if t.direction is Direction.DOWN]:
            state.transfers.raise_urgency(transfer.key, ticket.urgency)
        failed = [copy for copy in pool.evictable.values() if copy.stuck and copy.failure is not None]
        if failed and not pool.bytes_of[_WRITING]:
            failure = failed[0].failure
            assert failure is not None
            for copy in failed:
                copy.failure = None  # a later request tries again
            raise failure

    def _evict_for_room(self, tier: int, nbytes: int, chosen: list[Copy]) -> Slot:
        """Evict as many of ``chosen``, which are clean and enough for ``nbytes``, as it takes, and return their room."""
        pool = self.state.pools[tier]
        slot = pool.allocate(nbytes)
        while chosen and slot is None:
            self.evict(chosen.pop(0))
            slot = pool.allocate(nbytes)
        slot = slot or pool.allocate(nbytes, math.inf)
        assert slot is not None
        return slot

    def _evict_for_its_slot(self, copy: Copy) -> Slot:
        """Evict ``copy`` and return its slot, which stays allocated: what comes instead is as large."""
        slot = self.state.pools[copy.tier].pass_on(copy)
        self.evict(copy)
        return slot

    def evict(self, copy: Copy) -> None:
        state = self.state
        state.evictions += 1
        if copy.tier + 1 < state.bottom and state.asked is not None and state.asked.search is not None:
            known = state.asked.search.wanted
            for tier, too in [key for key in known if key[0] > copy.tier]:
                del known[tier, too]  # the tensor may be on its way again, through these
        if copy.prefetched:
            state.prefetched_unused += 1
        if copy.speculated:
            state.speculated_unused += 1
        state.directory.evict(copy)

    # -- transfers end -----------------------------------------------------------------------------------------------------

    def complete(self, index: int, completion: Completion, now: float) -> Transfer:
        """Apply the end of a transfer, as link ``index`` reported it ``now``."""
        state = self.state
        entry, transfer = state.transfers.end(index, completion.tag, now, completion.error)
        state.writeback_due = True
        if transfer.direction is _UP:
            source = entry.copies[index + 1]
            if completion.error is None and source is not None and source.unsealed:
                completion = replace(completion, error=state.why_spoiled(source))
            state.directory.end_fill(entry, index, completion.error)
            if completion.error is None:
                state.pools[index].policy.touched(entry.key)
            else:
                for ticket in state.waiting:
                    if ticket.urgency >= transfer.begun:  # else the read began before it was asked for: a new one follows
                        ticket.failed(entry.key, completion.error)
        else:
            self._end_writeback(index, entry, transfer, completion)
        return transfer

    def _end_writeback(self, index: int, entry: Entry, transfer: Transfer, completion: Completion) -> None:
        state = self.state
        source, duplicate = entry.copies[index], state.transfers.snapshots.pop(transfer.tag, None)
        assert source is not None
        if duplicate is not None:
            state.give_back(*duplicate)
        if completion.error is None and (source.unsealed or (duplicate is None and source.written)):
            # The bytes below are of before and after, or may be.
            state.directory.repeat_writeback(entry, index)
            state.disturbances += 1
            return
        state.directory.end_writeback(entry, index, completion.error, completion.checksums, transfer.generation)
        below, snapshot = entry.copies[index + 1], state.snapshot
        if below is None:  # the write-back failed
            state.disturbances += 1
        elif below.tier < state.bottom:
            state.install(below)
            state.pools[below.tier].plan(below)  # what the plan says of it
        else:
            if state.arrived is not None and not entry.temporary:
                state.arrived(entry)
            if snapshot is not None and entry.key in snapshot.frozen:
                del snapshot.frozen[entry.key]
                snapshot.saved(entry)
        if entry.aside and not entry.in_flight and (snapshot is None or entry.key not in snapshot.frozen):
            state.directory.forget(entry.key)


def _clean(acceptable: Callable[[Copy], bool]) -> Callable[[Copy], bool]:
    """Return which of the ``acceptable`` copies leave at once, and were not prefetched for somebody."""
    return lambda copy: copy.evictability is _CLEAN and acceptable(copy)
