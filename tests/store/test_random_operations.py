"""Random operations against a dict, on a real filesystem."""

from __future__ import annotations

import faulthandler
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.backends import NATIVE_HERE
from tests.store.chains import MIB, numbers, raw, same
from tiered import (
    KeyNotFound,
    MisuseError,
    TieredStore,
)
from tiered.format.generations import generations
from tiered.types import BackendName

LARGE = 150 << 10


class AgainstADict(RuleBasedStateMachine):
    """Real files, a pool of 1 MiB, keys whose tensors together have more."""

    @initialize(backend=st.sampled_from(NATIVE_HERE), keep=st.integers(1, 3), drives=st.sampled_from([0, 0, 2, 3]))
    def open(self, backend: BackendName, keep: int, drives: int) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.options: dict[str, Any] = {"dram": MIB, "backend": backend, "keep": keep}
        if drives:
            self.options["paths"] = [Path(self.home.name) / f"drive {number}" for number in range(drives)]
        self.now: dict[str, torch.Tensor] = {}
        self.committed: dict[str, torch.Tensor] = {}
        self.generation, self.meta = 0, {}
        self.seed = 0
        self.futures: list[tuple[Future[int], int]] = []
        self.aliases: list[tuple[torch.Tensor, bytes]] = []
        self.reopen()

    def reopen(self) -> None:
        for future, generation in self.futures:
            assert future.result(0) == generation, "close waits for it"
        self.futures.clear()
        self.store = TieredStore.open(Path(self.home.name) / "state", **self.options)
        self.now = dict(self.committed)
        assert (self.store.generation, self.store.meta) == (self.generation, self.meta)
        assert sorted(self.store) == sorted(self.now)
        kept = generations(self.store.folder)
        assert kept == list(range(max(1, self.generation - self.options["keep"] + 1), self.generation + 1))

    def fresh(self, count: int) -> torch.Tensor:
        self.seed += 1
        return numbers(count, self.seed)

    keys = st.sampled_from([f"t{number}" for number in range(12)])

    @rule(key=keys, count=st.sampled_from([0, 1, 1000, 1024, LARGE // 4 - 1, LARGE // 4]))
    def put(self, key: str, count: int) -> None:
        tensor = self.fresh(count)
        self.store.put(key, tensor)
        self.now[key] = tensor

    @rule(key=keys)
    def get(self, key: str) -> None:
        if key in self.now:
            same(self.store.get(key), self.now[key])
        else:
            with pytest.raises(KeyNotFound):
                self.store.get(key)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if self.now.pop(key, None) is None:
            with pytest.raises(KeyNotFound):
                self.store.delete(key)
        else:
            self.store.delete(key)
        assert key not in self.store

    @rule(chosen=st.lists(keys, min_size=1, max_size=3, unique=True), keep=st.booleans())
    def read(self, chosen: list[str], keep: bool) -> None:
        chosen = [key for key in chosen if key in self.now]
        if chosen:
            with self.store.lease(chosen) as leased:
                for key, tensor in zip(chosen, leased, strict=True):
                    same(tensor, self.now[key])
                if keep and len(self.aliases) < 2:
                    self.aliases.append((leased[0][1:], raw(self.now[chosen[0]][1:])))

    @rule(chosen=st.lists(keys, min_size=1, max_size=2, unique=True))
    def write(self, chosen: list[str]) -> None:
        chosen = [key for key in chosen if key in self.now]
        if chosen:
            self.drop()  # what is written to changes under older aliases of it, as it does in torch
            with self.store.lease(chosen, access="write") as leased:
                for key, tensor in zip(chosen, leased, strict=True):
                    self.now[key] = self.fresh(tensor.numel())
                    tensor.copy_(self.now[key])

    @rule()
    def drop(self) -> None:
        for alias, data in self.aliases:
            assert raw(alias) == data, "an alias changed"
        self.aliases.clear()

    @rule(chosen=st.lists(keys, max_size=5))
    def prefetch(self, chosen: list[str]) -> None:
        self.store.prefetch(chosen)

    @rule(chosen=st.lists(keys, max_size=5))
    def speculate(self, chosen: list[str]) -> None:
        self.store.speculate(chosen)
        assert self.store.present(chosen) <= set(chosen)

    @rule(meta=st.none() | st.dictionaries(st.text(max_size=3), st.integers(-5, 5), max_size=2))
    def commit(self, meta: dict[str, int] | None) -> None:
        assert self.store.commit(meta) == self.generation + 1
        self.generation += 1
        self.meta = self.meta if meta is None else meta
        self.committed = dict(self.now)

    @rule(meta=st.none() | st.dictionaries(st.text(max_size=3), st.integers(-5, 5), max_size=2))
    def commit_async(self, meta: dict[str, int] | None) -> None:
        self.futures.append((self.store.commit_async(meta), self.generation + 1))
        self.generation += 1
        self.meta = self.meta if meta is None else meta
        self.committed = dict(self.now)

    @rule()
    def rollback(self) -> None:
        if self.generation == 0:
            with pytest.raises(MisuseError, match="no commit"):
                self.store.rollback()
        else:
            self.drop()  # what comes back may be written to under older aliases of it
            assert self.store.rollback() == self.generation
            self.now = dict(self.committed)
            assert sorted(self.store) == sorted(self.now)
            assert self.store.meta == self.meta

    @rule()
    def leave_well(self) -> None:
        changed = self.now.keys() != self.committed.keys() or any(
            self.now[key] is not self.committed[key] for key in self.now
        )
        with self.store:
            pass
        if changed or self.generation == 0:
            self.generation += 1
        self.committed = dict(self.now)
        self.reopen()

    @rule()
    def leave_by_an_exception(self) -> None:
        with pytest.raises(ZeroDivisionError), self.store:
            raise ZeroDivisionError
        self.reopen()

    @rule()
    def close(self) -> None:
        self.store.close()
        self.reopen()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for key, tensor in self.now.items():
            same(self.store.get(key), tensor)
        self.drop()
        self.store.commit()
        for key in list(self.store):
            self.store.delete(key)
        assert self.store.statistics().tiers[0].used == 0
        self.store.close()
        with TieredStore.open(Path(self.home.name) / "state", **self.options) as store:
            assert sorted(store) == sorted(self.now)
            for key, tensor in self.now.items():
                same(store.get(key), tensor)
        self.home.cleanup()


def test_random_operations() -> None:
    quick = settings(
        max_examples=15, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(AgainstADict, settings=quick)


@pytest.mark.soak
def test_many_random_operations() -> None:
    faulthandler.cancel_dump_traceback_later()
    many = settings(max_examples=1000, stateful_step_count=150, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AgainstADict, settings=many)
