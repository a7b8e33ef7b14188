"""Promise 20 for tables: an exception strikes a call at any line, and all its rows are as before it, or as after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.stress.strikes import is_free, lines_of, struck_at
from tests.stress.tally import Tally, counts
from tiered import Owner, SparseAdamW, Table, TieredEmbedding, TieredStore
from tiered.tables.layout import Layout

PROMISE = "20 (exceptions that strike a call of a table)"
ROWS, WIDTH = 120, 16  # rows of 64 bytes, which have copies when they were looked up
ALL = torch.arange(ROWS)
OWNER = Owner("table", "t")  # of its states, too
IDS = torch.tensor([3, 119, 3, 77, 40, 41])
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")

Work = Callable[[TieredStore, Table], object]


def step(store: TieredStore, table: Table) -> None:
    embedding = TieredEmbedding(table)
    optimizer = SparseAdamW(embedding.parameters(), lr=0.1)
    embedding(IDS).square().sum().backward()
    optimizer.step()


WORKS: dict[str, Work] = {
    "look_up": lambda store, table: table.look_up(IDS),
    "update": lambda store, table: table.update(IDS, torch.ones(6, WIDTH)),
    "accumulate": lambda store, table: table.accumulate(IDS, torch.ones(6, WIDTH)),
    "append": lambda store, table: table.append(torch.ones(17, WIDTH)),
    "step": step,
}
STATES = ("exp_avg", "exp_avg_sq")


def seen(store: TieredStore) -> tuple[torch.Tensor, ...]:
    """What there is of the table, and of the optimizer's states: all of them together are of one moment."""
    tables = [store.table("t"), *(made(store, f"t/{name}", "") for name in STATES)]
    steps = store.get("t/steps", torch.zeros(2, dtype=torch.int64))
    for table in tables:
        for _ in range(2):
            assert torch.equal(table.look_up(ALL), table[:])  # which takes no row from a copy
    return (*(table[:] for table in tables), torch.tensor([tables[0].appended]), steps)


def made(store: TieredStore, name: str, begin: str) -> Table:
    """A table as it is before the call: with the blocks, or with rows in a buffer of 24 slots, in half of them or in all."""
    if "buffer" in begin:
        store.put(f"{name}/appended", torch.zeros(1, dtype=torch.int64), owner=OWNER)
        store.put(f"{name}/table", Layout(ROWS, (WIDTH,), torch.float32, 9, 0.0, 24, 4).encoded(), owner=OWNER)
    return store.table(name, ROWS, WIDTH, block=9 * WIDTH * 4, owner=OWNER)


def fill(table: Table, begin: str, values: torch.Tensor) -> None:
    table[:] = values
    for row in range(0, ROWS, {"buffer, half full": 10, "buffer, full": 5}.get(begin, ROWS)):
        table.update([row], values[row][None] + 1)
    if "buffer" in begin:
        assert len(table._places.placed.free) == (0 if begin == "buffer, full" else 12)


@counts(10, 10_000)
@pytest.mark.parametrize("begin", ["filled", "unwritten", "on the disk", "buffer, half full", "buffer, full"])
@pytest.mark.parametrize("name", WORKS)
def test_struck_at_each_line(tmp_path: Path, name: str, begin: str, count: int, tally: Tally) -> None:
    work, tally.what = WORKS[name], PROMISE
    with TieredStore.open(tmp_path / "state", dram="1MiB") as store:
        table = made(store, "t", begin)
        if begin != "unwritten":
            table.append(torch.zeros(110, WIDTH))
            fill(table, begin, torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH))
        for state in STATES if name == "step" and begin != "unwritten" else ():
            fill(made(store, f"t/{state}", begin), begin, torch.full((ROWS, WIDTH), 0.5))
        store.commit()
        before = seen(store)
        lines = lines_of(lambda: work(store, table))
        after = seen(store)
        changed = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert changed is (name != "look_up")
        every = max(1, lines // count)
        for number in range(0, lines, every):
            store.rollback()
            if begin == "on the disk":
                store.offload()
            where = struck_at(number, lambda: work(store, table))
            if where is None:  # it came to fewer lines, because it did not have to wait
                break
            tally.count(name, 1)
            assert is_free(table._places.lock), where
            assert not any(tier.held for tier in store.statistics().tiers), where
            found = seen(store)
            same = [all(map(torch.equal, found, expected)) for expected in (before, after)]
            assert any(same), where
            work(store, table)
        store.close()
