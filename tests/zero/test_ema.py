"""An exponential moving average of a paged model's weights: the bits of torch's ``AveragedModel``, whatever happens between."""

from __future__ import annotations

import copy
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests import programs
from tests.quick import quick
from tests.zero.models import Mixed, Tied
from tests.zero.paging.test_experts import Mixture
from tests.zero.striking import Struck, described, shuffled, struck_at
from tiered import InterruptedStep, ManifestError, MisuseError, TieredStore, zero
from tiered.cli.main import main
from tiered.zero.checkpoint.checkpoint import read_record, write_record
from tiered.zero.optimizers.average import UnitAverage
from tiered.zero.paging.storage import model_named

DECAY, STEPS = 0.9, 12


class Narrow(Tied):
    """All parameters of one narrow type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(48, 2)
        self.to(dtype)


class Odd(nn.Module):
    """Frozen values that averaging changes all the same: a zero with a sign, an infinity, whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.tensor([-0.0, float("inf"), 1.5]), requires_grad=False)
        self.whole = nn.Parameter(torch.arange(5, 12), requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(16, 300), nn.Linear(300, 200), nn.Linear(200, 16))

    def loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        return (self.layers(x) * self.whole[0] + self.frozen[2]).square().mean()


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "tied": (lambda: Tied(48, 2), {}, "on_fetch"),
    "buffers": (Mixed, {}, "on_fetch"),
    "in backward": (lambda: Tied(48, 2), {}, "in_backward"),
    "bf16": (lambda: Narrow(torch.bfloat16), {}, "on_fetch"),
    "fp16": (lambda: Narrow(torch.float16), {}, "on_fetch"),
    "stored as bf16": (lambda: Tied(48, 2), {"policy": zero.Policy(torch.bfloat16)}, "on_fetch"),
    "sliced": (lambda: Tied(48, 2), {"paging": zero.Paging(largest_unit=64 << 10, slice_weights=True)}, "on_fetch"),
    "experts": (Mixture, {}, "on_fetch"),
    "odd": (Odd, {}, "on_fetch"),
    "recompute": (lambda: Tied(48, 2), {"activations": "recompute"}, "on_fetch"),
    "store": (lambda: Tied(48, 2), {"activations": "store"}, "on_fetch"),
}


def loss_of(model: Any, number: int) -> torch.Tensor:
    found: torch.Tensor = model.loss(number)
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same bits."""
    return left.keys() == right.keys() and all(
        a.dtype == right[name].dtype and torch.equal(a.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8))
        for name, a in left.items()
    )


@pytest.mark.parametrize("kind", quick(KINDS, ["buffers", "in backward", "bf16", "sliced", "experts", "odd"]))
def test_the_bits_of_averaged_model(tmp_path: Path, kind: str) -> None:
    """A twin without an average is read after every step, and its values are given to torch's class in memory."""
    make, options, update = KINDS[kind]
    torch.manual_seed(0)
    memory = make()
    with (
        TieredStore.open(tmp_path / "one", dram="1MiB") as store,
        TieredStore.open(tmp_path / "twin", dram="1MiB") as other,
    ):
        model, twin = zero.page(copy.deepcopy(memory), store, **options), zero.page(copy.deepcopy(memory), other, **options)
        averages = kind == "buffers"
        ema = zero.EMA(model, DECAY, use_buffers=averages)
        both = [(one, zero.AdamW(one.parameters(), lr=1e-2, update=update)) for one in (model, twin)]
        averaged = AveragedModel(memory, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=averages)
        for number in range(STEPS):
            for one, optimizer in both:
                optimizer.zero_grad()
                loss_of(one, number).backward()
                optimizer.step()
            ema.update()
            memory.load_state_dict(twin.state_dict())
            averaged.update_parameters(memory)
            if number in (5, STEPS - 1):
                with ema.applied():
                    assert same(model.state_dict(), averaged.module.state_dict())
                    assert torch.equal(loss_of(model, 3), loss_of(averaged.module, 3).detach())
        assert same(model.state_dict(), twin.state_dict())
        assert ema.updates == STEPS


class Small(nn.Module):
    """A tied matrix, a frozen layer, and buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.frozen = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.unused = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.frozen(self.norm(self.first(x))))
        return found


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


class Memory:
    """A training in memory with torch's classes: what a paged one with an average has to be like."""

    def __init__(self, decay: float, averages: bool) -> None:
        torch.manual_seed(1)
        self.model = Small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.decay, self.averages = decay, averages
        self.averaged = self.anew()

    def anew(self) -> AveragedModel:
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(self.decay), use_buffers=self.averages)


class Paged:
    """The same in a store."""

    def __init__(
        self, folder: Path, decay: float, averages: bool, update: str, policy: Any = None, existing: str = "overwrite"
    ) -> None:
        self.folder, self.decay, self.averages, self.update = folder, decay, averages, update
        self.policy = policy or zero.Policy()
        self.open(existing)

    def open(self, existing: str) -> None:
        torch.manual_seed(1)
        self.store = TieredStore.open(self.folder, dram="1MiB")
        paging = zero.Paging(largest_unit=600)
        self.model = zero.page(Small(), self.store, existing=existing, paging=paging, policy=self.policy)
        self.optimizer = zero.AdamW(self.model.parameters(), lr=1e-2, update=self.update)  # type: ignore[arg-type]
        self.ema = zero.EMA(self.model, self.decay, use_buffers=self.averages)
        if existing == "resume":
            zero.resume(self.model, self.optimizer)


def step(one: Any, number: int) -> None:
    one.optimizer.zero_grad()
    one.model(batch(number)).square().mean().backward()
    one.optimizer.step()


@torch.no_grad()
def write(one: Any, number: int) -> None:
    named = list(one.model.named_parameters())
    named[number % len(named)][1].mul_(1 + number / 7)


@torch.no_grad()
def forward(one: Any, number: int) -> None:
    one.model(batch(number))


OPERATIONS = st.lists(
    st.sampled_from(
        ["step", "step", "update", "update", "write", "forward", "flush", "commit", "rollback", "applied", "resume", "anew"]
    ),
    min_size=4,
    max_size=20,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(operations=OPERATIONS, decay=st.sampled_from([0.0, 0.3, 0.75, 1.0]), averages=st.booleans(), within=st.booleans())
def test_any_order_of_calls(tmp_path: Path, operations: list[str], decay: float, averages: bool, within: bool) -> None:
    memory, number = Memory(decay, averages), 0
    paged = Paged(tmp_path / "store", decay, averages, "in_backward" if within else "on_fetch")
    zero.commit(paged.model, paged.optimizer)
    committed: Any = copy.deepcopy(memory.__dict__)
    try:
        for operation in [*operations, "applied", "commit", "resume", "applied"]:
            number += 1
            if operation in ("step", "write", "forward"):
                for one in (memory, paged):
                    globals()[operation](one, number)
            elif operation == "update":
                memory.averaged.update_parameters(memory.model)
                paged.ema.update()
            elif operation == "flush":
                paged.optimizer.flush()
            elif operation == "commit":
                zero.commit(paged.model, paged.optimizer)
                committed = copy.deepcopy(memory.__dict__)
            elif operation == "anew":
                paged.ema.delete()
                paged.ema = zero.EMA(paged.model, decay, use_buffers=averages)
                memory.averaged = memory.anew()
            elif operation == "rollback":
                zero.rollback(paged.model, paged.optimizer)
                memory.__dict__.update(copy.deepcopy(committed))
            elif operation == "resume":
                paged.store.close()
                paged.open("resume")
                memory.__dict__.update(copy.deepcopy(committed))
            elif memory.averaged.n_averaged:
                expected = memory.averaged.module.state_dict()
                with paged.ema.applied():
                    assert same(paged.model.state_dict(), expected)
                    paged.model.eval()
                    assert torch.equal(paged.model(batch(0)), memory.averaged.module.eval()(batch(0)).detach())
                    paged.model.train()
                    memory.averaged.module.train()
            assert paged.ema.updates == int(memory.averaged.n_averaged)
        assert same(paged.model.state_dict(), memory.model.state_dict())
    finally:
        paged.store.close()


@pytest.fixture
def paged(tmp_path: Path) -> Iterator[Paged]:
    """After two steps, each with an update."""
    made = Paged(tmp_path / "store", DECAY, False, "on_fetch")
    for number in range(2):
        step(made, number)
        made.ema.update()
    yield made
    made.store.close()


def average_of(paged: Paged) -> dict[str, torch.Tensor]:
    with paged.ema.applied():
        return {name: value.clone() for name, value in paged.model.state_dict().items()}


def test_update_moves_nothing_and_a_step_reads_no_parameter_again(tmp_path: Path) -> None:
    """Reads and writes of the disk in a step are those of a training without an average, and those of the average, once."""
    read: dict[bool, dict[str, int]] = {}
    for averages in (False, True):
        torch.manual_seed(0)
        with TieredStore.open(tmp_path / f"{averages}", dram="1MiB") as store:
            model = zero.page(Tied(48, 2), store)
            optimizer = zero.AdamW(model.parameters())
            ema = zero.EMA(model, DECAY) if averages else None
            with store.trace() as touches:
                for number in range(4):
                    optimizer.zero_grad()
                    loss_of(model, number).backward()
                    optimizer.step()
                    before = len(touches)
                    if ema is not None:
                        ema.update()
                    assert len(touches) == before
                    if number == 2:
                        last = len(touches)
                step_of = [touch.key for touch in touches[last:]]
            read[averages] = {key: step_of.count(key) for key in step_of}
    of_average = {key: count for key, count in read[True].items() if key.endswith("/average")}
    assert of_average
    assert set(of_average.values()) == {1}
    assert {key: count for key, count in read[True].items() if key not in of_average}.keys() == read[False].keys()


def test_a_decay_that_is_a_function_is_called_with_the_updates_before(store: TieredStore) -> None:
    torch.manual_seed(0)
    model = zero.page(Small(), store)
    asked: list[int] = []

    def decay(before: int) -> float:
        asked.append(before)
        return min(0.99, (1 + before) / (10 + before))

    ema = zero.EMA(model, decay)
    memory = copy.deepcopy(model)

    def by_torch(mine: Any, theirs: Any, before: Any) -> None:
        get_ema_multi_avg_fn(min(0.99, (1 + int(before)) / (10 + int(before))))(mine, theirs, before)

    averaged = AveragedModel(memory, multi_avg_fn=by_torch)
    for number in range(300):  # nobody holds a unit meanwhile: decays of many updates are remembered
        if number in (1, 298):
            with torch.no_grad():
                model.first.weight.mul_(2)
                memory.first.weight.mul_(2)
        ema.update()
        averaged.update_parameters(memory)
    with ema.applied():
        assert same(model.state_dict(), averaged.module.state_dict())
    assert asked == list(range(300))


def test_a_frozen_average_that_stays_as_it_is_is_not_written_again(store: TieredStore) -> None:
    model = zero.page(Small(), store, paging=zero.Paging(largest_unit=600))
    ema = zero.EMA(model, DECAY)
    key = "model/param/frozen/average"
    for number in range(6):
        ema.update()
        with store.trace() as touches, torch.no_grad():
            model(batch(number))
        assert (key in [touch.key for touch in touches]) == (number < 2)
    before = model.frozen.weight.detach().clone()
    with torch.no_grad():
        model.frozen.weight.add_(1)
    ema.update()
    with ema.applied():
        assert torch.equal(model.frozen.weight, torch.lerp(before, before + 1, 1 - DECAY))


def test_the_average_of_quantised_weights_takes_no_room(store: TieredStore) -> None:
    torch.manual_seed(0)
    model = Small().requires_grad_(False)
    zero.page(model, store, policy=zero.Policy(quantize="int8"), paging=zero.Paging(largest_unit=600))
    ema = zero.EMA(model, DECAY)
    ema.update()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    ema.update()
    with ema.applied():
        assert same(model.state_dict(), expected)
    assert not [key for key in store if key.endswith("/average")]


def test_export_within_applied_writes_the_average(paged: Paged, tmp_path: Path) -> None:
    with paged.ema.applied():
        zero.export(paged.model, tmp_path / "export")
        expected = {name: value.clone() for name, value in paged.model.state_dict().items() if name != "last.weight"}
    assert same(load_file(tmp_path / "export" / "model.safetensors"), expected)
    assert not same(expected, {name: value for name, value in paged.model.state_dict().items() if name != "last.weight"})


def test_statistics_of_batch_norm_stay_with_the_average(paged: Paged) -> None:
    """``update_bn``, as torch's documentation has it."""
    own = paged.model.norm.running_mean.clone()
    with paged.ema.applied():
        update_bn([batch(1), batch(2)], paged.model)
        found = paged.model.norm.running_mean.clone()
    assert not torch.equal(found, own)
    assert torch.equal(paged.model.norm.running_mean, own)
    assert torch.equal(average_of(paged)["norm.running_mean"], found)


def test_a_process_that_makes_no_ema_takes_the_average_along(paged: Paged) -> None:
    """What is due is made with the decay of the update, and one that is made later goes on with it."""
    expected = average_of(paged)
    step(paged, 5)
    paged.ema.update()
    step(paged, 6)
    paged.ema.update()  # due of no unit that is held before the commit
    zero.commit(paged.model, paged.optimizer)
    known = average_of(paged)
    assert not same(known, expected)
    paged.store.close()
    with TieredStore.open(paged.folder, dram="1MiB") as store:
        model = zero.page(Small(), store, existing="continue", paging=zero.Paging(largest_unit=600))
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        zero.resume(model, optimizer)
        with torch.no_grad():
            model(batch(0))
            model.first.weight.zero_()
        zero.commit(model, optimizer)
    paged.open("resume")
    assert paged.ema.updates == 4
    assert same(average_of(paged), known)


def test_a_rollback_to_before_the_average_begins_it_anew(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(Small(), store)
        optimizer = zero.AdamW(model.parameters())
        zero.commit(model, optimizer)
        ema = zero.EMA(model, DECAY)
        ema.update()
        with ema.applied():
            model.eval()(batch(0))
        assert [key for key in store if key.endswith("/average")]
        zero.rollback(model, optimizer)
        assert ema.updates == 0
        assert not [key for key in store if key.endswith("/average")]
        with pytest.raises(MisuseError, match="no average yet"), ema.applied():
            pass
        with torch.no_grad():
            model.first.weight.fill_(3.0)
        ema.update()
        with ema.applied():
            assert torch.equal(model.first.weight, torch.full((8, 8), 3.0))


def test_rollback_within_applied_ends_it(paged: Paged) -> None:
    zero.commit(paged.model, paged.optimizer)
    expected = {name: value.clone() for name, value in paged.model.state_dict().items()}
    with paged.ema.applied():
        zero.rollback(paged.model, paged.optimizer)
        assert same(paged.model.state_dict(), expected)
    step(paged, 9)
    paged.ema.update()
    assert paged.ema.updates == 3


def test_an_exception_within_applied_leaves_the_model_as_before(paged: Paged) -> None:
    expected = {name: value.clone() for name, value in paged.model.state_dict().items()}
    average = average_of(paged)
    paged.model.eval()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = paged.model.frozen.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), paged.ema.applied():
        paged.model(batch(0))
    handle.remove()
    assert torch.is_grad_enabled()
    assert same(paged.model.state_dict(), expected)
    assert same(average_of(paged), average)
    paged.model.train()
    step(paged, 3)


def test_what_is_written_to_a_kept_tensor_after_an_update_is_not_in_it(paged: Paged) -> None:
    paged.model.eval()
    kept: list[torch.Tensor] = []
    handle = paged.model.frozen.register_forward_hook(lambda module, *_: kept.append(module.weight.data))
    with torch.no_grad():
        paged.model(batch(0))
    handle.remove()
    before = kept[0].clone()
    paged.ema.update()
    kept[0].add_(1)
    average = average_of(paged)["frozen.weight"]
    assert torch.equal(average, torch.lerp(before, before, 1 - DECAY))
    assert torch.equal(paged.model.frozen.weight, before + 1)


def test_a_graph_from_before_applied_runs_backward_after_it(paged: Paged) -> None:
    paged.optimizer.zero_grad()
    loss = paged.model(batch(3)).square().mean()
    with paged.ema.applied(), pytest.raises(MisuseError, match="backward is of its weights: leave that block"):
        loss.backward()
    paged.optimizer.zero_grad()
    loss = paged.model(batch(3)).square().mean()
    average_of(paged)
    loss.backward()
    paged.optimizer.step()


@pytest.mark.parametrize(
    "what", ["step", "update", "commit", "write", "write in forward", "load", "recorded", "nested", "delete"]
)
def test_what_trains_within_applied_is_refused(paged: Paged, what: str) -> None:
    expected = {name: value.clone() for name, value in paged.model.state_dict().items()}
    average = average_of(paged)
    state = {name: value.clone() for name, value in expected.items()}
    paged.model.eval()

    def write_in_forward() -> None:
        handle = paged.model.frozen.register_forward_hook(lambda module, *_: module.weight.add_(1))
        try:
            paged.model(batch(0))
        finally:
            handle.remove()

    def recorded() -> None:
        with torch.enable_grad():
            paged.model(batch(0))

    def nested() -> None:
        with paged.ema.applied():
            raise AssertionError

    calls: dict[str, Callable[[], object]] = {
        "step": paged.optimizer.step,
        "update": paged.ema.update,
        "commit": lambda: zero.commit(paged.model, paged.optimizer),
        "write": lambda: paged.model.first.weight.zero_(),
        "write in forward": write_in_forward,
        "load": lambda: paged.model.load_state_dict(state),
        "recorded": recorded,
        "nested": nested,
        "delete": paged.ema.delete,
    }
    paged.store.offload()
    with paged.ema.applied():
        with pytest.raises(MisuseError, match=r"EMA\.applied"):
            calls[what]()
        paged.model(batch(0))
    assert same(paged.model.state_dict(), expected)
    assert same(average_of(paged), average)


def test_a_write_to_an_average_that_only_memory_has_is_told_until_rollback(paged: Paged) -> None:
    zero.commit(paged.model, paged.optimizer)
    step(paged, 4)
    paged.ema.update()
    handle = paged.model.frozen.register_forward_hook(lambda module, *_: module.bias.add_(1))
    with paged.ema.applied(), pytest.raises(MisuseError, match=r"'frozen\.bias' was written to while .*EMA\.applied"):
        paged.model(batch(0))
    handle.remove()
    with pytest.raises(InterruptedStep, match=r"the average of 'frozen\.bias' was written to .*zero\.rollback"):
        paged.model(batch(0))
    zero.rollback(paged.model, paged.optimizer)
    assert torch.equal(average_of(paged)["frozen.bias"], paged.model.frozen.bias)


def test_what_cannot_be_averaged_is_refused(store: TieredStore, tmp_path: Path) -> None:
    model = zero.page(Small(), store)
    for decay in (1.5, -0.1, float("nan"), "0.9", None, True):
        with pytest.raises(MisuseError, match="decay is a number from 0 to 1"):
            zero.EMA(model, decay)  # type: ignore[arg-type]
    ema = zero.EMA(model, lambda before: 2.0)
    with pytest.raises(MisuseError, match=r"decay\(0\) returned what is no decay: a number from 0 to 1, not 2\.0"):
        ema.update()
    assert ema.updates == 0
    ema.decay = 0.5
    with pytest.raises(MisuseError, match=r"another zero\.EMA updates: use that one"):
        zero.EMA(model, DECAY)
    with pytest.raises(MisuseError, match=r"'norm\.weight' is in none of these modules: give the whole model"):
        zero.EMA(model.first, DECAY)
    with pytest.raises(MisuseError, match="is not paged"):
        zero.EMA(Small(), DECAY)
    with pytest.raises(MisuseError, match="use_buffers is True or False"):
        zero.EMA(model, DECAY, use_buffers=1)  # type: ignore[arg-type]
    ema.update()
    ema.delete()
    with pytest.raises(MisuseError, match="this average was deleted"):
        ema.update()
    ema = zero.EMA(model, DECAY)
    assert ema.updates == 0
    handle = model.first.register_forward_hook(lambda *_: ema.update())
    with pytest.raises(MisuseError, match=r"is computing: call EMA\.update after optimizer\.step"):
        model(batch(0))
    handle.remove()
    model.add = nn.Linear(2, 2)
    ema.delete()
    with pytest.raises(MisuseError, match=r"'add\.weight' is none of model 'model': add it to the model before"):
        zero.EMA(model, DECAY)


def test_a_model_that_takes_the_place_has_no_average(paged: Paged) -> None:
    model = zero.page(Small(), paged.store, existing="overwrite")
    assert not [key for key in paged.store if key.endswith("/average")]
    assert zero.EMA(model, DECAY).updates == 0
    with pytest.raises(InterruptedStep):
        paged.ema.update()


def test_moments_and_the_average_move_out_of_memory_together(paged: Paged) -> None:
    average = average_of(paged)
    keys = [key for key in paged.store if key.endswith("/average")]
    moved = zero.offload(paged.model, paged.optimizer, components=["states"])
    assert moved.bytes["states"] >= sum(paged.store.spec(key).nbytes for key in keys) > 0
    assert same(average_of(paged), average)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # callbacks are struck, too
@pytest.mark.parametrize("count", [8, pytest.param(10_000, marks=pytest.mark.soak)])
def test_an_update_that_is_struck_is_made_or_not(paged: Paged, count: int) -> None:
    """And nothing of it twice, whichever line is struck, also where a piece has just been copied: the next use goes on, or says
    to roll back."""
    paged.model.eval()
    zero.commit(paged.model, paged.optimizer)

    def work() -> None:
        paged.ema.update()
        with paged.ema.applied():
            paged.model.norm.running_mean.add_(1)
            paged.model(batch(0))

    def begin() -> None:
        zero.rollback(paged.model, paged.optimizer)
        step(paged, 7)

    begin()
    own = {name: value.clone() for name, value in paged.model.state_dict().items()}
    expected = {}
    for updates in (2, 3):
        expected[updates] = average_of(paged)
        del expected[updates]["norm.running_mean"]
        paged.ema.update()
    begin()
    with struck_at(None) as lines:
        work()
    made: list[int] = []
    said: list[str] = []
    source, first = inspect.getsourcelines(UnitAverage.steps)
    after = first + next(number for number, line in enumerate(source) if ".copy_(" in line) + 1
    copied = [(file, line, n + 1) for (file, line), runs in lines.seen.items() if line == after for n in range(runs)]
    copied = [place for place in copied if place[0] == inspect.getsourcefile(UnitAverage)]
    assert len(copied) > 4
    for place in copied + shuffled(lines.seen, 3)[:count]:
        begin()
        with struck_at(place):
            work()
        assert torch.equal(paged.model.norm.running_mean, own["norm.running_mean"]), described(place, Struck)
        try:
            found = average_of(paged)
        except InterruptedStep as error:
            said.append(str(error))
            continue
        assert torch.is_grad_enabled(), described(place, Struck)
        assert same(paged.model.state_dict(), own), described(place, Struck)
        del found["norm.running_mean"]  # which the block writes to
        assert same(found, expected[paged.ema.updates]), described(place, Struck)
        made.append(paged.ema.updates)
    print(f"{made.count(2)} not made, {made.count(3)} made, {len(said)} raised")
    assert all("zero.rollback" in one for one in said)
    assert {2, 3} == set(made) or count < 100
    begin()


def with_something_due(paged: Paged) -> dict[str, torch.Tensor]:
    """Commit with updates of the optimizer and of the average that no unit has had; return the average."""
    for number in (5, 6):
        step(paged, number)
        paged.ema.update()
    zero.commit(paged.model, paged.optimizer)
    return average_of(paged)


@pytest.mark.parametrize("policy", [zero.Policy(), zero.Policy(torch.bfloat16)], ids=["as used", "stored as bf16"])
def test_a_model_that_is_divided_anew_has_the_average(tmp_path: Path, policy: zero.Policy) -> None:
    paged = Paged(tmp_path / "store", DECAY, True, "on_fetch", policy)
    expected = with_something_due(paged)
    paged.store.close()
    with TieredStore.open(tmp_path / "other", dram="2MiB") as store:
        model = zero.page(Small(), store, existing="continue", source=tmp_path / "store", policy=policy)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        ema = zero.EMA(model, DECAY)
        zero.resume(model, optimizer)
        assert ema.updates == 2
        with ema.applied():
            assert same(model.state_dict(), expected)
        assert zero.statistics(model).units != zero.statistics(paged.model).units


def test_the_average_at_rest(paged: Paged, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``tiered export --average`` and ``tiered ls``, where something is due yet."""
    bare = tmp_path / "bare"
    with TieredStore.open(bare, dram="1MiB") as store:
        zero.commit(zero.page(Small(), store))
    expected = with_something_due(paged)
    paged.store.close()
    assert main(["export", str(paged.folder), "--average", "--out", str(tmp_path / "out")]) == 0
    del expected["last.weight"]
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    assert main(["ls", str(paged.folder)]) == 0
    assert "  average  " in capsys.readouterr().out
    assert main(["export", str(bare), "--average", "--out", str(tmp_path / "none")]) == 1
    assert "has no average of its weights, which zero.EMA makes" in capsys.readouterr().err
    assert main(["export", str(paged.folder), "--average", "--format", "torch-dcp", "--out", str(tmp_path / "dcp")]) == 2
    assert "--average is for safetensors" in capsys.readouterr().err


def test_updates_and_blocks_in_inference_mode(paged: Paged) -> None:
    with torch.inference_mode():
        paged.ema.update()
        with paged.ema.applied():
            paged.model(batch(1))
    with paged.ema.applied():
        paged.model(batch(2))  # writes to the buffers of the average
    step(paged, 4)
    paged.ema.update()
    assert paged.ema.updates == 4


def test_autocast_keeps_no_weight_for_its_average(paged: Paged) -> None:
    paged.model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with paged.ema.applied():
            expected = paged.model(batch(1))
        with torch.no_grad():
            own = paged.model(batch(1))
        with paged.ema.applied():
            assert torch.equal(paged.model(batch(1)), expected)
        with torch.no_grad():
            assert torch.equal(paged.model(batch(1)), own)
    assert not torch.equal(own, expected)


def test_a_store_that_is_open_for_reading(paged: Paged) -> None:
    """A process beside the training evaluates the average, where the commit has all of it."""
    step(paged, 5)
    paged.ema.update()
    paged.optimizer.flush()
    expected = average_of(paged)
    zero.commit(paged.model, paged.optimizer)
    with TieredStore.open(paged.folder, dram="1MiB", access="read") as store:
        model = zero.page(Small(), store, existing="resume", paging=zero.Paging(largest_unit=600))
        ema = zero.EMA(model, DECAY)
        with ema.applied():
            assert same(model.state_dict(), expected)
        with pytest.raises(MisuseError, match="open for reading"):
            ema.update()


def test_an_average_that_is_due_in_a_store_for_reading_is_refused(paged: Paged) -> None:
    paged.optimizer.flush()
    paged.ema.update()
    zero.commit(paged.model, paged.optimizer)
    own = {name: value.clone() for name, value in paged.model.state_dict().items()}
    with TieredStore.open(paged.folder, dram="1MiB", access="read") as store:
        model = zero.page(Small(), store, existing="resume", paging=zero.Paging(largest_unit=600))
        assert same(model.state_dict(), own)
        with zero.EMA(model, DECAY).applied(), pytest.raises(MisuseError, match=r"optimizer\.flush\(\) before the commit"):
            model(batch(0))


def train_on(paged: Paged, steps: range, killed_in: int | None = None) -> None:
    for number in steps:
        step(paged, number)
        paged.ema.update()
        if number == killed_in:  # within a forward that takes values into the average
            paged.model.norm.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            forward(paged, number)
        zero.commit(paged.model, paged.optimizer)


def be_killed(folder: str) -> None:
    train_on(Paged(Path(folder), DECAY, True, "on_fetch"), range(6), killed_in=3)


def test_a_process_that_is_killed_is_gone_on_with(tmp_path: Path) -> None:
    program = f"from tests.zero import test_ema; test_ema.be_killed({str(tmp_path / 'killed')!r})"
    assert programs.run([sys.executable, "-c", program], cwd=programs.ROOT).returncode == -signal.SIGKILL
    whole = Paged(tmp_path / "whole", DECAY, True, "on_fetch")
    train_on(whole, range(6))
    killed = Paged(tmp_path / "killed", DECAY, True, "on_fetch", existing="resume")
    assert killed.ema.updates == 3
    train_on(killed, range(3, 6))
    assert same(average_of(killed), average_of(whole))
    assert same(killed.model.state_dict(), whole.model.state_dict())
    for one in (whole, killed):
        one.store.close()


def test_a_name_that_the_average_of_another_module_needs_is_refused(store: TieredStore) -> None:
    layers = nn.ModuleDict({"first": nn.Linear(2, 2), "first/average": nn.Linear(2, 2)})
    zero.page(layers, store)
    with pytest.raises(MisuseError, match="'first/average' has the key that the average of 'first' would have"):
        zero.EMA(layers, DECAY)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda record: record["average"].update(updates=0), "updates"),
        (lambda record: record["average"].update(decays=[[1, 0.5]]), "an average of 2 updates has had other ones"),
        (lambda record: record["average"].update(decays=[[2, 0.5], [1, 0.5]]), "an average of 2 updates has had other ones"),
        (lambda record: record["average"].update(decays=[[2, 1.5]]), "decays"),
        (lambda record: record["units"][0].update(averaged=3), "an average of 2 updates has had other ones"),
        (lambda record: record.pop("average"), "a unit has an average, and the model none"),
        (lambda record: None, "lacks 'model/param/first/average'"),
    ],
)
def test_a_record_of_an_average_that_cannot_be(paged: Paged, change: Callable[[Any], object], says: str) -> None:
    paged.optimizer.flush()
    zero.commit(paged.model, paged.optimizer)
    record = read_record(paged.store, "model")
    change(record)
    if says.startswith("lacks"):
        paged.store.delete("model/param/first/average", owner=model_named("model"))
    write_record(paged.store, "model", record)
    paged.store.commit()
    paged.store.close()
    with TieredStore.open(paged.folder, dram="1MiB") as store, pytest.raises(ManifestError, match=re.escape(says)):
        zero.page(Small(), store, existing="resume", paging=zero.Paging(largest_unit=600))


@pytest.mark.parametrize("how", ["asynchronously", "at the end of the block"])
def test_other_commits_have_the_average(tmp_path: Path, how: str) -> None:
    expected: dict[str, torch.Tensor] = {}
    memory = Memory(DECAY, False)
    for begun in (False, True):
        with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
            torch.manual_seed(1)
            model = zero.page(Small(), store, existing="continue", paging=zero.Paging(largest_unit=600))
            optimizer = zero.AdamW(model.parameters(), lr=1e-2)
            ema = zero.EMA(model, DECAY)
            zero.resume(model, optimizer)
            if begun:
                assert ema.updates == 3
                with ema.applied():
                    assert same(model.state_dict(), expected)
                return
            for number in range(3):
                for one in (memory, SimpleNamespace(model=model, optimizer=optimizer)):
                    step(one, number)
                ema.update()
                memory.averaged.update_parameters(memory.model)
            expected = memory.averaged.module.state_dict()
            if how == "asynchronously":
                made = zero.commit_async(model, optimizer)
                step(SimpleNamespace(model=model, optimizer=optimizer), 4)  # while the commit is written
                ema.update()
                forward(SimpleNamespace(model=model), 4)
                store.rollback(made.result())
                store.close()
