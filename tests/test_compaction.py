"""What is moved within a tier so that holes become one: where to, by the pure part; and that nobody notices, by the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes import FakeTier, MovableTier
from tests.rig import READ, WRITE, Rig, fill, spec, where
from tiered import CapacityError, TieredStore
from tiered.allocator import SlotMap
from tiered.engine.policy import LRU
from tiered.engine.pool import Pool
from tiered.engine.residency import Copy, Directory, State
from tiered.types import Slot

MIB = 1 << 20


def layout(text: str) -> tuple[list[Slot], set[int], int]:
    """Slots, offsets of the movable ones, capacity; ``aa.B``: a movable slot of two bytes, a free one, one that stays."""
    slots, movable, at = [], set(), 0
    while at < len(text):
        end = at + 1
        while end < len(text) and text[end] == text[at]:
            end += 1
        if text[at] != ".":
            slots.append(Slot(at, end - at))
            movable |= {at} if text[at].islower() else set()
        at = end
    return slots, movable, len(text)


def after(text: str, nbytes: int, most: float = 1000) -> str | None:
    """The layout when everything was moved; None where nothing is."""
    slots, movable, capacity = layout(text)
    fixed = {slot.offset for slot in slots} - movable
    plan = SlotMap(slots, capacity, fixed).moves(nbytes, most)
    if plan is None:
        return None
    found = list(text)
    for slot, to in plan:
        name, found[slot.offset : slot.offset + slot.nbytes] = text[slot.offset], "." * slot.nbytes
        assert set(found[to : to + slot.nbytes]) == {"."}, f"{name} was moved to where something is"
        found[to : to + slot.nbytes] = name * slot.nbytes
    return "".join(found)


@pytest.mark.parametrize(
    ("text", "nbytes", "expected"),
    [
        ("a..b", 2, "a..b"),
        ("Aa.b.C", 2, "Aa..bC"),
        ("A.bb.c.D", 2, "A.bb..cD"),  # the fewest bytes
        ("A.b.c.D", 3, "Acb...D"),  # one goes elsewhere
        ("A..bb.CC..D", 4, "A.....CCbbD"),  # across what stays
        ("A..b.ccc.D.E", 4, "A....cccbD.E"),
        ("A.B.C", 2, None),
        ("A.b.C", 3, None),
        ("aaaa", 1, None),
        ("", 1, None),
    ],
)
def test_what_is_moved(text: str, nbytes: int, expected: str | None) -> None:
    assert after(text, nbytes) == expected


def test_not_more_than_may_be_moved() -> None:
    assert after(".aaa.", 2, most=2) is None
    assert after(".aaa.", 2, most=3) == "..aaa"


LAYOUTS = st.lists(st.sampled_from([".", "..", "...", "W", "WW", "m", "mm", "mmm", "mmmmm"]), max_size=14)


@settings(max_examples=400, deadline=None)
@given(LAYOUTS, st.integers(1, 12), st.one_of(st.integers(0, 20), st.just(math.inf)))
def test_every_plan_can_be_carried_out_and_is_enough(parts: Sequence[str], nbytes: int, most: float) -> None:
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    pieces = [part if part[0] == "." else next(letters) * len(part) for part in parts]
    text = "".join(p.upper() if part[0] == "W" else p for p, part in zip(pieces, parts, strict=True))
    found = after(text, nbytes, most)
    if found is None:
        assert "." * nbytes not in text
        between_walls = "".join("|" if letter.isupper() else letter for letter in text).split("|")
        assert most < math.inf or all(piece.count(".") < nbytes for piece in between_walls)
        return
    assert "." * nbytes in found
    assert sorted(found) == sorted(text)
    assert all(letter == before for letter, before in zip(found, text, strict=True) if before.isupper())
    assert sum(text.count(letter) for letter in set(text) - {"."} if found.index(letter) != text.index(letter)) <= most


class Place(RuleBasedStateMachine):
    """Copies come to one tier, are used in every way, and leave it. The oracle is a dict of what each of them holds."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = MovableTier("t0", 40)
        self.directory = Directory(2, lambda copy: self.place.note(copy) if copy.tier == 0 else None)
        self.place = Pool(self.tier, LRU(), bottom=False)
        self.held: dict[str, bytes] = {}
        self.pinned: dict[str, Slot] = {}  # where it was when it was last pinned
        self.numbers = iter(range(1, 1 << 30))

    def copy(self, key: str) -> Copy:
        copy = self.directory.entry(key).copies[0]
        assert copy is not None
        return copy

    def arrive(self, nbytes: int, slot: Slot) -> None:
        number = next(self.numbers)
        key, self.held[key] = f"k{number}", number.to_bytes(4, "little")[:nbytes].ljust(nbytes, b"-")
        self.tier.write(slot, self.held[key])
        self.directory.put(key, spec(nbytes), 0, slot)
        self.place.policy.touched(key)

    @rule(nbytes=st.integers(1, 9))
    def put(self, nbytes: int) -> None:
        free, slot = self.place.free, self.place.allocate(nbytes)
        if slot is not None:
            self.arrive(nbytes, slot)
        else:
            assert nbytes > free or self.pinned or nbytes * 8 < sum(map(len, self.held.values()))

    @rule(nbytes=st.integers(1, 40))
    def make_room(self, nbytes: int) -> None:
        slot = self.place.allocate(nbytes)
        chosen = self.place.victims(nbytes, lambda copy: copy.key not in self.pinned) if slot is None else []
        if chosen is None:
            return
        while slot is None and chosen:
            copy = chosen.pop(0)
            self.directory.forget(copy.key)
            del self.held[copy.key]
            slot = self.place.allocate(nbytes, 0 if chosen else math.inf)
        assert slot is not None
        self.arrive(nbytes, slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), nbytes=st.integers(1, 20))
    def make_room_of_neighbours(self, data: st.DataObject, nbytes: int) -> None:
        """The oracle looks at every row of bytes of that length: whoever is in it goes."""
        among = set(data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))) - self.pinned.keys()
        slots = {key: self.copy(key).slot for key in self.held}
        costs = []
        for start in range(self.tier.capacity - nbytes + 1):
            into = {key for key, slot in slots.items() if slot.offset < start + nbytes and start < slot.offset + slot.nbytes}
            if into and into <= among:
                costs.append(sum(slots[key].nbytes for key in into))
        moved, found = self.place.moved, self.place.together(nbytes, [self.copy(key) for key in sorted(among)])
        if self.tier.largest >= nbytes:
            return  # nobody asks
        assert (found is None) == (not costs)
        if found is not None:
            assert sum(copy.slot.nbytes for copy in found) == min(costs)
            assert {copy.key for copy in found} <= among
            for copy in found:
                self.directory.forget(copy.key)
                del self.held[copy.key]
            slot = self.place.allocate(nbytes, 0)
            assert slot is not None
            assert self.place.moved == moved
            self.arrive(nbytes, slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["leased", "written", "aliased", "read from", "written back", "condemned"]))
    def use(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        entry, copy = self.directory.entry(key), self.copy(key)
        if key in self.pinned or copy.state is not State.DIRTY:
            return
        if how == "condemned":
            self.place.mark_victim(copy)
            return
        if how in ("leased", "written"):
            self.directory.grant(entry, 0, READ if how == "leased" else WRITE)
        elif how == "aliased":
            copy.aliases += 1
        elif how == "read from":
            copy.reads_from += 1
        else:
            self.directory.begin_writeback(entry, 0, Slot(0, copy.nbytes))
        self.place.note(copy)
        self.pinned[key] = copy.slot

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pinned)))
        copy = self.copy(key)
        del self.pinned[key]
        copy.aliases = copy.reads_from = 0
        if copy.leased:
            self.directory.release(copy, WRITE if copy.writers else READ)
        if copy.state is State.WRITEBACK:
            self.directory.end_writeback(self.directory.entry(key), 0, CapacityError("no"))
        self.place.note(copy)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        if key not in self.pinned:
            self.directory.forget(key)
            del self.held[key]

    @invariant()
    def everybody_has_their_bytes(self) -> None:
        self.place.check()
        assert self.place.used == self.tier.used
        for key, data in self.held.items():
            assert self.tier.read(self.copy(key).slot, len(data)) == data
        for key, slot in self.pinned.items():
            assert self.copy(key).slot == slot, f"{key} was moved while somebody looked at it"


TestPlace = Place.TestCase
TestPlace.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def apart(rig: Rig) -> None:
    """Fill 12 bytes with a to d; b and d are then deleted, so that six bytes are free: three and three."""
    fill(rig, "a", "b", "c", "d", nbytes=3)
    rig.delete("b")
    rig.delete("d")
    assert rig.state.pools[0].free == 6


def test_nothing_leaves_where_moving_is_enough() -> None:
    rig = Rig(12, 400, memory=MovableTier)
    apart(rig)
    put = rig.put("e", b"eeeeee")
    assert put.room.done
    assert (rig.moved, rig.state.evictions) == (3, 0)
    rig.settle()
    assert where(rig, "a")[0] is where(rig, "c")[0] is State.CLEAN
    rig.wind_down()


def test_a_memory_that_cannot_move_evicts() -> None:
    rig = Rig(12, 400, memory=FakeTier)
    apart(rig)
    assert rig.put("e", b"eeeeee").room.done
    assert (rig.moved, rig.state.evictions) == (0, 1)
    rig.wind_down()


@pytest.mark.parametrize("why", ["leased", "aliased"])
def test_what_somebody_looks_at_is_not_moved(why: str) -> None:
    rig = Rig(12, 400, memory=MovableTier)
    apart(rig)
    leases = [rig.lease("a"), rig.lease("c")]
    places = [lease.copies[0].slot for lease in leases]
    if why == "aliased":
        for lease in leases:
            rig.release(lease)
    put = rig.put("e", b"eeeeee")
    rig.settle()
    assert not put.room.done
    assert [lease.copies[0].slot for lease in leases] == places
    for lease in leases[1:]:
        if why == "leased":
            rig.release(lease)
        rig.drop(lease.copies[0])
    rig.settle()
    assert put.room.done
    assert rig.moved == 3
    assert leases[0].copies[0].slot == places[0]
    rig.wind_down()


def test_without_a_tier_below_room_that_lies_apart_is_room() -> None:
    rig = Rig(12, memories=1, memory=MovableTier)
    for key in "abcd":
        rig.put(key, key.encode() * 3)
    rig.delete("b")
    rig.delete("d")
    assert rig.put("e", b"eeeeee").error is None
    assert rig.newest["e"] == b"eeeeee"
    assert rig.moved == 3
    rig.wind_down()


@pytest.mark.parametrize("why", ["leased", "aliased"])
def test_without_a_tier_below_what_somebody_looks_at_is_not_moved_either(why: str) -> None:
    rig = Rig(12, memories=1, memory=MovableTier)
    for key in "abcd":
        rig.put(key, key.encode() * 3)
    rig.delete("b")
    rig.delete("d")
    leases = [rig.lease("a"), rig.lease("c")]
    if why == "aliased":
        for lease in leases:
            rig.release(lease)
    assert isinstance(rig.put("e", b"eeeeee").error, CapacityError)
    assert rig.moved == 0
    rig.wind_down()


def test_a_store_of_unequal_tensors_keeps_every_byte(tmp_path: Path) -> None:
    """And who holds on to a tensor, even after its lease, finds it where it was."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 200_000, (60,), generator=generator).tolist()
    tensors = {f"t{number}": torch.randint(0, 255, (size,), generator=generator).byte() for number, size in enumerate(sizes)}
    with TieredStore.open(tmp_path / "state", dram=2 * MIB) as store:
        for key, tensor in tensors.items():
            store.put(key, tensor)
        with store.lease("t3") as alias:
            address = alias.data_ptr()
        for number in torch.randint(0, 60, (400,), generator=generator).tolist():
            with store.lease(f"t{number}", access="write" if number % 3 == 0 else "read") as tensor:
                assert torch.equal(tensor, tensors[f"t{number}"])
                if number % 3 == 0:
                    tensor += 1
                    tensors[f"t{number}"] = tensors[f"t{number}"] + 1
            assert number == 3 or torch.equal(alias, tensors["t3"])
        assert alias.data_ptr() == address
        assert store.statistics().tiers[0].moved > 0
    with TieredStore.open(tmp_path / "state", dram=2 * MIB) as store:
        for key, expected in tensors.items():
            assert torch.equal(store.get(key), expected)
