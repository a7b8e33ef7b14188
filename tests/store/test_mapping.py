"""A store as a mapping, beside a ``dict``; many tensors at once; tensors that are made from shapes and arrays."""

from __future__ import annotations

import asyncio
import pickle
import random
import tempfile
import threading
import unittest
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.store.chains import CHAINS, MIB, Chain, nothing_is_held, numbers, same
from tiered import CorruptionError, KeyNotFound, LeaseConflict, MisuseError, SmallTensors, TensorSpec, TieredStore


@pytest.fixture(params=CHAINS, ids=lambda chain: chain.name)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    chain: Chain = request.param
    with chain.open(tmp_path / "state") as opened:
        yield opened
        opened.close()


def nothing_stays(store: TieredStore) -> None:
    """No lease and no alias. A fetch of what came next may be under way, which a newer hint replaces."""
    store.prefetch([])
    nothing_is_held(store)


class AgainstADict(RuleBasedStateMachine):
    """A pool that holds less than all tensors. Patterns have at most one star, whose meaning the oracle spells out."""

    @initialize(hbm=st.booleans())
    def begin(self, hbm: bool) -> None:
        self.home = tempfile.TemporaryDirectory()
        above = {"hbm": "512KiB", "device": "cpu"} if hbm else {}
        self.store = TieredStore.open(Path(self.home.name) / "state", dram=MIB, **above)  # type: ignore[arg-type]
        self.now: dict[str, torch.Tensor] = {}
        self.seed = 0

    names = st.sampled_from([f"{kind}.{number}" for kind in ("a", "b") for number in range(6)])
    sizes = st.sampled_from([0, 1, 1000, 40_000])
    patterns = st.sampled_from([None, "a.*", "*.3", "b.2", "c*"])

    def fresh(self, count: int) -> torch.Tensor:
        self.seed += 1
        return numbers(count, self.seed)

    def chosen(self, pattern: str | None) -> dict[str, torch.Tensor]:
        begin, star, end = ("", "*", "") if pattern is None else pattern.partition("*")
        return {
            key: value
            for key, value in self.now.items()
            if (key.startswith(begin) and key.endswith(end) if star else key == begin)
        }

    @rule(key=names, count=sizes, array=st.booleans())
    def set(self, key: str, count: int, array: bool) -> None:
        value = self.fresh(count)
        self.store[key] = value.numpy()[::-1] if array else value
        self.now[key] = value.flip(0) if array else value

    @rule(key=names)
    def read(self, key: str) -> None:
        if key in self.now:
            same(self.store[key], self.now[key])
            same(self.store.get(key, None), self.now[key])
        else:
            with pytest.raises(KeyNotFound):
                self.store[key]
            assert self.store.get(key, None) is None

    @rule(key=names, default=st.booleans())
    def pop(self, key: str, default: bool) -> None:
        if key in self.now:
            same(self.store.pop(key, None) if default else self.store.pop(key), self.now.pop(key))
        elif default:
            assert self.store.pop(key, 5) == 5
        else:
            with pytest.raises(KeyError):
                self.store.pop(key)

    @rule(key=names)
    def delete(self, key: str) -> None:
        if key in self.now:
            del self.store[key]
            del self.now[key]
        else:
            with pytest.raises(KeyNotFound):
                del self.store[key]

    @rule(counts=st.dictionaries(names, sizes, max_size=6), pairs=st.booleans())
    def update(self, counts: dict[str, int], pairs: bool) -> None:
        values = {key: self.fresh(count) for key, count in counts.items()}
        self.store.update(values.items() if pairs else values)
        self.now.update(values)

    @rule(pattern=patterns)
    def views(self, pattern: str | None) -> None:
        chosen = self.chosen(pattern)
        keys = self.store.keys(pattern)
        assert len(keys) == len(chosen)
        assert keys == chosen.keys(), "a set, like those of a dict"
        assert keys & {"a.1", "z"} == chosen.keys() & {"a.1", "z"}
        assert all((key in keys) == (key in chosen) for key in ("a.0", "b.2", "a.3", "z"))
        found = dict(self.store.items(pattern))
        assert found.keys() == chosen.keys()
        for key, value in found.items():
            same(value, chosen[key])
        assert sum(value.numel() for value in self.store.values(pattern)) == sum(v.numel() for v in chosen.values())

    @rule(keys=st.lists(names, max_size=20))
    def many(self, keys: list[str]) -> None:
        if all(key in self.now for key in keys):
            found = self.store.get_many(keys)
            assert len({tensor.data_ptr() for tensor in found if tensor.numel()}) == sum(bool(t.numel()) for t in found)
            for key, value in zip(keys, found, strict=True):
                same(value, self.now[key])
            for key, value in zip(keys, asyncio.run(self.store.fetch_many(keys)), strict=True):
                same(value, self.now[key])
        else:
            with pytest.raises(KeyNotFound):
                self.store.get_many(keys)

    @rule()
    def reopen(self) -> None:
        self.store.commit()
        self.store.offload()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            nothing_stays(self.store)
            self.store.close()
            self.home.cleanup()


def test_a_store_is_a_mapping() -> None:
    machine = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AgainstADict, settings=machine)  # type: ignore[no-untyped-call]


class AnyValues:
    """Values that are pickled into tensors, for a suite that compares them, and all that a store does not do as a ``dict``."""

    def __init__(self, mapping: TieredStore | SmallTensors) -> None:
        self.mapping = mapping

    def __eq__(self, other: object) -> bool:  # a store is equal to itself alone
        return isinstance(other, AnyValues) and dict(self.items()) == dict(other.items())

    def keys(self) -> Any:  # a store's take a pattern
        return self.mapping.keys()

    def values(self) -> list[Any]:
        return [_plain(one) for one in self.mapping.values()]

    def items(self) -> list[tuple[str, Any]]:
        return [(key, _plain(one)) for key, one in self.mapping.items()]

    def get(self, key: str, default: Any = None) -> Any:  # a store's raises without a default
        return _plain(self.mapping.get(key, default))

    def update(self, *given: Any) -> None:
        try:
            self.mapping.update(*map(_coded_all, given))
        except MisuseError as error:
            raise WrongArgument from error

    def pop(self, key: str, *default: Any) -> Any:
        return _plain(self.mapping.pop(key, *default))

    def popitem(self, *wrong: Any) -> tuple[str, Any]:
        key, value = self.mapping.popitem(*wrong)
        return key, _plain(value)

    def setdefault(self, *given: Any) -> Any:
        return _plain(self.mapping.setdefault(*given[:1], *map(_coded, given[1:])))

    def __getitem__(self, key: str) -> Any:
        return _plain(self.mapping[key])

    def __setitem__(self, key: str, value: Any) -> None:
        self.mapping[key] = _coded(value)

    def __delitem__(self, key: str) -> None:
        del self.mapping[key]

    def __contains__(self, key: object) -> bool:
        return key in self.mapping

    def __iter__(self) -> Iterator[str]:
        return iter(self.mapping)

    def __len__(self) -> int:
        return len(self.mapping)

    def clear(self) -> None:
        self.mapping.clear()


class WrongArgument(TypeError, ValueError):
    """What a store says of wrong arguments by a MisuseError."""


def _coded(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    return pickle.loads(value.numpy().tobytes()) if isinstance(value, torch.Tensor) else value


def _coded_all(given: Any) -> Any:
    """What ``update`` is given, with tensors for values; everything else about it is as it was."""
    if hasattr(given, "keys"):

        class Coded:
            def keys(self) -> Any:
                return given.keys()

            def __getitem__(self, key: str) -> torch.Tensor:
                return _coded(given[key])

        return Coded()
    return ((pair[0], _coded(pair[1]), *pair[2:]) for pair in given) if isinstance(given, Iterable) else given


@pytest.mark.parametrize("kind", ["store", "small tensors"])
def test_what_pythons_own_suite_asks_of_a_mapping(kind: str) -> None:
    suite = pytest.importorskip("test.mapping_tests", reason="this Python has no package test")
    opened: list[TieredStore] = []

    class Protocol(suite.BasicTestMappingProtocol):  # type: ignore[misc, name-defined]
        def _empty_mapping(self) -> AnyValues:
            opened.append(TieredStore.open(None, dram=MIB))
            return AnyValues(opened[-1] if kind == "store" else opened[-1].small("s"))

        def tearDown(self) -> None:
            while opened:
                opened.pop().close()

    found = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Protocol).run(found)
    assert found.testsRun >= 13
    assert not found.failures + found.errors, "\n".join(why for _, why in found.failures + found.errors)


@pytest.fixture(params=["store", "small tensors"])
def mapping(request: pytest.FixtureRequest) -> Iterator[TieredStore | SmallTensors]:
    with TieredStore.open(None, dram=MIB) as opened:
        yield opened if request.param == "store" else opened.small("s")


def test_defaults_and_what_is_taken_out(mapping: TieredStore | SmallTensors) -> None:
    default = torch.ones(2)
    kept = mapping.setdefault("a", default)
    default.zero_()
    kept.zero_()
    assert mapping["a"].tolist() == [1, 1], "what is returned, and what was given, are the caller's"
    assert mapping.setdefault("a", default).tolist() == [1, 1]
    assert mapping.setdefault("array", numpy.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(MisuseError, match="holds tensors, not NoneType"):
        mapping.setdefault("b", None)  # type: ignore[arg-type]
    key, value = mapping.popitem()
    assert key in ("a", "array")
    assert value.numel() in (2, 3)
    assert key not in mapping
    mapping.update({f"{number}": torch.full((2,), number) for number in range(40)})
    mapping.clear()
    assert list(mapping) == []
    mapping.clear()
    with pytest.raises(KeyNotFound, match="no tensor to pop in "):
        mapping.popitem()
    mapping["again"] = torch.ones(1)
    assert list(mapping) == ["again"]
    assert mapping.pop("b", 5) == 5
    for wrong in (42, [("a",)], [("a", torch.ones(1), 3)], ["ab"]):
        with pytest.raises(MisuseError, match="update is given a mapping, or pairs of a key and a tensor, not"):
            mapping.update(wrong)  # type: ignore[arg-type]


def test_of_threads_that_take_out_one_tensor_one_has_it(mapping: TieredStore | SmallTensors) -> None:
    mapping.update({f"{number}": torch.tensor(number) for number in range(60)})
    taken: list[tuple[str, int]] = []

    def take() -> None:
        while True:
            try:
                key, value = mapping.popitem()
            except KeyNotFound:
                return
            except LeaseConflict:  # another thread reads the one that this one would delete
                continue
            taken.append((key, int(value)))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted((f"{number}", number) for number in range(60))


def test_more_than_memory_is_read_in_order(store: TieredStore) -> None:
    below = len(store.statistics().links) and store.statistics().tiers[-1].name == "nvme"
    count = 40 if below else 8
    values = [numbers(30_000, seed) for seed in range(count)]
    store.update((str(number), value) for number, value in enumerate(values))
    order = [random.Random(number).randrange(count) for number in range(100)]
    for number, found in zip(order, store.get_many(map(str, order)), strict=True):
        same(found, values[number])
    nothing_stays(store)


def test_what_a_loop_does_to_the_tensor_at_hand(store: TieredStore) -> None:
    store.update({str(number): numbers(20_000, number) for number in range(8)})
    for key, value in store.items():
        store[key] = value * 2
        with store.lease(key, access="write") as tensor:
            tensor.add_(1)
        del tensor
    for number in range(8):
        same(store[str(number)], numbers(20_000, number) * 2 + 1)
    for key in store.keys("[0-3]"):
        del store[key]
    assert sorted(store) == list("4567")


def test_a_loop_that_ends_early_holds_nothing(store: TieredStore) -> None:
    store.update({str(number): numbers(20_000, number) for number in range(8)})
    for _ in store.values():
        break
    for (key, _), _ in zip(store.items(), range(3), strict=False):
        store.delete(key)
    nothing_stays(store)


def test_a_key_that_is_gone_is_named_when_its_turn_comes(store: TieredStore) -> None:
    store.update({"a": numbers(10, 0), "b": numbers(10, 1)})
    found = store.in_order(["a", "gone", "b"])
    same(next(found), numbers(10, 0))
    with pytest.raises(KeyNotFound, match="'gone'"):
        next(found)
    with pytest.raises(KeyNotFound, match="'gone'"):
        store.get_many(["a", "b", "gone"])
    with pytest.raises(KeyNotFound, match="'gone'"):
        asyncio.run(store.fetch_many(["a", "b", "gone"]))
    nothing_stays(store)


def test_one_key_twice_in_a_lease(store: TieredStore) -> None:
    store.update({"a": numbers(10, 0), "b": numbers(10, 1)})
    with store.lease(["a", "b", "a"]) as found:
        assert len(found) == 3
        assert found[0] is found[2]
        same(found[1], numbers(10, 1))
    del found
    nothing_stays(store)


def test_a_damaged_tensor_among_many(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.update({str(number): torch.full((5000,), float(number)) for number in range(4)})
    file = next((tmp_path / "state").glob("data*"))
    contents = bytearray(file.read_bytes())
    at = contents.index(torch.full((5000,), 2.0).numpy().tobytes())
    contents[at] ^= 1
    file.write_bytes(contents)
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        with pytest.raises(CorruptionError, match="'2'"):
            store.get_many(["0", "1", "2", "3"])
        assert [float(value[0]) for value in store.get_many(["0", "1", "3"])] == [0, 1, 3]
        nothing_stays(store)
        store.close()


def test_fetches_that_are_cancelled(tmp_path: Path) -> None:
    async def some(store: TieredStore) -> int:
        tasks = [asyncio.create_task(store.fetch_many([str(n % 30) for n in range(at, at + 20)])) for at in range(40)]
        await asyncio.sleep(0)
        for number in random.Random(1).sample(range(40), 20):
            tasks[number].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for at, found in enumerate(ended):
            if isinstance(found, BaseException):
                assert isinstance(found, asyncio.CancelledError)
            else:
                assert [float(value[0]) for value in found] == [n % 30 for n in range(at, at + 20)]
        return sum(isinstance(found, asyncio.CancelledError) for found in ended)

    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.update({str(number): torch.full((20_000,), float(number)) for number in range(30)})
        assert asyncio.run(some(store))
        nothing_stays(store)
        store.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_spec_needs_no_size_of_an_element(dtype: torch.dtype, store: TieredStore) -> None:
    name = str(dtype).removeprefix("torch.")
    specs = TensorSpec(name, (2, 3)), TensorSpec(name, (2, 3), dtype.itemsize), TensorSpec(dtype, (2, 3))  # type: ignore[arg-type]
    assert len(set(specs)) == 1
    store.create("a", specs[0])
    store.create("b", (2, 3), dtype=dtype)
    store.create("c", [2, 3], dtype=name)
    assert [store.spec(key) for key in "abc"] == [specs[0]] * 3


def test_a_shape_alone_has_torchs_default_type(store: TieredStore) -> None:
    store.create("a", (2, 3))
    store.create("b", 6)
    store.create("scalar", ())
    assert [store.spec(key) for key in ("a", "b", "scalar")] == [TensorSpec("float32", shape) for shape in ((2, 3), (6,), ())]


def test_arrays(store: TieredStore) -> None:
    fixed = numpy.arange(6).reshape(2, 3)
    fixed.flags.writeable = False
    cases = {
        "plain": numpy.arange(6.0),
        "turned": numpy.arange(6).reshape(2, 3).T[::-1],
        "fixed": fixed,
        "scalar": numpy.float64(3),
        "empty": numpy.zeros((0, 3), numpy.int16),
        "no dimension": numpy.array(True),
    }
    for name, array in cases.items():
        store[name] = array
        found = store[name].numpy()
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert numpy.array_equal(found, array)
    for wrong in (numpy.array(["a"]), numpy.arange(3).astype(">i4"), numpy.zeros(2, "M8[s]")):
        with pytest.raises(MisuseError, match="convert it first"):
            store["wrong"] = wrong
    assert "wrong" not in store


def test_a_state_dict_goes_in_and_comes_out(store: TieredStore) -> None:
    model, other = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
    store.update(model.state_dict())
    other.load_state_dict(dict(store.items()))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_how_it_is_shown(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram="1MiB", hbm="512KiB", device="cpu") as store:
        store["a"] = torch.ones(3)
        name = f"the store in {tmp_path / 'state'}"
        assert repr(store) == f"<TieredStore: {name}, 1 tensors, generation 0, hbm 512.0 KiB, dram 1.0 MiB>"
        assert repr(store.keys("*")) == f"<keys of 1 tensors that match '*' in {name}>"
        store.close()
        assert repr(store) == f"<TieredStore: {name}, closed>"


def test_statistics_are_lines_for_people(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram="1MiB", backend="posix") as store:
        for number in range(3):
            store[str(number)] = torch.ones(100_000)
        store.offload()
        with store.lease("0") as held:
            pass
        said = str(store.statistics()).splitlines()
        assert said[0].startswith("3 tensors, generation 0; I/O backend: posix, ")
        assert said[1].startswith("dram: 392.0 KiB of 1.0 MiB in use")
        assert said[1].endswith("1 copies, 1 of them held by references that outlived a lease")
        assert [line.partition(" in ")[0] for line in said[3:5]] == ["nvme to dram: 390.6 KiB", "dram to nvme: 1.1 MiB"]
        assert said[5].startswith("1 leases, 0 granted at once; callers waited ")
        assert said[6].startswith("process: ")
        del held
        store.close()
