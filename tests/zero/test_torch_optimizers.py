"""torch's own database of optimizers: each that we have has, with each of its inputs, the bits of torch's class in memory.

Parameters are paged, updated on fetch or in backward, or stay in memory with states in a store. Compared are parameters after
each step, states, param groups, and what goes to torch's class and back; with the schedulers of the database, too. What torch
refuses is refused.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.quick import quick
from tests.versions import ADAM_DECOUPLES
from tests.zero.databases import SHARE, InStore, outcome, seeded, seen, tensors
from tiered import TieredError, TieredStore, zero

pytest.importorskip("expecttest", reason="torch's databases of tests need expecttest")
common = pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="this version of torch has its optimizers elsewhere"
)

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6
LATER = 2
"""Steps that both make with the states of the other."""


class Few(nn.Module):
    """Matrices, of which the first has states in several chunks; vectors, of which one has no gradient in some steps; one that
    is frozen."""

    def __init__(self, dtype: torch.dtype, vectors: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(61, 83, dtype=dtype))
        self.second = nn.Parameter(torch.randn(83, 5, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(61, dtype=dtype), requires_grad=False)
        self.scale, self.now_and_then = (
            (nn.Parameter(torch.randn(5, dtype=dtype)) if vectors else None) for _ in range(2)
        )

    def loss(self, number: int) -> torch.Tensor:
        x = torch.randn(4, 61, generator=torch.Generator().manual_seed(number), dtype=self.first.dtype)
        found = torch.tanh((x * self.frozen) @ self.first) @ self.second
        if self.scale is not None:
            found = found * self.scale
            if number % 3:
                found = found + self.now_and_then
        return torch.tanh(found).square().mean()  # bounded: some go up it

    def groups(self) -> list[dict[str, Any]]:
        """Those without a gradient in the first step are alone: torch's fused SGD raises for them beside others."""
        rest = [[one] for one in (self.scale, self.now_and_then) if one is not None]
        return [{"params": one} for one in ([self.first], *rest)] + [{"params": [self.second], "lr": 0.02}]


@dataclass(frozen=True)
class Way:
    where: str
    """"paged", "in backward", or "resident": in memory, with states in a store."""
    ours: str
    """"named": our class of the same name, or "elementwise"."""
    kernel: str
    """"default", "fused", "loop", or what is refused."""
    dtype: torch.dtype = torch.float32


WAYS = [
    *(Way(where, ours, "default", dtype) for where in ("paged", "in backward", "resident") for ours in (
        "named", "elementwise") for dtype in (torch.float32, torch.float64)),
    *(Way(where, "named", kernel) for where in ("paged", "resident") for kernel in (
        "loop", "fused", "foreach", "differentiable", "capturable")),
]  # fmt: skip
KERNELS: dict[str, dict[str, Any]] = {
    "default": {},
    "loop": {"fused": False},
    **{name: {name: True} for name in ("fused", "foreach", "differentiable", "capturable")},
}


def takes(info: Any, way: Way) -> bool:
    named = hasattr(zero, info.optim_cls.__name__)
    if way.kernel in ("loop", "fused"):
        return named and "fused" in info.supported_impls
    if way.kernel == "capturable":
        return named and info.has_capturable_arg
    if way.kernel in ("foreach", "differentiable"):
        return named and way.kernel in info.supported_impls
    return named or way.ours == "elementwise"


def made(info: Any, way: Way, model: Few, arguments: Mapping[str, Any], store: TieredStore) -> zero.Optimizer:
    given: dict[str, Any] = {**arguments, **KERNELS[way.kernel]}
    where: dict[str, Any] = {}
    if way.where == "resident":
        where = {"store": store, "existing": "overwrite"}
    else:
        zero.page(model, store, existing="overwrite")
        where = {"update": "in_backward"} if way.where == "in backward" else {}
    if way.ours == "elementwise":
        return zero.Elementwise(info.optim_cls, model.groups(), where=where, **given)  # type: ignore[arg-type]
    found: zero.Optimizer = getattr(zero, info.optim_cls.__name__)(model.groups(), **given, **where)
    return found


def theirs(info: Any, way: Way, model: Few, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Torch's class, with the kernel that ours has; with the number of a tensor for ``lr`` where the kernel is not fused, which
    then computes in fp32."""
    extra: dict[str, Any] = {}
    fused = "cpu" in info.supports_fused_on and way.ours == "named" and way.kernel != "loop"
    if fused:
        extra = {"fused": True}
    elif "foreach" in info.supported_impls:
        extra = {"foreach": False}
    given = {**arguments, **extra}
    if not fused and isinstance(given.get("lr"), torch.Tensor):
        given["lr"] = float(given["lr"])
    found: torch.optim.Optimizer = info.optim_cls(model.groups(), **given)
    return found


def stepped(model: Few, optimizer: torch.optim.Optimizer, numbers: range, schedulers: Any = ()) -> list[Any]:
    """The loss and the parameters of each step, by their bytes."""
    found = []
    scheduled = [one(optimizer) for one in schedulers]
    for number in numbers:
        optimizer.zero_grad()
        loss = model.loss(number)
        loss.backward()
        optimizer.step()
        for one in scheduled:
            one.step(loss.detach()) if isinstance(one, ReduceLROnPlateau) else one.step()
        found.append((seen(loss), seen([value.clone() for value in model.state_dict().values()])))
    return found


OURS = ("params", "foreach", "fused", *(() if ADAM_DECOUPLES else ("decoupled_weight_decay",)))
"""In param groups: what says which parameters, and which kernel; and what ours have whatever the version of torch."""


def states_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """States, and param groups without what says which kernel."""
    packed = optimizer.state_dict()
    states = {
        index: {name: seen(value) for name, value in sorted(state.items()) if value is not None}
        for index, state in packed["state"].items()
        if any(value is not None for value in state.values())
    }
    groups = [
        {name: float(value) if isinstance(value, torch.Tensor) else value for name, value in group.items() if name not in OURS}
        for group in packed["param_groups"]
    ]
    return states, groups


def as_numbers(packed: dict[str, Any]) -> dict[str, Any]:
    """A state of ours with a number in place of a tensor for ``lr``, as ``theirs``."""
    for group in packed["param_groups"]:
        group["lr"] = float(group["lr"])
    return packed


def differing(info: Any, way: Way, arguments: Mapping[str, Any], schedulers: Any, store: TieredStore) -> list[str]:
    """Return what is not as in memory."""
    seeded(0)
    reference = Few(way.dtype, info.optim_cls.__name__ != "Muon")
    model = copy.deepcopy(reference)
    optimizer = made(info, way, model, copy.deepcopy(dict(arguments)), store)
    other = theirs(info, way, reference, copy.deepcopy(dict(arguments)))
    found = []
    if stepped(model, optimizer, range(STEPS), schedulers) != stepped(reference, other, range(STEPS), schedulers):
        found.append("steps")
    found += [name for name, mine, right in zip(("states", "groups"), states_of(optimizer), states_of(other), strict=True) if
              mine != right]  # fmt: skip
    if way.where == "in backward":
        return found
    again = theirs(info, way, reference, copy.deepcopy(dict(arguments)))
    again.load_state_dict(as_numbers(optimizer.state_dict()))
    for parameter, state in again.state.items():
        if "mu_product" in state:  # which torch rounds to the type of the parameter
            state["mu_product"] = other.state[parameter]["mu_product"].clone()
    optimizer.load_state_dict(other.state_dict())
    later = range(STEPS, STEPS + LATER)
    if stepped(model, optimizer, later) != stepped(reference, again, later):
        found.append("steps with loaded states")
    return found


Run = tuple[Any, str, Mapping[str, Any], Sequence[Any], Way]
"""An optimizer, what is special, its arguments, its schedulers, and the way."""


def runs_of(info: Any) -> list[Run]:
    ways = [way for way in WAYS if takes(info, way)]
    inputs = info.optim_inputs_func(device="cpu")
    found: list[Run] = [(info, given.desc, given.kwargs, (), way) for given in inputs for way in ways]
    for number, schedulers in enumerate(info.scheduler_inputs):
        found += [(info, f"schedulers {number}", {}, schedulers, way) for way in ways if way.kernel == "default"]
    return found


REFUSED = (
    *("outside of graphs: leave", "by torch's fused kernel, whose bits", "take zero.Adam with amsgrad=True"),
    *("a CUDA graph cannot fetch", "a graph of the update would keep", "cannot update parameters in pieces"),
    "has not one value for each element",
)
"""What the errors of ``tiered`` say: docs/limits.md has them."""
EVERY = [run for info in common.optim_db for run in runs_of(info)]


@pytest.mark.parametrize("part", quick(range(SHARE + 1), [0]))
def test_optimizers_of_torch(store: TieredStore, part: int) -> None:
    """``part`` 0 is a share of them; the others have all."""
    wrong, found = [], Counter[str]()
    for info, what, arguments, schedulers, way in (
        random.Random(46).sample(EVERY, len(EVERY) // SHARE) if part == 0 else EVERY[part - 1 :: SHARE]
    ):
        ended, value = outcome(lambda: differing(info, way, arguments, schedulers, store))  # noqa: B023 - called at once
        refused = ended == "refused" and any(text in value for text in REFUSED)
        found["the same" if (ended, value) == ("value", []) else ended] += 1
        if not refused and (ended, value) != ("value", []):
            wrong.append((info.name, what, way, ended, f"{value!s:.200}"))
    print(dict(found))
    assert not wrong, "\n".join(map(str, wrong))
    assert found["the same"] > found["refused"]


@pytest.mark.parametrize("resident", [False, True])
def test_what_optimizers_of_torch_refuse(store: TieredStore, resident: bool) -> None:
    """An error where torch has one: its own, or one of ``tiered``; a warning where torch warns."""
    wrong, found = [], Counter[str]()
    for info in common.optim_db:
        for given in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            refused = given.optimizer_error_input
            params = refused.params
            if params is None:
                params = [nn.Parameter(torch.ones(1, 1)) for _ in range(2)]
            own = {id(one): nn.Parameter(one.detach().clone()) for one in tensors(params)}
            later = given.error_on is common.OptimizerErrorEnum.STEP_ERROR
            error = asked(info, resident, own, params, refused.kwargs, later, store)
            ended = "nothing" if error is None else "refused" if isinstance(error, TieredError) else type(error).__name__
            found["as torch raises" if ended == given.error_type.__name__ else ended] += 1
            if ended not in ("refused", given.error_type.__name__):
                wrong.append((info.name, refused.desc, given.error_type.__name__, repr(error)))
    print(dict(found))
    assert not wrong, "\n".join(map(str, wrong))


def asked(
    info: Any,
    resident: bool,
    own: Mapping[int, nn.Parameter],
    params: Any,
    arguments: Mapping[str, Any],
    step: bool,
    store: TieredStore,
) -> Exception | None:
    """Return what making our optimizer, and its first ``step``, raises, with its ``own`` parameters in place of those given."""

    def mine(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return own[id(tree)]
        if isinstance(tree, dict):
            return {name: mine(value) for name, value in tree.items()}
        return type(tree)(map(mine, tree)) if isinstance(tree, list | tuple) else tree

    where: dict[str, Any] = {"store": store, "existing": "overwrite"} if resident else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            if not resident:
                InStore(store).page(nn.ParameterList(own.values()))
            if hasattr(zero, info.name):
                optimizer = getattr(zero, info.name)(mine(params), **arguments, **where)
            else:
                optimizer = zero.Elementwise(info.optim_cls, mine(params), where=where, **arguments)  # type: ignore[arg-type]
            if step:
                sum((one.abs().sum() for one in own.values()), torch.zeros(())).backward()
                optimizer.step()
    except Exception as error:
        return error
    return None
