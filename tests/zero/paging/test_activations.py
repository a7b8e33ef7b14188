"""``zero.page(..., activations=)``: the numbers of memory wherever activations are, what it did, and nothing left behind."""

from __future__ import annotations

import copy
import gc
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import tiered
from tests.quick import quick
from tests.store.saved import nothing_is_left
from tests.zero.harness import clipping, equal, in_memory, train
from tests.zero.models import Tied, parameter_groups
from tests.zero.paging.splitting import Language
from tiered import ChangedInPlace, MisuseError, TieredStore, zero
from tiered.zero.paging.pager import pager_of

DRAM = "2MiB"
STEPS = 5


def saved(store: TieredStore) -> list[str]:
    return [key for key in store if key.startswith("tiered.saved/")]


def pager_gone(store: TieredStore) -> None:
    nothing_is_left(store)
    assert saved(store) == []


@pytest.fixture(params=["store", "recompute"])
def activations(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def language(seed: int = 0) -> Language:
    torch.manual_seed(seed)
    return Language(64, 3)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, clip: object) -> list[float]:
    torch.manual_seed(1)
    return train(model, optimizer, clip, steps=STEPS, loss=lambda n: model.loss(n, batch=8))  # type: ignore[arg-type, operator]


@pytest.mark.parametrize(
    ("activations", "update"),
    quick(
        product(["store", "recompute"], ["on_fetch", "in_backward"]), [("store", "in_backward"), ("recompute", "on_fetch")]
    ),
)
def test_training_with_dropout_has_the_bits_of_memory(store: TieredStore, activations: str, update: str) -> None:
    reference, paged = language(), language()
    zero.page(paged, store, activations=activations)  # type: ignore[arg-type]
    torch_adamw = torch.optim.AdamW(parameter_groups(reference), lr=1e-3, fused=True)
    if update == "in_backward":
        torch.manual_seed(1)
        wanted = train(reference, torch_adamw, steps=STEPS, batches=1, loss=lambda n: reference.loss(n, batch=8))
        optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3, update="in_backward")
        torch.manual_seed(1)
        found = train(paged, optimizer, steps=STEPS, batches=1, loss=lambda n: paged.loss(n, batch=8))
    else:
        wanted = trained(reference, torch_adamw, clipping(reference))
        optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
        found = trained(paged, optimizer, optimizer.clip_grad_norm_)
    assert found == wanted
    assert equal(paged.state_dict(), reference.state_dict())
    said = zero.statistics(paged)
    if activations == "store":
        assert said.activations is not None
        assert said.activations.offloaded > 0
        assert said.activations.restored > 0
        assert said.activations.in_store == said.activations.in_memory == 0
        assert said.computed_again == 0
    else:
        assert said.activations is None
        assert said.computed_again >= STEPS
    pager_gone(store)


QUICK = [("tied", "store"), ("reentrant", "store"), ("mixed", "store"), ("tied", "recompute")]
LONG = [("plain", "store"), ("checkpoint", "store"), *((kind, "recompute") for kind in ("plain", "checkpoint", "reentrant"))]


@pytest.mark.parametrize(("kind", "activations"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.soak) for one in LONG)])
def test_any_model_has_the_bits_of_memory(store: TieredStore, kind: str, activations: str) -> None:
    twin = in_memory(kind)
    paged = copy.deepcopy(twin.untrained)
    zero.page(paged, store, activations=activations)  # type: ignore[arg-type]
    optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
    assert train(paged, optimizer, optimizer.clip_grad_norm_) == twin.numbers
    assert equal(paged.state_dict(), twin.model)
    pager_gone(store)


def test_with_a_device_activations_go_down_the_same_chain(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="2MiB", hbm="2MiB", device="cpu") as store:
        reference, paged = language(), language()
        zero.page(paged, store, activations="store")
        optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
        wanted = trained(reference, torch.optim.AdamW(parameter_groups(reference), lr=1e-3, fused=True), clipping(reference))
        assert trained(paged, optimizer, optimizer.clip_grad_norm_) == wanted
        pager_gone(store)
        store.close()


def test_offload_activations_around_a_paged_model(store: TieredStore, tmp_path: Path) -> None:
    reference, paged = language(), language()
    zero.page(paged, store)
    torch.manual_seed(1)
    reference.loss(1, batch=8).backward()
    with TieredStore.open(tmp_path / "other", dram="1MiB", durability="none") as other:
        for where in (store, other):
            torch.manual_seed(1)
            with tiered.offload_activations(where, keep=0, min_bytes=1) as block:
                loss = paged.loss(1, batch=8)
            assert store.statistics().tier("dram").held == 0, "what is saved of a parameter pins no unit"
            loss.backward()
            assert block.statistics().restored > 0
            for (name, wanted), found in zip(reference.named_parameters(), paged.parameters(), strict=True):
                assert (wanted.grad is None) == (found.grad is None), name
                assert wanted.grad is None or torch.equal(found.grad + 0, wanted.grad), name
            paged.zero_grad()
            del loss
            nothing_is_left(where)


@pytest.mark.parametrize("how", ["memory", "recompute", "store"])
def test_a_graph_that_is_dropped_leaves_nothing(store: TieredStore, how: str) -> None:
    paged = language()
    zero.page(paged, store, activations=how)  # type: ignore[arg-type]
    made: list[StorageWeakRef] = []
    for module in paged.modules():
        module.register_forward_hook(lambda module, given, found: made.append(StorageWeakRef(found.untyped_storage())))
    loss = paged.loss(1, batch=8)
    del loss
    gc.collect()
    paged.loss(2, batch=8).backward()
    paged.zero_grad()
    gc.collect()
    assert sum(not storage.expired() for storage in made) == 0
    pager_gone(store)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.change = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))  # which saves its result
        y = self.second(x)
        if self.change:
            x.add_(1)
        return y.sum() + x.sum()


@pytest.mark.parametrize("how", ["memory", "store"])
def test_what_is_changed_in_place_raises_as_torch_does(store: TieredStore, how: str) -> None:
    model = InPlace()
    model.change = True
    x = torch.randn(128, 64)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).backward()
    zero.page(model, store, activations=how)  # type: ignore[arg-type]
    loss = model(x)
    with pytest.raises(ChangedInPlace, match="modified by an inplace operation"):
        loss.backward()
    del loss
    model.change = False
    model(x).backward()
    assert model.first.weight.grad is not None
    model.zero_grad()
    pager_gone(store)


def test_backward_a_second_time(store: TieredStore, activations: str) -> None:
    reference, paged = language(), language()
    zero.page(paged, store, activations=activations)  # type: ignore[arg-type]
    grads = []
    for model in (reference, paged):
        torch.manual_seed(1)
        loss = model.loss(1, batch=8)
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([None if p.grad is None else p.grad + 0 for p in model.parameters()])
        del loss
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    paged.zero_grad()
    pager_gone(store)


def test_a_rollback_leaves_nothing(store: TieredStore) -> None:
    paged = language()
    zero.page(paged, store, activations="store")
    optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
    zero.commit(paged, optimizer)
    loss = paged.loss(1, batch=8)
    zero.rollback(paged, optimizer)
    with pytest.raises(MisuseError):
        loss.backward()
    del loss
    paged.loss(2, batch=8).backward()
    optimizer.zero_grad()
    pager_gone(store)


def test_a_commit_has_no_activations(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram=DRAM) as store:
        paged = language()
        zero.page(paged, store, activations="store")
        optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
        loss = paged.loss(1, batch=8)
        assert saved(store)
        zero.commit(paged, optimizer)
        loss.backward()
        del loss
        optimizer.zero_grad()
        store.close()
    with TieredStore.open(tmp_path / "store", dram=DRAM) as store:
        assert saved(store) == []


def test_an_exception_in_forward(store: TieredStore, activations: str) -> None:
    paged = language()
    zero.page(paged, store, activations=activations)  # type: ignore[arg-type]
    failing = paged.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        paged.loss(1, batch=8)
    failing.remove()
    gc.collect()
    paged.loss(2, batch=8).backward()
    paged.zero_grad()
    pager_gone(store)


def test_evaluation_keeps_nothing(store: TieredStore, activations: str) -> None:
    paged = language().eval()
    zero.page(paged, store, activations=activations)  # type: ignore[arg-type]
    with torch.no_grad():
        paged.loss(1, batch=8)
    with torch.inference_mode():
        paged.loss(1, batch=8)
    assert zero.statistics(paged).computed_again == 0
    pager_gone(store)


def test_the_model_may_have_checkpoints_of_its_own_around_it(store: TieredStore) -> None:
    reference, paged = language(), language()
    zero.page(paged, store, activations="store")
    for model in (reference, paged):
        torch.manual_seed(1)
        tokens = torch.arange(64).view(4, 16)
        checkpoint(model, tokens, use_reentrant=False).square().mean().backward()
    for wanted, found in zip(reference.parameters(), paged.parameters(), strict=True):
        assert wanted.grad is None or torch.equal(found.grad + 0, wanted.grad)
    paged.zero_grad()
    pager_gone(store)


# -- what cannot be ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activations": "disk"}, "not 'disk'"),
        ({"activations": "store", "micro_batch": 2}, "leave one of them out"),
    ],
)
def test_options_that_cannot_act_are_refused(store: TieredStore, options: dict[str, object], words: str) -> None:
    model = language()
    with pytest.raises(MisuseError, match=words):
        zero.page(model, store, **options)  # type: ignore[arg-type]
    assert len(store) == 0
    assert isinstance(model.head.weight, nn.Parameter)


def test_a_store_of_memory_alone_is_refused() -> None:
    with TieredStore.open(None, dram="4MiB") as store:
        with pytest.raises(MisuseError, match="memory alone"):
            zero.page(language(), store, activations="store")
        assert len(store) == 0
        zero.page(language(), store, activations="recompute")


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 4)
        self.last = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.attention(x, x, x, need_weights=False)
        found: torch.Tensor = self.last(x)
        return found

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        found: torch.Tensor = self(torch.randn(8, 4, 24, generator=generator, requires_grad=True)).square().mean()
        return found


def test_one_tensor_that_is_given_thrice_comes_back_as_one(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = Attending()
    paged = copy.deepcopy(reference)
    zero.page(paged, store, activations="recompute")
    wanted = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True), steps=3)
    assert train(paged, zero.AdamW(paged.parameters(), lr=1e-3), steps=3) == wanted
    assert zero.statistics(paged).computed_again > 0


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self) -> torch.Tensor:
        return self.weight.exp()


class OfNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.constant = Constant()

    def forward(self) -> torch.Tensor:
        return self.constant().sum()


def test_recomputing_that_would_do_nothing_is_refused(store: TieredStore) -> None:
    model = OfNothing()
    zero.page(model, store, activations="recompute")
    with pytest.raises(MisuseError, match="nothing of OfNothing is computed again"):
        model()
    with torch.no_grad():
        model()


def test_the_smallest_budget_has_room_for_them(tmp_path: Path) -> None:
    model = Tied(64, 2)
    with TieredStore.open(tmp_path / "small", dram="1MiB") as store:
        zero.page(model, store, activations="store")
        model.loss(1).backward()
        assert pager_of(model).saved is not None


class Repeated(nn.Module):
    """Layers that repeat, of 132 KiB each, between two modules that do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layers = nn.Embedding(64, 64), nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1))
        return x + inner


@pytest.mark.parametrize(("unit", "whole"), [(100 << 10, True), (40 << 10, False)])
def test_layers_that_repeat_are_computed_again_whole(tmp_path: Path, unit: int, whole: bool) -> None:
    """A layer is larger than a unit in both. Where it is at most twice as large, what its modules give to each other is kept
    nowhere, but only what the five modules are given."""
    reference, paged = Repeated(), Repeated()
    with TieredStore.open(tmp_path / "layers", dram="1MiB") as store:
        zero.page(paged, store, activations="recompute", paging=zero.Paging(largest_unit=unit))
        split = zero.statistics(paged).split
        assert (split == ("embedding", "layers.0", "layers.1", "layers.2", "head")) is whole
        for given in trained_beside(reference, paged, store, "on_fetch"):
            assert (given <= 5 * 4 * 64 * 64 * 4) is whole
        assert equal(paged.state_dict(), reference.state_dict())
        pager_gone(store)


def trained_beside(reference: nn.Module, paged: nn.Module, store: TieredStore, update: str) -> list[int]:
    """Train both for some steps with the same dropout; return the bytes that the store has between forward and backward."""
    tokens, found = torch.randint(0, 64, (4, 64)), []
    adamw, optimizer = torch.optim.AdamW(reference.parameters(), fused=True), zero.AdamW(paged.parameters(), update=update)
    for _ in range(3):
        torch.manual_seed(7)
        reference(tokens).square().mean().backward()
        adamw.step()
        adamw.zero_grad()
        torch.manual_seed(7)
        loss = paged(tokens).square().mean()
        found.append(sum(store.spec(key).nbytes for key in saved(store)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


class Last(nn.Module):
    """Layers that repeat are the last thing that has parameters. They share a norm, which comes before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(64, 64), nn.LayerNorm(64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        for layer in self.layers:
            layer.norm = self.norm

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Parts(nn.Module):
    """Layers that repeat are not called: the model calls what is in them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens[..., None].float().expand(*tokens.shape, 64) / 64
        for layer in self.layers:
            x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
        return x


@pytest.mark.parametrize(
    ("make", "update"),
    quick(product([Last, Parts], ["on_fetch", "in_backward"]), [(Last, "on_fetch"), (Parts, "in_backward")]),
)
def test_layers_without_a_head_or_a_call_of_their_own(tmp_path: Path, make: type[nn.Module], update: str) -> None:
    reference, paged = make(), make()
    with TieredStore.open(tmp_path / "layers", dram="1MiB") as store:
        zero.page(paged, store, activations="recompute", paging=zero.Paging(largest_unit=100 << 10))
        trained_beside(reference, paged, store, update)
        assert equal(paged.state_dict(), reference.state_dict())
        assert zero.statistics(paged).computed_again > 0
        pager_gone(store)
