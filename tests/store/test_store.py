"""``TieredStore`` itself, on a real filesystem, with pools so small that nearly everything is evicted."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests import programs
from tests.fakes import in_child
from tests.store.chains import hurried
from tiered import (
    Access,
    CapacityError,
    CorruptionError,
    ForkedStore,
    KeyNotFound,
    LeaseConflict,
    MisuseError,
    StoreClosed,
    StoreLocked,
    TieredError,
    TieredStore,
)
from tiered.format.generations import generations, load
from tiered.io.probe import libaio_unavailable
from tiered.store import lease as tensors
from tiered.types import PIECE_BYTES, TensorSpec

MIB = 1 << 20
Backend = Literal["libaio", "posix"]
Open = Callable[..., TieredStore]

WITHOUT = libaio_unavailable()
BACKENDS: list[Backend] = ["posix"] if WITHOUT else ["libaio", "posix"]


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """A deadlock fails with every thread's traceback instead of hanging."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["libaio", "posix"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param not in BACKENDS:
        pytest.skip(f"no libaio here: {WITHOUT}")
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def open_store(folder: Path, backend: Backend) -> Iterator[Open]:
    opened: list[TieredStore] = []

    def opening(**options: Any) -> TieredStore:
        opened.append(TieredStore.open(folder, **{"dram": MIB, "backend": backend, **options}))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Open) -> TieredStore:
    return open_store()


def numbers(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bytes at all, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """Its bytes in row-major order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def same(found: torch.Tensor, put: torch.Tensor) -> None:
    assert found.dtype is put.dtype
    assert found.shape == put.shape
    assert raw(found) == raw(put)


def push_out(store: TieredStore) -> None:
    """Fill the pool with other tensors, so that all that nobody holds leaves it."""
    for number in range(8):
        store.put(f"ballast {number}", torch.zeros(200 << 10, dtype=torch.uint8))
    for number in range(8):
        store.delete(f"ballast {number}")


# What can be stored

DTYPES = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about what is experimental or going away
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(open_store: Open, dtype: torch.dtype) -> None:
    try:
        tensor = torch.empty(24, dtype=dtype)
        if dtype is torch.bool:
            tensor = torch.arange(24) % 3 == 0
        elif not tensor.is_quantized:
            tensor = numbers(24, dtype=dtype)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        pytest.skip(f"torch cannot allocate it: {error}")
    store = open_store()
    if tensor.is_quantized:
        with pytest.raises(MisuseError, match="quantized"):
            store.put("t", tensor)
        return
    shaped = tensor.view(2, 3, 4)
    store.put("flat", tensor)
    store.put("shaped", shaped)
    store.put("scalar", shaped[1, 2, 3])
    store.put("none", tensor[:0])
    views = {
        "transposed": shaped.transpose(0, 2),
        "sliced": shaped[:, 1:, ::2],
        "expanded": shaped[:, :1].expand(2, 5, 4),
    }
    for other, view in views.items():
        try:
            raw(view)
        except (RuntimeError, NotImplementedError):
            continue  # torch cannot gather it at all
        store.put(other, view)
        same(store.get(other), view)
    store.commit()
    store.close()
    again = open_store()
    same(again.get("flat"), tensor)
    same(again.get("shaped"), shaped)
    same(again.get("scalar"), shaped[1, 2, 3])
    same(again.get("none"), tensor[:0])
    with again.lease("shaped") as leased:
        same(leased, shaped)


def test_views_of_all_kinds(store: TieredStore) -> None:
    base = torch.randn(6, 8, dtype=torch.complex64)
    inputs = {
        "transposed": base.t(),
        "sliced": base[1:5:2, 2:7],
        "expanded": base[:1].expand(7, 8),
        "expanded 0-d": torch.tensor(3.5).expand(4, 5),
        "flipped": base.flip(0),
        "conj": base.conj(),
        "conj transposed": base.mH,
        "neg": base.conj().imag,
        "real": base.real,
        "diagonal": torch.randn(5, 5).diagonal(),
        "overlapping": torch.arange(10).unfold(0, 4, 1),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "grad": torch.randn(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "of a graph": torch.randn(3, requires_grad=True) * 2,
        "empty middle": torch.empty(3, 0, 2),
        "0-d": torch.tensor(7),
        "0-d bool": torch.tensor(True),
        "offset": torch.arange(9, dtype=torch.int8)[1:],
    }
    for key, tensor in inputs.items():
        store.put(key, tensor)
    push_out(store)
    for key, tensor in inputs.items():
        found = store.get(key)
        same(found, tensor)
        assert torch.equal(found, tensor.detach())
        assert found.is_contiguous()
        assert not found.requires_grad
        assert not found.is_conj()
        assert not found.is_neg()
        assert store.spec(key).shape == tuple(tensor.shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
        lambda: [1.0, 2.0],
        lambda: None,
    ],
    ids=["sparse", "csr", "meta", "quantized", "list", "None"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, about sparse and quantized
def test_what_cannot_be_stored_is_refused(store: TieredStore, make: Callable[[], Any]) -> None:
    with pytest.raises(MisuseError, match="'t'"):
        store.put("t", make())
    assert "t" not in store


@pytest.mark.parametrize("key", [1, b"bytes", None, ("a",)])
def test_keys_are_strings(store: TieredStore, key: Any) -> None:
    with pytest.raises(MisuseError):
        store.put(key, torch.zeros(1))
    assert store.statistics().tiers[0].used == 0


def test_any_string_is_a_key(open_store: Open) -> None:
    store = open_store()
    keys = ["", "a/b", "../../etc/passwd", "nul\0nul", "\N{SNOWMAN}" * 50, "x" * 5000, " ", "manifest.1", "data.0"]
    for number, key in enumerate(keys):
        store.put(key, torch.tensor(number))
    store.commit()
    store.close()
    again = open_store()
    assert sorted(again) == sorted(keys)
    for number, key in enumerate(keys):
        assert again.get(key).item() == number


def test_put_replaces(store: TieredStore) -> None:
    store.put("t", torch.randn(5))
    store.put("t", numbers(1000, 3, torch.int64).view(10, 100))
    assert store.spec("t") == TensorSpec("int64", (10, 100), 8)
    same(store.get("t"), numbers(1000, 3, torch.int64).view(10, 100))
    store.put("t", torch.tensor(1.5))
    push_out(store)
    assert store.get("t").item() == 1.5
    assert len(store) == 1


def test_put_copies(store: TieredStore) -> None:
    tensor = torch.ones(100)
    store.put("t", tensor)
    tensor.zero_()
    copy = store.get("t")
    copy.zero_()
    assert store.get("t").eq(1).all()


def test_create(store: TieredStore) -> None:
    store.create("t", TensorSpec("bfloat16", (3, 5), 2))
    with store.lease("t", access="write") as t:
        t.copy_(torch.arange(15).view(3, 5))
    del t
    push_out(store)
    assert torch.equal(store.get("t"), torch.arange(15, dtype=torch.bfloat16).view(3, 5))
    with pytest.raises(TieredError):
        store.create("u", TensorSpec("float33", (3,), 4))


# How much

def test_larger_than_the_pool(store: TieredStore) -> None:
    store.put("fits", torch.zeros(MIB, dtype=torch.uint8))
    with pytest.raises(CapacityError, match=r"1,048,577 bytes can never fit into tier dram \(1,048,576 bytes\)"):
        store.put("t", torch.zeros(MIB + 1, dtype=torch.uint8))
    assert list(store) == ["fits"]


def test_a_lease_larger_than_the_pool(store: TieredStore) -> None:
    for key in "abc":
        store.put(key, torch.zeros(400 << 10, dtype=torch.uint8))
    with pytest.raises(CapacityError, match="can never be"), store.lease(["a", "b", "c"]):
        pass
    with store.lease(["a", "c"]) as (a, c):
        assert a.shape == c.shape


def test_thousands_of_small_tensors_through_a_tiny_pool(open_store: Open) -> None:
    store = open_store()
    for number in range(2000):
        store.put(f"t{number}", torch.full((number % 50,), number))
    for number in range(0, 2000, 3):
        store.delete(f"t{number}")
    left = [number for number in range(2000) if number % 3]
    for number in random.Random(0).sample(left, 300):
        assert store.get(f"t{number}").tolist() == [number] * (number % 50)
    store.commit()
    store.close()
    again = open_store()
    assert len(again) == len(left)
    for number in random.Random(1).sample(left, 300):
        assert again.get(f"t{number}").tolist() == [number] * (number % 50)
    pool = again.statistics().tiers[0]
    assert pool.peak <= pool.capacity == MIB


def test_the_pool_is_a_hard_limit(store: TieredStore) -> None:
    for number in range(40):
        store.put(f"t{number}", torch.full((40 << 10,), float(number)))  # 160 KiB
        pool = store.statistics().tiers[0]
        assert pool.used <= pool.peak <= pool.capacity == MIB
    assert store.statistics().evictions > 30
    for number in range(40):
        with store.lease(f"t{number}") as t:
            assert t.eq(number).all()
    statistics = store.statistics()
    assert statistics.tiers[0].peak <= MIB
    assert statistics.links[0].down.bytes >= 34 * (160 << 10)
    assert statistics.links[0].up.bytes >= 34 * (160 << 10)
    assert statistics.links[0].up.failed == statistics.links[0].down.failed == 0


def test_a_disk_budget(open_store: Open) -> None:
    store = open_store(nvme="4MiB", keep=1)

    def fill() -> None:
        for number in range(100):
            store.put(f"t{number}", torch.full((50 << 10,), float(number)))

    with pytest.raises(CapacityError, match="is used up"):
        fill()
    held = list(store)
    assert len(held) > 10
    for key in held:
        try:
            assert store.get(key).eq(int(key[1:])).all()
        except CapacityError:
            continue  # the pool is full of what the disk cannot take
    for key in held[: len(held) // 2]:
        store.delete(key)
    for key in held[len(held) // 2 :]:
        assert store.get(key).eq(int(key[1:])).all()
    store.commit()


# Random operations against a dict

LARGE = 150 << 10


class AgainstADict(RuleBasedStateMachine):
    """Real files, a pool of 1 MiB, keys whose tensors together have more."""

    @initialize(backend=st.sampled_from(BACKENDS), keep=st.integers(1, 3), drives=st.sampled_from([0, 0, 2, 3]))
    def open(self, backend: Backend, keep: int, drives: int) -> None:
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


# Commits


def test_what_was_not_committed_is_gone(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.ones(10))
    store.put("b", torch.ones(10))
    assert store.commit({"step": 1}) == 1
    store.put("a", torch.zeros(10))
    store.delete("b")
    store.put("c", torch.zeros(10))
    push_out(store)
    store.close()
    again = open_store()
    assert sorted(again) == ["a", "b"]
    assert again.get("a").eq(1).all()
    assert (again.generation, again.meta) == (1, {"step": 1})


def test_leaving_the_block_commits_and_an_exception_does_not(open_store: Open) -> None:
    with open_store() as store:
        store.put("a", torch.ones(10))

    def failing() -> None:
        with open_store() as store:
            assert store.get("a").eq(1).all()
            store.put("a", torch.zeros(10))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    with open_store() as store:
        assert store.get("a").eq(1).all()
        assert store.generation == 1
    with open_store() as store:
        assert store.generation == 1, "nothing changed, nothing was written"
        store.close()  # inside the block: commits nothing, and leaving is no error


def test_meta(open_store: Open) -> None:
    meta = {"step": 7, "nested": {"list": [1, 2.5, None, True, "text"]}, "empty": {}}
    store = open_store()
    assert (store.generation, store.meta) == (0, {})
    assert store.commit(meta) == 1
    assert store.meta == meta
    assert store.commit() == 2, "an explicit commit is one"
    store.close()
    store = open_store()
    assert (store.generation, store.meta) == (2, meta)
    store.meta["step"] = 8
    assert store.meta["step"] == 7
    store.commit({})
    assert store.meta == {}


@pytest.mark.parametrize("meta", [{"x": object()}, {"x": torch.ones(1)}, {1: 2}, {"x": float("nan")}, {"x": {1, 2}}])
def test_meta_that_is_not_json_is_refused_and_nothing_else_suffers(open_store: Open, meta: Any) -> None:
    store = open_store()
    store.put("a", torch.ones(10))  # dirty: the snapshot happens in the engine's thread
    with pytest.raises(TieredError):
        store.commit(meta)
    store.put("b", torch.ones(10))
    assert store.get("a").eq(1).all()
    assert store.commit({"fine": 1}) == 1
    store.close()
    assert sorted(open_store()) == ["a", "b"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_generations_that_are_kept(open_store: Open, folder: Path, keep: int) -> None:
    store = open_store(keep=keep)
    for number in range(1, 7):
        store.put("t", torch.full((1000,), float(number)))
        store.put(f"only {number}", torch.full((50_000,), float(number)))
        if number > 1:
            store.delete(f"only {number - 1}")
        assert store.commit() == number
        assert generations(folder) == list(range(max(1, number - keep + 1), number + 1))
    size = os.path.getsize(folder / "data.0")
    for _ in range(20):
        store.put("t", torch.full((1000,), 6.0))
        store.commit()
    assert os.path.getsize(folder / "data.0") == size, "what dropped generations had is used again"
    store.close()
    again = open_store(keep=keep)
    assert sorted(again) == ["only 6", "t"]
    assert again.get("only 6").eq(6).all()


def test_fewer_are_kept_after_reopening(open_store: Open, folder: Path) -> None:
    store = open_store(keep=3)
    for number in range(3):
        store.put("t", torch.tensor(number))
        store.commit()
    store.close()
    store = open_store(keep=1)
    assert generations(folder) == [1, 2, 3]
    store.put("t", torch.tensor(3))
    store.commit()
    assert generations(folder) == [4]
    assert store.get("t").item() == 3
    with pytest.raises(MisuseError):
        open_store(keep=0)


def test_commit_under_leases(open_store: Open) -> None:
    store = open_store()
    store.put("a", numbers(1000))
    with store.lease("a") as a:
        assert store.commit() == 1
        same(a, numbers(1000))
    with store.lease("a", access="write") as a, pytest.raises(LeaseConflict, match="'a'"):
        store.commit()
    assert store.generation == 1
    del a
    store.close()
    same(open_store().get("a"), numbers(1000))


def test_what_an_alias_writes_after_its_lease_is_not_stored(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.zeros(1000))
    with store.lease("a", access="write") as a:
        a.fill_(1)
    store.commit()  # while a is alive
    a.fill_(2)
    assert store.get("a").eq(1).all()
    assert a.eq(2).all()
    store.commit()
    push_out(store)
    a.fill_(3)
    assert store.get("a").eq(1).all()
    store.close()
    assert a.eq(3).all()
    assert open_store().get("a").eq(1).all()


def test_a_commit_without_room_for_a_copy_gives_up(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.zeros(600 << 10, dtype=torch.uint8))
    with store.lease("a", access="write") as a:
        a.fill_(1)
    with pytest.raises(CapacityError, match=r"'a' .*still referenced after its lease"), hurried(store, 0.3):
        store.commit()
    del a
    assert store.commit() == 1
    store.close()
    assert open_store().get("a").eq(1).all()


def test_commits_from_many_threads(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.ones(10))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(store.commit())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 9))


# Leases


def test_a_key_gives_a_tensor_and_a_list_a_tuple(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    store.put("b", torch.tensor(2))
    with store.lease("a") as a:
        assert isinstance(a, torch.Tensor)
    with store.lease(["b", "a"]) as found:
        assert isinstance(found, tuple)
        assert [t.item() for t in found] == [2, 1]
    with store.lease(("a",)) as found:
        assert isinstance(found, tuple)
    with store.lease([]) as found:
        assert found == ()


def test_bad_leases(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    with pytest.raises(MisuseError, match="twice"):
        store.lease(["a", "b", "a"])
    with pytest.raises(MisuseError, match="'exclusive'"):
        store.lease("a", access="exclusive")
    with pytest.raises(MisuseError, match="nvme"):
        store.lease("a", tier="nvme")
    with pytest.raises(KeyNotFound, match="'b'"), store.lease(["a", "b"]):
        pass
    with store.lease("a", access=Access.WRITE, tier="dram"):  # none of these left a lease behind
        pass
    lease = store.lease("a")
    with lease, pytest.raises(MisuseError, match="open already"), lease:
        pass
    with lease:  # again, one after the other
        pass


def test_conflicts(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    store.put("b", torch.tensor(1))
    with store.lease("a"), store.lease("a"):
        for refused in (
            lambda: store.lease("a", access="write").__enter__(),
            lambda: store.lease(["b", "a"], access="write").__enter__(),
            lambda: store.put("a", torch.tensor(2)),
            lambda: store.delete("a"),
        ):
            with pytest.raises(LeaseConflict, match="'a'"):
                refused()
    with store.lease("a", access="write"):
        for refused in (
            lambda: store.lease("a").__enter__(),
            lambda: store.lease("a", access="write").__enter__(),
            lambda: store.get("a"),
            lambda: store.put("a", torch.tensor(2)),
            lambda: store.delete("a"),
        ):
            with pytest.raises(LeaseConflict, match="'a'"):
                refused()
    used = store.statistics().tiers[0].used
    with store.lease(["a", "b"], access="write") as (a, b):
        a.fill_(5)
        b.fill_(6)
    assert (store.get("a").item(), store.get("b").item()) == (5, 6)
    assert store.statistics().tiers[0].used == used, "refused puts gave their room back"


def test_an_exception_in_a_lease_ends_it(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    for access in ("read", "write"):
        with pytest.raises(ZeroDivisionError), store.lease("a", access=access):
            raise ZeroDivisionError
    store.delete("a")


def test_writing_under_a_read_lease_raises_at_its_end(store: TieredStore) -> None:
    store.put("a", torch.zeros(3))
    with pytest.raises(MisuseError, match="'a' was written to under a READ lease"), store.lease("a") as a:
        a[1:].add_(1)
    del a
    store.put("a", torch.zeros(3))

    def failing() -> None:
        with store.lease("a") as a:
            a.add_(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # the first error is the one that counts
        failing()
    store.put("a", torch.zeros(3))
    with store.lease("a", access="write"):  # and it ended
        pass


def test_each_lease_has_its_own_shape_and_no_history(store: TieredStore) -> None:
    store.put("a", torch.ones(4, 3))
    with store.lease("a") as one, store.lease("a") as other:
        one.requires_grad_()
        assert not other.requires_grad
        assert one.data_ptr() == other.data_ptr()
    with store.lease("a") as again:
        assert not again.requires_grad
    del one, other, again
    with torch.inference_mode(), store.lease("a", access="write") as a:
        a.mul_(2)
    with store.lease("a") as a:
        assert not a.is_inference()
        assert a.eq(2).all()


@pytest.mark.parametrize("fate", ["evicted", "replaced", "deleted", "closed"])
def test_an_alias_keeps_its_bytes(store: TieredStore, fate: str) -> None:
    store.put("a", numbers(1000))
    with store.lease("a") as a:
        alias = a.view(10, 100)[3:].t()
    del a
    expected = raw(numbers(1000).view(10, 100)[3:].t())
    if fate == "replaced":
        store.put("a", torch.zeros(1000))
    elif fate == "deleted":
        store.delete("a")
    elif fate == "closed":
        store.close()
    if fate != "closed":
        assert store.statistics().tiers[0].held == 1
        push_out(store)
        push_out(store)
        assert raw(alias) == expected
        del alias
        gc.collect()
        push_out(store)
        pool = store.statistics().tiers[0]
        assert pool.held == 0
        assert pool.used <= (8192 if fate != "deleted" else 0)
        return
    del store
    gc.collect()
    junk = [torch.randn(1 << 18) for _ in range(8)]
    assert raw(alias) == expected
    del junk


def test_a_store_that_nobody_closed_goes_with_its_last_reference(folder: Path) -> None:
    store = TieredStore.open(folder, dram=MIB)
    store.put("a", numbers(10))
    with store.lease("a") as a:
        pass
    del store
    gc.collect()
    same(a, numbers(10))
    with TieredStore.open(folder, dram=MIB) as again:  # the lock is free
        assert len(again) == 0


def test_open_stores_leave_nothing_open(folder: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    for warm in range(2):
        TieredStore.open(folder, dram=MIB).close()
        before = descriptors() if warm else 0
    threads = threading.active_count()
    for _ in range(10):
        with TieredStore.open(folder, dram=MIB) as store:
            store.put("a", torch.ones(1000))
            with store.lease("a"):
                pass
    del store
    assert descriptors() == before
    assert threading.active_count() == threads


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_a_lease_whose_view_cannot_be_made_is_none(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", torch.ones(4))
    store.put("b", torch.ones(4, dtype=torch.complex32))
    with monkeypatch.context() as patch:
        patch.delitem(tensors._TYPES, "complex32")  # a store that a newer torch has written
        with pytest.raises(TieredError, match="complex32"), store.lease(["a", "b"], access="write"):
            pass
    assert store.statistics().tiers[0].held == 0
    store.delete("a")
    store.delete("b")
    assert store.statistics().tiers[0].used == 0


def test_autograd_notices_a_change_after_the_lease(store: TieredStore) -> None:
    store.put("w", torch.randn(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with store.lease("w") as w:
        y = x @ w
    del w
    with store.lease("w", access="write") as w:
        w.mul_(2)
    del w
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("between", ["nothing", "eviction", "replacement", "deletion"])
def test_autograd_is_right_whatever_happens_to_the_tensor(store: TieredStore, between: str) -> None:
    weight = torch.randn(4, 4)
    store.put("w", weight)
    x = torch.randn(2, 4, requires_grad=True)
    with store.lease("w") as w:
        y = x @ w
    del w
    if between == "replacement":
        store.put("w", torch.zeros(4, 4))
    elif between == "deletion":
        store.delete("w")
    if between != "nothing":
        push_out(store)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4) @ weight.t())


def test_a_pool_full_of_aliases_says_who_holds_it(open_store: Open) -> None:
    store = open_store()
    kept = []
    for key in "abc":
        store.put(key, torch.zeros(300 << 10, dtype=torch.uint8))
        with store.lease(key) as t:
            kept.append(t)
    with store.lease("a"), pytest.raises(CapacityError) as raised, hurried(store, 0.2):
        store.put("d", torch.zeros(300 << 10, dtype=torch.uint8))
    assert "'a' (307,200 bytes, leased)" in str(raised.value)
    assert "'b' (307,200 bytes, still referenced after its lease)" in str(raised.value)
    del kept, t
    store.put("d", torch.zeros(300 << 10, dtype=torch.uint8))
    assert store.statistics().stalled_for_room > 0


def test_ctrl_c_in_a_waiting_lease_leaves_no_lease_behind(store: TieredStore) -> None:
    store.put("a", torch.ones(200 << 10))
    push_out(store)
    store.put("b", torch.ones(200 << 10))
    with store.lease("b") as b:
        pass  # b keeps its room
    waiting = store._engine.requests.waiting

    def interrupt() -> None:
        while not waiting:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background has none
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt), store.lease("a", access="write"):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    helper.join()
    assert not waiting
    del b
    with store.lease("a", access="write") as a:
        assert a.eq(1).all()
    store.delete("a")
    store.delete("b")


def test_prefetch_is_a_hint(store: TieredStore) -> None:
    for number in range(20):
        store.put(f"t{number}", torch.full((25 << 10,), float(number)))
    store.prefetch([f"t{number}" for number in range(20)] + ["nobody"])
    store.prefetch("t3")
    store.prefetch([])
    with store.lease("t3", access="write"):
        store.prefetch(["t3"])
    for number in range(20):
        store.prefetch([f"t{other}" for other in range(number, 20)])
        assert store.get(f"t{number}").eq(number).all()
    statistics = store.statistics()
    assert statistics.hits + statistics.misses == statistics.leases == 21
    assert statistics.prefetched > 0


# The wrong time, the wrong process


def test_use_after_close(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    lease = store.lease("a")
    store.close()
    store.close()
    for use in (
        lambda: store.put("a", torch.tensor(1)),
        lambda: store.get("a"),
        lambda: lease.__enter__(),
        lambda: store.lease("a").__enter__(),
        lambda: store.delete("a"),
        lambda: store.prefetch(["a"]),
        lambda: "a" in store,
        lambda: list(store),
        lambda: len(store),
        lambda: store.spec("a"),
        lambda: store.commit(),
        lambda: store.statistics(),
        lambda: store.free_on_device(),
        lambda: store.__enter__(),
        lambda: store.create("b", TensorSpec("float32", (1,), 4)),
    ):
        with pytest.raises(StoreClosed, match="is closed"):
            use()


def test_closing_under_a_lease(store: TieredStore) -> None:
    store.put("a", torch.tensor(1))
    with store.lease("a") as a:
        store.close()
        assert a.item() == 1


def test_closing_wakes_who_waits(store: TieredStore) -> None:
    store.put("a", torch.ones(200 << 10))
    with store.lease("a") as a:
        pass
    raised: list[BaseException] = []

    def put() -> None:
        try:
            store.put("b", torch.ones(200 << 10))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    while not store._engine.requests.waiting:
        os.sched_yield()
    store.close()
    thread.join()
    assert isinstance(raised[0], StoreClosed)
    assert a.eq(1).all()


def test_a_forked_child_is_refused(open_store: Open) -> None:
    store = open_store()
    store.put("a", torch.tensor(1))

    def child() -> str:
        refused = []
        for use in (
            lambda: store.get("a"),
            lambda: store.put("a", torch.tensor(2)),
            lambda: len(store),
            lambda: store.commit(),
            lambda: store.__enter__(),
        ):
            try:
                use()
            except ForkedStore:
                refused.append("ForkedStore")
        store.close()
        return " ".join(refused)

    assert in_child(child) == " ".join(["ForkedStore"] * 5)
    store.put("b", torch.tensor(2))  # the parent's is none the worse
    assert (store.get("a").item(), store.get("b").item()) == (1, 2)
    store.commit()
    store.close()
    assert sorted(open_store()) == ["a", "b"]


def test_a_second_process_is_refused(open_store: Open, folder: Path) -> None:
    with open_store() as store:
        store.put("a", torch.tensor(1))
        program = (
            f"import tiered\ntry:\n    tiered.TieredStore.open({str(folder)!r}, dram='1MiB')\n"
            "except tiered.StoreLocked as error:\n    print(error)"
        )
        found = programs.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert str(os.getpid()) in found.stdout, found.stdout + found.stderr
        with pytest.raises(StoreLocked):
            open_store()
        assert store.get("a").item() == 1
    assert open_store().get("a").item() == 1


@pytest.mark.parametrize("dram", [0, 1, MIB - 1, "1023KiB"])
def test_too_small_a_budget_names_the_smallest(open_store: Open, folder: Path, dram: int | str) -> None:
    with pytest.raises(CapacityError, match="the smallest is 1,048,576 bytes"):
        open_store(dram=dram)
    assert not folder.exists()


def test_many_threads(store: TieredStore) -> None:
    """Every tensor is uniform at all times: a torn or foreign one would show."""
    keys = [f"t{number}" for number in range(12)]
    sizes = [1000, 10_000, 40_000]
    failures: list[BaseException] = []
    counts = {"done": 0, "refused": 0}

    def uniform(key: str, tensor: torch.Tensor) -> None:
        low, high = int(tensor.min()), int(tensor.max())
        assert low == high, f"{key} is torn: {low} to {high}"
        assert low % len(keys) == keys.index(key), f"{key} has the bytes of {keys[low % len(keys)]}"

    def work(seed: int) -> None:
        source = random.Random(seed)
        done = refused = 0
        try:
            for _ in range(250):
                chosen = source.sample(keys, source.choice([1, 1, 2]))
                key, index = chosen[0], keys.index(chosen[0])
                value = index + len(keys) * source.randrange(1000)
                what = source.randrange(12)
                try:
                    if what < 3:
                        store.put(key, torch.full((source.choice(sizes),), value))
                    elif what < 6:
                        with store.lease(chosen) as leased:
                            for name, tensor in zip(chosen, leased, strict=True):
                                uniform(name, tensor)
                        del leased, tensor
                    elif what < 8:
                        with store.lease(key, access="write") as tensor:
                            uniform(key, tensor)
                            tensor.fill_(value)
                        del tensor
                    elif what < 10:
                        uniform(key, store.get(key))
                    elif what == 10:
                        store.prefetch(source.sample(keys, 4))
                    elif source.random() < 0.4:
                        store.delete(key)
                    elif source.random() < 0.2:
                        store.commit({"by": seed})
                    done += 1
                except (LeaseConflict, KeyNotFound):
                    refused += 1
        except BaseException as error:
            failures.append(error)
        counts["done"] += done
        counts["refused"] += refused

    for key in keys:
        store.put(key, torch.full((40_000,), keys.index(key)))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert counts["done"] > 1000, counts
    for key in list(store):
        uniform(key, store.get(key))
        store.delete(key)
    pool = store.statistics().tiers[0]
    assert (pool.used, pool.held, pool.copies) == (0, 0, 0)
    assert store.statistics().evictions > 50


# Corruption


def test_a_flipped_byte_is_never_returned_as_data(open_store: Open, folder: Path) -> None:
    tensors = {f"t{number}": numbers(5000 + number, number) for number in range(6)}
    with open_store() as store:
        for key, tensor in tensors.items():
            store.put(key, tensor)
    manifest = load(folder)
    assert manifest is not None
    (record,) = [record for record in manifest.tensors if record.key == "t3"]
    assert record.extent is not None
    for at in (0, 1, 4095, 4096, record.spec.nbytes - 1):
        with open(folder / "data.0", "r+b") as file:
            file.seek(record.extent.offset + at)
            before = file.read(1)[0]
            file.seek(record.extent.offset + at)
            file.write(bytes([before ^ 1 << at % 8]))
        store = open_store()
        for _ in range(2):  # it does not become right by asking again
            for lease in (store.lease("t3"), store.lease(["t1", "t3"], access="write")):
                with pytest.raises(CorruptionError) as raised:
                    lease.__enter__()
                assert (raised.value.key, raised.value.offset) == ("t3", record.extent.offset)
                assert raised.value.path == str(folder / "data.0")
        for key, tensor in tensors.items():
            if key != "t3":
                same(store.get(key), tensor)
        assert store.statistics().links[0].up.failed >= 2
        store.put("t3", tensors["t3"])  # a new one is fine
        push_out(store)
        same(store.get("t3"), tensors["t3"])
        store.close()
        with open(folder / "data.0", "r+b") as file:
            file.seek(record.extent.offset + at)
            file.write(bytes([before]))
    same(open_store().get("t3"), tensors["t3"])


def test_swapped_and_stale_extents_are_corruption(open_store: Open, folder: Path) -> None:
    """Each has a checksum that was right once, for another tensor or another generation."""
    store = open_store(keep=1)
    for key, value in (("a", 1.0), ("b", 2.0)):
        store.put(key, torch.full((1024,), value))
    store.commit()
    store.close()
    manifest = load(folder)
    assert manifest is not None
    places = [record.extent.offset for record in manifest.tensors if record.extent]
    with open(folder / "data.0", "r+b") as file:
        contents = []
        for place in places:
            file.seek(place)
            contents.append(file.read(4096))
        for place, content in zip(places, reversed(contents), strict=True):
            file.seek(place)
            file.write(content)
    store = open_store()
    for key in "ab":
        with pytest.raises(CorruptionError):
            store.get(key)


def test_the_piece_that_is_damaged_is_named(open_store: Open, folder: Path) -> None:
    tensor = numbers(9 * MIB, dtype=torch.uint8)
    with open_store(dram="16MiB") as store:
        store.put("large", tensor)
    manifest = load(folder)
    assert manifest is not None
    extent = manifest.tensors[0].extent
    assert extent is not None
    with open(folder / "data.0", "r+b") as file:
        file.seek(extent.offset + 2 * PIECE_BYTES + 5)
        file.write(bytes([int(tensor[2 * PIECE_BYTES + 5]) ^ 255]))
    with open_store(dram="16MiB") as store, pytest.raises(CorruptionError) as raised:
        store.get("large")
    assert raised.value.offset == extent.offset + 2 * PIECE_BYTES


def test_a_truncated_data_file(open_store: Open, folder: Path) -> None:
    with open_store() as store:
        store.put("a", numbers(1000))
        store.put("b", numbers(30_000))
    os.truncate(folder / "data.0", 8192)
    with pytest.raises(TieredError):
        open_store().get("b")


def written_under_read(store: TieredStore, key: str) -> None:
    with pytest.raises(MisuseError, match=f"{key!r} was written to under a READ lease"), store.lease(key) as tensor:
        tensor.fill_(7)


def test_what_is_written_under_a_read_lease_is_not_stored(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.ones(1000))
        store.commit()
        written_under_read(store, "a")
        assert store.get("a").eq(1).all(), "the disk had its bytes"
        store.commit()
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        assert store.get("a").eq(1).all()


@pytest.mark.parametrize("mend", ["put", "delete", "rollback", "write lease of another"])
def test_a_tensor_whose_only_bytes_were_written_over_is_refused(tmp_path: Path, mend: str) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.ones(1000))
        store.put("b", torch.ones(1000))
        store.commit()
        with store.lease("a", access="write") as tensor:
            tensor.fill_(2)
        del tensor
        written_under_read(store, "a")
        for access in ("read", "write"):
            with pytest.raises(CorruptionError, match="READ lease"), store.lease("a", access=access):
                pass
        with pytest.raises(CorruptionError, match="READ lease"):
            store.get("a")
        with pytest.raises(CorruptionError, match="READ lease"):
            store.commit()
        with store.lease("b", access="write") as tensor:
            tensor.fill_(3)
        del tensor
        if mend == "put":
            store.put("a", torch.full((1000,), 4.0))
        elif mend == "delete":
            store.delete("a")
        else:
            store.rollback()
        if mend != "delete":
            assert store.get("a").eq(4 if mend == "put" else 1).all()
        store.commit()


def test_another_reader_keeps_what_was_written_over_from_being_read_anew(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("a", torch.ones(1000))
        store.commit()
        outer = store.lease("a")
        outer.__enter__()
        written_under_read(store, "a")
        with pytest.raises(CorruptionError, match="READ lease"):
            store.get("a")
        with pytest.raises(MisuseError, match="READ lease"):  # it has seen the wrong bytes, too
            outer.__exit__(None, None, None)
        assert store.get("a").eq(1).all()
