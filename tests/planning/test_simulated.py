"""A simulated store beside a real one: the same calls, the same bytes over the link."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered import CapacityError, TensorSpec, TieredStore
from tiered.engine.policy import Touch
from tiered.engine.retention import RetentionPlan, bytes_moved, plan_retention
from tiered.planning.simulated import DriveRates, SimulatedStore
from tiered.types import Use

PAGE = 4096
RATES = DriveRates(read=1e6, write=2e6, transfer=1e-3)
ORDER = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([Use.READ, Use.WRITE])), min_size=1, max_size=24)


def spec(pages: int) -> TensorSpec:
    return TensorSpec("uint8", (pages * PAGE,), 1)


def moved(store: TieredStore, sizes: dict[str, int], order: Sequence[tuple[str, Use]]) -> list[tuple[int, int]]:
    """Bytes up and down in each of four rounds along an order, from an empty pool."""
    for key, pages in sizes.items():
        store.create(key, spec(pages))
    store.offload()
    store.follow([Touch(key, None, use, sizes[key] * PAGE) for key, use in order], prefetch="off")
    found = []
    for _ in range(4):
        before = store.statistics().links[-1]
        for key, use in order:
            with store.lease(key, access=use.value):
                pass
        after = store.statistics().links[-1]
        found.append((after.up.bytes - before.up.bytes, after.down.bytes - before.down.bytes))
    return found


@settings(deadline=None, max_examples=8)
@given(order=ORDER, pages=st.lists(st.integers(1, 40), min_size=6, max_size=6))
def test_it_moves_what_a_real_store_moves(order: list[tuple[str, Use]], pages: list[int]) -> None:
    sizes = dict(zip("abcdef", (8 * one for one in pages), strict=True))
    dram = 256 * PAGE if max(sizes.values()) <= 256 else 320 * PAGE
    with tempfile.TemporaryDirectory() as folder:
        with TieredStore.open(f"{folder}/store", dram=dram, durability="none") as store:
            real = moved(store, sizes, order)
        simulated = SimulatedStore(dram, RATES)
        with simulated:
            assert moved(simulated, sizes, order) == real


@settings(deadline=None, max_examples=15)
@given(order=ORDER, room=st.integers(1, 6))
def test_it_moves_what_the_plan_counts_where_sizes_are_equal(order: list[tuple[str, Use]], room: int) -> None:
    """The oracle is a count without places, of a second round from an empty memory: ``bytes_moved``."""
    keys, uses = [key for key, _ in order], [use for _, use in order]
    touched: Any = (keys, uses, [PAGE] * len(keys))
    decision = plan_retention(*touched, room * PAGE)
    with SimulatedStore(room * PAGE, RATES) as store:
        found = moved(store, dict.fromkeys("abcdef", 1), order)
    assert isinstance(decision, RetentionPlan)
    assert sum(found[1]) == bytes_moved(*touched, room * PAGE, decision)


def test_time_is_that_of_the_bytes() -> None:
    with SimulatedStore(4 * PAGE, RATES) as store:
        store.place({"a": 2 * PAGE, "b": 4 * PAGE})
        with store.lease("a"):
            pass
        assert store.clock.now == pytest.approx(2 * PAGE / RATES.read + RATES.transfer)
        with store.lease("b", access="write"):  # "a" is clean, and leaves without a byte
            pass
        with store.lease("a"):  # "b" is written first
            pass
        expected = 8 * PAGE / RATES.read + 4 * PAGE / RATES.write + 4 * RATES.transfer
        assert store.clock.now == pytest.approx(expected)
        assert store.moved == (8 * PAGE, 4 * PAGE)
        assert store.drive.busy == pytest.approx(expected)


def test_reading_ahead_hides_behind_computing() -> None:
    with SimulatedStore(16 * PAGE, RATES) as store:
        store.place(dict.fromkeys("abcdefgh", 4 * PAGE))
        seconds = 4 * PAGE / RATES.read + RATES.transfer
        store.follow(list("abcdefgh"))
        for _ in range(3):
            began = store.clock.now
            for key in "abcdefgh":
                with store.lease(key):
                    pass
                store.compute(4 * seconds)
            waited = store.clock.now - began - 32 * seconds
        assert waited < seconds / 2, "the drive has four times as long as it needs"
        assert store.moved[0] >= 3 * 4 * 4 * PAGE


def test_what_cannot_fit_says_so() -> None:
    with SimulatedStore(2 * PAGE, RATES) as store:
        store.place({"a": PAGE, "b": 2 * PAGE})
        with store.lease("a"), pytest.raises(CapacityError, match="a READ lease of 'b'"), store.lease("b"):
            pass
