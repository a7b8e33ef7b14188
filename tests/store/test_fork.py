"""Forked children: a store refuses to be used in one, whatever it does there, and its parent's is none the worse."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests import programs
from tests.backends import EACH, or_skip
from tests.fakes import in_child
from tests.store.chains import MIB, nothing_is_held, numbers, push_out, same
from tiered import ForkedStore, StoreLocked, TensorSpec, TieredStore


@pytest.fixture(params=[*EACH, "no disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    if request.param == "no disk":
        opened = TieredStore.open(None, dram=MIB, hbm="256KiB", device="cpu")
    else:
        opened = TieredStore.open(tmp_path / "state", dram=MIB, backend=or_skip(request.param))
    for number in range(4):
        opened.put(f"t{number}", numbers(5000, number))
    yield opened
    opened.close()


def unharmed(store: TieredStore) -> None:
    """All that it had is there; it reads, writes and commits."""
    if store.statistics().backend != "none":
        push_out(store)
    for number in range(4):
        same(store.get(f"t{number}"), numbers(5000, number))
        with store.lease(f"t{number}", access="write") as tensor:
            tensor.zero_()
    del tensor
    if store.statistics().backend != "none":
        store.commit()
        with pytest.raises(StoreLocked):
            TieredStore.open(store.folder, dram=MIB)
    nothing_is_held(store)


class FromAStore(Dataset):  # type: ignore[type-arg]
    def __init__(self, store: TieredStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor | str:
        try:
            return self.store.get(f"t{index}")
        except ForkedStore as error:  # said here: a loader whose worker fails takes seconds to end
            return str(error)


@pytest.mark.parametrize("leased", [False, True], ids=["", "under a lease"])
def test_workers_of_a_data_loader(store: TieredStore, leased: bool) -> None:
    loader = DataLoader(FromAStore(store), batch_size=1, num_workers=2, multiprocessing_context="fork")
    with store.lease("t0") if leased else contextlib.nullcontext():
        said = [batch[0] for batch in loader]
    assert len(said) == 4
    for words in said:
        assert f"was opened by process {os.getpid()} and cannot be used in its forked child" in words
        assert "give workers store.reader(), or DataLoader a TieredDataset(store)" in words
    unharmed(store)


def test_a_loader_without_workers_reads(store: TieredStore) -> None:
    for number, batch in enumerate(DataLoader(FromAStore(store), batch_size=1)):
        same(batch[0], numbers(5000, number))


def test_every_use_in_a_child_is_refused(store: TieredStore) -> None:
    lease = store.lease("t0")
    uses: list[Callable[[], object]] = [
        lambda: store.put("t0", torch.ones(1)),
        lambda: store.create("t0", TensorSpec("float32", (1,), 4)),
        lambda: store.get("t0"),
        lambda: asyncio.run(store.fetch("t0")),
        lambda: lease.__enter__(),
        lambda: store.lease("t0").__enter__(),
        lambda: store.delete("t0"),
        lambda: store.prefetch(["t0"]),
        lambda: store.trace().__enter__(),
        lambda: store.follow(["t0"]),
        lambda: "t0" in store,
        lambda: list(store),
        lambda: len(store),
        lambda: store.spec("t0"),
        lambda: store.commit(),
        lambda: store.statistics(),
        lambda: store.free_on_device(),
        lambda: store.__enter__(),
    ]

    def child() -> int:
        refused = 0
        for use in uses:
            try:
                use()
            except ForkedStore:
                refused += 1
        store.close()
        return refused

    assert in_child(child) == str(len(uses))
    unharmed(store)


@pytest.mark.parametrize("end", ["at once", "by leaving its blocks", "by an error", "after collecting garbage"])
def test_the_end_of_a_child_is_not_the_end_of_the_store(store: TieredStore, end: str) -> None:
    """Leases and traces that were open are the parent's; and the lock may be held for ever by a thread that was not forked."""
    with store.lease("t1") as other:
        pass
    tensors = [other]
    forked, locked, parent = threading.Event(), threading.Event(), os.getpid()

    def holder() -> None:
        with store._engine.lock:
            locked.set()
            forked.wait(300)

    def fork() -> int:
        with store.trace(), store.lease("t0", access="write") as tensor:
            tensors.append(tensor)
            del tensor
            thread = threading.Thread(target=holder)
            thread.start()
            locked.wait(300)
            child = os.fork()
            if child == 0:
                if end == "at once":
                    os._exit(0)
                if end == "by an error":
                    raise ZeroDivisionError
                if end == "after collecting garbage":
                    tensors.clear()
                    gc.collect()
                return 0
            forked.set()
            thread.join()
        return child

    del other
    try:
        child = fork()
    except ZeroDivisionError:
        child = 0
    if os.getpid() != parent:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tensors.clear()
    unharmed(store)


def test_a_child_that_ends_as_programs_end(tmp_path: Path) -> None:
    """With ``atexit``, finalizers and destructors of all that it inherited, files removed at the end of scratch included."""
    program = f"""
import os, sys, warnings
import torch
from tiered import TieredStore
warnings.simplefilter("ignore")  # that there are threads is the point
stores = [TieredStore.open({str(tmp_path)!r} + "/kept", dram="1MiB"),
          TieredStore.open({str(tmp_path)!r} + "/scratch", dram="1MiB", durability="none")]
for store in stores:
    store.put("w", torch.arange(100))
with stores[0].lease("w", access="write") as w:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
del w
for store in stores:
    store.put("ballast", torch.zeros(1 << 20, dtype=torch.uint8))
    assert torch.equal(store.get("w"), torch.arange(100))
assert stores[0].commit() == 1
assert os.listdir({str(tmp_path)!r} + "/scratch") == ["data.0"]
"""
    programs.run([sys.executable, "-c", program], timeout=300, check=True)
    assert sorted(os.listdir(tmp_path)) == ["kept"]
    with TieredStore.open(tmp_path / "kept", dram=MIB) as again:
        assert torch.equal(again.get("w"), torch.arange(100))
