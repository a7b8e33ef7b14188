"""``zero.AdamW`` takes what ``torch.optim.AdamW`` takes, and other optimizers on paged parameters are named."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.versions import MUON
from tests.zero.harness import equal, train
from tests.zero.models import Tied, parameter_groups
from tiered import MisuseError, TieredStore, zero
from tiered.zero.paging.pager import placement_of
from tiered.zero.rules.known import OPTIMIZERS


def test_it_has_all_arguments_of_torch() -> None:
    ours, theirs = (list(inspect.signature(made).parameters.values()) for made in (zero.AdamW, torch.optim.AdamW))
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours][: len(positional)] == positional
    defaults = {p.name: p.default for p in ours}
    assert all(defaults[p.name] == p.default for p in theirs)


@pytest.mark.parametrize("resident", [False, True])
def test_what_torch_takes_is_taken(store: TieredStore, resident: bool) -> None:
    """A tensor for lr, which a scheduler changes in place; betas, too; names; and every default that is said."""
    torch.manual_seed(0)
    reference = Tied(layers=2)
    model = copy.deepcopy(reference)
    if not resident:
        zero.page(model, store)
    more: dict[str, Any] = {"store": store} if resident else {}
    stated = {"amsgrad": False, "maximize": True, "foreach": None, "capturable": False, "differentiable": False, "fused": True}
    numbers, optimizers = [], []
    for net, made, options in ((reference, torch.optim.AdamW, {}), (model, zero.AdamW, more)):
        lr = torch.tensor(1e-3)
        optimizer = made(net.named_parameters(), lr, (0.8, 0.95), 1e-7, 0.02, **stated, **options)
        numbers.append(train(net, optimizer, steps=4, batches=1))
        optimizers.append(optimizer)
    assert numbers[0] == numbers[1]
    assert equal(reference.state_dict(), model.state_dict())
    left, right = (optimizer.state_dict() for optimizer in optimizers)
    for key in ("param_names", "params", "lr", "betas", "eps", "weight_decay", "maximize", "fused"):
        assert left["param_groups"][0][key] == right["param_groups"][0][key], key


def test_groups_have_names_and_betas_that_are_tensors(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = zero.page(copy.deepcopy(reference), store)
    for net, made, options in ((reference, torch.optim.AdamW, {"fused": True}), (model, zero.AdamW, {"foreach": False})):
        first, second = net
        betas = torch.tensor(0.8), torch.tensor(0.9)
        optimizer = made([{"params": list(first.named_parameters()), "lr": 0.1}], betas=betas, **options)
        optimizer.add_param_group({"params": list(second.named_parameters()), "fused": True})
        net(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        assert [group["param_names"] for group in optimizer.param_groups] == [["weight", "bias"]] * 2
    assert equal(reference.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", [pytest.param(name, marks=MUON) if name == "Muon" else name for name in OPTIMIZERS])
def test_what_is_no_number_is_named(store: TieredStore, name: str) -> None:
    model = zero.page(nn.Linear(4, 4, bias=False), store)
    made: Any = getattr(zero, name)
    for wrong in ("1e-3", None, [0.1]):
        with pytest.raises(MisuseError, match=r"^lr is a number, not "):
            made(model.parameters(), lr=wrong)
    with pytest.raises(MisuseError, match=r"^weight_decay is a number, not '0'"):
        made(model.parameters(), weight_decay="0")
    made(model.parameters(), lr=np.float32(0.1))
    if "betas" in inspect.signature(made).parameters:
        with pytest.raises(MisuseError, match=r"^betas are two numbers, not 0\.9"):
            made(model.parameters(), betas=0.9)
        with pytest.raises(MisuseError, match=r"^betas\[1\] is a number, not None"):
            made(model.parameters(), betas=(0.9, None))


@pytest.mark.parametrize("resident", [False, True])
def test_a_model_in_place_of_its_parameters(store: TieredStore, resident: bool) -> None:
    where: dict[str, Any] = {"store": store} if resident else {}
    for model in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))):
        if not resident:
            zero.page(model, store, existing="overwrite")
        with pytest.raises(MisuseError, match=r"or of param groups, not a model: give model\.parameters\(\)$"):
            zero.AdamW(model, **where)  # type: ignore[arg-type]
    zero.AdamW(model.parameters(), **where)
    several = nn.ParameterList([nn.Parameter(torch.ones(2))])
    if resident:
        where["name"] = "several"
    zero.SGD(several if resident else zero.page(several, store, existing="overwrite"), **where)  # type: ignore[arg-type]


@pytest.mark.parametrize("resident", [False, True])
def test_which_of_the_parameters_is_not_paged(store: TieredStore, resident: bool) -> None:
    model, other = zero.page(nn.Linear(4, 4), store), nn.Linear(3, 5, bias=False)
    with pytest.raises(MisuseError, match=r"are paged and others, as number 2, of shape \(5, 3\), are not: make an optimizer"):
        zero.AdamW([*model.parameters(), *other.parameters()], store=store if resident else None)


REFUSED = {"fused": False, "foreach": True, "amsgrad": True, "capturable": True, "differentiable": True}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(store: TieredStore, name: str) -> None:
    model = zero.page(nn.Linear(4, 4), store)
    with pytest.raises(MisuseError, match=rf"^{name}={REFUSED[name]}: .*leave {name}= out$"):
        zero.AdamW(model.parameters(), **{name: REFUSED[name]})
    with pytest.raises(MisuseError, match=rf"^{name}={REFUSED[name]}: "):
        zero.AdamW([{"params": [model.weight], name: REFUSED[name]}])
    with pytest.raises(MisuseError, match=rf"^{name}={REFUSED[name]}: "):
        zero.AdamW(nn.Linear(2, 2).parameters(), store=store, **{name: REFUSED[name]})
    zero.AdamW(model.parameters())


@pytest.mark.parametrize("made", [zero.AdamW, zero.AdamW8bit, zero.AdamW4bit, zero.Lion])
@pytest.mark.parametrize(
    "wrong",
    [
        *({"lr": -1.0}, {"lr": torch.tensor(-1.0)}, {"lr": math.nan}, {"eps": -1.0}, {"weight_decay": -1.0}),
        *({"betas": (1.0, 0.9)}, {"betas": (0.9, 0.99, 0.999)}, {"betas": (0.9,)}),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(store: TieredStore, wrong: dict[str, Any], made: Any) -> None:
    model = zero.page(nn.Linear(4, 4), store)
    if made is zero.Lion and "eps" in wrong:
        return
    with pytest.raises(MisuseError, match=f"{next(iter(wrong))}=.*out of range"):
        made(model.parameters(), **wrong)
    if made in (zero.AdamW, zero.Lion):
        with pytest.raises(MisuseError, match="has 2 elements"):
            made(model.parameters(), lr=torch.ones(2))


@pytest.mark.parametrize("where", ["arguments", "param group"])
def test_what_adamw_does_not_have_is_adams(store: TieredStore, where: str) -> None:
    """As its errors say: ``amsgrad``, and torch's kernel that is not fused. Also where torch's Adam decouples no decay."""
    torch.manual_seed(0)
    reference = Tied(layers=2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3, amsgrad=True, foreach=False)
    model = zero.page(copy.deepcopy(reference), store)
    found = {"amsgrad": True, "fused": False, "decoupled_weight_decay": True, "weight_decay": 0.01}
    if where == "arguments":
        ours = zero.Adam(model.parameters(), lr=1e-3, **found)
    else:
        ours = zero.Adam([{"params": list(model.parameters()), **found}], lr=1e-3)
    assert train(reference, theirs, steps=4) == train(model, ours, steps=4)
    assert equal(reference.state_dict(), model.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


class Mine(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("it must not come to this")


def others(params: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(params, lr=0.1),
        torch.optim.SGD(params, lr=0.1, foreach=False),
        torch.optim.AdamW(params, fused=True),
        torch.optim.Adam(params, foreach=True),
        torch.optim.LBFGS(params),
        Mine(params),
    ]


@pytest.mark.parametrize("index", range(6))
def test_another_optimizer_is_named_at_its_first_step(store: TieredStore, index: int) -> None:
    model: Any = zero.page(Tied(layers=2), store)
    beside = nn.Linear(2, 2)
    other = others([*beside.parameters(), *model.parameters()])[index]
    before = model.state_dict()
    model.loss(0).backward()
    name = type(other).__name__
    ours = rf"AdamW or another one of tiered\.zero \(tiered\.zero\.Elementwise takes {name},"
    like = name if name in ("SGD", "AdamW", "Adam") else ours
    with pytest.raises(MisuseError, match=rf"^{name} cannot update .*tiered\.zero\.{like}.*or keep what {name} updates out"):
        other.step(lambda: model.loss(0))  # type: ignore[arg-type,return-value]
    assert equal(model.state_dict(), before)
    optimizer = zero.AdamW(model.parameters())
    optimizer.step()
    assert not equal(model.state_dict(), before)


def test_other_optimizers_of_other_parameters_are_left_alone(store: TieredStore) -> None:
    zero.page(nn.Linear(2, 2), store)
    plain = nn.Linear(2, 2)
    before = copy.deepcopy(plain.state_dict())
    plain(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert not equal(plain.state_dict(), before)


def test_one_that_was_made_before_the_model_was_paged(store: TieredStore) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    zero.page(model, store)
    with pytest.raises(MisuseError, match="SGD cannot update"):
        optimizer.step()


def test_a_model_that_trains_with_groups_and_kwargs_of_a_trainer(store: TieredStore) -> None:
    """transformers gives ``lr``, ``betas``, ``eps`` and ``fused``, and groups by decay."""
    torch.manual_seed(0)
    reference = Tied(layers=2)
    model = zero.page(copy.deepcopy(reference), store)
    given: dict[str, Any] = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "fused": True}
    made = [
        (net, kind(parameter_groups(net), **given))
        for net, kind in ((reference, torch.optim.AdamW), (model, zero.AdamW))
    ]
    assert train(*made[0], steps=3) == train(*made[1], steps=3)
    assert equal(reference.state_dict(), model.state_dict())


@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
def test_two_optimizers_cannot_take_turns(store: TieredStore, update: str) -> None:
    """There is one set of states. A second one may begin anew, or go on with a state."""
    model = zero.page(nn.Linear(16, 16), store)
    first, second = (zero.AdamW(model.parameters(), update=update) for _ in range(2))

    def step(optimizer: zero.AdamW) -> None:
        for parameter in model.parameters():  # the last claim counts
            _, unit, placement = placement_of(parameter)
            unit.claim(placement, optimizer._paged.update_now if update == "in_backward" else None)
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()

    step(first)
    kept = first.state_dict()
    step(second)
    step(second)
    with pytest.raises(MisuseError, match="take turns"):
        first.state_dict()
    with pytest.raises(MisuseError, match="take turns"):
        zero.commit(model, first)
    if update == "on_fetch":
        with pytest.raises(MisuseError, match="take turns"):
            step(first)
        first.zero_grad()
    first.load_state_dict(kept)
    step(first)
    with pytest.raises(MisuseError, match="take turns"):
        second.state_dict()


@pytest.mark.parametrize("kind", [zero.Adam, zero.NAdam, zero.RAdam, zero.Adamax])
@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.999)])
def test_two_betas(kind: type[zero.Optimizer], betas: tuple[float, ...]) -> None:
    """torch's classes take three, and use two."""
    with pytest.raises(MisuseError, match=f"betas=.* are {len(betas)}, .*give two"):
        kind([nn.Parameter(torch.ones(3))], betas=betas)  # type: ignore[call-arg]


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adafactor", pytest.param("Muon", marks=MUON), "Elementwise"])
def test_hooks_of_all_optimizers_see_one_step(store: TieredStore, kind: str, resident: bool) -> None:
    """Those that torch calls for every optimizer: once before a step and once after it, with the optimizer of the user, and
    not with those of torch that its rule is made of."""
    made: Any = partial(zero.Elementwise, torch.optim.Adadelta) if kind == "Elementwise" else getattr(zero, kind)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    if not resident:
        zero.page(model, store)
    where = {"store": store} if resident else {}
    seen: list[tuple[str, object]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("before", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(("after", optimizer))),
    ]
    try:
        made_of_class = kind == "Elementwise"
        optimizer = made(model.parameters(), where=where) if made_of_class else made(model.parameters(), **where)
        for _ in range(2):
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            model.state_dict()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [("before", optimizer), ("after", optimizer)] * 2


TENSORS = [
    *("SGD", "Adam", "AdamW", "AdamW8bit", "AdamW4bit", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adafactor", "Lion"),
    pytest.param("Muon", marks=MUON),
]


@pytest.mark.parametrize("kind", TENSORS)
def test_what_is_written_to_a_tensor_for_lr_counts(store: TieredStore, kind: str) -> None:
    """In every param group, of zero.Muon also in the one that AdamW updates."""
    model = zero.page(nn.Sequential(nn.Linear(4, 4, bias=kind == "Muon")), store)
    lr = torch.tensor(0.5)
    optimizer = getattr(zero, kind)(model if kind == "Muon" else model.parameters(), lr=lr)
    before = copy.deepcopy(model.state_dict())
    for value in (0.0, 0.5):
        lr.fill_(value)
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = model.state_dict()
        assert [torch.equal(after[name], before[name]) for name in before] == [value == 0] * len(before)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_a_scheduler_sets_a_momentum_before_the_first_step(store: TieredStore, kind: str, resident: bool) -> None:
    """SGD that was made without one has a momentum from its first step on, as torch's has; later it has none. It goes on from
    a commit."""
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    model = copy.deepcopy(reference) if resident else zero.page(copy.deepcopy(reference), store)
    where: dict[str, Any] = {"store": store} if resident else {}
    scheduled: dict[str, Callable[[Any], Any]] = {
        "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=6),
        "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    }
    optimizers = []
    for net, made in ((reference, partial(torch.optim.SGD, fused=True)), (model, partial(zero.SGD, **where))):
        optimizer: Any = made(net.parameters(), lr=0.1)
        store.commit()  # with no momentum
        scheduler = scheduled[kind](optimizer)
        for number in range(5):
            optimizer.zero_grad()
            net(torch.full((2, 4), 1.0 + number)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        optimizers.append(optimizer)
    assert equal(reference.state_dict(), model.state_dict())
    theirs, ours = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert all(torch.equal(theirs[i]["momentum_buffer"], ours[i]["momentum_buffer"]) for i in (0, 1))
    loaded = zero.SGD(copy.deepcopy(reference).parameters(), lr=0.1, store=store, name="loaded")
    loaded.load_state_dict(optimizers[0].state_dict())
    right = loaded.state_dict()["state"]
    assert all(torch.equal(theirs[i]["momentum_buffer"], right[i]["momentum_buffer"]) for i in (0, 1))
    optimizers[1].param_groups[0]["momentum"] = 0.0
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(MisuseError, match="make a new optimizer for that"):
        optimizers[1].step()
    if resident:
        store.commit()
        del optimizers
        with pytest.raises(MisuseError, match="momentum_buffer"):
            zero.SGD(model.parameters(), lr=0.1, store=store, existing="resume")
        again = zero.SGD(model.parameters(), lr=0.1, momentum=0.9, store=store, existing="resume")
        right = again.state_dict()["state"]
        assert all(torch.equal(theirs[i]["momentum_buffer"], right[i]["momentum_buffer"]) for i in (0, 1))


def test_a_rollback_before_the_first_step_keeps_what_a_scheduler_set(store: TieredStore) -> None:
    """What a later process compares is written with the step, not before it."""
    model = nn.Linear(4, 4)
    optimizer = zero.SGD(model.parameters(), lr=0.1, store=store)
    store.commit()
    OneCycleLR(optimizer, 0.1, total_steps=6)
    values = copy.deepcopy(model.state_dict())
    for again in (False, True):
        if again:
            store.rollback()
        model.load_state_dict(values)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    kept = optimizer.state_dict()["state"]
    store.commit()
    resumed = zero.SGD(model.parameters(), lr=0.1, momentum=0.9, store=store, existing="resume")
    found = resumed.state_dict()["state"]
    assert all(torch.equal(kept[i]["momentum_buffer"], found[i]["momentum_buffer"]) for i in (0, 1))


LATER = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "amsgrad", "nesterov")


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax"])
def test_a_state_of_an_older_torch(store: TieredStore, kind: str) -> None:
    """Its param groups lack what later releases added, and ``step`` is a number: all is set as torch's class sets it, and one
    parameter has no elements."""
    torch.manual_seed(0)
    reference: Any = nn.Linear(4, 4)
    reference.none = nn.Parameter(torch.zeros(0, 4))
    given: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    unfused = {"foreach": False} if kind != "AdamW" else {"fused": True}
    theirs = getattr(torch.optim, kind)(reference.parameters(), lr=0.01, **given, **unfused)

    def step(net: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        (net(torch.ones(2, 4)).square().mean() + net.none.sum()).backward()
        optimizer.step()

    step(reference, theirs)
    older = copy.deepcopy(theirs.state_dict())
    for group in older["param_groups"]:
        for name in LATER:
            group.pop(name, None)
    for state in older["state"].values():
        if "step" in state:
            state["step"] = int(state["step"])
    model = zero.page(copy.deepcopy(reference), store)
    ours = getattr(zero, kind)(model.parameters(), lr=0.5, **given)
    again = getattr(torch.optim, kind)(reference.parameters(), lr=0.5, **given, **unfused)
    again.load_state_dict(copy.deepcopy(older))
    if kind == "AdamW":  # its kernel is always the fused one
        again.param_groups[0]["fused"] = True
    else:
        again.param_groups[0]["foreach"] = False
    ours.load_state_dict(older)
    for _ in range(2):
        step(reference, again)
        step(model, ours)
    assert equal(reference.state_dict(), model.state_dict())
    left, right = again.state_dict()["state"], ours.state_dict()["state"]
    assert left.keys() == right.keys()
    for index in left:
        assert left[index].keys() == right[index].keys()
        assert all(torch.equal(left[index][name], right[index][name]) for name in left[index])
    ours.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("kind", ["a rule of its own", "Elementwise"])
def test_a_state_of_an_older_torch_in_another_group(store: TieredStore, kind: str) -> None:
    """Each group is completed as the class of torch that its rule stands for."""
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    model = zero.page(copy.deepcopy(reference), store)
    theirs: Any
    ours: zero.Optimizer
    if kind == "Elementwise":
        theirs = torch.optim.Rprop(reference.parameters(), lr=0.1, foreach=False)
        ours = zero.Elementwise(torch.optim.Rprop, model.parameters(), lr=0.1)
    else:
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, foreach=False)
        ours = zero.AdamW([{"params": list(model.parameters()), "rule": zero.SGDRule(lr=0.1, momentum=0.9)}])

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    step(reference, theirs)
    model.load_state_dict(reference.state_dict())
    older = copy.deepcopy(theirs.state_dict())
    for name in LATER:
        older["param_groups"][0].pop(name, None)
    ours.load_state_dict(older)
    for _ in range(2):
        step(reference, theirs)
        step(model, ours)
    assert equal(reference.state_dict(), model.state_dict())


@pytest.mark.skipif(hasattr(torch.optim, "Muon"), reason="this torch has Muon")
@pytest.mark.parametrize("resident", [False, True])
def test_muon_is_refused_where_torch_has_none(store: TieredStore, resident: bool) -> None:
    """When it is made, and not in the middle of its first step."""
    model = nn.Linear(4, 4, bias=False)
    if not resident:
        zero.page(model, store)
    where: dict[str, Any] = {"store": store} if resident else {}
    for made in (
        lambda: zero.Muon(model.parameters(), **where),
        lambda: zero.Optimizer(model.parameters(), zero.MuonRule(), **where),
        lambda: zero.Optimizer([{"params": [model.weight], "rule": zero.MuonRule()}], zero.SGDRule(), **where),
    ):
        with pytest.raises(MisuseError, match=r"has no Muon: it came with 2\.9"):
            made()


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("resident", [False, True])
def test_one_tensor_is_no_list_of_parameters(store: TieredStore, kind: str, resident: bool) -> None:
    model = nn.Linear(4, 4)
    if not resident:
        zero.page(model, store)
    with pytest.raises(MisuseError, match=r"not one tensor: give \[parameter\]"):
        getattr(zero, kind)(model.weight, **({"store": store} if resident else {}))


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "AdamW8bit", "Lion", "NAdam"])
def test_betas_are_numbers_or_tensors(store: TieredStore, kind: str) -> None:
    with pytest.raises(MisuseError, match="a number and a tensor"):
        getattr(zero, kind)(nn.Linear(4, 4).parameters(), betas=(0.9, torch.tensor(0.99)), store=store)
