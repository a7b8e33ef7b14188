"""What stages cost and bring: bytes that each rank sends in a step, counted at its sockets, against the volumes of the paper
(tiered/zero/paging/sharding.py), and bytes in its store and in its pool against one process's."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.wire import traffic
from tests.zero.ranks import on_ranks
from tiered import TieredStore, zero
from tiered.zero.paging import units

WIDTH, LAYERS = 192, 8  # 2, 3 and 4 ranks divide the layers at multiples of 256 elements, without padding
UNIT = 4 * WIDTH * WIDTH
PHI = LAYERS * UNIT
"""Bytes of all parameters, and of all gradients."""
HEADERS = 800
"""Bytes that a collective sends to each other rank beside the data: 192 say what it is for, the rest is gloo's."""
POOL = 8 * PHI
ROUNDING = 3 * LAYERS * 4096
"""Of tensors in the pool, to pages."""
STEPS = 2
STAGES = {type(stage).__name__: stage for stage in (zero.Stage1(), zero.Stage2(), zero.Stage3())}


@dataclass(frozen=True)
class Way:
    """``batches``: passes a step; ``synced``: each of them is reduced, and else the last. ``checkpointed``: two layers at a
    time are computed again in backward, which gathers them no more often."""

    batches: int = 1
    synced: bool = False
    clip: bool = False
    checkpointed: bool = False


WAYS = {
    "one": Way(),
    "clipped": Way(clip=True),
    "accumulated": Way(batches=3),
    "synced": Way(batches=3, synced=True),
    "checkpointed": Way(checkpointed=True),
}
GATHERS = {"Stage1": lambda way: 1, "Stage2": lambda way: 1, "Stage3": lambda way: 2 * way.batches}
"""How often all parameters are gathered in a step: the updated ones; for each forward and backward."""
REDUCTIONS = {
    "Stage1": lambda way: 1,
    "Stage2": lambda way: way.batches if way.synced else 1,
    "Stage3": lambda way: way.batches if way.synced else 1,
}


Kinds = list[tuple[str, str]]
ALL: Kinds = [(stage, way) for way in WAYS for stage in STAGES]
FEWER = {"one": "123", "clipped": "1", "accumulated": "2", "synced": "3", "checkpointed": "3"}
TWO = FEWER | {"accumulated": "12"}
RUNS: dict[str, tuple[int, Kinds]] = {
    "2": (2, [(stage, way) for stage, way in ALL if stage[-1] in TWO[way]]),
    "2, all": (2, ALL),
    "3": (3, [(stage, way) for stage, way in ALL if stage[-1] in FEWER[way]]),
    "3, all": (3, ALL),
    "4": (4, ALL),
}
"""Ranks, and what they train: each way with a stage or more in every run, of two ranks; all with all in the long one."""


def param(run: str, *values: object) -> Any:
    return pytest.param(*values, run, marks=pytest.mark.soak if run != "2" else ())


SIZES = [param(run) for run in RUNS]


@dataclass
class Found:
    """``sent``: in each step but the first. ``stored``: bytes of tensors by kind, with all updates applied; ``used``: of the
    pool, which is large enough for everything, then; ``peak``: at most."""

    sent: list[int]
    stored: dict[str, int]
    used: int
    peak: int


class Blocks(nn.Sequential):
    """Of two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in range(0, len(self), 4):
            block = list(self)[start : start + 4]
            x = checkpoint(nn.Sequential(*block).forward, x, use_reentrant=False)
        return x


def train(rank: int, folder: Path, stage: zero.Stage | None, way: Way) -> Found:
    torch.manual_seed(rank)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    kind = Blocks if way.checkpointed else nn.Sequential
    model = kind(*(module for layer in layers for module in (layer, nn.Tanh())))
    sent = []
    with TieredStore.open(folder, dram=POOL) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_SHARE", POOL // UNIT)  # a layer is a unit, though all of them would fit
        zero.page(model, store, stage=stage)
        optimizer = zero.AdamW(model.parameters())
        for _ in range(STEPS + 1):
            before = traffic()
            for batch in range(way.batches):
                with nullcontext() if way.synced or batch == way.batches - 1 else zero.no_sync(model):
                    # so that the first layer's parameters are needed in backward, as all others are
                    x = torch.randn(4, WIDTH, requires_grad=True)
                    model(x).square().mean().backward()
            if way.clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            sent.append((traffic() - before).sent)
        optimizer.flush()
        stored: dict[str, int] = {}
        for key in store:
            kind = "parameters" if key.count("/") == 2 else "states"
            stored[kind] = stored.get(kind, 0) + store.spec(key).nbytes
        pool = store.statistics().tiers[0]
        return Found(sent[1:], stored, pool.used, pool.peak)


def all_of(rank: int, folder: Path, kinds: Kinds) -> dict[tuple[str, str], Found]:
    return {
        (stage, way): train(rank, folder / f"{stage}-{way}-{rank}", STAGES[stage], WAYS[way]) for stage, way in kinds
    }


@pytest.fixture(scope="module")
def results() -> Iterator[Any]:
    """``results(run)``: what each of its ranks found; made once."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def made(run: str) -> list[dict[tuple[str, str], Found]]:
            size, kinds = RUNS[run]
            return on_ranks(size, all_of, Path(folder) / run.replace(", ", "-"), kinds)

        yield made


@pytest.mark.parametrize(("stage", "way", "run"), [param(run, *kind) for run, (_, kinds) in RUNS.items() for kind in kinds])
def test_each_rank_sends_its_volume_and_nothing_else(results: Any, stage: str, way: str, run: str) -> None:
    size = RUNS[run][0]
    passes = GATHERS[stage](WAYS[way]) + REDUCTIONS[stage](WAYS[way])
    volume = passes * PHI * (size - 1) // size
    # Beside these: which gradients there are, whether they are finite, norms, and whether all can make the step.
    collectives = passes * LAYERS + 2 * WAYS[way].batches + 3
    for found in results(run):
        for sent in found[stage, way].sent:
            assert volume <= sent <= volume + HEADERS * (size - 1) * collectives, sent / volume


@pytest.mark.parametrize("stage", ["Stage1", "Stage2"])
def test_accumulating_sends_no_more_than_one_pass(results: Any, stage: str) -> None:
    for found in results("2"):
        assert max(found[stage, "accumulated"].sent) <= max(found[stage, "one"].sent)


@pytest.mark.parametrize("run", SIZES)
def test_what_each_rank_stores_is_its_share(results: Any, run: str) -> None:
    size = RUNS[run][0]
    for found in results(run):
        for stage in STAGES:
            stored = found[stage, "one"].stored
            assert stored["states"] == 2 * PHI // size
            assert stored["parameters"] == (PHI // size if stage == "Stage3" else PHI)


@pytest.mark.parametrize("run", SIZES)
def test_pool_holds_a_share_and_what_is_under_way(results: Any, run: str, tmp_path: Path) -> None:
    """Under way are, whole: the unit that computes and the next one; a unit's gradients as they arrive, as they are sent and as
    they are received; and what waits to be sent. How much waits is a matter of speed: it may be all."""
    alone, size = train(0, tmp_path, None, WAYS["one"]), RUNS[run][0]
    for found in results(run):
        three, two = found["Stage3", "one"], found["Stage2", "one"]
        assert three.used <= alone.used // size + ROUNDING
        assert two.used <= PHI + (alone.used - PHI) // size + ROUNDING
        assert three.peak <= alone.peak // size + PHI + 5 * UNIT + ROUNDING
