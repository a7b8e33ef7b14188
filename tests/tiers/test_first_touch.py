"""Pages are touched ahead of their first use: no more than are in use, none beyond the arena, and none of a small pool."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

from tiered.tiers.dram import DramConfig, DramTier, _map
from tiered.tiers.first_touch import LEAST, TOUCHED_AHEAD, FirstTouch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux touches pages ahead")
MIB = 1 << 20


def resident(arena: ctypes.Array[ctypes.c_char], begin: int, end: int) -> int:
    """Return how many bytes of a range have memory."""
    pages = (end - begin) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    address = ctypes.c_void_p(ctypes.addressof(arena) + begin)
    assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(end - begin), found) == 0
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def settled(touch: FirstTouch) -> bool:
    """Wait for the threads. Returns whether the system has what they ask it for."""
    if touch._threads is not None:
        touch._threads.shutdown(wait=True)
    return not touch._refused


def test_as_much_ahead_as_is_in_use() -> None:
    arena = _map(3 * LEAST)
    touch = FirstTouch(arena)
    touch.reached(LEAST - 1)
    assert touch._threads is None
    touch.reached(LEAST)
    if not settled(touch):
        pytest.skip("the kernel has no MADV_POPULATE_WRITE")
    assert resident(arena, 0, LEAST) == 0
    assert resident(arena, LEAST, 2 * LEAST) == LEAST
    assert resident(arena, 2 * LEAST, 3 * LEAST) == 0


def test_a_limited_distance_ahead_up_to_the_end() -> None:
    arena = _map(TOUCHED_AHEAD + 3 * MIB)
    touch = FirstTouch(arena)
    touch.reached(TOUCHED_AHEAD)
    if not settled(touch):
        pytest.skip("the kernel has no MADV_POPULATE_WRITE")
    assert resident(arena, TOUCHED_AHEAD, TOUCHED_AHEAD + 3 * MIB) == 3 * MIB
    touch.reached(TOUCHED_AHEAD + 3 * MIB)  # no thread is asked again: this one would raise


def test_a_closed_pool_touches_nothing() -> None:
    tier = DramTier(DramConfig(2 * LEAST))
    arena = tier.arena
    assert tier.allocate(LEAST - MIB) is not None
    tier._first_touch.close()
    assert tier.allocate(MIB) is not None
    assert resident(arena, LEAST, 2 * LEAST) == 0
    tier.close()
