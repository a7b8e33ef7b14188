"""Copies of what is in the store, where torch gives the values themselves: ``state_dict()`` and ``optimizer.state``."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero.models import Tied
from tiered import MisuseError, TieredStore, zero

Model = Any


def build(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 48)).to(dtype)


def step(model: Model, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(number)).to(model[0].weight.dtype)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_a_value_of_before_a_step_cannot_be_written_to(store: TieredStore) -> None:
    model = zero.page(build(), store)
    state = model.state_dict()
    step(model, zero.AdamW(model.parameters()))
    before, now = state["0.weight"].clone(), model[0].weight.detach().clone()
    for write in (lambda v: v.zero_(), lambda v: v[0].fill_(1), lambda v: torch._foreach_zero_([v])):
        with pytest.raises(
            MisuseError, match=r"'0.weight', which state_dict\(\) gave, is from before the parameter was updated"
        ):
            write(state["0.weight"])
    assert torch.equal(state["0.weight"], before), "it was not written to either"
    assert torch.equal(model[0].weight, now)


def test_a_write_to_another_parameter_of_the_unit_does_not_make_a_value_old(store: TieredStore) -> None:
    model = zero.page(build(), store)
    state = model.state_dict()
    with torch.no_grad():
        model[0].bias.add_(1)
    state["0.weight"].mul_(2)
    assert torch.equal(model[0].weight, state["0.weight"])
    with pytest.raises(MisuseError, match=r"'0.bias', which state_dict"):
        state["0.bias"].mul_(2)


def test_a_write_that_lands_makes_a_graph_of_before_raise(store: TieredStore) -> None:
    model = zero.page(build(), store)
    loss = model(torch.ones(2, 48)).sum()
    model.state_dict()["2.weight"].mul_(2)
    with pytest.raises(MisuseError, match="updated, or written to, after this graph was made"):
        loss.backward()


def test_a_write_in_inference_mode_lands(store: TieredStore) -> None:
    model = zero.page(build(), store)
    expected = model[0].weight.detach() * 0.5
    with torch.inference_mode():
        model.state_dict()["0.weight"].mul_(0.5)
    assert torch.equal(model[0].weight, expected)


def test_what_is_saved_or_copied_is_an_ordinary_tensor(store: TieredStore, tmp_path: Path) -> None:
    memory, model = build(), zero.page(build(), store)
    files = []
    for one in (memory, model):
        files.append(io.BytesIO())
        torch.save(one.state_dict(), files[-1])
    assert files[0].getvalue() == files[1].getvalue()
    loaded = torch.load(io.BytesIO(files[1].getvalue()), weights_only=True)
    for found in (
        loaded,
        copy.deepcopy(model.state_dict()),
        {name: value.clone() for name, value in model.state_dict().items()},
    ):
        assert {type(value) for value in found.values()} == {torch.Tensor}
        found["0.weight"].zero_()
        assert torch.equal(model[0].weight, memory[0].weight)


def test_a_tied_value_is_one_tensor_and_one_in_what_is_copied(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is model.head.weight]
    state = model.state_dict()
    assert len(names) == 2
    assert state[names[0]] is state[names[1]]
    copied = copy.deepcopy(state)
    assert copied[names[0]] is copied[names[1]]
    state[names[0]].zero_()
    assert not bool(model.head.weight.any())


def test_values_outlive_the_store_and_the_model(tmp_path: Path) -> None:
    memory = build()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(build(), store)
        kept = model.state_dict()
        other = model.state_dict()
        store.close()
    kept["0.weight"].mul_(2)
    assert torch.equal(kept["0.weight"], memory[0].weight * 2)
    del model
    other["0.weight"].mul_(2)
    assert torch.equal(other["0.weight"], memory[0].weight * 2)


def test_an_array_of_a_value_is_read_only(store: TieredStore) -> None:
    model = zero.page(build(), store)
    array = model.state_dict()["0.weight"].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert torch.equal(torch.tensor(array), model[0].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_read_as_in_memory(store: TieredStore, dtype: torch.dtype) -> None:
    model = zero.page(build(dtype), store)
    optimizer = zero.AdamW(model.parameters())
    assert (len(optimizer.state), bool(optimizer.state)) == (0, False)
    assert len(optimizer.state[model[0].weight]) == 0
    for number in range(2):
        step(model, optimizer, number)
    expected = optimizer.state_dict()["state"]
    assert list(optimizer.state) == list(model.parameters())
    assert model[0].weight in optimizer.state
    assert torch.zeros(3) not in optimizer.state
    for index, (parameter, states) in enumerate(optimizer.state.items()):
        assert set(states) == set(expected[index])
        for name, value in states.items():
            assert torch.equal(value, expected[index][name])
            assert torch.equal(optimizer.state[parameter][name], value)
    if dtype is torch.float32:
        memory = build()
        theirs = torch.optim.AdamW(memory.parameters(), fused=True)
        for number in range(2):
            step(memory, theirs, number)
        for mine, other in zip(optimizer.state.values(), theirs.state.values(), strict=True):
            assert list(mine) == list(other)
            assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_states_cannot_be_written_to(store: TieredStore) -> None:
    model = zero.page(build(), store)
    optimizer = zero.AdamW(model.parameters())
    step(model, optimizer)
    weight, before = model[0].weight, copy.deepcopy(optimizer.state_dict()["state"])
    for write in (
        lambda: optimizer.state[weight]["exp_avg"].zero_(),
        lambda: optimizer.state[weight]["exp_avg_sq"][0].add_(1),
        lambda: optimizer.state[weight]["step"].fill_(7),
        lambda: setattr(optimizer.state[weight]["exp_avg"], "data", torch.zeros(weight.shape)),
        lambda: optimizer.state[weight].update(step=0),
        lambda: optimizer.state[weight].__setitem__("exp_avg", torch.zeros(96, 48)),
        lambda: optimizer.state.__setitem__(weight, {}),
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.pop(weight),
        lambda: setattr(optimizer, "state", defaultdict(dict)),
    ):
        with pytest.raises(MisuseError, match=r"optimizer\.state.*load_state_dict"):
            write()
    optimizer.state[weight] = optimizer.state[weight]  # as libraries that move states to a device
    optimizer.state[weight]["exp_avg"].data = optimizer.state[weight]["exp_avg"].data.to("cpu")
    for index, states in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[index][name]) for name, value in states.items())
    with pytest.raises(MisuseError, match="in none of the optimizer's param_groups"):
        optimizer.state[nn.Parameter(torch.ones(3))]


def test_states_can_be_changed_by_load_state_dict(store: TieredStore) -> None:
    model = zero.page(build(), store)
    optimizer = zero.AdamW(model.parameters())
    step(model, optimizer)
    found = optimizer.state_dict()
    found["state"][0]["exp_avg"].zero_()
    optimizer.load_state_dict(found)
    assert not bool(optimizer.state[model[0].weight]["exp_avg"].any())
    assert bool(optimizer.state[model[2].weight]["exp_avg"].any())
