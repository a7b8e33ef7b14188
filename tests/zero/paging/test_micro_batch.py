"""``micro_batch=k``: the numbers are those of the same split and checkpointing in memory, however little fits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.zero.harness import clipping, equal, train
from tests.zero.models import parameter_groups
from tests.zero.paging.splitting import Language, split_in_memory
from tiered import Eviction, MisuseError, TieredStore, zero
from tiered.zero.paging.pager import placement_of

STEPS = 6
DRAM = "1.25MiB"


def kept(store: TieredStore) -> list[str]:
    store.offload()  # waits for transfers of what is to be deleted
    return sorted(key for key in store if key.startswith("tiered.saved/"))


def twins(store: TieredStore, parts: int, **model: int) -> tuple[Language, Language]:
    """One in memory, one paged; both split the same modules."""
    torch.manual_seed(0)
    reference = Language(**model)
    paged = copy.deepcopy(reference)
    zero.page(paged, store, micro_batch=parts)
    split_in_memory(reference, zero.statistics(paged).split, parts)
    return reference, paged


def trained(
    model: Language,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[float], torch.Tensor],
    look: Callable[[int], object] = int,
) -> list[float]:
    """Losses and norms of STEPS steps of two backward passes each, of batches of 7 and 5, with dropout and a schedule."""
    torch.manual_seed(1)

    def loss(number: int) -> torch.Tensor:
        return model.loss(number, batch=7 if number // 2 % 2 else 5)

    return train(model, optimizer, clip, look, steps=STEPS, loss=loss)


@pytest.mark.parametrize("parts", [3, pytest.param(16, marks=pytest.mark.soak)])
def test_training_gives_the_bits_of_the_same_split_in_memory(store: TieredStore, parts: int) -> None:
    reference, paged = twins(store, parts, width=64, layers=2)
    assert {"embedding", "blocks.0.mlp", "head"} <= set(zero.statistics(paged).split)
    fused = torch.optim.AdamW(parameter_groups(reference), lr=1e-3, fused=True)
    optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)

    def look(step: int) -> None:
        assert kept(store) == []
        if step % 5 == 2:  # looking must not change anything
            state = torch.get_rng_state()
            with torch.no_grad():
                paged.loss(1000 + step)
            torch.set_rng_state(state)

    expected = trained(reference, fused, clipping(reference))
    assert trained(paged, optimizer, optimizer.clip_grad_norm_, look) == expected
    statistics = store.statistics()
    assert statistics.evictions > 20 * STEPS, "the budget was meant to be too small to keep anything"
    assert statistics.tiers[0].peak <= statistics.tiers[0].capacity
    assert equal(reference.state_dict(), paged.state_dict())
    ours, theirs = optimizer.state_dict(), fused.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert equal(state, ours["state"][index])


def test_whole_blocks_are_split_where_they_fit(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        reference, paged = twins(store, 3, width=64)
        assert zero.statistics(paged).split == ("embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head")
        optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
        fused = torch.optim.AdamW(parameter_groups(reference), lr=1e-3, fused=True)
        expected = trained(reference, fused, clipping(reference))
        assert trained(paged, optimizer, optimizer.clip_grad_norm_) == expected
        assert equal(reference.state_dict(), paged.state_dict())
        store.close()


def test_evaluation_is_split_too_and_gives_the_same_numbers(store: TieredStore) -> None:
    reference, paged = twins(store, 3, width=64)
    tokens = torch.randint(0, 64, (7, 16))
    expected = reference.eval()(tokens)
    with torch.inference_mode():
        assert torch.equal(paged.eval()(tokens), expected)
    with torch.no_grad():
        assert torch.equal(paged(tokens), expected)
    assert torch.equal(paged(tokens), expected)
    sizes: list[int] = []
    paged.blocks[0].dropout.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    with torch.no_grad():
        paged.blocks[0](torch.zeros(7, 4, 64), torch.ones(64))  # by itself: its own batch
    assert sizes == [7], "a block that is larger than a unit runs whole, its children run in parts"


def test_one_part_changes_nothing(store: TieredStore) -> None:
    model = zero.page(Language(), store, micro_batch=1)
    assert zero.statistics(model).split == ()
    assert placement_of(model.position)[0].splitter is None


def test_several_backward_passes_and_graphs_at_once(store: TieredStore) -> None:
    reference, paged = twins(store, 3, width=64)
    gradients = []
    for model in (reference, paged):
        torch.manual_seed(2)
        parameters = [p for p in model.parameters() if p.requires_grad and p is not model.blocks[0].unused.weight]
        first, second = model.loss(0), model.loss(1)
        asked = torch.autograd.grad(first, parameters, retain_graph=True, allow_unused=True)
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        del first, second
        gradients.append([gradient for gradient in asked if gradient is not None])
    assert kept(store) == []
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    optimizer = zero.AdamW(paged.parameters())
    for ours, theirs in zip(paged.parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            assert torch.equal(optimizer.grad(ours), theirs.grad)
    assert any(p.grad is not None for p in reference.parameters())


@pytest.mark.parametrize("kind", quick(["checkpoint", "reentrant", "autocast", "bfloat16"], ["reentrant", "autocast"]))
def test_what_else_a_model_may_do(store: TieredStore, kind: str) -> None:
    """Checkpoints of its own inside a split module; autocast; narrow parameters."""
    torch.manual_seed(0)
    reference = Language(width=64).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    paged = copy.deepcopy(reference)
    for model in (reference, paged) if kind in ("checkpoint", "reentrant") else ():
        for block in model.blocks:
            again = partial(torch.utils.checkpoint.checkpoint, block.mlp.forward, use_reentrant=kind == "reentrant")
            block.mlp.forward = again
    zero.page(paged, store, micro_batch=3)
    split_in_memory(reference, zero.statistics(paged).split, 3)
    losses = []
    for model in (reference, paged):
        torch.manual_seed(2)
        for seed in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast", cache_enabled=False):
                loss = model.loss(seed)
            loss.backward()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    optimizer = zero.AdamW(paged.parameters())
    for ours, theirs in zip(paged.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(optimizer.grad(ours), theirs.grad)
    assert kept(store) == []


def test_inside_somebody_elses_checkpoint(store: TieredStore) -> None:
    reference, paged = twins(store, 2, width=64)
    losses = []
    for model in (reference, paged):
        torch.manual_seed(3)
        whole = model.blocks[1].forward
        model.blocks[1].forward = lambda *args, whole=whole: torch.utils.checkpoint.checkpoint(
            whole, *args, use_reentrant=False
        )
        loss = model.loss(1)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    optimizer = zero.AdamW(paged.parameters())
    for ours, theirs in zip(paged.parameters(), reference.parameters(), strict=True):
        assert theirs.grad is None or torch.equal(optimizer.grad(ours), theirs.grad)


def test_what_is_kept_is_in_the_store_until_backward_or_until_the_graph_is_gone(store: TieredStore) -> None:
    model = zero.page(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), store, micro_batch=4)
    x = torch.randn(64, 256)
    loss = model(x).sum()
    assert kept(store) == sorted(f"tiered.saved/model/{layer}.0.{part}#0" for layer in range(8) for part in range(4))
    assert sum(store.spec(key).nbytes for key in kept(store)) == 8 * x.nbytes
    other = model(x).sum()
    assert len(kept(store)) == 60, "the same input is stored once"
    loss.backward()
    assert len(kept(store)) == 32
    del other
    with torch.no_grad():
        model(x)
    assert kept(store) == []
    again = model(x).sum()
    assert kept(store)[0] == "tiered.saved/model/0.0.0#0", "the same keys in every step"
    assert store.statistics().tiers[0].held == 0
    del again


def test_what_is_kept_is_in_no_commit_and_a_rollback_ends_it(store: TieredStore) -> None:
    model = zero.page(nn.Sequential(*(nn.Linear(256, 256) for _ in range(2))), store, micro_batch=2)
    x = torch.randn(64, 256)
    before = model(x).sum()
    store.commit()
    assert len(kept(store)) == 4
    store.rollback()
    assert kept(store) == []
    again = model(x).sum()
    assert kept(store) == [f"tiered.saved/model/{layer}.0.{part}#1" for layer in range(2) for part in range(2)], "of x, too"
    with pytest.raises(MisuseError, match="made before a rollback"):
        before.backward()
    again.backward()


def test_a_graph_from_before_a_step_cannot_run_after_it(store: TieredStore) -> None:
    model = zero.page(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), store, micro_batch=2)
    optimizer = zero.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    late = model(torch.randn(4, 8)).sum()
    optimizer.step()
    with pytest.raises(MisuseError, match=r"before step\(\)"):
        late.backward()
    model(torch.randn(4, 8)).sum().backward()


def test_an_exception_in_a_part_leaves_nothing_held(store: TieredStore) -> None:
    reference, paged = twins(store, 3, width=64)

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    handle = paged.blocks[1].mlp[2].register_forward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        paged.loss(0)
    handle.remove()
    loss = paged.loss(0)
    handle = paged.blocks[1].mlp[2].register_forward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    handle.remove()
    del loss
    zero.AdamW(paged.parameters()).zero_grad()
    for model in (reference, paged):
        torch.manual_seed(4)
        model.loss(0).backward()
    optimizer = zero.AdamW(paged.parameters())
    assert torch.equal(optimizer.grad(paged.position), reference.position.grad)
    assert store.statistics().tiers[0].held == 0
    assert kept(store) == []


def test_a_gradient_is_the_sum_over_the_parts_the_last_one_first(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = nn.Linear(32, 32)
    paged = zero.page(copy.deepcopy(reference), store, micro_batch=5)
    x, weights = torch.randn(15, 32), torch.randn(15, 32)
    (paged(x) * weights).sum().backward()
    parts = [
        torch.autograd.grad((reference(piece) * weight).sum(), reference.weight)[0]
        for piece, weight in zip(x.split(3), weights.split(3), strict=True)
    ]
    backwards, forwards = parts[-1].clone(), parts[0].clone()
    for part in reversed(parts[:-1]):
        backwards += part
    for part in parts[1:]:
        forwards += part
    assert not torch.equal(backwards, forwards), "the order was meant to matter"
    optimizer = zero.AdamW(paged.parameters())
    assert torch.equal(optimizer.grad(paged.weight), backwards)
    assert optimizer.clip_grad_norm_(1e9) == nn.utils.get_total_norm([backwards, weights.sum(0)])


@pytest.mark.parametrize("dtype", quick([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_updates_within_backward_give_the_same_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each gradient arrives once, as the sum over all parts: a unit's update need not know of them."""
    torch.manual_seed(0)
    start = Language(width=64).to(dtype)
    outcomes = []
    for update in ("on_fetch", "in_backward"):
        model = copy.deepcopy(start)
        with TieredStore.open(tmp_path / update, dram="1.5MiB", eviction=Eviction(deadline=20)) as store:
            zero.page(model, store, micro_batch=3)
            optimizer = zero.AdamW(model.parameters(), lr=1e-3, update=update)
            torch.manual_seed(1)
            losses = []
            for step in range(5):
                optimizer.zero_grad()
                loss = model.loss(step)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            outcomes.append((losses, model.state_dict()))
            store.close()
    assert outcomes[0][0] == outcomes[1][0]
    assert equal(outcomes[0][1], outcomes[1][1])
