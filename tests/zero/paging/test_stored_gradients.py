"""``parameter.grad`` of a paged model does what one in memory does: the same bits, whatever is read from it, or written."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.quick import quick
from tests.zero.harness import Clip, equal, in_memory, train
from tests.zero.models import Mixed, Tied, parameter_groups
from tests.zero.narrow import MasterAdamW, Narrow
from tiered import InterruptedStep, LeaseConflict, MisuseError, TieredStore, zero
from tiered.zero.paging.gradients import UnitGradients
from tiered.zero.paging.pager import Pager, pager_of, placement_of
from tiered.zero.paging.tensors.stored import StoredTensor

INF = float("inf")
DRAM = "2MiB"


def by_torch(model: nn.Module, **options: Any) -> Clip:
    return lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit, **options)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """NaNs are alike."""
    if (ours.shape, ours.dtype, ours.stride()) != (theirs.shape, theirs.dtype, theirs.stride()):
        return False
    nans = ours.isnan() & theirs.isnan()
    mine, other = (one.masked_fill(nans, 0).reshape(-1).view(torch.uint8) for one in (ours, theirs))
    return torch.equal(mine, other)


class Shapes(nn.Module):
    """Parameters of many shapes, whose gradients are what they are given; some have strides of their own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        made = [torch.zeros(5, 7), torch.zeros(()), torch.zeros(33), torch.zeros(4, 3, 2, 2), torch.zeros(1), torch.zeros(6, 6)]
        made[0] = torch.zeros(7, 5).t()
        made[3] = made[3].to(memory_format=torch.channels_last)
        self.all = nn.ParameterList(nn.Parameter(one.to(dtype)) for one in made)

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return sum(((p * f).sum() for p, f in zip(self.all, factors, strict=True)), torch.zeros(()))


def backward(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    factors = [(torch.randn(p.shape, generator=generator) * scale).to(p.dtype) for p in model.parameters()]
    model(factors).backward()


def pair(store: TieredStore, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> tuple[Shapes, Shapes]:
    """A model in memory and one in the store, with the same gradients."""
    theirs = Shapes(dtype)
    ours = copy.deepcopy(theirs)
    zero.page(ours, store, existing="overwrite")
    for model in (theirs, ours):
        backward(model, seed, scale)
    return ours, theirs


def alike(ours: nn.Module, theirs: nn.Module) -> bool:
    found = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all((a.grad is None) == (b.grad is None) and (b.grad is None or same_bits(a.grad.cpu(), b.grad)) for a, b in found)


@pytest.mark.parametrize("foreach", quick([None, True, False], [None]))
def test_training_that_torch_clips_is_that_of_memory(store: TieredStore, foreach: bool | None) -> None:
    twin = in_memory("tied")
    model = zero.page(copy.deepcopy(twin.untrained), store)
    optimizer = zero.AdamW(parameter_groups(model), lr=1e-3)
    assert train(model, optimizer, by_torch(model, foreach=foreach)) == twin.numbers
    assert equal(model.state_dict(), twin.model)
    for number, state in twin.state.items():
        assert equal(optimizer.state_dict()["state"][number], state)


@pytest.mark.parametrize("kind", ["narrow", "bf16", "mixed"])
def test_training_of_narrow_types_that_torch_clips_is_that_of_memory(store: TieredStore, kind: str) -> None:
    torch.manual_seed(0)
    reference: Any = {"narrow": Narrow, "bf16": lambda: Tied(layers=2).to(torch.bfloat16), "mixed": Mixed}[kind]()
    paged = copy.deepcopy(reference)
    masters = MasterAdamW(parameter_groups(reference), lr=1e-3)

    def loop(model: nn.Module, norm: float) -> torch.Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 3
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return nn.utils.clip_grad_norm_(model.parameters(), norm)

    expected = train(reference, masters, partial(loop, reference), steps=4)
    zero.page(paged, store)
    optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
    assert train(paged, optimizer, partial(loop, paged), steps=4) == expected
    assert equal(paged.state_dict(), reference.state_dict())


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scale": lambda g: g.mul_(0.3),
    "scale up": lambda g: g.mul_(7),
    "by a tensor": lambda g: g.mul_(torch.tensor(0.7)),
    "by a wider tensor": lambda g: g.mul_(torch.tensor(-0.9, dtype=torch.float64)),
    "by a vector": lambda g: g.mul_(torch.tensor([0.7])) if g.dim() else None,
    "halve": lambda g: g.div_(2),
    "third": lambda g: g.div_(3.0),
    "by a power of two": lambda g: g.div_(torch.tensor(-16.0)),
    "imul": lambda g: g.__imul__(0.1),
    "foreach": lambda g: torch._foreach_mul_([g], 0.2),
    "foreach twice": lambda g: torch._foreach_mul_([g, g], torch.tensor(0.3)),
    "foreach list": lambda g: torch._foreach_mul_([g, torch.ones(3)], [0.5, 3.0]),
    "foreach vectors": lambda g: torch._foreach_addcmul_([g], [torch.ones_like(g)], [torch.ones_like(g)], torch.tensor([0.5])),
    "foreach quotient": lambda g: torch._foreach_div_([g], 8.0),
    "zero": lambda g: g.zero_(),
    "fill": lambda g: g.fill_(0.25),
    "add": lambda g: g.add_(1, alpha=0.5),
    "add to itself": lambda g: g.add_(g),
    "square": lambda g: g.square_(),
    "clamp": lambda g: g.clamp_(-0.5, 0.5),
    "copy": lambda g: g.copy_(torch.linspace(0, 1, max(1, g.numel()))[: g.numel()].view(g.shape)),
    "out": lambda g: torch.add(g, 1, out=g),
    "detached": lambda g: g.detach().mul_(0.6),
    "data": lambda g: g.data.add_(0.6),
    "data of data": lambda g: g.data.data.neg_(),
    "flat view": lambda g: g.view(-1)[:1].fill_(3) if g.is_contiguous() else None,
    "transposed": lambda g: g.mT.mul_(torch.arange(1.0, 1 + g.shape[-2])) if g.dim() > 1 else None,
    "item": lambda g: g.__setitem__(0, 0.125) if g.dim() else None,
    "masked": lambda g: g.__setitem__(g > 0, -1.0),
    "rows": lambda g: [row.mul_(0.5) for row in g] if g.dim() else None,
    "split": lambda g: g.chunk(2)[-1].add_(1) if g.dim() else None,
    "nan": lambda g: g.nan_to_num_(),
    "norm": lambda g: g.norm(),
    "norm 1": lambda g: g.norm(1),
    "norm of data": lambda g: g.data.norm(3.0),
    "norm of a view": lambda g: g.unsqueeze(0).norm(),
    "norm, kept": lambda g: torch.linalg.vector_norm(g, 2, keepdim=True),
    "norm, wide": lambda g: torch.linalg.vector_norm(g, 2, dtype=torch.float64),
    "norm of rows": lambda g: torch.linalg.vector_norm(g, 2, 0) if g.dim() else None,
    "foreach norm": lambda g: torch._foreach_norm([g, torch.ones(2), g], 2)[2],
    "foreach norm, wide": lambda g: torch._foreach_norm([g], INF, torch.float64)[0],
    "total": lambda g: nn.utils.get_total_norm([g], 0.5),
    "max": lambda g: g.abs().max(),
    "finite": lambda g: torch.isfinite(g),
    "isnan": lambda g: g.isnan().any(),
    "sum": lambda g: g.sum().item(),
    "arithmetic": lambda g: (2 - g / 3) * g,
    "clone": lambda g: g.clone(),
    "clone, another format": lambda g: g.clone(memory_format=torch.contiguous_format),
    "double": lambda g: g.double(),
    "float": lambda g: g.float() + 0,
    "reshape": lambda g: g.reshape(-1) + 0,
    "permuted": lambda g: g.T.contiguous() if g.dim() == 2 else None,
    "cat": lambda g: torch.cat([g.flatten(), g.flatten()]),
    "index": lambda g: g[torch.tensor([0])] if g.dim() else None,
    "list": lambda g: g.tolist(),
    "foreach abs": lambda g: torch._foreach_abs([g, g])[1],
    "zeros": lambda g: torch.zeros_like(g),
    "new": lambda g: g.new_ones(3),
    "repr": repr,
    "layout": lambda g: (g.shape, g.stride(), g.is_contiguous(), g.dtype, g.device, g.requires_grad, g.grad_fn, g.is_leaf),
    "same": lambda g: (g.to(g.dtype) is g, g.to("cpu") is g, g.requires_grad_(False) is g, g.detach_() is g),
    "equal": lambda g: torch.equal(g, g.clone()),
}


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.lists(st.sampled_from(list(OPERATIONS)), min_size=1, max_size=6),
    st.integers(0, 99),
    st.booleans(),
)
def test_sequences_of_operations(dtype: torch.dtype, names: list[str], seed: int, again: bool) -> None:
    with TieredStore.open(None, dram="1MiB") as store:
        ours, theirs = pair(store, dtype, seed)
        compare_operations(ours, theirs, names)
        if again:
            for model in (ours, theirs):
                backward(model, seed + 1)
            compare_operations(ours, theirs, names)


def compare_operations(ours: nn.Module, theirs: nn.Module, names: list[str]) -> None:
    for name in names:
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            before = mine.grad
            found, expected = (OPERATIONS[name](one.grad) for one in (mine, other))
            assert mine.grad is before, name
            if isinstance(expected, torch.Tensor):
                found = found.clone() if isinstance(found, StoredTensor) else found
                assert same_bits(found, expected), name
            elif not isinstance(expected, list | tuple) or isinstance(expected[0], float | bool | torch.Size):
                assert str(found) == str(expected), name
    assert alike(ours, theirs), names


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "name"),
    quick(product(DTYPES, OPERATIONS), [(DTYPES[number % 2], name) for number, name in enumerate(OPERATIONS)]),
)
def test_each_operation_is_that_of_memory(dtype: torch.dtype, name: str) -> None:
    with TieredStore.open(None, dram="1MiB") as store:
        compare_operations(*pair(store, dtype), ["scale", name, name])


ORDERS: list[tuple[float, bool | None]] = [(2.0, None), (1, True), (3, False), (0, None), (INF, True), (-1.0, False)]
ORDERS += [(-INF, None)]


@pytest.mark.parametrize(
    ("dtype", "foreach", "order"),
    quick(
        product(DTYPES, [None, True, False], [order for order, _ in ORDERS]),
        [(DTYPES[number % 2], foreach, order) for number, (order, foreach) in enumerate(ORDERS)],
    ),
)
def test_every_order_of_norm(order: float, foreach: bool | None, dtype: torch.dtype) -> None:
    with TieredStore.open(None, dram="1MiB") as store:
        ours, theirs = pair(store, dtype)
        for seed in range(2):
            norms = [
                (
                    nn.utils.get_total_norm([p.grad for p in model.parameters()], order, foreach=foreach),
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5, order, foreach=foreach),
                    nn.utils.clip_grad_norm_(model.parameters(), 0.25, order, True, foreach),
                )
                for model in (ours, theirs)
            ]
            assert all(map(torch.equal, *norms))
            assert alike(ours, theirs)
            for model in (ours, theirs):
                nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, torch.tensor(1.0), foreach)
                nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach)
                backward(model, seed)  # is added
            assert alike(ours, theirs)


@pytest.mark.parametrize("bad", [INF, float("nan")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_that_are_not_finite(store: TieredStore, bad: float, foreach: bool | None) -> None:
    ours, theirs = pair(store)
    for model in (ours, theirs):
        model.all[2].grad[3] = bad
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, 2.0, True, foreach)
    assert alike(ours, theirs), "nothing has changed"
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach) for model in (ours, theirs)]
    assert str(norms[0]) == str(norms[1])
    assert alike(ours, theirs)
    optimizer = zero.AdamW(ours.parameters())
    with pytest.raises(MisuseError, match="not finite"):
        optimizer.step()


def test_torch_and_the_optimizer_clip_alike(tmp_path: Any) -> None:
    torch.manual_seed(0)
    first: Any = Tied()
    models = [first, copy.deepcopy(first)]
    with TieredStore.open(tmp_path / "store", dram="3MiB") as store:
        for number, model in enumerate(models):
            zero.page(model, store, name=f"model{number}")
        optimizers = [zero.AdamW(model.parameters()) for model in models]
        left = train(models[0], optimizers[0], optimizers[0].clip_grad_norm_, steps=3)
        assert train(models[1], optimizers[1], by_torch(models[1]), steps=3) == left
        assert equal(models[0].state_dict(), models[1].state_dict())
        store.close()


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_from_the_second_step_on_clipping_reads_nothing(store: TieredStore, foreach: bool | None, scaled: bool) -> None:
    model: Any = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model.loss(step)).backward()
        with store.trace() as order:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            scaler.step(optimizer)
            scaler.update()
        assert step == 0 or not order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("init_scale", [2.0**12, 1000.0, 0.75])
def test_unscaling_by_torch(dtype: torch.dtype, init_scale: float) -> None:
    with TieredStore.open(None, dram="1MiB") as store:
        ours, theirs = pair(store, dtype, scale=init_scale)
        optimizers = zero.AdamW(ours.parameters()), torch.optim.SGD(theirs.parameters())
        for bad in (None, INF):
            found = []
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
                scaler.scale(torch.zeros(()))
                if bad is not None:
                    model.all[0].grad[1, 2] = bad
                scaler.unscale_(optimizer)
                found.append(sum(scaler._found_inf_per_device(optimizer).values()).item())
            assert found == [float(bad is not None)] * 2
            assert alike(ours, theirs)


def test_one_gradient_at_a_time_is_in_memory(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = zero.page(Tied(), store)
    model.loss(0).backward()
    alive: list[weakref.ref[torch.Tensor]] = []
    most = [0]
    real = UnitGradients.stored

    def counted(self: UnitGradients, placement: Any) -> torch.Tensor:
        made = real(self, placement)
        alive.append(weakref.ref(made))
        most[0] = max(most[0], sum(one() is not None for one in alive))
        return made

    monkeypatch.setattr(UnitGradients, "stored", counted)
    gc.disable()
    try:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        torch._foreach_div_(gradients, 3.0)
        torch._foreach_norm(gradients, 2.0, torch.float64)
        nn.utils.clip_grad_value_(model.parameters(), 1e-4, foreach=False)
    finally:
        gc.enable()
    assert len(alive) > 3 * len(gradients)
    assert most[0] <= 2, "one, and the next while its memory is taken"


def test_what_leaves_torch_is_a_copy(store: TieredStore) -> None:
    ours, theirs = pair(store)
    mine, other = ours.all[0].grad, theirs.all[0].grad
    assert isinstance(mine, StoredTensor)
    for made in (mine.cpu(), mine.clone(), copy.deepcopy(mine), copy.copy(mine), pickle.loads(pickle.dumps(mine)), mine + 0):
        assert type(made) is torch.Tensor
        assert torch.equal(made, other)
    file = io.BytesIO()
    torch.save({"gradient": mine}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["gradient"], other)
    array = mine.numpy()
    assert numpy.array_equal(array, other.numpy())
    assert numpy.array_equal(numpy.asarray(mine), other.numpy())
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert f"{ours.all[1].grad:.3f}" == f"{theirs.all[1].grad:.3f}"
    assert float(ours.all[4].grad) == float(theirs.all[4].grad)
    assert alike(ours, theirs)


def test_data_can_be_assigned(store: TieredStore) -> None:
    ours, theirs = pair(store)
    for model in (ours, theirs):
        model.all[0].grad.data = model.all[0].grad.data.clamp(-0.1, 0.1)
    assert alike(ours, theirs)
    with pytest.raises(MisuseError, match=r"cannot be given \.data of"):
        ours.all[0].grad.data = torch.zeros(3)


def test_a_shape_cannot_change_in_place(store: TieredStore) -> None:
    ours, theirs = pair(store)
    for change in (lambda g: g.t_(), lambda g: g.resize_(3), lambda g: g.unsqueeze_(0), lambda g: g.set_()):
        with pytest.raises(MisuseError, match=r"the gradient of 'all\.0': \w+_ would change the shape"):
            change(ours.all[0].grad)
    assert alike(ours, theirs)


def test_a_gradient_that_is_gone_says_so(store: TieredStore) -> None:
    ours, _ = pair(store)
    optimizer = zero.AdamW(ours.parameters())
    former = ours.all[0].grad
    row, shown = former[0], repr(former)
    backward(ours, 1)
    assert ours.all[0].grad is former
    assert repr(former) != shown, "accumulated"
    for forget in (optimizer.zero_grad, partial(setattr, ours.all[0], "grad", None)):
        forget()
        backward(ours, 2)
        assert ours.all[0].grad is not former
        for gone in (former, row):
            with pytest.raises(MisuseError, match=r"'all.0' is gone.*clone"):
                gone.norm()
            with pytest.raises(MisuseError, match="is gone"):
                gone.zero_()
        assert "gradient of 'all.0'" in repr(former)
        ours.all[0].grad = former
        with pytest.raises(MisuseError, match="is gone"):
            optimizer.step()
        optimizer.zero_grad()
    kept = ours.all[0]
    backward(ours, 3)
    left = kept.grad
    del ours, optimizer
    gc.collect()
    with pytest.raises(MisuseError, match=r"model of 'all.0' is gone"):
        left.norm()


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_gradients_that_are_assigned_to_other_parameters(store: TieredStore) -> None:
    ours, theirs = pair(store)
    optimizers = zero.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    found: list[tuple[torch.Tensor, ...]] = []
    for model in (ours, theirs):
        first, second, square = model.all[2], model.all[4], model.all[5]
        former = square.grad
        square.grad = former.t()
        former.mul_(0.9).clamp_(-0.7)[0].neg_()
        norms = former.norm(3), square.grad.norm(), square.grad[0].norm()
        backward(model, 6)
        square.grad = square.grad.contiguous()
        square.grad.add_(1)
        second.grad = first.grad[3:4]
        first.grad = first.grad.detach()
        first.grad.mul_(0.5)
        found.append((*norms, nn.utils.clip_grad_norm_([second, first], 0.1)))
    assert found[0] == found[1]
    assert alike(ours, theirs)
    assert torch.equal(optimizers[0].grad(ours.all[5]), theirs.all[5].grad)
    for optimizer in optimizers:
        optimizer.step()
    assert equal(ours.state_dict(), theirs.state_dict())


def test_after_a_step_a_gradient_can_still_be_read_and_written(store: TieredStore) -> None:
    ours, theirs = pair(store)
    optimizers = zero.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        for change in ("scale", "add", "zero"):
            for parameter in model.parameters():
                OPERATIONS[change](parameter.grad)
            optimizer.step()
        model.zero_grad(set_to_none=False)
        backward(model, 4)
    assert alike(ours, theirs)
    assert equal(ours.state_dict(), theirs.state_dict())


class Own:
    """Gradients of a loop's own: views of one flat buffer, or whole tensors, one of them NumPy's memory."""

    def __init__(self, model: nn.Module, flat: bool) -> None:
        parameters = list(model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        parts = self.flat.split([p.numel() for p in parameters])
        self.all = [part.view(p.shape) if flat else torch.zeros(p.shape) for part, p in zip(parts, parameters, strict=True)]
        if not flat:
            self.array = numpy.zeros(tuple(parameters[0].shape), numpy.float32)
            self.all[0] = torch.from_numpy(self.array)
        for parameter, grad in zip(parameters, self.all, strict=True):
            parameter.grad = grad

    def write(self, model: nn.Module, factor: float) -> None:
        for one in self.all:
            one.mul_(factor)
        if hasattr(self, "array"):
            self.array += 1


LOOPS: dict[str, Callable[[nn.Module, Any, Own], object]] = {
    "written to": lambda model, optimizer, own: own.write(model, 0.5),
    "clipped by torch": lambda model, optimizer, own: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clipped": lambda model, optimizer, own: (
        optimizer.clip_grad_norm_(0.1)
        if hasattr(optimizer, "clip_grad_norm_")
        else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ),
    "zeroed": lambda model, optimizer, own: optimizer.zero_grad(set_to_none=False),
    "zeroed by the model": lambda model, optimizer, own: model.zero_grad(set_to_none=False),
    "read": lambda model, optimizer, own: [one.norm() for one in own.all],
    "taken away": lambda model, optimizer, own: optimizer.zero_grad(),
    "another": lambda model, optimizer, own: setattr(next(model.parameters()), "grad", own.all[0] * 2),
}


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "apart"])
@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
@pytest.mark.parametrize("way", LOOPS)
def test_a_tensor_that_was_assigned_stays_the_gradient(store: TieredStore, way: str, update: Any, flat: bool) -> None:
    """Autograd adds to it, what is written to it counts, and a step uses what it has then, as in memory."""
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3))
    ours = zero.page(copy.deepcopy(theirs), store)
    found: list[list[torch.Tensor]] = []
    ours_optimizer = zero.AdamW(ours.parameters(), lr=0.1, update=update)
    loops = (ours, ours_optimizer), (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.1, fused=True))
    for model, optimizer in loops:
        values: list[torch.Tensor] = []
        found.append(values)
        for step in range(3):
            own = Own(model, flat)
            for batch in range(2 if update == "on_fetch" else 1):
                model(torch.full((2, 6), 1.0 + step + batch)).square().sum().backward()
                values += [one.clone() for one in own.all]
                if update == "on_fetch":
                    LOOPS[way](model, optimizer, own)
                    values += [one.clone() for one in own.all]
                    values += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            values += [one.clone() for one in own.all] + [p.detach().clone() for p in model.parameters()]
            if update == "on_fetch":
                own.write(model, 0.0)  # the step has had it
                if way not in ("taken away", "another"):
                    assert all(p.grad is one for p, one in zip(model.parameters(), own.all, strict=True))
                optimizer.step()  # once more, with what is there now
            optimizer.zero_grad()
            values += [p.detach().clone() for p in model.parameters()]
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


@pytest.mark.parametrize("used", [False, True])
def test_a_commit_has_what_an_assigned_gradient_is_then(store: TieredStore, used: bool) -> None:
    """A gradient that a step has used, and that is as it was, is not in the commit; one that was written to since is."""
    torch.manual_seed(0)
    model = zero.page(nn.Linear(3, 3), store)
    optimizer = zero.SGD(model.parameters(), lr=0.1)
    weight, bias = torch.ones(3, 3), torch.ones(3)
    model.weight.grad, model.bias.grad = weight, bias
    if used:
        optimizer.step()
        weight.mul_(2)
    zero.commit(model, optimizer)
    assert model.weight.grad is weight
    weight.zero_()
    zero.rollback(model, optimizer)
    assert torch.equal(model.weight.grad, torch.full((3, 3), 2.0 if used else 1.0))
    assert (model.bias.grad is None) == used
    assert used or torch.equal(model.bias.grad, bias)
    assert not weight.any()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_graph_through_an_assigned_gradient_leaves_it_as_it_is(store: TieredStore) -> None:
    """``backward(create_graph=True)`` makes a new gradient of their sum."""
    model = zero.page(nn.Linear(3, 3), store)
    kept = torch.ones(3, 3)
    model.weight.grad = kept
    model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    plain = nn.Linear(3, 3)
    plain.load_state_dict(model.state_dict())
    plain.weight.grad = torch.ones(3, 3)
    plain(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    assert torch.equal(kept, torch.ones(3, 3))
    with torch.no_grad():
        assert torch.equal(model.weight.grad.clone(), plain.weight.grad)


def test_backward_refuses_to_add_to_what_another_parameter_has(store: TieredStore) -> None:
    """In memory it would add to both. A step with the same gradient for both is made."""
    ours, theirs = pair(store)
    optimizers = zero.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters(), fused=True)
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        model.all[1].grad = model.all[4].grad.reshape(())
        optimizer.step()
        model.all[4].grad.mul_(3)
        optimizer.step()
    assert equal(ours.state_dict(), theirs.state_dict())
    for another in (ours.all[4].grad.reshape(()), ours.all[4].detach().reshape(())):
        ours.all[1].grad = another
        with pytest.raises(MisuseError, match=r"'all\.4' was assigned to the gradient of 'all\.1'.*\.clone"):
            backward(ours, 1)
        with pytest.raises(MisuseError, match="would multiply both"):
            optimizers[0].clip_grad_norm_(0.1)
    ours.all[1].grad = ours.all[4].grad.reshape(()).clone()
    backward(ours, 1)


def test_autograd_adds_to_a_stored_gradient_of_another_tensor(store: TieredStore) -> None:
    """``other.grad`` is the stored gradient, as it would be the same tensor in memory."""
    ours, theirs = pair(store)
    found = []
    for model in (ours, theirs):
        other = torch.ones_like(model.all[0]).detach().requires_grad_()
        other.grad = model.all[0].grad
        (other * 3).sum().backward()
        found += [other.grad.clone(), model.all[0].grad.clone()]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_write_that_no_name_tells_of_lands(store: TieredStore) -> None:
    ours, theirs = pair(store)
    for model in (ours, theirs):
        nn.functional.relu(model.all[0].grad, inplace=True)
        nn.functional.relu(model.all[2].grad.data, inplace=True)
        with torch.inference_mode():
            nn.functional.hardtanh(model.all[3].grad[1:], -1e-3, 1e-3, inplace=True)
            assert model.all[3].grad.abs().sum() > 0
    assert alike(ours, theirs)


def test_autograd_uses_gradients_as_numbers(store: TieredStore) -> None:
    ours, theirs = pair(store)
    weights = []
    for model in (ours, theirs):
        weight = torch.ones(33, requires_grad=True)
        (model.all[2].grad * weight).sum().backward()
        late = ((model.all[2].grad.clone() if model is theirs else model.all[2].grad) * weight).sum()  # a graph has a copy
        backward(model, 5)
        late.backward()
        weights.append(weight.grad)
    assert torch.equal(*weights)


@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
def test_hooks_change_gradients_as_they_come(store: TieredStore, update: str) -> None:
    def changed(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.7)
        nn.utils.clip_grad_norm_(parameter, 0.01)  # type: ignore[arg-type]
        if parameter.dim() > 1:
            parameter.grad.clamp_(-1e-3, 1e-3).mul_(0.3)

    torch.manual_seed(0)
    theirs: Any = Tied()
    ours = copy.deepcopy(theirs)
    zero.page(ours, store)
    optimizers = zero.AdamW(ours.parameters(), update=update), torch.optim.AdamW(theirs.parameters(), fused=True)
    ours.loss(7)  # a pager's hooks are there from the first forward on; these run after them
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(changed)
        for step in range(3):
            optimizer.zero_grad()
            model.loss(step).backward()
            optimizer.step()
    assert equal(ours.state_dict(), theirs.state_dict())


def test_an_interrupted_write_is_told(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(store)
    optimizer = zero.AdamW(ours.parameters())
    real = UnitGradients.write

    def interrupted(self: UnitGradients, *arguments: Any) -> None:
        real(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(UnitGradients, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.all[0].grad.clamp_(-1, 1)
    monkeypatch.undo()
    for use in (lambda: ours.all[0].grad.norm(), lambda: nn.utils.clip_grad_norm_(ours.parameters(), 1.0), optimizer.step):
        with pytest.raises(InterruptedStep, match=r"'all.0'.*zero_grad"):
            use()
    optimizer.zero_grad()
    backward(ours, 1)
    optimizer.step()


def test_a_list_is_multiplied_whole_or_not_at_all(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(store)
    last = placement_of(ours.all[5])[1].gradients
    monkeypatch.setattr(last, "scaled", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        torch._foreach_mul_([p.grad for p in ours.parameters()], 0.5)
    monkeypatch.undo()
    assert alike(ours, theirs)


def test_factors_are_committed(store: TieredStore) -> None:
    ours, theirs = pair(store)
    optimizer = zero.AdamW(ours.parameters())
    for model in (ours, theirs):
        for parameter in model.parameters():
            parameter.grad.mul_(0.3)
    zero.commit(ours, optimizer)
    ours.all[0].grad.mul_(0.5)
    zero.rollback(ours, optimizer)
    assert alike(ours, theirs)
    optimizer.step()
    fused = torch.optim.AdamW(theirs.parameters(), fused=True)
    fused.step()
    assert equal(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("late", [False, True])
def test_hooks_after_accumulation_see_the_sum(store: TieredStore, late: bool) -> None:
    """Whether they were registered before the package's own ones or after."""

    def norms(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        found: list[float] = []

        def look(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            found.append(parameter.grad.norm().item())

        if late:
            train(model, optimizer, steps=1)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(look) for parameter in trained]
        for batch in range(3):
            model.loss(batch).backward()
        for handle in handles:
            handle.remove()
        count = len(found)
        model.loss(3).backward()
        assert len(found) == count, "a hook that was removed is not called"
        return sorted(found)

    memory = Tied()
    paged = zero.page(copy.deepcopy(memory), store)
    ours = norms(paged, zero.AdamW(paged.parameters()))
    assert ours == norms(memory, torch.optim.AdamW(memory.parameters(), fused=True))


def test_an_update_in_a_hook_after_accumulation(store: TieredStore) -> None:
    """One optimizer for each parameter, which makes a step as the gradient arrives, and drops it."""
    memory = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    paged = zero.page(copy.deepcopy(memory), store)
    for model in (memory, paged):
        for one in model.parameters():
            optimizer = torch.optim.AdamW([one], fused=True) if model is memory else zero.AdamW([one])

            def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            one.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
    assert equal(paged.state_dict(), memory.state_dict())


def test_values_are_read_below_autograd(store: TieredStore) -> None:
    """Functions of torch in C++ read numbers of a list so, as torch.tensor does."""
    model = zero.page(nn.Linear(8, 8), store)
    expected = model.state_dict()["weight"]
    with torch._C._AutoDispatchBelowAutograd():
        assert torch.equal(model.weight.sum(1), expected.sum(1))


def test_modes_see_nothing_of_paging(store: TieredStore) -> None:
    """Selective checkpointing looks at each operation in forward, and expects the same ones when it computes again."""

    def choose(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    memory = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(20)])
    paged = zero.page(copy.deepcopy(memory), store)
    gradients = []
    for model in (memory, paged):
        x = torch.ones(2, 96)
        for block in model:
            contexts = partial(create_selective_checkpoint_contexts, choose)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        x.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == 40
    assert equal(*gradients)


# -- gradients that are undefined, and passes that an exception ends -----------------------------------------------------


class OneSide(torch.autograd.Function):
    """Scales by a sum of weights, and has no gradient for these; or raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.fails:
            raise ArithmeticError
        return grads[0], None, None


class Undefined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.arange(12.0).view(3, 4)), nn.Parameter(torch.ones(3))

    def forward(self, how: str) -> torch.Tensor:
        if how == "norm of order 0":
            return torch.linalg.vector_norm(self.weight, 0) + self.other.sum()
        if how == "used":
            return (self.weight * self.other[:, None]).sum()
        if how == "fails":
            return self.weight @ OneSide.apply(self.other.expand(4, 3).sum(1), self.weight, True)
        found: torch.Tensor = OneSide.apply(self.other.sum(), self.weight, False)
        return found


@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
@pytest.mark.parametrize("how", ["norm of order 0", "a function that returns None"])
def test_an_undefined_gradient_changes_nothing(how: str, update: zero.Update) -> None:
    """As in memory: ``grad`` stays None, or what it was."""
    orders = [[how], ["used", how], [how, "used"], ["used", how, "used"]] if update == "on_fetch" else [[how]]
    for order in orders:
        found = []
        for paged in (False, True):
            with TieredStore.open(None, dram=DRAM) as store:
                model: Any = zero.page(Undefined(), store) if paged else Undefined()
                made: Any = partial(zero.AdamW, update=update) if paged else torch.optim.AdamW
                optimizer, grads = made(model.parameters(), lr=0.1), list[Any]()
                for _ in range(2):
                    for each in order:
                        model(each).backward()
                    if update == "on_fetch":
                        grads += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                    optimizer.step()
                    optimizer.zero_grad()
                found.append((grads, [p.detach().clone() for p in model.parameters()]))
        (theirs, values), (ours, stored) = found
        assert [one is None for one in ours] == [one is None for one in theirs]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None)
        assert all(map(torch.equal, stored, values))


def test_a_model_that_is_gone_leases_nothing_after_an_exception_in_backward() -> None:
    with TieredStore.open(None, dram=DRAM) as store:
        model = zero.page(Undefined(), store)
        with pytest.raises(ArithmeticError):
            model("fails").sum().backward()
        del model
        gc.collect()
        store.offload()
        model = zero.page(Undefined(), store, existing="overwrite")
        model("used").backward()
        assert model.weight.grad is not None


def fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("calls", ["commit", "commit_async", "rollback", "delete"])
def test_an_exception_in_a_hook_of_a_parameter_leaves_nothing_that_a_model_that_is_gone_leases(
    tmp_path: Path, calls: str
) -> None:
    """autograd keeps the graph in a queue until the next backward pass of the thread."""
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        store.commit()
        model = zero.page(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), store)
        model[1].weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            model(torch.ones(4, 64)).sum().backward()
        del model
        gc.collect()
        if calls == "delete":
            assert sum(map(store.delete_owned, store.owners())) > 0
            assert not store.owners()
        else:
            done: Any = getattr(store, calls)()
            assert (done.result() if calls == "commit_async" else done) == store.generation


class Cut(torch.autograd.Function):
    """Its backward fails, if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.fails:
            raise ArithmeticError
        return gradient, None


class Unpacked:
    """What unpacks saved tensors, and fails."""

    def __call__(self, saved: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


class Ended(nn.Module):
    """Its backward pass is ended by an exception, in the way that it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.way = ""

    def hook(self, way: str) -> Any:
        layer: Any = self.layers[1]
        if way == "a hook of a parameter":
            return layer.weight.register_hook(fail)
        if way == "a hook after accumulation":
            return layer.weight.register_post_accumulate_grad_hook(fail)
        if way == "a hook of a module":
            return layer.register_full_backward_hook(lambda module, given, taken: fail(taken[0]))
        self.way = way
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 1 and self.way == "unpacking":
                with torch.autograd.graph.saved_tensors_hooks(torch.clone, Unpacked()):
                    x = x.square()
            x = Cut.apply(x, number == 1 and self.way == "a function")
        return x.square().mean()


@pytest.mark.parametrize("calls", ["commit", "commit_async", "rollback"])
@pytest.mark.parametrize(
    "way", ["a function", "unpacking", "a hook of a parameter", "a hook after accumulation", "a hook of a module"]
)
def test_the_store_alone_goes_on_after_an_exception_in_backward(tmp_path: Path, way: str, calls: str) -> None:
    theirs, ours, x = Ended(), Ended(), torch.ones(2, 96)
    with TieredStore.open(tmp_path, dram="1MiB") as store:
        zero.page(ours, store)
        zero.commit(ours)
        for model in (theirs, ours):
            handle = model.hook(way)
            with pytest.raises(ArithmeticError):
                model(x).backward()
            model.way = ""
            if handle is not None:
                handle.remove()
        found: Any = getattr(store, calls)()
        assert (found.result() if calls == "commit_async" else found) == store.generation
        assert store.statistics().tiers[0].held == 0
        if calls == "rollback":  # gradients are of the store
            with pytest.raises(InterruptedStep, match="has not followed yet"):
                ours(x)
            zero.rollback(ours)
            theirs.zero_grad()
        for model in (theirs, ours):  # else they add up with what had arrived
            model(x).backward()
        assert alike(ours, theirs)
        assert store.commit() == store.generation


def test_a_commit_of_the_store_leaves_a_gradient_that_was_cut_off_refused(store: TieredStore) -> None:
    model, x = Ended(), torch.ones(2, 96)
    zero.page(model, store)
    optimizer = zero.AdamW(model.parameters())
    model(x).backward()
    _, unit, _ = placement_of(model.layers[1].weight)
    real, unit.gradients.write = unit.gradients.write, fail  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        model(x).backward()
    unit.gradients.write = real  # type: ignore[method-assign]
    store.commit()
    for use in (optimizer.step, lambda: zero.commit(model, optimizer), lambda: model(x).backward()):
        with pytest.raises(InterruptedStep, match=r"was added to one of before.*zero_grad\(\)"):
            use()
        store.commit()
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


def test_a_commit_within_backward_lets_go_of_nothing(store: TieredStore) -> None:
    theirs, ours, x = Ended(), Ended(), torch.ones(2, 96)
    zero.page(ours, store)
    refused: list[Exception] = []

    def commit(gradient: torch.Tensor) -> None:
        try:
            store.commit()
        except LeaseConflict as error:
            refused.append(error)

    layer: Any = ours.layers[1]
    layer.bias.register_hook(commit)
    layer.weight.register_hook(commit)
    for model in (theirs, ours):
        model(x).backward()
    assert refused
    assert alike(ours, theirs)


class Hooked(nn.Module):
    """Its parameters have hooks, or attributes, that refer to it."""

    def __init__(self, mode: str, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(96, 96), nn.Linear(96, 96)
        self.mode, self.reentrant, self.fails, self.calls = mode, reentrant, False, 0

    def hook(self) -> Any:
        if self.mode == "a method":
            return self.first.weight.register_hook(self.called)
        if self.mode == "a closure":
            return self.first.weight.register_hook(lambda gradient: self.called(gradient))
        self.first.weight.module = self  # type: ignore[assignment]
        return self.first.weight.register_hook(called) if self.mode == "an attribute, and a hook" else None

    def called(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails:
            raise ArithmeticError
        return gradient * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = nn.Sequential(self.first, nn.Tanh(), self.second)
        return layers(x) if self.reentrant is None else checkpoint(layers, x, use_reentrant=self.reentrant)


def called(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


REFERRING = ["a method", "a closure", "an attribute", "an attribute, and a hook"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", REFERRING)
def test_a_model_that_its_parameters_refer_to_is_collected_after_backward(tmp_path: Path, mode: str, fails: bool) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Hooked(mode), store)
        model(torch.ones(2, 96)).sum().backward()  # without hooks yet
        model.hook()
        model.fails = fails and mode in ("a method", "a closure")
        try:
            model(torch.ones(2, 96)).sum().backward()
        except ArithmeticError:
            assert model.fails
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        assert store.commit() == 1


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("mode", REFERRING)
def test_gradients_of_parameters_that_refer_to_their_model_are_those_of_memory(
    store: TieredStore, mode: str, reentrant: bool | None
) -> None:
    theirs, ours = Hooked(mode, reentrant), Hooked(mode, reentrant)
    zero.page(ours, store)
    x = torch.randn(3, 96, requires_grad=True)

    def step(model: Hooked, *, twice: bool = False) -> None:
        loss = model(x).square().mean()
        for again in (True, False) if twice else (False,):
            loss.backward(retain_graph=again)

    handles: list[Any] = []
    for number in range(6):
        for model in (theirs, ours):
            if number == 1:
                handles.append(model.hook())
            if number == 4 and handles[0] is not None:
                handles.pop(0).remove()
            if number == 5:
                model.zero_grad()
            losses = [model(x).sum(), model(x).square().sum()] if number == 3 else []  # two graphs at a time
            step(model, twice=number == 2 and reentrant is None)
            for loss in losses:
                loss.backward()
        assert alike(ours, theirs)
        assert ours.calls == theirs.calls


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_gradient_that_lost_its_graph_leads_none_in_silence(store: TieredStore) -> None:
    """After ``backward(create_graph=True)`` it has its values, and raises where autograd would record a use of it."""
    ours, theirs = pair(store)
    ours.zero_grad()
    theirs.zero_grad()
    for model in (ours, theirs):
        (model([torch.ones(p.shape) for p in model.parameters()]) ** 2).backward(create_graph=True)
    grads: list[Any] = [p.grad for p in ours.parameters()]
    with torch.no_grad():
        assert alike(ours, theirs)
    assert all(p.grad is not None and p.grad.requires_grad for p in theirs.parameters())
    for use in (torch.norm, torch.sum, torch.clone, lambda grad: grad.view(-1).sum(), lambda grad: grad.cpu()):
        with pytest.raises(MisuseError, match=r"without its graph.*torch\.autograd\.grad\(loss, parameters, create_graph=True"):
            use(grads[-1])
    grad, other = grads[0], theirs.all[0].grad
    assert isinstance(other, torch.Tensor)
    for ask in (torch.isfinite, torch.argmax, lambda grad: grad > 0, torch.Tensor.tolist, lambda grad: grad[1, 0].item()):
        found, expected = ask(grad), ask(other)
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
    assert torch.allclose(grad, grad)
    norm = by_torch(theirs)(1.0)
    assert torch.equal(by_torch(ours)(1.0), norm)
    assert same_bits(grads[0].detach().sum(), torch.sum(theirs.all[0].grad.detach()))  # type: ignore[union-attr]
    for model, kind in ((ours, zero.SGD), (theirs, torch.optim.SGD)):
        made: Any = kind
        made(model.parameters(), lr=0.1).zero_grad(set_to_none=False)
        backward(model, 3)
    assert all(torch.equal(grad.sum(), p.grad.sum()) for grad, p in zip(grads, theirs.parameters(), strict=True))  # type: ignore[union-attr]


class Unfreezes(nn.Module):
    """Unfreezes a parameter in the middle of its forward, and computes with it: as it is read of its module, at the end, or as
    the model has it elsewhere, before another module runs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.how, self.listed = how, [self.layers[3].weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        self.listed[0].requires_grad_(True)
        if self.how == "read":
            return nn.functional.linear(x, self.layers[3].weight)
        return self.layers[2](nn.functional.linear(x, self.listed[0]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["read", "captured"])
def test_a_parameter_that_is_unfrozen_within_a_unit_in_use(store: TieredStore, how: str) -> None:
    """All of the model is one unit. Its gradient is the pager's as any other: ranks would not reduce what autograd made."""
    torch.manual_seed(0)
    reference = Unfreezes(how)
    model = zero.page(copy.deepcopy(reference), store)
    (unit,) = pager_of(model).units
    x = torch.randn(3, 8)
    for module in reference, model:
        module.layers[3].requires_grad_(False)
        module(x).square().sum().backward()
    states = {one.parameter: state for one, state in unit.gradients.states.items()}
    assert states[model.layers[3].weight].taker is not None
    assert model.layers[3].weight in {one.parameter for one in unit.gradients.states if one.parameter.requires_grad}
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert other.grad is None or same_bits(mine.grad.detach().clone(), other.grad)


def test_modules_of_a_unit_in_use_do_not_look_at_all_of_its_parameters(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a forward takes as many looks as the square of the layers."""
    looks = 0
    real = Pager._hook_gradients

    def counted(pager: Pager, unit: Any) -> None:
        nonlocal looks
        looks += len(unit.gradients.unhooked)
        real(pager, unit)

    monkeypatch.setattr(Pager, "_hook_gradients", counted)
    model = zero.page(nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)]), store)
    assert len(pager_of(model).units) == 1
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
    assert looks == 24, "each parameter once"


@pytest.mark.parametrize("what", ["hook", "attribute"])
def test_a_model_that_its_parameter_refers_to_since_the_middle_of_forward_is_collected(store: TieredStore, what: str) -> None:
    class Refers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if what == "hook":
                self.first.weight.register_hook(lambda grad: (self, grad)[1])
            else:
                self.first.weight.owner = [self]  # type: ignore[assignment]
            return self.second(x)  # type: ignore[no-any-return]

    model = zero.page(Refers(), store)
    assert len(pager_of(model).units) == 1
    model(torch.ones(2, 8)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
