"""fp16 with its loss scale, bf16 and autocast under an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed.training import Net, batch, engine_of, equal, made, plain, train
from tiered import MisuseError, TieredError, TieredStore, zero
from tiered.integrations.deepspeed.config import LossScaling
from tiered.integrations.deepspeed.loss_scale import LossScale

FP16: dict[str, Any] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 2}
ONE_PASS: dict[str, Any] = {"gradient_accumulation_steps": 1}


def scales(overflows: str, **settings: Any) -> list[float]:
    """The scale after each step; "x" is one that overflows."""
    scale = LossScale(LossScaling(enabled=True, **{"initial_scale_power": 4, "loss_scale_window": 3, **settings}))
    found = []
    for one in overflows:
        scale.updated(one == "x")
        found.append(scale.scale)
    return found


@pytest.mark.parametrize(
    ("overflows", "settings", "expected"),
    [
        ("....", {}, [16, 16, 16, 32]),  # more than a window after the beginning, which counts as an overflow
        ("........", {}, [16, 16, 16, 32, 32, 32, 64, 64]),
        ("xxx", {"hysteresis": 2}, [16, 8, 4]),  # the first one is used up, then each one halves
        ("xx....x", {"hysteresis": 2}, [16, 8, 8, 8, 8, 16, 16]),  # refilled when the scale grew
        ("x.x.x.", {"hysteresis": 2}, [16, 16, 8, 8, 4, 4]),  # and not by one good step
        ("x.x.x.", {"hysteresis": 2, "consecutive_hysteresis": True}, [16] * 6),
        ("xxxx", {"hysteresis": 1, "min_loss_scale": 4}, [8, 4]),
        ("x.x", {"loss_scale": 7.0}, [7, 7, 7]),
    ],
)
def test_what_an_overflow_does_to_the_scale(overflows: str, settings: dict[str, Any], expected: list[float]) -> None:
    if len(expected) < len(overflows):
        with pytest.raises(TieredError, match="overflow at the smallest loss scale, 4"):
            scales(overflows, **settings)
    assert scales(overflows[: len(expected)], **settings) == expected


def test_a_state_of_the_scale() -> None:
    one = LossScale(LossScaling(enabled=True))
    for overflow in (True, False, True, True):
        one.updated(overflow)
    other = LossScale(LossScaling(enabled=True))
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    for wrong in ({}, {**one.state_dict(), "scale": math.inf}, {**one.state_dict(), "left": "2"}):
        with pytest.raises(MisuseError, match="for the loss scale"):
            other.load_state_dict(wrong)
    fixed = LossScale(LossScaling())
    fixed.load_state_dict(one.state_dict())
    assert fixed.scale == 1.0


class Exploding(Net):
    """The gradient overflows in the passes that ``at`` names."""

    at: tuple[int, ...] = ()
    calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        found = super().forward(x, y)
        if y is not None and self.training:
            self.calls += 1
            found = found * (math.inf if self.calls in self.at else 1.0)
        return found


def exploding(*at: int) -> Exploding:
    torch.manual_seed(0)
    model = Exploding()
    model.at = at
    return model


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_step_that_overflows_is_skipped(tmp_path: Path, dtype: str) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_num_steps": 10, "warmup_max_lr": 0.01}}
    narrow = {"fp16": FP16} if dtype == "fp16" else {"bf16": {"enabled": True}}
    engine = engine_of(tmp_path, exploding(2, 3, 4), scheduler=schedule, **ONE_PASS, **narrow)
    seen = []
    for number in range(7):
        before = engine.module_state_dict()
        engine.backward(engine(*batch(number)))
        engine.step()
        after = engine.module_state_dict()
        same = {name: torch.equal(before[name], after[name]) for name in before if name not in ("seen", "body.2.bias")}
        assert engine.was_step_applied() is not all(same.values())
        seen.append((engine.was_step_applied(), engine.skipped_steps, engine.loss_scale(), engine.get_global_grad_norm()))
    assert [applied for applied, *_ in seen] == [True, False, False, False, True, True, True]
    assert [skipped for _, skipped, *_ in seen] == [0, 1, 2, 3, 3, 3, 3]
    expected = [256.0, 256.0, 128.0, 64.0, 64.0, 64.0, 128.0] if dtype == "fp16" else [1.0] * 7
    assert [scale for _, _, scale, _ in seen] == expected
    assert [norm is None for *_, norm in seen] == [False, True, True, True, False, False, False]
    assert engine.global_steps == 7
    assert engine.lr_scheduler.last_batch_iteration == 3
    engine.destroy()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_it_trains_as_the_same_loop_of_zero(tmp_path: Path, dtype: str) -> None:
    """Gradients are unscaled, clipped in fp32, and applied to fp32 masters, as zero.GradScaler has it."""
    narrow: dict[str, Any] = {"fp16": {**FP16, "loss_scale_window": 1000}} if dtype == "fp16" else {"bf16": {"enabled": True}}
    engine = engine_of(tmp_path, **narrow)
    seen = train(engine)
    with TieredStore.open(tmp_path / "other", dram="1MiB") as store:
        model: Any = zero.page(made().to(torch.float16 if dtype == "fp16" else torch.bfloat16), store)
        optimizer = zero.AdamW((p for p in model.parameters() if p.requires_grad), 1e-2, weight_decay=0.1)
        scaler = zero.GradScaler(init_scale=256.0 if dtype == "fp16" else 1.0)
        expected = []
        for number in range(8):
            loss = model(*batch(number))
            scaler.scale((loss / 2).float() if dtype == "fp16" else loss / 2).backward()
            expected.append(loss.item())
            if number % 2:
                scaler.unscale_(optimizer)
                norm = optimizer.clip_grad_norm_(0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                expected += [norm.item(), 1e-2]
        assert seen == expected
        assert equal(engine.module_state_dict(), dict(model.state_dict()))
        store.close()
    engine.destroy()


def test_the_scale_is_in_a_checkpoint(tmp_path: Path) -> None:
    def engine_at(seed: int) -> zero.Engine:
        return engine_of(tmp_path, exploding(2, 3), fp16=FP16, **ONE_PASS)

    engine = engine_at(0)
    train(engine, passes=4)
    engine.save_checkpoint(tmp_path / "saved")
    rest = train(engine, 4, 4)
    scale = engine.loss_scale()
    engine.destroy()
    engine = engine_at(1)
    engine.load_checkpoint(tmp_path / "saved")
    assert (engine.loss_scale(), engine.skipped_steps) == (128.0, 2)
    engine.module.at = ()
    assert train(engine, 4, 4) == rest
    assert engine.loss_scale() == scale
    engine.destroy()


def test_fp16_that_diverges_raises(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, exploding(1, 2, 3), fp16={**FP16, "hysteresis": 1, "min_loss_scale": 128}, **ONE_PASS)
    train(engine, passes=1)
    with pytest.raises(TieredError, match="overflow at the smallest loss scale, 128: lower the learning rate"):
        train(engine, passes=1)
    engine.destroy()


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True, "check_grad_overflow": False}}])
def test_an_infinite_gradient_that_is_not_checked_raises(tmp_path: Path, more: dict[str, Any]) -> None:
    engine = engine_of(tmp_path, exploding(1), gradient_clipping=0, **ONE_PASS, **more)
    with pytest.raises(MisuseError, match="is not finite"):
        train(engine, passes=1)
    engine.destroy()


@pytest.mark.parametrize("cast", [True, False])
def test_inputs_are_converted_where_it_is_asked(tmp_path: Path, cast: bool) -> None:
    seen: list[torch.dtype] = []

    class Typed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: dict[str, Any]) -> torch.Tensor:
            seen.extend([x["a"][0].dtype, x["a"][1].dtype])
            return self.linear(x["a"][0].half())  # type: ignore[no-any-return]

    engine = engine_of(tmp_path, Typed(), fp16={**FP16, "auto_cast": cast})
    engine({"a": (torch.ones(2, 4), torch.ones(2, dtype=torch.int64))})
    assert seen == [torch.float16 if cast else torch.float32, torch.int64]
    engine.destroy()


def test_buffers_may_have_a_type_of_their_own(tmp_path: Path) -> None:
    for number, (said, dtype) in enumerate({None: torch.bfloat16, "fp32": torch.float32}.items()):
        engine = engine_of(
            tmp_path / str(number), bf16={"enabled": True}, **({"data_types": {"buffer_dtype": said}} if said else {})
        )
        assert engine.module.seen.dtype == dtype
        assert engine.module.embed.weight.dtype == torch.bfloat16
        engine.destroy()


def test_autocast(tmp_path: Path) -> None:
    class Autocast(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, y)

    torch.manual_seed(0)
    reference = Autocast()
    engine = engine_of(tmp_path, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    optimizer = torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True)
    assert train(engine) == plain(reference, optimizer)
    assert equal(engine.module_state_dict(), reference.state_dict())
    engine.destroy()


def test_the_norm_is_there_where_it_is_asked_for(tmp_path: Path) -> None:
    norms: list[Callable[[], float | None]] = []
    for number, more in enumerate(({}, {"zero_optimization": {"compute_grad_norm": True}})):
        engine = engine_of(tmp_path / str(number), gradient_clipping=0.0, **more)
        train(engine, passes=2)
        norms.append(engine.get_global_grad_norm)
        engine.destroy()
    reference = made()
    for number in range(2):
        (reference(*batch(number)) / 2).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    assert [norm() for norm in norms] == [None, float(expected)]
