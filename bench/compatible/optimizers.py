"""Rows about the optimizer's arguments, its state, and schedulers."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

from bench.compatible.side import Side, Toy, row
from tiered import zero

GROUP = "optimizers"


def arguments(name: str, **options: Any) -> None:
    """Register arguments of AdamW."""

    @row(GROUP, name)
    def _(side: Side) -> None:
        given = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        model, optimizer = side.toy(**given)
        side.train(model, optimizer, 3)
        side.show("state", optimizer.state_dict()["state"])


arguments("lr=1e-2, betas, eps, weight_decay", lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
arguments("weight_decay=0", weight_decay=0.0)
arguments("lr=torch.tensor(1e-3)", lr=torch.tensor(1e-3))
arguments("maximize=True", maximize=True)
arguments("fused=True", fused=True)
arguments("foreach=None, fused=True", foreach=None, fused=True)
arguments("amsgrad=False", amsgrad=False)
arguments("amsgrad=True", amsgrad=True)
arguments("capturable=False, differentiable=False", capturable=False, differentiable=False)
arguments("betas as tensors", betas=(torch.tensor(0.9), torch.tensor(0.99)))


@row(GROUP, "positional arguments: AdamW(params, lr, betas, eps, decay)")
def _(side: Side) -> None:
    model = side.page(Toy())
    given = (1e-3, (0.9, 0.95), 1e-7, 0.05)
    kind = zero.AdamW if side.paged else partial(torch.optim.AdamW, fused=True)
    side.train(model, kind(model.parameters(), *given), 3)


@row(GROUP, "AdamW(model.named_parameters())")
def _(side: Side) -> None:
    model = side.page(Toy())
    optimizer = side.adamw(model.named_parameters())
    side.train(model, optimizer, 3)
    side.show("names", optimizer.param_groups[0].get("param_names"))


@row(GROUP, "two param groups with their own decay")
def _(side: Side) -> None:
    model = side.page(Toy())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]
    side.train(model, side.adamw(groups, lr=1e-3), 3)


@row(GROUP, "layer-wise learning rates, a group for each layer")
def _(side: Side) -> None:
    model = side.page(Toy())
    groups = [{"params": list(block.parameters()), "lr": 1e-3 * 0.8**index} for index, block in enumerate(model.body)]
    side.train(model, side.adamw(groups), 3)


@row(GROUP, "add_param_group later")
def _(side: Side) -> None:
    model = side.page(Toy())
    optimizer = side.adamw(model.body.parameters())
    side.train(model, optimizer)
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 1e-2})
    side.train(model, optimizer, first=2)


@row(GROUP, "two optimizers over different parameters")
def _(side: Side) -> None:
    model = side.page(Toy())
    first, second = side.adamw(model.body.parameters()), side.adamw(model.head.parameters(), lr=1e-2)
    for number in range(3):
        model.loss(number).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    side.show_model(model)


@row(GROUP, "lr set by hand in param_groups")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):
        optimizer.param_groups[0]["lr"] = 1e-3 / (number + 1)
        side.train(model, optimizer, 1, first=number)


@row(GROUP, "lr tensor changed in place, fill_")
def _(side: Side) -> None:
    model, optimizer = side.toy(lr=torch.tensor(1e-3))
    for number in range(3):
        side.train(model, optimizer, 1, first=number)
        optimizer.param_groups[0]["lr"].mul_(0.5)


@row(GROUP, "betas and weight_decay changed between steps")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):
        optimizer.param_groups[0].update(betas=(0.9 - 0.1 * number, 0.99), weight_decay=0.1 * number)
        side.train(model, optimizer, 1, first=number)


@row(GROUP, "step(closure)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model.loss(number)
            loss.backward()
            return loss

        side.show("loss", optimizer.step(closure))
    side.show_model(model)


@row(GROUP, "register_step_pre_hook and register_step_post_hook")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    optimizer.register_step_pre_hook(lambda *_: side.show("pre", float(model.head.weight.detach().sum())))
    optimizer.register_step_post_hook(lambda *_: side.show("post", float(model.head.weight.detach().sum())))
    side.train(model, optimizer, 2)


@row(GROUP, "optimizer.state_dict() and load_state_dict()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    kept, values = copy.deepcopy(optimizer.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    side.show("state", kept["state"])
    side.train(model, optimizer, first=2)
    optimizer.load_state_dict(kept)
    model.load_state_dict(values)
    side.train(model, optimizer, first=2)


@row(GROUP, "optimizer.state_dict()['param_groups']", depends=False)
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer, 1)
    groups = optimizer.state_dict()["param_groups"]
    side.show("groups", [dict(sorted((key, value) for key, value in group.items())) for group in groups])


@row(GROUP, "optimizer.state[p]['exp_avg'] is read")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    side.show("moment", optimizer.state[model.head.weight]["exp_avg"])
    side.show("step", float(optimizer.state[model.head.weight]["step"]))


@row(GROUP, "optimizer.state: len, in, keys, items")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.show("before", [len(optimizer.state), model.head.weight in optimizer.state])
    side.train(model, optimizer)
    side.show("after", [len(optimizer.state), model.head.weight in optimizer.state, bool(optimizer.state)])
    for p, states in optimizer.state.items():
        side.show("keys", [list(states.keys()), p.shape, "exp_avg" in states])
        side.show("states", dict(states.items()))
    side.train(model, optimizer, first=2)


@row(GROUP, "updates in units of parameters, read from optimizer.state")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def ratio() -> None:
        if len(optimizer.state):
            for p in model.parameters():
                states = optimizer.state[p]
                update = states["exp_avg"] / (states["exp_avg_sq"].sqrt() + 1e-8)
                side.show("ratio", (update.norm() / p.detach().norm()).item())

    side.train(model, optimizer, 3, between=ratio)


@row(GROUP, "optimizer.state.clear()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    optimizer.state.clear()
    side.train(model, optimizer, first=2)


@row(GROUP, "optimizer.state = defaultdict(dict)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    optimizer.state = collections.defaultdict(dict)
    side.train(model, optimizer, first=2)


@row(GROUP, "optimizer.state[p]['exp_avg'].zero_()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    optimizer.state[model.head.weight]["exp_avg"].zero_()
    side.train(model, optimizer, first=2)


@row(GROUP, "a new optimizer for the same parameters")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    side.train(model, side.adamw(model.parameters(), lr=1e-4), first=2)


@row(GROUP, "optimizer made before the model is paged")
def _(side: Side) -> None:
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    side.page(model)
    side.train(model, optimizer)


@row(GROUP, "repr(optimizer)", depends=False)
def _(side: Side) -> None:
    _, optimizer = side.toy()
    side.show("lr", "lr: 0.001" in repr(optimizer))
    side.show("base", isinstance(optimizer, torch.optim.Optimizer))


# -- schedulers ------------------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 3)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "swa_utils.SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-2, anneal_epochs=3),
}
for _name, _make in SCHEDULERS.items():

    @row(GROUP, f"scheduler {_name}")
    def _(side: Side, make: Callable[[Any], Any] = _make) -> None:
        model, optimizer = side.toy()
        side.train(model, optimizer, 4, scheduler=make(optimizer))


@row(GROUP, "scheduler ReduceLROnPlateau")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for number in range(4):
        side.train(model, optimizer, 1, first=number)
        scheduler.step(model.loss(number).detach())
        side.show("lr", float(optimizer.param_groups[0]["lr"]))


@row(GROUP, "scheduler with a tensor lr")
def _(side: Side) -> None:
    model, optimizer = side.toy(lr=torch.tensor(1e-3))
    side.train(model, optimizer, 4, scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 4))


@row(GROUP, "scheduler.state_dict() and load_state_dict()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 8)
    side.train(model, optimizer, 2, scheduler=scheduler)
    kept = scheduler.state_dict()
    again = lr_scheduler.CosineAnnealingLR(optimizer, 8)
    again.load_state_dict(kept)
    side.train(model, optimizer, 2, scheduler=again, first=2)


# -- other optimizers on a paged model -------------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW(fused=True)": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW(foreach=True)": lambda params: torch.optim.AdamW(params, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=2),
}
for _name, _make in OTHERS.items():

    @row(GROUP, f"torch.optim.{_name} on a paged model")
    def _(side: Side, name: str = _name, make: Callable[[Any], Any] = _make) -> None:
        model = side.page(Toy())
        optimizer = make(model.parameters())
        if name != "LBFGS":
            side.train(model, optimizer, 2)
            return

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model.eval().loss(0)
            loss.backward()
            return loss

        side.show("loss", optimizer.step(closure))
        side.show_model(model)
