"""What ``bench/gpu.py`` measures, each checked before it is. Rates are bytes per second."""

from __future__ import annotations

import subprocess
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiered import TieredStore
from tiered.interfaces import Link
from tiered.links.cuda import CudaLink
from tiered.links.stand_in import MemoryLink
from tiered.measuring.meters import bytes_of
from tiered.tiers.dram import DramConfig, DramTier
from tiered.tiers.hbm import HbmConfig, HbmTier
from tiered.types import Direction, Slot, TensorSpec, Transfer, Urgency, format_size

MIB, GIB = 1 << 20, 1 << 30
UP, DOWN = Direction.UP, Direction.DOWN
BLOCK, DEPTH = MIB, 16  # of reads from the drive alone


@dataclass(frozen=True)
class Scale:
    """``sizes`` of tensors, ``moved`` bytes each way in a pass, ``hbm`` at least that much for the store; ``hop``: bytes of a
    tensor that comes from the disk, of which there are ``hops``; ``matrix``: side of the matrices; ``rounds`` at most."""

    sizes: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    moved: int = GIB
    hbm: int = 256 * MIB
    hop: int = 32 * MIB
    hops: int = 48
    matrix: int = 4096
    rounds: int = 7


REHEARSAL = Scale((MIB // 4, MIB), 4 * MIB, 2 * MIB, MIB, 48, 256, 2)


class Device:
    """The device's streams; the stand-in has none."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
        self.streams = {way: torch.cuda.Stream(self.device) if self.cuda else None for way in Direction}

    def on(self, way: Direction) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.streams[way]) if self.cuda else nullcontext()

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def facts(self) -> dict[str, Any]:
        if not self.cuda:
            return {"device": "the stand-in: these numbers mean nothing"}
        fields = "driver_version,pcie.link.gen.max,pcie.link.width.max"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={self.device.index}"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        except (OSError, subprocess.SubprocessError):
            answer = ""
        driver, generation, width = [*answer.strip().split(", "), "unknown", "unknown", "unknown"][:3]
        return {
            "device": torch.cuda.get_device_name(self.device),
            "device_memory_bytes": torch.cuda.get_device_properties(self.device).total_memory,
            "driver": driver or "unknown",
            "pcie": f"generation {generation}, {width} lanes",
            "cuda": torch.version.cuda,
        }


class Wrong(Exception):
    """What arrived is not what was sent."""


def expect(found: torch.Tensor, sent: torch.Tensor, where: str) -> None:
    if not torch.equal(found.cpu(), sent.cpu()):
        raise Wrong(f"{where}: {format_size(sent.nbytes)} did not arrive as they were sent")


class Plain:
    """torch alone: pinned memory, blocks of the tensors' size."""

    def __init__(self, device: Device, total: int) -> None:
        self._device = device
        self._host = {way: bytes_of(total) for way in Direction}
        if device.cuda:
            self._host = {way: tensor.pin_memory() for way, tensor in self._host.items()}
        self._there = {way: torch.zeros(total, dtype=torch.uint8, device=device.device) for way in Direction}

    def run(self, ways: Sequence[Direction], nbytes: int, moved: int) -> float:
        pairs = {}
        for way in ways:
            target, source = (self._there, self._host) if way is UP else (self._host, self._there)
            pairs[way] = list(zip(target[way][:moved].split(nbytes), source[way][:moved].split(nbytes), strict=True))
        self._device.sync()
        began = time.perf_counter()
        for first in range(0, moved // nbytes, 8):
            for way in ways:
                with self._device.on(way):
                    for to, what in pairs[way][first : first + 8]:
                        to.copy_(what, non_blocking=True)
        self._device.sync()
        return len(ways) * moved / (time.perf_counter() - began)


class OverLink:
    """The link alone, driven as the engine does it."""

    def __init__(self, device: Device, total: int) -> None:
        self._device = device
        self._upper, self._lower = HbmTier(HbmConfig(2 * total, str(device.device))), DramTier(DramConfig(2 * total))
        self._link: Link = (CudaLink if device.cuda else MemoryLink)(self._upper, self._lower)
        self._tag = 0

    def close(self) -> None:
        self._link.close()
        self._upper.close()
        self._lower.close()

    @contextmanager
    def _transfers(self, ways: Sequence[Direction], nbytes: int, moved: int) -> Iterator[dict[Direction, deque[Transfer]]]:
        made: dict[Direction, deque[Transfer]] = {way: deque() for way in ways}
        slots: list[tuple[Slot, Slot]] = []
        for way in ways:
            for _ in range(moved // nbytes):
                upper, lower = self._upper.allocate(nbytes), self._lower.allocate(nbytes)
                assert upper is not None
                assert lower is not None
                slots.append((upper, lower))
                self._tag += 1
                made[way].append(Transfer(self._tag, str(self._tag), way, upper, lower, nbytes, Urgency.DEMAND))
        yield made
        for upper, lower in slots:
            self._upper.free(upper)
            self._lower.free(lower)

    def _finish(self, waiting: dict[Direction, deque[Transfer]]) -> None:
        flying = 0
        while flying or any(waiting.values()):
            for queue in waiting.values():
                while queue and self._link.start(queue[0]):
                    queue.popleft()
                    flying += 1
            for completion in self._link.poll(1.0):
                if completion.error is not None:
                    raise completion.error
                flying -= 1

    def run(self, ways: Sequence[Direction], nbytes: int, moved: int) -> float:
        with self._transfers(ways, nbytes, moved) as waiting:
            began = time.perf_counter()
            self._finish(waiting)
            return len(ways) * moved / (time.perf_counter() - began)

    def check(self, nbytes: int) -> None:
        sent = bytes_of(nbytes)
        for way in (UP, DOWN):
            with self._transfers([way], nbytes, nbytes) as waiting:
                transfer = waiting[way][0]
                upper = self._upper.tensor(transfer.upper, nbytes)[0]
                lower = self._lower.tensor(transfer.lower, nbytes)[0]
                target, source = (upper, lower) if way is UP else (lower, upper)
                source.copy_(sent)
                target.zero_()
                self._device.sync()
                self._finish(waiting)
                expect(target, sent, f"the link, {way.value}")
                del upper, lower, target, source


class OverStore:
    """A store without a disk. Tensors of ``r`` are read in a cycle that HBM does not hold, those of ``w`` are replaced."""

    def __init__(self, device: Device, nbytes: int, scale: Scale) -> None:
        hbm = max(scale.hbm, 6 * nbytes)
        self._device, self._nbytes = device, nbytes
        self.count = hbm // nbytes + 4
        self._passes = max(1, scale.moved // (self.count * nbytes))
        self._ahead = max(2, min(16, 64 * MIB // nbytes))
        self._spec = TensorSpec("uint8", (nbytes,), 1)
        self.store = TieredStore.open(None, hbm=hbm, dram=self.need(nbytes, scale), device=str(device.device))
        self._sent = bytes_of(nbytes)
        for index in range(self.count):
            self.store.put(f"r{index}", self._sent)
        self._walk((UP, DOWN))

    @staticmethod
    def need(nbytes: int, scale: Scale) -> int:
        """Bytes of host memory."""
        return 2 * (max(scale.hbm, 6 * nbytes) // nbytes + 4) * nbytes + 2 * MIB

    def _walk(self, ways: Sequence[Direction]) -> None:
        for index in range(self.count):
            if DOWN in ways:
                self.store.create(f"w{index}", self._spec)
                with self.store.lease(f"w{index}", access="write") as tensor:
                    tensor[:1].add_(1)
                del tensor
            if UP in ways:
                self.store.prefetch([f"r{(index + step) % self.count}" for step in range(1, self._ahead + 1)])
                with self.store.lease(f"r{index}"):
                    pass

    def run(self, ways: Sequence[Direction], nbytes: int, moved: int) -> float:
        """Only what crossed the link counts, and no more than was asked for."""
        self._device.sync()
        before, began = self.store.statistics().links[0], time.perf_counter()
        for _ in range(self._passes):
            self._walk(ways)
        self._device.sync()
        seconds, after = time.perf_counter() - began, self.store.statistics().links[0]
        asked = self._passes * self.count * nbytes
        crossed = {UP: after.up.bytes - before.up.bytes, DOWN: after.down.bytes - before.down.bytes}
        return sum(min(asked, crossed[way]) for way in ways) / seconds

    def check(self) -> None:
        with self.store.lease("r0") as there:
            expect(there, self._sent, "the store, up")
        with self.store.lease("r1", access="write") as there:
            there.bitwise_xor_(0x5A)
        del there
        self._walk((UP, DOWN))
        expect(self.store.get("r1"), self._sent.bitwise_xor(0x5A), "the store, down")
        self.store.put("r1", self._sent)


class TwoHops:
    """NVMe to DRAM to HBM along a known order, in a cycle that neither of the two holds."""

    def __init__(self, device: Device, folder: Path, scale: Scale) -> None:
        self._device = device
        hbm, dram = 8 * scale.hop, 16 * scale.hop
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no O_DIRECT stands in what is printed
            self.store = TieredStore.open(folder, hbm=hbm, dram=dram, device=str(device.device), keep=1)
        self._keys = [f"t{index}" for index in range(scale.hops)]
        self._sent = bytes_of(scale.hop)
        for key in self._keys:
            self.store.put(key, self._sent)
        self.store.commit()
        self.store.follow(self._keys)
        self.delivered: list[float] = []
        self.walk()

    def walk(self) -> float:
        """Bytes per second from the disk; what was still resident does not count, but is ``delivered``."""
        before, began = self.store.statistics().links[1].up.bytes, time.perf_counter()
        for key in self._keys:
            with self.store.lease(key):
                pass
        self._device.sync()
        seconds = time.perf_counter() - began
        self.delivered.append(len(self._keys) * self._sent.nbytes / seconds)
        return (self.store.statistics().links[1].up.bytes - before) / seconds

    def check(self) -> None:
        for key in self._keys:
            with self.store.lease(key) as there:
                expect(there, self._sent, "disk to device")


class Compute:
    """Matrix products with tensors that come from host memory meanwhile. ``products`` a tensor make both take about as long."""

    STEPS = 40

    def __init__(self, device: Device, scale: Scale) -> None:
        self._device, side = device, scale.matrix
        self._shape, dtype = (side, 2 * side), torch.bfloat16
        nbytes = 4 * side * side
        self.store = TieredStore.open(None, hbm=6 * nbytes, dram=12 * nbytes + 2 * MIB, device=str(device.device))
        weight = torch.randn(self._shape).to(dtype)
        for index in range(10):
            self.store.put(f"w{index}", weight)
        self._x = torch.randn(side, side, device=device.device).to(dtype)
        self._fixed = torch.randn(self._shape, device=device.device).to(dtype)
        self._y = torch.empty(self._shape, dtype=dtype, device=device.device)
        self.products = 1
        for copies in (True, False):  # a first time
            self._loop(copies=copies, products=1)
        copying, computing = self._loop(copies=True, products=0), self._loop(copies=False, products=1)
        self.products = max(1, round(copying / computing))

    def _loop(self, *, copies: bool, products: int) -> float:
        """Seconds."""
        self._device.sync()
        began = time.perf_counter()
        for step in range(self.STEPS):
            if copies:
                self.store.prefetch([f"w{(step + ahead) % 10}" for ahead in (1, 2)])
                with self.store.lease(f"w{step % 10}") as weight:
                    self._multiply(weight, products)
                del weight
            else:
                self._multiply(self._fixed, products)
        self._device.sync()
        return time.perf_counter() - began

    def _multiply(self, weight: torch.Tensor, products: int) -> None:
        for _ in range(products):
            torch.mm(self._x, weight, out=self._y)

    def run(self) -> tuple[float, float, float]:
        """Seconds: the copies alone, the products alone, both."""
        return (
            self._loop(copies=True, products=0),
            self._loop(copies=False, products=self.products),
            self._loop(copies=True, products=self.products),
        )
