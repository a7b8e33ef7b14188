"""Updates within backward: the same bits, gradients that never reach the disk, and errors where all gradients are needed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.quick import quick
from tests.zero.harness import STEPS, equal, train
from tests.zero.models import SIZES, Mixed, Tied, parameter_groups
from tests.zero.narrow import MasterAdamW, Narrow
from tiered import MisuseError, StoreStatistics, TieredStore, zero

PERIOD = 12


def compare(store: TieredStore, reference: nn.Module, *, look: bool = False, steps: int = STEPS) -> nn.Module:
    """Train twins; equal losses, parameters, buffers and moments. Returns the paged one."""
    paged = copy.deepcopy(reference)
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in reference.parameters())
    fused: torch.optim.Optimizer
    if narrow:
        fused = MasterAdamW(parameter_groups(reference), lr=1e-3)
    else:
        fused = torch.optim.AdamW(parameter_groups(reference), lr=1e-3, fused=True)
    expected = train(reference, fused, steps=steps, batches=1)
    zero.page(paged, store)
    optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3, update="in_backward")

    def inspect(step: int) -> None:
        if look and step % 5 == 2:
            paged.state_dict()
            with torch.no_grad():
                paged.loss(1000 + step)  # type: ignore[operator]
            optimizer.state_dict()

    assert train(paged, optimizer, between=inspect, steps=steps, batches=1) == expected
    assert equal(reference.state_dict(), paged.state_dict())
    ours, theirs = optimizer.state_dict()["state"], fused.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        ours[index].pop("master", None)
        assert equal(state, ours[index])
    assert not [key for key in store if key.endswith("/grad")]
    statistics = store.statistics()
    assert statistics.tiers[0].peak <= statistics.tiers[0].capacity
    return paged


@pytest.mark.parametrize("mode", quick(["plain", "checkpoint", "reentrant"], ["reentrant"]))
def test_a_tied_transformer_in_the_smallest_budget(store: TieredStore, mode: str) -> None:
    torch.manual_seed(0)
    compare(store, Tied(*SIZES[mode], mode=mode), look=mode == "plain")
    assert store.statistics().evictions > 10 * STEPS, "the budget was meant to be too small to keep anything"


def test_convolution_batchnorm_lstm_attention(store: TieredStore) -> None:
    torch.manual_seed(0)
    compare(store, Mixed())


def test_bf16_and_fp16(store: TieredStore) -> None:
    torch.manual_seed(0)
    compare(store, Narrow())


class Stack(nn.Module):
    """Every unit is complete when its backward has passed."""

    def __init__(self, width: int = 128, layers: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(layers))
        self.width, self.dtype = width, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self(torch.randn(4, self.width, generator=generator, dtype=torch.float32).to(self.dtype)).square().mean()


def test_units_are_updated_while_backward_runs_and_gradients_are_not_kept(store: TieredStore) -> None:
    model = zero.page(Stack(), store)
    optimizer = zero.AdamW(model.parameters(), update="in_backward")
    seen: list[tuple[int, int]] = []

    def look(*_: object) -> None:
        seen.append((zero.statistics(model).updates, sum(key.endswith("/grad") for key in store)))

    for layer in model.layers:
        layer.weight.register_post_accumulate_grad_hook(look)
    before = zero.statistics(model).updates
    model.loss(0).backward()
    assert seen[-1][0] >= 6, "most were updated before the last gradient came"
    assert max(gradients for _, gradients in seen) <= 2
    assert zero.statistics(model).updates == before + 8
    optimizer.step()
    assert zero.statistics(model).updates == before + 8, "step() only closes the step"


def traffic(statistics: StoreStatistics) -> int:
    return sum(link.up.bytes + link.down.bytes for link in statistics.links)


@pytest.mark.parametrize(("dtype", "expected"), quick([(torch.float32, 28), (torch.bfloat16, 26)], [(torch.float32, 28)]))
def test_bytes_of_a_step(tmp_path: Path, dtype: torch.dtype, expected: int) -> None:
    """16 read and 12 written an fp32 parameter, 14 and 12 a bf16 one, and what is left in the pool is not read."""
    with TieredStore.open(tmp_path / "bytes", dram="1MiB") as store:
        model = zero.page(Stack(width=144, layers=24, dtype=dtype), store, paging=zero.Paging(prefetch="off"))
        optimizer = zero.AdamW(model.parameters(), update="in_backward")
        moved = []
        for step in range(4):  # the last one follows an order
            before = store.statistics()
            model.loss(step).backward()
            optimizer.step()
            after = store.statistics()
            moved.append(traffic(after) - traffic(before))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert 0.8 * expected < moved[-1] / parameters <= expected, [round(m / parameters, 2) for m in moved]
        store.close()


class Detached(nn.Module):
    """The first use of ``weight`` is cut off: its old value is needed after its gradient has arrived."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.inner = nn.Linear(64, 64)
        self.middle = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.last = nn.Linear(64, 64)

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.last.weight.detach()

    def segment_and_use(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.segment(x))
        for module in self.middle:
            x = torch.tanh(module(x))
        return self.last(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.mode == "one":
            return checkpoint(self.segment_and_use, x, use_reentrant=False)
        if self.mode == "apart":
            x = torch.tanh(checkpoint(self.segment, x, use_reentrant=False))
            for module in self.middle:
                x = torch.tanh(module(x))
            return self.last(x)
        return self.segment_and_use(x)

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self(torch.randn(4, 64, generator=generator)).square().mean()


@pytest.mark.parametrize("mode", ["plain", "one"])
def test_an_old_value_that_is_still_needed_defers_the_update(store: TieredStore, mode: str) -> None:
    torch.manual_seed(0)
    compare(store, Detached(mode))


def test_a_segment_that_would_read_an_updated_parameter_raises(store: TieredStore) -> None:
    model = zero.page(Detached("apart"), store)
    optimizer = zero.AdamW(model.parameters(), update="in_backward")
    with pytest.raises(MisuseError, match=r"reads 'last\.weight' again .*on_fetch"):
        model.loss(0).backward()
    optimizer.step()


class Shared(nn.Module):
    """A tied embedding and a tied layer, both inside and outside of checkpointed segments."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.layer = nn.Linear(64, 64)
        self.others = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.reentrant = reentrant

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) @ self.embedding.weight.t() @ self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for other in self.others:
            x = checkpoint(self.part, torch.tanh(other(x)), use_reentrant=self.reentrant)
        return self.layer(x) @ self.embedding.weight.t()

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 32, (2, 8), generator=generator)
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoint", "reentrant"])
def test_parameters_shared_over_checkpoints(store: TieredStore, reentrant: bool) -> None:
    torch.manual_seed(0)
    compare(store, Shared(reentrant))


def test_parameters_that_are_used_now_and_then(store: TieredStore) -> None:
    """Which gradients come differs from step to step, and freezing changes between them."""

    class Moody(Stack):
        def loss(self, seed: int) -> torch.Tensor:  # what it uses is the same again after PERIOD
            self.layers[2].weight.requires_grad_(seed % 4 != 1)
            x = torch.randn(4, self.width, generator=torch.Generator().manual_seed(seed))
            for index, layer in enumerate(self.layers):
                if (seed + index) % 3:
                    bias = layer.bias if (seed * index) % 2 else None
                    x = torch.tanh(F.linear(x, layer.weight, bias))
            return x.square().mean()

        forward = loss  # type: ignore[assignment]

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Moody(layers=6)

        def forward(self, seed: int) -> torch.Tensor:
            result: torch.Tensor = self.inner(seed)
            return result

        loss = forward

    torch.manual_seed(0)
    model = Root()
    model.loss = model.__call__  # type: ignore[method-assign]
    paged = copy.deepcopy(model)
    paged.loss = paged.__call__  # type: ignore[method-assign]
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), steps=PERIOD, batches=1)
    zero.page(paged, store)
    optimizer = zero.AdamW(paged.parameters(), lr=1e-3, update="in_backward")
    assert train(paged, optimizer, steps=PERIOD, batches=1) == expected
    assert equal(model.state_dict(), paged.state_dict())


def test_a_gradient_more_than_last_time_is_an_update_of_its_own(store: TieredStore) -> None:
    """The unit was updated already; what was used then is not used again. Functions that are no modules, tied and reentrant."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Parameter(torch.randn(96, 96) / 9), nn.Parameter(torch.randn(96))
            self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(12))

        def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
            if step % 3 != 1:
                x = checkpoint(lambda y: torch.tanh(y @ self.early), x, use_reentrant=step % 4 == 0)
            for index, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                if step % 5 == 4 and index == 6:
                    x = checkpoint(lambda y: torch.tanh(y @ self.early), x, use_reentrant=True)
            return x * self.late.tanh() @ (self.early if step % 5 == 4 else torch.eye(96))

        def loss(self, step: int) -> torch.Tensor:
            x = torch.randn(3, 96, generator=torch.Generator().manual_seed(step))
            return self(x.requires_grad_(), step).square().mean()

    torch.manual_seed(0)
    compare(store, Own(), steps=15)


def test_what_needs_all_gradients_raises_and_names_on_fetch(store: TieredStore) -> None:
    model = zero.page(Stack(layers=3), store)
    with pytest.raises(MisuseError, match="on_fetch"):
        zero.AdamW(model.parameters(), update="sometimes")
    optimizer = zero.AdamW(model.parameters(), update="in_backward")
    model.loss(0).backward()
    with pytest.raises(MisuseError, match="on_fetch"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(MisuseError, match="on_fetch"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(MisuseError, match="on_fetch"):
        optimizer.grad(model.layers[0].weight)
    before = model.state_dict()
    for _ in range(2):
        with pytest.raises(MisuseError, match="on_fetch"):
            model.loss(1).backward()
        optimizer.zero_grad()
    assert equal(before, model.state_dict()), "the second backward changed nothing"
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.loss(1).backward()
    optimizer.step()
    assert not equal(before, model.state_dict())


def test_a_graph_that_was_kept_cannot_run_again(store: TieredStore) -> None:
    model = zero.page(Stack(layers=3), store)
    optimizer = zero.AdamW(model.parameters(), update="in_backward")
    loss = model.loss(0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(MisuseError, match="after this graph was made"):
        loss.backward()
    model.loss(0).backward()


def test_an_exception_in_backward_leaves_gradients_that_step_or_zero_grad_deal_with(store: TieredStore) -> None:
    torch.manual_seed(0)
    model = zero.page(Stack(layers=6), store)
    optimizer = zero.AdamW(model.parameters(), update="in_backward")

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    handle = model.layers[3].bias.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model.loss(0).backward()
    handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    model.loss(0)
    assert not [key for key in store if key.endswith("/grad")]
    reference = Stack(layers=6)
    reference.load_state_dict(model.state_dict())
    fused = torch.optim.AdamW(reference.parameters(), fused=True)
    fused.load_state_dict(optimizer.state_dict())
    for net, adam in ((reference, fused), (model, optimizer)):
        net.loss(1).backward()
        adam.step()
    assert equal(reference.state_dict(), model.state_dict())


def test_a_gradient_that_somebody_assigns_is_taken_by_step(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = Stack(layers=3)
    model = zero.page(copy.deepcopy(reference), store)
    fused = torch.optim.AdamW(reference.parameters(), fused=True)
    optimizer = zero.AdamW(model.parameters(), update="in_backward")
    for net, adam in ((reference, fused), (model, optimizer)):
        net.layers[0].requires_grad_(False)
        net.loss(0).backward()
        net.layers[0].weight.grad = torch.ones(128, 128)
        adam.step()
        adam.zero_grad()
        net.layers[0].requires_grad_(True)
        net.layers[1].bias.grad = torch.ones(128)
        net.loss(1).backward()
        adam.step()
    assert equal(reference.state_dict(), model.state_dict())


def test_another_optimizer_takes_over(store: TieredStore) -> None:
    torch.manual_seed(0)
    model = zero.page(Stack(layers=3), store)
    first = zero.AdamW(model.parameters(), update="in_backward")
    model.loss(0).backward()
    first.step()
    before = model.state_dict()
    second = zero.AdamW(model.parameters())
    for step in (1, 2):
        model.loss(step).backward()
    assert equal(before, model.state_dict())
    second.step()
    assert not equal(before, model.state_dict())
    third = zero.AdamW(model.parameters(), update="in_backward")
    second.zero_grad()
    del third
    before = model.state_dict()
    model.loss(3).backward()
    assert equal(before, model.state_dict()), "nobody is there to update"


def test_a_gradient_that_is_not_finite_raises_in_backward_for_bf16(store: TieredStore) -> None:
    model = zero.page(Stack(layers=3, dtype=torch.bfloat16), store)
    optimizer = zero.AdamW(model.parameters(), update="in_backward")
    handle = model.layers[1].weight.register_hook(lambda grad: grad * float("inf"))
    before = model.state_dict()
    with pytest.raises(MisuseError, match=r"'layers\.1\.weight' is not finite"):
        model.loss(0).backward()
    handle.remove()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(before["layers.1.weight"], model.state_dict()["layers.1.weight"])
    model.loss(0).backward()
    optimizer.step()
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("change", ["reversed", "moved", "taken out"])
def test_groups_that_are_changed_are_those_of_an_update_within_backward(store: TieredStore, change: str) -> None:
    found = []
    for paged in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if paged:
            zero.page(model, store)
        groups = [{"params": list(layer.parameters()), "lr": lr} for layer, lr in zip(model, (0.1, 0.001), strict=True)]
        optimizer: Any = zero.SGD(groups, update="in_backward") if paged else torch.optim.SGD(groups, fused=True)
        if change == "reversed":
            optimizer.param_groups.reverse()
        else:
            taken = optimizer.param_groups[0]["params"].pop()
            if change == "moved":
                optimizer.param_groups[1]["params"].append(taken)
        loss = model(torch.ones(2, 4)).square().sum()
        if change == "taken out" and paged:
            with pytest.raises(MisuseError, match=r"'0\.bias' was taken out of the optimizer's param_groups"):
                loss.backward()
            return
        loss.backward()
        optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
