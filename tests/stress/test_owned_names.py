"""Promise 25: what a call deletes or replaces is its owner's. Tensors of others below the same name stay, also where the call
is stopped, and whoever would lie within another's name is refused.

Each call that deletes runs beside tensors of the user with keys like its own, and beside owners with similar names; it is
stopped at each deletion and each put that it makes, in turn, and then made again by the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.stress.tally import Tally
from tiered import KeyNotFound, MisuseError, Owner, TieredEmbedding, TieredStore, zero
from tiered.tables.sparse import SparseAdamW
from tiered.zero.paging.storage import model_named

PROMISE = "25 (names are owned)"


def _model(size: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(2 * size - 1)), nn.Linear(6, 3))


def _trained(store: TieredStore, name: str, size: int) -> tuple[nn.Module, Any]:
    model = zero.page(_model(size), store, name=name)
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    model.state_dict()
    return model, optimizer


def _paged(store: TieredStore, size: int) -> Callable[[], object]:
    _trained(store, "a", size)
    return lambda: zero.page(_model(size), store, name="a", existing="overwrite")


def _initialised(store: TieredStore, size: int) -> Callable[[], object]:
    _trained(store, "a", size)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "tiered": {"name": "a"},
    }

    def make() -> object:
        with zero.init(store):
            model = _model(size)
        return zero.initialize(model=model, config=config)

    return make


def _committed(store: TieredStore, size: int) -> Callable[[], object]:
    model, optimizer = _trained(store, "a", size)
    large = {"large": torch.ones(9000), "another": torch.ones(9000)}
    zero.commit(model, optimizer, extra=large)
    return lambda: zero.commit(model, optimizer, extra={"large": torch.zeros(9000)})


def _forgotten(store: TieredStore, size: int) -> Callable[[], object]:
    _trained(store, "a", size)
    return lambda: store.delete_owned(model_named("a"))


def _resident(store: TieredStore, size: int) -> Callable[[], object]:
    model = _model(size)

    def made() -> Any:
        return zero.AdamW(model.parameters(), store=store, name="a", existing="overwrite")

    optimizer = made()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return made


def _table(store: TieredStore, size: int) -> Callable[[], object]:
    table = store.table("a", 40 * size, 4, block="128B")
    embedding = TieredEmbedding(table)
    optimizer = SparseAdamW(embedding.parameters(), lr=0.1)
    embedding(torch.arange(30 * size)).sum().backward()
    optimizer.step()
    return table.delete


def _small(store: TieredStore, size: int) -> Callable[[], object]:
    small = store.small("a", page="4KiB")
    small.update({f"{at}": torch.full((200,), float(at)) for at in range(20 * size)})
    return small.drop


def _rows(store: TieredStore, size: int) -> Callable[[], object]:
    """Changes of small tensors, which remove pages and parts of the log."""
    small = store.small("a", page="4KiB")
    small.update({f"{at}": torch.full((200,), float(at)) for at in range(20 * size)})

    def change() -> None:
        for at in range(0, 20 * size, 2):
            small.put(f"{at}", torch.full((300,), -1.0))
        for at in range(1, 20 * size, 2):
            if f"{at}" in small:
                small.delete(f"{at}")

    return change


def _built(store: TieredStore, size: int) -> Callable[[], object]:
    def build() -> None:
        with zero.init(store):
            model = _model(size)
        zero.page(model, store, name="a", existing="overwrite")

    return build


def _cache(store: TieredStore, size: int) -> Callable[[], object]:
    """A cache of keys and values that takes the place of one that has tokens."""
    transformers = pytest.importorskip("transformers")
    from tiered.integrations.transformers import TieredCache

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2 * size}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()

    def made() -> Any:
        return TieredCache(model, store, name="a", block=4, existing="overwrite")

    model.generate(torch.arange(12)[None], cache=made(), max_new_tokens=4, do_sample=False)
    return made


CALLS: dict[str, Callable[[TieredStore, int], Callable[[], object]]] = {
    "page(existing='overwrite')": _paged,
    "zero.initialize": _initialised,
    "zero.commit": _committed,
    "delete_owned": _forgotten,
    "AdamW(store=, existing='overwrite')": _resident,
    "table.delete": _table,
    "small.drop": _small,
    "small tensors that change": _rows,
    "zero.init and page": _built,
    "TieredCache": _cache,
}

LIKE_ITS_OWN = (
    *("a", "a/", "a/x", "a/param", "a/param/x", "a/param/0/m#99", "a/input/x#0", "a/checkpoint/x", "a/files/config.json"),
    *("a/kv/90/0", "a/kv/recorded", "a/7/layout", "a/block99", "a/block", "a/page99", "a/names77", "a/exp_avg/x"),
    "zero.init/77",
)
"""Keys of tensors of the user below the name of what is deleted."""


def _neighbours(store: TieredStore) -> None:
    """Have others in the store: tensors of the user, and owners with names that begin alike."""
    for at, key in enumerate(LIKE_ITS_OWN):
        store.put(key, torch.full((5,), float(at)))
    store.table("ab", 30, 4, block="128B")[:] = torch.ones(30, 4)
    store.small("a.b")["a"] = torch.ones(3)
    zero.page(_model(), store, name="a b")
    zero.page(_model(), store, name="b/a")
    zero.AdamW(_model().parameters(), store=store, name="a-optimizer")
    store.put("aa/kv/record", torch.ones(3), owner=Owner("cache", "aa"))


def _of_others(store: TieredStore) -> dict[str, torch.Tensor]:
    whose = {key: store.owner_of(key) for key in store}
    under_way = ("a", "zero.init", "a.importing", "a.replaced")
    return {key: store.get(key) for key, owner in whose.items() if owner is None or owner.name not in under_way}


class _Stop(BaseException):
    """Strikes a call where Ctrl-C may."""


def _stopped_at(patch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Have the deletion or put with this number raise; return a list that counts those that were made."""
    made: list[int] = []

    def struck(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            made.append(len(made))
            if len(made) == number:
                raise _Stop
            return original(*given, **options)

        return call

    for name in ("put", "create", "delete"):
        patch.setattr(TieredStore, name, struck(getattr(TieredStore, name)))
    return made


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("size", quick([1, 3], [1]))
@pytest.mark.parametrize("name", quick(CALLS, ["page(existing='overwrite')", "table.delete", "small.drop"]))
def test_what_others_have_stays(name: str, size: int, tally: Tally) -> None:
    """However far the call came, and when it is made again."""
    number, done = 1, False
    while not done:
        with TieredStore.open(None, dram="4MiB") if name != "zero.commit" else _on_disk() as store:
            call = CALLS[name](store, size)
            _neighbours(store)
            before = _of_others(store)
            with pytest.MonkeyPatch.context() as patch:
                made = _stopped_at(patch, number)
                try:
                    call()
                    done = True
                except _Stop:
                    tally.count(name, 1)
            _same(_of_others(store), before)
            if not done:
                assert len(made) >= number
                _again(call, name, store)
                _same(_of_others(store), before)
                assert not [owner for owner in store.owners() if owner.kind == "import"]
            store.refuse_commits("this is a trial")
            number += 1
    assert number > 2, "the call was never stopped"


@pytest.mark.parametrize(
    "name", quick(["zero.initialize", "zero.init and page", "page(existing='overwrite')"], ["page(existing='overwrite')"])
)
def test_a_model_stays_until_the_one_in_its_place_is_whole(name: str, tally: Tally) -> None:
    """However far the call came, the store has all of the one or all of the other."""
    number, done, found = 1, False, []
    while not done:
        with TieredStore.open(None, dram="4MiB") as store:
            call = CALLS[name](store, 1)
            was = {key: store.get(key) for key in store.owned(model_named("a"))}
            with pytest.MonkeyPatch.context() as patch:
                _stopped_at(patch, number)
                try:
                    call()
                    done = True
                except _Stop:
                    tally.count(name, 1)
            found.append({key: store.get(key) for key in store.owned(model_named("a"))})
            number += 1
    assert number > 4, "the call was hardly ever stopped"
    for one in found:
        _same(one, was if one.keys() == was.keys() else found[-1])
    assert found[0].keys() == was.keys() != found[-1].keys()


def _again(call: Callable[[], object], name: str, store: TieredStore) -> None:
    """Make the call that was stopped once more; of a step that was cut off the state is said to be half of one."""
    try:
        call()
    except MisuseError as error:
        assert (name, "rollback" in str(error)) == ("zero.commit", True)


def _on_disk() -> TieredStore:
    import tempfile

    return TieredStore.open(tempfile.mkdtemp(), dram="4MiB")


MAKERS: dict[str, Callable[[TieredStore, str], object]] = {
    "model": lambda store, name: zero.page(_model(), store, name=name),
    "optimizer": lambda store, name: zero.AdamW(_model().parameters(), store=store, name=name),
    "table": lambda store, name: store.table(name, 10, 2),
    "small tensors": lambda store, name: store.small(name),
    "cache": lambda store, name: store.put(f"{name}/kv/record", torch.ones(3), owner=Owner("cache", name)),
}


@pytest.mark.parametrize("first", MAKERS)
@pytest.mark.parametrize("second", MAKERS)
def test_no_name_lies_within_anothers(first: str, second: str, tally: Tally) -> None:
    for one, other in (("n", "n/inside"), ("n/inside", "n"), ("n", "n")):
        if first == second and one == other:
            continue
        with TieredStore.open(None, dram="4MiB") as store:
            MAKERS[first](store, one)
            before = {key: store.get(key) for key in store}
            with pytest.raises(MisuseError) as told:
                MAKERS[second](store, other)
            assert f"{first} '{one}'" in str(told.value)
            assert f"{second} '{other}'" in str(told.value)
            _same({key: store.get(key) for key in store}, before)
            for free in ("n2", "n.inside"):
                MAKERS[second](store, free)
            tally.count(f"{second} {other} beside {first} {one}", 1)


@pytest.mark.parametrize("kind", MAKERS)
def test_nobody_replaces_what_is_anothers(kind: str, tally: Tally) -> None:
    """Neither the user a tensor of an owner, nor an owner one of the user."""
    with TieredStore.open(None, dram="4MiB") as store:
        MAKERS[kind](store, "n")
        owner = Owner(kind, "n")
        keys = store.owned(owner)
        before = {key: store.get(key) for key in keys}
        for key in keys:
            for change in (
                lambda key=key: store.put(key, torch.ones(1)),
                lambda key=key: store.create(key, [2]),
                lambda key=key: store.delete(key),
                lambda key=key: store.pop(key),
                lambda key=key: store.put(key, torch.ones(1), owner=Owner("table", "elsewhere")),
                lambda key=key: store.rename({key: "free"}),
            ):
                with pytest.raises(MisuseError, match=rf"tensor '{key}' belongs to the {kind} 'n'"):
                    change()
                tally.count(kind, 1)
        _same({key: store.get(key) for key in keys}, before)
        assert store.delete_owned(owner) == len(keys)
        assert owner not in store.owners()
    with TieredStore.open(None, dram="4MiB") as store:
        for key in keys:
            store.put(key, torch.full((3,), 7.0))
        with pytest.raises(MisuseError, match=r"user|first"):
            MAKERS[kind](store, "n")
        assert all(store.get(key).eq(7).all() for key in keys)


def test_a_store_is_cleared_of_what_is_its_users() -> None:
    with TieredStore.open(None, dram="4MiB") as store:
        store.put("mine", torch.ones(2))
        table = store.table("t", 10, 2)
        with pytest.raises(MisuseError, match="has tensors of the table 't', and clear"):
            store.clear()
        assert store.popitem()[0] == "mine"
        with pytest.raises(KeyNotFound):
            store.popitem()
        table.delete()
        store.put("mine", torch.ones(2))
        store.clear()
        assert not len(store)


def test_owners_are_in_commits(tmp_path: Any) -> None:
    with TieredStore.open(tmp_path / "s", dram="4MiB") as store:
        _neighbours(store)
        whose = {key: store.owner_of(key) for key in store}
        one = store.commit()
        store.rename({"a/x": "moved"})
        store.rename({"ab/block0": "theirs/0"}, owner=Owner("table", "ab"), to=Owner("cache", "theirs"))
        store.commit()
        assert store.owner_of("theirs/0") == Owner("cache", "theirs")
        with TieredStore.open(tmp_path / "s", dram="4MiB", access="read") as reader:
            assert {key: reader.owner_of(key) for key in reader} == {key: store.owner_of(key) for key in store}
        store.rollback(one)
        assert {key: store.owner_of(key) for key in store} == whose
        store.commit()
        store.close()
    with TieredStore.open(tmp_path / "s", dram="4MiB") as store:
        assert {key: store.owner_of(key) for key in store} == whose
