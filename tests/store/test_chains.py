"""The same store over every chain of tiers: random operations against a dict, byte for byte, and what only chains can do."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.backends import HERE
from tests.store.chains import CHAINS, MIB, ON_DEVICE, Chain, hurried, kib, nothing_is_held, numbers, push_out, raw, same
from tiered import CapacityError, Eviction, KeyNotFound, LeaseConflict, MisuseError, TensorSpec, TieredStore
from tiered.engine.policy import Touch
from tiered.types import BackendName, Use

NAMES = [f"t{number}" for number in range(16)]
LARGE = 120 << 10
HUGE = 700 << 10  # more than the device has, less than the host


@pytest.fixture(params=[chain for chain in CHAINS if "hbm" in chain.memories], ids=lambda chain: chain.name)
def with_device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    store = request.param.open(tmp_path / "state", eviction=Eviction(deadline=60))
    yield store
    store.close()


# -- against a dict ----------------------------------------------------------------------------------------------------------


class AgainstADict(RuleBasedStateMachine):
    """Keys whose tensors together have more than memory has. Without a disk a full store may refuse, and stays as it was."""

    @initialize(chain=st.sampled_from(CHAINS), backend=st.sampled_from(HERE), keep=st.integers(1, 2))
    def open(self, chain: Chain, backend: BackendName, keep: int) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.chain = chain
        self.options: dict[str, Any] = {"backend": backend, "keep": keep, "eviction": Eviction(deadline=60)}
        self.committed: dict[str, torch.Tensor] = {}
        self.generation = self.seed = 0
        self.alias: tuple[torch.Tensor, bytes] | None = None
        self.order: list[Touch] = []
        self.reopen()

    def reopen(self) -> None:
        self.store = self.chain.open(Path(self.home.name) / "state", **self.options)
        if not self.chain.durable:
            self.committed, self.generation = {}, 0
        self.now = dict(self.committed)
        self.tracing = contextlib.ExitStack()
        assert sorted(self.store) == sorted(self.now)
        assert self.store.generation == self.generation

    def fresh(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.seed += 1
        return numbers(count, self.seed, dtype)

    def soon(self) -> contextlib.AbstractContextManager[None]:
        """Without a disk, where room may never come, a request gives up soon."""
        return contextlib.nullcontext() if self.chain.disk else hurried(self.store, 0.05)

    def refused(self, operation: Callable[[], object]) -> bool:
        """Whether a store without a disk had no room for ``operation``."""
        try:
            with self.soon():
                operation()
        except CapacityError:
            if self.chain.disk:
                raise
            return True
        return False

    @contextlib.contextmanager
    def leased(self, chosen: list[str], tier: int, access: str = "read") -> Iterator[tuple[torch.Tensor, ...] | None]:
        """None where there was no room."""
        if len(chosen) > 1 or any(self.now[key].nbytes > LARGE for key in chosen):
            self.drop()  # what it has could lie in the middle
        lease = self.store.lease(chosen, access=access, tier=self.chain.memories[tier % len(self.chain.memories)])
        try:
            with self.soon():
                found = lease.__enter__()
        except CapacityError as error:
            if self.chain.disk and "can never be in tier" not in str(error):
                raise
            yield None
            return
        with contextlib.ExitStack() as stack:
            stack.push(lease.__exit__)
            yield found

    keys = st.sampled_from(NAMES)
    some = st.lists(keys, min_size=1, max_size=3, unique=True)
    tiers = st.integers(0, 1)

    counts = st.sampled_from([0, 1, 1000, 1024, LARGE // 7, LARGE // 5, LARGE // 4 - 1, LARGE // 4])

    @rule(key=keys, count=counts, layout=st.integers(0, 2))
    def put(self, key: str, count: int, layout: int) -> None:
        tensor = self.fresh(count)
        if layout == 1:
            tensor = self.fresh(2 * count, torch.int16)[::2]
        elif layout == 2:
            tensor = tensor.view(2, count // 2).t() if count % 2 == 0 else tensor.view(torch.bfloat16).clone()
        if not self.refused(lambda: self.store.put(key, tensor)):
            self.now[key] = tensor

    @rule(key=keys)
    def put_more_than_the_device_has(self, key: str) -> None:
        self.drop()
        tensor = self.fresh(HUGE, torch.uint8)
        if not self.refused(lambda: self.store.put(key, tensor)):
            self.now[key] = tensor

    @rule(key=keys, count=st.sampled_from([0, 3, LARGE]))
    def create(self, key: str, count: int) -> None:
        if self.refused(lambda: self.store.create(key, TensorSpec("uint8", (count,), 1))):
            return
        self.now[key] = self.fresh(count, torch.uint8)
        with self.leased([key], 0, "write") as found:
            if found is not None:
                found[0].copy_(self.now[key])
                return
        self.store.delete(key)
        del self.now[key]

    @rule(key=keys, how=st.sampled_from(["get", "fetch"]))
    def copy(self, key: str, how: str) -> None:
        def copied() -> torch.Tensor:
            return self.store.get(key) if how == "get" else asyncio.run(self.store.fetch(key))

        if key in self.now:
            same(copied(), self.now[key])
        else:
            with pytest.raises(KeyNotFound):
                copied()

    @rule(chosen=some, all_of_them=st.booleans(), tier=st.sampled_from([None, "dram"]))
    def offload(self, chosen: list[str], all_of_them: bool, tier: str | None) -> None:
        chosen = list(self.now) if all_of_them else [key for key in chosen if key in self.now]
        stayed: list[str] = []
        if self.refused(lambda: stayed.extend(self.store.offload(None if all_of_them else chosen, tier=tier).stayed)):
            return
        assert self.alias is not None or not stayed
        for key in chosen:
            same(self.store.get(key), self.now[key])

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if self.now.pop(key, None) is None:
            with pytest.raises(KeyNotFound):
                self.store.delete(key)
        else:
            self.store.delete(key)

    @rule(chosen=some, tier=tiers, keep=st.booleans())
    def read(self, chosen: list[str], tier: int, keep: bool) -> None:
        chosen = [key for key in chosen if key in self.now]
        with self.leased(chosen, tier) as found:
            for key, tensor in zip(chosen, found or (), strict=False):
                same(tensor, self.now[key])
            if found and keep and self.alias is None and found[0].nbytes <= LARGE:
                self.alias = found[0].view(-1)[1:], raw(self.now[chosen[0]].reshape(-1)[1:])

    @rule(chosen=some, tier=tiers)
    def write(self, chosen: list[str], tier: int) -> None:
        chosen = [key for key in chosen if key in self.now]
        self.drop()  # what is written to changes under older aliases of it, as it does in torch
        with self.leased(chosen, tier, "write") as found:
            for key, tensor in zip(chosen, found or (), strict=False):
                data = self.fresh(tensor.nbytes, torch.uint8)
                tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
                self.now[key] = tensor.clone()

    @rule(key=keys, first=tiers)
    def read_in_both(self, key: str, first: int) -> None:
        """READ leases do not exclude each other, in whatever tiers."""
        if key in self.now:
            self.drop()
            with self.leased([key], first) as one, self.leased([key], first + 1) as other:
                for found in (one, other):
                    if found is not None:
                        same(found[0], self.now[key])

    @rule(key=keys, first=tiers, write=st.booleans())
    def conflict(self, key: str, first: int, write: bool) -> None:
        """A WRITE lease excludes all others, in whatever tiers, and says so at once."""
        if key in self.now:
            self.drop()
            with self.leased([key], first, "write") as found:
                if found is not None:
                    self.now[key] = self.now[key].clone()  # it may have been written to, which is a change to commit
                if found is not None and self.now[key].nbytes <= LARGE:
                    with pytest.raises(LeaseConflict), self.leased([key], first + 1, "write" if write else "read"):
                        pass
                    with pytest.raises(LeaseConflict):
                        self.store.put(key, torch.zeros(1))
                    with pytest.raises(LeaseConflict):
                        self.store.delete(key)

    @rule()
    def drop(self) -> None:
        alias, self.alias = self.alias, None
        if alias is not None:
            assert raw(alias[0]) == alias[1], "an alias changed"

    @rule(chosen=st.lists(keys, max_size=5), tier=tiers)
    def prefetch(self, chosen: list[str], tier: int) -> None:
        self.store.prefetch(chosen, tier=self.chain.memories[tier % len(self.chain.memories)])

    @rule()
    def trace(self) -> None:
        self.tracing.close()
        self.order = self.tracing.enter_context(self.store.trace())

    sizes = st.sampled_from([0, LARGE, 1 << 40])
    touches = st.builds(Touch, keys, st.sampled_from([None, "dram"]), st.sampled_from(Use), sizes)

    @rule(order=st.none() | st.lists(touches | keys, max_size=12))
    def follow(self, order: list[Touch | str] | None) -> None:
        """What was traced, or anything: keys that there are not, tensors that are then deleted, an order that is not kept."""
        with contextlib.suppress(MisuseError):  # traced in a chain that had other tiers
            self.store.follow(self.order if order is None else order)

    @rule()
    def commit(self) -> None:
        if not self.chain.durable:
            with pytest.raises(MisuseError):
                self.store.commit()
            return
        self.drop()
        assert self.store.commit() == self.generation + 1
        self.generation += 1
        self.committed = dict(self.now)

    @rule()
    def leave_well(self) -> None:
        self.drop()
        changed = self.now.keys() != self.committed.keys() or any(self.now[k] is not self.committed[k] for k in self.now)
        with self.store:
            pass
        if self.chain.durable:
            self.generation += changed or not self.generation
            self.committed = dict(self.now)
        self.reopen()

    @rule()
    def close(self) -> None:
        self.drop()
        self.store.close()
        self.reopen()

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "store"):
            state = self.store._engine.state
            with self.store._engine.lock:
                state.reap()
                state.directory.check()
                for place in state.pools:
                    place.check()
                    assert place.used <= place.peak <= place.tier.capacity

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.drop()
        self.tracing.close()
        for key, tensor in self.now.items():
            same(self.store.get(key), tensor)
        if self.chain.durable:
            self.store.commit()
        self.store.follow([])
        self.store.prefetch([])
        nothing_is_held(self.store)
        self.store.close()
        if self.chain.durable:
            with self.chain.open(Path(self.home.name) / "state", **self.options) as store:
                assert sorted(store) == sorted(self.now)
                for key, tensor in self.now.items():
                    same(store.get(key), tensor)
        self.home.cleanup()


def test_random_operations() -> None:
    quick = settings(
        max_examples=25, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(AgainstADict, settings=quick)


@pytest.mark.soak
def test_many_random_operations() -> None:
    faulthandler.cancel_dump_traceback_later()
    many = settings(max_examples=1000, stateful_step_count=150, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AgainstADict, settings=many)


# -- what can be stored ------------------------------------------------------------------------------------------------------

DTYPES = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about what is experimental or going away
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_through_every_tier(tmp_path: Path, dtype: torch.dtype) -> None:
    try:
        if torch.empty(1, dtype=dtype).is_quantized:
            pytest.skip("quantized tensors are refused")
        flat = torch.arange(24) % 3 == 0 if dtype is torch.bool else numbers(24, dtype=dtype)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        pytest.skip(f"torch cannot allocate it: {error}")
    tensors = {
        "flat": flat,
        "shaped": flat.view(2, 3, 4),
        "transposed": flat.view(4, 6).t(),
        "0-d": flat[3],
        "empty": flat[:0],
        "nothing by three": flat[:0].view(0, 3),
    }
    chain = next(chain for chain in CHAINS if chain.name == "hbm-dram-nvme")
    with chain.open(tmp_path / "state") as store:
        for key, tensor in tensors.items():
            try:
                raw(tensor)
            except (RuntimeError, NotImplementedError):
                continue  # torch cannot gather it at all
            store.put(key, tensor)
        kept = list(store)
        for tier in ("hbm", "dram", "hbm"):
            for key in kept:
                with store.lease(key, access="write", tier=tier) as leased:
                    same(leased, tensors[key])
                same(store.get(key), tensors[key])
            del leased
    with chain.open(tmp_path / "state") as store:
        for key in kept:
            with store.lease(key) as leased:
                same(leased, tensors[key])


# -- up and down -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize(("first", "second"), [("hbm", "dram"), ("dram", "hbm")])
def test_what_is_written_in_one_tier_is_read_in_the_other(
    with_device: TieredStore, first: str, second: str, access: str
) -> None:
    with_device.put("w", kib(100))
    for value in range(1, 5):
        with with_device.lease("w", access="write", tier=first) as w:
            w.fill_(value)
        del w
        with with_device.lease("w", access=access, tier=second) as w:
            assert w.eq(value).all()
        del w
        assert with_device.get("w").eq(value).all()


def test_a_lease_below_what_is_leased_to_read_above(with_device: TieredStore) -> None:
    """The bytes above are the newest, and they cannot change: they are written back under the lease."""
    with_device.put("w", kib(100))
    with with_device.lease("w", access="write") as w:
        w.fill_(7)
    del w
    with with_device.lease("w") as above, with_device.lease("w", tier="dram") as below:
        assert above.eq(7).all()
        assert below.eq(7).all()
        assert above.data_ptr() != below.data_ptr()


def test_larger_than_the_device_and_not_than_the_host(with_device: TieredStore) -> None:
    with_device.put("large", kib(700, 7))
    with pytest.raises(CapacityError, match=r"can never be in tier hbm \(524,288 bytes\): open"), with_device.lease("large"):
        pass
    with with_device.lease("large", access="write", tier="dram") as large:
        assert large.eq(7).all()
        large.fill_(8)
    del large
    with_device.prefetch(["large"])
    with_device.follow(["large", "large"])
    assert with_device.get("large").eq(8).all()
    nothing_is_held(with_device)


def test_created_larger_than_the_device(with_device: TieredStore) -> None:
    with_device.create("large", TensorSpec("uint8", (700 << 10,), 1))
    with with_device.lease("large", access="write", tier="dram") as large:
        large.fill_(3)
    assert with_device.get("large").eq(3).all()


def test_larger_than_the_host_is_refused_though_the_device_could_hold_it(tmp_path: Path) -> None:
    """It could never leave the device."""
    with TieredStore.open(tmp_path / "state", dram=MIB, **{**ON_DEVICE, "hbm": 4 * MIB}) as store:
        for refused in (
            lambda: store.put("w", kib(2048)),
            lambda: store.create("w", TensorSpec("uint8", (2 * MIB,), 1)),
        ):
            with pytest.raises(CapacityError, match=r"'w' \(2,097,152 bytes\) can never fit into tier dram"):
                refused()
        assert len(store) == 0


def test_more_than_both_memories_through_the_device(tmp_path: Path) -> None:
    chain = next(chain for chain in CHAINS if chain.name == "hbm-dram-nvme")
    with chain.open(tmp_path / "state") as store:
        for number in range(30):
            store.put(f"t{number}", kib(100))
        for value in range(1, 4):
            for number in range(30):
                with store.lease(f"t{number}", access="write") as tensor:
                    assert tensor.eq((value - 1) * (number + 1)).all()
                    tensor.fill_(value * (number + 1))
                del tensor
        device, host, disk = store.statistics().tiers
        assert (device.name, host.name, disk.name) == ("hbm", "dram", "nvme")
        assert device.peak <= device.capacity
        assert host.peak <= host.capacity
    with chain.open(tmp_path / "state") as store:
        for number in range(30):
            assert store.get(f"t{number}").eq(3 * (number + 1)).all()


def test_an_order_that_is_followed_brings_things_before_they_are_asked_for(tmp_path: Path) -> None:
    chain = next(chain for chain in CHAINS if chain.name == "hbm-dram-nvme")
    with chain.open(tmp_path / "state") as store:
        for number in range(12):
            store.put(f"t{number}", kib(60, number))

        def once() -> None:
            for number in range(12):
                with store.lease(f"t{number}") as tensor:
                    assert tensor.eq(number).all()
                del tensor

        with store.trace() as order:
            once()
        assert [(touch.key, touch.tier) for touch in order] == [(f"t{number}", "hbm") for number in range(12)]
        assert store.follow(order) == 12
        assert store.follow(order) == 0, "nothing is new"
        for _ in range(5):
            once()
        assert store.statistics().prefetched > 0
        store.follow([])
        push_out(store)
        nothing_is_held(store)


def test_an_order_may_have_tensors_that_are_larger_than_a_tier(with_device: TieredStore) -> None:
    with_device.put("large", kib(700, 1))
    for number in range(4):
        with_device.put(f"t{number}", kib(60, number))
    order = ["t0", Touch("large", "dram"), "t1", "nobody", "t2", "t3", Touch("gone", "dram", Use.PUT, 1 << 40)]
    with_device.follow(order)
    for number in range(4):
        with with_device.lease(f"t{number}") as tensor:
            assert tensor.eq(number).all()
    with with_device.lease("large", tier="dram") as large:
        assert large.eq(1).all()


@pytest.mark.parametrize("fate", ["evicted", "replaced", "deleted", "closed"])
def test_an_alias_of_device_memory_keeps_its_bytes(with_device: TieredStore, fate: str) -> None:
    with_device.put("w", numbers(1000))
    with with_device.lease("w") as w:
        alias = w.view(10, 100)[3:].t()
    del w
    expected = raw(numbers(1000).view(10, 100)[3:].t())
    if fate == "replaced":
        with_device.put("w", torch.zeros(1000))
    elif fate == "deleted":
        with_device.delete("w")
    elif fate == "closed":
        with_device.close()
        assert raw(alias) == expected
        return
    for number in range(8):  # through the device
        with_device.put("other", kib(200, number))
        with with_device.lease("other", access="write") as other:
            other.fill_(255)
        del other
    assert with_device.statistics().tiers[0].held == 1
    assert raw(alias) == expected
    del alias
    gc.collect()
    nothing_is_held(with_device)
