"""What is kept comes back as it was: values, size, strides, dtype, and how it lies in memory. And nested values."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch

from tiered import TieredStore
from tiered.zero.paging.recompute.nested import flatten, paths, rebuild
from tiered.zero.paging.saved_tensors import SMALL, ActivationStore

PIECE = 32 << 10
MANY = torch.arange(40 * 30 * 20, dtype=torch.float32).view(40, 30, 20)
LITTLE = torch.arange(5 * 4 * 3, dtype=torch.float32).view(5, 4, 3)


@pytest.mark.parametrize("tensor", [MANY, LITTLE], ids=["large", "small"])
@pytest.mark.parametrize(
    "look",
    [
        lambda t: t,
        lambda t: t.permute(1, 2, 0),
        lambda t: t.transpose(0, 1),
        lambda t: t[1:, 1:, 1:],
        lambda t: t[:, ::2],
        lambda t: t[:, :1],
        lambda t: t[0].expand(40, *t.shape[1:]),
        lambda t: t[:, :, :1].expand(-1, -1, 50),
        lambda t: t.contiguous().view(-1)[3:],
        lambda t: t.to(torch.bfloat16).view(-1)[5:],
        lambda t: t > 7,
        lambda t: t.to(torch.complex64).transpose(0, 2),
        lambda t: t[:, :0],
        lambda t: t.sum(),
        lambda t: t.double().requires_grad_(),
    ],
)
def test_it_comes_back_as_it_was(store: TieredStore, tensor: torch.Tensor, look: Any) -> None:
    keeper = ActivationStore(store, "m", PIECE)
    original = look(tensor)
    whole = keeper.keep("x", original, [original.numel()])
    assert whole is not None
    parts = [(whole[0], original)]
    if original.dim() and len(original) > 3:
        sizes = [2, len(original) - 3, 1]
        found = keeper.keep("y", original, sizes)
        assert found is not None
        parts += zip(found, original.split(sizes), strict=True)
    for kept, expected in parts:
        for _ in range(2):
            back = kept.restore()
            assert torch.equal(back, expected)
            assert (back.shape, back.stride(), back.dtype) == (expected.shape, expected.stride(), expected.dtype)
            assert not back.requires_grad
            assert not expected.numel() or back.data_ptr() % 64 == expected.data_ptr() % 64
            if any(size > 1 and stride == 0 for size, stride in zip(back.shape, back.stride(), strict=True)):
                assert back.untyped_storage().nbytes() < back.nbytes, "an expanded tensor is not written out"
    del parts, kept, whole
    if original.dim() and len(original) > 3:
        del found
    store.offload()  # waits for transfers of what is to be deleted
    assert len(store) == 0


def test_large_ones_go_to_the_store_in_pieces_and_small_ones_do_not(store: TieredStore) -> None:
    keeper = ActivationStore(store, "m", PIECE)
    small = keeper.keep("small", torch.zeros(SMALL - 1, dtype=torch.uint8), [SMALL - 1])
    assert len(store) == 0
    large = keeper.keep("large", torch.zeros(3 * PIECE + 1, dtype=torch.uint8), [3 * PIECE + 1])
    assert sorted(store) == [f"tiered.saved/m/large#0.{piece}" for piece in range(4)]
    more_than_the_pool = torch.randn(600_000)
    huge = keeper.keep("huge", more_than_the_pool, [600_000])
    assert huge is not None
    assert torch.equal(huge[0].restore(), more_than_the_pool)
    assert store.statistics().tiers[0].peak <= store.statistics().tiers[0].capacity
    del small, large, huge


def test_a_tensor_that_did_not_change_is_kept_once(store: TieredStore) -> None:
    keeper = ActivationStore(store, "m", PIECE)
    tensor = torch.randn(5000)
    first, second = keeper.keep("a", tensor, [5000]), keeper.keep("b", tensor, [5000])
    assert first == second
    halves = keeper.keep("a", tensor, [2500, 2500])
    assert halves != first
    tensor.add_(1)
    third = keeper.keep("a", tensor, [5000])
    assert first is not None
    assert third is not None
    assert third[0] is not first[0]
    assert torch.equal(third[0].restore(), first[0].restore() + 1)
    assert "tiered.saved/m/a#1" in store
    del first, second
    store.offload()
    assert "tiered.saved/m/a#0" not in store
    fourth = keeper.keep("a", torch.randn(5000), [5000])
    assert "tiered.saved/m/a#0" in store, "the smallest number that is free"
    del fourth, third, halves


def test_overlapping_and_sparse_ones_are_left_to_the_caller(store: TieredStore) -> None:
    keeper = ActivationStore(store, "m", PIECE)
    assert keeper.keep("windows", torch.randn(9000).unfold(0, 8, 1), [8993]) is None
    assert keeper.keep("sparse", torch.eye(3).to_sparse(), [3]) is None
    assert keeper.keep("conjugated", torch.ones(3, dtype=torch.complex64).conj(), [3]) is None


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Any
    hidden: Any = None
    derived: int = dataclasses.field(init=False, default=3)


Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "value",
    [
        7,
        (),
        (1, [2, {"a": 3, "b": (4,)}], None),
        Output([1, 2], {"x": 3}),
        Pair(1, Pair(2, 3)),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        torch.Size((2, 3)),
        {"a": Output, 2: "text"},
    ],
)
def test_nested_values_come_apart_and_together(value: Any) -> None:
    leaves, structure = flatten(value)
    again = rebuild(structure, iter(leaves))
    assert again == value
    assert type(again) is type(value)
    assert flatten(again)[1] == structure
    assert len(list(paths(structure))) == len(leaves)
    if isinstance(value, collections.defaultdict):
        assert again["new"] == []


def test_places_are_named() -> None:
    assert list(paths(flatten((1, {"mask": Output(2, [3])}))[1])) == [
        "[0]",
        "[1]['mask'].logits",
        "[1]['mask'].hidden[0]",
    ]
