"""Many small tensors by name: what they say, against a dict, and the format of their names."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.fakes import in_child
from tests.store.chains import numbers
from tiered import (
    KeyNotFound,
    LeaseConflict,
    ManifestError,
    MisuseError,
    Owner,
    SmallTensors,
    TensorSpec,
    TieredError,
    TieredStore,
)
from tiered.small.names import (
    HEAD_BYTES,
    UNIT,
    Names,
    NamesRecord,
    PageHead,
    deletion,
    description,
    location,
    number_after,
    presence,
)

MIB = 1 << 20
KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with TieredStore.open(tmp_path / "state", dram=MIB) as opened:
        yield opened
        opened.close()


def held(name: str, store: TieredStore, kind: str) -> list[str]:
    return sorted(key for key in store if key.startswith(f"{name}/{kind}"))


class AgainstADict(RuleBasedStateMachine):
    """Pages of 4 KiB, a pool of 1 MiB, and tensors from 0 bytes to more than a page."""

    @initialize(seed=st.integers(0, 1 << 30))
    def open(self, seed: int) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.now: dict[str, torch.Tensor] = {}
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self.source, self.seed = random.Random(seed), seed
        self.store = self.opened()
        self.small = self.store.small("s", page="4KiB")
        self.reader: TieredStore | None = None

    def opened(self) -> TieredStore:
        return TieredStore.open(Path(self.home.name) / "state", dram=MIB, keep=2)

    def some(self) -> tuple[str, torch.Tensor]:
        self.seed += 1
        kind = self.source.choice(KINDS)
        shape = torch.Size(self.source.choice([(), (0,), (3,), (2, 5), (64,), (7, 31), (200,), (1100,)]))
        if self.seed % 3:  # most tensors are alike, so that several can be stacked
            kind, shape = KINDS[0], torch.Size((2, 5))
        values = numbers(max(1, shape.numel()), self.seed)[: shape.numel()]
        return f"{self.source.randrange(60)}", values.view(shape).to(kind)

    @rule(count=st.integers(1, 30))
    def put(self, count: int) -> None:
        for _ in range(count):
            key, tensor = self.some()
            self.small[key] = tensor
            self.now[key] = tensor

    @rule(count=st.integers(1, 200))
    def update(self, count: int) -> None:
        pairs = [self.some() for _ in range(count)]
        self.small.update(pairs)
        self.now.update(pairs)

    @rule(count=st.integers(1, 40))
    def delete(self, count: int) -> None:
        for key in self.source.sample(sorted(self.now), min(count, len(self.now))):
            self.small.delete(key)
            del self.now[key]

    @rule()
    def clear(self) -> None:
        self.small.clear()
        self.now.clear()

    @rule(page=st.sampled_from(["4KiB", "8KiB"]))
    def make_anew(self, page: str) -> None:
        """The object is the same one, whatever the size of a page was before, or is after the store went back."""
        self.small.drop()
        assert self.store.small("s", page=page) is self.small
        self.now.clear()

    @rule()
    def commit(self) -> None:
        self.states = {self.store.commit(): dict(self.now)} | dict(list(self.states.items())[:1])

    @precondition(lambda self: self.states)
    @rule()
    def read_beside(self) -> None:
        """A reader that stays open goes on to the newest commit."""
        if self.reader is None:
            self.reader = TieredStore.open(Path(self.home.name) / "state", dram=MIB, access="read")
            self.there = self.reader.small("s")
        self.reader.refresh()
        self.beside = self.states[self.reader.generation]
        self.first_call(self.there, self.beside)
        self.compare(self.there, self.beside)

    @precondition(lambda self: self.states)
    @rule(older=st.booleans())
    def rollback(self, older: bool) -> None:
        self.put(20)
        assert len(self.small) == len(self.now)  # what is known is of now
        generation = min(self.states) if older and min(self.states) in self.store.generations else max(self.states)
        self.store.rollback(generation)
        self.now = dict(self.states[generation])

    @precondition(lambda self: self.states)
    @rule()
    def reopen(self) -> None:
        self.rollback(older=False)
        with TieredStore.open(Path(self.home.name) / "state", dram=MIB, access="read") as reader:
            self.compare(reader.small("s"), self.now)
        self.store.close()
        self.store = self.opened()
        self.small = self.store.small("s")

    @rule()
    def offload(self) -> None:
        self.store.offload()

    @rule()
    def read(self) -> None:
        keys = [*self.now, *self.source.choices(sorted(self.now) or ["none"], k=5)] if self.now else []
        self.source.shuffle(keys)
        for found in (self.small.get_many(keys), list(self.small.in_order(keys))):
            assert all(same(one, self.now[key]) for one, key in zip(found, keys, strict=True))

    @invariant()
    def is_the_same(self) -> None:
        if hasattr(self, "small"):
            self.first_call(self.small, self.now)
            self.compare(self.small, self.now)
            if self.reader is not None:
                self.first_call(self.there, self.beside)

    def first_call(self, small: SmallTensors, now: dict[str, torch.Tensor]) -> None:
        """Any one call, whose answer must be of now, whatever is known from before."""
        keys = self.source.sample(sorted(now), min(4, len(now)))
        kinds = {(now[key].dtype, now[key].shape) for key in keys}
        absent = next(key for key in (*map(str, range(60)), "none") if key not in now)
        call = self.source.randrange(10)
        if call == 0 and len(kinds) > 1:
            with pytest.raises(MisuseError, match="differ in shape or type"):
                small.stack(keys)
        elif call in (1, 8, 9) and keys:
            alike = [key for key in now if now[key].dtype == now[keys[0]].dtype and now[key].shape == now[keys[0]].shape]
            assert same(small.stack(alike), torch.stack([now[key] for key in alike]))
        elif call == 2:
            assert all(same(small.get(key, torch.empty(77)), now[key]) for key in keys[:1])
        elif call == 3:
            assert all(same(one, now[key]) for one, key in zip(small.get_many(keys), keys, strict=True))
        elif call == 4:
            assert all(same(one, now[key]) for one, key in zip(small.in_order(keys), keys, strict=True))
        elif call == 5:
            assert all(small.spec(key).shape == tuple(now[key].shape) for key in keys[:1])
        elif call == 6:
            assert len(small) == len(now)
        elif call == 7:
            assert absent not in small
        else:
            with pytest.raises(KeyNotFound):
                small[absent]

    def compare(self, small: SmallTensors, now: dict[str, torch.Tensor]) -> None:
        assert sorted(small) == sorted(now)
        assert len(small) == len(now)
        for key in self.source.sample(sorted(now), min(8, len(now))):
            assert same(small[key], now[key])
            assert small.spec(key).shape == tuple(now[key].shape)
        assert "none" not in small
        assert small.get("none", None) is None

    def teardown(self) -> None:
        if hasattr(self, "store"):
            if self.reader is not None:
                self.reader.close()
            if self.now:
                live = sum(UNIT * max(1, -(-one.nbytes // UNIT)) for one in self.now.values())
                taken = sum(self.store.spec(key).nbytes for key in held("s", self.store, "page"))
                assert taken <= 2 * live + 20 * self.small.page_bytes, "pages that are half empty are merged"
            self.store.rollback() if self.states else None
            self.store.close()
            self.home.cleanup()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(*bits)


def test_any_operations_against_a_dict() -> None:
    few = settings(max_examples=50, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AgainstADict, settings=few)


def test_a_mapping(store: TieredStore) -> None:
    small = store.small("replay")
    small["a"] = torch.arange(4)
    small.update({"b": torch.ones(2, 2), "layer.c": torch.tensor(True)}, d=torch.zeros(0))
    assert list(small) == ["a", "b", "layer.c", "d"]
    assert {key: one.shape for key, one in small.items()} == {"a": (4,), "b": (2, 2), "layer.c": (), "d": (0,)}
    assert list(small.keys("layer.*")) == ["layer.c"]
    assert small.pop("a").tolist() == [0, 1, 2, 3]
    assert "a" not in small
    del small["b"]
    assert len(small) == 2
    assert small.get("b", None) is None
    assert small.spec("d") == TensorSpec("float32", (0,))
    assert "2 tensors" in repr(small)
    assert small.stack(["d", "d"]).shape == (2, 0)


def test_each_error_names_the_key_and_what_to_do(store: TieredStore) -> None:
    small = store.small("s")
    small["a"], small["b"] = torch.zeros(2), torch.zeros(3)
    for call in (small.get, small.spec, small.delete, small.pop, lambda key: small.get_many([key])):
        with pytest.raises(KeyNotFound, match="there is no tensor 'x' among the small tensors 's'"):
            call("x")
    with pytest.raises(MisuseError, match="'a' and 'b' differ in shape or type: get_many"):
        small.stack(["a", "b"])
    with pytest.raises(MisuseError, match="no keys"):
        small.stack([])
    with pytest.raises(MisuseError, match="1025 bytes; small tensors have keys of 1024"):
        small.put("x" * 1025, torch.zeros(1))
    with pytest.raises(MisuseError, match="a key is a str"):
        small.put(7, torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="holds tensors, not list"):
        small["l"] = [1, 2]  # type: ignore[assignment]
    with pytest.raises(MisuseError, match="meta tensor"):
        small.put("m", torch.zeros(2, device="meta"))
    with pytest.raises(MisuseError, match="exist and have pages of 65536 bytes, not 8192: leave page= out"):
        store.small("s", page="8KiB")
    with pytest.raises(MisuseError, match="a name that is not empty"):
        store.small("")
    for key in ("t/page0", "u/open", "v/names3"):
        store[key] = torch.zeros(1)
        with pytest.raises(MisuseError, match=f"'{key}', which is of no small tensors: give these another name"):
            store.small(key[0])
    assert sorted(small) == ["a", "b"]


def test_a_store_that_is_open_for_reading_has_those_of_its_commit(store: TieredStore, tmp_path: Path) -> None:
    store.small("s")["a"] = torch.ones(2)
    store.commit()
    with TieredStore.open(tmp_path / "state", dram=MIB, access="read") as reader:
        with pytest.raises(KeyNotFound, match=r"no small tensors 't' in .*, which is open for reading"):
            reader.small("t")
        assert reader.small("s")["a"].tolist() == [1, 1]
        with pytest.raises(MisuseError, match="reading"):
            reader.small("s").delete("a")


def test_what_was_cut_off_while_it_was_made_is_made(store: TieredStore) -> None:
    store.small("s", page="4KiB")
    store.delete("s/open", owner=Owner("small tensors", "s"))
    small = store.small("s")
    small["a"] = torch.ones(2)
    assert list(small) == ["a"]


def test_what_no_key_needs_leaves_the_disk(store: TieredStore) -> None:
    small = store.small("s", page="4KiB")
    for number in range(5):
        small["large"] = numbers(3000, number)
        assert len(held("s", store, "page")) <= 2
    small.update({f"{number}": numbers(100, number) for number in range(100)})
    for key in list(small):
        small.delete(key)
    small["one"] = torch.zeros(1)
    assert len(held("s", store, "page")) <= 1
    assert repr(small).startswith("<SmallTensors 's': 1 tensors in pages of 4096 bytes, in ")


def test_a_repr_of_what_is_gone_does_not_raise(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        small = store.small("s")
        small.drop()
        assert "closed or dropped" in repr(small)
    assert "closed or dropped" in repr(small)


def test_the_same_name_is_the_same_object(store: TieredStore) -> None:
    assert store.small("s") is store.small("s")
    assert store.small("s") is not store.small("t")


def test_what_is_dropped_leaves_nothing(store: TieredStore) -> None:
    small = store.small("s", page="4KiB")
    small.update({f"{number}": numbers(100, number) for number in range(200)})
    small["large"] = numbers(10_000, 1)
    before = len(store)
    small.drop()
    assert before > 10
    assert list(store) == []
    with pytest.raises(KeyNotFound, match="there are no small tensors 's'"):
        small.get("1")
    again = store.small("s")
    assert list(again) == []


def test_a_commit_and_a_rollback_have_them(store: TieredStore, tmp_path: Path) -> None:
    small = store.small("s", page="4KiB")
    small.update({f"{number}": numbers(100, number) for number in range(100)})
    store.commit()
    with TieredStore.open(tmp_path / "state", dram=MIB, access="read") as reader:
        there = reader.small("s")
        assert len(there) == 100
        small.update({f"{number}": numbers(50, number + 1000) for number in range(50, 200)})
        small.delete("1")
        store.commit()
        assert same(there["60"], numbers(100, 60)), "a reader stays on its commit"
        with pytest.raises(MisuseError):
            there.put("x", torch.zeros(1))
        reader.refresh()
        assert same(there["60"], numbers(50, 1060))
        assert "1" not in there
        assert len(there) == 199
    store.rollback(1)
    assert len(small) == 100
    assert same(small["60"], numbers(100, 60))
    small["new"] = torch.ones(3)
    store.rollback(1)
    assert "new" not in small
    with pytest.raises(KeyNotFound, match="'new'"):
        small.get("new")


@pytest.mark.parametrize("call", ["get", "get_many", "stack", "in_order"])
def test_what_was_known_before_the_store_went_back_or_ahead_refuses_nothing(tmp_path: Path, call: str) -> None:
    """By what is known from before, the tensors differ in shape, or one is larger than its page."""

    def three(small: SmallTensors) -> list[torch.Tensor]:
        if call == "get":
            return [small["a"], small["b"], small["c"]]
        found = list(getattr(small, call)(["a", "b", "c"]))
        return found if call != "stack" else list(torch.stack(found))

    now = {key: numbers(20_000, at) for at, key in enumerate("abc")}
    with TieredStore.open(tmp_path / "state", dram=MIB, keep=5) as store:
        small = store.small("s", page="4KiB")
        first = store.commit()
        small.update({"a": numbers(3, 7), "b": numbers(60_000, 8), "c": numbers(5, 9)})
        other = store.commit()
        with TieredStore.open(tmp_path / "state", dram=MIB, access="read") as reader:
            there = reader.small("s")
            assert there["b"].numel() == 60_000
            store.rollback(first)
            small.update(now)
            last = store.commit()
            store.rollback(other)
            assert small["b"].numel() == 60_000
            store.rollback(last)
            reader.refresh()
            for one in (small, there):
                assert all(same(*pair) for pair in zip(three(one), now.values(), strict=True))
        store.close()


def test_a_page_that_cannot_be_read_stops_nobody_who_does_not_need_it_any_more(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB, keep=5) as store:
        small = store.small("s", page="4KiB")
        small.update({"a": numbers(3, 1), "other": numbers(2000, 2)})
        first = store.commit()
        small["a"] = numbers(2000, 3)
        page = store.spec("s/page2")
        store.commit()
        assert small["a"].numel() == 2000
        store.rollback(first)
        store.create("s/page2", page)
        with store.lease("s/page2", access="write"):  # a conflict for whoever thinks that it has "a"
            assert same(small["a"], numbers(3, 1))
        store.close()


def test_they_are_of_the_page_that_the_record_says(store: TieredStore) -> None:
    small = store.small("s", page="4KiB")
    small["a"] = numbers(30, 1)
    first = store.commit()
    small.drop()
    assert store.small("s", page="8KiB") is small, "two objects would not take turns"
    small["b"] = numbers(40, 2)
    second = store.commit()
    for generation, key, page in ((first, "a", 4096), (second, "b", 8192), (first, "a", 4096)):
        store.rollback(generation)
        assert list(small) == [key]
        assert small.page_bytes == page
        small["more"] = torch.ones(3)


def test_before_they_were_made_there_are_none(store: TieredStore) -> None:
    store["other"] = torch.zeros(1)
    store.commit()
    small = store.small("s")
    small["a"] = torch.ones(2)
    store.rollback()
    with pytest.raises(KeyNotFound, match="there are no small tensors 's'"):
        small["a"]


def test_pages_that_are_half_empty_are_merged_and_the_log_is_written_anew(store: TieredStore) -> None:
    small = store.small("s", page="4KiB")
    source, now = random.Random(1), {}
    for number in range(12_000):
        key = f"a key that is somewhat long {source.randrange(150)}"
        now[key] = numbers(20, number)
        small[key] = now[key]
    assert len(held("s", store, "page")) < 40, "12,000 tensors of 80 bytes went through 300 pages"
    assert len(held("s", store, "names")) < 30, "and 750 KB of names through 200 parts"
    assert all(same(small[key], one) for key, one in now.items())


def test_what_an_exception_left_is_removed(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        small = store.small("s", page="4KiB")
        small.update({f"{number}": numbers(100, number) for number in range(100)})
        for key, left in (("s/page999", torch.zeros(4096, dtype=torch.uint8)), ("s/names77", torch.zeros(1))):
            store.put(key, left, owner=Owner("small tensors", "s"))
        store["s/page998"] = torch.zeros(4096, dtype=torch.uint8)  # is another's, whatever its key looks like
        store["s/pages"] = torch.zeros(1)  # is not one of ours
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.small("s")["x"] = torch.zeros(1)
        assert not {"s/page999", "s/names77"} & set(store)
        assert {"s/pages", "s/page998"} <= set(store)
        assert len(store.small("s")) == 101


def test_threads_take_turns(store: TieredStore) -> None:
    small, wrong = store.small("s", page="4KiB"), list[object]()

    def work(mine: int) -> None:
        try:
            for number in range(150):
                small[f"{mine}/{number % 20}"] = numbers(50, mine * 1000 + number)
                if number % 7 == 0:
                    assert same(small[f"{mine}/{number % 20}"], numbers(50, mine * 1000 + number))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(small) == 80


def test_a_lease_of_the_open_page_is_a_conflict_and_changes_nothing(store: TieredStore) -> None:
    small = store.small("s")
    small["a"] = torch.ones(2)
    with store.lease("s/open"), pytest.raises(LeaseConflict):
        small["a"] = torch.zeros(2)
    assert small["a"].equal(torch.ones(2))


def test_strided_and_conjugated_tensors_are_stored_as_they_read(store: TieredStore) -> None:
    small = store.small("s")
    whole = torch.randn(8, 6, dtype=torch.complex64)
    for key, one in (("t", whole.t()), ("c", whole.conj()), ("e", torch.ones(1).expand(5)), ("s", whole[::2, 1:])):
        small[key] = one
        assert small[key].equal(one.resolve_conj())
        assert small[key].is_contiguous()


def test_get_many_takes_more_pages_than_the_pool_has(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        small = store.small("s")
        now = {f"{number}": numbers(120, number) for number in range(4000)}
        small.update(now)
        keys = random.Random(3).choices(sorted(now), k=6000)
        assert all(same(one, now[key]) for one, key in zip(small.get_many(keys), keys, strict=True))
        assert same(small.stack(keys), torch.stack([now[key] for key in keys]))
        small.prefetch([*keys[:5], "none"])
        assert all(same(one, now[key]) for key, one in small.items())


def test_a_missing_page_is_damage_that_names_it(store: TieredStore) -> None:
    small = store.small("s", page="4KiB")
    small.update({f"{number}": numbers(100, number) for number in range(100)})
    store.delete("s/page1", owner=Owner("small tensors", "s"))
    with pytest.raises(ManifestError, match="'s/page1'"):
        small.get_many(list(small))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("s/open", lambda whole: whole[:100]),
        ("s/open", lambda whole: whole.view(torch.int64)),
        ("s/open", lambda whole: whole.index_fill(0, torch.arange(24, 32), 127)),  # bytes of log
        ("s/open", lambda whole: whole.index_fill(0, torch.arange(56, 64), 127)),  # bytes of the last part
        ("s/open", lambda whole: whole.index_fill(0, torch.arange(64, 200), 9)),
        ("s/names0", lambda whole: whole[:100]),
        ("s/names0", lambda whole: whole.index_fill(0, torch.arange(0, 20), 1)),
        ("s/names0", lambda whole: whole.index_fill(0, torch.arange(0, 20), 3)),
        ("s/small", lambda whole: whole[:-3]),
    ],
)
def test_what_is_damaged_is_said(tmp_path: Path, key: str, change: Any) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        small = store.small("s", page="4KiB")
        small.update({f"{number}": numbers(100, number) for number in range(30)})
        store.put(key, change(store[key]).contiguous(), owner=store.owner_of(key))
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        with pytest.raises(ManifestError, match=r"small tensors 's'|the record of small tensors"):
            list(store.small("s"))
        store.close()


SPECS = [TensorSpec("float32", (3,)), TensorSpec("int64", ()), TensorSpec("bfloat16", (2, 0))]


ENTRIES = st.tuples(st.text(max_size=5), st.integers(0, 99), st.integers(1, 99), st.integers(-1, 2))


@given(st.lists(ENTRIES, max_size=30), st.integers(0, 99))
def test_a_log_says_what_was_written(entries: list[tuple[str, int, int, int]], open_page: int) -> None:
    log, wanted, known = b"", {}, {}
    for key, page, place, number in entries:
        if number < 0:
            log += deletion(key.encode(errors="replace"))
            wanted.pop(key.encode(errors="replace").decode(), None)
            continue
        if number not in known:
            known[number] = len(known)
            log += description(known[number], SPECS[number])
        where = location(page, place, known[number])
        log += presence(key.encode(errors="replace"), where)
        wanted[key.encode(errors="replace").decode()] = where
    names = Names()
    names.read(log + bytes(7))
    names.count()
    assert names.where == wanted
    again = Names()
    again.read(b"".join(names.entries(open_page)))
    again.count()
    assert again.where == {key: where for key, where in wanted.items() if where >> 56 != open_page}
    assert again.specs == names.specs


@given(st.binary(max_size=200), st.booleans())
def test_a_log_of_any_bytes_is_read_or_refused(log: bytes, known: bool) -> None:
    names = Names()
    if known:
        names.read(description(0, SPECS[0]))
    try:
        names.read(log)
    except ValueError:
        return
    names.count()


def test_a_head_is_one_line_of_64_bytes() -> None:
    import ctypes

    assert ctypes.sizeof(PageHead) == HEAD_BYTES
    assert NamesRecord.of(5000).page == 4096


def test_only_exact_keys_are_pages() -> None:
    assert number_after("s/page", "s/page12") == 12
    assert number_after("s/page", "s/page0") == 0
    for other in ("s/page", "s/page/3", "s/pages12", "s/page007", "s/page1x", "t/page1", "s/page" + "9" * 30, "s/page\u0663"):
        assert number_after("s/page", other) is None, other


def test_neighbours_with_similar_names_stay(store: TieredStore) -> None:
    others = {key: numbers(3, at) for at, key in enumerate(["s/pages/3", "s/pages12", "s/page/1", "s/page007", "s/names/x1"])}
    store.update(others)
    beside = store.small("s names", page="4KiB")
    beside.update({f"{number}": numbers(100, number) for number in range(100)})
    table = store.table("s.page", 100, 4)
    table[:] = torch.ones(100, 4)
    small = store.small("s", page="4KiB")
    for nested in (lambda: store.small("s/names"), lambda: store.table("s/page", 100, 4), lambda: store.table("s", 100, 4)):
        with pytest.raises(MisuseError, match=r"the store has the small tensors 's', and .* would lie within that name"):
            nested()
    with pytest.raises(MisuseError, match=r"call delete_owned\(Owner\('small tensors', 's'\)\) first"):
        store.clear()
    small.update({f"{number}": numbers(100, number) for number in range(100)})
    store.commit()
    store.rollback()
    small["x"] = torch.zeros(1)
    small.drop()
    assert all(same(store[key], one) for key, one in others.items())
    assert all(same(beside[f"{number}"], numbers(100, number)) for number in range(100))
    assert table[:].eq(1).all()


def test_tensors_of_many_dimensions(store: TieredStore, tmp_path: Path) -> None:
    small = store.small("s")
    small["64"] = torch.ones([1] * 64)
    with pytest.raises(MisuseError, match="has 65 dimensions; small tensors have at most 64"):
        small["65"] = torch.ones([1] * 65)
    store.commit()
    with TieredStore.open(tmp_path / "state", dram=MIB, access="read") as reader:
        assert reader.small("s")["64"].shape == (1,) * 64


def test_pairs_may_use_one_tensor_for_all(store: TieredStore) -> None:
    small, buffer = store.small("s"), torch.empty(8)
    small.update((f"{number}", buffer.fill_(number)) for number in range(100))
    assert [int(small[f"{number}"][0]) for number in range(100)] == list(range(100))


def test_a_page_that_the_pool_cannot_hold_is_refused_and_leaves_nothing(store: TieredStore) -> None:
    with pytest.raises(MisuseError, match="too large for a pool of 1,048,576 bytes, of which a page takes an eighth"):
        store.small("s", page="2MiB")
    assert list(store) == []
    assert store.small("s", page="128KiB").page_bytes == 128 << 10


def test_of_threads_that_make_them_one_does(store: TieredStore) -> None:
    for trial in range(20):
        meet, seen = threading.Barrier(4), list[object]()

        def work(mine: int, trial: int = trial, meet: threading.Barrier = meet, seen: list[object] = seen) -> None:
            meet.wait()
            try:
                small = store.small(f"s{trial}", page="4KiB")
                small[f"{mine}"] = torch.full((3,), mine)
                seen.append(small)
            except BaseException as error:
                seen.append(error)

        threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, seen))) == 1, seen
        assert sorted(store.small(f"s{trial}")) == ["0", "1", "2", "3"]


def test_a_subclass_is_copied_as_torch_reads_it(store: TieredStore) -> None:
    class Twice(torch.Tensor):
        pass

    small = store.small("s")
    small["a"] = torch.arange(5.0).as_subclass(Twice)  # type: ignore[arg-type]
    small["p"] = torch.nn.Parameter(torch.ones(2))
    assert type(small["a"]) is torch.Tensor
    assert small["a"].tolist() == [0, 1, 2, 3, 4]
    assert small["p"].tolist() == [1, 1]


def test_a_forked_child_is_refused_also_while_a_thread_has_the_lock(store: TieredStore) -> None:
    small = store.small("s")
    small["a"] = torch.ones(2)

    def body() -> str:
        try:
            return f"{small['a']}"
        except TieredError as error:
            return str(error)

    with small._lock:
        said = in_child(body)
    assert "forked child" in said
