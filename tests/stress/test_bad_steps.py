"""Promise 15: an exception in a step, or NaN or infinity in it, leaves state byte for byte as it was, and nothing leased.

A model trains beside its twin in memory. Now and then a step is bad: an exception strikes in a hook, in forward, in backward,
in the optimizer, at the disk; or a gradient is not finite, with clipping and loss scaling and without. ``zero_grad`` follows,
or ``rollback`` where units are updated within backward. The twin leaves that step out (with loss scaling it has the same
infinity, and torch's scaler leaves it out). Then all the bytes in the store, parameters and states are those of before, and
training goes on with the bits of the twin.
"""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quick import quick
from tests.stress.contents import evict_all
from tests.stress.tally import Tally, counts
from tests.zero.harness import equal
from tests.zero.models import Tied, parameter_groups
from tests.zero.narrow import MasterAdamW, Narrow
from tests.zero.paging.splitting import Language, split_in_memory
from tiered import Eviction, MisuseError, TieredError, TieredStore, zero
from tiered.io.posix import PosixBackend
from tiered.types import IOCompletion, IORequest, Operation

PROMISE = "15 (a bad step)"
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
INFINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """The models are too small for more than one thread; and collections need only look at what is made from here on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


class Broken(Exception):
    """As a test wants it."""


class Disk(PosixBackend):
    """From the ``allowed``-th read on, none succeeds (None: all do)."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: int | None = None
        self.failed = 0
        self._bad: set[int] = set()

    def submit(self, batch: Sequence[IORequest]) -> int:
        taken = super().submit(batch)
        for request in batch[:taken]:
            if request.operation is Operation.READ and self.allowed is not None:
                self.allowed -= 1
                if self.allowed < 0:
                    self._bad.add(request.tag)
        return taken

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        found = super().reap(min_events, timeout)
        bad = {one.tag for one in found} & self._bad if self.allowed is not None else set()
        self._bad -= {one.tag for one in found}
        self.failed += len(bad)
        return [IOCompletion(one.tag, -errno.EIO) if one.tag in bad else one for one in found]


class Side:
    """A model and what trains it: ours, or the twin in memory."""

    def __init__(self, model: Any, optimizer: Any, scaler: torch.amp.GradScaler) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler

    def clip(self, strict: bool) -> torch.Tensor:
        if isinstance(self.optimizer, zero.AdamW):
            return self.optimizer.clip_grad_norm_(0.5, error_if_nonfinite=strict)
        place = {parameter: number for number, parameter in enumerate(self.model.parameters())}
        of = {master: parameter for parameter, master in getattr(self.optimizer, "pairs", [])}
        graded = [p for group in self.optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(sorted(graded, key=lambda p: place[of.get(p, p)]), 0.5, error_if_nonfinite=strict)

    def step(
        self, number: int, way: str, *, strict: bool = False, factor: float = 1.0, last: Callable[[], object] = int
    ) -> list[float]:
        """Of two batches, one where updates come within backward. ``last`` is called before ``optimizer.step()``."""
        seen = []
        self.optimizer.zero_grad()
        for seed in (2 * number, 2 * number + 1)[: 1 if way == "in backward" else 2]:
            torch.manual_seed(seed)  # of dropout
            loss = self.model.loss(seed) / 2 * factor
            (self.scaler.scale(loss) if "scaled" in way else loss).backward()
            seen.append(loss.item())
        last()
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.widen()
        if "scaled" in way:
            self.scaler.unscale_(self.optimizer)
        if "clipped" in way:
            seen.append(self.clip(strict).item())
        if "scaled" in way:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        return seen

    def moments(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        state = self.optimizer.state_dict()["state"]
        return [(state[number]["exp_avg"], state[number]["exp_avg_sq"]) for number in sorted(state)]


class Trial:
    """``ways``: how its steps may be. ``bad``: of the next step, whether something has struck."""

    def __init__(self, folder: Path, kind: str, seed: int, update: str) -> None:
        self.source, self.kind = random.Random(f"{kind} {seed}"), kind
        torch.manual_seed(seed)
        make: dict[str, Callable[[], Any]] = {"split": Language, "narrow": Narrow}
        reference = make.get(kind, partial(Tied, width=64, mode=kind if kind in ("checkpoint", "reentrant") else "plain"))()
        model, storage = copy.deepcopy(reference), torch.bfloat16 if kind == "stored as bf16" else None
        self.disk = Disk()
        self.store = TieredStore.open(folder, dram="1.25MiB", backend=lambda: self.disk, eviction=Eviction(deadline=20))
        policy = zero.Policy() if storage is None else zero.Policy(storage)
        zero.page(model, self.store, policy=policy, micro_batch=2 if kind == "split" else 1)
        if kind == "split":
            split_in_memory(reference, zero.statistics(model).split, 2)
        narrow = storage is not None or kind == "narrow"
        groups, theirs = parameter_groups(reference), torch.optim.AdamW
        twin = MasterAdamW(groups, storage, lr=1e-3) if narrow else theirs(groups, lr=1e-3, fused=True)  # type: ignore[arg-type]
        ours = zero.AdamW(parameter_groups(model), lr=1e-3, update=update)
        self.ours = Side(model, ours, zero.GradScaler(init_scale=2.0**8, growth_interval=3))
        self.twin = Side(reference, twin, torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3))
        self.ways = ["plain", "scaled", "scaled, clipped"] + ["clipped"] * (kind != "narrow")
        if update == "in_backward":
            self.ways = ["in backward"]
        self.number, self.fired = 0, 0
        self.step()
        self.computed: list[str] = []
        handles = [m.register_forward_hook(lambda *_, n=n: self.computed.append(n)) for n, m in model.named_modules() if n]
        model.loss(0)
        for handle in handles:
            handle.remove()
        self.graded = [name for name, p in reference.named_parameters() if p.grad is not None]

    def step(self) -> None:
        """A good one."""
        way, self.number = self.source.choice(self.ways), self.number + 1
        assert self.ours.step(self.number, way) == self.twin.step(self.number, way), f"step {self.number}, {way}"

    def check(self) -> None:
        assert equal(self.ours.model.state_dict(), self.twin.model.state_dict())
        for ours, theirs in zip(self.ours.moments(), self.twin.moments(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    def raw(self) -> dict[str, bytes]:
        """All that the store has."""
        return {key: self.store.get(key).reshape(-1).view(torch.uint8).numpy().tobytes() for key in self.store}

    def nothing_is_held(self, what: str) -> None:
        """No lease, and no alias of what a lease gave."""
        gc.collect()
        self.store.statistics()  # which hears of aliases that are gone
        with self.store._engine.lock:
            state = self.store._engine.state
            held = [copy.key for place in state.pools[:1] for copy in place.holders()]
        assert not held, f"after {what}"

    def in_flight(self) -> bool:
        with self.store._engine.lock:
            return any(entry.in_flight for entry in self.store._engine.state.directory.entries())

    def shuffled(self, all_of: Iterable[str], count: int) -> list[str]:
        """So many kinds of bad steps, each as often as the others. torch clips mixed types only where they were unscaled."""
        whats = [what for what in all_of if self.kind != "narrow" or "clipp" not in what or "scaled" in what]
        self.source.shuffle(whats)
        return list(itertools.islice(itertools.cycle(whats), count))

    # -- what makes a step bad -----------------------------------------------------------------------------------------------

    def module(self) -> Any:
        return self.ours.model.get_submodule(self.source.choice(self.computed))

    def striking(self, calls: int) -> Callable[..., None]:
        """At one of its first ``calls`` calls it raises."""
        moment, error = self.source.randint(1, calls), self.source.choice([Broken, KeyboardInterrupt])
        called = itertools.count(1)

        def strike(*_: object) -> None:
            if next(called) == moment:
                self.fired += 1
                raise error

        return strike

    @property
    def batches(self) -> int:
        return 1 if self.ways == ["in backward"] else 2


def spoiling(place: int, value: float, moment: int, spoiled: Callable[[], object]) -> Callable[[torch.Tensor], Any]:
    """One element of a gradient, at call number ``moment``."""
    called = itertools.count(1)

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        if next(called) != moment:
            return None
        spoiled()
        found = gradient.contiguous().clone()
        found.view(-1)[place] = value
        return found

    return spoil


Bad = Callable[[Trial], "AbstractContextManager[tuple[str, dict[str, Any]]]"]
"""Gives the way of the step, and what else ``Side.step`` is called with."""


@contextmanager
def in_a_module(trial: Trial, register: str) -> Iterator[tuple[str, dict[str, Any]]]:
    handle = getattr(trial.module(), register)(trial.striking(trial.batches))
    yield trial.source.choice(trial.ways), {}
    handle.remove()


@contextmanager
def at_a_gradient(trial: Trial, register: str) -> Iterator[tuple[str, dict[str, Any]]]:
    parameter = trial.ours.model.get_parameter(trial.source.choice(trial.graded))
    handle = getattr(parameter, register)(trial.striking(trial.batches))
    yield trial.source.choice(trial.ways), {}
    handle.remove()


@contextmanager
def between(trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    yield trial.source.choice(trial.ways), {"last": trial.striking(1)}


@contextmanager
def before_the_optimizer(trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    handle = trial.ours.optimizer.register_step_pre_hook(trial.striking(1))
    yield "plain", {}
    handle.remove()


@contextmanager
def at_the_disk(trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    evict_all(trial.store)
    before, trial.disk.allowed = trial.disk.failed, trial.source.randrange(12)
    yield trial.source.choice(trial.ways), {}
    trial.disk.allowed = None
    while trial.in_flight():  # who asked for it now would be told of an error of before
        os.sched_yield()
    trial.fired += trial.disk.failed > before


@contextmanager
def not_finite(trial: Trial, way: str, strict: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """One element of one gradient."""
    name, value = trial.source.choice(trial.graded), trial.source.choice(INFINITE)
    moment = trial.source.randint(1, trial.batches)
    handles = []

    def spoiled() -> None:
        trial.fired += 1

    for side, told in ((trial.ours, spoiled), (trial.twin, int)):
        parameter = side.model.get_parameter(name)
        handles.append(parameter.register_hook(spoiling(7 % parameter.numel(), value, moment, told)))
    yield way, {"strict": strict}
    for handle in handles:
        handle.remove()


@contextmanager
def loss_not_finite(trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    way = trial.source.choice([way for way in trial.ways if "scaled" not in way])
    yield way, {"factor": trial.source.choice(INFINITE)}
    trial.fired += 1


@contextmanager
def assigned(trial: Trial) -> Iterator[tuple[str, dict[str, Any]]]:
    parameter = trial.ours.model.get_parameter(trial.source.choice(trial.graded))
    value = trial.source.choice(INFINITE)

    def assign() -> None:
        parameter.grad = torch.full(parameter.shape, value, dtype=parameter.dtype)
        trial.fired += 1

    yield "plain", {"last": assign}


EXCEPTIONS: dict[str, Bad] = {
    "an exception before a module": partial(in_a_module, register="register_forward_pre_hook"),
    "an exception after a module": partial(in_a_module, register="register_forward_hook"),
    "an exception in a module's backward": partial(in_a_module, register="register_full_backward_hook"),
    "an exception at a gradient": partial(at_a_gradient, register="register_hook"),
    "an exception after a gradient": partial(at_a_gradient, register="register_post_accumulate_grad_hook"),
    "reads that fail": at_the_disk,
}
ON_FETCH: dict[str, Bad] = {
    **EXCEPTIONS,
    "an exception before step()": between,
    "an exception in step()": before_the_optimizer,
    "a gradient": partial(not_finite, way="plain"),
    "a gradient, clipped": partial(not_finite, way="clipped"),
    "a gradient, refused by clipping": partial(not_finite, way="clipped", strict=True),
    "a gradient, scaled": partial(not_finite, way="scaled"),
    "a gradient, scaled and clipped": partial(not_finite, way="scaled, clipped"),
    "the loss": loss_not_finite,
    "a gradient that was assigned": assigned,
}
IN_BACKWARD: dict[str, Bad] = {
    **EXCEPTIONS,
    "a gradient, in backward": partial(not_finite, way="in backward"),
    "the loss": loss_not_finite,
}
EXPECTED = (Broken, KeyboardInterrupt, MisuseError, RuntimeError, TieredError)


def bad_step(trial: Trial, what: str, bad: Bad) -> None:
    """It raises, but where loss scaling leaves it out by itself."""
    for _ in range(20):
        trial.number += 1
        before, said, skipped = trial.fired, "", what.startswith("a gradient, scaled")
        with bad(trial) as (way, options):
            try:
                trial.ours.step(trial.number, way, **options)
            except EXPECTED as error:
                said = f"{type(error).__name__}: {error}"
                assert not isinstance(error, MisuseError) or "is not finite" in said, said
                assert type(error) is not RuntimeError or "non-finite" in said or "not finite" in said, said
            else:
                if skipped:  # the twin has it, too
                    trial.twin.step(trial.number, way, **options)
                    assert trial.ours.scaler.get_scale() == trial.twin.scaler.get_scale()
        if said or skipped:
            return
        assert what == "reads that fail", f"{what} struck, and nobody noticed"
        trial.fired = before  # what failed was a hint, and the step was a good one
        trial.twin.step(trial.number, way)
    raise AssertionError("reads fail, and no step does")


@pytest.mark.parametrize(
    "kind", quick(["plain", "checkpoint", "reentrant", "split", "stored as bf16", "narrow"], ["plain", "split", "narrow"])
)
@counts(1, 45)
def test_it_is_as_if_it_had_not_been(tmp_path: Path, kind: str, count: int, tally: Tally) -> None:
    """Half of them with the updates of the step before still pending."""
    trial = Trial(tmp_path / "state", kind, count, "on_fetch")
    for at, what in enumerate(trial.shuffled(ON_FETCH, count)):
        trial.step()
        before = None
        if at % 2:
            trial.ours.optimizer.flush()
            trial.ours.optimizer.zero_grad()
            before = trial.raw()
        fired = trial.fired
        bad_step(trial, what, ON_FETCH[what])
        trial.ours.optimizer.zero_grad()
        tally.count(what, trial.fired - fired)
        trial.nothing_is_held(what)
        if before is not None and what != "reads that fail":  # which steps that were good may have come before
            assert trial.raw() == before, what
        trial.check()
    trial.step()
    trial.check()
    trial.store.close()


@pytest.mark.parametrize("kind", quick(["plain", "checkpoint", "stored as bf16"], ["checkpoint"]))
@counts(1, 30)
def test_within_backward_it_is_rolled_back(tmp_path: Path, kind: str, count: int, tally: Tally) -> None:
    trial = Trial(tmp_path / "state", kind, count, "in_backward")
    for what in trial.shuffled(IN_BACKWARD, count):
        trial.step()
        model, optimizer = trial.ours.model, trial.ours.optimizer
        zero.commit(model, optimizer)
        fired = trial.fired
        bad_step(trial, what, IN_BACKWARD[what])
        zero.rollback(model, optimizer)
        tally.count(what, trial.fired - fired)
        trial.nothing_is_held(what)
        trial.check()
    trial.step()
    trial.check()
    trial.store.close()
