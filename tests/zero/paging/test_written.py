"""Writes to parameters that are in memory are noticed by what is there, whatever wrote: the results are those of the model in
memory, with any budget."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from tests.quick import quick
from tests.zero.narrow import MasterAdamW
from tiered import MisuseError, TieredStore, zero
from tiered.zero.paging import unit
from tiered.zero.paging.pager import pager_of

WIDTH, LAYERS = 128, 16
BUDGETS = {"all fits": "64MiB", "nothing fits": "1MiB", "no disk": "64MiB"}
Write = Callable[[torch.Tensor], Any]


def fused(p: torch.Tensor) -> None:
    moments = [torch.ones_like(p, requires_grad=False) for _ in range(3)]
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    one = torch.tensor(1.0)
    torch._fused_adamw_([p], *([m] for m in moments), [], [one], **numbers, amsgrad=False, maximize=False)


def unversioned(p: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(p):  # type: ignore[no-untyped-call]
        p[0].mul_(0.5)


WAYS: dict[str, Write] = {
    "in place": lambda p: p[0].mul_(0.5),
    "list": lambda p: torch._foreach_mul_([p], 0.5),
    "data": lambda p: p.data[0].mul_(0.5),
    "data assigned": lambda p: setattr(p, "data", p.data * 0.5),
    "data of data": lambda p: p.data.data[0].mul_(0.5),
    "data of a view": lambda p: p[0].data.mul_(0.5),
    "data of detach": lambda p: p.detach().data[0].mul_(0.5),
    "NumPy": lambda p: p.detach().numpy()[:2].__imul__(0.5),
    "DLPack": lambda p: from_dlpack(to_dlpack(p.detach()))[0].mul_(0.5),
    "storage": lambda p: torch.empty(0).set_(p.untyped_storage())[:5].mul_(0.5),
    "byte of a storage": lambda p: p.untyped_storage().__setitem__(3, 63),
    "fused": fused,
    "apply_": lambda p: p.detach()[0].apply_(lambda value: value * 0.5),
    "map_": lambda p: p.detach()[0].map_(p.detach()[1].clone(), lambda value, other: value - other),
    "code in C": lambda p: ctypes.memset(p.data_ptr() + 8, 0, 8),
    "without a version": unversioned,
}


class Layer(nn.Module):
    """Writes to its weight where ``write`` says so: ``within`` its forward, or when that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.within: Write | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.within is not None:
            with torch.no_grad():
                self.within(self.weight)
        return (x @ self.weight).tanh()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def quietly(write: Write, p: torch.Tensor) -> None:
    with torch.no_grad():
        write(p)


def in_forward(model: Layers, write: Write) -> None:
    for layer in model.layers[::5]:
        layer.within = write


def computed_again(model: Layers, write: Write) -> None:
    model.again = True
    in_forward(model, write)


def in_hooks(model: Layers, write: Write) -> None:
    for layer in model.layers[::5]:
        layer.register_forward_pre_hook(lambda module, _: quietly(write, module.weight))
    for layer in model.layers[1::5]:  # later than a graph has saved the weight, torch raises for most
        layer.register_forward_hook(lambda module, *_: None if torch.is_grad_enabled() else quietly(write, module.weight))


def in_backward(model: Layers, write: Write) -> None:
    for layer in model.layers[::5]:
        layer.register_full_backward_hook(lambda module, *_: quietly(write, module.weight))


def of_kept_parameters(model: Layers, write: Write) -> None:
    for layer, weight in list(zip(model.layers, model.parameters(), strict=True))[::5]:
        layer.register_forward_pre_hook(lambda *_, weight=weight: quietly(write, weight))


PLACES = {one.__name__: one for one in (in_forward, computed_again, in_hooks, in_backward, of_kept_parameters)}
MOVING = {"in place", "list"}
"""Count up a version each time: what a layer saved in forward is not what it is when it is computed again, and raises."""
CASES = [one for one in product(BUDGETS, PLACES, WAYS) if one[1] != "computed_again" or one[2] not in MOVING]


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    path = None if request.param == "no disk" else tmp_path / "store"
    with TieredStore.open(path, dram=BUDGETS[request.param]) as store:
        yield store
        store.close()


def small() -> list[tuple[str, str, str]]:
    """Each way in forward with little memory, and once in each other place."""
    budgets, places = list(BUDGETS), list(PLACES)
    everywhere = [(budgets[n % len(budgets)], places[1 + n % (len(places) - 1)], way) for n, way in enumerate(WAYS)]
    return [*(("nothing fits", "in_forward", way) for way in WAYS), *(one for one in everywhere if one in CASES)]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(("opened", "place", "way"), quick(CASES, small()), indirect=["opened"])
def test_every_write_lands(opened: TieredStore, place: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Layers()
    model = zero.page(copy.deepcopy(reference), opened)
    x, found = torch.randn(4, WIDTH, requires_grad=True), []
    for one in (reference, model):
        optimizer = torch.optim.AdamW(one.parameters(), fused=True) if one is reference else zero.AdamW(one.parameters())
        PLACES[place](one, WAYS[way])
        losses = []
        for step in range(3):
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [loss.item(), one(x).square().mean().item()]
            if one is model and step == 1:
                zero.offload(model)
        found.append(losses)
    assert found[0] == found[1]
    values = model.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in reference.state_dict().items())
    if (tmp_path / "store").exists():
        opened.commit()
        opened.rollback()


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p[1:4].detach(),
    "NumPy": lambda p: p.detach().numpy(),
    "DLPack": lambda p: from_dlpack(to_dlpack(p.detach())),
}


@pytest.mark.parametrize("opened", ["all fits", "no disk"], indirect=True)
@pytest.mark.parametrize("way", KEPT)
@pytest.mark.parametrize("gone", [False, True])
def test_what_is_written_after_a_step_to_a_kept_tensor_comes_after_the_update(
    opened: TieredStore, gone: bool, way: str
) -> None:
    torch.manual_seed(0)
    reference = Layers()
    model = zero.page(copy.deepcopy(reference), opened)
    x = torch.randn(4, WIDTH)
    for one in (reference, model):
        optimizer = torch.optim.AdamW(one.parameters(), fused=True) if one is reference else zero.AdamW(one.parameters())
        kept: list[Any] = []
        for layer in one.layers[::5]:
            layer.within = lambda p, kept=kept: kept.append(KEPT[way](p))
        for _ in range(3):
            one(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for values in kept:
                values[...] *= 0.5
            if gone:
                kept.clear()
            for layer in one.layers[::5]:
                layer.within = None
    values = model.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in reference.state_dict().items())


class Halving(torch.autograd.Function):
    """Writes in backward to a tensor that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight.detach()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.weight.mul_(0.5)
        return grads[0] @ ctx.weight, None


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Halving.apply(x, self.weight) + self.bias  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("when", "update"),
    [("in backward", "on_fetch"), ("in backward", "in_backward"), ("after it", "on_fetch"), ("after two steps", "on_fetch")],
)
def test_what_is_written_to_a_kept_tensor_and_an_update_elsewhere_would_hide_raises(
    tmp_path: Path, device: bool, when: str, update: Any
) -> None:
    """Here a step of the unit's other parameters. In host memory, where the update is computed in that memory, all lands."""
    torch.manual_seed(0)
    reference = nn.Sequential(*((Halved if when == "in backward" else nn.Linear)(96, 96) for _ in range(4)))
    tiers: dict[str, Any] = {"hbm": "1MiB", "device": "cpu"} if device else {}
    kept = list[torch.Tensor]()

    def train(model: nn.Sequential, optimizer: Any) -> None:
        if when != "in backward":
            model[1].register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
        for _ in range(2 if when == "after two steps" else 1):
            model(torch.ones(2, 96)).square().sum().backward()
            if when == "after it":
                kept[0].mul_(0.5)
            optimizer.step()
        if when == "after two steps":
            kept[0].mul_(0.5)
        model(torch.ones(2, 96))

    train(reference, torch.optim.AdamW([layer.bias for layer in reference], fused=True))  # type: ignore[misc]
    kept.clear()
    for layer in reference:
        layer._forward_hooks.clear()
    with TieredStore.open(tmp_path / "store", dram="1MiB", **tiers) as store:
        torch.manual_seed(0)
        made = nn.Sequential(*(type(layer)(96, 96) for layer in reference))
        model = zero.page(made, store)
        optimizer = zero.AdamW([layer.bias for layer in model], update=update)  # type: ignore[misc]
        if device:
            with pytest.raises(MisuseError, match="was written to through a tensor that was taken of it"):
                train(model, optimizer)
        else:
            train(model, optimizer)
            values = model.state_dict()
            assert all(torch.equal(value, values[name]) for name, value in reference.state_dict().items())
        kept.clear()
        store.close()


@pytest.mark.parametrize("opened", BUDGETS, indirect=True)
def test_data_that_is_assigned_after_the_use_is_refused_by_the_graph(opened: TieredStore) -> None:
    """In memory the graph keeps the values of before, which the store has not; the next forward has what was assigned."""
    torch.manual_seed(0)
    reference = Layers()
    model = zero.page(copy.deepcopy(reference), opened)
    x, found = torch.randn(4, WIDTH), []
    for one in (reference, model):
        layer: Any = one.layers[5]
        hook = layer.register_forward_hook(lambda module, *_: setattr(module.weight, "data", module.weight.data * 0.5))
        loss = one(x).square().mean()
        hook.remove()
        if one is model:
            with pytest.raises(MisuseError, match=r"written to, after this graph was made"):
                loss.backward()
        found.append(one(x).square().mean().item())
    assert found[0] == found[1]


def test_what_is_written_in_gathered_lands(store: TieredStore) -> None:
    reference = Layers()
    model = zero.page(copy.deepcopy(reference), store)
    for write in WAYS.values():
        with zero.gathered(model.layers[3]):
            quietly(write, model.layers[3].weight)  # type: ignore[arg-type]
        quietly(write, reference.layers[3].weight)  # type: ignore[arg-type]
        zero.offload(model)
        assert torch.equal(model.layers[3].weight, reference.layers[3].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_what_is_written_around_a_commit_within_a_forward_lands(store: TieredStore, when: str) -> None:
    """A unit that the disk does not have is not compared: then a commit gives the disk its bytes of before the write."""
    torch.manual_seed(0)
    reference = Layers()
    model = zero.page(copy.deepcopy(reference), store)

    def write(p: torch.Tensor) -> None:
        for step in {"before": "wc", "after": "cw", "between": "wcw"}[when]:
            if step == "w":
                p.data.data[0].mul_(0.5)
            elif one is model:
                store.commit()

    x, found = torch.randn(4, WIDTH), []
    for one in (reference, model):
        optimizer = torch.optim.AdamW(one.parameters(), fused=True) if one is reference else zero.AdamW(one.parameters())
        one(x).square().mean().backward()
        optimizer.step()
        one.layers[3].within = write  # type: ignore[assignment]
        one(x)
        one.layers[3].within = None  # type: ignore[assignment]
        if one is model:
            zero.offload(model)
        found.append(one(x))
    assert torch.equal(*found)
    assert torch.equal(reference.layers[3].weight, model.layers[3].weight)  # type: ignore[arg-type]


def test_a_forward_that_reads_while_a_commit_saves_keeps_what_the_commit_says(tmp_path: Path) -> None:
    """In three tiers copies are saved one after the other, while forward holds them."""
    tiers: dict[str, Any] = {"hbm": "2MiB", "device": "cpu", "dram": "1MiB"}
    with TieredStore.open(tmp_path / "store", **tiers) as store:
        model = zero.page(Layers(), store, paging=zero.Paging(update_tier="hbm"))
        optimizer, x = zero.AdamW(model.parameters()), torch.randn(4, WIDTH)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)  # applies what is pending
            made = zero.commit_async(model, optimizer)
            for _ in range(3):
                model(x)
            made.result()
            assert "model/checkpoint" in store
        model.layers[2].within = lambda p: store.commit()  # type: ignore[assignment]
        with store.lease("model/param/layers.1"):
            model(x)
        store.close()


def test_a_write_to_what_a_commit_has_yet_to_save_says_so(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="64MiB") as store:
        model = zero.page(nn.Sequential(*(Layer() for _ in range(4))), store)
        x, key = torch.randn(4, WIDTH), "model/param/1"
        made: list[Any] = []

        def write(p: torch.Tensor) -> None:
            made.append(store.commit_async())
            while not (saving := key in snapshot().frozen) and not made[-1].done():
                pass
            if saving:
                seen.append(p.detach().clone())
                p.mul_(0.5)

        def snapshot() -> Any:
            return store._engine.state.snapshot or Nothing

        class Nothing:
            frozen: tuple[str, ...] = ()

        seen: list[torch.Tensor] = []
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        model[1].within = write
        try:
            with torch.no_grad():
                model(x)
        except MisuseError as error:
            assert "'1.weight' was written to in forward or backward while commit_async had yet to save it" in str(error)  # noqa: PT017
        else:
            assert made[0].result()  # it had saved the unit before
        model[1].within = None
        if seen:
            assert torch.equal(model[1].weight, seen[0] * 0.5)
        made[0].result()


@pytest.mark.parametrize("disk", [True, False])
def test_a_unit_that_no_tier_below_has_is_not_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: bool) -> None:
    made, digested = unit.digests, [0]
    monkeypatch.setattr(unit, "digests", lambda found: digested.append(sum(map(len, found))) or made(found))
    with TieredStore.open(tmp_path / "store" if disk else None, dram="64MiB") as store:
        model = zero.page(Layers(), store)
        optimizer, x = zero.AdamW(model.parameters()), torch.randn(4, WIDTH)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
        model(x)
        assert sum(digested) == 0
        if disk:
            store.commit()
            model(x)
            assert sum(digested) > 0
        store.close()


NARROW: dict[str, Write] = {
    "in place": lambda p: p.mul_(0.75),
    "data of a view": lambda p: p.view(-1).data.mul_(0.75),
    "storage": lambda p: p.new_empty(0).set_(p.untyped_storage()).mul_(0.75),
    "data assigned": lambda p: setattr(p, "data", p.data * 0.75),
}


@pytest.mark.parametrize("way", NARROW)
@pytest.mark.parametrize("dtype", quick([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_what_is_written_is_the_master_of_the_next_step(store: TieredStore, dtype: torch.dtype, way: str) -> None:
    torch.manual_seed(0)
    reference = Layers().to(dtype)
    model = zero.page(copy.deepcopy(reference), store)
    optimizers = MasterAdamW([{"params": list(reference.parameters())}], lr=1e-3), zero.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, WIDTH).to(dtype)
    for one, optimizer in zip((reference, model), optimizers, strict=True):
        for step in range(4):
            for layer in one.layers[::5]:
                layer.within = NARROW[way] if step == 1 else None
            one(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    values = model.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in reference.state_dict().items())


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_a_write_to_the_copy_that_computes_reaches_what_is_stored(store: TieredStore, storage: torch.dtype) -> None:
    """The copy is of another type, and is deleted after use."""
    torch.manual_seed(0)
    first, found = Layers(), []
    for name in ("in place", "data of a view"):
        model = zero.page(copy.deepcopy(first), store, name=name, policy=zero.Policy(storage=storage))
        optimizer = zero.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            for layer in model.layers[::5]:
                layer.within = NARROW[name] if step == 1 else None  # type: ignore[assignment]
            model(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.state_dict())
    assert not torch.equal(found[0]["layers.5.weight"], first.layers[5].weight)  # type: ignore[arg-type]
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


@pytest.mark.parametrize("kind", ["of a store for reading", "quantised"])
def test_what_is_for_reading_only_says_which_parameter_was_written_to(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(*(Layer() for _ in range(4)), nn.LayerNorm(WIDTH))
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        policy = zero.Policy(quantize="int8") if kind == "quantised" else zero.Policy()
        model = zero.page(copy.deepcopy(first), store, name="model", policy=policy)
        if kind == "quantised":
            refuses(model)
            store.close()
            return
        zero.commit(model)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="4MiB", access="read") as store:
        refuses(zero.page(first, store, name="model", existing="resume"))


def refuses(model: Any) -> None:
    with torch.no_grad():
        before = model(torch.ones(1, WIDTH))
        for write in WAYS.values():
            model[2].within = write
            with pytest.raises(MisuseError, match=r"parameter '2\.weight' was written to, and has its values of before"):
                model(torch.ones(1, WIDTH))
            model[2].within = None
            assert torch.equal(model(torch.ones(1, WIDTH)), before)


class Scaled(nn.Module):
    """Gives its scale to code of its own; the layer within is one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.write: Callable[[Scaled], Any] = lambda module: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return self.layer(x * self.scale).tanh()


REACHED: dict[str, Callable[[Scaled], Any]] = {
    "of a module": lambda m: m.layer.weight.detach().numpy().__imul__(0.5),
    "of the dict of a module": lambda m: m.layer._parameters["weight"].data.mul_(0.5),  # type: ignore[union-attr]
    "of all parameters": lambda m: [p.data.mul_(0.5) for p in m.parameters()],
    "of all values": lambda m: [p.data.mul_(0.5) for p in m.layer._parameters.values() if p is not None],
    "of attributes": lambda m: m.layer.__dict__["_parameters"]["bias"].data.add_(1),
    "by getattr": lambda m: getattr(m.layer, "weight").untyped_storage().__setitem__(3, 63),  # noqa: B009
    "with autograd": lambda m: torch.enable_grad()(lambda: m.layer.weight.detach().data.mul_(0.5))(),
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nobody_writes_unseen_where_parameters_are_for_layers_of_torch_alone(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch, mode: Any, kept: bool
) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(Scaled() for _ in range(12)))
    model = zero.page(copy.deepcopy(reference), store)
    digested: list[int] = []
    made = unit.digests
    monkeypatch.setattr(unit, "digests", lambda found: digested.extend(map(len, found)) or made(found))
    x = torch.randn(2, WIDTH)
    with mode():
        model(x)
        assert set(digested) <= {4 * WIDTH}, "of the scales alone"
        for write in REACHED.values():
            found = []
            for one in (reference, model):
                for module in one[::3]:
                    weight = module.layer.weight
                    module.write = (lambda _, weight=weight: weight.data.mul_(0.5)) if kept else write
                found.append([one(x).clone()])
                for module in one[::3]:
                    module.write = lambda module: None
                if one is model:
                    zero.offload(model)
                found[-1].append(one(x).clone())
            assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    values = model.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in reference.state_dict().items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_with_parameters_apart_go_the_same_way(store: TieredStore, mode: Any) -> None:
    """torch chooses by shape, strides, and whether a weight needs a gradient."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 12, bias=bias).requires_grad_(trained) for bias in (False, True) for trained in (False, True)]
    reference = nn.ModuleList([*layers, nn.LSTM(4, 12, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)])
    model = zero.page(copy.deepcopy(reference), store)
    inputs = torch.randn(3, 7, 4), torch.randn(7, 3, 4).transpose(0, 1)
    with mode():
        for ours, theirs in zip(model, reference, strict=True):
            for x in inputs:
                given = (x, x, x) if isinstance(theirs, nn.MultiheadAttention) else (x,)
                found, expected = ours(*given), theirs(*given)
                pairs = [(found, expected)] if isinstance(found, torch.Tensor) else [(found[0], expected[0])]
                assert all(torch.equal(*pair) for pair in pairs), type(theirs)


@pytest.mark.parametrize("way", ["in place", "data of a view"])
def test_what_a_backward_pass_wrote_before_an_exception_is_rolled_back(store: TieredStore, way: str) -> None:
    model = zero.page(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), store)
    optimizer = zero.AdamW(model.parameters())
    zero.commit(model, optimizer)
    before = model.state_dict()

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            quietly(WAYS[way], model[2].weight)  # type: ignore[arg-type]
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        model[2](Failing.apply(model[0](torch.ones(2, 8)))).sum().backward()
    zero.rollback(model, optimizer)
    for _ in range(2):
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        zero.offload(model)


@pytest.mark.parametrize("way", ["in place", "NumPy"])
def test_a_unit_that_is_held_for_layers_is_written_to(store: TieredStore, way: str) -> None:
    """A function of torch that writes asks for the unit for writing, and gets it although it is held for reading."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    theirs = copy.deepcopy(model)
    zero.page(model, store)
    states = []

    def write(module: nn.Module, _: Any) -> None:
        if hasattr(module.weight, "_tiered"):
            states.append(pager_of(model)._home[module.weight][0].state)  # type: ignore[index]
        quietly(WAYS[way], module.weight)  # type: ignore[arg-type]

    for one in (model, theirs):
        handle = one[0].register_forward_pre_hook(write)
        with torch.no_grad():
            one(torch.ones(2, 8))
        handle.remove()
    assert states == [unit.Held.FOR_LAYERS]
    zero.offload(model)
    assert torch.equal(model[0].weight, theirs[0].weight)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 8)), theirs(torch.ones(2, 8)))
