"""Deferred tensors: what torch makes of them has the bits of the same calls on tensors in memory, whole and in parts."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tiered import MisuseError, SafetensorsError, TieredStore, zero
from tiered.format.safetensors import WeightFiles
from tiered.zero.construction import deferred
from tiered.zero.construction.deferred import Deferred, Files
from tiered.zero.paging.units import ALL

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def known() -> Tensors:
    torch.manual_seed(0)
    return {
        "a": torch.randn(6, 8),
        "b": torch.randn(6, 8),
        "half": torch.randn(6, 8).half(),
        "bf16": torch.randn(4, 3, 8).bfloat16(),
        "cube": torch.randn(4, 6, 8),
        "counts": torch.arange(48).view(6, 8),
        "one": torch.tensor(2.5),
        "none": torch.empty(0, 8),
    }


@pytest.fixture
def files(known: Tensors, tmp_path: Path) -> Iterator[tuple[Files, dict[str, Deferred]]]:
    save_file(known, tmp_path / "x.safetensors")
    with Files() as opened:
        yield opened, opened.open(tmp_path / "x.safetensors")


MOVED: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda t: t["a"],
    "alias": lambda t: t["a"][...],
    "cast": lambda t: t["a"].to(torch.bfloat16),
    "exact cast": lambda t: t["half"].to(torch.float32),
    "casts in a row": lambda t: t["a"].to(torch.bfloat16).to(torch.float64).to(torch.float16),
    "to integers": lambda t: t["a"].to(torch.int32),
    "cat": lambda t: torch.cat([t["a"], t["b"], t["none"]]),
    "cat inside": lambda t: torch.cat([t["a"], t["b"]], dim=-1),
    "stack": lambda t: torch.stack([t["a"], t["b"]]),
    "stack inside": lambda t: torch.stack([t["a"], t["b"]], dim=2),
    "experts": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["a"]])], dim=1),
    "transpose": lambda t: t["cube"].transpose(0, 2),
    "t": lambda t: t["a"].t().contiguous(),
    "permute": lambda t: t["cube"].permute(2, 0, 1).to(torch.bfloat16),
    "chunks": lambda t: torch.chunk(t["a"], 3, dim=0)[1],
    "chunks inside": lambda t: torch.chunk(t["cube"], 3, dim=1)[2].contiguous(),
    "split": lambda t: torch.split(t["a"], [1, 4, 1])[1],
    "unbind": lambda t: torch.unbind(t["cube"], 1)[4],
    "select": lambda t: t["cube"][-1],
    "rows": lambda t: t["a"][2:5].clone(),
    "columns": lambda t: t["cube"][:, 1:3, 2:-1],
    "a row of a row": lambda t: t["cube"][1][2:4],
    "parameter": lambda t: nn.Parameter(t["a"]).detach(),
    "scalar": lambda t: t["one"].to(torch.float16),
    "empty": lambda t: t["none"].to(torch.float16),
}
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "every other": lambda t: t["a"][::2],
    "reshape": lambda t: t["cube"].reshape(12, 16).transpose(0, 1).reshape(-1, 4),
    "sum": lambda t: t["a"].T @ t["a"],
    "interleave": lambda t: t["a"].reshape(3, 2, 8).transpose(1, 2).reshape(6, 8).contiguous(),
    "mixed types": lambda t: torch.cat([t["a"], t["half"]]),
    "product": lambda t: (t["a"] * 2 + t["b"])[1:3],
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("small", [False, True], ids=["", "in pieces"])
@pytest.mark.parametrize("name", [*MOVED, *COMPUTED])
def test_values_are_those_in_memory(
    name: str, small: bool, files: tuple[Files, dict[str, Deferred]], known: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        monkeypatch.setattr(deferred, "READ_AT_ONCE", 40)
    opened, tensors = files
    function = (MOVED | COMPUTED)[name]
    found, expected = function(tensors), function(known)
    assert isinstance(found, Deferred)
    assert (found.stride(), found.device) == (expected.stride(), expected.device)
    assert same(found.whole(), expected)
    if expected.dim():
        for at in (0, -1 % max(1, len(expected)), slice(1, 3), slice(0, len(expected))) if len(expected) else ():
            for dtype in expected.dtype, torch.float64:
                part = torch.full_like(expected[at], 7, dtype=dtype)
                found.write_to(part, at)
                assert same(part, expected[at].to(dtype))
    if expected.dim() == 2 and expected.numel():  # a place whose rows are not next to each other
        wide = torch.zeros(expected.shape[0], 2 * expected.shape[1], dtype=expected.dtype)
        found.write_to(wide[:, ::2])
        assert same(wide[:, ::2], expected)
    assert (opened.last is None) is (name in MOVED)  # nothing was computed whole


STRAIGHT = ["as it is", "alias", "cast", "cat", "stack", "experts", "chunks", "split", "select", "rows"]
"""What reads whole rows, each to one place."""


@pytest.mark.parametrize("name", [*MOVED, *COMPUTED])
def test_what_is_told_ahead_is_what_is_read(
    name: str, files: tuple[Files, dict[str, Deferred]], known: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that order; nothing else is told."""
    _, tensors = files
    function = (MOVED | COMPUTED)[name]
    found, expected = function(tensors), function(known)
    told: list[tuple[str, int, int]] = []
    done: list[tuple[str, int, int]] = []
    read = Files.read

    def reading(self: Files, of: WeightFiles, name: str, start: int, into: memoryview) -> None:
        done.append((name, start, len(into)))
        read(self, of, name, start, into)

    monkeypatch.setattr(Files, "read", reading)
    monkeypatch.setattr(WeightFiles, "expect", lambda self, reads: told.extend(reads))
    for at in [ALL, *([0, slice(1, 3)] if expected.dim() and len(expected) else [])]:
        told.clear()
        done.clear()
        deferred.expect([(found, at), (found, at)])
        for _ in range(2):
            found.write_to(torch.empty_like(expected if at == ALL else expected[at]), at)
        if name in STRAIGHT and at == ALL:
            assert told == done
        rest = iter(done)
        assert all(one in rest for one in told)


def test_random_chains(files: tuple[Files, dict[str, Deferred]], known: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "READ_AT_ONCE", 300)
    steps: list[Callable[[Any, random.Random], Any]] = [
        lambda x, r: x.transpose(0, 1),
        lambda x, r: torch.cat([x, x], dim=r.randrange(x.dim())),
        lambda x, r: torch.stack([x, x], dim=r.randrange(x.dim())),
        lambda x, r: x[r.randrange(len(x))] if x.dim() > 2 else x,
        lambda x, r: x.narrow(r.randrange(x.dim()), 0, 1 + r.randrange(min(x.shape))),
        lambda x, r: x.to(r.choice([torch.float16, torch.bfloat16, torch.float32])),
        lambda x, r: torch.chunk(x, 2, dim=0)[0],
        lambda x, r: x.contiguous(),
        lambda x, r: x + 1,
    ]
    for seed in range(120):
        draw = random.Random(seed)
        chosen = [(draw.choice(steps), draw.random()) for _ in range(draw.randrange(1, 7))]
        results = []
        for tensors in files[1], known:
            value = tensors["cube"]
            for step, number in chosen:
                value = step(value, random.Random(number))
            results.append(value)
        found, expected = results
        assert same(found.whole(), expected), seed
        part = torch.empty_like(expected[-1:], memory_format=torch.contiguous_format)
        found.write_to(part, slice(len(expected) - 1, len(expected)))
        assert same(part, expected[-1:]), seed


def test_what_needs_values_gets_them(files: tuple[Files, dict[str, Deferred]], known: Tensors) -> None:
    _, tensors = files
    assert torch.equal(tensors["a"], known["a"])
    assert torch.equal(tensors["a"], tensors["a"].clone())
    assert torch.equal(tensors["one"], known["one"])
    assert not torch.equal(tensors["a"], tensors["b"])
    assert not torch.equal(tensors["a"], tensors["cube"])
    assert tensors["one"].item() == 2.5
    assert bool((tensors["counts"] == 47).any())
    target = torch.zeros(6, 8, dtype=torch.bfloat16)
    target.copy_(tensors["a"])
    assert same(target, known["a"].bfloat16())
    target[1:3] = tensors["b"][1:3]
    assert same(target[1:3], known["b"][1:3].bfloat16())
    mixed = tensors["a"] + target
    assert type(mixed) is torch.Tensor
    assert same(mixed, known["a"] + target)
    empty = torch.zeros_like(tensors["a"], dtype=torch.int8)
    assert type(empty) is torch.Tensor
    assert same(empty, torch.zeros(6, 8, dtype=torch.int8))
    torch.manual_seed(3)
    drawn = torch.bernoulli(tensors["a"].abs().clamp(0, 1))
    torch.manual_seed(3)
    assert same(torch.Tensor.detach(drawn), torch.bernoulli(known["a"].abs().clamp(0, 1)))
    assert same(copy.deepcopy(tensors["a"]).whole(), known["a"])


def test_functions_are_called_at_once_where_that_is_said(
    files: tuple[Files, dict[str, Deferred]], known: Tensors
) -> None:
    opened, tensors = files
    opened.at_once = True
    assert type(tensors["a"] * 2) is torch.Tensor
    assert same(tensors["a"] * 2, known["a"] * 2)
    assert isinstance(tensors["a"][1:], Deferred)


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.mul_(2),
        lambda t: t[1].zero_(),
        lambda t: t.copy_(torch.zeros(6, 8)),
        lambda t: torch.add(t, 1, out=t),
        lambda t: setattr(t, "data", torch.zeros(6, 8)),
        lambda t: torch._foreach_zero_([torch.ones(3), t]),
        lambda t: torch._foreach_mul_([t], 2),
        lambda t: torch._foreach_copy_([t], [torch.zeros(6, 8)]),
    ],
)
def test_writes_are_refused(write: Callable[[Any], Any], files: tuple[Files, dict[str, Deferred]]) -> None:
    opened, tensors = files
    assert not opened.refused
    with torch.no_grad(), pytest.raises(MisuseError, match="whose values are still in a file"):
        write(tensors["a"])
    assert opened.refused


def test_files_that_are_wrong(known: Tensors, tmp_path: Path) -> None:
    save_file(known, tmp_path / "x.safetensors")
    with Files() as opened:
        tensors = opened.open(tmp_path / "x.safetensors")
    with pytest.raises(MisuseError, match="read after its files were closed"):
        tensors["a"].whole()
    with pytest.raises(MisuseError, match="cannot be saved"):
        torch.save(tensors["a"], tmp_path / "saved")
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.truncate((tmp_path / "x.safetensors").stat().st_size - 1)
    with Files() as opened, pytest.raises(SafetensorsError, match=r"x\.safetensors"):
        opened.open(tmp_path / "x.safetensors")


def test_a_model_of_deferred_parameters_is_paged(tmp_path: Path) -> None:
    """Tied parameters stay one, buffers are read, and a failure gives the parameters back."""
    torch.manual_seed(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
            self.out.weight = self.embed.weight
            self.norm = nn.BatchNorm1d(16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.out(self.norm(self.embed(ids)))
            return logits

    expected = Model().eval()
    values = {name: value for name, value in expected.state_dict().items() if name != "out.weight"}
    save_file(values, tmp_path / "m.safetensors")
    with Files() as opened, TieredStore.open(None, dram="2MiB") as store:
        tensors = opened.open(tmp_path / "m.safetensors")
        model = Model().eval()
        for name, tensor in tensors.items():
            where, _, last = name.rpartition(".")
            module = model.get_submodule(where)
            if last in module._buffers:
                module._buffers[last] = tensor
            else:
                setattr(module, last, nn.Parameter(tensor))
        model.out.weight = model.embed.weight
        model.embed.weight.marked = True  # type: ignore[attr-defined]
        contents = (tmp_path / "m.safetensors").read_bytes()
        (tmp_path / "m.safetensors").write_bytes(contents[:-100])
        with pytest.raises(SafetensorsError, match=r"m\.safetensors became shorter while it was read"):
            zero.page(model, store)
        assert isinstance(model.embed.weight, Deferred)
        assert list(store) == []
        (tmp_path / "m.safetensors").write_bytes(contents)
        zero.page(model, store)
        assert model.out.weight is model.embed.weight
        assert model.embed.weight.marked
        assert not any(isinstance(buffer, Deferred) for buffer in model.buffers())
        ids = torch.arange(40)
        assert torch.equal(model(ids), expected(ids))
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected.state_dict()[name])


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_gathered_in_any_order(
    seed: int, files: tuple[Files, dict[str, Deferred]], known: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permuted, some of them, one twice, runs over the end of a matrix; in pieces, and in three dimensions."""
    monkeypatch.setattr(deferred, "READ_AT_ONCE", 100)
    draw = random.Random(seed)
    order = [draw.randrange(12) for _ in range(12)]
    if seed % 3:
        begin = draw.randrange(12)
        order = [*range(begin, 12), *range(begin)] if seed % 3 == 1 else [*range(1, 6), 0, *range(6, 12)]
    expected = torch.cat([known["a"], known["b"]])[order].view(3, 4, 8)
    found = Deferred.gathered([files[1]["a"], files[1]["b"]], torch.tensor(order), (3, 4, 8))
    assert same(found.whole(), expected)
    for at in (2, slice(1, 3)):
        part = torch.empty_like(expected[at])
        found.write_to(part, at)
        assert same(part, expected[at])
    assert same(found[1:, 2, 3:6].whole(), expected[1:, 2, 3:6])
    assert same(found.transpose(0, 2).to(torch.float64).whole(), expected.transpose(0, 2).double())
    straight = Deferred.gathered([files[1]["a"]], torch.arange(6), (2, 3, 8))
    assert same(straight.whole(), known["a"].view(2, 3, 8))


def test_rows_are_converted_some_at_a_time(
    files: tuple[Files, dict[str, Deferred]], known: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "READ_AT_ONCE", 60)
    most: list[int] = []

    def twice(rows: torch.Tensor) -> torch.Tensor:
        most.append(len(rows))
        return rows[:, ::2] * 2

    found = Deferred.converted(files[1]["a"], twice, (6, 4), torch.float32)
    assert same(found.whole(), known["a"][:, ::2] * 2)
    assert same(found[2:5].t().whole(), known["a"][2:5, ::2].t() * 2)
    assert max(most) < 6
    computed = Deferred.computed(lambda values: values.sum(0), files[1]["a"], (8,))
    assert same(computed.whole(), known["a"].sum(0))
