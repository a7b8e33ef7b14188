"""Wrong arguments are MisuseErrors that say what is right, and nothing has happened then."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.store.chains import MIB, nothing_is_held, numbers
from tiered import Eviction, Generation, MisuseError, TensorSpec, TieredStore
from tiered.engine.policy import Touch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(folder: Path) -> Iterator[TieredStore]:
    opened = TieredStore.open(folder, dram=MIB)
    yield opened
    opened.close()


Use = Callable[[TieredStore], object]
READY = torch.zeros(1)
WRONG: dict[str, tuple[Use, str]] = {
    "put int": (lambda s: s.put(3, READY), "a key is a str, not int"),  # type: ignore[arg-type]
    "put bytes": (lambda s: s.put(b"w", READY), "a key is a str, not bytes"),  # type: ignore[arg-type]
    "put surrogate": (lambda s: s.put("w\ud800", READY), r"'w\\ud800' is not Unicode text"),
    "put list": (lambda s: s.put("w", [1.0]), "'w': a store holds tensors, not list"),  # type: ignore[arg-type]
    "put array": (lambda s: s.put("w", numpy.ones(3)), r"not ndarray: .*torch.as_tensor.*store\[key\] = array"),  # type: ignore[arg-type]
    "create surrogate": (lambda s: s.create("\udfff", TensorSpec("float32", (1,), 4)), "not Unicode"),
    "create of a text": (lambda s: s.create("w", "float32"), "a TensorSpec, or a shape"),
    "create of a shape of texts": (lambda s: s.create("w", ("a", 4)), "a tuple of sizes"),  # type: ignore[arg-type]
    "create of a negative shape": (lambda s: s.create("w", (-1,)), "a tuple of sizes"),
    "create twice a type": (lambda s: s.create("w", TensorSpec("int8", (1,)), dtype=torch.int8), "an element type already"),
    "create with a type that is none": (lambda s: s.create("w", (1,), dtype="float33"), "'float33' is not an element type"),
    "create with a number as type": (lambda s: s.create("w", (1,), dtype=4), "a TensorSpec, or a shape"),  # type: ignore[arg-type]
    "spec of a type without a size": (lambda s: s.create("w", TensorSpec("float", (1,))), "how many bytes"),
    "get of a list": (lambda s: s["a", "b"], "get_many"),  # type: ignore[index]
    "get with a default of no key": (lambda s: s.get(3, None), "a key is a str"),  # type: ignore[call-overload]
    "set a list": (lambda s: s.__setitem__("w", [1.0]), "torch.as_tensor"),  # type: ignore[arg-type]
    "set an array of objects": (lambda s: s.__setitem__("w", numpy.array([{}])), "which torch does not hold"),
    "update of texts": (lambda s: s.update(["ab", "cd"]), "pairs of a key and a tensor"),  # type: ignore[list-item]
    "keys of a pattern that is none": (lambda s: s.keys(3), "a pattern is a text"),  # type: ignore[arg-type]
    "a value in values": (lambda s: torch.ones(1) in s.values(), "would read all"),
    "a pair in items": (lambda s: ("a", torch.ones(1)) in s.items(), "compare store"),
    "create negative": (lambda s: s.create("w", TensorSpec("float32", (-1,), 4)), r"a tuple of sizes from 0 on, not \(-1,\)"),
    "create list shape": (lambda s: s.create("w", TensorSpec("float32", [1], 4)), "a tuple of sizes"),  # type: ignore[arg-type]
    "create dtype": (lambda s: s.create("w", TensorSpec("float33", (1,), 4)), "'float33' is not an element type"),
    "create quantized": (lambda s: s.create("w", TensorSpec("qint8", (1,), 1)), "'qint8' is not an element type"),
    "create itemsize": (lambda s: s.create("w", TensorSpec("float32", (1,), 2)), "an element of float32 has 4 bytes, not 2"),
    "get int": (lambda s: s.get(3), "a key is a str"),  # type: ignore[arg-type]
    "get list": (lambda s: s.get(["w"]), "a key is a str"),  # type: ignore[arg-type]
    "fetch int": (lambda s: asyncio.run(s.fetch(3)), "a key is a str"),  # type: ignore[arg-type]
    "delete list": (lambda s: s.delete(["w"]), "a key is a str"),  # type: ignore[arg-type]
    "spec None": (lambda s: s.spec(None), "a key is a str"),  # type: ignore[arg-type]
    "lease int": (lambda s: s.lease(3), "a key or of a list of keys"),  # type: ignore[call-overload]
    "lease set": (lambda s: s.lease({"w"}), "a key or of a list of keys"),  # type: ignore[call-overload]
    "lease of ints": (lambda s: s.lease([1, 2]), "a key is a str"),  # type: ignore[list-item]
    "lease twice": (lambda s: s.lease(["w", "w"], access="write"), "twice"),
    "lease access": (lambda s: s.lease("w", access=["read"]), "'read' or 'write'"),  # type: ignore[call-overload]
    "lease tier": (lambda s: s.lease("w", tier=0), "this store has dram"),  # type: ignore[call-overload]
    "prefetch int": (lambda s: s.prefetch(3), "in a list"),  # type: ignore[arg-type]
    "prefetch of ints": (lambda s: s.prefetch([1]), "a key is a str"),  # type: ignore[list-item]
    "speculate int": (lambda s: s.speculate(3), "in a list"),  # type: ignore[arg-type]
    "speculate of ints": (lambda s: s.speculate([1]), "a key is a str"),  # type: ignore[list-item]
    "speculate tier": (lambda s: s.speculate(["w"], tier="nvme"), "no leases in tier 'nvme'"),
    "present int": (lambda s: s.present(3), "in a list"),  # type: ignore[arg-type]
    "present tier": (lambda s: s.present(["w"], tier="nvme"), "no leases in tier 'nvme'"),
    "prefetch tier": (lambda s: s.prefetch(["w"], tier="nvme"), "no leases in tier 'nvme'"),
    "follow int": (lambda s: s.follow(3), "in a list"),  # type: ignore[arg-type]
    "follow pairs": (lambda s: s.follow([("w", "dram")]), "neither a touch nor a key"),  # type: ignore[list-item]
    "follow tier": (lambda s: s.follow([Touch("w", "vram")]), "this store has dram"),
    "follow then": (lambda s: s.follow(["w"], then="stop"), "'again' or 'end'"),  # type: ignore[arg-type]
    "put nested": (lambda s: s.put("n", torch.nested.as_nested_tensor([READY], layout=torch.jagged)), "'n' is a nested tensor"),
    "table block": (lambda s: s.table("t", 4, 4, block="4K"), "block='4K' is not a size"),
    "small page": (lambda s: s.small("t", page=-1), "cannot be negative: page=-1"),
    "commit int": (lambda s: s.commit(5), "meta is a dict"),  # type: ignore[arg-type]
    "commit tensor": (lambda s: s.commit({"w": READY}), "meta holds a Tensor"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_say_what_is_right(store: TieredStore, wrong: str) -> None:
    use, words = WRONG[wrong]
    store.put("w", torch.ones(4))
    with pytest.raises(MisuseError, match=words):
        use(store)
    gc.collect()
    assert list(store) == ["w"]
    assert store.commit() == 1, "nothing happened, and nothing is in the way"
    nothing_is_held(store)


OPENED: dict[str, tuple[dict[str, Any], str]] = {
    "a policy that is none": (
        {"eviction": Eviction(lambda: 5)},  # type: ignore[arg-type, return-value]
        "policy makes a tier's policy, a tiered.EvictionPolicy.*, not 5",
    ),
    "dram float": ({"dram": 1.5}, "a size is an int of bytes or a text"),
    "dram text": ({"dram": "lots"}, "dram='lots' is not a size"),
    "dram negative": ({"dram": -1}, "a size cannot be negative: dram=-1"),
    "hbm bool": ({"hbm": True}, "a size is .*, not hbm=True"),
    "nvme text": ({"nvme": "1GX"}, "nvme='1GX' is not a size"),
    "device": ({"hbm": "1MiB", "device": "gpu"}, "not a device"),
    "keep": ({"keep": "2"}, "keep is a number of generations, a whole number from 1 on"),
    "generation": ({"generation": "1"}, "a generation is an int"),
    "durability": ({"durability": "always"}, "'commit' or 'none'"),
    "scratch generation": ({"durability": "none", "generation": 1}, "no generations"),
    "backend": ({"backend": "spdk"}, "not 'spdk'"),
    "backend int": ({"backend": 5}, "backend, where it is no function that makes one, is 'auto', .* not 5"),
    "path empty": ({"path": ""}, "which is not the name of a file or folder; '.' is the current one"),
    "read and drop": ({"access": "read", "generation": Generation(1, "drop")}, "changes nothing: leave out .*newer='drop'"),
    "eviction": ({"eviction": "lru"}, r"eviction is a tiered.Eviction\(policy=, deadline=\), not 'lru'"),
    "path int": ({"path": 3}, "a str or a pathlib.Path"),
    "path bytes": ({"path": b"state"}, "a str or a pathlib.Path"),
}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Eviction(deadline="x"), "a deadline is a number of seconds, not 'x'"),  # type: ignore[arg-type]
        (lambda: Eviction(deadline=None), "a deadline is a number"),  # type: ignore[arg-type]
        (lambda: Eviction(deadline=-1), "a deadline is a number"),
        (lambda: Eviction("lru"), "policy makes a tier's policy, as tiered.LRU does; 'lru' cannot"),  # type: ignore[arg-type]
        (lambda: Generation("1"), "the number of a generation is an int"),  # type: ignore[arg-type]
        (lambda: Generation(None, "drop"), "newer='drop' removes the generations after one: give its number"),
        (lambda: Generation(1, newer="lose"), "newer is 'keep' or 'drop', not 'lose'"),  # type: ignore[arg-type]
    ],
)
def test_values_that_cannot_be_say_what_is_right(make: Callable[[], object], words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        make()


@pytest.mark.parametrize("wrong", OPENED)
def test_wrong_options_say_what_is_right(folder: Path, wrong: str) -> None:
    options, words = OPENED[wrong]
    with pytest.raises(MisuseError, match=words):
        TieredStore.open(**{"path": folder, "dram": MIB, **options})
    assert not folder.exists()
    TieredStore.open(folder, dram=MIB).close()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_is_not_the_stores(store: TieredStore, device: str) -> None:
    with torch.device(device):
        store.put("w", numbers(100).cpu() if device == "cpu" else torch.ones(100, device="cpu"))
        expected = numbers(100) if device == "cpu" else torch.ones(100, device="cpu")
        store.put("empty", torch.empty(0, device="cpu"))
        for found in (store.get("w"), asyncio.run(store.fetch("w"))):
            assert found.device.type == "cpu"
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        with store.lease(["w", "empty"], access="write") as (w, empty):
            assert {w.device.type, empty.device.type} == {"cpu"}


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_store_cannot_be_copied_to_another_process(store: TieredStore, how: Callable[[object], object]) -> None:
    with pytest.raises(MisuseError, match=r"give other processes store\.reader\(\), or DataLoader a TieredDataset"):
        how(store)
