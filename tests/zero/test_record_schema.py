"""A damaged record raises an error that names what is wrong, and then nothing of model, optimizer or store is another one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.stress.hostile import Images, Job, Model, contents, digest, generators
from tiered import ManifestError, MisuseError, RankError, TieredError, TieredStore, zero
from tiered.zero.paging.storage import model_named
from tiered.zero.rank_stores import META, number_of, shared_json
from tiered.zero.record import dumps, loads

GRADIENTS = 1
"""The image without a pending update."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def store(images: Images) -> Iterator[TieredStore]:
    with TieredStore.open(images.folders[GRADIENTS], dram="1MiB") as opened:
        yield opened
        opened.close()


def put(store: TieredStore, images: Images, change: Callable[[dict[str, Any]], None]) -> None:
    """The record with something changed: as plain dicts and lists, but for tensors."""
    record = loads(images.records[GRADIENTS], "it", store.get)
    change(record)
    kept = iter(key for key in sorted(store) if key.startswith("model/checkpoint/"))
    written = torch.frombuffer(bytearray(dumps(record, "it", lambda _: next(kept))), dtype=torch.uint8)
    store.put("model/checkpoint", written, owner=model_named("model"))


def at(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """``value`` in the place that ``path`` leads to, without the place where it is ``KeyError``."""

    def change(record: Any) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
        for step in way:
            record = record[step]
        if value is KeyError:
            del record[last]
        else:
            record[last] = value

    return change


NUMBER = torch.tensor(0.5)
GRADIENT = "units/0/gradients/first.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (at("version", 2), "another version"),
        (at("version", True), "another version"),
        (at("more", 1), "unknown field `more`"),
        (at("units", KeyError), "missing required field `units`"),
        (at("layout/limit", -1), r"\$\.layout\.limit"),
        (at("layout/limit", 1.5), r"\$\.layout\.limit"),
        (at("layout/chunk", 0), r"\$\.layout\.chunk"),
        (at("layout/chunk", 24), r"\$\.layout\.chunk"),
        (at("layout/chunk", 16), "has .* elements, and a chunk of these states has 16"),
        (at("layout/units/0/0", 3), r"\$\.layout\.units\[0\]\[0\]"),
        (at("layout/units/0/1/0/1", [2**40, 2**40, 0]), "'first.weight' has the shape .* strides overflow"),
        (at("layout/units/0/1/0/2", "torch.nn"), "no element type 'nn'"),
        (at("layout/units/0/1/0/3", "float32"), "'first.weight' is of type 'float32'"),
        (at("layout/units/0/1/0/4", [1]), r"'first.weight' has the strides \[1\]"),
        (at("layout/units/0/1/0/4", [9, 9]), r"'first.weight' has the strides \[9, 9\]"),
        (at("layout/units/0/1/1/0", "first.weight"), "the parameter 'first.weight' twice"),
        (at("layout/share", {"stage": "Stage3", "rank": 2, "ranks": 2}), "it is of rank 2 of 2"),
        (at("layout/share", {"stage": "Stage3", "rank": 0, "ranks": 2}), "it was divided as"),
        (at("units", []), "units, and has 0"),
        (at("units/0/gradients", {}), "lacks a gradient of 'first.bias'"),
        (at("units/0/stale_masters", ["other"]), "a master is stale of 'other'"),
        (at("units/0/pending", {"updates": {}}), "missing required field `chunks_done`"),
        (at(f"{GRADIENT}/there", 1), "there"),
        (at(f"{GRADIENT}/finite", None), "finite"),
        (at(f"{GRADIENT}/scales", [0.5]), "Expected a tensor, got `float`"),
        (at(f"{GRADIENT}/scales", [torch.ones(2)]), "of the gradient of 'first.weight' is no number"),
        (at(f"{GRADIENT}/expected", torch.ones((), dtype=torch.int64)), "of the gradient of 'first.weight' is no number"),
        (at(f"{GRADIENT}/orders", [float("nan")]), "of the gradient of 'first.weight' is no number"),
        (at(f"{GRADIENT}/norms", {"two": NUMBER}), "norms"),
        (at("buffers/normal.running_mean", 3), "Expected a tensor, got `int`"),
        (at("buffers/other.mean", NUMBER), "this model has no buffer 'other.mean'"),
        (at("buffers/normal.other", NUMBER), "this model has no buffer 'normal.other'"),
        (at("buffers/normal.running_mean", KeyError), "the buffer 'normal.running_mean'"),
        (at("persistent", ["other"]), "a state_dict has the buffer 'other'"),
        (at("optimizer", []), r"\$\.optimizer"),
        (at("optimizer", torch.ones(3, dtype=torch.bool)), "too many indices for tensor"),
        (at("units/0", torch.tensor(1)), "too many indices for tensor"),
        (at("random", torch.ones(2, 2)), "too many indices for tensor"),
        (at("optimizer/steps", torch.ones(2)), r"'Tensor' object has no attribute 'keys'|`Tensor` - at `\$\.optimizer\.steps`"),
        (at("optimizer/steps/other", 3), "the optimizer counts steps of 'other'"),
        (at("optimizer/steps/first.weight", -1), r"\$\.optimizer\.steps"),
        (at("optimizer/steps/first.weight", 2**60), r"\$\.optimizer\.steps"),
        (at("optimizer/groups", []), "other parameters than those that were committed"),
        (at("optimizer/groups/0/names", "first.weight"), "a param group has the parameters"),
        (at("optimizer/groups/0/names", ["first.weight"]), "other parameters than those that were committed"),
        (at("optimizer/groups/0/lr", KeyError), "a param group has no 'lr'"),
        (at("optimizer/groups/0/lr", "fast"), "a param group has 'fast' for 'lr'"),
        (at("optimizer/groups/0/lr", float("nan")), "a param group has nan for 'lr'"),
        (at("optimizer/groups/0/betas", (0.9,)), r"a param group has \(0.9,\) for 'betas'"),
        (at("optimizer/groups/0/eps", None), "a param group has None for 'eps'"),
        (at("optimizer/groups/0/maximize", 1), "a param group has 1 for 'maximize'"),
        (at("optimizer/groups/0/initial_lr", []), r"a param group has \[\] for 'initial_lr'"),
        (at("scheduler", 3), "no state of a SequentialLR"),
        (at("scheduler/last_epoch", "x"), "'x' for 'last_epoch' of scheduler="),
        (at("scheduler/step", 3), "3 for 'step' of scheduler="),
        (at("scheduler/_schedulers", [3, 4]), r"for '_schedulers' of scheduler="),
        (at("scaler", {}), "scaler= is enabled, and what was committed was not"),
        (at("scaler/scale", KeyError), "of scaler=, and not"),
        (at("scaler/scale", -1.0), "-1.0 for 'scale' of scaler="),
        (at("scaler/growth_interval", 2.5), "2.5 for 'growth_interval' of scaler="),
        (at("data", {"position": 3}), "data= is a torch.Generator"),
        (at("data", torch.zeros(5, dtype=torch.uint8)), "a random state that data= does not take"),
        (at("random/python", (3, (1, 2), None)), "a random state that Python does not take"),
        (at("random/torch", torch.zeros(5)), "a random state that torch does not take"),
        (at("random/numpy", ("MT19937", 3)), "a random state that NumPy does not take"),
        (at("extra", [1]), r"\$\.extra"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named_and_nothing_is_resumed(
    images: Images, store: TieredStore, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    put(store, images, change)
    before, model = contents(store), Model()
    untouched = digest([dict(model.state_dict()), generators()])
    told = _refusal(lambda: zero.page(model, store, existing="resume"))
    if told:
        assert re.search(says, told), told
        assert digest([dict(model.state_dict()), generators()]) == untouched
    else:
        job = Job(model)
        here = digest(copy.deepcopy(job.state()))
        with pytest.raises((ManifestError, MisuseError), match=says):
            zero.resume(model, job.optimizer, **job.others)
        assert digest(job.state()) == here
    assert contents(store) == before


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (ManifestError, MisuseError) as error:
        return str(error)
    return ""


def test_a_record_that_is_right_is_taken(images: Images, store: TieredStore) -> None:
    """As it was, and with what another optimizer, buffer or release may leave."""
    put(store, images, at("optimizer/groups/0/lr", 3))
    job = Job(zero.page(Model(), store, existing="resume"))
    assert zero.resume(job.model, job.optimizer, **job.others)["step"] == 3
    assert job.optimizer.param_groups[0]["lr"] == 3
    job.goes_on()


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "a dict with 0 keys"),
        ({"tuple": 3}, "3 is no list"),
        ({"dict": [[1]]}, "not enough values"),
        ({"dict": [["a", 1], ["a", 2]]}, "one key twice"),
        ({"dict": [[{"dict": []}, 1]]}, "unhashable"),
        ({"stored": 3}, "3 is no key"),
        ({"stored": "model/param/first"}, "'model/param/first' for a part of it"),
        ({"stored": "model/checkpoint/99"}, "model/checkpoint/99"),
        ({"dtype": "nn"}, "no element type 'nn'"),
        ({"array": 3}, "an array is written as 3"),
        ({"array": {"tensor": ["bfloat16", [1], "AAA="]}}, "BFloat16"),
        ({"tensor": ["float32", [-1], "AAAAAA=="]}, "a tensor of shape"),
        ({"tensor": ["float32", [True], "AAAAAA=="]}, "a tensor of shape"),
        ({"tensor": ["float32", [2**40, 2**40, 0], ""]}, "RuntimeError"),
        ({"tensor": ["quint8", [1], "AA=="]}, "no element type 'quint8'"),
        ({"tensor": ["float32", [1], "\u00e9"]}, "ValueError"),
        ({"object": 1}, "'object' is no kind of value"),
        (json.loads("[" * 150 + "]" * 150), "nested deeper"),
    ],
)
def test_what_no_record_says_in_json(images: Images, store: TieredStore, document: Any, says: str) -> None:
    written = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    store.put("model/checkpoint", written, owner=model_named("model"))
    with pytest.raises(ManifestError, match=f"the checkpoint of 'model' is damaged, or of another version: .*{says}"):
        zero.page(Model(), store, existing="resume")


@pytest.mark.parametrize(
    ("key", "tensor", "says"),
    [
        ("model/checkpoint", torch.ones(3), r"'model/checkpoint' is float32 of shape \[3\]"),
        ("model/param/.", None, "lacks 'model/param/.'"),
        ("model/param/.", torch.zeros(64, dtype=torch.uint8), r"'model/param/.' in .* is uint8 of shape \[64\]"),
        ("model/param/./grad", None, "lacks 'model/param/./grad'"),
        ("model/param/./m#0", torch.zeros(24), "has 24 elements, and a chunk"),
        ("model/param/./v#0", None, "lacks 'model/param/./v#0'"),
        ("model/param/./v#0", torch.zeros(48, dtype=torch.float64), "is float64 of shape"),
    ],
)
def test_a_record_beside_tensors_of_another_size(
    store: TieredStore, key: str, tensor: torch.Tensor | None, says: str
) -> None:
    assert key in store
    if tensor is None:
        store.delete(key, owner=model_named("model"))
    else:
        store.put(key, tensor, owner=model_named("model"))
    model = Model()
    before, untouched = contents(store), digest(dict(model.state_dict()))
    with pytest.raises(ManifestError, match=says):
        zero.page(model, store, existing="resume")
    assert (contents(store), digest(dict(model.state_dict()))) == (before, untouched)


class Stubborn:
    def state_dict(self) -> Any:
        return {"at": 3}

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("at")


def test_what_fails_late_undoes_what_came_before(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram="1MiB") as store:
        job = Job(zero.page(Model(), store))
        job.backward()
        job.step()
        zero.commit(job.model, job.optimizer, scheduler=job.scheduler, scaler=job.scaler, data=Stubborn())
        store.close()
    with TieredStore.open(tmp_path / "state", dram="1MiB") as store:
        job = Job(zero.page(Model(), store, existing="resume"))
        here = digest(copy.deepcopy(job.state()))
        with pytest.raises(MisuseError, match=r"data= cannot take over what was committed of it \(KeyError\('at'\)\)"):
            zero.resume(job.model, job.optimizer, scheduler=job.scheduler, scaler=job.scaler, data=Stubborn())
        assert digest(job.state()) == here
        store.close()


def test_a_takeover_that_fails_leaves_nothing(images: Images, tmp_path: Path) -> None:
    """Of another store's checkpoint: a tensor that it needs is damaged."""
    with TieredStore.open(tmp_path / "old", dram="1MiB") as old:
        job = Job(zero.page(Model(), old))
        job.backward()
        job.step()
        job.optimizer.flush()
        zero.commit(job.model, job.optimizer, **job.others)
        old.close()
    from tiered.format.generations import load

    manifest = load(tmp_path / "old")
    assert manifest is not None
    record = next(one for one in manifest.tensors if one.key.endswith("/v#0"))
    assert record.extent is not None
    with (tmp_path / "old" / "data.0").open("r+b") as file:
        file.seek(record.extent.offset)
        file.write(b"\xff")
    with TieredStore.open(tmp_path / "new", dram="1MiB") as store:
        store.put("mine", torch.ones(3))
        before = contents(store)
        with pytest.raises(TieredError, match="v#0"):
            zero.page(Model(), store, existing="resume", source=tmp_path / "old")
        assert contents(store) == before


def test_other_keys_below_a_checkpoint_are_no_numbers(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram="1MiB") as store:
        model = zero.page(nn.Linear(4, 4), store)
        for key in ("\u00b2", "x/y"):
            store.put(f"model/checkpoint/{key}", torch.ones(2), owner=model_named("model"))
        store.put("model/checkpoint/1", torch.ones(2))  # of the user
        zero.commit(model)
        assert [key for key in store if key.startswith("model/checkpoint/")] == ["model/checkpoint/1"]


# States of parameters that stay in memory


@pytest.mark.parametrize(
    ("key", "data", "says"),
    [
        ("optimizer/steps", torch.tensor([1.0, 1.0]), "are no step counts"),
        ("optimizer/steps", torch.tensor([[1, 1]]), "are no step counts"),
        ("optimizer/steps", torch.tensor([1, -1]), "step counts go from 0"),
        ("optimizer/0/layout", b"[]", "is damaged, or of another version"),
        ("optimizer/0/layout", b"{", "is damaged, or of another version"),
        ("optimizer/0/layout", {"version": 2}, "version 2, and this release reads 1"),
        ("optimizer/0/layout", {"limit": "16"}, r"\$\.limit"),
        ("optimizer/0/layout", {"limit": 0}, r"\$\.limit"),
        ("optimizer/0/layout", {"limit": 2**40}, r"\$\.limit"),
        ("optimizer/0/layout", {"limit": 16}, "and a chunk of these states has 16"),
        ("optimizer/0/layout", {"parameters": 3}, r"\$\.parameters"),
        ("optimizer/0/layout", {"more": 3}, "more"),
        ("optimizer/0/layout", torch.ones(3), r"float32 of shape \[3\]"),
        ("optimizer/0/0/m#0", torch.ones(3), "has 3 elements, and a chunk"),
        ("optimizer/0/0/v#0", torch.ones(20, dtype=torch.float16), "is float16 of shape"),
    ],
)
def test_states_of_parameters_in_memory(tmp_path: Path, key: str, data: Any, says: str) -> None:
    model = nn.Linear(8, 8)
    with TieredStore.open(tmp_path / "state", dram="1MiB") as store:
        optimizer = zero.AdamW(model.parameters(), store=store)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if isinstance(data, dict):
            data = json.dumps({**json.loads(store.get(key).numpy().tobytes()), **data}).encode()
        written = data if isinstance(data, torch.Tensor) else torch.frombuffer(bytearray(data), dtype=torch.uint8)
        store.put(key, written, owner=store.owner_of(key))
        before, values = contents(store), digest(dict(model.state_dict()))
        with pytest.raises(ManifestError, match=says):
            zero.AdamW(model.parameters(), store=store, existing="resume")
        assert (contents(store), digest(dict(model.state_dict()))) == (before, values)
        store.close()


# What ranks say


class TwoRanks:
    """The other one says ``data``, of ``length`` bytes."""

    def __init__(self, data: bytes, length: int | None = None) -> None:
        self._data, self._length = data, len(data) if length is None else length

    def all_gather(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        if mine.dtype is torch.int64:
            return torch.stack([mine, torch.tensor([self._length])])
        other = torch.zeros_like(mine)
        other[: len(self._data)] = torch.frombuffer(bytearray(self._data), dtype=torch.uint8)
        return torch.stack([mine, other])


def test_what_another_rank_says_is_looked_at() -> None:
    assert shared_json(TwoRanks(b"[1,2]"), [3], list[int]) == [[3], [1, 2]]  # type: ignore[arg-type]
    for data in b'["1"]', b"[1.5]", b"{}", b"[1", b"\xff", b"\0", b"[" * 100_000, b'"\x80\x04."':
        with pytest.raises(RankError, match="rank 1 says what no rank of this release says"):
            shared_json(TwoRanks(data), [3], list[int])  # type: ignore[arg-type]
    with pytest.raises(RankError, match="will tell the others 4,611,686,018,427,387,904 bytes"):
        shared_json(TwoRanks(b"1", 2**62), [3], list[int])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said", [3, None, "x", [], {}, {"name": "x", "number": 1, "of": 2}, {"name": "a" * 32, "number": "1", "of": 2}]
)
def test_what_a_commit_says_of_ranks_is_looked_at(said: object) -> None:
    assert number_of({META: {"name": "a" * 32, "number": 4, "of": 2}}) == 4
    assert number_of({}) == 0
    with pytest.raises(ManifestError, match="is not what ranks write there"):
        number_of({META: said})
