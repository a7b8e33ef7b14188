"""What every Memory must do beyond a Tier. Subclass ``MemoryContract`` and provide the fixture ``open_memory``; where slots can
be moved, ``MovableContract``.

Lifetimes are the point: whoever reuses a slot asks its owner whether anything still looks at it, and nobody else knows.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch

from tiered.interfaces import Memory, Movable
from tiered.types import Slot

OpenMemory = Callable[[int], Memory]
CAPACITY = 1 << 20
NBYTES = 4096


def filled(memory: Memory, nbytes: int, value: int) -> Slot:
    slot = memory.allocate(nbytes)
    assert slot is not None
    memory.tensor(slot, nbytes)[0].fill_(value)
    return slot


def values(tensor: torch.Tensor) -> set[int]:
    return set(tensor.tolist())


def alive(owner: weakref.ref[object]) -> bool:
    gc.collect()
    return owner() is not None


class MemoryContract:
    @pytest.fixture
    def open_memory(self) -> OpenMemory:
        """A function that opens a fresh, empty memory of so many bytes (a multiple of 64 KiB)."""
        raise NotImplementedError

    @pytest.fixture
    def memory(self, open_memory: OpenMemory) -> Memory:
        return open_memory(CAPACITY)

    @pytest.fixture
    def slot(self, memory: Memory) -> Slot:
        return filled(memory, NBYTES, 0)

    def test_is_a_memory(self, memory: Memory) -> None:
        assert isinstance(memory, Memory)

    @pytest.mark.parametrize("nbytes", [1, 7, 511, 4096, 70_001, CAPACITY])
    def test_a_tensor_is_plain_bytes(self, memory: Memory, nbytes: int) -> None:
        slot = memory.allocate(nbytes)
        assert slot is not None
        tensor, _ = memory.tensor(slot, nbytes)
        assert tensor.dtype == torch.uint8
        assert tensor.shape == (nbytes,)
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        assert not tensor.requires_grad

    def test_less_than_the_slot_and_never_more(self, memory: Memory, slot: Slot) -> None:
        assert memory.tensor(slot, 3)[0].shape == (3,)
        for nbytes in (0, slot.nbytes + 1):
            with pytest.raises(AssertionError):
                memory.tensor(slot, nbytes)

    def test_two_tensors_of_a_slot_are_the_same_memory(self, memory: Memory, slot: Slot) -> None:
        (one, first), (other, second) = memory.tensor(slot, NBYTES), memory.tensor(slot, NBYTES)
        assert one.data_ptr() == other.data_ptr()
        assert first is not second, "each has a life of its own"
        one.fill_(9)
        assert values(other) == {9}

    def test_slots_lie_where_their_offsets_say(self, memory: Memory) -> None:
        slots = [filled(memory, nbytes, nbytes % 251) for nbytes in (1, 5000, 70_000)]
        bases = {memory.tensor(slot, 1)[0].data_ptr() - slot.offset for slot in slots}
        assert len(bases) == 1

    def test_neighbours_are_left_alone(self, memory: Memory) -> None:
        slots = [filled(memory, NBYTES, number) for number in range(3)]
        memory.tensor(slots[1], slots[1].nbytes)[0].fill_(77)
        assert [values(memory.tensor(slot, NBYTES)[0]) for slot in slots] == [{0}, {77}, {2}]

    def test_the_owner_goes_with_the_tensor(self, memory: Memory, slot: Slot) -> None:
        tensor, owner = memory.tensor(slot, NBYTES)
        watched = weakref.ref(owner)
        del owner
        assert alive(watched)
        del tensor
        assert not alive(watched)

    @pytest.mark.parametrize(
        "alias_of",
        [
            pytest.param(lambda t: t.view(torch.float32).view(32, 32).t()[1:5], id="views"),
            pytest.param(lambda t: t.detach(), id="detach"),
            pytest.param(lambda t: t.data, id="data"),
            pytest.param(lambda t: torch.nn.Parameter(t.view(torch.float32)), id="parameter"),
            pytest.param(lambda t: t.untyped_storage(), id="storage"),
            pytest.param(lambda t: torch.empty(0, dtype=torch.uint8, device=t.device).set_(t), id="set_"),
        ],
    )
    def test_the_owner_lives_until_the_last_alias(
        self, memory: Memory, slot: Slot, alias_of: Callable[[torch.Tensor], object]
    ) -> None:
        tensor, owner = memory.tensor(slot, NBYTES)
        watched = weakref.ref(owner)
        alias = alias_of(tensor)
        del owner, tensor
        assert alive(watched)
        del alias
        assert not alive(watched)

    def test_the_owner_lives_while_autograd_has_saved_the_tensor(self, memory: Memory, slot: Slot) -> None:
        """The C++ side holds the tensor then; the Python object is gone."""
        tensor, owner = memory.tensor(slot, NBYTES)
        watched = weakref.ref(owner)
        tensor.fill_(0)
        fixed = tensor.view(torch.float32)
        weight = torch.ones(NBYTES // 4, device=tensor.device, requires_grad=True)
        loss = (weight * fixed).sum()
        del owner, tensor, fixed
        assert alive(watched)
        loss.backward()
        del loss
        assert not alive(watched)
        assert weight.grad is not None
        assert values(weight.grad) == {0}

    def test_the_owner_can_be_finalized(self, memory: Memory, slot: Slot) -> None:
        tensor, owner = memory.tensor(slot, NBYTES)
        told: list[Slot] = []
        weakref.finalize(owner, told.append, slot)
        del owner
        gc.collect()
        assert told == []
        del tensor
        gc.collect()
        assert told == [slot]

    def test_aliases_and_owners_survive_close(self, memory: Memory, slot: Slot) -> None:
        tensor, owner = memory.tensor(slot, NBYTES)
        watched = weakref.ref(owner)
        del owner
        memory.close()
        memory.close()
        del memory
        assert alive(watched)
        tensor.fill_(5)
        assert values(tensor) == {5}
        del tensor
        assert not alive(watched)

    def test_a_closed_memory_has_no_tensors(self, memory: Memory, slot: Slot) -> None:
        memory.close()
        with pytest.raises(AssertionError):
            memory.tensor(slot, NBYTES)


class MovableContract(MemoryContract):
    """Its ``open_memory`` gives a Movable."""

    def test_is_movable(self, memory: Memory) -> None:
        assert isinstance(memory, Movable)
        assert memory.streams is None

    @pytest.mark.parametrize("slots", [1, 3, 8])
    @pytest.mark.parametrize("way", ["down", "up", "elsewhere"])
    def test_moved_bytes_are_the_same(self, memory: Movable, way: str, slots: int) -> None:
        """Eight slots of room, then the slot, then eight of room: the new place overlaps the old one, touches it, or is far."""
        unit = _unit(memory)
        padding = [memory.allocate(8 * unit), memory.allocate(slots * unit), memory.allocate(8 * unit)]
        assert all(padding)
        low, slot, high = sorted((found for found in padding if found), key=lambda found: found.offset)
        memory.free(low)
        memory.free(high)
        written = _pattern(memory, slot)
        to = {"down": slot.offset - 3 * unit, "up": slot.offset + 3 * unit, "elsewhere": low.offset}[way]
        moved = memory.move(slot, to)
        assert moved == Slot(to, slot.nbytes)
        assert torch.equal(memory.tensor(moved, moved.nbytes)[0].cpu(), written)

    def test_its_old_room_is_free(self, memory: Movable) -> None:
        unit = _unit(memory)
        slot = memory.allocate(4 * unit)
        assert slot is not None
        moved = memory.move(slot, slot.offset + unit)
        low, high = memory.allocate(unit), memory.allocate(CAPACITY - 5 * unit)
        assert low == Slot(slot.offset, unit)
        assert high == Slot(moved.offset + moved.nbytes, CAPACITY - 5 * unit)
        assert memory.allocate(1) is None
        for found in (moved, low, high):
            memory.free(found)
        assert memory.allocate(CAPACITY) is not None

    def test_nowhere_but_to_what_is_free(self, memory: Movable) -> None:
        unit = _unit(memory)
        slots = [memory.allocate(2 * unit) for _ in range(3)]
        one, other, last = sorted((found for found in slots if found), key=lambda found: found.offset)
        written = [_pattern(memory, slot) for slot in (one, other, last)]
        taken = (one.offset, one.offset + unit, last.offset - unit)
        outside = (CAPACITY, CAPACITY - unit, -unit, CAPACITY - 2 * unit + 1)
        for to in (*taken, *outside):
            with pytest.raises(AssertionError):
                memory.move(other, to)
        memory.free(one)
        with pytest.raises(AssertionError):
            memory.move(one, last.offset + 2 * unit)
        for slot, data in zip((other, last), written[1:], strict=True):
            assert torch.equal(memory.tensor(slot, slot.nbytes)[0].cpu(), data)
        memory.free(other)
        memory.free(last)

    def test_neighbours_of_both_places_are_left_alone(self, memory: Movable) -> None:
        unit = _unit(memory)
        slots = sorted((filled(memory, 2 * unit, number) for number in range(5)), key=lambda slot: slot.offset)
        before = [values(memory.tensor(slot, slot.nbytes)[0]) for slot in slots]
        memory.free(slots[1])
        slots[3] = memory.move(slots[3], slots[1].offset)
        after = [values(memory.tensor(slot, slot.nbytes)[0]) for slot in slots]
        assert [after[number] for number in (0, 2, 3, 4)] == [before[number] for number in (0, 2, 3, 4)]


def _unit(memory: Memory) -> int:
    """Bytes of its smallest slot."""
    slot = memory.allocate(1)
    assert slot is not None
    memory.free(slot)
    return slot.nbytes


def _pattern(memory: Memory, slot: Slot) -> torch.Tensor:
    """What was written to all of the slot: nowhere the same."""
    written = torch.frombuffer(bytearray(random.Random(slot.offset).randbytes(slot.nbytes)), dtype=torch.uint8)
    memory.tensor(slot, slot.nbytes)[0].copy_(written)
    return written
