"""Stores over every chain of tiers, with pools so small that nearly everything is evicted; and tensors of any bytes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.fakes import ManualBackend
from tiered import TieredStore
from tiered.engine.requests import Work
from tiered.types import IOCompletion, IORequest

MIB = 1 << 20


@dataclass(frozen=True)
class Chain:
    """``memories`` are the tiers that give leases, from the top; a store on a ``disk`` that is ``durable`` can commit."""

    name: str
    memories: tuple[str, ...]
    disk: bool = True
    durable: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, folder: Path, **options: Any) -> TieredStore:
        return TieredStore.open(folder if self.disk else None, **{"dram": MIB, **self.options, **options})

    @property
    def below(self) -> bool:
        """Whether what leaves host memory has somewhere to go."""
        return self.disk


ON_DEVICE = {"hbm": "512KiB", "device": "cpu"}
CHAINS = (
    Chain("dram-nvme", ("dram",)),
    Chain("hbm-dram-nvme", ("hbm", "dram"), options=ON_DEVICE),
    Chain("hbm-dram", ("hbm", "dram"), disk=False, durable=False, options=ON_DEVICE),
    Chain("dram", ("dram",), disk=False, durable=False),
    Chain("scratch", ("dram",), durable=False, options={"durability": "none"}),
    Chain("hbm-scratch", ("hbm", "dram"), durable=False, options={**ON_DEVICE, "durability": "none"}),
)


class GatedBackend(ManualBackend):
    """Files in memory. What was submitted completes at once, but while the gate is shut nothing does."""

    name = "gated"

    def __init__(self) -> None:
        super().__init__()
        self.shut = False

    def submit(self, batch: list[IORequest]) -> int:  # type: ignore[override]
        taken = super().submit(batch)
        if not self.shut:
            self._signal.set()
        return taken

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        if not self.shut:
            self.complete_all()
        return super().reap(0, 0)

    def let_go(self) -> None:
        self.shut = False
        self._signal.set()


def numbers(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bytes at all, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """Its bytes in row-major order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single element may have any strides
    return flat.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def same(found: torch.Tensor, put: torch.Tensor) -> None:
    assert found.dtype is put.dtype
    assert found.shape == put.shape
    assert raw(found) == raw(put)


def kib(count: int, value: int = 0) -> torch.Tensor:
    """So many KiB of one byte."""
    return torch.full((count << 10,), value, dtype=torch.uint8)


def push_out(store: TieredStore) -> None:
    """Fill host memory with another tensor, so that all leaves it. For stores with a disk."""
    (capacity,) = [tier.capacity for tier in store.statistics().tiers if tier.name == "dram"]
    with hurried(store, 60.0):  # the disk may be slow, whatever the store's own deadline is
        store.put("ballast", torch.zeros(capacity, dtype=torch.uint8))
    store.delete("ballast")


@contextlib.contextmanager
def hurried(store: TieredStore, seconds: float) -> Iterator[None]:
    """Requests wait for so long within the block. Elsewhere the deadline is one that no machine reaches by being slow."""
    engine = store._engine
    before, engine.config = engine.config, dataclasses.replace(engine.config, deadline=seconds)
    try:
        yield
    finally:
        engine.config = before


def nothing_is_held(store: TieredStore) -> None:
    """No lease, no alias, no request that waits."""
    store._engine.wait(Work("a turn of the engine", lambda: None))
    assert not store._engine.requests.waiting
    assert [tier.held for tier in store.statistics().tiers] == [0] * len(store.statistics().tiers)
    for key in list(store):
        store.delete(key, owner=store.owner_of(key))  # a lease would be a conflict
    assert [tier.used for tier in store.statistics().tiers if tier.name != "nvme"] == [
        0 for tier in store.statistics().tiers if tier.name != "nvme"
    ]
