"""The copies of rows that were read: against a dict, and what a table asks of them."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tiered import Owner, SparseAdagrad, TieredEmbedding, TieredStore
from tiered.errors import ForkedStore, StoreClosed
from tiered.tables import kernel
from tiered.tables.cache import RowCache
from tiered.tables.layout import Layout
from tiered.tables.places import Places
from tiered.types import Access

pytestmark = pytest.mark.skipif(kernel.lib is None, reason="without a C compiler rows have no copies")
MIB = 1 << 20


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "state", dram=4 * MIB) as store:
        yield store


class AgainstADict(RuleBasedStateMachine):
    """Rows of two tables in a cache of a few kibibytes. What the cache returns is right; what was kept last is there."""

    @initialize(nbytes=st.sampled_from([512, 1200, 5000]))
    def begin(self, nbytes: int) -> None:
        self.cache = RowCache(16 * nbytes)
        self.rows = [torch.arange(60.0)[:, None].expand(60, 16).clone(), torch.arange(60.0)[:, None].expand(60, 30) + 100]
        self.numbers = [self.cache.number(60, rows[0].nbytes) for rows in self.rows]
        self.kept: dict[tuple[int, int], bool] = {}

    ids = st.lists(st.integers(0, 59), max_size=40)

    @rule(which=st.integers(0, 1), ids=ids)
    def read_and_keep(self, which: int, ids: list[int]) -> None:
        if (number := self.numbers[which]) is None:
            return
        wanted, rows = torch.tensor(ids, dtype=torch.int64), self.rows[which]
        found = torch.full((len(ids), rows.shape[1]), -1.0)
        missing = self.cache.read(number, wanted, found)
        lacking = set(range(len(ids)) if missing is None else missing.tolist())
        for place, row in enumerate(ids):
            if place in lacking:
                assert (found[place] == -1).all()
            else:
                assert self.kept.get((which, row))
                assert torch.equal(found[place], rows[row])
        fresh = wanted[sorted(lacking)]
        self.cache.keep(number, fresh, rows[fresh])
        self.kept.update(((which, row), True) for row in fresh.tolist())
        if len(fresh) and rows[fresh].nbytes <= self.cache._nbytes // 2:
            last, there = fresh[-1:], torch.empty(1, rows.shape[1])
            missing = self.cache.read(number, last, there)
            assert missing is not None
            assert not len(missing)
            assert torch.equal(there, rows[last])

    @rule(which=st.integers(0, 1), ids=ids)
    def change(self, which: int, ids: list[int]) -> None:
        if (number := self.numbers[which]) is None:
            return
        wanted = torch.tensor(ids, dtype=torch.int64)
        self.cache.forget(number, wanted)
        self.rows[which][wanted] += 1
        self.kept.update(((which, row), False) for row in ids)

    @rule(which=st.integers(0, 1))
    def another_number(self, which: int) -> None:
        self.numbers[which] = self.cache.number(60, self.rows[which][0].nbytes)
        self.rows[which] += 1
        for row in range(60):
            self.kept[which, row] = False

    @rule()
    def clear(self) -> None:
        self.cache.close()
        self.cache._closed = False
        self.kept.clear()


def run(examples: int, steps: int) -> None:
    machine = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AgainstADict, settings=machine)  # type: ignore[no-untyped-call]


def test_copies_are_right() -> None:
    run(60, 30)


@pytest.mark.soak
def test_copies_are_right_for_long() -> None:
    run(4000, 100)


def test_rows_that_have_no_copies() -> None:
    cache = RowCache(MIB)
    assert cache.number(60, 64) is not None
    assert cache.number(60, 60) is None
    assert cache.number(60, 8192) is not None
    assert cache.number(60, 8193) is None
    assert cache.number(1 << 36, 64) is None
    assert cache.number((1 << 36) - 1, 64) is not None


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each part had that was read from where it lies."""
    counts: list[int] = []
    before = Places.move

    def move(self: Places, part, rows, access) -> None:  # type: ignore[no-untyped-def]
        if access is Access.READ:
            counts.append(len(part.ids))
        before(self, part, rows, access)

    monkeypatch.setattr(Places, "move", move)
    return counts


def test_a_row_is_read_from_its_block_once(tmp_path: Path, moved: list[int]) -> None:
    with TieredStore.open(tmp_path / "state", dram=4 * MIB) as store:
        table = store.table("t", 1000, 32)
        table[:] = torch.arange(1000.0)[:, None].expand(-1, 32)
        ids = torch.tensor([5, 900, 5, 77])
        for _ in range(3):
            assert table.look_up(ids)[:, 3].tolist() == [5, 900, 5, 77]
        assert moved == [4]
        assert table.look_up([5, 6, 900])[:, 0].tolist() == [5, 6, 900]
        assert moved == [4, 1]
        store.commit()
        store.offload()
        assert table.look_up(ids)[:, 0].tolist() == [5, 900, 5, 77]
        assert moved == [4, 1]  # neither is a change
        table[6] = torch.full((32,), -1.0)
        assert table.look_up([5, 6])[:, 0].tolist() == [5, -1]
        assert moved == [4, 1, 1]  # of row 6 alone


def test_a_table_that_is_read_in_order_leaves_the_copies(tmp_path: Path, moved: list[int]) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        table = store.table("t", 9000, 32)
        table[:] = torch.arange(9000.0)[:, None].expand(-1, 32)
        table.look_up([1, 2])
        for _, rows in table.blocks():
            assert len(rows)
        before = len(moved)
        assert table.look_up([1, 2])[:, 0].tolist() == [1, 2]
        assert len(moved) == before


def test_a_change_by_somebody_else_forgets_all(tmp_path: Path, moved: list[int]) -> None:
    with TieredStore.open(tmp_path / "state", dram=4 * MIB, keep=3) as store:
        table = store.table("t", 1000, 32)
        table[:] = torch.zeros(1000, 32)
        store.commit()
        ids = [0, 999]

        def both() -> list[float]:
            return table.look_up(ids)[:, 0].tolist()

        assert both() == [0, 0] == both()
        assert moved == [2]
        with store.lease("t/block0", access="write") as block:
            block[0] = 1
        assert both() == [1, 0]
        assert moved == [2, 2]
        store.put("t/block0", torch.full((table.block_rows, 32), 2.0), owner=Owner("table", "t"))
        assert both() == [2, 0] == both()
        assert moved == [2, 2, 2]
        store.put("t/other0", torch.zeros(3))
        assert both() == [2, 0]
        assert moved == [2, 2, 2]
        store.rollback()
        assert both() == [0, 0] == both()
        assert moved == [2, 2, 2, 2]
        store.rollback()  # nothing of the table changes
        assert both() == [0, 0]
        assert moved == [2, 2, 2, 2]
        store.delete("t/block0", owner=Owner("table", "t"))
        assert both() == [0, 0]
        assert moved == [2, 2, 2, 2, 2]


def test_copies_end_with_the_store(tmp_path: Path) -> None:
    store = TieredStore.open(tmp_path / "state", dram=4 * MIB)
    table = store.table("t", 1000, 32)
    table.look_up([1, 2])
    store.commit()
    store.close()
    assert store._row_cache._young is None
    with pytest.raises(StoreClosed):
        table.look_up([1, 2])


def test_a_reader_forgets_what_another_commit_has_otherwise(tmp_path: Path) -> None:
    """A block that did not exist, one that is put, and a row that goes to the row buffer and back."""
    with TieredStore.open(tmp_path / "state", dram=4 * MIB, keep=4) as store:
        store.put("t/appended", torch.zeros(1, dtype=torch.int64), owner=Owner("table", "t"))
        store.put("t/table", Layout(1000, (32,), torch.float32, 100, 2.0, 24, 8).encoded(), owner=Owner("table", "t"))
        table, ids = store.table("t"), [0, 500, 999]
        store.commit()
        with TieredStore.open(tmp_path / "state", dram=MIB, access="read") as reader:
            read = reader.table("t")

            def both() -> list[float]:
                store.commit()
                reader.refresh()
                found = read.look_up(ids)[:, 0].tolist()
                assert found == read.look_up(ids)[:, 0].tolist() == table.look_up(ids)[:, 0].tolist()
                return found

            assert both() == [2, 2, 2]
            table[0:100] = torch.full((100, 32), 1.0)
            assert both() == [1, 2, 2]
            table.update([0, 500], torch.full((2, 32), 5.0))
            assert table.key_of(0) != "t/block0"
            assert both() == [5, 5, 2]
            for row in range(30):  # the buffer is emptied
                table.update([100 + 30 * (row % 10)], torch.full((1, 32), float(row)))
            assert both() == [5, 5, 2]
            for generation in (*store.generations, *reversed(store.generations)):
                store.rollback(generation)
                expected = {0: [2, 2, 2], 1: [1, 2, 2]}.get(store.generations.index(generation), [5, 5, 2])
                assert table.look_up(ids)[:, 0].tolist() == expected


@pytest.mark.parametrize("slots", [0, 24])
def test_each_call_that_changes_rows_forgets_them(tmp_path: Path, moved: list[int], slots: int) -> None:
    with TieredStore.open(tmp_path / "state", dram=4 * MIB) as store:
        store.put("t/appended", torch.zeros(1, dtype=torch.int64), owner=Owner("table", "t"))
        record = Layout(300, (32,), torch.float32, 100, 0.0, slots, 8 if slots else 0).encoded()
        store.put("t/table", record, owner=Owner("table", "t"))
        table, now, ids = store.table("t"), torch.zeros(300, 32), torch.tensor([0, 1, 150, 299])

        def right() -> None:
            for _ in range(2):
                assert torch.equal(table.look_up(ids), now[ids])

        right()
        table.update(ids[:2], torch.ones(2, 32))
        now[ids[:2]] = 1
        right()
        table.accumulate(ids[1:3], torch.ones(2, 32))
        now[ids[1:3]] += 1
        right()
        table.append(torch.full((2, 32), 7.0))
        now[:2] = 7
        right()
        table[299] = now[299] = torch.full((32,), 8.0)
        right()
        table[100:200] = now[100:200] = torch.full((100, 32), 9.0)
        right()
        table[298:300] = now[298:300] = torch.full((2, 32), 10.0)
        right()
        weight = TieredEmbedding(table).weight
        weight.grad = torch.sparse_coo_tensor(ids[None, :3], torch.ones(3, 32), now.shape, check_invariants=True)
        SparseAdagrad([weight], lr=1.0).step()
        now[ids[:3]] -= 1
        assert torch.allclose(table.look_up(ids), now[ids])
        assert sum(moved) < 40  # and not by forgetting all


def test_copies_and_blocks_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread goes back between the rows that have copies and the others."""
    with TieredStore.open(tmp_path / "state", dram=8 * MIB, keep=3) as store:
        table = store.table("t", 64, 32, block=4096)
        for value in (1.0, 2.0):
            table[:] = torch.full((64, 32), value)
            store.commit()
        assert table.look_up([0])[0, 0] == 2
        before = RowCache.read

        def read(self: RowCache, *arguments: Any) -> Any:
            found = before(self, *arguments)
            thread = threading.Thread(target=store.rollback, args=(1,))
            thread.start()
            thread.join()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(RowCache, "read", read)
            assert table.look_up([0, 1, 40])[:, 0].tolist() == [1, 1, 1]
        assert table.look_up([0, 1, 40])[:, 0].tolist() == [1, 1, 1]


def test_a_block_that_is_deleted_while_a_commit_needs_it(tmp_path: Path) -> None:
    """It is set aside for the commit, because a view of it is alive and there is no room to duplicate it."""
    with TieredStore.open(tmp_path / "state", dram=MIB) as store, contextlib.ExitStack() as stack:
        table = store.table("t", 1000, 32, block=16384)
        table[:] = torch.zeros(1000, 32)
        for number in range(62):
            store.put(f"z{number}", torch.full((4096,), float(number)))
        store.commit()
        with store.lease("t/block0", access="write") as block:
            block.fill_(1)
        assert table.look_up([0])[0, 0] == 1
        for number in range(62):
            stack.enter_context(store.lease(f"z{number}"))
        commit = store.commit_async()
        store.delete("t/block0", owner=Owner("table", "t"))
        assert list(store._engine.state.directory.set_aside_entries())
        assert table.look_up([0])[0, 0] == 0
        stack.close()
        del block
        commit.result()
        assert table.look_up([0])[0, 0] == 0


def test_ids_that_change_meanwhile(on_disk: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    table = on_disk.table("t", 1000, 32)
    table[:] = torch.arange(1000.0)[:, None].expand(-1, 32)
    ids, before = torch.tensor([5, 6]), Places.move

    def move(self: Places, *arguments: Any) -> None:
        before(self, *arguments)
        ids.add_(695)

    with monkeypatch.context() as patch:
        patch.setattr(Places, "move", move)
        assert table.look_up(ids)[:, 0].tolist() == [5, 6]
    assert table.look_up([700, 701])[:, 0].tolist() == [700, 701]


def test_a_forked_child_closes_while_another_thread_had_the_copies(on_disk: TieredStore) -> None:
    table = on_disk.table("t", 1000, 32)
    table.look_up([1])
    taken, end = threading.Event(), threading.Event()

    def hold() -> None:
        with on_disk._row_cache._lock, table._places.lock:
            taken.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of threads and fork: that is the case
        child = os.fork()
    if child == 0:
        try:
            table.look_up([1])
        except ForkedStore:
            on_disk.close()
            os._exit(7)
        os._exit(1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        end.set()
        thread.join()


def test_a_look_up_that_ends_after_close_keeps_nothing(tmp_path: Path) -> None:
    cache = RowCache(MIB)
    number = cache.number(1000, 128)
    assert number is not None
    cache.close()
    cache.keep(number, torch.tensor([1]), torch.ones(1, 32))
    assert cache._young is None
    assert cache._old is None
