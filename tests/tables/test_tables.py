"""Tables beside plain tensors: rows by number, slices, rings; commits, other processes, errors."""

from __future__ import annotations

import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.store.chains import CHAINS, MIB, Chain, nothing_is_held, same
from tiered import (
    CapacityError,
    CorruptionError,
    Eviction,
    KeyNotFound,
    LeaseConflict,
    ManifestError,
    MisuseError,
    Owner,
    SparseAdagrad,
    SparseAdamW,
    Table,
    TieredEmbedding,
    TieredStore,
)
from tiered.allocator import SlotMap
from tiered.engine.policy import LRU
from tiered.engine.requests import Lease
from tiered.tables import kernel
from tiered.tables.buffer import blank
from tiered.tables.layout import Layout
from tiered.tables.places import Places
from tiered.types import Candidate, Key


@pytest.fixture(params=CHAINS, ids=lambda chain: chain.name)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    chain: Chain = request.param
    with chain.open(tmp_path / "state") as opened:
        yield opened
        opened.close()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "state", dram=MIB) as opened:
        yield opened
        opened.close()


@pytest.fixture(params=["c", "python"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which rows are copied."""
    if request.param == "python":
        monkeypatch.setattr(kernel, "lib", None)
    else:
        assert kernel.lib is not None


def with_buffer(store: TieredStore, layout: Layout) -> Table:
    """A table that has a row buffer, however small it is; ``store.table`` makes one only for a table larger than the pool."""
    store.put("t/appended", torch.zeros(1, dtype=torch.int64), owner=Owner("table", "t"))
    store.put("t/table", layout.encoded(), owner=Owner("table", "t"))
    return store.table("t")


ROWS, KINDS = 200, (torch.float32, torch.bfloat16, torch.int64)
SHAPES = [(), (5,), (3, 4), (4, 8)]


class AgainstATensor(RuleBasedStateMachine):
    """A table of 200 rows whose blocks do not all fit into the pool's part that is leased at once, and a plain tensor."""

    @initialize(
        hbm=st.booleans(),
        shape=st.sampled_from([*SHAPES, (4, 8)]),
        kind=st.sampled_from(KINDS),
        block_rows=st.sampled_from([2, 7, 64, 900]),
        slots=st.sampled_from([0, 24, 24, 120]),
        tight=st.sampled_from([False, False, False, True]),
    )
    def begin(
        self, hbm: bool, shape: tuple[int, ...], kind: torch.dtype, block_rows: int, slots: int, tight: bool
    ) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.above: dict[str, Any] = {"hbm": "512KiB", "device": "cpu"} if hbm else {}
        self.store = self.open()
        nbytes = block_rows * kind.itemsize * max(1, torch.Size(shape).numel())
        if slots:
            self.table = with_buffer(self.store, Layout(ROWS, shape, kind, min(ROWS, block_rows), 2.0, slots, 8))
        else:
            self.table = self.store.table("t", ROWS, shape, kind, block=nbytes, fill=2)
        self.tight = tight and slots > 0
        self.as_of_a_small_pool()
        self.now = torch.full((ROWS, *shape), 2, dtype=kind)
        self.appended, self.committed = 0, (self.now.clone(), 0)
        self.store.commit()
        self.commits = {self.store.generation: self.committed}
        self.reader = TieredStore.open(Path(self.home.name) / "state", dram=MIB, access="read")
        self.read = self.reader.table("t")
        self.seed = 0

    def as_of_a_small_pool(self) -> None:
        self.table._places.together = 3 * 4096  # as of a pool of 48 KiB: several parts
        self.table._places.tight = self.tight  # or of one too small for the buffer
        self.store._row_cache._nbytes = 16384  # copies of a hundred rows of 128 bytes

    def open(self) -> TieredStore:
        return TieredStore.open(Path(self.home.name) / "state", dram=MIB, keep=3, **self.above)

    def fresh(self, *shape: int) -> torch.Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randint(-1000, 1000, (*shape, *self.table.row_shape), generator=generator)
        return (values / 7).to(self.table.dtype) if self.table.dtype.is_floating_point else values

    ids = st.lists(st.integers(0, 9) | st.integers(0, ROWS - 1), max_size=60)  # some of them often

    @rule(ids=ids, two=st.booleans())
    def look_up(self, ids: list[int], two: bool) -> None:
        wanted = torch.tensor(ids, dtype=torch.int32)
        if two and len(ids) % 2 == 0:
            wanted = wanted.view(2, -1)
        same(self.table.look_up(wanted), self.now[wanted])

    @rule(ids=ids)
    def update(self, ids: list[int]) -> None:
        values = self.fresh(len(ids))
        self.table.update(ids, values)
        for place, row in enumerate(ids):
            self.now[row] = values[place]

    @rule(ids=ids)
    def set_all_to_one(self, ids: list[int]) -> None:
        row = self.fresh()
        self.table[ids] = row
        self.now[torch.tensor(ids, dtype=torch.int64)] = row

    @rule(ids=ids, alpha=st.sampled_from([1, -3, 2]))
    def accumulate(self, ids: list[int], alpha: int) -> None:
        values = self.fresh(len(ids))
        self.table.accumulate(ids, values, alpha=alpha)
        self.now.index_add_(0, torch.tensor(ids, dtype=torch.int64), values, alpha=alpha)

    @rule(count=st.integers(0, 300))
    def append(self, count: int) -> None:
        values = self.fresh(count)
        found = self.table.append(values)
        ids = torch.arange(self.appended, self.appended + count) % ROWS
        assert torch.equal(found, ids)
        for place, row in enumerate(ids.tolist()):
            self.now[row] = values[place]
        self.appended += count
        assert (self.table.appended, self.table.filled) == (self.appended, min(self.appended, ROWS))

    @rule(begin=st.integers(-ROWS - 9, ROWS + 9), end=st.integers(-ROWS - 9, ROWS + 9), step=st.sampled_from([1, 1, 3]))
    def slice(self, begin: int, end: int, step: int) -> None:
        same(self.table[begin:end:step], self.now[begin:end:step])
        values = self.fresh(len(self.now[begin:end:step]))
        self.table[begin:end:step] = values
        self.now[begin:end:step] = values

    @rule(row=st.integers(-ROWS, ROWS - 1))
    def one(self, row: int) -> None:
        same(self.table[row], self.now[row])
        self.table[row] = self.now[row] = self.fresh()

    @rule(begin=st.integers(0, ROWS), end=st.one_of(st.none(), st.integers(0, ROWS)))
    def in_blocks(self, begin: int, end: int | None) -> None:
        found, at = [], begin
        for first, rows in self.table.blocks(begin, end):
            assert first == at
            at += len(rows)
            found.append(rows)
        assert not found or len({rows.data_ptr() for rows in found}) == len(found)
        same(torch.cat([self.now[:0], *found]), self.now[begin:end])

    @rule()
    def leave_memory(self) -> None:
        self.store.offload()

    @rule()
    def commit(self) -> None:
        self.store.commit()
        self.committed = self.commits[self.store.generation] = self.now.clone(), self.appended

    @rule(which=st.integers(0, 2))
    def rollback_further(self, which: int) -> None:
        generation = self.store.generations[which % len(self.store.generations)]
        self.store.rollback(generation)
        self.now, self.appended = self.commits[generation][0].clone(), self.commits[generation][1]

    @rule(row=st.integers(0, ROWS - 1), put=st.booleans())
    def write_to_a_block_by_its_key(self, row: int, put: bool) -> None:
        number, place = divmod(row, self.table.block_rows)
        key = f"t/block{number}"
        if self.table.key_of(row) != key or key not in self.store:
            return
        self.now[row] = value = self.fresh()
        if put:
            block = self.store.get(key)
            block[place] = value
            self.store.put(key, block, owner=Owner("table", "t"))
        else:
            with self.store.lease(key, access="write") as block:
                block[place] = value

    @rule(block=st.integers(0, 9))
    def delete_a_block(self, block: int) -> None:
        if self.table.layout.buffer_rows or (key := f"t/block{block}") not in self.store:
            return
        self.store.delete(key, owner=Owner("table", "t"))
        self.now[block * self.table.block_rows : (block + 1) * self.table.block_rows] = 2

    @rule()
    def rollback(self) -> None:
        self.store.rollback()
        self.now, self.appended = self.committed[0].clone(), self.committed[1]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.now, self.appended = self.committed[0].clone(), self.committed[1]
        self.table = self.store.table("t")
        self.as_of_a_small_pool()

    @precondition(lambda self: self.store.generation)
    @rule()
    def read_in_another_store(self) -> None:
        with TieredStore.open(Path(self.home.name) / "state", dram=MIB, access="read") as reader:
            table = reader.table("t", ROWS)
            same(table[:], self.committed[0])
            assert table.appended == self.committed[1]

    @rule(ids=ids)
    def refresh_a_reader(self, ids: list[int]) -> None:
        self.reader.refresh()
        same(self.read.look_up(ids), self.committed[0][torch.tensor(ids, dtype=torch.int64)])
        same(self.read[:], self.committed[0])

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.reader.close()
            same(self.table[:], self.now)
            nothing_is_held(self.store)
            self.store.close()
            self.home.cleanup()


def run(examples: int, steps: int) -> None:
    machine = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AgainstATensor, settings=machine)  # type: ignore[no-untyped-call]


def test_a_table_is_a_tensor() -> None:
    run(12, 20)


@pytest.mark.soak
def test_a_table_is_a_tensor_for_long() -> None:
    run(400, 60)


@pytest.mark.usefixtures("copies")
def test_rows_that_are_there_twice(store: TieredStore) -> None:
    table = store.table("t", 1000, 8, block="1KiB")
    ids = torch.tensor([5, 999, 5, 0, 999, 5])
    table.update(ids, torch.arange(6.0)[:, None].expand(6, 8))
    assert table.look_up([5, 999, 0, 1])[:, 0].tolist() == [5, 4, 3, 0]
    table.accumulate(ids, torch.ones(6, 8), alpha=2)
    with pytest.raises(MisuseError, match=r"table '.*': alpha is a number, not 'x'"):
        table.accumulate(ids, torch.ones(6, 8), alpha="x")  # type: ignore[arg-type]
    assert table.look_up([5, 999, 0, 1])[:, 0].tolist() == [11, 8, 5, 0]
    same(table.look_up(ids), table[:][ids])
    nothing_is_held(store)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape", [(), (3,), (2, 40)])
def test_sums_are_those_of_index_add(kind: torch.dtype, shape: tuple[int, ...], on_disk: TieredStore) -> None:
    """Bit for bit, however many there are: torch takes other paths for many of them."""
    table = on_disk.table("t", 2000, shape, kind, block="4KiB")
    plain = (torch.randn(2000, *shape) * 10).to(kind)
    table[:] = plain
    for count in (1, 3, 100, 5000):
        ids = torch.randint(0, 2000 if count > 3 else 2, (count,))
        values = (torch.randn(count, *shape) * 10).to(kind)
        alpha = 3 if kind is torch.int32 else -0.3
        table.accumulate(ids, values, alpha=alpha)
        plain.index_add_(0, ids, values, alpha=alpha)
        same(table[:], plain)


def test_what_nobody_wrote_takes_no_room(on_disk: TieredStore) -> None:
    table = on_disk.table("t", 1 << 40, (4, 4), torch.int16, fill=-7)
    assert table.look_up([[0, (1 << 40) - 1]]).eq(-7).all()
    assert sorted(on_disk) == ["t/appended", "t/table"]
    table[-1] = torch.zeros(4, 4, dtype=torch.int16)
    assert len(on_disk) == 3
    assert table.key_of((1 << 40) - 1) in on_disk
    assert table.look_up([(1 << 40) - 1, (1 << 40) - 2]).sum() == -7 * 16
    assert table.block_rows * 32 == MIB // 16, "blocks grow with a table, as far as the pool allows"


def test_blocks_fit_the_pattern_and_the_pool(on_disk: TieredStore, tmp_path: Path) -> None:
    assert on_disk.table("random", 100_000, 64).block_rows * 256 == 32 << 10
    assert on_disk.table("sequential", 100_000, 64, pattern="sequential").block_rows * 256 == MIB // 16
    assert on_disk.table("own", 100_000, 64, block="1KiB").block_rows == 4
    assert on_disk.table("wide", 10, 100_000).block_rows == 1
    assert on_disk.table("few", 3, 1).block_rows == 3
    with TieredStore.open(tmp_path / "larger", dram="32MiB") as larger:
        assert larger.table("sequential", 100_000, 64, pattern="sequential").block_rows * 256 == MIB
        larger.table("random", 100_000, 64)
        for name, other in (("sequential", "random"), ("random", "sequential")):
            with pytest.raises(MisuseError, match=f"rows in a block, where pattern='{other}' has others: open it with"):
                larger.table(name, 100_000, 64, pattern=other)
        larger.commit()
    with TieredStore.open(tmp_path / "larger", dram="1MiB") as smaller:  # whose own blocks would be smaller
        assert smaller.table("sequential", pattern="sequential").block_rows * 256 == MIB
        larger.close()


def test_a_row_that_never_fits(on_disk: TieredStore) -> None:
    table = on_disk.table("t", 10, 1 << 20)
    for work in (lambda: table[0], lambda: table[:], lambda: table.append(torch.zeros(1 << 20))):
        with pytest.raises(CapacityError, match="4,194,304"):
            work()
    with pytest.raises(CapacityError, match="4,194,304"):
        table[0] = torch.zeros(1 << 20)
    with pytest.raises(CapacityError, match="4,194,304"):
        table.update([3], torch.zeros(1, 1 << 20))


def test_wrong_arguments(on_disk: TieredStore) -> None:
    table = on_disk.table("t", 100, (2, 3))
    for ids in ([100], [-1], torch.tensor([1.5]), torch.tensor([True]), ["a"], "a", None, [[1], [2, 3]], 1.0):
        with pytest.raises(MisuseError):
            table.look_up(ids)  # type: ignore[arg-type]
        with pytest.raises(MisuseError):
            table.update(ids, torch.zeros(2, 3))  # type: ignore[arg-type]
    for index in ((1, 2), (), (slice(None), 3), torch.tensor([1], dtype=torch.uint8), None, ...):
        with pytest.raises(MisuseError):
            table[index]
        with pytest.raises(MisuseError):
            table[index] = torch.zeros(2, 3)
    for row in (100, -101):
        with pytest.raises(IndexError):
            table[row]
    wrong: list[Any] = [torch.zeros(2), torch.zeros(1, 3, 2), torch.zeros(2, 2, 3), torch.zeros(2, 3).double(), [[0.0] * 3] * 2]
    for values in (*wrong, torch.zeros(2, 3).to_sparse()):
        for call in (table.append, lambda v: table.update([1], v), lambda v: table.accumulate([1], v)):
            if values is not wrong[2] or call != table.append:
                with pytest.raises(MisuseError, match=r"rows of|have the shape"):
                    call(values)
    for options in (
        {"rows": 0},
        {"rows": 1.5},
        {"rows": 1 << 62},
        {"columns": 0},
        {"columns": "5"},
        {"columns": (2, -1)},
        {"dtype": "float32"},
        {"pattern": "often"},
        {"block": 3},
        {"fill": float("nan")},
        {"fill": 0.5, "dtype": torch.int64},
    ):
        with pytest.raises(MisuseError):
            on_disk.table("new", **{"rows": 10, "columns": 3, **options})  # type: ignore[arg-type]
        assert sorted(on_disk) == ["t/appended", "t/table"]
    with pytest.raises(MisuseError, match="name of a table"):
        on_disk.table("", 3)
    with pytest.raises(KeyNotFound, match=r"no table 'new'.*store\.table\(name, rows"):
        on_disk.table("new")
    assert table[:].eq(0).all()


def test_one_table_for_a_name(on_disk: TieredStore) -> None:
    table = on_disk.table("t", 100, 3)
    assert on_disk.table("t") is on_disk.table("t", 100, (3,), torch.float32) is table
    assert repr(table) == f"<Table 't': 100x3 of torch.float32, 100 rows in a block, in {on_disk}>"
    assert (len(table), table.rows, table.row_shape, table.dtype) == (100, 100, (3,), torch.float32)
    for others in ((99, 3), (100, 4), (100, 3, torch.float64)):
        with pytest.raises(MisuseError, match="exists and has"):
            on_disk.table("t", *others)  # type: ignore[arg-type]
    assert on_disk.table("t", 100, 3, fill=0, pattern="random") is table
    with pytest.raises(MisuseError, match=r"exists and has the fill 0\.0, not 1\.0: open it with its name alone"):
        on_disk.table("t", 100, 3, fill=1.0)
    with pytest.raises(MisuseError, match="exists and belongs to the table 't', not to the row 'r'"):
        on_disk.table("t", 100, 3, owner=Owner("row", "r"))


def test_a_table_that_is_made_anew_has_no_states_of_before(on_disk: TieredStore) -> None:
    """Nor their counts; a user's tensor in the place of these is not changed."""

    def trained(name: str) -> torch.Tensor:
        table = on_disk.table(name, 20, 4)
        table[:] = torch.ones(20, 4)
        embedding = TieredEmbedding(table)
        optimizer = SparseAdamW(embedding.parameters(), lr=0.1)
        for number in range(3):
            embedding(torch.tensor([1, 2 + number])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return table[:]

    on_disk.put("t/mine", torch.ones(1))
    first = trained("t")
    on_disk.table("t").delete()
    assert list(on_disk) == ["t/mine"]
    assert torch.equal(trained("t"), first)
    on_disk.put("t/exp_avg/table", torch.zeros(3, dtype=torch.uint8), owner=Owner("table", "t"))  # a damaged record
    on_disk.table("t").delete()
    assert list(on_disk) == ["t/mine"]
    on_disk.put("u/steps", torch.tensor([100, 0]))
    with pytest.raises(MisuseError, match=r"'u/steps'.*belongs to the user"):
        trained("u")
    assert on_disk.get("u/steps").tolist() == [100, 0]


def test_deleted_and_made_anew(on_disk: TieredStore) -> None:
    on_disk.put("t/blocks", torch.ones(1))
    table = on_disk.table("t", 100, 3, block="128B")
    table[:] = torch.ones(100, 3)
    table.delete()
    assert list(on_disk) == ["t/blocks"]
    with pytest.raises(KeyNotFound):
        on_disk.table("t")
    other = on_disk.table("t", 100, 6, block="240B")
    assert other[:].eq(0).all()
    other[:10] = torch.ones(10, 6)
    with pytest.raises(MisuseError, match="open the table again"):
        table.look_up([0])
    with pytest.raises(MisuseError, match="open the table again"):
        table.update([0], torch.ones(1, 3))
    assert other[0].eq(1).all()
    other.delete()
    for gone in (table, other):
        gone.delete()
        with pytest.raises(KeyNotFound, match="there is no table"):
            gone.update([0], torch.ones(1, *gone.row_shape))
    on_disk.put("t/block7", torch.ones(1))
    with pytest.raises(MisuseError, match="of no table"):
        on_disk.table("t", 100, 3)


@pytest.mark.parametrize("rows", [50, 3000])
def test_made_anew_with_another_number_of_rows(on_disk: TieredStore, rows: int) -> None:
    """Its blocks look the same."""
    table = on_disk.table("t", 1000, 4, block="256B")
    table.append(torch.ones(20, 4))
    table.delete()
    other = on_disk.table("t", rows, 4, block="256B")
    other.append(torch.full((30, 4), 2.0))
    calls: list[Callable[[], object]] = [
        lambda: table.append(torch.ones(4)),
        lambda: table.update([40, 900], torch.ones(4)),
        lambda: table.look_up([0]),
        lambda: table[:4],
        lambda: table.appended,
        lambda: table.delete(),
    ]
    for call in calls:
        with pytest.raises(MisuseError, match="made anew: open the table again"):
            call()
    assert other.appended == 30
    assert other[:30].eq(2).all()
    same = on_disk.table("t", rows, 4)
    other.delete()
    on_disk.table("t", rows, 4, block="256B").append(torch.full((4,), 3.0))
    assert same.appended == 1, "it is the same table to all who look"
    assert same[0].eq(3).all()


def test_damaged_records(on_disk: TieredStore) -> None:
    good = on_disk.table("t", 100, 3).layout.encoded().numpy().tobytes()
    damaged = [b"", b"{}", b"[1]", good[:-1], good.replace(b"float32", b"nn"), good.replace(b"float32", b"load"), b"\xff" * 9]
    damaged += [good.replace(b'"format":1', b'"format":2'), good.replace(b'"rows":100', b'"rows":-1'), good + b" x"]
    damaged += [good.replace(b'"rows":100', b'"rows":4611686018427387904'), good.replace(b"[3]", b"[0]")]
    damaged += [good.replace(b"[3]", b"3")]
    damaged += [good.replace(b"float32", b"int8").replace(b'"fill":0.0', b'"fill":1e300')]
    for record in damaged:
        assert record != good
        written = torch.frombuffer(bytearray(record + b" " * (not record)), dtype=torch.uint8)
        on_disk.put("t/table", written, owner=Owner("table", "t"))
        with pytest.raises(ManifestError, match="'t/table' is not the record of a table"):
            on_disk.table("t")
    on_disk.put("t/table", torch.zeros(3), owner=Owner("table", "t"))
    with pytest.raises(ManifestError):
        on_disk.table("t")
    large = good.replace(b'"rows":100', b'"rows":1099511627776').replace(b'"block_rows":100', b'"block_rows":1099511627776')
    on_disk.put("t/table", torch.frombuffer(bytearray(large), dtype=torch.uint8), owner=Owner("table", "t"))
    with pytest.raises(CapacityError, match="13,194,139,533,312"):  # before a byte of it is taken
        on_disk.table("t").look_up([5])
    on_disk.put("t/table", torch.frombuffer(bytearray(good), dtype=torch.uint8), owner=Owner("table", "t"))
    table = on_disk.table("t")
    for counter in (torch.zeros(1), torch.zeros(2, dtype=torch.int64), torch.tensor([-1])):
        on_disk.put("t/appended", counter, owner=Owner("table", "t"))
        with pytest.raises(MisuseError, match="no count"):
            table.append(torch.zeros(3))


def test_a_damaged_block_fails_only_its_rows(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.table("t", 100, 100, block="4000B")[:] = torch.arange(100.0)[:, None].expand(100, 100)
    file = tmp_path / "state" / "data.0"
    contents = bytearray(file.read_bytes())
    contents[contents.index(torch.full((100,), 57.0).numpy().tobytes())] ^= 1
    file.write_bytes(contents)
    with TieredStore.open(tmp_path / "state", dram=MIB, access="read") as store:
        table = store.table("t")
        with pytest.raises(CorruptionError, match="'t/block5'"):
            table.look_up([1, 52, 99])
        assert table.look_up([1, 49, 60, 99])[:, 0].tolist() == [1, 49, 60, 99]
        nothing_stays(store)


def nothing_stays(store: TieredStore) -> None:
    assert [tier.held for tier in store.statistics().tiers] == [0] * len(store.statistics().tiers)


def test_a_store_that_is_open_for_reading(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        table = store.table("t", 100, 3, block="128B")
        table[:50] = torch.ones(50, 3)
        table.append(torch.ones(3, 3))
        store.commit()
        with TieredStore.open(tmp_path / "state", dram=MIB, access="read") as reader:
            seen = reader.table("t")
            assert (seen[:].sum(), seen.appended) == (150, 3)
            for change in (
                lambda: seen.update([0], torch.zeros(1, 3)),
                lambda: seen.update([99], torch.zeros(1, 3)),
                lambda: seen.accumulate([0], torch.ones(1, 3)),
                lambda: seen.append(torch.ones(1, 3)),
                lambda: seen.__setitem__(slice(None), torch.zeros(100, 3)),
                seen.delete,
            ):
                with pytest.raises(MisuseError, match="open for reading"):
                    change()
            table[60:] = torch.ones(40, 3)
            table.append(torch.zeros(1, 3))
            store.commit()
            assert (seen[:].sum(), seen.appended) == (150, 3)
            reader.refresh()
            assert (seen[:].sum(), seen.appended) == (267, 4)


def test_threads_take_turns(store: TieredStore) -> None:
    table = store.table("t", 2000, 4, torch.int64, block="1KiB")
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        try:
            for _ in range(20):
                ids = torch.tensor(source.choices(range(2000), k=50))
                table.accumulate(ids, torch.ones(50, 4, dtype=torch.int64))
                table.look_up(ids)
                assert store.table("t") is table
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert table[:].sum() == 4 * 20 * 50 * 4
    nothing_is_held(store)


def test_a_block_that_somebody_leases(on_disk: TieredStore) -> None:
    table = on_disk.table("t", 100, 3, block="128B")
    table[:] = torch.zeros(100, 3)
    with on_disk.lease(table.key_of(15)) as rows:
        assert rows.shape == (10, 3)
        assert table.look_up([15, 99]).eq(0).all()
        with pytest.raises(LeaseConflict, match="'t/block1'"):
            table.update([99, 15], torch.ones(2, 3))
    del rows
    assert table[:].eq(0).all()


def test_keys_begin_with_the_name(on_disk: TieredStore) -> None:
    one, other = on_disk.table("a", 10, 3), on_disk.table("a.block", 10, 3)
    with pytest.raises(MisuseError, match="the store has the table 'a', and the table 'a/block'"):
        on_disk.table("a/block", 10, 3)
    one[:] = torch.ones(10, 3)
    other[:] = torch.ones(10, 3)
    assert sorted(on_disk.keys("a.block/*")) == ["a.block/appended", "a.block/block0", "a.block/table"]
    one.delete()
    assert other[:].eq(1).all()
    assert isinstance(other, Table)


def test_another_default_device(on_disk: TieredStore) -> None:
    values, ids, ring = torch.randn(6, 4), torch.tensor([1, 99, 1, 40, 3, 7]), torch.randn(130, 4)
    with torch.device("meta"):
        table = on_disk.table("t", 100, 4, block="128B")
        table._together = 3 * 4096
        table.append(ring)
        table.update(ids, values)
        table.accumulate([5, 5], ring[:2])
        table[10:20] = ring[:10]
        found, appended = table[:], table.appended
        assert table.look_up([3]).device.type == "cpu"
        embedding = TieredEmbedding(table)
        embedding(ids).sum().backward()
        SparseAdamW(embedding.parameters()).step()
        SparseAdagrad(TieredEmbedding(on_disk.table("u", 9, 2)).parameters()).step()
    expected = torch.cat([ring[100:], ring[30:100]])
    for place, row in enumerate(ids.tolist()):
        expected[row] = values[place]
    expected.index_add_(0, torch.tensor([5, 5]), ring[:2])
    expected[10:20] = ring[:10]
    same(found, expected)
    assert appended == 130
    assert not torch.equal(table[99], found[99])


def test_a_batch_from_the_disk_is_decided_once(on_disk: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the whole lease anew for each of its blocks."""
    table = on_disk.table("t", 6400, 64, block="4KiB")
    table[:] = torch.ones(6400, 64)
    on_disk.commit()
    asked: Counter[str] = Counter()
    victims, wants = LRU.victims, Lease.wants

    def counted_victims(self: LRU, among: Mapping[Key, Candidate]) -> Iterator[Key]:
        asked["victims"] += 1
        return victims(self, among)

    def counted_wants(self: Lease) -> Sequence[Key]:
        asked["wants"] += 1
        return wants(self)

    monkeypatch.setattr(LRU, "victims", counted_victims)
    monkeypatch.setattr(Lease, "wants", counted_wants)
    before = on_disk.statistics().links[-1].up.transfers
    for begin in range(0, 6400, 640):
        assert table.look_up(torch.arange(begin, begin + 640)).eq(1).all()
    read = on_disk.statistics().links[-1].up.transfers - before
    assert read > 60
    assert max(asked.values()) < read // 10


def test_a_short_last_block_makes_no_search_a_plan_of_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of a small copy that was used long ago is too little: the next copy leaves, and nobody looks for moves."""
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        table = store.table("t", 65 * 16 * 4 + 8, 256, block="16KiB")  # 261 blocks, of which the last is half as large
        for begin in range(0, table.rows, 64):
            table[begin : begin + 64] = torch.full((256,), float(begin))
        store.commit()
        planned, plan = [], SlotMap.__init__

        def counted(self: SlotMap, *arguments: Any) -> None:
            planned.append(arguments)
            plan(self, *arguments)

        monkeypatch.setattr(SlotMap, "__init__", counted)
        reads = store.statistics().links[-1].up.transfers
        table.look_up([table.rows - 1])
        for begin in range(0, table.rows - 8, 64):
            assert table.look_up(torch.arange(begin, begin + 64, 16)).eq(begin).all()
        assert store.statistics().links[-1].up.transfers - reads > 200
        assert not planned


def test_what_leaves_for_a_lease_of_many_is_what_was_used_long_ago(tmp_path: Path) -> None:
    """The policy is asked once for a whole request, and its order is kept."""
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        keys = [f"t{number}" for number in range(48)]
        for key in keys:
            store.put(key, torch.ones(16 << 10))  # 64 KiB, of which 16 fit
        store.commit()
        for key in (*keys[:16], *reversed(keys[:16])):
            store.get(key)
        with store.lease([*keys[16:20], keys[15], keys[14]]):
            assert store.present(keys) == {*keys[:10], *keys[14:20]}


def larger_than_the_pool(folder: Path, dram: str, rows: int, **options: Any) -> None:
    """A store with table "v", whose rows are their numbers, a twentieth of them changed in turn and so in the buffer."""
    with TieredStore.open(folder, dram=dram) as store:
        table = store.table("v", rows, 64, **options)
        assert table.layout.buffer_rows
        table[:] = torch.arange(float(rows))[:, None].expand(-1, 64).contiguous()
        for begin in range(20):
            table.accumulate(torch.arange(begin, rows, 400), torch.ones(len(range(begin, rows, 400)), 64))
        assert len(table._places.placed.ids)


def as_larger_than_the_pool(rows: int) -> torch.Tensor:
    expected = torch.arange(float(rows))[:, None].repeat(1, 64)
    expected[torch.arange(rows) % 400 < 20] += 1
    return expected


@pytest.mark.parametrize("dram", ["1MiB", "1540KiB", "2MiB", "3MiB", "4MiB", "64MiB"])
def test_a_pool_smaller_than_that_for_which_the_buffer_was_made(tmp_path: Path, dram: str) -> None:
    """No call waits for itself, or for more than the pool has; and rows are found as fast as without a buffer, in parts."""
    larger_than_the_pool(tmp_path / "state", "4MiB", 20_000)
    expected = as_larger_than_the_pool(20_000)
    with TieredStore.open(tmp_path / "state", dram=dram, access="read") as reader:
        same(reader.table("v")[:], expected)
    with TieredStore.open(tmp_path / "state", dram=dram, eviction=Eviction(deadline=10)) as store:
        table = store.table("v")
        same(table.look_up(torch.arange(20_000)), expected)
        ids = torch.arange(7, 20_000, 41)
        optimizer = SparseAdamW([TieredEmbedding(table).weight], lr=0.1)
        for _ in range(2):
            (weight,) = optimizer.param_groups[0]["params"]
            weight.grad = torch.sparse_coo_tensor(ids[None], torch.ones(len(ids), 64), (20_000, 64), check_invariants=False)
            optimizer.step()
        table.update([3, 19_999], torch.zeros(2, 64))
        expected[ids] -= 0.2
        expected[[3, 19_999]] = 0
        assert torch.allclose(table[:], expected)
        store.rollback()
        table[10:30] = torch.zeros(64)
        table.append(torch.ones(3, 64))
        expected = as_larger_than_the_pool(20_000)
        expected[10:30], expected[:3] = 0, 1
        same(table[:], expected)
        store.close()


def test_blocks_that_are_large_beside_the_pool(tmp_path: Path) -> None:
    larger_than_the_pool(tmp_path / "state", "8MiB", 40_000, block="1MiB")
    with TieredStore.open(tmp_path / "state", dram="2200KiB", access="read") as reader:
        same(reader.table("v").look_up(torch.arange(40_000)), as_larger_than_the_pool(40_000))


def test_what_was_known_before_the_store_went_back_refuses_nothing(on_disk: TieredStore) -> None:
    """By what is known from before, the row lies in a segment of the buffer, which somebody else has now."""
    table = with_buffer(on_disk, Layout(200, (4,), torch.float32, 4, 0.0, 80, 8))
    table[:] = torch.ones(200, 4)
    on_disk.commit()

    def go_back() -> str:
        table.update([5], torch.zeros(1, 4))
        segment = table.key_of(5)
        assert segment.startswith("t/table.buffer")
        on_disk.rollback()
        return segment

    for call in (table.look_up, lambda ids: table.__setitem__(slice(5, 6), torch.ones(1, 4))):
        segment = go_back()
        on_disk.put("t/table.buffer", blank(table.layout))
        on_disk.create(segment, (8, 4), dtype=torch.float32)
        with on_disk.lease(segment, access="write"):
            call([5])
        same(table.look_up([5]), torch.ones(1, 4))
        on_disk.rollback()
    go_back()
    assert table.key_of(5) == "t/block1"


def test_tensors_beside_a_table_are_the_users(on_disk: TieredStore) -> None:
    table = on_disk.table("replay", 100, 4)
    for name in ("replay/buffer", "replay/buffer0", "replay/block"):
        on_disk[name] = torch.ones(3)
    table.delete()
    assert sorted(on_disk) == ["replay/block", "replay/buffer", "replay/buffer0"]
    on_disk["new/table.buffer0"] = torch.ones(3)
    with pytest.raises(MisuseError, match=r"begin with 'new/table\.buffer' and are of no table"):
        on_disk.table("new", 100, 4)


def test_a_table_that_was_made_anew_with_a_buffer(tmp_path: Path) -> None:
    """A handle from before says so, and neither returns old rows nor loses new ones."""
    path, rows = tmp_path / "state", torch.zeros(8192, 64)  # 2 MiB
    with TieredStore.open(path, dram="32MiB") as store:
        store.table("t", 8192, 64)[:] = rows
    with TieredStore.open(path, dram="32MiB", access="read") as reader:
        old = reader.table("t")
        with TieredStore.open(path, dram="2MiB") as store:
            before = store.table("t")
            assert not before.layout.buffer_rows
            before.delete()
            table = store.table("t", 8192, 64)
            assert table.layout.buffer_rows
            table[:] = rows
            table.update([5], torch.ones(1, 64))
            assert table._places.placed.stamp is not None
            calls = lambda: before.look_up([5]), lambda: before.update([5], rows[:1]), lambda: before.append(rows[:1])
            for call in calls:
                with pytest.raises(MisuseError, match="open the table again"):
                    call()
            store.rollback()
            with pytest.raises(MisuseError, match="open the table again"):
                table.update([8], torch.ones(1, 64))
            assert "t/table.buffer" not in store
            store.table("t").delete()
            table = store.table("t", 8192, 64)
            table[:] = rows
            table.update([5], torch.ones(1, 64))
        reader.refresh()
        with pytest.raises(MisuseError, match="open the table again"):
            old.look_up([5])
        assert reader.table("t").look_up([5]).eq(1).all()


@pytest.mark.parametrize("name", ["update", "accumulate"])
def test_a_signal_handler_that_calls_the_table(on_disk: TieredStore, name: str) -> None:
    """At any line of a call it is refused, or all of its rows stay."""
    table = with_buffer(on_disk, Layout(200, (4,), torch.float32, 4, 0.0, 24, 8))
    table[:] = torch.zeros(200, 4)
    on_disk.commit()
    refused = there = at = 0

    def handler() -> None:
        nonlocal refused, there
        sys.settrace(None)
        try:
            table.update([100, 31, 4], torch.full((3, 4), 50.0))
            there = 1
        except MisuseError:
            refused += 1

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if "/tiered/tables/" not in frame.f_code.co_filename:
            return trace
        left -= event == "line"
        if left == 0:
            handler()
            return None
        return trace

    while True:
        on_disk.rollback()
        there, left, at = 0, at + 1, at + 1
        before = refused
        sys.settrace(trace)
        try:
            getattr(table, name)([7, 90, 31], torch.ones(3, 4))
        finally:
            sys.settrace(None)
        if left > 0:
            break
        rows = table[:]
        if refused == before:
            assert there, at
            assert rows[100].eq(50).all(), at
            assert rows[4].eq(50).all(), at
        assert rows[7].eq(1).all(), at
        assert rows[90].eq(1).all(), at
    assert refused > 30


def test_a_rollback_within_a_call_that_changes_rows(on_disk: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that read rows of before it begins again with those of the commit; rows that were appended are not hidden."""
    table = with_buffer(on_disk, Layout(200, (4,), torch.float32, 4, 0.0, 24, 8))
    table[:] = torch.zeros(200, 4)
    for row in (1, 2, 5, 6, 50):
        table.update([row], torch.full((1, 4), float(row)))
    on_disk.commit()

    def going_back_after(name: str, number: int) -> None:
        method, calls = getattr(Places, name), iter(range(99))

        def called(self: Places, *arguments: Any) -> Any:
            found = method(self, *arguments)
            if next(calls) == number:
                on_disk.rollback()
            return found

        monkeypatch.setattr(Places, name, called)

    table.update([77], torch.full((1, 4), 9.0))
    going_back_after("with_room", 0)
    table.accumulate([77, 78], torch.ones(2, 4))
    assert table.look_up([77, 78])[:, 0].tolist() == [1, 1]
    monkeypatch.undo()
    on_disk.rollback()
    going_back_after("empty_rows", 0)
    table.append(torch.full((8, 4), 9.0))
    assert table.look_up(torch.arange(8))[:, 0].tolist() == [9.0] * 8
    monkeypatch.undo()
    on_disk.rollback()
    going_back_after("empty_rows", 1)
    table[0:8] = torch.full((8, 4), 9.0)
    assert table.look_up(torch.arange(4, 8))[:, 0].tolist() == [9.0] * 4
    assert table.look_up([50])[0, 0] == 50
