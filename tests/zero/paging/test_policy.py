"""Storage in bf16 (or fp16), computing in fp32: the bits of the same in memory, the bytes of the narrow type."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.zero.harness import clipping, equal, train
from tests.zero.models import SIZES, Mixed, Tied, parameter_groups
from tests.zero.narrow import MasterAdamW
from tests.zero.paging.test_in_backward import Stack, traffic
from tiered import CapacityError, Eviction, MisuseError, TieredStore, zero

BF16 = zero.Policy(storage=torch.bfloat16, compute=torch.float32)


def twins(
    store: TieredStore, reference: nn.Module, storage: torch.dtype, update: str
) -> tuple[MasterAdamW, nn.Module, zero.AdamW]:
    paged = copy.deepcopy(reference)
    for parameter in reference.parameters():  # the frozen ones, too
        parameter.data = parameter.data.to(storage).float()
    masters = MasterAdamW(parameter_groups(reference), storage, lr=1e-3)
    zero.page(paged, store, policy=zero.Policy(storage=storage))
    assert equal(reference.state_dict(), paged.state_dict())
    return masters, paged, zero.AdamW(parameter_groups(paged), lr=1e-3, update=update)


@pytest.mark.parametrize(
    ("kind", "storage"),
    quick(
        [(kind, dtype) for kind in ("plain", "checkpoint", "reentrant", "mixed") for dtype in (torch.bfloat16, torch.float16)],
        [("reentrant", torch.bfloat16), ("mixed", torch.float16)],
    ),
)
def test_training_is_that_of_memory_bit_for_bit(store: TieredStore, kind: str, storage: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = Mixed() if kind == "mixed" else Tied(*SIZES[kind], mode=kind)
    masters, paged, optimizer = twins(store, reference, storage, "on_fetch")
    expected = train(reference, masters, clipping(reference))
    assert train(paged, optimizer, optimizer.clip_grad_norm_) == expected
    assert equal(reference.state_dict(), paged.state_dict())
    kept = {key.split("/")[-1].split("#")[0] for key in store if "#" in key}
    assert kept == {"m", "v", "lo" if storage is torch.bfloat16 else "master"}
    assert not [key for key in store if key.endswith("/converted")]


@pytest.mark.parametrize("kind", quick(["plain", "checkpoint", "mixed"], ["checkpoint"]))
def test_within_backward(store: TieredStore, kind: str) -> None:
    torch.manual_seed(0)
    reference = Mixed() if kind == "mixed" else Tied(*SIZES[kind], mode=kind)
    masters, paged, optimizer = twins(store, reference, torch.bfloat16, "in_backward")
    assert train(paged, optimizer, batches=1) == train(reference, masters, batches=1)
    assert equal(reference.state_dict(), paged.state_dict())


def test_bytes_of_a_step(store: TieredStore) -> None:
    model = zero.page(Stack(width=144, layers=24), store, paging=zero.Paging(prefetch="off"), policy=BF16)
    optimizer = zero.AdamW(model.parameters(), update="in_backward")
    for step in range(4):
        before = traffic(store.statistics())
        model.loss(step).backward()
        optimizer.step()
        moved = traffic(store.statistics()) - before
    assert moved / sum(parameter.numel() for parameter in model.parameters()) <= 26


def test_loading_rounds_and_state_dict_shows_what_is_computed_with(store: TieredStore) -> None:
    model = zero.page(Tied(), store, policy=BF16)
    other = Tied()
    model.load_state_dict(other.state_dict())
    for name, value in model.state_dict().items():
        original = other.state_dict()[name]
        rounded = original.to(torch.bfloat16).float() if name != "scale" else original
        assert torch.equal(value, rounded)
        assert value.dtype is torch.float32


def test_a_model_that_was_built_in_the_store(store: TieredStore) -> None:
    torch.manual_seed(0)
    expected = Stack()
    torch.manual_seed(0)
    with zero.init(store):
        model = Stack()
    zero.page(model, store, policy=BF16)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name].to(torch.bfloat16).float())
    assert store.spec("model/param/layers.0").nbytes == 2 * (128 * 128 + 128)


def test_the_smallest_budget_that_it_names_works(tmp_path: Path) -> None:
    wide = nn.Sequential(nn.Conv1d(512, 1024, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 8))  # which is not sliced
    with (
        TieredStore.open(tmp_path / "small", dram="2MiB") as small,
        pytest.raises(CapacityError, match=r"smallest that works is ([0-9,]+) bytes") as caught,
    ):
        zero.page(wide, small, policy=BF16)
    number = int(str(caught.value).split("smallest that works is ")[1].split(" ")[0].replace(",", ""))
    with TieredStore.open(tmp_path / "enough", dram=number, eviction=Eviction(deadline=20)) as enough:
        zero.page(wide, enough, policy=BF16)
        optimizer = zero.AdamW(wide.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            wide(torch.randn(4, 512, 1)).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        assert not torch.isnan(wide.state_dict()["0.weight"]).any()


def test_types_that_make_no_sense_are_refused() -> None:
    for storage, compute in ((torch.float64, torch.float32), (torch.bfloat16, torch.float16), (torch.int8, torch.float32)):
        with pytest.raises(MisuseError, match=r"^(storage is torch.bfloat16, .*|compute is torch.float32), not torch"):
            zero.Policy(storage=storage, compute=compute)


def test_a_reader_casts_beside_the_store(store: TieredStore) -> None:
    """A store that is open for reading makes no tensors."""
    model = zero.page(Tied(), store, policy=BF16)
    zero.commit(model)
    expected = [model.loss(batch).item() for batch in range(2)]
    folder, pool = store.folder, store.statistics().tiers[0].capacity
    store.close()
    with TieredStore.open(folder, dram=pool, access="read") as reader:
        again = zero.page(Tied(), reader, policy=BF16, existing="resume")
        with torch.no_grad():
            assert [again.loss(batch).item() for batch in range(2)] == expected
            assert torch.equal(next(again.parameters()) + 0, next(again.parameters()) + 0)
