"""Parameters outside of forward: what reads, writes and views of paged ones give is what they give in memory, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.quick import quick
from tiered import CapacityError, MisuseError, TieredStore, zero

Model = Any


class Layers(nn.Module):
    """Linear layers with a tied head, a weight in a plain list, and one parameter of its own; no unit holds all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 96, bias=False)
        self.convolution = nn.Conv1d(1, 4, 3).to(memory_format=torch.contiguous_format)
        self.frozen = nn.Linear(48, 48).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.extra = nn.Parameter(torch.randn(96, 48))
        self.listed = [self.second.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.frozen(x)).tanh()
        x = x @ self.listed[0] * self.scale
        x = (x @ self.extra).unsqueeze(1)
        penalty = sum(parameter.abs().mean() for parameter in self.parameters())
        return self.convolution(x).flatten(1) @ self.first.weight.t()[:1, :1].expand(184, 2) + penalty


def build() -> Layers:
    torch.manual_seed(0)
    return Layers()


CHAINS = ("disk", "three tiers", "no disk")


def named(cases: Collection[str]) -> pytest.MarkDecorator:
    """Each case over one of the chains in every run, and over all of them in the long one."""
    return pytest.mark.parametrize(
        ("opened", "name"),
        quick(product(CHAINS, cases), [(CHAINS[number % len(CHAINS)], name) for number, name in enumerate(cases)]),
        indirect=["opened"],
    )


@pytest.fixture(params=CHAINS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    if request.param == "no disk":
        store = TieredStore.open(None, dram="1MiB")
    else:
        hbm = "1MiB" if request.param == "three tiers" else None
        store = TieredStore.open(tmp_path / "store", dram="1MiB", hbm=hbm, device="cpu")
    with store:
        yield store
        store.close()


class Sides:
    """The same model in memory and paged, each with its optimizer."""

    def __init__(self, store: TieredStore) -> None:
        self.x = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
        self.memory, self.paged = build(), zero.page(build(), store)
        trained = [parameter for parameter in self.memory.parameters() if parameter.requires_grad]
        self.optimizers: dict[nn.Module, torch.optim.Optimizer] = {
            self.memory: torch.optim.AdamW(trained, lr=1e-2, fused=True),
            self.paged: zero.AdamW([parameter for parameter in self.paged.parameters() if parameter.requires_grad], lr=1e-2),
        }

    def step(self, model: Model, more: Callable[[Model], torch.Tensor] | None = None) -> list[torch.Tensor]:
        optimizer = self.optimizers[model]
        loss = model(self.x).square().mean()
        if more is not None:
            loss = loss + more(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    def agree(self, what: Callable[[Model], Any], more: Callable[[Model], torch.Tensor] | None = None) -> None:
        """Assert that ``what`` gives the same for both models, before and after steps, and leaves them equal."""
        for _ in range(2):
            expected, found = frozen(what(self.memory)), frozen(what(self.paged))
            assert same(expected, found), (expected, found)
            assert same(self.step(self.memory, more), self.step(self.paged, more))
        state = self.paged.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in self.memory.state_dict().items())


def frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [frozen(one) for one in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and (left.dtype, left.stride()) == (right.dtype, right.stride())
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return np.array_equal(left, right) if isinstance(left, np.ndarray) else bool(left == right)


READS: dict[str, Callable[[Model], Any]] = {
    "norms": lambda m: [p.norm() for p in m.parameters()],
    "repr": lambda m: [repr(p) for p in m.parameters()],
    "repr of a view": lambda m: repr(m.extra.t()),
    "format": lambda m: f"{m.scale.detach():.3f} {m.extra[0, 0].item()}",
    "data": lambda m: [p.data for p in m.parameters()],
    "views": lambda m: [m.extra.t(), m.extra[3], m.extra.view(-1)[5:], m.extra.t()[2].unsqueeze(0), m.extra.T.mT],
    "geometry": lambda m: [(p.stride(), p.is_contiguous(), p.t().stride(), p.shape) for p in m.parameters() if p.dim() < 3],
    "facts": lambda m: [(p.dtype, p.device, p.numel(), p.nbytes, p.element_size(), p.is_leaf, p.dim()) for p in m.parameters()],
    "recording": lambda m: [(p.detach().requires_grad, p.data.is_leaf, p.reshape(-1).is_leaf) for p in m.parameters()],
    "like": lambda m: [torch.zeros_like(p) for p in m.parameters()] + [m.extra.new_ones(3)],
    "an element, like": lambda m: (m.extra.new_full((2,), m.extra.detach()[0, 0]), torch.full_like(m.extra, m.scale.detach())),
    "numpy": lambda m: [p.detach().numpy() for p in m.parameters()],
    "asarray": lambda m: np.asarray(m.extra.data) + np.asarray(m.extra.detach().t().t()),
    "lists": lambda m: (m.scale.tolist(), m.extra[0].tolist(), float(m.scale.detach()), bool(m.scale > 1), len(m.extra)),
    "storages": lambda m: [(p.untyped_storage().nbytes(), p.data.untyped_storage().size()) for p in m.parameters()],
    "addresses": lambda m: (
        [p.data_ptr() == p.data.data_ptr() == p.detach().view(-1).data_ptr() for p in m.parameters()],
        m.extra[3].data_ptr() - m.extra.data_ptr(),
        len({p.untyped_storage().data_ptr() for p in m.parameters()}),
    ),
    "parameters of state_dict": lambda m: [
        value is p for value, p in zip(m.state_dict(keep_vars=True).values(), m.parameters(), strict=True)
    ],
    "computed with state_dict": lambda m: [
        value * 2 + p.detach() for value, p in zip(m.state_dict().values(), m.parameters(), strict=True)
    ],
    "views of state_dict": lambda m: [
        m.state_dict()["extra"].t(),
        *m.state_dict()["extra"].chunk(2),
        m.state_dict()["extra"][1],
    ],
    "texts of state_dict": lambda m: [repr(value) for value in m.state_dict().values()],
    "called with state_dict": lambda m: torch.func.functional_call(m, m.state_dict(), (torch.ones(2, 48),)),
    "iteration": lambda m: [row.sum() for row in m.extra],
    "unbind": lambda m: list(m.extra.unbind(1))[:3] + list(m.extra.chunk(5)) + list(torch.split(m.extra, 7, dim=1)),
    "indices": lambda m: [m.extra[[1, 2]], m.extra[m.extra > 0], m.extra[torch.tensor([3, 1])], m.extra[..., 0], m.extra[None]],
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "cat": lambda m: torch.cat([p.detach().view(-1) for p in m.parameters()]),
    "stack": lambda m: torch.stack([m.first.weight, m.extra]),
    "equal": lambda m: (torch.equal(m.extra, m.extra), torch.equal(m.extra, m.first.weight), torch.allclose(m.extra, m.extra)),
    "histogram": lambda m: torch.histc(m.extra.detach(), 10),
    "quantile": lambda m: torch.quantile(m.extra, 0.3),
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
    "operators": lambda m: [m.extra + 1, 1 - m.extra, m.extra @ m.first.weight.t(), m.extra**2, -m.scale, 2 / m.scale],
    "einsum": lambda m: torch.einsum("ij,kj->ik", m.first.weight, m.extra),
    "conversions": lambda m: [m.extra.float(), m.extra.double(), m.extra.to(torch.bfloat16), m.extra.cpu(), m.extra.to("cpu")],
    "functional": lambda m: nn.functional.linear(torch.ones(48), m.extra, m.first.bias),
    "moved": lambda m: [p.clone() for p in m.to("cpu").float().parameters()],
    "averaged": lambda m: average(m),
    "torch.func.grad": lambda m: [
        torch.func.grad(lambda w: w.abs().clamp(0, 1).sum())(m.extra),
        torch.func.grad(lambda x: (x @ m.extra.t()).sin().sum())(torch.ones(48)),
    ],
    "torch.func.vmap": lambda m: torch.func.vmap(lambda row: row.clamp(-1, 1).sum())(m.extra.t()),
    "torch.func.jacrev": lambda m: torch.func.jacrev(lambda bias: (m.extra.t() @ bias).sin())(m.first.bias),
    "forward mode": lambda m: forward_mode(m),
    "torch.tensor": lambda m: [copied(p) for p in m.parameters()] + [copied(m.extra.t()), copied([m.scale, m.scale])],
    "torch.tensor of elements": lambda m: copied([m.extra[0, 1], m.extra[2, 3]]),
    "as_tensor": lambda m: [
        torch.as_tensor(m.extra, dtype=torch.float64),
        copied(m.extra, functools.partial(torch.asarray, dtype=torch.bfloat16)),
    ],
    "torch.asarray": lambda m: copied(m.extra, functools.partial(torch.asarray, copy=True)),
    "new_tensor": lambda m: copied(m.extra, torch.zeros(1).new_tensor),
    "sparse": lambda m: torch.sparse_coo_tensor(torch.arange(96)[None], m.first.bias, check_invariants=False).to_dense(),
    "torch.jit.script": lambda m: [scripted()(m.extra, m.scale), scripted()(m.extra.t(), m.scale)],
}


def copied(value: Any, copy: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
    copy = copy or torch.tensor  # what it is while a model is paged
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # detach().clone() would be better
        return copy(value)


@functools.cache
def scripted() -> Callable[..., torch.Tensor]:
    def function(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (weight * weight).sum() * scale

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: Callable[..., torch.Tensor] = torch.jit.script(function)
        return made


def forward_mode(model: Model) -> list[torch.Tensor]:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(model.extra, torch.ones(96, 48))
        return list(torch.autograd.forward_ad.unpack_dual(dual.sin() * model.scale))


def average(model: Model) -> list[torch.Tensor]:
    averages = [torch.zeros_like(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for mean, parameter in zip(averages, model.parameters(), strict=True):
            mean.mul_(0.9).add_(parameter, alpha=0.1)
            mean.lerp_(parameter, 0.3)
    return averages


@named(READS)
def test_a_read_gives_what_it_gives_in_memory(opened: TieredStore, name: str) -> None:
    Sides(opened).agree(READS[name])


PENALTIES: dict[str, Callable[[Model], torch.Tensor]] = {
    "l1": lambda m: 1e-2 * sum(p.abs().sum() for p in m.parameters() if p.requires_grad),
    "l2 of views": lambda m: sum(p.view(-1).square().sum() for p in m.parameters() if p.requires_grad),
    "orthogonal": lambda m: (m.second.weight @ m.second.weight.t() - torch.eye(96)).norm(),
    "two": lambda m: (m.extra * m.first.weight).sum() * m.scale,
    "rows": lambda m: sum(row.exp().sum() for row in m.extra[:3]),
    "vector": lambda m: nn.utils.parameters_to_vector(p for p in m.parameters() if p.requires_grad).norm(),
    "foreach": lambda m: torch.stack(torch._foreach_norm([p for p in m.parameters() if p.requires_grad])).sum(),
    "checkpointed": lambda m: checkpoint(recomputed, m, torch.ones(96), use_reentrant=False),
    "gathered": lambda m: inside(m),
    "custom function": lambda m: Product.apply(m.second.weight, m.extra).sin().sum(),
    "custom function of views": lambda m: Product.apply(m.extra.t()[:9], m.first.weight[:, 1:3]).sin().sum(),
    "hooks of others": lambda m: under_hooks(m),
}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        left, right = ctx.saved_tensors
        return gradient @ right.t(), left.t() @ gradient


def under_hooks(model: Model) -> torch.Tensor:
    """Hooks that return what they are given, which is the parameter itself: abs would hide its NaN."""
    with torch.autograd.graph.save_on_cpu():
        loss = model(torch.ones(2, 48)).abs().sum() + model.extra.abs().sum()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], lambda packed: packed[0]):
        return loss + (model.extra * model.first.weight).abs().sum() + model(torch.ones(1, 48)).sum()


def recomputed(model: Model, x: torch.Tensor) -> torch.Tensor:
    return (x @ model.extra @ model.frozen.weight).sin().sum()


def inside(model: Model) -> torch.Tensor:
    with zero.gathered([model.extra, model.scale]):
        return (model.extra.square().mean() * model.scale).exp()


@named(PENALTIES)
def test_a_read_is_differentiable(opened: TieredStore, name: str) -> None:
    Sides(opened).agree(lambda model: model.scale, PENALTIES[name])


@torch.no_grad()
def initialise(model: Model) -> None:
    torch.manual_seed(5)
    init = nn.init
    init.kaiming_uniform_(model.first.weight)
    init.orthogonal_(model.second.weight)
    init.trunc_normal_(model.extra, std=0.1)
    init.constant_(model.first.bias, 0.25)
    init.dirac_(model.convolution.weight)
    init.eye_(model.frozen.weight)
    init.sparse_(model.extra, 0.2)


@torch.no_grad()
def gather(model: Model) -> None:
    block = contextlib.nullcontext() if type(model.scale) is nn.Parameter else zero.gathered(model, write=True)
    with block:
        for parameter in model.parameters():
            parameter.mul_(0.7)
        model.extra.data = torch.full((96, 48), 0.125)


def assign(model: Model) -> None:
    model.extra.data = torch.linspace(-1, 1, 96 * 48).view(96, 48)
    model.scale.data = model.scale.data * 2


def in_place(what: Callable[[Model], object]) -> Callable[[Model], None]:
    def write(model: Model) -> None:
        with torch.no_grad():
            what(model)

    return write


def add_to(model: Model) -> None:
    weight = model.extra.data
    weight += 1
    model.extra.data = weight  # as peft merges


@torch.no_grad()
def gather_to_read(model: Model) -> None:
    block = contextlib.nullcontext() if type(model.scale) is nn.Parameter else zero.gathered(model)
    with block:
        model.extra.mul_(2)
        model.scale.data = torch.tensor(3.0)


@functools.cache
def scripted_write() -> Callable[[torch.Tensor], torch.Tensor]:
    def halved(w: torch.Tensor) -> torch.Tensor:
        return w.mul_(0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(halved)  # type: ignore[no-any-return]


WRITES: dict[str, Callable[[Model], None]] = {
    "multiplied": in_place(lambda m: [p.mul_(0.5) for p in m.parameters()]),
    "scripted": lambda m: [scripted_write()(m.extra.data), scripted_write()(m.first.bias.data)],
    "merged": lambda m: [m.extra.data.__iadd__(m.scale), setattr(m.extra, "data", recorded(m.extra.data, m.scale))],
    "merged at places": lambda m: [
        m.extra.data.reshape(-1).scatter_add_(0, torch.arange(0, 900, 7), m.scale.expand(129)),
        m.first.weight.detach().T[2:5].mul_(m.scale),
        m.first.bias.data.view(-1)[1:].copy_(m.scale.expand(m.first.bias.numel() - 1)),
    ],
    "clamped": in_place(lambda m: [p.data.clamp_(-0.05, 0.05) for p in m.parameters()]),
    "assigned": assign,
    "added": add_to,
    "one row": in_place(lambda m: m.extra.__setitem__(0, 3.0)),
    "a row of data": in_place(lambda m: m.extra.data[3].fill_(2)),
    "a column of a view": in_place(lambda m: m.extra.detach().t()[1:3].zero_()),
    "copied": in_place(lambda m: m.extra.copy_(m.first.weight)),
    "initialised": initialise,
    "reset": lambda m: reset(m),
    "from a vector": in_place(lambda m: nn.utils.vector_to_parameters(torch.linspace(0, 1, numbers(m)), m.parameters())),
    "foreach": in_place(lambda m: torch._foreach_mul_([p for p in m.parameters() if p.requires_grad], 0.9)),
    "out": in_place(lambda m: torch.add(m.extra, 1, out=m.extra)),
    "masked": in_place(lambda m: m.extra.masked_fill_(m.extra > 0, 0.0)),
    "gathered": gather,
    "gathered to read": gather_to_read,
    "values of state_dict": lambda m: [value.mul_(0.9) for value in m.state_dict().values()],
    "foreach with a tensor of scalars": in_place(
        lambda m: torch._foreach_addcmul_(
            [m.extra, m.scale], [m.extra, m.scale], [m.extra + 9, m.scale + 9], torch.tensor([0.1, 0.2])
        )
    ),
    "a list of values of state_dict": lambda m: torch._foreach_mul_(list(m.state_dict().values()), 0.9),
    "a view of a value of state_dict": lambda m: m.state_dict()["extra"].t()[2].view(-1)[3:].zero_(),
    "an element of a value of state_dict": lambda m: m.state_dict()["extra"].__setitem__((0, 1), 5.0),
    "out= a value of state_dict": lambda m: torch.add(m.extra.detach(), 1, out=m.state_dict()["extra"]),
    "a parameter of a value of state_dict": lambda m: descend(nn.Parameter(m.state_dict()["extra"])),
}


def descend(parameter: nn.Parameter) -> None:
    parameter.square().sum().backward()
    torch.optim.SGD([parameter], 0.1).step()


def reset(model: Model) -> None:
    torch.manual_seed(3)
    model.first.reset_parameters()
    model.convolution.reset_parameters()


def numbers(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@named(WRITES)
def test_a_write_lands_in_the_store(opened: TieredStore, name: str) -> None:
    sides = Sides(opened)
    sides.agree(lambda model: (WRITES[name](model), [p.sum() for p in model.parameters()])[1])


def shrink(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.9)


@torch.no_grad()
def clamp(parameter: nn.Parameter) -> None:
    parameter.clamp_(-0.05, 0.05)


def replace_row(parameter: nn.Parameter) -> None:
    parameter.data[0] = 0.25


MOMENTS: dict[str, Callable[[Model, Callable[[nn.Parameter], None]], object]] = {
    "before the module": lambda m, write: m.second.register_forward_pre_hook(lambda *_: write(m.second.weight)),
    "before the model": lambda m, write: m.register_forward_pre_hook(lambda *_: write(m.extra)),
    "after the module": lambda m, write: m.frozen.register_forward_hook(lambda *_: write(m.frozen.weight)),
    "in backward": lambda m, write: m.extra.register_hook(lambda _: write(m.extra)),
    "after accumulation": lambda m, write: m.extra.register_post_accumulate_grad_hook(write),
}


class Chain(nn.Sequential):
    """Layers that do not fit into a budget of 1 MiB with their states, and use each parameter once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 96)
        self.frozen = nn.Linear(96, 96).requires_grad_(False)
        self.between = nn.ModuleList(nn.Linear(96, 96) for _ in range(14))
        self.extra = nn.Parameter(torch.randn(96, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.second(self.first(x).tanh()).tanh()).tanh()
        for layer in self.between:
            x = layer(x).tanh()
        return x @ self.extra


SAVED_BEFORE = ("after the module", clamp)
"""torch refuses it in backward, because what was saved has changed."""


WRITERS = (shrink, replace_row, clamp)


@pytest.mark.parametrize(
    ("moment", "write"),
    quick(
        [pair for pair in product(MOMENTS, WRITERS) if pair != SAVED_BEFORE],
        [(moment, WRITERS[number % len(WRITERS)]) for number, moment in enumerate(sorted(MOMENTS))],
    ),
)
def test_a_write_in_a_step_lands_in_the_store(store: TieredStore, moment: str, write: Callable[[nn.Parameter], None]) -> None:
    memory, paged = Chain(), zero.page(Chain(), store)
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))
    losses = []
    for model in (memory, paged):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True) if model is memory else zero.AdamW(trained)
        MOMENTS[moment](model, write)
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    state = paged.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in memory.state_dict().items())


def test_a_write_after_a_parameter_was_saved_raises_in_backward(store: TieredStore) -> None:
    model = zero.page(Chain(), store)
    model.second.register_forward_hook(lambda *_: clamp(model.second.weight))
    loss = model(torch.ones(6, 48)).sum()
    with pytest.raises(MisuseError, match="after this graph was made"):
        loss.backward()


def test_a_write_is_committed(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(build(), store)
        model.extra.data.fill_(7)
        zero.commit(model)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(build(), store, existing="resume")
        assert torch.equal(model.extra, torch.full((96, 48), 7.0))


def test_an_update_that_waits_is_seen_by_a_read(store: TieredStore) -> None:
    sides = Sides(store)
    for _ in range(3):
        sides.step(sides.memory)
        sides.step(sides.paged)
        assert torch.equal(sides.paged.extra, sides.memory.extra)  # the update had waited
        view, expected = sides.paged.extra.detach()[2], sides.memory.extra.detach()[2]
        sides.step(sides.memory)
        sides.step(sides.paged)
        assert torch.equal(view, expected), "a view shows the present values, as torch's does"


def test_a_graph_of_before_a_write_raises(store: TieredStore) -> None:
    model = zero.page(build(), store)
    loss = model.extra.square().sum()
    model.extra.data.mul_(2)
    with pytest.raises(MisuseError, match="after this graph was made"):
        loss.backward()


def test_functions_that_take_a_parameter_as_an_identity(store: TieredStore) -> None:
    sides = Sides(store)
    found = []
    for model in (sides.memory, sides.paged):
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        seen: list[torch.Tensor] = []
        handle = model.extra.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
        loss = model(sides.x).square().mean()
        found.append(list(torch.autograd.grad(loss, wanted, retain_graph=True)))
        found[-1] += torch.autograd.grad(loss, [model.scale, model.extra])
        found[-1] += torch.autograd.grad(model.scale * 2, wanted, materialize_grads=True)
        found[-1] += seen
        handle.remove()
        assert {model.extra, model.scale} == {model.scale, model.extra}
        assert model.extra in set(model.parameters())
    assert same(found[0], found[1])
    loss = sides.paged(sides.x).square().mean()
    loss.backward(inputs=[sides.paged.extra])
    assert sides.paged.extra.grad is not None
    assert sides.paged.scale.grad is None


def test_the_graph_has_nodes_of_what_nobody_holds(store: TieredStore) -> None:
    """Of parameters, of views, and of views without a history: as functions of torch that take them for places find them."""
    sides = Sides(store)
    found: list[list[Any]] = []
    for model in (sides.memory, sides.paged):
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        seen: list[Any] = []
        handle = register_multi_grad_hook(wanted, lambda gradients, seen=seen: seen.extend(one.clone() for one in gradients))
        with handle:
            model(sides.x).square().mean().backward()
        leaf = model.extra.detach().requires_grad_()
        seen += [type(get_gradient_edge(one).node).__name__ for one in (*wanted, leaf)]
        view = model.extra.view(-1)
        seen += torch.autograd.grad((view * 2).sum(), [get_gradient_edge(view)])
        found.append(seen)
        model.zero_grad()
    assert same(found[0], found[1])


def test_penalties_of_all_parameters_need_one_unit_of_memory(store: TieredStore) -> None:
    """In a pool of a fifth of the parameters."""
    model = zero.page(nn.Sequential(*(nn.Linear(160, 160) for _ in range(52))), store)
    reference = nn.Sequential(*(nn.Linear(160, 160) for _ in range(52)))
    reference.load_state_dict(model.state_dict())
    results = []
    for side in (reference, model):
        sum(parameter.abs().sum() for parameter in side.parameters()).backward()
        results.append(nn.utils.parameters_to_vector(side.parameters()).detach())
    assert torch.equal(results[0], results[1])
    optimizer = zero.AdamW(model.parameters())
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.grad(mine), theirs.grad)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match=r"bytes of the memory budget can be gathered"), zero.gathered(model):
        pass
    assert sum(tier.held for tier in store.statistics().tiers) == 0


def recorded(view: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    view.add_(other)
    view += other
    view.data.mul_(2)
    return view


def swapped(call: Callable[[], object]) -> object:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return call()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


REFUSED: dict[str, tuple[Callable[[Model], object], str]] = {
    "pickle of the model": (pickle.dumps, r"cannot be copied or pickled: save model\.state_dict\(\)"),
    "deepcopy of a parameter": (lambda m: copy.deepcopy(m.extra), "cannot be copied or pickled"),
    "pickle": (lambda m: pickle.dumps(m.extra), "cannot be copied or pickled"),
    "another of its class": (lambda m: type(m.extra)(torch.zeros(2)), "cannot make a paged parameter"),
    "its class": (lambda m: given(torch.ones(2), "__class__", m.extra).sum(), "and is another one"),
    "its attributes": (lambda m: zero.AdamW([given(nn.Parameter(torch.ones(2)), "__dict__", m.extra)]), "and is another one"),
    "swapped": (lambda m: torch.utils.swap_tensors(m.extra, nn.Parameter(torch.ones(2))), "'extra': swap_tensors would"),
    "swapped with": (lambda m: torch.utils.swap_tensors(torch.ones(96, 48), m.extra), "'extra': swap_tensors would"),
    "swapped with another": (lambda m: torch.utils.swap_tensors(m.scale, m.extra), "'scale': swap_tensors would"),
    "swapped on conversion": (lambda m: swapped(lambda: m.to(torch.bfloat16)), "swap_tensors would.*convert a model before"),
    "device": (lambda m: setattr(m.extra, "data", m.extra.detach().to("meta")), "cannot be moved to meta"),
    "meta": (lambda m: m.to("meta"), "cannot be moved to meta"),
    "to_empty": (lambda m: m.to_empty(device="meta"), "cannot be moved to meta"),
    "tied": (lambda m: setattr(m.frozen.weight, "data", m.extra.data[:48]), "would share its memory with parameter 'extra'"),
    "tied whole": (lambda m: setattr(m.extra, "data", m.first.weight), "'extra' would share its memory with parameter 'first"),
    "safetensors": (lambda m: safetensors.torch.save({"extra": m.extra}), "'extra' has no memory that safetensors"),
    "read from its storage": (lambda m: m.extra.untyped_storage().tolist(), "'extra': tolist of its storage needs memory"),
    "written to its storage": (lambda m: m.extra.untyped_storage().fill_(0), "'extra': fill_ of its storage needs memory"),
    "another library": (lambda m: m.state_dict()["extra"].__dlpack__(), "what another library writes to them would be lost"),
    "half": (lambda m: m.half(), "cannot change in the store once an optimizer keeps states"),
    "another shape": (lambda m: setattr(m.extra, "data", torch.ones(3)), "parameter 'extra' cannot change in the store once"),
    "dlpack": (lambda m: m.extra.detach().__dlpack__(), "would share the memory"),
    "dlpack by its function": (lambda m: torch.utils.dlpack.to_dlpack(m.extra.t()), "would share the memory"),  # type: ignore[attr-defined]
    "set_ by another": (lambda m: torch.empty(0).set_(m.extra), "'extra' has no memory that set_"),
    "set_ by another, from a place on": (lambda m: torch.empty(0).set_(m.extra.t(), 4, (4,), (1,)), "'extra' has no memory"),
    "set_ by a storage": (lambda m: torch.empty(0).set_(m.extra.untyped_storage()), "'extra' has no memory that set_"),
    "another class": (lambda m: m.extra.as_subclass(nn.Parameter), "'extra' has no memory that a Parameter could show"),
    "memory of another": (lambda m: setattr(torch.ones(96, 48), "data", m.extra.data), r"'extra' has no memory.*data\.copy_"),
    "memory of another parameter": (lambda m: setattr(nn.Linear(2, 2).weight, "data", m.extra), r"'extra' has no memory"),
    "shared": (lambda m: m.extra.share_memory_(), "would share the memory"),
    "resized": (lambda m: m.extra.data.resize_(3), "would change the shape"),
    "a custom function's view": (lambda m: Doubled.apply(m.extra).sum(), "its backward would be lost"),
    "forward in torch.func": (lambda m: torch.func.grad(lambda x: m(x).sum())(torch.ones(2, 48)), r"within torch\.func"),
    "written in torch.func": (lambda m: torch.func.vmap(m.scale.add_)(torch.ones(2)), "cannot be written to within torch"),
    "written as an argument": (lambda m: torch.func.vmap(negated)(m.extra.detach()), "cannot be written to within"),
    "written as data in torch.func": (lambda m: torch.func.vmap(negated)(m.extra.data), "cannot be written to within"),
    "written in a chunk": (lambda m: torch.func.vmap(negated, chunk_size=5)(m.extra.t()), "cannot be written to within"),
    "written in torch.func, which failed": (
        lambda m: torch.func.vmap(lambda row: negated(row).item())(m.extra),
        "cannot be written to within",
    ),
    "written in inference": (
        lambda m: torch.inference_mode()(torch.func.vmap(negated))(m.extra),
        "cannot be written to within",
    ),
    "written by jvp": (lambda m: torch.func.jvp(negated, (m.extra,), (torch.ones(96, 48),)), "cannot be written to within"),
    "written by jacfwd": (lambda m: torch.func.jacfwd(negated)(m.scale), "cannot be written to within"),
    "written to a view of a frozen one": (lambda m: m.frozen.weight[0].add_(m.extra[0]), "view of parameter 'frozen.weight'"),
    "functionalize": (lambda m: torch.func.functionalize(torch.neg)(m.extra), "'extra': torch.func.functionalize cannot"),
}


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Write to ``tensor``, also where autograd records and would refuse."""
    with torch.no_grad():
        return tensor.neg_()


def leaf(view: torch.Tensor, model: Model) -> list[Any]:
    """Return what a tensor that shows a parameter and has a gradient of its own gives: used twice, beside the parameter, after
    a write to either of them, stepped, and copied."""
    for _ in range(2):
        loss = (view.sin() * view).sum() + (view.detach() * 3).sum() + model.extra.sum() + model(torch.ones(2, 48)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    found = [view.grad.clone(), model.extra.grad.clone(), view.is_leaf, view.requires_grad]  # type: ignore[union-attr]
    torch.optim.SGD([view], lr=0.1).step()
    found += [view.detach().clone(), model.extra.detach().clone()]
    with torch.no_grad():
        model.extra.mul_(2)
        view.sub_(1)
    copied = copy.deepcopy(view)
    found += [copied.detach().clone(), copied.requires_grad, isinstance(view, nn.Parameter), isinstance(copied, nn.Parameter)]
    return [*found, view.grad.norm(), pickle.loads(pickle.dumps(view.detach().clone()))]  # type: ignore[union-attr]


class Two(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def watched(model: Model) -> list[Any]:
    """Return what hooks of a view are given, what it retains, and its gradients by ``torch.autograd.grad``."""
    view, seen = model.extra.t(), []
    view.retain_grad()
    view.register_hook(lambda gradient: seen.append(gradient.clone()))
    (view.sin().sum() + (view * 3).square().sum() + model.extra.sum()).backward()
    again = model.extra.view(-1)
    part = again[:96]
    loss = part.square().sum() + again.sin().sum()
    found = torch.autograd.grad(loss, [part, again, model.extra], retain_graph=True)
    return [*seen, view.grad.clone(), model.extra.grad.clone(), *found]  # type: ignore[union-attr]


def differentiated_twice(model: Model) -> list[Any]:
    view = model.extra.t()
    (first,) = torch.autograd.grad((view**3).sum() + view.sin().sum(), model.extra, create_graph=True)
    return list(torch.autograd.grad(first.square().sum(), [model.extra, model.scale], allow_unused=True))


OF_THEIR_OWN: dict[str, Callable[[Model], list[Any]]] = {
    "detached": lambda m: leaf(m.extra.detach().requires_grad_(), m),
    "data": lambda m: leaf(m.extra.data.requires_grad_(), m),
    "Parameter": lambda m: leaf(nn.Parameter(m.extra), m),
    "Parameter of a view": lambda m: leaf(nn.Parameter(m.extra.T), m),
    "Parameter of data": lambda m: leaf(nn.Parameter(m.extra.data), m),
    "frozen": lambda m: [(p := nn.Parameter(m.extra.T, requires_grad=False)).requires_grad, (p * m.scale).detach()],
    "view of a leaf": lambda m: [(p := nn.Parameter(m.extra)).t().square().sum().backward(), p.grad.clone()],
    "hooks": watched,
    "a gradient that needs one": lambda m: [
        m.extra.square().sum().backward(),
        (g := m.extra.grad.requires_grad_()).t().sin().sum().backward(),
        (g * 2).sum().backward(),
        g.grad.clone(),
        m.extra.grad.requires_grad,
    ],
    "a named tuple": lambda m: [torch.cat(Two(m.extra, m.extra.detach())), torch.stack(Two(m.extra.t(), m.extra.t() * 2))],
    "second derivatives": differentiated_twice,
    "inputs": lambda m: [
        p := nn.Parameter(m.extra.t()),
        v := m.extra.view(-1),
        ((p**3).sum() + v.sin().sum() + m.extra.sum() + m.scale.sin()).backward(inputs=[p, v, m.scale]),
        *(p.grad.clone(), v.grad.clone(), m.scale.grad.clone(), m.extra.grad is None, m.first.weight.grad is None),
    ][2:],
    "node": lambda m: [
        seen := [],
        v := m.extra.t(),
        v.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,)),
        v.grad_fn.register_hook(lambda *given: seen.append(given[1][0].clone())),
        (v.sin().sum() + v.square().sum()).backward(),
        *(seen[0], m.extra.grad.clone()),
    ][4:],
    "frozen as it was made": lambda m: [
        m.extra.requires_grad_(False),
        v := m.extra.t(),
        m.extra.requires_grad_(True),
        (v.sin().sum() + m.extra.sum()).backward(),
        m.extra.grad.clone(),
    ][4:],
    "indices that change": lambda m: [
        *(i := torch.tensor(1), d := [1, 0], k := [2, 94]),
        *(v := m.extra[i], t := m.extra.permute(d), s := m.extra.split(k)),
        *(i.fill_(5), d.reverse(), k.reverse()),
        *(v.clone(), t.clone(), s[0].clone(), s[1].clone(), m.extra.t().detach().numpy().strides),
    ][-5:],
    "a long chain": lambda m: [
        v := functools.reduce(lambda view, _: view.t(), range(401), m.extra),
        (v.sin() * v).sum().backward(),
        *(v.clone(), m.extra.grad.clone(), functools.reduce(lambda view, _: view[:], range(401), m.extra.detach()).clone()),
    ][2:],
    "swapped": lambda m: [
        backup := m.extra.data,
        half := m.extra.detach()[:2].t(),
        setattr(m.extra, "data", torch.ones(96, 48)),
        *(m.extra.detach().clone(), backup.clone(), half.clone(), half.mul_(2).clone()),
        setattr(m.extra, "data", backup),
        *(m.extra.detach().clone(), m(torch.ones(2, 48)).detach()),
    ][3:],
    "swapped, with gradients": lambda m: [
        *(turned := m.extra.t(), row := m.extra[3], flat := m.extra.view(-1)[5:9]),
        setattr(m.extra, "data", torch.ones(96, 48)),
        *(turned.detach().clone(), row.detach().clone(), flat.detach().clone(), m.extra.t().detach().clone()),
        ((turned * 2).sum() + row.sin().sum() + m.extra.sum()).backward(),
        m.extra.grad.clone(),
    ][4:],
    "of the class of tensors": lambda m: [
        plain := m.extra.as_subclass(torch.Tensor),
        (plain.sin() + plain).sum().backward(),
        *(type(plain.detach().clone()), plain.detach().clone(), m.extra.grad.clone()),
    ][2:],
    "undefined": lambda m: [m.extra.t().norm(0).backward(), m.extra.grad is None],
}


@named(OF_THEIR_OWN)
def test_a_view_is_a_tensor_of_its_own_to_autograd(opened: TieredStore, name: str) -> None:
    Sides(opened).agree(OF_THEIR_OWN[name])


def test_views_of_a_divided_parameter_keep_what_they_showed() -> None:
    with TieredStore.open(None, dram="2MiB") as store:
        model = zero.page(nn.Linear(512, 512, bias=False), store)
        weight: Any = model.weight
        views = [weight.detach()[3], weight.t(), weight[5:9], weight.detach().view(-1)[500:600]]
        seen = [one.detach().clone() for one in views]
        weight.data = torch.ones(512, 512)
        assert all(torch.equal(one.detach(), before) for one, before in zip(views, seen, strict=True))
        assert torch.equal(weight.detach(), torch.ones(512, 512))
        with pytest.raises(MisuseError, match=r"this view was made before \.data of its parameter.*make the view anew"):
            (views[1] * 2).sum()


def test_a_divided_parameter_has_no_node_of_its_own() -> None:
    with TieredStore.open(None, dram="2MiB") as store:
        weight: Any = zero.page(nn.Linear(512, 512, bias=False), store).weight
        for ask in (get_gradient_edge, lambda one: register_multi_grad_hook([one], print), lambda one: one.view(-1).grad_fn):
            with pytest.raises(MisuseError, match=r"'weight' is divided into slices, .*: grad_fn is not for all of it"):
                ask(weight)
        with torch.no_grad():
            assert weight.view(-1).grad_fn is None


def given(tensor: torch.Tensor, attribute: str, parameter: nn.Parameter) -> torch.Tensor:
    setattr(tensor, attribute, getattr(parameter, attribute))
    return tensor


@torch.no_grad()
def double(model: Model) -> None:
    model.extra.mul_(2)


def within(model: Model, call: Callable[[Callable[[], torch.Tensor], Model], object]) -> list[torch.Tensor]:
    """Return gradients and values after ``call`` of a loss."""
    call(lambda: model(torch.ones(2, 48)).square().mean() + model.extra.square().sum(), model)
    found = frozen([model.extra, model.first.weight, model.first.weight.grad, model.extra.grad, model(torch.ones(1, 48))])
    model.zero_grad()
    return found  # type: ignore[no-any-return]


def failing(loss: Callable[[], torch.Tensor], model: Model) -> None:
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    loss().backward()


def twice(loss: Callable[[], torch.Tensor], model: Model) -> None:
    with torch.no_grad():
        loss()
    (loss() + loss()).backward()


WITHIN: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "backward": (lambda loss, m: loss().backward(), lambda m: None),
    "backward afterwards": (lambda loss, m: loss(), lambda loss: loss.backward()),
    "a write before": (lambda loss, m: (double(m), loss().backward()), lambda m: None),
    "a write before, backward afterwards": (lambda loss, m: (double(m), loss())[1], lambda loss: loss.backward()),
    "a write after backward": (lambda loss, m: (loss().backward(), double(m)), lambda m: None),
    "an exception": (failing, lambda m: None),
    "evaluation, and twice": (twice, lambda m: None),
}


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("name", WITHIN)
def test_forward_and_backward_within_gathered(store: TieredStore, name: str, write: bool) -> None:
    begin, end = WITHIN[name]

    def run(loss: Callable[[], torch.Tensor], model: Model) -> None:
        block = contextlib.nullcontext() if type(model.scale) is nn.Parameter else zero.gathered(model, write=write)
        with block:
            found = begin(loss, model)
        end(found)

    Sides(store).agree(lambda model: within(model, run))
    assert sum(tier.held for tier in store.statistics().tiers) == 0


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_a_write_after_forward_within_gathered_raises_in_backward(store: TieredStore, write: bool, outside: bool) -> None:
    sides = Sides(store)
    for model, block, error, message in (
        (sides.memory, contextlib.nullcontext(), RuntimeError, "modified by an inplace operation"),
        (sides.paged, zero.gathered(sides.paged, write=write), MisuseError, "after this graph was made"),
    ):
        with block:
            loss = model(sides.x).square().mean()
            double(model)
            if not outside:
                with pytest.raises(error, match=message):
                    loss.backward()
        if outside:
            with pytest.raises(error, match=message):
                loss.backward()
        model.zero_grad()
    sides.agree(lambda model: model.extra)


def test_a_step_within_gathered_is_refused(store: TieredStore) -> None:
    sides = Sides(store)
    sides.paged(sides.x).sum().backward()
    with pytest.raises(MisuseError, match="leave its block first"), zero.gathered(sides.paged.extra):
        sides.optimizers[sides.paged].step()
    sides.paged.zero_grad()
    sides.agree(lambda model: model.extra)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_raises(store: TieredStore, name: str) -> None:
    sides = Sides(store)
    call, message = REFUSED[name]
    with pytest.raises(MisuseError, match=message):
        call(sides.paged)
    sides.agree(lambda model: model.extra)


PAGED_AS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "recompute": {"activations": "recompute"},
    "sliced": {"paging": zero.Paging(largest_unit=16 << 10, slice_weights=True)},
}


@pytest.mark.parametrize("name", PAGED_AS)
def test_a_deep_copy_is_a_model_in_memory(store: TieredStore, name: str) -> None:
    x = torch.randn(3, 48)
    memory = build()
    memory.register_forward_hook(lambda *_: called.append(1))
    memory.extra.requires_grad_(False)
    called: list[int] = []
    paged = zero.page(copy.deepcopy(memory), store, **PAGED_AS[name])
    expected, found = copy.deepcopy(memory), copy.deepcopy(paged)
    for one, other in zip(expected.modules(), found.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert all(len(vars(one)[key]) == len(vars(other)[key]) for key in vars(one) if key.endswith("_hooks"))
    assert found.listed[0] is found.second.weight
    assert [type(parameter) for parameter in found.parameters()] == [nn.Parameter] * 9
    assert [parameter.requires_grad for parameter in found.parameters()] == [p.requires_grad for p in expected.parameters()]
    for one in (expected, found):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    assert len(called) == 4
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in found.state_dict().items())
    assert all(torch.equal(value, memory.state_dict()[key]) for key, value in paged.state_dict().items())
    assert torch.equal(copy.deepcopy(paged.first)(x), memory.first(x))
    zero.page(found, store, name="copy")
    assert torch.equal(found(x), expected(x))
    assert torch.equal(paged(x), memory(x))


def test_an_average_of_the_weights_is_kept_in_memory(store: TieredStore) -> None:
    sides = Sides(store)
    averages = []
    for model in (sides.memory, sides.paged):
        averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        for _ in range(3):
            sides.step(model)
            averages[-1].update_parameters(model)
    assert same(*(frozen(list(average.state_dict().values())) for average in averages))
    assert torch.equal(averages[0](sides.x), averages[1](sides.x))


class Lending(nn.Module):
    """Has the attributes of the model within it, as peft's models have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.adapter = inner, nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.adapter(self.inner(x))
        return found


def test_a_deep_copy_of_a_module_around_a_paged_one(store: TieredStore) -> None:
    x = torch.randn(3, 48)
    around = Lending(zero.page(build(), store))
    copied = copy.deepcopy(around)
    assert type(copied) is Lending
    assert copied.extra is copied.inner.extra is not around.extra
    assert torch.equal(copied(x), around(x))
    assert copy.deepcopy(copied.inner).scale == around.scale
    for dumped in (around, around.inner, nn.Sequential(around.inner.first)):
        with pytest.raises(MisuseError, match="cannot be copied or pickled"):
            pickle.dumps(dumped)


def test_accelerate_is_told_how_to_set_a_parameter(store: TieredStore) -> None:
    modeling = pytest.importorskip("accelerate.utils.modeling")
    sides = Sides(store)
    with pytest.raises(MisuseError, match=r"parameter\.copy_\(values\)"):
        modeling.set_module_tensor_to_device(sides.paged, "extra", "cpu", value=torch.ones(96, 48))
    sides.agree(lambda model: model.extra)


def saved(value: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    found: torch.Tensor = torch.load(file)
    return found


VIEWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda p: p.data,
    "transposed": lambda p: p.detach().T,
    "a part": lambda p: p.data[3:7, ::2],
    "with its history": lambda p: p.view(-1),
}


@pytest.mark.parametrize("name", VIEWED)
def test_views_are_saved_and_copied_by_their_values(store: TieredStore, name: str) -> None:
    sides, view = Sides(store), VIEWED[name]
    copies = [saved, lambda value: pickle.loads(pickle.dumps(value))]
    copies += [] if view(sides.memory.extra).requires_grad else [copy.deepcopy]
    for way in copies:
        memory, paged = (way(view(model.extra)) for model in (sides.memory, sides.paged))
        assert type(paged) is torch.Tensor
        assert torch.equal(memory, paged)
        assert (memory.requires_grad, memory.is_leaf) == (paged.requires_grad, paged.is_leaf)
        with torch.no_grad():
            paged.zero_()
    sides.agree(lambda model: model.extra)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Saving(nn.Module):
    """Enters hooks of its own within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(48, 48), nn.Parameter(torch.randn(48, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = self.linear(x) @ self.weight.abs()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
            return nn.functional.linear(self.linear(x), self.weight) + self.weight.abs().sum()


def test_hooks_of_others_within_forward_do_not_keep_a_parameter(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(Saving() for _ in range(4)))
    model = zero.page(copy.deepcopy(reference), store)
    x = torch.randn(3, 48)
    for side in (reference, model):
        side(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    gc.collect()
    assert sum(tier.held for tier in store.statistics().tiers) == 0


def test_a_function_of_parameters_of_two_models(store: TieredStore) -> None:
    memory, paged = (build(), build()), (zero.page(build(), store, name="one"), zero.page(build(), store, name="two"))
    for one, two in (memory, paged):
        with torch.no_grad():
            two.extra.mul_(3).add_(one.extra)
        ((one.extra * two.extra).abs().sum() + torch.stack([one.first.bias, two.first.bias]).norm()).backward()
    for mine, theirs in zip(paged, memory, strict=True):
        assert torch.equal(mine.extra.grad, theirs.extra.grad)
        assert torch.equal(mine.first.bias.grad, theirs.first.bias.grad)


def test_gradients_and_parameters_compute_together(store: TieredStore) -> None:
    found = []
    for model in (build(), zero.page(build(), store)):
        model.extra.square().sum().backward()
        found.append([(model.extra.grad * model.extra).sum(), model.extra.grad.add_(model.extra.detach()).norm()])
    assert same(*map(frozen, found))


def test_what_custom_functions_saved_of_before_an_update_is_not_used(store: TieredStore) -> None:
    sides = Sides(store)
    whole = Product.apply(sides.paged.extra, sides.x.t()).sum()
    part = Product.apply(sides.paged.extra[:3], sides.x.t()).sum()
    sides.step(sides.paged)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        whole.backward()
    with pytest.raises(MisuseError, match="after this view was made"):
        part.backward()


def test_another_thread_is_refused_while_a_model_computes(store: TieredStore) -> None:
    model = zero.page(build(), store)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            model.extra.norm()
        except MisuseError as error:
            raised.append(error)

    def within(*_: object) -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    handle = model.first.register_forward_hook(within)
    model(torch.ones(2, 48)).sum().backward()
    handle.remove()
    assert "one thread at a time" in str(raised[0])
    within()
    assert len(raised) == 1
    assert torch.equal(model.extra, build().extra)


def test_a_forward_in_another_thread_is_refused_and_disturbs_nothing(store: TieredStore) -> None:
    plain, model = build(), zero.page(build(), store)
    raised: list[BaseException] = []

    def forward(module: nn.Module, *inputs: torch.Tensor) -> None:
        try:
            module(*inputs)
        except MisuseError as error:
            raised.append(error)

    def within(*_: object) -> None:
        for module, x in ((model, torch.ones(2, 48)), (model.first, torch.ones(2, 48))):
            thread = threading.Thread(target=forward, args=(module, x))
            thread.start()
            thread.join()

    handle = model.first.register_forward_hook(within)
    found = model(torch.ones(2, 48))
    handle.remove()
    assert ["one thread at a time" in str(error) for error in raised] == [True, True]
    assert torch.equal(found, plain(torch.ones(2, 48)))
    found.sum().backward()
    plain(torch.ones(2, 48)).sum().backward()
    assert torch.equal(model.extra.grad, plain.extra.grad)
    within()
    assert len(raised) == 2, "when no other computes, any thread may"


@pytest.mark.parametrize("others", ["forward", "read"])
def test_threads_that_meet_anywhere_compute_right_or_are_refused(store: TieredStore, others: str) -> None:
    model = zero.page(build(), store)
    wanted = build()(torch.ones(2, 48))
    # Lists, which threads may append to: `right += 1` of two threads loses counts.
    right, refused, other = list[bool](), list[str](), list[BaseException]()

    def compute() -> None:
        for _ in range(60):
            try:
                with torch.no_grad():
                    found = model(torch.ones(2, 48))
                right.append(torch.equal(found, wanted))
            except MisuseError as error:
                refused.append(str(error))
            except BaseException as error:
                other.append(error)

    def read() -> None:
        """Read parameters, some of which another thread takes the memory of just then."""
        for _ in range(60):
            with torch.no_grad(), contextlib.suppress(MisuseError, AttributeError, TypeError):
                for parameter in model.parameters():
                    (parameter.detach() * 2).sum()

    kinds = [compute, *([compute, compute] if others == "forward" else [read, read])]
    threads = [threading.Thread(target=one) for one in kinds]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not other, other[:3]
    assert all(right)
    assert all("one thread at a time" in why for why in refused), set(refused)
    assert len(right) + len(refused) == (180 if others == "forward" else 60)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 48)), wanted)
        assert torch.equal(model.extra, build().extra)


def test_an_array_of_a_parameter_is_read_only(store: TieredStore) -> None:
    model = zero.page(build(), store)
    array = model.extra.detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("way", ["detached", "a row of data", "data in another order"])
def test_a_view_whose_history_a_write_lost_says_so(store: TieredStore, way: str) -> None:
    model = zero.page(build(), store)
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "detached": torch.Tensor.detach,
        "a row of data": lambda p: p.data[3],
        "data in another order": lambda p: p.data.t().flatten(0, 0)[5:9].t(),
    }
    view = recorded(made[way](model.extra), model.scale)
    with torch.no_grad():
        assert torch.equal(view.clone(), made[way](model.extra).clone())
    with pytest.raises(MisuseError, match="'extra': a tensor that needs a gradient was written to this view"):
        view.sum()


def test_what_torch_takes_as_it_is_stays_the_parameter(store: TieredStore) -> None:
    plain, model = build(), zero.page(build(), store)
    assert torch.as_tensor(model.extra) is model.extra
    for one in (plain, model):
        one.extra.sum().backward()
        torch.as_tensor(one.extra.data, dtype=torch.float32, device="cpu").mul_(2)
        torch.asarray(one.extra.t(), copy=False, requires_grad=False)[0].fill_(3)
        torch.as_tensor(one.extra.grad).mul_(4)
    with pytest.raises(ValueError, match="can't alias"):
        torch.asarray(model.extra, dtype=torch.float64, copy=False)
    assert torch.equal(model.extra, plain.extra)
    assert torch.equal(model.extra.grad.clone(), plain.extra.grad)


def test_a_shallow_copy_of_a_module_shares_its_parameters(store: TieredStore) -> None:
    plain, model = build(), zero.page(build(), store)
    found = []
    for one in (plain, model):
        layer = copy.copy(one.first)
        layer.factor = 2.0
        layer.forward = lambda x, layer=layer: nn.functional.linear(x, layer.weight * layer.factor, layer.bias)
        layer(torch.ones(1, 48)).sum().backward()
        layer.bias = nn.Parameter(torch.ones_like(layer.bias)) if one is plain else layer.bias
        assert layer.weight is one.first.weight
        assert one.first.bias is layer.bias
        found.append(one.first.weight.grad.clone())
    assert torch.equal(*found)
    deep = copy.deepcopy(model.first)
    assert deep.weight is not model.first.weight
    assert type(deep.weight) is nn.Parameter


class Divided(nn.Module):
    """A parameter beside a layer that is divided into rows."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(64))
        self.tokens = nn.Embedding(8000, 64)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(3))])


def test_values_are_loaded_beside_a_divided_layer(store: TieredStore) -> None:
    torch.manual_seed(0)
    model = zero.page(Divided(), store)
    wanted = {name: values * 0.5 for name, values in model.state_dict().items()}
    model.load_state_dict(wanted)
    assert all(torch.equal(values, wanted[name]) for name, values in model.state_dict().items())
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**wanted, "scale.0": torch.ones(4)})
    model.load_state_dict({name: values * 2 for name, values in wanted.items()})
    assert torch.equal(model.position, wanted["position"] * 2)


def test_parameters_of_a_model_that_is_gone_say_so(store: TieredStore) -> None:
    parameter = zero.page(build(), store).extra
    gc.collect()
    assert parameter.shape == (96, 48)
    with pytest.raises(MisuseError, match="the model of parameter 'extra' is gone"):
        parameter.norm()


@pytest.mark.parametrize("write", [False, True])
def test_a_tie_by_data_within_gathered_raises(store: TieredStore, write: bool) -> None:
    model: Model = zero.page(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), store)
    before = model[0].weight.clone()
    with pytest.raises(MisuseError, match="another parameter"), zero.gathered(model, write=write):
        model[0].weight.data = model[1].weight.data
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("where", ["forward", "outside", "gathered to read", "gathered to write"])
def test_data_that_is_the_parameter_in_another_order_lands(store: TieredStore, where: str) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.ones(5)), nn.Parameter(torch.arange(64.0).view(8, 8))

        def forward(self) -> None:
            self.weight.data = self.weight.data.T

    model: Model = zero.page(Square(), store)
    if where == "forward":
        model()
    else:
        with zero.gathered(model, write=where.endswith("write")) if where != "outside" else contextlib.nullcontext():
            model.weight.data = model.weight.data.T
    zero.offload(model)
    assert torch.equal(model.weight, torch.arange(64.0).view(8, 8).T)
    assert torch.equal(model.bias, torch.ones(5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_raises_before_it_begins(store: TieredStore) -> None:
    model: Model = zero.page(nn.Sequential(nn.Linear(8, 8)), store)
    with pytest.raises(MisuseError, match=r"torch\.jit\.script"):
        torch.jit.script(model)
    assert model(torch.ones(1, 8)).shape == (1, 8)


TAKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda p: p.data,
    "a view of data": lambda p: p.data[3:7],
    "detach": lambda p: p.detach(),
    "view": lambda p: p.view(-1),
}


def taken_in_forward(model: nn.Sequential, how: str, layer: int = 0) -> torch.Tensor:
    """Return a tensor on the memory that a layer's weight had in forward."""
    kept: list[torch.Tensor] = []
    with torch.no_grad(), model[layer].register_forward_hook(lambda module, *_: kept.append(TAKEN[how](module.weight))):
        model(torch.ones(1, 160))
    return kept.pop()


@pytest.mark.parametrize("how", TAKEN)
def test_what_is_written_to_a_tensor_that_forward_gave_lands(store: TieredStore, how: str) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 160))
    model = zero.page(copy.deepcopy(reference), store)
    optimizers = torch.optim.AdamW(reference.parameters(), fused=True), zero.AdamW(model.parameters())
    for one, optimizer in zip((reference, model), optimizers, strict=True):
        kept = taken_in_forward(one, how)
        for step in range(2):
            optimizer.zero_grad()
            one(torch.ones(2, 160)).square().mean().backward()
            optimizer.step()
            one(torch.ones(2, 160))
            with torch.no_grad():
                kept.mul_(2 + step)
        one(torch.ones(2, 160))
        del kept
        one(torch.ones(2, 160))
    for name, values in model.state_dict().items():
        assert torch.equal(values, reference.state_dict()[name]), name


@pytest.mark.parametrize("how", TAKEN)
def test_a_write_to_a_tensor_that_is_gone_by_the_next_forward_raises(store: TieredStore, how: str) -> None:
    """Nobody knows whether the memory was evicted meanwhile. The parameter has one value: before and after it is evicted, and
    in the next commit."""
    torch.manual_seed(0)
    layers = [nn.Linear(160, 160) for _ in range(14)]
    before = [layer.weight.detach().clone() for layer in layers]
    model = zero.page(nn.Sequential(*layers), store)
    lost = 0
    for layer in (0, 6, 13):
        kept = taken_in_forward(model, how, layer)
        with torch.no_grad():
            kept.mul_(2)
            del kept
            for other in (*range(14), *range(14)):
                if other != layer:
                    model[other](torch.ones(1, 160))
            with pytest.raises(MisuseError, match=rf"parameter '{layer}\.weight' was written to through a tensor"):
                model(torch.ones(1, 160))
            now = model[layer].weight.clone()
            lost += torch.equal(now, before[layer])
            for _ in range(3):
                model(torch.ones(1, 160))
                assert torch.equal(model[layer].weight, now)
        zero.commit(model)
        assert torch.equal(model.state_dict()[f"{layer}.weight"], now)
    assert lost, "no layer was evicted"


@pytest.mark.parametrize("name", ["tensor", "as_tensor", "asarray", "empty"])
def test_a_default_device_is_still_that_of_functions_that_make_tensors(name: str) -> None:
    """transformers asks ``torch.tensor([]).device`` whether it is on the meta device, and leaves buffers without values if not.
    """
    with torch.device("meta"):
        assert getattr(torch, name)([1]).device.type == "meta"


def test_set_to_itself_changes_nothing_and_to_another_tensor_raises(store: TieredStore) -> None:
    """The first is what torch.nn.utils.parametrize does to a parameter."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    model = zero.page(copy.deepcopy(reference), store)
    seeds = torch.Generator().manual_seed(1).get_state()
    outputs = []
    for one in (reference, model):
        torch.set_rng_state(seeds)
        nn.utils.parametrizations.spectral_norm(one[2])
        outputs.append(one(torch.ones(1, 32)))
    assert torch.equal(*outputs)
    with pytest.raises(MisuseError, match=r"'0\.weight'.*set_ would change the shape, or the memory"), torch.no_grad():
        model[0].weight.set_(torch.zeros(32, 32))
    assert torch.equal(model[0].weight, reference[0].weight)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_another_memory_format_is_refused_and_its_own_is_not(store: TieredStore, memory_format: torch.memory_format) -> None:
    """torch computes other bits with it, and parameters keep the strides that they were paged with."""
    last, other = torch.channels_last, torch.contiguous_format
    if memory_format is other:
        last, other = other, last
    reference = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=last)  # type: ignore[call-overload]
    model = zero.page(copy.deepcopy(reference), store)
    for convert in (
        lambda: model.to(memory_format=other),
        lambda: nn.utils.convert_conv2d_weight_memory_format(model, other),  # type: ignore[no-untyped-call]
        lambda: setattr(model[0].weight, "data", torch.ones(8, 3, 3, 3).to(memory_format=other)),
    ):
        with pytest.raises(MisuseError, match=r"'0\.weight' is in .*change the memory format of a model before zero\.page"):
            convert()
    for one in (reference, model):
        one.to(memory_format=last)
        one[0].weight.data = torch.ones(8, 3, 3, 3).to(memory_format=last)
        one[1].weight.data = torch.ones(4, 8, 1, 1)  # it has both
        one[3].weight.data = torch.ones(2, 16)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(model(x), reference(x))
    assert model[0].weight.stride() == reference[0].weight.stride()


@pytest.mark.parametrize("way", ["soft", "copy_", "foreach"])
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "trained before"])
def test_a_frozen_model_that_autograd_has_a_trained_one_write_to(store: TieredStore, way: str, stepped: bool) -> None:
    """A target network whose update is not within ``no_grad``: its parameters become results, which torch allows."""
    found = []
    for paged in (False, True):
        torch.manual_seed(0)
        trained, target = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        if paged:
            zero.page(trained, store, name="trained")
            zero.page(target, store, name="target")
        x = torch.ones(2, 8)
        if stepped:
            target(x).sum().backward()
            target.zero_grad()
        target.requires_grad_(False)
        mine, theirs = list(target.parameters()), list(trained.parameters())
        if way == "foreach":
            torch._foreach_add_(mine, theirs, alpha=0.5)
        for one, other in zip(mine, theirs, strict=True):
            if way == "copy_":
                one.copy_(other)
            elif way == "soft":
                one.mul_(0.9).add_(other, alpha=0.1)
        output = target(x)
        output.square().sum().backward()
        found.append([output, *[p.detach().clone() for p in mine], *[p.requires_grad for p in mine], *[p.grad for p in theirs]])
    assert same(*map(frozen, found))
