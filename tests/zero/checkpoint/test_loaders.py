"""What schedulers, scalers and generators say of themselves comes back through a record; what they cannot have is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from tiered import ManifestError, MisuseError
from tiered.zero.checkpoint.loaders import Loader, load_all, of_generator, of_random, of_stateful, random_states
from tiered.zero.record import dumps, loads


def adam() -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.ones(2)]}, {"params": [torch.ones(3)], "lr": 0.5}], lr=0.1)


def through_a_record(value: Any) -> Any:
    kept: dict[str, torch.Tensor] = {}

    def store(tensor: torch.Tensor) -> str:
        kept[str(len(kept))] = tensor
        return str(len(kept) - 1)

    return loads(dumps(value, "it", store), "it", kept.__getitem__)


class Growing(schedulers.LRScheduler):
    """Of somebody else: its attributes become other things."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.history: list[float] = []
        self.best: Any = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.history.append(1.0)
        self.best = None if self.last_epoch > 1 else "none"
        return [group["lr"] for group in self.optimizer.param_groups]


class Factor:
    def __init__(self) -> None:
        self.seen: Any = None

    def __call__(self, epoch: int) -> float:
        self.seen = epoch
        return 1 / (1 + epoch)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, [Factor(), lambda epoch: 0.9**epoch]),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: schedulers.StepLR(o, 2),
    "milestones": lambda o: schedulers.MultiStepLR(o, [1, 2, 2]),
    "constant": lambda o: schedulers.ConstantLR(o),
    "linear": lambda o: schedulers.LinearLR(o),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: schedulers.OneCycleLR(o, [0.1, 0.5], total_steps=9),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "cyclic of one's own": lambda o: schedulers.CyclicLR(o, 0.1, 0.5, scale_fn=Factor(), cycle_momentum=False),
    "one after another": lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o), schedulers.StepLR(o, 2)], [2]),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o),
    "somebody else's": Growing,
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_each_of_torchs_schedulers_takes_over_its_own(kind: str) -> None:
    old = SCHEDULERS[kind](adam())
    for loss in 3.0, 1.0, 2.0, 4.0:
        old.step(loss) if kind == "plateau" else old.step()
    fresh = SCHEDULERS[kind](adam())
    before, names = through_a_record(fresh.state_dict()), set(vars(fresh))
    loader = of_stateful(fresh, through_a_record(old.state_dict()), "scheduler=")
    load_all([loader])
    assert through_a_record(fresh.state_dict()) == through_a_record(old.state_dict())
    loader.undo()
    assert through_a_record(fresh.state_dict()) == before
    assert set(vars(fresh)) == names


@pytest.mark.parametrize(
    "changes",
    [
        *({"last_epoch": "3"}, {"last_epoch": float("nan")}, {"base_lrs": [0.1]}, {"base_lrs": 3}),
        *({"step": 3}, {3: 3}, {"T_max": None}),
    ],
)
def test_what_no_scheduler_has(changes: dict[Any, Any]) -> None:
    scheduler = SCHEDULERS["cosine"](adam())
    before = scheduler.state_dict()
    with pytest.raises(ManifestError, match="of scheduler=, which a CosineAnnealingLR does not have"):
        of_stateful(scheduler, {**before, **changes}, "scheduler=")
    with pytest.raises(ManifestError, match="which is no state of a CosineAnnealingLR"):
        of_stateful(scheduler, {"last_epoch": 3}, "scheduler=")
    assert scheduler.state_dict() == before


def test_generators_are_tried_before_they_are_changed() -> None:
    generator = torch.Generator().manual_seed(3)
    with pytest.raises(ManifestError, match="a random state that data= does not take"):
        of_generator(generator, torch.zeros(3, dtype=torch.uint8))
    here, states = generator.get_state(), through_a_record(random_states())
    for what, value in (("python", (3, ("x",), None)), ("torch", torch.ones(3)), ("numpy", (1, 2))):
        with pytest.raises(ManifestError, match="a random state that"):
            of_random({**states, what: value})
    with pytest.raises(ManifestError, match="for a number of Python's random generator"):
        of_random({**states, "python": (*states["python"][:2], "x")})
    assert torch.equal(generator.get_state(), here)
    numbers = random.random(), np.random.rand(), torch.rand(())
    load_all([of_random(states)])
    assert (random.random(), np.random.rand(), torch.rand(())) == numbers


def test_all_of_them_or_none() -> None:
    done: list[str] = []

    def named(name: str) -> Loader:
        return Loader(name, lambda: done.append(name), lambda: done.remove(name))

    load_all([named("a"), named("b")])
    assert done == ["a", "b"]
    done.clear()
    errors: list[BaseException] = [ValueError("no"), KeyboardInterrupt(), MisuseError("x")]
    for error, raised in zip(errors, (MisuseError, KeyboardInterrupt, MisuseError), strict=True):

        def failing(error: BaseException = error) -> None:
            raise error

        with pytest.raises(raised):
            load_all([named("a"), named("b"), Loader("c", failing, lambda: None)])
        assert done == []
