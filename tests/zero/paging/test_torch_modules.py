"""torch's own database of modules, in a store: each module with each of its inputs gives what it gives in memory, bit for bit.

A module is paged as it is, and within a model. What is compared is its output, the gradients of its parameters and inputs, what
its hooks see, its parameters and buffers afterwards, and its ``state_dict``, to another module and back; with each place for
activations, with gradients and without, in training and not. Between the parts its units are pushed out, and their memory is
overwritten. The result is the same, or the same error, or an error of ``tiered``.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.quick import quick
from tests.zero.databases import SHARE, InMemory, InStore, Outcome, copied, outcome, seeded, seen, tensors, total
from tiered import TieredStore, zero
from tiered.zero.paging import pager

pytest.importorskip("expecttest", reason="torch's databases of tests need expecttest")
module_db = pytest.importorskip(
    "torch.testing._internal.common_modules", reason="this version of torch has its modules elsewhere"
).module_db

DRAM = "4MiB"
pytestmark = pytest.mark.filterwarnings("ignore")


class Around(nn.Module):
    """A module within a model that has parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(3, 1)
        self.inner = inner
        self.after = nn.Linear(3, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ones = torch.ones(3, dtype=self.before.weight.dtype)
        factor = self.before(ones)[0]
        found = self.inner(*args, **kwargs)
        factor = factor + self.after(ones)[0]

        def scaled(one: Any) -> Any:
            return one * factor if isinstance(one, torch.Tensor) and one.is_floating_point() else one

        return pytree.tree_map(scaled, found)


@dataclass(frozen=True)
class Way:
    within: bool
    """Whether it is part of a model."""
    activations: str
    hooks: str
    """When hooks are registered: "none", "before" it is paged, or "after"."""
    mode: str
    """With "gradients", with "none", in "inference" mode."""


WAYS = [
    *(Way(within, activations, "none", "gradients") for within in (True, False) for activations in (
        "memory", "recompute", "store", "auto")),
    *(Way(within, activations, hooks, "gradients") for within in (True, False) for activations, hooks in (
        ("memory", "before"), ("memory", "after"), ("store", "after"))),
    *(Way(within, "memory", "none", mode) for within in (True, False) for mode in ("none", "inference")),
]  # fmt: skip
TOGETHER = 300
"""Runs of the inputs of a module, for one type and in training or not: of many inputs each has some of the ways, in turn."""
MOST = 3
"""Inputs of a module that every run has."""
WARM_UP = 4
"""Passes after which ``activations="auto"`` has chosen."""


def hooked(model: nn.Module, log: list[Any]) -> None:
    """Have hooks of all modules write down what they are given."""

    def note(what: str, name: str) -> Any:
        return lambda module, *given: log.append((what, name, seen(copied(given))))

    for name, module in model.named_modules():
        module.register_forward_pre_hook(note("forward pre", name))
        module.register_forward_hook(note("forward", name))
        module.register_full_backward_pre_hook(note("backward pre", name))
        module.register_full_backward_hook(note("backward", name))


def leaves_of(tree: Any) -> Any:
    """A copy that shares nothing, with the same tensors in the same places, each a leaf of autograd."""
    memo = {id(one): one.detach().clone().requires_grad_(one.requires_grad) for one in tensors(tree)}
    return copy.deepcopy(tree, memo)


def result(way: Way, info: Any, given: Any, dtype: torch.dtype, training: bool, place: InMemory | InStore) -> list[Any]:
    made, forward = given.constructor_input, given.forward_input
    args, kwargs = leaves_of((forward.args, forward.kwargs)) if forward is not None else ((), {})
    seeded(0)
    model = info.module_cls(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs))
    if info.is_lazy:
        model.to(dtype)(*args, **kwargs)
    log: list[Any] = []
    if way.within:
        model = Around(model)
    model.to(dtype).train(training)
    if way.hooks == "before":
        hooked(model, log)
    place.page(model, activations=way.activations)
    if way.hooks == "after":
        hooked(model, log)
    kept: list[Any] = []
    for _ in range(WARM_UP if way.activations == "auto" else 1):
        seeded(1)
        with torch.inference_mode(way.mode == "inference"), torch.set_grad_enabled(way.mode == "gradients"):
            found = model(*args, **kwargs)
        place.push_out(model)
        kept.append(seen(found))
        loss = total(found)
        if isinstance(loss, torch.Tensor):
            loss.backward()
            place.push_out(model)
    kept += [seen([parameter.grad for parameter in model.parameters()]), seen([one.grad for one in tensors((args, kwargs))])]
    states = model.state_dict()
    kept += [list(states), seen(states), seen(copied([*model.parameters(), *model.buffers()])), log]
    other = {name: value.detach() / 2 if value.is_floating_point() else value + 1 for name, value in states.items()}
    model.load_state_dict(other)
    place.push_out(model)
    seeded(2)
    with torch.no_grad():
        kept.append(seen(model.eval()(*args, **kwargs)))
    return [*kept, seen(model.state_dict())]


def inputs(info: Any, dtype: torch.dtype, training: bool) -> list[Any]:
    """What a module is made and called with; what it refuses, too."""
    given: dict[str, Any] = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": training}
    seeded(0)
    found = list(info.module_inputs_func(info, **given))
    if info.module_error_inputs_func is not None:
        found += [one.module_error_input for one in info.module_error_inputs_func(info, **given)]
    return found


def has_parameters(info: Any, given: Any) -> bool:
    made = given.constructor_input
    try:
        return any(True for _ in info.module_cls(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs)).parameters())
    except Exception:  # it is refused
        return False


FUSED = (nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Modules for which torch has a fused kernel in evaluation, that it takes where none has hooks: docs/limits.md has it."""


@contextlib.contextmanager
def layer_by_layer(info: Any) -> Iterator[None]:
    """Have torch compute a module of ``FUSED`` as a paged one does."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before and info.module_cls not in FUSED)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


REFUSED = ("no module of this model holds all of its parameters", "is computed again, because no module")
"""What the errors of ``tiered`` say, all of ``activations="recompute"``: docs/limits.md has them."""


def right(memory: Outcome, store: Outcome) -> bool:
    refused = store[0] == "refused" and any(text in store[1] for text in REFUSED)
    return memory == store or refused or memory[0] == store[0] == "error"


Run = tuple[Any, torch.dtype, bool, int, Any, Way]
"""A module, the type of its numbers, whether it trains, the number of its input, the input, and the way."""


def runs_of(info: Any) -> list[Run]:
    """All runs of a module: each input in all ways, or each of many in some."""
    found: list[Run] = []
    for dtype, training in product((torch.float32, torch.float64), (True, False)):
        every = inputs(info, dtype, training) if dtype in info.dtypes else []
        for number, given in enumerate(every):
            alone = has_parameters(info, given)
            ways = [way for way in WAYS if way.within or alone]
            few = min(len(ways), max(1, TOGETHER // len(every)))
            ways = [ways[(few * number + at) % len(ways)] for at in range(few)]
            found += [(info, dtype, training, number, given, way) for way in ways]
    return found


def drawn() -> Iterator[Run]:
    """A share of the inputs of each module, at most ``MOST``, in one way each."""
    draw = random.Random(46)
    for info in module_db:
        every: dict[tuple[Any, ...], list[Run]] = {}
        for run in runs_of(info):
            every.setdefault(run[1:4], []).append(run)
        for key in draw.sample(list(every), min(MOST, -(-len(every) // SHARE))):
            yield draw.choice(every[key])


@pytest.mark.parametrize("part", quick(range(SHARE + 1), [0]))
def test_modules_of_torch(store: TieredStore, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``part`` 0 is a share of them; the others have all."""
    monkeypatch.setattr(pager, "LEAST", 1)  # the smallest activations go to the store
    monkeypatch.setattr(pager, "NEWEST", 0)
    wrong, found = [], Counter[str]()
    runs = drawn() if part == 0 else chain.from_iterable(map(runs_of, module_db[part - 1 :: SHARE]))
    for info, dtype, training, number, given, way in runs:
        place = InStore(store)
        with layer_by_layer(info):
            memory, stored = (
                outcome(lambda: result(way, info, given, dtype, training, where))  # noqa: B023 - called at once
                for where in (InMemory(), place)
            )
        ended = stored[0] if memory == stored else "another error" if stored[0] == "error" else stored[0]
        found["the same" if memory == stored and ended == "value" else "as torch raises" if memory == stored else ended] += 1
        if stored[0] == "value":
            assert place.model is not None
            said = zero.statistics(place.model)
            found["computed again"] += said.computed_again > 0
            found["restored from the store"] += said.activations is not None and said.activations.restored > 0
        if not right(memory, stored):
            different = [at for at, (one, other) in enumerate(zip(memory[1], stored[1], strict=False)) if one != other]
            wrong.append((info.name, dtype, training, number, way, memory[0], different, stored[0], f"{stored[1]!s:.90}"))
    print(dict(found))
    assert not wrong, "\n".join(map(str, wrong))
    assert found["the same"] > 5 * (found["refused"] + found["another error"])
    assert found["computed again"]
    assert found["restored from the store"]
