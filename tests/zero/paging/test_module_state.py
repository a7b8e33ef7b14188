"""Modules that change buffers and attributes in forward, or in hooks before it, where backward computes forward again: the
numbers, buffers and attributes of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.zero.harness import equal
from tiered import MisuseError, TieredStore, zero
from tiered.zero.paging.recompute import module_state

WIDTH = 12


def spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def normal() -> nn.Module:
    instance = nn.InstanceNorm1d(3, track_running_stats=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Unflatten(1, (3, 4)), instance, nn.Flatten())


class Stateful(nn.Linear):
    """``change`` is called in forward, with the module and what it has computed, and returns the output."""

    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change, self.calls, self.attribute = change, 0, torch.ones(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("part", self.mean[: WIDTH // 2])  # type: ignore[index]
        self.register_buffer("variance", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, super().forward(x))


def momentum(module: Any, y: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(y, module.mean, module.variance, training=True)  # torch counts no version here
    return torch.add(y, module.mean)


def count(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return torch.mul(y, module.calls if module.training else 1)


def replace(module: Any, y: torch.Tensor) -> torch.Tensor:
    y = y * module.attribute + module.mean
    module.mean, module.attribute = module.mean + 1, module.attribute * 2
    module.last = y
    return y


def view(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.part.add_(1)
    return torch.mul(y, module.mean + 1)


def in_place(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.attribute += y.detach().mean(0)
    return torch.mul(y, module.attribute.clone())


def first_time(module: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "scale"):
        module.scale = y.detach().abs().mean()
        return y
    return torch.div(y, module.scale)


def hooked(change: Callable[[Any], None]) -> nn.Module:
    """A module with a hook before forward."""
    module = Stateful(lambda module, y: y * module.attribute + module.mean)
    module.register_forward_pre_hook(lambda module, _: change(module))
    return module


def advance(module: Any) -> None:
    module.attribute = module.attribute * 1.5
    module.mean.add_(1)


def weighed(module: Any) -> None:
    module.attribute = module.bias.tanh()  # in the graph, outside of what is computed again


MODULES: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": spectral,
    "parametrizations.spectral_norm": parametrized,
    "norms": normal,
    **{one.__name__: (lambda one=one: Stateful(one)) for one in (momentum, count, replace, view, in_place, first_time)},  # type: ignore[misc]
    **{f"hook {one.__name__}": (lambda one=one: hooked(one)) for one in (advance, weighed)},  # type: ignore[misc]
}


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(torch.tanh(self.first(x)))
        return found


def made(make: Callable[[], nn.Module], whole: bool) -> nn.Sequential:
    """Return a model whose stateful modules stand by themselves, or within layers that repeat."""
    torch.manual_seed(0)
    if whole:
        return nn.Sequential(*(Layer(make()) for _ in range(2)), nn.Linear(WIDTH, 1))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), make(), nn.Tanh(), make(), nn.Linear(WIDTH, 1))


def steps(model: nn.Sequential, optimizer: torch.optim.Optimizer, again: bool) -> list[torch.Tensor]:
    """Train as a discriminator is: called twice before backward, and left in another mode; return gradients of inputs."""
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        real, fake = (torch.randn(4, WIDTH, generator=generator, requires_grad=True) for _ in range(2))
        model.train()
        optimizer.zero_grad()
        loss = (model(fake) - model(real).square()).mean()
        model.eval()
        model(real.detach())
        if again:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        found += [real.grad, fake.grad]
    return found  # type: ignore[return-value]


def attributes(model: nn.Module) -> list[Any]:
    return [getattr(module, name) for module in model.modules() for name in ("calls", "attribute") if hasattr(module, name)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_state_is_that_of_memory(store: TieredStore, name: str, whole: bool) -> None:
    reference = made(MODULES[name], whole)
    paged = copy.deepcopy(reference)
    zero.page(paged, store, activations="recompute")
    wanted = steps(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True), whole)
    found = steps(paged, zero.AdamW(paged.parameters(), lr=1e-2), whole)
    assert zero.statistics(paged).computed_again > 0
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert equal(paged.state_dict(), reference.state_dict())
    assert equal(dict(paged.named_buffers()), dict(reference.named_buffers()))
    for one, other in zip(attributes(paged), attributes(reference), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert [type(module).__name__ for module in paged.modules()] == [type(module).__name__ for module in reference.modules()]


def test_what_is_too_large_to_be_kept_is_refused_by_name(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "COPIED", 8)
    model = made(MODULES["view"], False)
    zero.page(model, store, activations="recompute")
    with pytest.raises(MisuseError, match=r"activations='recompute'.*changes its buffer '.*(mean|part)'.*too large"):
        model(torch.randn(4, WIDTH))
    assert store.statistics().tiers[0].held == 0


def test_what_is_changed_until_backward_and_not_kept_is_refused_by_name(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_state, "SMALL", 8)
    model = made(lambda: Stateful(lambda module, y: y + module.mean), False)
    zero.page(model, store, activations="recompute")
    loss = model(torch.randn(4, WIDTH)).sum()
    model[2].get_buffer("mean").add_(1)
    with pytest.raises(MisuseError, match=r"'mean' was changed between forward and backward"):
        loss.backward()


def test_a_buffer_that_forward_reaches_otherwise_is_refused_by_name(store: TieredStore) -> None:
    model = made(lambda: Stateful(lambda module, y: y * module.beside[0].add_(1).clone()), False)
    for one in (model[2], model[4]):
        one.beside = [one.get_buffer("mean")]  # type: ignore[assignment]
    zero.page(model, store, activations="recompute")
    loss = model(torch.randn(4, WIDTH)).sum()
    with pytest.raises(MisuseError, match=r"'mean' was changed once more as forward was computed again"):
        loss.backward()


def test_an_exception_in_a_recomputation_leaves_modules_as_they_were(store: TieredStore) -> None:
    def failing(module: Any, y: torch.Tensor) -> torch.Tensor:
        module.mean.add_(1)
        module.calls += 1
        if len(fail) == 1:
            raise KeyError("of a recomputation")
        return torch.mul(y, module.mean.clone())

    fail: list[int] = []
    model = made(lambda: Stateful(failing), False)
    zero.page(model, store, activations="recompute")
    loss = model(torch.randn(4, WIDTH)).sum()
    fail.append(1)
    with pytest.raises(KeyError, match="of a recomputation"):
        loss.backward()
    for one in (model[2], model[4]):
        assert one.calls == 1
        assert torch.equal(one.get_buffer("mean"), torch.ones(WIDTH))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen in forward", "frozen in backward"])
def test_what_is_frozen_between_forward_and_backward_is_as_in_memory(store: TieredStore, frozen: bool) -> None:
    """A generator is trained through a discriminator that is frozen, or another way round."""
    found = []
    for paged in (False, True):
        generator, judge = made(lambda: nn.Linear(WIDTH, WIDTH), False), made(lambda: nn.Linear(WIDTH, WIDTH), True)
        generator.append(nn.Linear(1, WIDTH))
        if paged:
            zero.page(generator, store, name="generator", activations="recompute")
            zero.page(judge, store, name="judge", activations="recompute")
        for step in range(2):
            judge.requires_grad_(not frozen)
            loss = judge(generator(torch.full((4, WIDTH), 0.1 * (step + 1)))).mean()
            judge.requires_grad_(frozen)
            loss.backward()
        gradients = [parameter.grad for model in (generator, judge) for parameter in model.parameters()]
        found.append({str(number): one.clone() for number, one in enumerate(gradients) if one is not None})
        assert [parameter.requires_grad for parameter in judge.parameters()] == [frozen] * len(list(judge.parameters()))
    assert equal(*found)
