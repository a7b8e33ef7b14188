"""DeepSpeed's schedules: against their formulas written anew, against values of DeepSpeed's own classes, and as torch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tiered import MisuseError, zero
from tiered.integrations.deepspeed.config import Maker, examined
from tiered.integrations.deepspeed.schedules import SCHEDULES, scheduler_of

STEPS = (0, 1, 2, 4, 7, 9, 13, 18, 29)
"""After how many steps of the scheduler the rates below hold."""

# Learning rates of two param groups (which begin with 0.5 and 0.25) and the first of the betas, as the classes of DeepSpeed
# 0.19.8 set them.
THEIRS: list[tuple[Any, dict[str, Any], list[float], list[float], list[float]]] = [
    (
        zero.WarmupLR,
        {"warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": 7},
        [0.001, 0.001, 0.03626451152, 0.07152902305, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.001, 0.001, 0.03626451152, 0.07152902305, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.WarmupLR,
        {"warmup_num_steps": 7, "warmup_type": "linear"},
        [0.0, 0.0, 0.07142857143, 0.2142857143, 0.4285714286, 0.5, 0.5, 0.5, 0.5],
        [0.0, 0.0, 0.03571428571, 0.1071428571, 0.2142857143, 0.25, 0.25, 0.25, 0.25],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.WarmupLR,
        {"warmup_num_steps": 1, "warmup_max_lr": 0.3},
        [0.0, 0.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
        [0.0, 0.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.WarmupLR,
        {"warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [0.5, 0.7], "warmup_num_steps": 5},
        [0.0, 0.0, 0.215338279, 0.4306765581, 0.5, 0.5, 0.5, 0.5, 0.5],
        [0.1, 0.1, 0.3584059348, 0.6168118697, 0.7, 0.7, 0.7, 0.7, 0.7],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.WarmupDecayLR,
        {"total_num_steps": 20, "warmup_num_steps": 6, "warmup_max_lr": 0.2},
        [0.0, 0.0, 0.07737056145, 0.1547411229, 0.2, 0.1714285714, 0.1142857143, 0.04285714286, 0.0],
        [0.0, 0.0, 0.07737056145, 0.1547411229, 0.2, 0.1714285714, 0.1142857143, 0.04285714286, 0.0],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.WarmupDecayLR,
        {"total_num_steps": 5, "warmup_num_steps": 9, "warmup_max_lr": 0.2, "warmup_type": "linear"},
        [0.0, 0.0, 0.02222222222, 0.06666666667, 0.1333333333, 0.1777777778, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.02222222222, 0.06666666667, 0.1333333333, 0.1777777778, 0.0, 0.0, 0.0],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.WarmupCosineLR,
        {"total_num_steps": 20, "warmup_num_steps": 6},
        [0.0, 0.0, 0.1934264036, 0.3868528072, 0.4937326048, 0.4454633248, 0.250025, 0.02480530725, 5e-05],
        [0.0, 0.0, 0.09671320181, 0.1934264036, 0.2468663024, 0.2227316624, 0.1250125, 0.01240265362, 2.5e-05],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.WarmupCosineLR,
        {"total_num_steps": 20, "warmup_num_steps": 6, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05, "warmup_type": "linear"},
        [0.0, 0.05, 0.125, 0.275, 0.4940453791, 0.4481849771, 0.2625, 0.04851989387, 0.025],
        [0.0, 0.025, 0.0625, 0.1375, 0.2470226896, 0.2240924885, 0.13125, 0.02425994694, 0.0125],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.WarmupCosineLR,
        {"total_num_steps": 4, "warmup_num_steps": 6},
        [0.0, 0.0, 0.1934264036, 0.3868528072, 5e-05, 5e-05, 5e-05, 5e-05, 5e-05],
        [0.0, 0.0, 0.09671320181, 0.1934264036, 2.5e-05, 2.5e-05, 2.5e-05, 2.5e-05, 2.5e-05],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.LRRangeTest,
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0},
        [0.01, 0.01666666667, 0.02333333333, 0.03666666667, 0.05666666667, 0.07, 0.09666666667, 0.13, 0.2033333333],
        [0.01, 0.01666666667, 0.02333333333, 0.03666666667, 0.05666666667, 0.07, 0.09666666667, 0.13, 0.2033333333],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.LRRangeTest,
        {"lr_range_test_min_lr": [0.01, 0.2], "lr_range_test_step_size": 4, "lr_range_test_staircase": True},
        [0.01, 0.01, 0.01, 0.02, 0.02, 0.03, 0.04, 0.05, 0.08],
        [0.2, 0.2, 0.2, 0.4, 0.4, 0.6, 0.8, 1.0, 1.6],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
    (
        zero.OneCycle,
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5},
        [0.01, 0.028, 0.046, 0.082, 0.064, 0.028, 0.01, 0.01, 0.01],
        [0.01, 0.028, 0.046, 0.082, 0.064, 0.028, 0.01, 0.01, 0.01],
        [0.8, 0.88, 0.86, 0.82, 0.84, 0.88, 0.9, 0.9, 0.9],
    ),
    (
        zero.OneCycle,
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 8,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
            "cycle_min_mom": 0.85,
            "cycle_max_mom": 0.99,
        },
        [0.01, 0.028, 0.046, 0.082, 0.0775, 0.055, 0.01, 0.005454545455, 0.002727272727],
        [0.01, 0.028, 0.046, 0.082, 0.0775, 0.055, 0.01, 0.005454545455, 0.002727272727],
        [0.85, 0.962, 0.934, 0.878, 0.885, 0.92, 0.99, 1.155, 1.518],
    ),
    (
        zero.OneCycle,
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 9,
            "cycle_second_step_size": 6,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
        },
        [0.01, 0.01, 0.01, 0.04, 0.07, 0.1, 0.01, 0.01, 0.01],
        [0.01, 0.01, 0.01, 0.04, 0.07, 0.1, 0.01, 0.01, 0.01],
        [0.8, 0.9, 0.9, 0.8666666667, 0.8333333333, 0.8, 0.9, 0.9, 0.9],
    ),
    (
        zero.OneCycle,
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_momentum": False},
        [0.01, 0.0325, 0.055, 0.1, 0.0325, 0.01, 0.01, 0.01, 0.01],
        [0.01, 0.0325, 0.055, 0.1, 0.0325, 0.01, 0.01, 0.01, 0.01],
        [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
    ),
]


def optimizer_of(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    both = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return kind([{"params": [both[0]], "lr": 0.5}, {"params": [both[1]], "lr": 0.25}], lr=1.0)


def rates_of(kind: Any, params: dict[str, Any], steps: int) -> list[list[float]]:
    """Of each step: both learning rates, and the first of the betas."""
    optimizer = optimizer_of()
    scheduler = kind(optimizer, **params)
    found = []
    for _ in range(steps):
        optimizer.step()
        found.append([*(float(group["lr"]) for group in optimizer.param_groups), optimizer.param_groups[0]["betas"][0]])
        scheduler.step()
    return found


@pytest.mark.parametrize(("kind", "params", "first", "second", "betas"), THEIRS)
def test_it_has_the_values_of_deepspeeds_class(
    kind: Any, params: dict[str, Any], first: list[float], second: list[float], betas: list[float]
) -> None:
    found = rates_of(kind, params, max(STEPS) + 1)
    for at, *expected in zip(STEPS, first, second, betas, strict=True):
        assert found[at] == pytest.approx(expected, rel=1e-9, abs=1e-15), at


# -- formulas, by the iteration i; before the first one it is -1


def warmup(i: int, n: int, kind: str) -> float:
    return math.log(i + 1, n) if kind == "log" else i / n


def of_warmup(i: int, low: float, high: float, n: int, kind: str) -> float:
    if i < 0:
        return low
    return low + (high - low) * (1.0 if i >= n else warmup(i, n, kind))


def of_decay(i: int, low: float, high: float, n: int, kind: str, total: int) -> float:
    if i < n:
        return of_warmup(i, low, high, n, kind)
    return low + (high - low) * max(0.0, total - i) / max(1.0, total - n)


def of_cosine(i: int, base: float, n: int, kind: str, total: int, low: float, end: float) -> float:
    if i < 0:
        return 0.0
    if i < n:
        return base * (low + (1 - low) * warmup(i, n, kind))
    angle = math.pi * min(1.0, (i - n + 1) / max(1, total - n))
    return base * (end + (1 - end) * math.cos(angle / 2) ** 2)


def of_range(i: int, low: float, size: int, rate: float, stairs: bool) -> float:
    return low * (1 + rate * ((i + 1) // size if stairs else (i + 1) / size))


def of_cycle(i: int, low: float, high: float, up: int, down: int, size: int, decay: float) -> float:
    if i >= up + down:
        return low / (1 + decay * (i - up - down + 1) / size) if size else low
    at = (i + 1) % (up + down)
    return low + (high - low) * (at / up if at <= up else (up + down - at) / down)


@pytest.mark.parametrize("steps", [2, 3, 10])
@pytest.mark.parametrize("kind", ["log", "linear"])
def test_a_warmup_is_its_formula(steps: int, kind: str) -> None:
    params = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.3, "warmup_num_steps": steps, "warmup_type": kind}
    for at, (first, second, _) in enumerate(rates_of(zero.WarmupLR, params, 25)):
        assert first == second == pytest.approx(of_warmup(at - 1, 0.01, 0.3, steps, kind), rel=1e-12)
    for at, (first, *_) in enumerate(rates_of(zero.WarmupDecayLR, {**params, "total_num_steps": 17}, 25)):
        assert first == pytest.approx(of_decay(at - 1, 0.01, 0.3, steps, kind, 17), rel=1e-12)
    cosine = {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.05, "warmup_num_steps": steps, "warmup_type": kind}
    for at, (first, second, _) in enumerate(rates_of(zero.WarmupCosineLR, {**cosine, "total_num_steps": 17}, 25)):
        assert first == pytest.approx(of_cosine(at - 1, 0.5, steps, kind, 17, 0.2, 0.05), rel=1e-12)
        assert second == pytest.approx(first / 2, rel=1e-12)


@pytest.mark.parametrize("stairs", [False, True])
def test_a_range_test_is_its_formula(stairs: bool) -> None:
    params = {"lr_range_test_min_lr": 0.02, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.5}
    for at, (first, *_) in enumerate(rates_of(zero.LRRangeTest, {**params, "lr_range_test_staircase": stairs}, 20)):
        assert first == pytest.approx(of_range(at - 1, 0.02, 4, 0.5, stairs), rel=1e-12)


@pytest.mark.parametrize("size", [0, 3])
def test_a_cycle_is_its_formula(size: int) -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.2, "cycle_first_step_size": 5, "cycle_second_step_size": 7}
    more = {"decay_step_size": size, "decay_lr_rate": 0.4, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95}
    found = rates_of(zero.OneCycle, {**params, **more}, 25)
    for at, (first, _, beta) in enumerate(found):
        assert first == pytest.approx(of_cycle(at - 1, 0.01, 0.2, 5, 7, size, 0.4), rel=1e-12)
        if 0 < at <= 12:
            assert beta == pytest.approx(0.95 - 0.25 * (first - 0.01) / 0.19, rel=1e-9)
    assert found[0][2] == 0.7  # DeepSpeed begins at the other end
    assert found[20][2] == 0.95


def test_a_cycle_has_numbers_of_its_own_for_each_param_group() -> None:
    lists = {
        "cycle_min_lr": [0.01, 0.02],
        "cycle_max_lr": [0.2, 0.1],
        "cycle_min_mom": [0.7, 0.8],
        "cycle_max_mom": [0.9, 0.95],
    }
    one = optimizer_of()
    together = zero.OneCycle(one, **lists, cycle_first_step_size=3, decay_step_size=2, decay_lr_rate=0.5)
    others = [optimizer_of(), optimizer_of()]
    apart = [
        zero.OneCycle(
            other,
            **{name: both[at] for name, both in lists.items()},
            cycle_first_step_size=3,
            decay_step_size=2,
            decay_lr_rate=0.5,
        )
        for at, other in enumerate(others)
    ]
    for _ in range(10):
        for at, other in enumerate(others):
            assert {name: one.param_groups[at][name] for name in ("lr", "betas")} == {
                name: other.param_groups[at][name] for name in ("lr", "betas")
            }
        for optimizer, scheduler in zip((one, *others), (together, *apart), strict=True):
            optimizer.step()
            scheduler.step()
    for name in lists:
        with pytest.raises(MisuseError, match=f"{name} has 3 numbers, and the optimizer 2 param groups"):
            zero.OneCycle(optimizer_of(), **{"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, name: [0.1, 0.2, 0.3]})
    assert not examined({"train_batch_size": 1, "scheduler": {"type": "OneCycle", "params": lists}})[1]


def test_a_cycle_may_have_no_way_back() -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 0}
    assert [first for first, *_ in rates_of(zero.OneCycle, params, 7)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.1, 0.1, 0.1])


def test_a_cycle_without_betas_leaves_momentum_alone() -> None:
    optimizer = optimizer_of(torch.optim.SGD)
    scheduler = zero.OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=2)
    optimizer.step()
    scheduler.step()
    assert "betas" not in optimizer.param_groups[0]


PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 4},
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 3},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_goes_on_from_its_state(name: str) -> None:
    one, other = optimizer_of(), optimizer_of()
    scheduler = SCHEDULES[name](one, **PARAMS[name])
    for _ in range(5):
        one.step()
        scheduler.step()
    again = SCHEDULES[name](other, **PARAMS[name])
    other.load_state_dict(one.state_dict())
    again.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    for _ in range(5):
        assert [group["lr"] for group in one.param_groups] == [group["lr"] for group in other.param_groups]
        assert scheduler.get_last_lr() == [group["lr"] for group in one.param_groups]
        for optimizer, its in (one, scheduler), (other, again):
            optimizer.step()
            its.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_may_begin_anywhere(name: str) -> None:
    """After an iteration that is named, or by ``step`` with one."""
    optimizer, other, third = optimizer_of(), optimizer_of(), optimizer_of()
    scheduler: Any = SCHEDULES[name](optimizer, **PARAMS[name])
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    begun: Any = SCHEDULES[name](other, **PARAMS[name], last_batch_iteration=3)
    jumped: Any = SCHEDULES[name](third, **PARAMS[name])
    third.step()
    jumped.step(3)
    assert scheduler.last_batch_iteration == begun.last_batch_iteration == jumped.last_batch_iteration == 3
    assert scheduler.get_last_lr() == begun.get_last_lr() == jumped.get_last_lr()


@pytest.mark.parametrize(
    ("maker", "says"),
    [
        (Maker("WarmupLR", {"warmup_num_steps": -1}), "from 0 on"),
        (Maker("WarmupLR", {"warmup_type": "cubic"}), "'log' or 'linear'"),
        (Maker("WarmupLR", {"warmup_min_lr": [1.0]}), "1 numbers, and the optimizer 2 param groups"),
        (Maker("WarmupLR", {"steps": 1}), "has no 'steps'"),
        (Maker("WarmupDecayLR", {}), "total_num_steps"),
        (Maker("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_first_step_size": 0}), "above 0"),
        (Maker("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_second_step_size": -1}), "one from 0 on"),
        (Maker("LRRangeTest", {"lr_range_test_step_size": 0}), "at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_cannot_be(maker: Maker, says: str) -> None:
    with pytest.raises(MisuseError, match=says):
        scheduler_of(maker, optimizer_of())


def test_whole_numbers_may_be_written_as_floats() -> None:
    def of(steps: float) -> list[list[float]]:
        return rates_of(lambda optimizer: scheduler_of(Maker("WarmupLR", {"warmup_num_steps": steps}), optimizer), {}, 13)

    assert of(1e1) == rates_of(zero.WarmupLR, {"warmup_num_steps": 10}, 13)
    assert of(0) == of(1) == of(2), "a warm-up has two steps"
    assert of(0) != of(3)


def test_a_state_says_where_and_the_constructor_which_way() -> None:
    """As DeepSpeed's, and torch's LambdaLR. Another warm-up in the configuration is another one from the next step on."""
    optimizer, other = optimizer_of(), optimizer_of()
    scheduler: Any = zero.WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    optimizer.step()
    scheduler.step()
    scheduler.step()
    assert not {"warmup_num_steps", "max_lrs"} & scheduler.state_dict().keys()
    state = {**scheduler.state_dict(), "warmup_num_steps": 4, "max_lrs": [0.1, 0.1]}  # as it was written once
    again: Any = zero.WarmupLR(other, warmup_num_steps=10, warmup_type="linear")
    again.load_state_dict(state)
    assert (again.last_batch_iteration, again.warmup_num_steps, again.max_lrs) == (1, 10, [0.5, 0.25])
    assert not [name for name, value in state.items() if callable(value)]
    other.step()
    again.step()
    assert again.get_last_lr() == [0.5 * 2 / 10, 0.25 * 2 / 10]
