"""Promise 26: ranks that differ get a RankError that names the difference, on all of them, before any byte of another rank is
used; ranks that are alike are not refused, whatever their seeds, data and budgets are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.stress.tally import Tally
from tests.zero.ranks import PATIENCE, on_ranks
from tiered import RankError, TieredStore, zero

PROMISE = "26 (ranks that differ are told so, and use nothing of each other)"
TOGETHER = 40
"""Pairs that two processes try one after the other. Each model that is paged has process groups of its own until they end."""
TIMEOUT = 2 * PATIENCE
"""Of the process group: what is not noticed at once fails the test."""
STAGES = {"1": zero.Stage1(), "2": zero.Stage2(), "3": zero.Stage3()}
STEPS = 2


class Block(nn.Module):
    def __init__(self, width: int, depth: int, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(width, width, bias=bias, dtype=dtype) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(width, dtype=dtype))
        self.register_buffer("shift", torch.zeros(width, dtype=dtype))
        self.order = list(range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x)) * self.scale
        return x


@dataclass(frozen=True)
class Rank:
    """What one rank does. ``change``: to the model before it is paged; ``later``: otherwise in the step numbered ``at``."""

    stage: str = "3"
    width: int = 24
    depth: int = 3
    dtype: torch.dtype = torch.float32
    bias: bool = True
    change: str = ""
    page: tuple[tuple[str, Any], ...] = ()
    optimizer: str = "AdamW"
    settings: tuple[tuple[str, Any], ...] = (("lr", 1e-2),)
    groups: str = "one"
    later: str = ""
    at: int = 1
    resident: bool = False


@dataclass(frozen=True)
class Pair:
    """Two ranks, of which one is otherwise; all of ``named`` is in the errors of both. Nothing named: they are alike."""

    what: str
    ranks: tuple[Rank, Rank]
    named: tuple[str, ...]


CHANGES: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "a name": (lambda m: (setattr(m, "gain", m.scale), delattr(m, "scale")), ("'scale'", "'gain'")),
    "a parameter more": (lambda m: setattr(m, "more", nn.Parameter(torch.ones(3))), ("'more'", "(3,)")),
    "a shape": (lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1, 24))), ("(24,)", "(1, 24)")),
    "strides": (
        lambda m: setattr(m.layers[0], "weight", nn.Parameter(m.layers[0].weight.detach().t())),
        ("strides (24, 1)", "strides (1, 24)"),
    ),
    "tied": (lambda m: setattr(m.layers[1], "weight", m.layers[0].weight), ("'layers.1.weight'", "tied to 'layers.0.weight'")),
    "frozen": (lambda m: m.layers[1].requires_grad_(False), ("'layers.1.weight'", "frozen")),
    "a buffer's type": (lambda m: setattr(m, "shift", m.shift.double()), ("'shift'", "float64")),
    "a buffer's shape": (lambda m: setattr(m, "shift", m.shift[:1]), ("'shift'", "(24,)", "(1,)")),
    "a buffer less": (lambda m: setattr(m, "shift", None), ("'shift'", "nothing more")),
    "a buffer more": (lambda m: m.register_buffer("more", torch.ones(2)), ("'more'", "nothing more")),
    "types of some": (lambda m: m.layers[2].double(), ("'layers.2.weight'", "float64")),
    "order": (
        lambda m: setattr(m, "layers", nn.ModuleDict({str(n): m.layers[n] for n in (1, 0, 2)})),
        ("'layers.0.weight'", "'layers.1.weight'"),
    ),
    "modules": (lambda m: setattr(m, "layers", nn.Sequential(*m.layers)), ("'layers",)),
}
GROUPS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "one": lambda all_: [{"params": all_}],
    "two": lambda all_: [{"params": all_[:2]}, {"params": all_[2:]}],
    "swapped": lambda all_: [{"params": [all_[1], all_[0], *all_[2:]]}],
    "less": lambda all_: [{"params": all_[1:]}],
    "other lr": lambda all_: [{"params": all_[:2]}, {"params": all_[2:], "lr": 0.25}],
}


class Trial:
    """One rank's part of a pair. ``kept``: the bytes of the model before what comes next."""

    def __init__(self, rank: int, mine: Rank, store: TieredStore) -> None:
        torch.manual_seed(rank)
        self.rank, self.mine, self.store = rank, mine, store
        self.model: Any = Block(mine.width, mine.depth, mine.dtype, mine.bias)
        if mine.change:
            CHANGES[mine.change][0](self.model)
        self.paged = False
        self.kept = self.bytes()

    def bytes(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters that this rank has: of its shares in the store, or of the model in memory."""
        if self.paged:
            return {key: self.store.get(key) for key in self.store if "/param/" in key and key.count("/") == 2}
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def run(self) -> None:
        mine = self.mine
        if not mine.resident:
            zero.page(self.model, self.store, stage=STAGES[mine.stage], **dict(mine.page))
            self.paged = True
        else:
            with torch.no_grad():  # replicas, as DistributedDataParallel makes them
                for parameter in self.model.parameters():
                    parameter.fill_(0.5)
        self.kept = self.bytes()
        where: Any = {"store": self.store, "stage": STAGES["1"]} if mine.resident else {}
        kind: Any = getattr(zero, mine.optimizer)
        optimizer = kind(GROUPS[mine.groups](list(self.model.parameters())), **dict(mine.settings), **where)
        for step in range(STEPS):
            self._step(optimizer, mine.later if step == mine.at else "")
            if self.paged:
                optimizer.flush()
                self.model.state_dict()  # what other ranks updated is here now
            self.kept = self.bytes()

    def _step(self, optimizer: Any, later: str) -> None:
        model, mine = self.model, self.mine
        optimizer.zero_grad()
        if later == "other order":
            model.order.reverse()
        elif later == "one layer less":
            model.order.pop()
        elif later in ("frozen since", "another frozen since"):
            model.scale.requires_grad_(False)
        elif later == "a layer frozen since":  # the next reduction is of another size
            model.layers[0].requires_grad_(False)
        elif later == "an evaluation more":
            with torch.no_grad():
                model(torch.ones(2, mine.width, dtype=mine.dtype))
        elif later == "another lr":
            optimizer.param_groups[0]["lr"] = 0.125
        for _ in range(2 if later == "two passes" else 1):
            with zero.no_sync(model) if later == "no_sync" else nullcontext():
                x = torch.randn(2, mine.width, dtype=mine.dtype)
                if mine.resident:
                    x = torch.ones_like(x)
                model(x).square().mean().backward()
        if later.startswith("clipped to"):
            optimizer.clip_grad_norm_(float(later.rpartition(" ")[2]))
        elif later == "clipped by torch":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if later != "no step":
            optimizer.step()


def tried(rank: int, mine: Rank, folder: Path) -> tuple[str, bool]:
    """Return the error, or nothing; and whether the model's bytes are those from before."""
    said = ""
    with TieredStore.open(folder, dram=f"{1 + rank}MiB", durability="none") as store:  # other budgets are no difference
        trial = Trial(rank, mine, store)
        try:
            trial.run()
        except RankError as error:
            said = str(error)
        now = trial.bytes()
        same = now.keys() == trial.kept.keys() and all(torch.equal(value, trial.kept[name]) for name, value in now.items())
        store.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the process group is as it was
    return said, same and total.item() == 2


def try_all(rank: int, folder: Path, pairs: list[Pair]) -> list[tuple[str, bool]]:
    return [tried(rank, pair.ranks[rank], folder / f"{number}-{rank}") for number, pair in enumerate(pairs)]


def pairs() -> Iterator[Pair]:
    for usual in (Rank(stage=stage) for stage in STAGES):
        for values, named in (
            ({"width": 25}, ("'scale'", "(24,)", "(25,)")),
            ({"width": 12}, ("'scale'", "(24,)", "(12,)")),
            ({"depth": 2}, ("'layers.2.weight'", "'shift'")),
            ({"depth": 4}, ("'layers.3.weight'", "'shift'")),
            ({"bias": False}, ("'layers.0.bias'", "'layers.1.weight'")),
            ({"dtype": torch.bfloat16}, ("float32", "bfloat16")),
            ({"dtype": torch.float64}, ("float32", "float64")),
            ({"dtype": torch.float16}, ("float32", "float16")),
        ):
            yield from both(f"{values}", usual, replace(usual, **values), named)
        for change, (_, named) in CHANGES.items():
            yield from both(f"{change}", usual, replace(usual, change=change), named)
        for name, value, named in (
            ("micro_batch", 2, ("micro_batch=", "1 on rank", "2 on rank")),
            ("activations", "recompute", ("'memory'", "'recompute'")),
            ("activations", "store", ("'memory'", "'store'")),
            ("name", "other", ("'model'", "'other'")),
            ("paging", zero.Paging(largest_unit=4096), ("largest_unit=", "None", "4096")),
            ("policy", zero.Policy(torch.bfloat16), ("policy=", "bfloat16")),
        ):
            yield from both(f"{name}={value}", usual, replace(usual, page=((name, value),)), named)
        yield from optimizers(usual)
        for later, stages, named in LATER:
            if usual.stage in stages:
                wide = replace(usual, width=WIDE)
                yield from both(later, replace(wide, later=OTHERWISE.get(later, "")), replace(wide, later=later), named)
        early = replace(usual, settings=(*usual.settings, ("update", "in_backward")))
        yield from both("in backward: lr", early, replace(early, later="another lr"), ("lr of ", "0.01", "0.125"))
    for one, two in (("1", "2"), ("2", "3"), ("1", "3")):
        yield from both("stages", Rank(stage=one), Rank(stage=two), (f"Stage{one}", f"Stage{two}"))
    resident = Rank(resident=True)
    yield from optimizers(resident)
    yield from both("resident: lr", resident, replace(resident, later="another lr"), ("0.01", "0.125"))
    for values, named in (({"width": 25}, ("(24,)", "(25,)")), ({"dtype": torch.float64}, ("float32", "float64"))):
        yield from both(f"resident: {values}", resident, replace(resident, **values), named)


WIDE = 96
"""Of a model whose layers are units by themselves, in the budgets of these ranks."""
LATER: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("other order", "3", ("layers.0", "layers.2")),
    ("one layer less", "3", ("layers.2'", "layers.1', in backward")),
    ("an evaluation more", "3", ("in backward",)),
    ("two passes", "23", ("which gradients there are",)),
    ("no step", "3", ("which gradients there are", "parameters of")),
    ("no_sync", "23", ("the ranks do different things",)),
    ("frozen since", "23", ("which parameters are trained now",)),
    ("a layer frozen since", "23", ("which parameters are trained now",)),
    ("another frozen since", "23", ("'scale' is trained on rank",)),
    ("another lr", "123", ("0.01", "0.125")),
    ("clipped to 0.001", "123", ("norms of gradients",)),
    ("clipped to 0.002", "123", ("factor 0 of the gradient",)),
    ("clipped by torch", "123", ("norms of gradients",)),
)
"""What one rank does otherwise in a step, the stages that can notice it, and what both errors name."""
OTHERWISE = {"clipped to 0.002": "clipped to 0.001", "another frozen since": "a layer frozen since"}
"""What the other rank does meanwhile, where it does something, too."""


def optimizers(usual: Rank) -> Iterator[Pair]:
    """Other rules, settings and groups. Those of torch's names, and those that keep other states."""
    for other, named in (
        ("SGD", ("AdamWRule", "SGD")),
        ("Lion", ("AdamWRule", "Lion")),
        ("Adagrad", ("AdamWRule", "Adagrad")),
        ("AdamW8bit", ("AdamWRule", "AdamW8bit")),
    ):
        yield from both(f"rule {other}", usual, replace(usual, optimizer=other), named)
    for name, value, named in (
        ("lr", 0.25, ("lr of param group 0", "0.01", "0.25")),
        ("betas", (0.9, 0.99), ("betas[1]", "0.999", "0.99")),
        ("eps", 1e-6, ("eps of", "1e-08", "1e-06")),
        ("weight_decay", 0.5, ("weight_decay of", "0.01", "0.5")),
        ("maximize", True, ("maximize of", "False", "True")),
        ("moments", torch.bfloat16, ("AdamWRule", "AdamWBFloat16Rule")),
    ):
        settings = {**dict(usual.settings), name: value}
        yield from both(f"{name}={value}", usual, replace(usual, settings=tuple(settings.items())), named)
    if not usual.resident:
        in_backward = (*usual.settings, ("update", "in_backward"))
        yield from both("update", usual, replace(usual, settings=in_backward), ("'on_fetch'", "'in_backward'"))
        yield from both("swapped", usual, replace(usual, groups="swapped"), ("parameter 0 of param group 0",))
    yield from both("groups", usual, replace(usual, groups="two"), ("param group",))
    yield from both("less", usual, replace(usual, groups="less"), ("param group 0",))
    yield from both("group's lr", replace(usual, groups="two"), replace(usual, groups="other lr"), ("0.01", "0.25"))


def both(what: str, usual: Rank, other: Rank, named: tuple[str, ...]) -> Iterator[Pair]:
    yield Pair(what, (usual, other), named)
    yield Pair(what, (other, usual), named)


def alike() -> list[Pair]:
    """Ranks that have other seeds, data and budgets only; the last: a rate that has other last bits."""
    frozen = Rank(stage="2", width=WIDE, later="frozen since")
    ranks = [Rank(stage="1", later="clipped to 0.001"), frozen, Rank(groups="two"), Rank(resident=True)]
    found = [Pair("alike", (rank, rank), ()) for rank in ranks]
    near = replace(ranks[2], settings=(("lr", 0.01 * (1 + 1e-15)), ("weight_decay", 0)))
    return [*found, Pair("nearly", (replace(near, settings=(("lr", 0.01), ("weight_decay", 0.0))), near), ())]


def some() -> list[Pair]:
    """Pairs of every fourth kind, with a stage and the rank that is otherwise as they come."""
    kinds: dict[str, list[Pair]] = {}
    for pair in pairs():
        kinds.setdefault(pair.what, []).append(pair)
    return [found[number % len(found)] for number, found in enumerate(kinds.values())][::4]


@pytest.mark.parametrize("choose", [some, pytest.param(lambda: list(pairs()), marks=pytest.mark.soak)])
def test_ranks_that_differ_are_refused_on_all(tmp_path: Path, tally: Tally, choose: Callable[[], list[Pair]]) -> None:
    differing, raised = choose(), 0
    for start in range(0, len(differing), TOGETHER):
        chunk = [*alike(), *differing[start : start + TOGETHER]]
        results = on_ranks(2, try_all, tmp_path / str(start), chunk, timeout=TIMEOUT)
        for pair, *found in zip(chunk, *results, strict=True):
            for said, same in found:
                assert same, f"{pair}: bytes of the model were changed, {said}"
                assert all(name in said for name in pair.named), f"{pair}: {said}"
                assert said.isprintable()
            if not pair.named:
                assert not any(said for said, _ in found), f"{pair}: {found}"
                tally.ran()
                continue
            everywhere = all(said for said, _ in found)
            tally.count(pair.what, everywhere)
            raised += everywhere
    print(f"{len(differing)} pairs of ranks that differ, {raised} raised on both")
    assert raised == len(differing)
