"""Every update rule: bit for bit torch's class in memory, whenever it is applied and however the parameters are cut."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.versions import ADAM_DECOUPLES
from tests.zero.harness import clipping, equal, train
from tests.zero.ranks import on_ranks
from tiered import MisuseError, TensorSpec, TieredStore, zero
from tiered.zero.paging.storage import TensorStore
from tiered.zero.paging.units import Limits, divide
from tiered.zero.paging.update import States
from tiered.zero.rules.exact import AdamRule, AdamWRule
from tiered.zero.rules.forms import forms_of
from tiered.zero.rules.known import KNOWN

STEPS = 10


class ReferenceLion(torch.optim.Optimizer):
    """The paper's algorithm 2 (https://arxiv.org/abs/2302.06675) in plain torch."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                ahead = torch.sign(first * momentum + (1 - first) * parameter.grad)
                decayed = parameter * (1 - group["lr"] * group["weight_decay"])
                parameter.copy_(decayed.sub(ahead, alpha=group["lr"]))
                momentum.copy_((second * momentum).add(parameter.grad, alpha=1 - second))


MUON = ["Muon"] if hasattr(torch.optim, "Muon") else []
"""torch has it from 2.9 on."""


@dataclass(frozen=True)
class Case:
    ours: Callable[..., zero.Optimizer]
    theirs: Callable[..., torch.optim.Optimizer]
    arguments: dict[str, Any]
    extra: dict[str, Any]
    """What only torch's is given, so that it takes the same kernel."""


def case(name: str, theirs: Any = None, fused: bool = False, **arguments: Any) -> Case:
    extra: dict[str, Any] = {} if name == "Lion" else {"fused": True} if fused else {"foreach": False}
    return Case(getattr(zero, name), theirs or getattr(torch.optim, name), arguments, extra)


def decoupled_adam(params: Any, decoupled_weight_decay: bool, **arguments: Any) -> torch.optim.Optimizer:
    if ADAM_DECOUPLES:
        return torch.optim.Adam(params, decoupled_weight_decay=decoupled_weight_decay, **arguments)
    return torch.optim.AdamW(params, **arguments)


CASES = {
    "sgd": case("SGD", fused=True, lr=0.05),
    "sgd_momentum": case("SGD", fused=True, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd_nesterov": case("SGD", fused=True, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "sgd_loop": case("SGD", lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": case("Adam", fused=True, lr=1e-3, weight_decay=0.1),
    "adam_amsgrad": case("Adam", fused=True, lr=1e-3, amsgrad=True),
    "adam_loop": case("Adam", decoupled_adam, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": case("AdamW", fused=True, lr=1e-3),
    "adagrad": case("Adagrad", fused=True, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "adagrad_loop": case("Adagrad", lr=0.01, lr_decay=0.1),
    "rmsprop": case("RMSprop", lr=1e-3),
    "rmsprop_centered": case("RMSprop", lr=1e-3, centered=True, momentum=0.9, weight_decay=0.01),
    "nadam": case("NAdam", lr=1e-3, weight_decay=0.01),
    "radam": case("RAdam", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, decoupled_weight_decay=True),
    "adamax": case("Adamax", lr=1e-3, weight_decay=0.01),
    "adafactor": case("Adafactor", lr=2e-2, eps=(1e-8, 1e-4), d=2.0, beta2_decay=-0.6, weight_decay=0.01),
    "lion": case("Lion", ReferenceLion, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
}
PIECEWISE = [kind for kind in CASES if kind != "adafactor"]
for unfused in ("sgd_loop", "adam_loop", "adagrad_loop"):
    CASES[unfused].arguments["fused"] = False


class Small(nn.Module):
    """Two layers and a vector; the first weight has more elements than a chunk of states in the smaller pool, and neither a
    multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(97, 451)
        self.second = nn.Linear(451, 7)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale

    def loss(self, number: int) -> torch.Tensor:
        x = torch.randn(4, 97, generator=torch.Generator().manual_seed(number))
        return self(x).square().mean()


def groups(model: nn.Module, several: bool) -> list[dict[str, Any]]:
    if not several:
        return [{"params": list(model.parameters())}]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 2e-3}]


def built() -> Small:
    torch.manual_seed(0)
    return Small()


def opened(path: Path, dram: str) -> TieredStore:
    return TieredStore.open(path, dram=dram)


def same_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare all that both have of each parameter: what torch has, and no more."""
    assert ours["state"].keys() == theirs["state"].keys() or not any(
        value is not None for state in theirs["state"].values() for value in state.values()
    )
    for index, state in theirs["state"].items():
        for name, value in state.items():
            if value is not None:
                assert torch.equal(ours["state"][index][name], value), (index, name)
        assert {name for name, value in state.items() if value is not None} == set(ours["state"].get(index, {}))


def compare(
    tmp_path: Path, kind: str, update: str, dram: str, batches: int, clipped: bool, several: bool, steps: int = STEPS
) -> None:
    found = CASES[kind]
    reference, model = built(), built()
    theirs = found.theirs(groups(reference, several), **{**found.arguments, **found.extra})
    numbers = train(reference, theirs, clipping(reference) if clipped else None, steps=steps, batches=batches)
    with opened(tmp_path / "store", dram) as store:
        zero.page(model, store)
        ours = found.ours(groups(model, several), **found.arguments, update=update)
        clip = ours.clip_grad_norm_ if clipped else None
        assert train(model, ours, clip, steps=steps, batches=batches) == numbers
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        cut = [key for key in store if key.endswith("#1")]
        assert bool(cut) is (dram == CUT and kind in PIECEWISE and kind != "sgd")
        store.close()


CUT, WHOLE = "1MiB", "16MiB"


@pytest.mark.parametrize("kind", CASES)
def test_a_rule_is_torchs_class(kind: str, tmp_path: Path) -> None:
    """Accumulated, clipped, in two groups, in a pool that has the states in several chunks."""
    compare(tmp_path, kind, "on_fetch", CUT, 2, True, True)


@pytest.mark.parametrize("kind", quick(CASES, list(CASES)[::3]))
def test_a_rule_in_backward(kind: str, tmp_path: Path) -> None:
    compare(tmp_path, kind, "in_backward", CUT, 1, False, True)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("update", "dram", "batches", "clipped", "several"),
    [
        *itertools.product(["on_fetch"], [CUT, WHOLE], [1, 2], [False, True], [False, True]),
        *itertools.product(["in_backward"], [CUT, WHOLE], [1], [False], [False, True]),
    ],
)
@pytest.mark.parametrize("kind", CASES)
def test_a_rule_in_all_ways(
    kind: str, update: str, dram: str, batches: int, clipped: bool, several: bool, tmp_path: Path
) -> None:
    compare(tmp_path, kind, update, dram, batches, clipped, several, 20)


@pytest.mark.parametrize("kind", ["sgd", "sgd_momentum", "adam_amsgrad", "rmsprop_centered", "lion", "adafactor"])
def test_a_bf16_parameter_has_a_master(kind: str, tmp_path: Path) -> None:
    masters_are_torchs(tmp_path, kind, CUT, STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("dram", [CUT, WHOLE])
@pytest.mark.parametrize("kind", CASES)
def test_a_bf16_parameter_has_a_master_in_all_ways(kind: str, dram: str, tmp_path: Path) -> None:
    masters_are_torchs(tmp_path, kind, dram, 20)


def masters_are_torchs(tmp_path: Path, kind: str, dram: str, steps: int) -> None:
    """The master is what torch's class computes with the same gradients in fp32, and the parameter is the master, rounded."""
    found = CASES[kind]
    model = built().to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    theirs = found.theirs(masters, **{**found.arguments, **found.extra})
    with opened(tmp_path / "store", dram) as store:
        zero.page(model, store)
        ours = found.ours(model.parameters(), **found.arguments)
        for number in range(steps):
            x = torch.randn(4, 97, generator=torch.Generator().manual_seed(number))
            ours.zero_grad()
            model(x.bfloat16()).tanh().square().mean().backward()  # bounded: one case goes up it
            for master, parameter in zip(masters, model.parameters(), strict=True):
                grad = ours.grad(parameter)
                assert grad is not None
                master.grad = grad.float()
            ours.step()
            theirs.step()
        states = ours.state_dict()["state"]
        for index, (master, value) in enumerate(zip(masters, model.state_dict().values(), strict=False)):
            assert torch.equal(states[index]["master"], master)
            assert float((value.float() - master.detach()).abs().max()) <= float(master.detach().abs().max()) / 256
        store.close()


@pytest.mark.parametrize(
    ("kind", "flushed"),
    quick(
        [(kind, flushed) for kind in CASES for flushed in (False, True)],
        [(kind, number % 2 == 0) for number, kind in enumerate(CASES)],
    ),
)
def test_a_run_goes_on_from_a_commit(kind: str, flushed: bool, tmp_path: Path) -> None:
    """Committed with an update pending, and reopened, it is the run that never stopped."""
    found = CASES[kind]
    reference = built()
    theirs = found.theirs(groups(reference, True), **{**found.arguments, **found.extra})
    continued(reference, theirs, range(STEPS))
    with opened(tmp_path / "store", CUT) as store:
        model = built()
        zero.page(model, store, name="m")
        ours = found.ours(groups(model, True), **found.arguments)
        continued(model, ours, range(5))
        if flushed:
            ours.flush()
        zero.commit(model, ours)
        continued(model, ours, range(5, 7))
        zero.rollback(model, ours)
        continued(model, ours, range(5, 6))
        zero.commit(model, ours)
        store.close()
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m", existing="resume")
        ours = found.ours(groups(model, True), **found.arguments)
        zero.resume(model, ours)
        continued(model, ours, range(6, STEPS))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        store.close()


def continued(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        model.loss(number).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", quick(CASES, list(CASES)[1::2]))
def test_state_dicts_go_to_torch_and_back(kind: str, tmp_path: Path) -> None:
    found = CASES[kind]
    reference = built()
    theirs = found.theirs(groups(reference, True), **{**found.arguments, **found.extra})
    continued(reference, theirs, range(3))
    with opened(tmp_path / "store", CUT) as store:
        model = copy.deepcopy(reference)
        model.zero_grad()
        zero.page(model, store)
        ours = found.ours(groups(model, True), **found.arguments)
        ours.load_state_dict(theirs.state_dict())
        continued(model, ours, range(3, 6))
        continued(reference, theirs, range(3, 6))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        other = found.theirs(groups(reference, True), **{**found.arguments, **found.extra})
        other.load_state_dict(ours.state_dict())
        continued(reference, other, range(6, 8))
        continued(model, ours, range(6, 8))
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


@pytest.mark.parametrize("kind", quick(CASES, list(CASES)[::2]))
def test_states_of_parameters_in_memory(kind: str, tmp_path: Path) -> None:
    found = CASES[kind]
    reference, model = built(), built()
    theirs = found.theirs(groups(reference, True), **{**found.arguments, **found.extra})
    continued(reference, theirs, range(STEPS))
    with opened(tmp_path / "store", CUT) as store:
        ours = found.ours(groups(model, True), **found.arguments, store=store)
        continued(model, ours, range(5))
        kept = model.state_dict()
        store.commit()
        store.close()
    with opened(tmp_path / "store", CUT) as store:
        model = built()
        model.load_state_dict(kept)
        ours = found.ours(groups(model, True), **found.arguments, store=store, existing="resume")
        continued(model, ours, range(5, STEPS))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        store.close()


@pytest.mark.parametrize("kind", PIECEWISE)
def test_kernels_give_the_same_bits_in_pieces_of_sixteen(kind: str) -> None:
    found = CASES[kind]
    parameters = [nn.Parameter(torch.randn(1003, generator=torch.Generator().manual_seed(1)))]
    pieces = [nn.Parameter(piece.clone()) for piece in parameters[0].detach().split(48)]
    whole, cut = (found.theirs(p, **{**found.arguments, **found.extra}) for p in (parameters, pieces))
    for seed in range(4):
        parameters[0].grad = torch.randn(1003, generator=torch.Generator().manual_seed(seed))
        for piece, grad in zip(pieces, parameters[0].grad.split(48), strict=True):
            piece.grad = grad.clone()
        whole.step()
        cut.step()
    assert torch.equal(torch.cat([piece.detach() for piece in pieces]), parameters[0].detach())


# Rules in general


def test_a_rule_for_each_param_group(tmp_path: Path) -> None:
    """One unit has parameters with other states, and each of both is torch's."""
    reference, model = built(), built()
    first, second = groups(reference, True)
    sgd = torch.optim.SGD(first["params"], lr=0.05, momentum=0.9, fused=True)
    adam = torch.optim.AdamW(second["params"], lr=1e-3, fused=True)
    with opened(tmp_path / "store", "16MiB") as store:
        zero.page(model, store, name="m")
        first, second = groups(model, True)
        ours = zero.Optimizer(
            [{"params": first["params"], "rule": zero.SGDRule(lr=0.05, momentum=0.9)}, {"params": second["params"]}],
            zero.AdamWRule(1e-3, (0.9, 0.999), 1e-8, 1e-2, False),
        )
        assert set(ours.param_groups[0]) == {*vars(zero.SGDRule()), "params"}
        for number in range(STEPS):
            for one in (sgd, adam):
                one.zero_grad()
            reference.loss(number).backward()
            for one in (sgd, adam):
                one.step()
            continued(model, ours, range(number, number + 1))
            if number == 4:
                zero.commit(model, ours)
                continued(model, ours, range(1))
                zero.rollback(model, ours)
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


@dataclass(frozen=True)
class Rows:
    lr: float = 0.1
    granularity = "rows"

    def state_specs(self, param: TensorSpec) -> dict[str, TensorSpec]:
        return {}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: Any, step: int) -> None:
        raise AssertionError("it was refused")


@dataclass(frozen=True)
class Counting:
    """A rule of one's own, with a state of another type."""

    lr: float = 0.5

    def state_specs(self, param: TensorSpec) -> dict[str, TensorSpec]:
        return {"ups": TensorSpec("int16", param.shape, 2)}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: Any, step: int) -> None:
        state["ups"].add_((grad > 0).to(torch.int16))
        param.sub_(grad, alpha=self.lr)


def test_a_rule_of_ones_own(store: TieredStore) -> None:
    reference, model = built(), built()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.5, foreach=False)
    zero.page(model, store)
    ours = zero.Optimizer(model.parameters(), Counting())
    ups = [torch.zeros(p.shape, dtype=torch.int16) for p in reference.parameters()]
    for number in range(3):
        continued(reference, theirs, range(number, number + 1))
        continued(model, ours, range(number, number + 1))
        for count, parameter in zip(ups, reference.parameters(), strict=True):
            assert parameter.grad is not None
            count.add_((parameter.grad > 0).to(torch.int16))
    with pytest.raises(MisuseError, match="an update by Counting is pending, which a checkpoint cannot hold: flush"):
        zero.commit(model, ours)
    assert equal(model.state_dict(), reference.state_dict())
    states = ours.state_dict()["state"]
    assert all(torch.equal(states[index]["ups"], count) for index, count in enumerate(ups))


def test_what_a_rule_cannot_be(store: TieredStore) -> None:
    model = zero.page(built(), store)
    with pytest.raises(MisuseError, match="Rows updates 'rows' together"):
        zero.Optimizer(model.parameters(), Rows())
    with pytest.raises(MisuseError, match="is no rule: give a frozen dataclass"):
        zero.Optimizer(model.parameters(), zero.SGDRule)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="foreach=True: SGD updates pieces of one parameter"):
        zero.SGD(model.parameters(), foreach=True)
    with pytest.raises(MisuseError, match="Nesterov momentum requires"):
        zero.SGD(model.parameters(), nesterov=True)


def test_a_rule_keeps_its_states(store: TieredStore) -> None:
    model = zero.page(built(), store)
    ours = zero.SGD(model.parameters(), lr=0.1)
    continued(model, ours, range(1))
    ours.param_groups[0]["momentum"] = 0.9
    with pytest.raises(MisuseError, match="SGDRule now keeps"):
        continued(model, ours, range(1))
    nadam = zero.NAdam(model.parameters())
    continued(model, nadam, range(1))
    nadam.param_groups[0]["betas"] = (0.8, 0.999)
    with pytest.raises(MisuseError, match="betas, momentum_decay of a param group were"):
        continued(model, nadam, range(1))


@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
def test_another_optimizer_with_other_states_takes_over(tmp_path: Path, update: str) -> None:
    """The way through the chunks of a unit was kept for the states of the optimizer before."""
    reference, model = built(), built()
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store)
        for kind in ("adamw", "rmsprop_centered", "sgd_momentum", "adamw"):
            found = CASES[kind]
            theirs = found.theirs(groups(reference, False), **{**found.arguments, **found.extra})
            ours = found.ours(groups(model, False), **found.arguments, update=update)
            assert train(model, ours, steps=2, batches=1) == train(reference, theirs, steps=2, batches=1)
            ours.flush()
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


def test_a_commit_of_another_rule(tmp_path: Path) -> None:
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m")
        ours = zero.Adam(model.parameters())
        continued(model, ours, range(2))
        zero.commit(model, ours)
        store.close()
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m", existing="resume")
        with pytest.raises(MisuseError, match="was updated by 'AdamRule' when it was committed, and is by 'SGDRule'"):
            zero.resume(model, zero.SGD(model.parameters(), momentum=0.9))
        store.close()


@pytest.mark.parametrize(
    "kind",
    [torch.optim.Adadelta, torch.optim.Rprop, torch.optim.Adamax, torch.optim.Adagrad, torch.optim.AdamW, "of one's own"],
)
def test_any_elementwise_class(kind: Any, tmp_path: Path) -> None:
    kind = SteppingTensor if kind == "of one's own" else kind
    reference, model = built(), built()
    theirs = kind(groups(reference, False), lr=0.01)
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store, name="m")
        ours = zero.Elementwise(kind, groups(model, False), lr=0.01)
        for number in range(STEPS):
            continued(reference, theirs, range(number, number + 1))
            continued(model, ours, range(number, number + 1))
        ours.flush()
        zero.commit(model, ours)
        continued(model, ours, range(1))
        zero.rollback(model, ours)
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        store.close()


def test_param_groups_may_be_used_again(store: TieredStore) -> None:
    model = zero.page(built(), store)
    given = [{"params": [model.scale], "rule": zero.LionRule()}, {"params": [model.first.weight]}]
    for _ in range(2):
        optimizer = zero.Optimizer(given, zero.SGDRule())
        assert [optimizer.rule_name(index) for index in range(2)] == ["LionRule", "SGDRule"]


def test_an_elementwise_class_with_a_list(store: TieredStore) -> None:
    reference = built()
    model = zero.page(built(), store)
    continued(reference, torch.optim.Rprop(reference.parameters(), etas=[0.4, 1.3]), range(4))  # type: ignore[arg-type]
    ours = zero.Elementwise(torch.optim.Rprop, model.parameters(), etas=[0.4, 1.3])
    continued(model, ours, range(4))
    assert equal(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("name", ["Adafactor", *(["Muon"] if hasattr(torch.optim, "Muon") else []), "Adadelta"])
def test_a_learning_rate_below_zero(name: str, store: TieredStore) -> None:
    """torch's classes refuse it as an argument, and take it from a scheduler."""
    torch.manual_seed(0)
    reference = nn.Linear(20, 20, bias=False)
    model = zero.page(copy.deepcopy(reference), store)
    kind = getattr(torch.optim, name)
    ours = zero.Elementwise(kind, model.parameters()) if name == "Adadelta" else getattr(zero, name)(model.parameters())
    for net, optimizer in ((reference, kind(reference.parameters())), (model, ours)):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / 2)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.ones(2, 20)).square().sum().backward()
            optimizer.step()
            scheduler.step()
    assert equal(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", *MUON, "SparseAdam", "ASGD", "NAdam"])
def test_a_class_that_is_not_elementwise(name: str, store: TieredStore) -> None:
    model = zero.page(built(), store)
    with pytest.raises(MisuseError, match=name):
        zero.Elementwise(getattr(torch.optim, name), model.parameters(), lr=0.01)


class Stepping(torch.optim.Optimizer):
    """Of one's own. It begins to count its steps with ``first``."""

    first: Any = 0

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                    state["step"] = state.get("step", copy.copy(self.first)) + 1
                    parameter.add_(state["mean"] / (1 - 0.9 ** float(state["step"])), alpha=-group["lr"])


class SteppingTensor(Stepping):
    first = torch.zeros(())


class SteppingFloat(Stepping):
    first = 0.0


def decaying(kind: Any) -> Any:
    class Decaying(kind):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            for group in self.param_groups:
                group["lr"] *= 0.9
            return found

    return Decaying


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Stepping, r"Stepping keeps 'step' as 1: keep it as a tensor, which begins as torch\.zeros\(\(\)\)$"),
        (SteppingFloat, r"SteppingFloat keeps 'step' as 1\.0: keep it as a tensor"),
        (torch.optim.NAdam, r"NAdam keeps 'mu_product', which has not one value for each element.*: take zero\.NAdam$"),
        (torch.optim.ASGD, r"ASGD keeps 'eta', .*: keep its parameters in memory, or write a rule for zero\.Optimizer$"),
        (decaying(torch.optim.AdamW), r"Decaying changes 'lr' of its param groups in step\(\), .* or subclass .*zero\.AdamW$"),
    ],
)
def test_why_a_class_is_not_elementwise(kind: Any, message: str, store: TieredStore) -> None:
    model = zero.page(built(), store)
    with pytest.raises(MisuseError, match=message):
        zero.Elementwise(kind, model.parameters(), lr=0.01)


def test_a_subclass_whose_step_changes_its_param_groups(tmp_path: Path) -> None:
    reference = built()
    continued(reference, decaying(torch.optim.AdamW)(reference.parameters(), fused=True), range(4))
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store)
        ours = decaying(zero.AdamW)(model.parameters())
        continued(model, ours, range(2))
        zero.commit(model, ours)
        continued(model, ours, range(1))
        store.close()
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, existing="resume")
        ours = decaying(zero.AdamW)(model.parameters())
        zero.resume(model, ours)
        continued(model, ours, range(2, 4))
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


class Experts(nn.Module):
    """Each step uses other experts, whose slices make up for the steps that they missed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, 128, 64) / 8)
        self.down = nn.Parameter(torch.randn(16, 64, 128) / 8)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for expert in chosen.unique():
            tokens = torch.where(chosen == expert)[0]
            hidden = nn.functional.gelu(nn.functional.linear(x[tokens], self.up[expert]))
            made = made.index_add(0, tokens, nn.functional.linear(hidden, self.down[expert]))
        return made

    def loss(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        x, chosen = torch.randn(6, 64, generator=generator), torch.randint(0, 16, (6,), generator=generator)
        return self(x, chosen).square().mean()


@pytest.mark.parametrize(
    "kind", quick(["sgd_momentum", "adagrad", "rmsprop_centered", "nadam", "adamax", "lion"], ["sgd_momentum", "nadam"])
)
def test_experts_that_miss_steps(kind: str, tmp_path: Path) -> None:
    found = CASES[kind]
    torch.manual_seed(0)
    reference = Experts()
    model = copy.deepcopy(reference)
    theirs = found.theirs(reference.parameters(), **{**found.arguments, **found.extra})
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store, name="m")
        assert sum("/param/" in key for key in store) == 16, "each expert is a unit"
        ours = found.ours(model.parameters(), **found.arguments)
        continued(reference, theirs, range(STEPS))
        continued(model, ours, range(6))
        zero.commit(model, ours)
        continued(model, ours, range(2))
        zero.rollback(model, ours)
        continued(model, ours, range(6, STEPS))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        store.close()


def on_a_rank(rank: int, folder: Path, kinds: list[str]) -> list[tuple[Any, Any]]:
    """Train with each stage and rule on one loss, so that the mean of the gradients is that of one process."""
    torch.set_num_threads(1)
    made = []
    for stage in (zero.Stage1(), zero.Stage2(), zero.Stage3()):
        for kind in kinds:
            name = f"{type(stage).__name__}-{kind}"
            with zero.open_store(folder / name, dram="2MiB") as store:
                model = zero.page(built(), store, stage=stage)
                ours = CASES[kind].ours(model.parameters(), **CASES[kind].arguments)
                continued(model, ours, range(4))
                made.append((model.state_dict(), {i: dict(s) for i, s in ours.state_dict()["state"].items()}))
                store.close()
    return made


def test_ranks_are_what_one_process_is(tmp_path: Path) -> None:
    kinds = ["sgd_momentum", "rmsprop_centered"]
    results = on_ranks(2, on_a_rank, tmp_path, kinds)
    for kind, found in zip(kinds * 3, zip(*results, strict=True), strict=True):
        reference = built()
        theirs = CASES[kind].theirs(reference.parameters(), **{**CASES[kind].arguments, **CASES[kind].extra})
        continued(reference, theirs, range(4))
        for values, states in found:
            assert equal({name: value.clone() for name, value in values.items()}, reference.state_dict())
            same_states({"state": states}, theirs.state_dict())


def test_sizes_of_chunks_are_those_of_all_parameters_looked_at_one_by_one() -> None:
    """Beside the few near a chunk, that ``sizes`` looks at."""
    rng, store = random.Random(5), cast(TensorStore, None)
    rules = [known.usual for known in KNOWN]
    for _ in range(60):
        shapes = [rng.choice([(0,), (1,), (rng.randint(1, 300),), (rng.randint(1, 40), rng.randint(1, 40))]) for _ in range(9)]
        model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        (unit,) = divide(model, Limits.of(8 << 20), {}, zero.Policy()).units
        parts = list(unit.parts(0).values())
        chunk, kind = rng.choice([64, 100, 1000]), rng.choice([torch.float32, torch.bfloat16])
        states, rule = States(store, "unit", parts, chunk, {kind}), rng.choice(rules)
        for part in parts:
            states.use(part.name, forms_of(rule, torch.float32) if rng.random() < 0.7 else {})
        for index, keys in states.chunks(part for part in parts if rng.random() < 0.8):
            for key in keys:
                name = key.rpartition("/")[2].partition("#")[0]
                assert states.sizes(key) == sorted({states._size(name, index, part) for part in parts} - {0}), (rule, shapes)


@pytest.mark.parametrize("rule", [AdamWRule, AdamRule])
@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
def test_small_parameters_are_updated_together(
    rule: type[Any], update: str, store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one call for a chunk, and not by one for each parameter; with the bits of torch's class. Each step has others without
    a gradient."""
    calls: list[int] = []
    real = rule.update_each

    def counted(self: Any, params: Any, *arguments: Any) -> None:
        calls.append(len(params))
        real(self, params, *arguments)

    monkeypatch.setattr(rule, "update_each", counted)
    torch.manual_seed(0)
    reference = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
    model = zero.page(copy.deepcopy(reference), store)
    kinds = {AdamWRule: (torch.optim.AdamW, zero.AdamW), AdamRule: (torch.optim.Adam, zero.Adam)}
    theirs = kinds[rule][0](reference.parameters(), lr=1e-2, fused=True)
    ours = kinds[rule][1](model.parameters(), lr=1e-2, update=update)
    for step in range(6):
        calls.clear()
        for module, optimizer in (reference, theirs), (model, ours):
            optimizer.zero_grad()
            x = torch.ones(2, 16)
            for number, layer in enumerate(module):
                x = x if number == step else layer(x)
            x.square().sum().backward()
            optimizer.step()
        ours.flush()
        assert sum(calls) == 22, "each parameter that has a gradient"
        if step > 6 - 2:
            assert len(calls) <= 4
    assert equal(model.state_dict(), reference.state_dict())


def test_a_rule_that_overrides_the_update_of_adamw_is_asked_for_each_parameter(store: TieredStore) -> None:
    asked = []

    class Mine(AdamWRule):
        def update(self, param: Any, grad: Any, state: Any, step: int) -> None:
            asked.append(step)
            super().update(param, grad, state, step)

    model = zero.page(nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]), store)
    optimizer = zero.Optimizer(model.parameters(), Mine())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
    optimizer.flush()
    assert sorted(asked) == [1] * 8 + [2] * 8 + [3] * 8
