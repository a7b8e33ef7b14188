"""Several ranks against one process that does the same sums in memory: bit for bit, and the same whatever the stage; and beside
DistributedDataParallel, whose sums have another order."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.quick import quick
from tests.zero.models import Mixed, Tied
from tests.zero.ranks import on_ranks
from tiered import CapacityError, TieredStore, zero

STAGES = [zero.Stage1(), zero.Stage2(), zero.Stage3()]
STEPS = 3
LR = 1e-2


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, one of 1, one that is used by some ranks only where ``by_rank``, and a type that
    is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.gain = nn.Parameter(torch.ones(1))
        self.sometimes = nn.Linear(13, 13)
        self.last = nn.Linear(13, 5)
        self.never = nn.Linear(3, 3)
        self.wide = nn.Parameter(torch.linspace(0, 1, 5, dtype=torch.float64))

    def forward(self, x: torch.Tensor, sometimes: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.gain
        if sometimes:
            x = x + self.sometimes(x)
        return self.last(x) * self.wide

    def loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(seed))
        return self(x, sometimes=seed % 3 == 0).square().mean().float()


@dataclass(frozen=True)
class Case:
    """``batches``: backward passes of a step; ``synced``: each of them is reduced."""

    make: Any
    batches: int = 1
    synced: bool = False
    clip: float | None = None
    update: str = "on_fetch"
    schedule: bool = False
    look: bool = False


CASES = {
    "tied": Case(functools.partial(Tied, layers=2), batches=2, schedule=True),
    "checkpointed": Case(functools.partial(Tied, layers=2, mode="checkpoint")),
    "reentrant": Case(functools.partial(Tied, layers=2, mode="reentrant")),
    "mixed": Case(Mixed, look=True),
    "clipped": Case(functools.partial(Tied, layers=2), clip=0.1),
    "synced": Case(functools.partial(Tied, layers=2), batches=2, synced=True),
    "in_backward": Case(functools.partial(Tied, layers=2), update="in_backward"),
}
BY_RANK = {"uneven": Case(Uneven, batches=2), "uneven, synced": Case(Uneven, batches=2, synced=True)}
"""Ranks use different modules: not with stage 3, whose ranks gather parameters together."""


NOT_DDP = {"reentrant"}
"""DistributedDataParallel refuses parameters that several reentrant checkpoints share."""


Kinds = list[tuple[str, zero.Stage]]
ALL: Kinds = [(name, stage) for name in CASES for stage in STAGES] + [(name, stage) for name in BY_RANK for stage in STAGES[:2]]
TWO = {"tied": "123", "checkpointed": "3", "reentrant": "2", "mixed": "3", "clipped": "1", "synced": "23", "in_backward": "3"}
TWO |= {"uneven": "2", "uneven, synced": "1"}
FEWER = dict.fromkeys([*CASES, *BY_RANK], "") | {"tied": "1", "checkpointed": "2", "clipped": "23", "uneven": "1"}
"""What two and three ranks train in every run: two each case, with one of the stages or with all; three each stage once, and
clipping, whose bits nothing in memory has, with two. All with all is the long run's."""
RUNS: dict[str, tuple[int, Kinds]] = {
    "2": (2, [(name, stage) for name, stage in ALL if type(stage).__name__[-1] in TWO[name]]),
    "2, all": (2, ALL),
    "3": (3, [(name, stage) for name, stage in ALL if type(stage).__name__[-1] in FEWER[name]]),
    "3, all": (3, ALL),
    "4": (4, ALL),
}
"""Ranks, and what they train."""


def param(run: str, *values: object) -> Any:
    return pytest.param(*values, run, marks=pytest.mark.soak if run not in ("2", "3") else ())


def stages_of(run: str, name: str) -> list[zero.Stage]:
    return [stage for found, stage in RUNS[run][1] if found == name]


def seed_of(rank: int, step: int, batch: int) -> int:
    return 100 * rank + 10 * step + batch + 1


def train(
    loss_of: Any, model: nn.Module, optimizer: Any, case: Case, rank: int, no_sync: Any, clip: Any, grad: Any
) -> dict[str, Any]:
    """``STEPS`` steps of one rank."""
    losses, norms, gradients = [], [], {}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if case.schedule else None
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in range(case.batches):
            with nullcontext() if case.synced or batch == case.batches - 1 else no_sync():
                loss = loss_of(seed_of(rank, step, batch)) / case.batches
                loss.backward()
            losses.append(loss.item())
        if case.clip is not None:
            norms.append(float(clip(case.clip)))
        elif step == 0 and case.update == "on_fetch":
            gradients = {name: grad(parameter) for name, parameter in model.named_parameters()}
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {"losses": losses, "norms": norms, "gradients": gradients}


def paged(rank: int, folder: Path, kinds: Kinds) -> dict[Any, Any]:
    """All of these cases, on one rank."""
    results = {}
    for name, stage in kinds:
        case = (CASES | BY_RANK)[name]
        torch.manual_seed(5 if rank == 0 else 1000 + rank)  # all take over rank 0's values
        model = case.make()
        with TieredStore.open(folder / f"{name}-{type(stage).__name__}-{rank}", dram="2MiB") as store:
            zero.page(model, store, stage=stage)
            optimizer = zero.AdamW(model.parameters(), lr=LR, update=case.update)
            no_sync = functools.partial(zero.no_sync, model)
            clip, grad = optimizer.clip_grad_norm_, optimizer.grad
            found = train(model.loss, model, optimizer, case, rank, no_sync, clip, grad)
            if case.look:
                model.eval()
                with torch.no_grad():
                    found["evaluated"] = model.loss(3)
                model.train()
            found["model"] = {key: value.clone() for key, value in model.state_dict().items()}
            found["optimizer"] = optimizer.state_dict()["state"]
            found["bytes"] = {key: store.spec(key).nbytes for key in store}
        results[name, type(stage).__name__] = found
    return results


def distributed(rank: int, names: list[str]) -> dict[Any, Any]:
    """The same cases with DistributedDataParallel and torch's AdamW, in memory."""
    results = {}
    for name in names:
        case = (CASES | BY_RANK)[name]
        torch.manual_seed(5)
        inner = case.make()
        model = DistributedDataParallel(_Loss(inner), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(inner.parameters(), lr=LR, fused=True)
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(inner.parameters()))
        found = train(model, inner, optimizer, case, rank, model.no_sync, clip, _copy_of_grad)
        results[name] = found | {"model": {key: value.clone() for key, value in inner.state_dict().items()}}
    return results


def _copy_of_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


class _Loss(nn.Module):
    """DistributedDataParallel wants a forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, seed: int) -> torch.Tensor:
        found: torch.Tensor = self.model.loss(seed)
        return found


@functools.cache
def expected(name: str, size: int, together: bool) -> dict[str, Any]:
    """In one process, in memory: the ranks one after the other, and their gradients added up in order. ``together``: those of
    all passes of a step."""
    case = (CASES | BY_RANK)[name]
    torch.manual_seed(5)
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if case.schedule else None
    losses: list[list[float]] = [[] for _ in range(size)]
    for step in range(STEPS):
        batches_of_all = list(range(case.batches))
        passes = [batches_of_all] if together else [[batch] for batch in batches_of_all]
        total: dict[nn.Parameter, torch.Tensor] = {}
        for batches in passes:
            gradients = []
            for rank in range(size):
                optimizer.zero_grad()
                for batch in batches:
                    loss = model.loss(seed_of(rank, step, batch)) / case.batches
                    loss.backward()
                    losses[rank].append(loss.item())
                gradients.append({p: p.grad.clone() for p in model.parameters() if p.grad is not None})
            for parameter in model.parameters():
                if any(parameter in found for found in gradients):
                    parts = [found.get(parameter, torch.zeros_like(parameter)) for found in gradients]
                    mean = functools.reduce(torch.add, parts) / size
                    total[parameter] = total[parameter] + mean if parameter in total else mean
        for parameter in model.parameters():
            parameter.grad = total.get(parameter)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    found: dict[str, Any] = {"losses": losses, "model": model.state_dict()}
    names = {parameter: index for index, parameter in enumerate(model.parameters())}
    found["optimizer"] = {names[p]: state for p, state in optimizer.state.items()}
    if case.look:
        model.eval()
        with torch.no_grad():
            found["evaluated"] = model.loss(3)
    return found


@pytest.fixture(scope="module")
def results() -> Iterator[Any]:
    """``results(run)``: what all its ranks found in all its cases; made once."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def made(run: str) -> list[dict[Any, Any]]:
            size, kinds = RUNS[run]
            return on_ranks(size, both, Path(folder) / run.replace(", ", "-"), kinds)

        yield made


def both(rank: int, folder: Path, kinds: Kinds) -> dict[Any, Any]:
    found = paged(rank, folder, kinds)
    return {"ours": found, "ddp": distributed(rank, [name for name in dict(kinds) if name not in NOT_DDP])}


@pytest.mark.parametrize(
    ("name", "stage", "run"),
    [param(run, name, type(stage).__name__) for run, (_, kinds) in RUNS.items() for name, stage in kinds],
)
def test_ranks_are_what_one_process_would_be(results: Any, run: str, name: str, stage: str) -> None:
    case, size = (CASES | BY_RANK)[name], RUNS[run][0]
    ranks = [found["ours"][name, stage] for found in results(run)]
    want = expected(name, size, not case.synced or stage == "Stage1")
    for rank, found in enumerate(ranks):
        for key, value in want["model"].items():
            if case.clip is None and "running" not in key and "num_batches" not in key:  # each rank's own
                assert torch.equal(found["model"][key], value), (rank, key)
        if case.clip is None:
            assert found["losses"] == want["losses"][rank]
            for index, state in want["optimizer"].items():
                for kind, value in state.items():
                    assert torch.equal(found["optimizer"][index][kind], value), (rank, index, kind)
            assert found["optimizer"].keys() == want["optimizer"].keys()
        if case.look:
            assert "evaluated" in found


@pytest.mark.parametrize(
    ("name", "run"), [param(run, name) for run in RUNS for name in (*CASES, *BY_RANK) if len(stages_of(run, name)) > 1]
)
def test_all_stages_are_the_same_bit_for_bit(results: Any, run: str, name: str) -> None:
    stages = stages_of(run, name)
    if (CASES | BY_RANK)[name].synced:  # which stage 1 does once, and so in another order
        stages = [stage for stage in stages if not isinstance(stage, zero.Stage1)]
    for found in results(run):
        first, *others = (found["ours"][name, type(stage).__name__] for stage in stages)
        for other in others:
            for kind in ("losses", "norms", "gradients", "model", "optimizer"):
                assert same(other[kind], first[kind]), kind


@pytest.mark.parametrize(
    ("name", "run"), [param(run, name) for run in RUNS for name in dict(RUNS[run][1]) if name not in NOT_DDP]
)
def test_ranks_are_what_distributed_data_parallel_is(results: Any, run: str, name: str) -> None:
    """Equal bit for bit with two ranks, where a sum has but one order and halves are exact, unless a norm is a sum, too. With
    more, each gradient is within 2(N + 1) roundings of the mean of its absolute values on the ranks: N - 1 additions and a
    division either way. Nothing bounds parameters after that: Adam makes a step of a gradient that is nothing but rounding, as
    that of a key's bias is. So losses are compared, which such parameters do not change."""
    case, size = (CASES | BY_RANK)[name], RUNS[run][0]
    stage = next((stage for stage in stages_of(run, name) if isinstance(stage, zero.Stage2)), stages_of(run, name)[0])
    exact = size == 2 and case.clip is None and not case.synced
    for found in results(run):
        ours, ddp = found["ours"][name, type(stage).__name__], found["ddp"][name]
        for key, value in ddp["model"].items():
            if exact and "running" not in key and "num_batches" not in key:
                assert torch.equal(ours["model"][key], value), key
        sizes = magnitudes(name, size)
        for key, gradient in ddp["gradients"].items():
            assert (ours["gradients"][key] is None) == (gradient is None)
            if gradient is not None and not case.synced:
                error = (ours["gradients"][key] - gradient).abs()
                assert (error <= 2 * (size + 1) * torch.finfo(gradient.dtype).eps / 2 * sizes[key] + 1e-38).all(), key
        for mine, other in zip(ours["losses"], ddp["losses"], strict=True):
            assert mine == other if exact else abs(mine - other) <= 1e-4 * abs(other)
        for mine, other in zip(ours["norms"], ddp["norms"], strict=True):
            assert abs(mine - other) <= 1e-5 * other


@functools.cache
def magnitudes(name: str, size: int) -> dict[str, torch.Tensor]:
    """The mean over the ranks of each gradient's absolute values, in the first step."""
    case = (CASES | BY_RANK)[name]
    torch.manual_seed(5)
    model = case.make()
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for rank in range(size):
        model.zero_grad()
        for batch in range(case.batches):
            (model.loss(seed_of(rank, 0, batch)) / case.batches).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad.abs() / size
    return total


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class Wide(nn.Module):
    """Units of 1 MiB, the largest 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 2048), nn.Linear(2048, 512))

    def loss(self, seed: int) -> torch.Tensor:
        found: torch.Tensor = self.layers(torch.randn(4, 512, generator=torch.Generator().manual_seed(seed))).square().mean()
        return found


def least(rank: int, folder: Path) -> list[int]:
    """With each stage, in the smallest pool that is not refused."""
    pools = []
    for stage in STAGES:
        model = Wide()
        with TieredStore.open(folder / f"small{rank}", dram="4MiB", durability="none") as store:
            try:
                zero.page(model, store, stage=stage)
            except CapacityError as error:
                found = re.search(r"the smallest that works is ([\d,]+) bytes", str(error))
                assert found is not None
        pools.append(int(found[1].replace(",", "")))
        path = folder / f"least-{rank}-{type(stage).__name__}"
        with TieredStore.open(path, dram=pools[-1], durability="none") as store:
            zero.page(model, store, stage=stage)
            optimizer = zero.AdamW(model.parameters())
            for step in range(3):
                optimizer.zero_grad()
                model.loss(10 * rank + step).backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
            assert model.state_dict().keys()
            assert store.statistics().tiers[0].peak <= pools[-1]
    return pools


def test_the_smallest_pool_that_is_not_refused_works(tmp_path: Path) -> None:
    first, *others = on_ranks(2, least, tmp_path / "a")
    assert all(pools == first for pools in others)


DEEP = 16
WHOLE, LACKING = 2, 1
"""Steps in which each rank has all gradients, and steps in which the last rank lacks one."""
DEEP_UNIT = 4 * (224 * 224)
ROOMS = {"overlapped": 20 * DEEP_UNIT, "prompt": 10 * DEEP_UNIT, "late": 7 * DEEP_UNIT}
"""Bytes of pools: for gathers and reductions beside computing, for a reduction before a unit computes, for one at the end."""


class Sometimes(nn.Linear):
    """Layer that may leave its weight without a gradient, though backward needs the weight."""

    def forward(self, x: torch.Tensor, trained: bool = True) -> torch.Tensor:
        return nn.functional.linear(x, self.weight if trained else self.weight.detach())


class Deep(nn.Module):
    """Units of 196 KiB. ``without``: the layer that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sometimes(224, 224, bias=False) for _ in range(DEEP))
        self.passed: Any = None

    def loss(self, seed: int, without: int = -1) -> torch.Tensor:
        x = torch.randn(4, 224, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x, number != without))
            if self.passed is not None:
                x.register_hook(self.passed)
        return x.square().mean()


def unreduced(rank: int, folder: Path, rooms: list[str]) -> dict[str, tuple[int, list[torch.Tensor]]]:
    """The most units at a time that wait for their reduction, and the parameters after steps in which the last rank has no
    gradient of one layer."""
    found = {}
    for name in rooms:
        torch.manual_seed(0)
        model, waiting = Deep(), [0]
        with TieredStore.open(folder / f"{name}{rank}", dram=ROOMS[name], durability="none") as store:
            zero.page(model, store, stage=zero.Stage3())
            optimizer = zero.AdamW(model.parameters(), lr=LR)

            def passed(_: torch.Tensor, store: TieredStore = store, waiting: list[int] = waiting) -> None:
                waiting[0] = max(waiting[0], sum(key.endswith("/local") for key in store.keys()))  # noqa: SIM118

            model.passed = passed
            for step in range(WHOLE):
                optimizer.zero_grad()
                model.loss(10 * rank + step).backward()
                optimizer.step()
            most, model.passed = waiting[0], None
            for step in range(LACKING):
                optimizer.zero_grad()
                model.loss(10 * rank + step, without=DEEP // 2 if rank else -1).backward()
                optimizer.step()
            found[name] = most, [value.clone() for value in model.state_dict().values()]
    return found | {"in memory": (0, in_memory())}


def in_memory() -> list[torch.Tensor]:
    """The parameters after the same steps of both ranks in one process."""
    torch.manual_seed(0)
    models = [Deep() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR, fused=True) for model in models]
    for step in (*range(WHOLE), *range(-LACKING, 0)):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            lacking = step < 0
            model.loss(10 * rank + step + LACKING * lacking, without=DEEP // 2 if rank and lacking else -1).backward()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert one.grad is not None
            mean = one.grad.add(torch.zeros_like(one) if other.grad is None else other.grad).div_(2)
            one.grad, other.grad = mean, mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return list(models[0].state_dict().values())


MOST = {"prompt": (0, 2), "overlapped": (0, 5), "late": (DEEP - 2, DEEP)}


@pytest.mark.parametrize("rooms", quick([["prompt"], list(ROOMS)], [["prompt"]]), ids=" ".join)
def test_few_gradients_wait_for_their_reduction(rooms: list[str], tmp_path: Path) -> None:
    """Otherwise those of all units go to the drive and back, in each backward pass."""
    for said in on_ranks(2, unreduced, tmp_path, rooms):
        expected = said.pop("in memory")[1]
        assert all(MOST[name][0] <= most <= MOST[name][1] for name, (most, _) in said.items())
        for name, (_, values) in said.items():
            assert all(map(torch.equal, values, expected)), name
