"""A step that fails, or whose gradients are not finite, changes nothing; ``zero_grad`` leaves it out. Many kinds of them at
once, beside a twin in memory, are in ``tests/stress/test_bad_steps.py``."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero.harness import equal
from tests.zero.models import Tied
from tiered import MisuseError, TieredStore, zero
from tiered.store.activations import hooks_active
from tiered.zero.paging.pager import placement_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
def test_gradients_of_every_type_are_refused(store: TieredStore, dtype: torch.dtype, bad: float, update: str) -> None:
    model = zero.page(nn.Linear(8, 8).to(dtype), store)
    optimizer = zero.AdamW(model.parameters(), update=update)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()
        optimizer.step()

    step()
    values, states = model.state_dict(), optimizer.state_dict()
    handle = model.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), bad))
    with pytest.raises(MisuseError, match=r"gradient of 'weight' is not finite.*optimizer\.zero_grad\(\).*GradScaler"):
        step()
    handle.remove()
    optimizer.zero_grad()
    assert equal(model.state_dict(), values)
    for number, state in optimizer.state_dict()["state"].items():
        assert equal(state, states["state"][number])
    step()
    assert not equal(model.state_dict(), values)


@pytest.mark.parametrize("asked", [[], [2.0], [float("inf")], [0.0]], ids=str)
def test_a_norm_says_it_only_where_it_can(store: TieredStore, asked: list[float]) -> None:
    """The norm of order 0 counts what is not zero, and the squares of finite numbers may be infinite together."""
    model = zero.page(nn.Linear(8, 1, bias=False), store)
    optimizer = zero.AdamW(model.parameters())
    for values, refused in (([1.0], False), ([1.0, float("nan")], True), ([3e38, 3e38], False)):
        for order in asked:
            optimizer.clip_grad_norm_(float("inf"), norm_type=order)
        optimizer.zero_grad()
        inputs = torch.zeros(1, 8)
        inputs[0, : len(values)] = torch.tensor(values)
        model(inputs).sum().backward()
        if refused:
            with pytest.raises(MisuseError, match="not finite"):
                optimizer.step()
        else:
            optimizer.step()


def test_a_step_that_fails_marks_no_unit(store: TieredStore) -> None:
    """The update before it, of a unit in the middle, cannot be applied. It is a second ``step()`` with the same gradients that
    finds updates pending."""
    reference: Any = Tied()
    model = zero.page(copy.deepcopy(reference), store)
    optimizer = zero.AdamW(model.parameters())
    _, unit, _ = placement_of(model.blocks[1].out.weight)
    model.loss(0).backward()
    optimizer.step()
    real, unit.states.apply = unit.states.apply, fail  # type: ignore[method-assign]
    before = dict(optimizer.steps)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.steps == before
    unit.states.apply = real  # type: ignore[method-assign]
    optimizer.step()
    fused = torch.optim.AdamW(reference.parameters(), fused=True)
    reference.loss(0).backward()
    fused.step()
    fused.step()
    assert equal(model.state_dict(), reference.state_dict())


def fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("mode", ["plain", "checkpoint"])
def test_ctrl_c_in_forward_and_then_a_commit(store: TieredStore, mode: str) -> None:
    """torch calls no hook after a KeyboardInterrupt."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model: Any = zero.page(Tied(mode=mode), store)
    optimizer = zero.AdamW(model.parameters())
    handle = model.blocks[1].out.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.loss(1)
    handle.remove()
    optimizer.zero_grad()
    assert store.statistics().tiers[0].held == 0
    assert zero.commit(model, optimizer) == 1


def test_an_exception_of_checkpointing_that_ends_in_a_later_forward(store: TieredStore) -> None:
    """Its traceback has torch's generator, which then takes its hooks out of force: not those of the forward that runs."""
    reference: Any = Tied(mode="checkpoint")
    model: Any = zero.page(copy.deepcopy(reference), store)
    handle = model.blocks[1].out.register_forward_pre_hook(fail)
    kept: list[BaseException] = []
    try:
        model.loss(1)
    except ZeroDivisionError as error:
        kept.append(error)
    handle.remove()

    def forget(*_: Any) -> None:
        kept.clear()
        gc.collect()

    model.blocks[2].out.register_forward_pre_hook(forget)
    for one in (model, reference):
        one.loss(2).backward()
    assert not kept
    assert hooks_active() is None
    found = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert (found[name].grad is None) == (parameter.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, found[name].grad.clone()), name


def test_within_forward_zero_grad_lets_go_of_nothing(store: TieredStore) -> None:
    model: Any = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters())
    expected = model.loss(1).item()
    model.blocks[1].out.register_forward_pre_hook(lambda *_: optimizer.zero_grad())
    assert model.loss(1).item() == expected


def test_what_checkpointing_recomputed_before_an_exception_is_gone_after_zero_grad(store: TieredStore) -> None:
    model: Any = zero.page(Tied(width=64, mode="checkpoint"), store)
    optimizer = zero.AdamW(model.parameters())
    handle = model.blocks[1].attention.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model.loss(1).backward()
    handle.remove()
    optimizer.zero_grad()
    assert store.statistics().tiers[0].held == 0
    assert not [key for key in store if key.endswith("/grad")]


@pytest.mark.parametrize("how", ["refused", "clipped", "unscaled"])
def test_a_gradient_that_was_assigned_is_no_longer_leased(store: TieredStore, how: str) -> None:
    model = zero.page(nn.Linear(8, 8), store)
    optimizer = zero.AdamW(model.parameters())
    scaler = zero.GradScaler(enabled=how == "unscaled")
    loss = scaler.scale(model(torch.ones(2, 8)).sum())
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 1.0 if how == "clipped" else float("inf"))
    if how == "refused":
        with pytest.raises(MisuseError, match="not finite"):
            optimizer.step()
    elif how == "clipped":
        optimizer.clip_grad_norm_(1.0)
    else:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert store.commit() == 1
    optimizer.zero_grad()
