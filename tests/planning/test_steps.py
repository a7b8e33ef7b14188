"""What a plan says that a step asks of a store, beside the trace of a real step: touch by touch."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.quick import quick
from tests.zero.ranks import on_ranks
from tiered import TieredStore, Touch, zero
from tiered.cli.train.model import GPT, Shape
from tiered.cli.train.optimizers import kind_named
from tiered.cli.train.options import OPTIMIZERS
from tiered.planning.dry_run import Update
from tiered.planning.notes import StepNotes, in_groups
from tiered.planning.plan import Choice, Planner, uses_of
from tiered.planning.rehearsal import rehearse
from tiered.planning.simulated import DriveRates
from tiered.planning.sizes import sizes_of
from tiered.planning.sources import Workload, subject_of
from tiered.zero.paging.units import Policy
from tiered.zero.rules.exact import AdamWRule, SGDRule
from tiered.zero.rules.rule import UpdateRule

RULE = AdamWRule(1e-3, (0.9, 0.999), 1e-8, 0.01, False)
BUDGET = 1 << 20
WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + inner


class Tied(nn.Module):
    """The embedding's weights are read by name at the end, and blocks are held one by one."""

    def __init__(self, layers: int = 3, again: bool = False) -> None:
        super().__init__()
        self.embedding, self.again = nn.Embedding(256, WIDTH), again
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Frozen(Tied):
    """Some of its parameters are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.embedding.requires_grad_(False)
        self.norm.bias.requires_grad_(False)


class Measuring(Tied):
    """Its blocks change their buffers in forward, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight).unflatten(0, tokens.shape)


class Wide(nn.Module):
    """A module that is larger than a unit, and is divided; one of its children is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8 * WIDTH)
        self.scale = nn.Parameter(torch.ones(8 * WIDTH))
        self.both = nn.Linear(8 * WIDTH, 8 * WIDTH)
        self.last = nn.Linear(8 * WIDTH, 256)
        self.embedding = nn.Embedding(256, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(self.embedding(tokens))) * self.scale
        logits: torch.Tensor = self.last(torch.tanh(self.both(torch.tanh(self.both(x)))))
        return logits


class Vocabulary(nn.Module):
    """A tied embedding that is larger than a third of the budget, so that it is divided into slices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(2048, WIDTH), Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.block(self.embedding(tokens)), self.embedding.weight)


class Tall(nn.Module):
    """Its largest unit is an eighth of 1 MiB, in which there is no room for reductions beside computing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.down(torch.tanh(self.up(self.embedding(tokens)))), self.embedding.weight)


MODELS = {"tied": Tied, "checkpointed": lambda: Tied(again=True), "frozen": Frozen, "wide": Wide, "vocabulary": Vocabulary}


class Adapted(Tied):
    """Most of it is frozen, and small layers beside it are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up = nn.Sequential(block.up, nn.Linear(4 * WIDTH, 4), nn.Linear(4, 4 * WIDTH))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def real(
    folder: Path, model: nn.Module, update: Update, passes: int, policy: Policy, rounds: int = 3, make: Any = zero.AdamW,
    dram: int = BUDGET,
) -> list[Touch]:
    """Touches of the last of some steps."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (2, 16))
    if isinstance(model, Vocabulary):
        tokens = torch.arange(0, 2048, 64).view(2, 16)  # in all slices
    with TieredStore.open(folder, dram=dram, durability="none") as store:
        zero.page(model, store, policy=policy)
        optimizer = make(model.parameters(), update=update)
        with store.trace() as touches:
            for _ in range(rounds):
                del touches[:]
                for _ in range(passes):
                    loss_of(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        return touches


def planned(model: nn.Module, update: Update, passes: int, policy: Policy, rule: UpdateRule = RULE) -> StepNotes:
    planner = Planner(subject_of(model, Workload(2, 16)), None, rule, policy, passes)
    return planner.step(Choice(update, dram=BUDGET))


@pytest.mark.parametrize(
    ("name", "update"),
    quick(
        [(name, update) for name in MODELS for update in ("on_fetch", "in_backward")],
        [(name, ("on_fetch", "in_backward")[number % 2]) for number, name in enumerate(MODELS)],
    ),
)
def test_the_touches_of_a_step_are_those_of_a_real_one(tmp_path: Path, name: str, update: Update) -> None:
    make: Any = MODELS[name]
    keys, uses, sizes = uses_of(planned(make(), update, 1, Policy()))
    found = real(tmp_path / "store", make(), update, 1, Policy())
    assert list(zip(keys, uses, strict=True)) == [(touch.key, touch.use) for touch in found]
    assert sizes == [-(-touch.nbytes // 4096) * 4096 for touch in found]


def of_rank(rank: int, folder: Path, make: Any, update: Update, dram: int) -> list[Any]:
    return [(touch.key, touch.use) for touch in real(folder / f"store{rank}", make(), update, 1, Policy(), dram=dram)]


@pytest.mark.parametrize(
    ("make", "dram", "update"),
    quick(
        [(make, dram, update) for make, dram in ((Tied, 4), (Tall, 4), (Tall, 5)) for update in ("on_fetch", "in_backward")],
        [(Tied, 4, "in_backward"), (Tall, 5, "on_fetch")],
    ),
)
def test_the_touches_of_a_rank_are_those_of_a_real_one(tmp_path: Path, make: Any, dram: int, update: Update) -> None:
    """Of two. Where reductions go on beside computing the network says when they end, and others are touched meanwhile."""
    dram *= BUDGET // 4
    planner = Planner(subject_of(make(), Workload(2, 16)), None, RULE, Policy(), 1)
    keys, uses, _ = uses_of(planner.step(Choice(update, dram=dram), ranks=2))
    planned, found = list(zip(keys, uses, strict=True)), on_ranks(2, of_rank, tmp_path, make, update, dram)[0]
    if make is Tied:
        assert Counter(planned) == Counter(found)
        reduced = ("/local", "/received", "/grad")
        planned, found = ([one for one in touches if not one[0].endswith(reduced)] for touches in (planned, found))
    assert planned == found


@pytest.mark.parametrize(("passes", "policy"), [(2, Policy()), (1, Policy(storage=torch.bfloat16))])
def test_the_touches_of_accumulation_and_of_converted_parameters(tmp_path: Path, passes: int, policy: Policy) -> None:
    keys, uses, _ = uses_of(planned(Tied(), "on_fetch", passes, policy))
    found = real(tmp_path / "store", Tied(), "on_fetch", passes, policy)
    assert list(zip(keys, uses, strict=True)) == [(touch.key, touch.use) for touch in found]


@pytest.mark.parametrize(("update", "quantize"), [("on_fetch", "int4"), ("in_backward", "int8")])
def test_the_touches_of_adapters_over_packed_weights(tmp_path: Path, update: Update, quantize: Any) -> None:
    policy = Policy(quantize=quantize)
    keys, uses, sizes = uses_of(planned(Adapted(), update, 1, policy))
    found = real(tmp_path / "store", Adapted(), update, 1, policy)
    assert list(zip(keys, uses, strict=True)) == [(touch.key, touch.use) for touch in found]
    assert sizes == [-(-touch.nbytes // 4096) * 4096 for touch in found]


@pytest.mark.parametrize("name", quick(OPTIMIZERS, ["adafactor", "adamw_bf16", "radam"]))
def test_the_touches_of_each_optimizer(tmp_path: Path, name: str) -> None:
    """Of each that ``tiered train`` and ``tiered plan`` offer."""
    kind = kind_named(name)
    keys, uses, _ = uses_of(planned(Tied(), "on_fetch", 1, Policy(), kind.known.usual))
    make = partial(kind.ours, lr=1e-3)
    found = real(tmp_path / "store", Tied(), "on_fetch", 1, Policy(), make=make)
    assert list(zip(keys, uses, strict=True)) == [(touch.key, touch.use) for touch in found]


def test_a_rule_without_states_has_no_chunks() -> None:
    plan = Planner(subject_of(Tied(), Workload(sequence=16)), None, SGDRule(), Policy(), 1).divided(BUDGET)
    assert all(not sizes for unit in sizes_of(plan, "model", SGDRule()) for sizes in unit.chunks)


@pytest.mark.parametrize("update", ["on_fetch", pytest.param("in_backward", marks=pytest.mark.soak)])
def test_the_bytes_of_a_rehearsal_are_those_of_a_real_run(tmp_path: Path, update: Update) -> None:
    """On demand, because what is fetched ahead depends on time. In a pool with holes of unequal sizes a slot may lie elsewhere,
    so that some tensors more or fewer move in a step: in one in twenty bytes the two may differ."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (2, 16))
    model = Tied(5)
    step_planned = planned(model, update, 1, Policy())
    predicted = rehearse(step_planned, BUDGET, DriveRates(1e9, 1e9), prefetch="off", warm_up=4, counted=4)
    with TieredStore.open(tmp_path / "store", dram=BUDGET, durability="none") as store:
        zero.page(model, store, paging=zero.Paging(prefetch="off"))
        optimizer = zero.AdamW(model.parameters(), update=update)

        def step() -> None:
            loss_of(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            step()
        before = store.statistics().links[-1]
        for _ in range(4):
            step()
        after = store.statistics().links[-1]
    moved = (after.up.bytes + after.down.bytes - before.up.bytes - before.down.bytes) / 4
    assert predicted.read + predicted.written == pytest.approx(moved, rel=0.05)
    assert predicted.touches == len(uses_of(step_planned)[0])


def test_a_choice_that_does_not_fit_is_refused_with_the_number() -> None:
    from tiered import CapacityError

    planner = Planner(subject_of(Wide(), Workload(sequence=8)), None, RULE, Policy(), 1)
    with pytest.raises(CapacityError, match="smallest"):
        planner.predict(Choice(dram=4096))


# -- activations that wait in the store ------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "store": {"activations": "store"},
    "recompute": {"activations": "recompute"},
    "halves": {"micro_batch": 2},
    "thirds": {"micro_batch": 3},
}
ROWS, LENGTH = 6, 64


def waiting(model: nn.Module, choice: Choice, together: int = 1) -> StepNotes:
    planner = Planner(subject_of(model, Workload(ROWS, LENGTH)), None, RULE, Policy(), 1)
    return in_groups(planner.step(choice), together)


def tokens_of(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(0)
    if isinstance(model, Vocabulary):
        return (torch.arange(ROWS * LENGTH) * 5 % 2048).view(ROWS, LENGTH)  # in all slices
    return torch.randint(0, 256, (ROWS, LENGTH))


@pytest.mark.parametrize(
    ("name", "way"),
    quick(
        [*product(MODELS, WAYS), *product(["measuring"], ["store", "recompute"])],
        [("tied", "store"), ("checkpointed", "store"), ("frozen", "recompute"), ("measuring", "recompute"), ("tied", "thirds")],
    ),
)
def test_the_touches_of_activations_in_the_store(tmp_path: Path, name: str, way: str) -> None:
    """By the pager's own code on the meta device: what waits, in which pieces, and when it comes back."""
    update: Update = "in_backward" if way == "thirds" else "on_fetch"
    model = Measuring() if name == "measuring" else MODELS[name]()
    choice = Choice(update, dram={"wide": 5, "vocabulary": 4}.get(name, 2) << 20, **WAYS[way])
    step, tokens = waiting(model, choice), tokens_of(model)
    with TieredStore.open(tmp_path / "store", dram=choice.dram, durability="none") as store:
        zero.page(model, store, **WAYS[way])
        optimizer = zero.AdamW(model.parameters(), update=update)
        with store.trace() as found:
            for _ in range(3):
                del found[:]
                loss_of(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    keys, uses, sizes = uses_of(step)
    assert list(zip(keys, uses, strict=True)) == [(touch.key, touch.use) for touch in found]
    assert sizes == [-(-touch.nbytes // 4096) * 4096 for touch in found]
    assert step.activations


def gpt() -> nn.Module:
    return GPT(Shape(4, 128, 4, LENGTH))


tied = partial(Tied, 8)


@pytest.mark.parametrize(
    ("make", "dram", "way"),
    quick(
        [
            (make, dram, way)
            for make, budgets in ((tied, (2, 4)), (gpt, (2, 4)), (Wide, (5, 8)))
            for dram in budgets
            for way in ("store", "recompute", "halves")
        ],
        [(tied, 2, "store")],
    ),
)
def test_the_bytes_of_activations_are_those_of_a_real_run(tmp_path: Path, make: Any, dram: int, way: str) -> None:
    """What is put and what comes back to the byte, what the drive moves but for one in twenty bytes, or a
    thirty-second of the pool where nearly all fits: on demand, because what
    is fetched ahead depends on time. A real run has made the states in one step more."""
    model = make()
    choice = Choice(dram=dram << 20, **WAYS[way])
    predicted = rehearse(waiting(model, choice), choice.dram, DriveRates(1e9, 1e9), prefetch="off", warm_up=4, counted=2)
    tokens = tokens_of(model)
    with TieredStore.open(tmp_path / "store", dram=choice.dram, durability="none") as store:
        zero.page(model, store, paging=zero.Paging(prefetch="off"), **WAYS[way])
        optimizer = zero.AdamW(model.parameters())

        def steps(number: int) -> None:
            for _ in range(number):
                loss_of(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

        steps(5)
        before, saved = store.statistics().links[-1], zero.statistics(model).activations
        steps(2)
        after, then = store.statistics().links[-1], zero.statistics(model).activations
    moved = (after.up.bytes + after.down.bytes - before.up.bytes - before.down.bytes) / 2
    assert predicted.read + predicted.written == pytest.approx(moved, rel=0.05, abs=choice.dram / 32)
    if saved is not None and then is not None:
        found = predicted.offloading
        assert found.stored == (then.offloaded - saved.offloaded) / 2 > 0
        assert found.restored == (then.restored - saved.restored) / 2


@pytest.mark.soak
def test_pieces_that_are_taken_together_move_as_many_bytes() -> None:
    choice = Choice(activations="store", dram=2 << 20)
    one, four = (
        rehearse(waiting(gpt(), choice, together), choice.dram, DriveRates(1e9, 1e9), warm_up=2, counted=1)
        for together in (1, 4)
    )
    assert four.touches < 0.8 * one.touches
    assert (four.offloading.stored, four.offloading.restored) == (one.offloading.stored, one.offloading.restored)
    assert four.read + four.written == pytest.approx(one.read + one.written, rel=0.05)
