"""What one process can do, ranks can: with the same data on each of two ranks sums and means are exact, so every bit has to
be that of one process with that data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quick import quick
from tests.zero.models import Tied
from tests.zero.ranks import on_ranks
from tests.zero.test_ranks import STAGES, same
from tiered import TieredStore, zero

Found = dict[str, Any]


def looks(model: Any, optimizer: zero.AdamW) -> Found:
    return {
        "model": {key: value.clone() for key, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict()["state"],
    }


def plain(store: TieredStore, paged: Callable[..., Any], **options: Any) -> Found:
    model = paged(Tied(layers=2), **options)
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model.loss(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **looks(model, optimizer)}


def converted(store: TieredStore, paged: Callable[..., Any]) -> Found:
    return plain(store, paged, policy=zero.Policy(storage=torch.bfloat16))


def half(store: TieredStore, paged: Callable[..., Any]) -> Found:
    return plain(store, paged, policy=zero.Policy(storage=torch.float16))


def split(store: TieredStore, paged: Callable[..., Any]) -> Found:
    return plain(store, paged, micro_batch=2)


def true_bf16(store: TieredStore, paged: Callable[..., Any]) -> Found:
    layers = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))
    model = paged(layers.to(torch.bfloat16))
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
    return looks(model, optimizer)


def scaled(store: TieredStore, paged: Callable[..., Any]) -> Found:
    """The second step overflows, and is left out on all ranks."""
    model = paged(Tied(layers=2))
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    scaler = zero.GradScaler(init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model.loss(step) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[1] < scales[0]
    return {"scales": scales, **looks(model, optimizer)}


def looked_at(store: TieredStore, paged: Callable[..., Any]) -> Found:
    """Evaluation, state_dict and a rollback in between; one parameter is unfrozen, one loses its gradient."""
    model = paged(Tied(layers=2))
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    found: Found = {"seen": []}
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model.loss(step).backward()
        if step == 1:
            model.blocks[0].out.weight.grad = None
        optimizer.step()
        if step == 2:
            model.blocks[1].norm.requires_grad_(True)  # it is in the optimizer from the beginning
        with torch.no_grad():
            found["seen"].append(model.loss(100 + step).item())
        if step == 3:
            found["between"] = looks(model, optimizer)
            zero.commit(model, optimizer)
        if step == 4:
            zero.rollback(model, optimizer)
    return {**found, **looks(model, optimizer)}


def loaded(store: TieredStore, paged: Callable[..., Any]) -> Found:
    """Values and states from elsewhere."""
    torch.manual_seed(11)
    other = Tied(layers=2)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    other.loss(1).backward()
    theirs.step()
    model = paged(Tied(layers=2))
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    optimizer.zero_grad()
    model.loss(2).backward()
    optimizer.step()
    return looks(model, optimizer)


def in_place(store: TieredStore, paged: Callable[..., Any]) -> Found:
    """Gradients are read and written by torch's own functions. Norms of these orders are exact, whoever has a share."""
    model = paged(Tied(layers=2))
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    seen: list[torch.Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        for seed in (step, step + 10):  # the second is added to what was written
            scaler.scale(model.loss(seed)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, 0.5)
            gradients[3].mul_(3).view(-1)[:2].neg_()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        for order in (float("inf"), 0):
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, order))
        seen += [gradients[0].norm(float("inf")), gradients[0].clone(), gradients[1].sum(), gradients[3] / 2]
        scaler.step(optimizer)
        scaler.update()
    ranks = torch.distributed.is_initialized()
    assert repr(gradients[0]).startswith("StoredTensor(gradient of " if ranks else "tensor("), "to print asks no other rank"
    return {"seen": dict(enumerate(seen)), **looks(model, optimizer)}


def written(store: TieredStore, paged: Callable[..., Any]) -> Found:
    """In forward, by ways that leave no version behind."""
    model = paged(Tied(layers=2))
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    ways = (lambda p: p.detach().data.mul_(0.5), lambda p: p.detach().numpy().__imul__(0.5))
    for write in ways:
        weight = model.blocks[0].mlp[1].weight
        handle = model.blocks[0].register_forward_pre_hook(lambda *_, write=write, weight=weight: (write(weight), None)[1])
        model.loss(0).backward()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    return looks(model, optimizer)


def clipped(store: TieredStore, paged: Callable[..., Any]) -> Found:
    """By torch, and by the optimizer: the same bits."""
    models = [paged(Tied(layers=2), name=name) for name in ("torch", "ours")]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [zero.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step, (order, foreach) in enumerate([(2.0, None), (2.0, None), (1.0, True), (3.0, False)]):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model.loss(step).backward()
        norms = (
            torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.1, order, foreach=foreach),
            optimizers[1].clip_grad_norm_(0.1, order),
        )
        assert torch.equal(*norms)
        for optimizer in optimizers:
            optimizer.step()
    left, right = (looks(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True))
    assert same(left, right)
    return {}


def copied(store: TieredStore, paged: Callable[..., Any]) -> Found:
    """What state_dict gives is written to, and optimizer.state is read."""
    model = paged(Tied(layers=2))
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    for step in range(2):
        for value in model.state_dict().values():
            value.mul_(0.9).view(-1)[:3].zero_()
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
        seen += [states["exp_avg"].clone() for states in optimizer.state.values()]
    return {"seen": dict(enumerate(seen)), **looks(model, optimizer)}


def averaged(store: TieredStore, paged: Callable[..., Any]) -> Found:
    """The average of the weights, within a rollback and beside parameters that are stored in fewer bits."""
    found: Found = {}
    for policy in (zero.Policy(), zero.Policy(storage=torch.bfloat16)):
        model = paged(Tied(layers=2), name=f"of {policy.storage}", policy=policy)
        optimizer, ema = zero.AdamW(model.parameters(), lr=1e-2), zero.EMA(model, 0.9)
        for step in range(5):
            optimizer.zero_grad()
            model.loss(step).backward()
            optimizer.step()
            ema.update()
            if step == 2:
                zero.commit(model, optimizer)
            elif step == 3:
                with ema.applied():
                    found[str(policy), "before"] = model.loss(9).item()
                zero.rollback(model, optimizer)
                assert ema.updates == 3
        with ema.applied():
            found[str(policy)] = looks(model, optimizer)
        found[str(policy), "weights"] = looks(model, optimizer)
    return found


FEATURES = {
    made.__name__: made
    for made in (converted, half, split, true_bf16, scaled, looked_at, loaded, in_place, written, clipped, copied, averaged)
}


def all_of(rank: int, folder: Path, stages: Sequence[zero.Stage]) -> dict[Any, Found]:
    found = {}
    for name, feature in FEATURES.items():
        for stage in stages:
            torch.manual_seed(3)
            with TieredStore.open(folder / f"{name}-{type(stage).__name__}-{rank}", dram="3MiB") as store:
                found[name, type(stage).__name__] = feature(store, functools.partial(zero.page, store=store, stage=stage))
                store.close()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[Any, Found]]]:
    """What ranks find in one stage, each when it is first asked for."""

    @functools.cache
    def found(stage: int) -> list[dict[Any, Found]]:
        return on_ranks(2, all_of, tmp_path_factory.mktemp("ranks"), [STAGES[stage]])

    return found


@pytest.mark.parametrize("stage", quick(range(3), [2]), ids=["Stage1", "Stage2", "Stage3"])
@pytest.mark.parametrize("name", FEATURES)
def test_ranks_with_the_same_data_are_one_process(
    ranks: Callable[[int], list[dict[Any, Found]]], name: str, stage: int, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    with TieredStore.open(tmp_path / "alone", dram="3MiB") as store:
        alone = FEATURES[name](store, functools.partial(zero.page, store=store))
        store.close()
    for found in ranks(stage):
        assert same(found[name, type(STAGES[stage]).__name__], alone)
