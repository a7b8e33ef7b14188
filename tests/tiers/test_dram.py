from __future__ import annotations

import ctypes
import gc
import os
import re
import resource

import pytest

from tests.contracts.memory import MovableContract, OpenMemory
from tests.contracts.tier import OpenTier, TierContract
from tests.fakes import in_child
from tiered.errors import CapacityError
from tiered.tiers.dram import DramConfig, DramTier


class TestDramContract(TierContract):
    @pytest.fixture
    def open_tier(self) -> OpenTier:
        return lambda capacity: DramTier(DramConfig(capacity))


class TestDramMemory(MovableContract):
    @pytest.fixture
    def open_memory(self) -> OpenMemory:
        return lambda capacity: DramTier(DramConfig(capacity))


def mapped(address: int) -> dict[str, str] | None:
    """What /proc/self/smaps says of the mapping that holds ``address``."""
    found: dict[str, str] | None = None
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                if found:
                    return found
                found = {} if start <= address < end else None
            elif found is not None:
                found[first.rstrip(":")] = rest.strip()
    return found


@pytest.mark.parametrize("capacity", [4096, 4097, 8191, (1 << 20) + 5, 5 << 20])
def test_the_budget_is_a_hard_limit_to_the_byte(capacity: int) -> None:
    tier = DramTier(DramConfig(capacity))
    assert tier.capacity == capacity - capacity % 4096 == ctypes.sizeof(tier.arena)
    slots = []
    while (slot := tier.allocate(4096)) is not None:
        slots.append(slot)
    assert tier.used == sum(slot.nbytes for slot in slots) == tier.capacity
    assert max(slot.offset + slot.nbytes for slot in slots) == tier.capacity
    for slot in slots:
        tier.free(slot)
    assert tier.used == 0
    assert tier.largest == tier.capacity


@pytest.mark.parametrize("capacity", [4095, 1, 0, -5])
def test_too_small_names_the_minimum(capacity: int) -> None:
    with pytest.raises(CapacityError, match="minimum is 4096"):
        DramTier(DramConfig(capacity))


def test_other_alignments() -> None:
    tier = DramTier(DramConfig(100_000, alignment=16384))
    assert tier.capacity == 6 * 16384
    tier.allocate(1)
    slot = tier.allocate(1)
    assert slot is not None
    assert (slot.offset, slot.nbytes) == (16384, 16384)


def test_the_arena_starts_on_a_huge_page_and_asks_for_them() -> None:
    tier = DramTier(DramConfig(5 << 20))
    assert tier.address % (2 << 20) == 0
    facts = mapped(tier.address)
    assert facts is not None
    flags = facts["VmFlags"].split()
    assert "dc" in flags, "absent from forked children"
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        assert "hg" in flags
    assert int(facts["Size"].split()[0]) << 10 == 5 << 20, "the advice covers the slots and nothing else"


def test_all_of_it_is_memory() -> None:
    tier = DramTier(DramConfig(3 << 20))
    ctypes.memset(tier.address, 7, tier.capacity)
    assert bytes(memoryview(tier.arena).cast("B")[-3:]) == b"\7\7\7"


def test_aliases_outlive_the_tier() -> None:
    tier = DramTier(DramConfig(1 << 20))
    slot = tier.allocate(10)
    assert slot is not None
    address = tier.address
    alias = (ctypes.c_char * 10).from_buffer(tier.arena, slot.offset)
    alias.raw = b"0123456789"
    tier.close()
    tier.close()
    del tier
    gc.collect()
    assert alias.raw == b"0123456789"
    assert mapped(address)
    del alias
    gc.collect()
    assert not mapped(address), "unmapped with the last reference"


def test_an_owner_alone_keeps_the_mapping() -> None:
    tier = DramTier(DramConfig(1 << 20))
    slot = tier.allocate(10)
    assert slot is not None
    address = tier.address
    owner = tier.tensor(slot, 10)[1]
    tier.close()
    del tier
    gc.collect()
    assert mapped(address)
    del owner
    gc.collect()
    assert not mapped(address)


def test_a_closed_tier_has_no_arena() -> None:
    tier = DramTier(DramConfig(1 << 20))
    tier.close()
    with pytest.raises(AssertionError):
        _ = tier.address


def test_more_than_the_system_gives_is_refused_with_the_number() -> None:
    with pytest.raises(CapacityError, match=r"1048576\.0 TiB of memory for the DRAM tier"):
        DramTier(DramConfig(1 << 60))
    with pytest.raises(CapacityError, match=r"1073741824\.0 TiB of memory"):
        DramTier(DramConfig(1 << 70))


def test_an_address_space_limit_is_refused_with_the_number() -> None:
    def body() -> str:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30),) * 2)
        with pytest.raises(CapacityError) as caught:
            DramTier(DramConfig(2 << 30))
        return str(caught.value)

    assert re.search(r"refuses 2\.0 GiB of memory for the DRAM tier .*ulimit -v is [\d,]+ bytes", in_child(body))


def test_a_forked_child_has_no_arena_and_does_not_unmap_what_took_its_place() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    map_fixed_noreplace, private_anonymous, read_write = 0x100000, 0x22, 3
    size = 4 << 20
    tiers = [DramTier(DramConfig(size))]
    address = tiers[0].address

    def body() -> bytes:
        found = libc.mmap(address, size, read_write, private_anonymous | map_fixed_noreplace, -1, 0)
        assert found == address, "the arena is there"
        ctypes.memset(address, 5, size)
        tiers.pop().close()
        gc.collect()
        return ctypes.string_at(address, 1)

    assert in_child(body) == repr(b"\5")
