"""Promise 11: use in a forked child raises: workers of a DataLoader, and children of any other kind, on every backend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.store.test_fork import FromAStore
from tests.stress.children import forked
from tests.stress.contents import content, evict_all, holds
from tests.stress.fusefs import FaultyDisk, Rule
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tiered import ForkedStore, TieredStore

PROMISE = "11 (use in a forked child)"
MIB = 1 << 20


@counts(1, 25)
@pytest.mark.parametrize("leased", ["under a lease", "under none"])
def test_workers_of_data_loaders(tmp_path: Path, backend: str, leased: str, count: int, tally: Tally) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
        for trial in range(count):
            for number in range(4):
                store.put(f"t{number}", content(f"t{number}", trial, 50_000 * number + 1))
            lease = store.lease("t0")
            if leased == "under a lease":
                lease.__enter__()
            loader = DataLoader(FromAStore(store), batch_size=1, num_workers=2, multiprocessing_context="fork")
            said = [batch[0] for batch in loader]
            assert len(said) == 4
            tally.count("a worker", all(f"was opened by process {os.getpid()}" in words for words in said))
            lease.__exit__(None, None, None)
            evict_all(store)
            for number in range(4):
                holds(store, f"t{number}", trial, 50_000 * number + 1)
            assert store.commit() == trial + 1


@counts(2, 25)
def test_children_forked_in_the_middle_of_transfers(disk: FaultyDisk, backend: str, count: int, tally: Tally) -> None:
    """Whatever is in flight is the parent's: the child's end neither waits for it nor ends it."""
    with TieredStore.open(disk.folder / f"{backend} {count}", dram=MIB, backend=backend) as store:  # type: ignore[arg-type]

        def child(channel: Child) -> None:
            for use in (lambda: store.get("t"), lambda: store.put("t", torch.ones(1)), store.commit, lambda: len(store)):
                with pytest.raises(ForkedStore):
                    use()
            store.close()
            channel.say("refused")

        for trial in range(count):
            disk.add(Rule("write", "stall", name=r"data\.0", times=-1))
            for number in range(3):
                store.put(f"t{number}", content(f"t{number}", trial, 250_000))
            disk.wait_stalled()
            with forked(child) as running:
                assert running.wait_end() == 0, running.said
            assert running.said == ["refused"]
            assert disk.stalled(), "the child has ended what was the parent's"
            tally.count("a child", sum(disk.clear()))
            evict_all(store)
            for number in range(3):
                holds(store, f"t{number}", trial, 250_000)
            store.commit()
