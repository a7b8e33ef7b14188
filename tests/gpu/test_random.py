"""Random operations on random streams, with kernels that run late, against a dict of host tensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.device import KIB, MIB, NAME, Device, numbers, raw, require_device
from tiered import TieredStore

require_device()

KEYS = [f"t{number}" for number in range(14)]
SIZES = [0, 1, 1000, 30 * KIB, 50 * KIB, 64 * KIB]
STEPS = 300


class Run:
    """``now`` is what the store should hold, ``expected`` what queued kernels should have computed."""

    def __init__(self, path: Path | None, gpu: Device, seed: int) -> None:
        self.path, self.gpu, self.chance = path, gpu, random.Random(seed)
        self.streams = gpu.streams(3)
        self.now: dict[str, torch.Tensor] = {}
        self.committed: dict[str, torch.Tensor] = {}
        self.expected: list[tuple[torch.Tensor, bytes]] = []
        self.aliases: list[tuple[torch.Tensor, bytes]] = []
        self.made = 0
        self.open()

    def open(self) -> None:
        dram = MIB if self.path is not None else 6 * MIB
        self.store = TieredStore.open(self.path, dram=dram, hbm=MIB, device=NAME)
        self.now = dict(self.committed)
        assert sorted(self.store) == sorted(self.now)

    def step(self) -> None:
        often = ["put_host", "put_device", "read", "read", "read", "write", "write", "write_host", "get", "get"]
        seldom = ["alias", "drop", "delete", "prefetch", "follow", "check", "commit", "reopen"]
        name = self.chance.choice([*often, *seldom])
        with self.gpu.use(self.chance.choice(self.streams)):
            if self.chance.random() < 0.2:
                self.gpu.busy()
            getattr(self, name)()

    def fresh(self, count: int) -> torch.Tensor:
        self.made += 1
        return numbers(count, self.made, torch.int32)

    def some(self, most: int) -> list[str]:
        there = sorted(self.now)
        return self.chance.sample(there, min(len(there), self.chance.randint(1, most)))

    def put_host(self) -> None:
        key, tensor = self.chance.choice(KEYS), self.fresh(self.chance.choice(SIZES))
        self.store.put(key, tensor)
        self.now[key] = tensor

    def put_device(self) -> None:
        key, tensor = self.chance.choice(KEYS), self.fresh(self.chance.choice(SIZES))
        there = tensor.to(self.gpu.device, copy=True)
        self.gpu.busy()
        self.gpu.put(self.store, key, there.add_(1))
        self.now[key] = tensor + 1

    def read(self) -> None:
        chosen = self.some(3)
        if chosen:
            with self.store.lease(chosen) as leased:
                self.gpu.busy()
                for key, tensor in zip(chosen, leased, strict=True):
                    self.expected.append((tensor * 3, raw(self.now[key] * 3)))

    def write(self) -> None:
        chosen = self.some(2)
        if chosen:
            self.drop()  # what is written to changes under older aliases of it, as it does in torch
            with self.store.lease(chosen, access="write") as leased:
                self.gpu.busy()
                for key, tensor in zip(chosen, leased, strict=True):
                    tensor.mul_(5).add_(self.made)
                    self.now[key] = self.now[key] * 5 + self.made

    def write_host(self) -> None:
        for key in self.some(1):
            self.drop()
            with self.store.lease(key, access="write", tier="dram") as tensor:
                tensor.add_(7)
            self.now[key] = self.now[key] + 7

    def get(self) -> None:
        for key in self.some(2):
            assert raw(self.store.get(key)) == raw(self.now[key]), key

    def alias(self) -> None:
        for key in self.some(1):
            if len(self.aliases) < 2:
                with self.store.lease(key) as tensor:
                    self.aliases.append((tensor[1:], raw(self.now[key][1:])))

    def drop(self) -> None:
        self.gpu.finish()  # they were leased on other streams than this one
        for alias, data in self.aliases:
            assert raw(alias) == data, "an alias changed"
        self.aliases.clear()

    def delete(self) -> None:
        for key in self.some(1):
            self.store.delete(key)
            del self.now[key]

    def prefetch(self) -> None:
        self.store.prefetch(self.some(5))

    def follow(self) -> None:
        self.store.follow(self.some(14) if self.chance.random() < 0.7 else [])

    def check(self) -> None:
        self.gpu.finish()
        for result, data in self.expected:
            assert raw(result) == data, "a kernel read what was not there yet, or no longer"
        self.expected.clear()

    def commit(self) -> None:
        if self.path is not None:
            self.store.commit()
            self.committed = dict(self.now)

    def reopen(self) -> None:
        if self.path is not None and self.chance.random() < 0.5:
            self.drop()
            self.store.close()
            self.open()

    def end(self) -> None:
        self.check()
        self.drop()
        for key, tensor in self.now.items():
            assert raw(self.store.get(key)) == raw(tensor)
        statistics: Any = self.store.statistics()
        assert all(link.up.failed == link.down.failed == 0 for link in statistics.links)
        for key in list(self.store):
            self.store.delete(key)
        assert [tier.used for tier in self.store.statistics().tiers[:2]] == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_random_operations(path: Path | None, gpu: Device, seed: int) -> None:
    run = Run(path, gpu, seed)
    try:
        for _ in range(STEPS):
            run.step()
        run.end()
    finally:
        run.store.close()
