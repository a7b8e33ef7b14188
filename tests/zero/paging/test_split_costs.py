"""What splitting is for, counted: parameters are read twice a step, and memory does not grow with the batch."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tiered import Eviction, TieredStore, zero
from tiered.engine.transfers import TransferQueues
from tiered.types import Direction, Use

LAYERS, WIDTH = 32, 160


class Reads:
    """Bytes of transfers up, by tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: collections.Counter[str] = collections.Counter()
        add = TransferQueues.add

        def counting(traffic: TransferQueues, index: int, entry: Any, transfer: Any) -> None:
            if transfer.direction is Direction.UP:
                self.bytes[transfer.key] += transfer.nbytes
            add(traffic, index, entry, transfer)

        monkeypatch.setattr(TransferQueues, "add", counting)


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_parameters_are_read_twice_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Forward, where the update happens on the way, and backward. Fetching ahead is off: it may read in vain."""
    reads = Reads(monkeypatch)
    with TieredStore.open(tmp_path / "store", dram="1MiB", eviction=Eviction(deadline=20)) as store:
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        model = zero.page(layers, store, micro_batch=parts, paging=zero.Paging(prefetch="off"))
        optimizer = zero.AdamW(model.parameters())
        keys = {key for key in store if "/param/" in key}
        fit = store.statistics().tiers[0].capacity // store.spec("model/param/0").nbytes
        assert len(keys) == LAYERS > 3 * fit
        rounds = []
        for _ in range(4):
            before = reads.bytes.copy()
            with store.trace() as order:
                optimizer.zero_grad()
                model(torch.randn(256, WIDTH)).square().mean().backward()
                optimizer.step()
            rounds.append(order)
            read = reads.bytes - before
        for key in keys:
            assert [touch.use for touch in order if touch.key == key] == [Use.WRITE, Use.READ, Use.READ]
        times = [read[key] / store.spec(key).nbytes for key in keys]
        assert max(times) == 2
        assert 2 * LAYERS - fit <= sum(times), "what still was there"
        states = [key for key in store if "/m#" in key or "/v#" in key]
        assert max(read[key] / store.spec(key).nbytes for key in states) == 1, "for the update"
        statistics = store.statistics()
        assert statistics.tiers[0].peak <= statistics.tiers[0].capacity
        assert any(read[key] for key in read if key.startswith("tiered.saved/")), "what is kept was meant to spill, too"
        assert rounds[-1] == rounds[-2], "each step touches the same keys in the same order, so it can be followed"
        store.close()


class Live(TorchDispatchMode):
    """Bytes of the memory that operators allocated and that is still alive, and their peak. Memory of a store is not."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = func(*args, **(kwargs or {}))
        given = {id(s) for s in map(storage, args) if s is not None}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            found = storage(tensor)
            if found is not None and id(found) not in given and id(found) not in self._known:
                self._add(found)
        return result

    def _add(self, found: torch.UntypedStorage) -> None:
        name, nbytes = id(found), found.nbytes()

        def gone(_: object) -> None:
            self.now -= nbytes
            del self._known[name]

        self._known[name] = weakref.ref(found, gone)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def storage(value: Any) -> torch.UntypedStorage | None:
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None


def peak(folder: Path, samples: int, parts: int, loss: Callable[[torch.Tensor], torch.Tensor]) -> int:
    torch.manual_seed(0)
    with TieredStore.open(folder, dram="1.5MiB", eviction=Eviction(deadline=20)) as store:
        blocks = [nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(8)]
        model = zero.page(nn.Sequential(*blocks), store, micro_batch=parts)
        x = torch.randn(samples, 32, 8)
        with Live() as live:
            loss(model(x)).backward()
        pool = store.statistics().tiers[0]
        assert pool.peak <= pool.capacity
        store.close()
    return live.peak


def test_memory_is_that_of_a_part_however_large_the_batch(tmp_path: Path) -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    inside = 8 * 32 * 512 * 4  # bytes of one tensor inside a block, of 8 samples
    boundary = 64 * 32 * 8 * 4  # of the whole batch between two blocks, of 64 samples
    part = peak(tmp_path / "8 in 1", 8, 1, loss)
    assert part > 8 * 2 * inside, "what autograd saves of all blocks"
    split = {parts: peak(tmp_path / f"64 in {parts}", 64, parts, loss) for parts in (4, 8, 16)}
    assert split[8] < 6 * inside + 6 * boundary, "one part of one block; all else is in the store"
    assert split[4] - split[8] > 2 * inside
    assert split[8] - split[16] > inside
    larger = peak(tmp_path / "256 in 32", 256, 32, loss)
    assert larger - split[8] < 6 * 4 * boundary, "the insides stay; only what the caller has of the whole batch grows"
