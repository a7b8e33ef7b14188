"""zero.GradScaler does what torch.amp.GradScaler does, bit for bit, steps that overflow included."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.zero.harness import equal
from tests.zero.models import SIZES, Tied, parameter_groups
from tests.zero.narrow import MasterAdamW, Narrow
from tiered import MisuseError, TieredStore, zero

STEPS = 19


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    clip: Callable[[], torch.Tensor] | None,
    widen: Callable[[], None] = lambda: None,
) -> list[object]:
    """Losses, norms and the scaler's state. With ``clip``, gradients are unscaled before it."""
    seen: list[object] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            loss = model.loss(2 * step + micro)  # type: ignore[operator]
            scaler.scale(loss / 2 * (2.0**40 if step % 5 == 3 else 1)).backward()  # now and then, it overflows
            seen.append(loss.item())
        widen()
        if clip is not None and step % 7 != 6:
            scaler.unscale_(optimizer)
            seen.append(str(clip().item()))
        scaler.step(optimizer)
        scaler.update()
        for group in optimizer.param_groups:  # a scheduler would warn when the first steps are skipped
            group["lr"] *= 0.95
        seen.append(copy.deepcopy(scaler.state_dict()))
    return seen


def skipped(seen: list[object]) -> int:
    scales = [entry["scale"] for entry in seen if isinstance(entry, dict)]
    return sum(after < before for before, after in itertools.pairwise(scales))


@pytest.mark.parametrize(
    ("clipped", "made"),
    quick([(False, zero.GradScaler), (True, zero.GradScaler), (True, torch.amp.GradScaler)], [(True, torch.amp.GradScaler)]),
    ids=["plain", "clipped", "clipped by torch"],
)
def test_fp32_like_torch(store: TieredStore, clipped: bool, made: type[torch.amp.GradScaler]) -> None:
    torch.manual_seed(0)
    reference = Tied(*SIZES["plain"])
    paged = copy.deepcopy(reference)
    options = {"init_scale": 2.0**110, "growth_factor": 2.0**4, "backoff_factor": 2.0**-5, "growth_interval": 2}
    fused = torch.optim.AdamW(parameter_groups(reference), lr=1e-3, fused=True)
    clips = (
        [
            lambda: torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5),
            lambda: (
                torch.nn.utils.clip_grad_norm_(paged.parameters(), 0.5)
                if made is torch.amp.GradScaler
                else optimizer.clip_grad_norm_(0.5)
            ),
        ]
        if clipped
        else [None, None]
    )
    expected = train(reference, fused, torch.amp.GradScaler("cpu", **options), clips[0])
    assert skipped(expected) > 3
    zero.page(paged, store)
    optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
    assert train(paged, optimizer, made("cpu", **options), clips[1]) == expected
    assert equal(reference.state_dict(), paged.state_dict())
    for index, state in fused.state_dict()["state"].items():
        assert equal(state, optimizer.state_dict()["state"][index])


@pytest.mark.parametrize("clipped", [False, True], ids=["plain", "clipped"])
def test_bf16_and_fp16_like_torch_on_fp32_masters(store: TieredStore, clipped: bool) -> None:
    torch.manual_seed(0)
    reference = Narrow()
    paged = copy.deepcopy(reference)
    options = {"init_scale": 2.0**24, "growth_factor": 2.0**4, "backoff_factor": 2.0**-3, "growth_interval": 2}
    masters = MasterAdamW(parameter_groups(reference), lr=1e-3)
    order = {id(master): parameter for parameter, master in masters.pairs}
    index = {id(parameter): number for number, parameter in enumerate(reference.parameters())}
    whole = [master for group in masters.param_groups for master in group["params"]]
    whole.sort(key=lambda master: index[id(order.get(id(master), master))])
    clip = (lambda: torch.nn.utils.clip_grad_norm_(whole, 0.5)) if clipped else None
    expected = train(reference, masters, torch.amp.GradScaler("cpu", **options), clip, masters.widen)
    assert skipped(expected) > 3
    zero.page(paged, store)
    optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
    ours = train(paged, optimizer, zero.GradScaler(**options), (lambda: optimizer.clip_grad_norm_(0.5)) if clipped else None)
    assert ours == expected
    assert equal(reference.state_dict(), paged.state_dict())


def test_small_fp16_gradients_survive_being_unscaled(store: TieredStore) -> None:
    """1e-9 is nothing in fp16. Scaled it is something, and stays so."""
    model = zero.page(nn.Linear(4, 4, bias=False).half(), store)
    optimizer = zero.AdamW(model.parameters(), lr=1e-3, eps=1e-12)
    scaler = zero.GradScaler(init_scale=2.0**16)
    scaler.scale(model(torch.full((1, 4), 1e-3).half()).float().sum() * 1e-6).backward()
    scaler.unscale_(optimizer)
    norm = optimizer.clip_grad_norm_(1.0)
    assert 3e-9 < norm.item() < 5e-9
    scaler.step(optimizer)
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert (moment > 0.9e-10).all()
    assert (moment < 1.1e-10).all()


def test_from_the_second_step_on_nothing_is_read_again(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters())
    scaler = zero.GradScaler()
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model.loss(step)).backward()
        with store.trace() as order:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
        assert step == 0 or not order
    optimizer.zero_grad()
    model.loss(9).backward()
    expected = [optimizer.grad(p).norm() for p in model.parameters() if p.grad is not None]
    assert torch.isclose(optimizer.clip_grad_norm_(1.0), torch.stack(expected).norm()), "a loss that was not scaled"


def test_each_optimizer_is_skipped_by_itself(store: TieredStore) -> None:
    torch.manual_seed(0)
    left = zero.page(nn.Linear(8, 8), store, name="left")
    right = zero.page(nn.Linear(8, 8), store, name="right")
    plain = nn.Linear(8, 8)
    optimizers = [zero.AdamW(left.parameters()), zero.AdamW(right.parameters()), torch.optim.AdamW(plain.parameters())]
    models = [left, right, plain]
    scaler = zero.GradScaler()
    before = [copy.deepcopy(model.state_dict()) for model in models]
    loss = left(torch.ones(1, 8)).sum() + right(torch.full((1, 8), 1e38)).sum() + plain(torch.ones(1, 8)).sum()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    changed = [not equal(model.state_dict(), old) for model, old in zip(models, before, strict=True)]
    assert changed == [True, False, True]


def test_what_it_refuses(store: TieredStore) -> None:
    model = zero.page(nn.Linear(8, 8), store)
    optimizer = zero.AdamW(model.parameters())
    scaler = zero.GradScaler()
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    optimizer.zero_grad()
    torchs = torch.amp.GradScaler("cpu")
    torchs.scale(model(torch.ones(1, 8)).sum()).backward()
    torchs.step(optimizer)
    torchs.update()
    optimizer.zero_grad()
    within = zero.AdamW(model.parameters(), update="in_backward")
    fresh = zero.GradScaler()
    fresh.scale(model(torch.ones(1, 8)).sum()).backward()
    with pytest.raises(MisuseError, match="on_fetch"):
        fresh.step(within)
    with pytest.raises(MisuseError, match="on_fetch"):
        torchs.unscale_(within)


def test_switched_off_it_only_steps(store: TieredStore) -> None:
    model = zero.page(nn.Linear(8, 8), store)
    optimizer = zero.AdamW(model.parameters())
    scaler = zero.GradScaler(enabled=False)
    before = model.state_dict()
    scaler.scale(model(torch.ones(1, 8)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not equal(before, model.state_dict())
    assert scaler.state_dict() == {}
