"""Training from disk gives the bits of training in memory. The budget is so small that units are evicted between uses."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.zero.harness import STEPS, equal, in_memory, train
from tests.zero.models import Tied, parameter_groups
from tiered import MisuseError, TieredStore, zero

SMALLEST = "1MiB"


def compare(
    tmp_path: Path, kind: str, *, dram: str = SMALLEST, prefetch: str = "on", look: bool = False
) -> tuple[list[float], list[float], int]:
    """Train a paged twin of what was trained in memory; equal parameters, buffers and moments. Returns the numbers of both, and
    the count of evictions."""
    twin = in_memory(kind)
    paged: Any = copy.deepcopy(twin.untrained)
    with TieredStore.open(tmp_path / "store", dram=dram) as store:
        zero.page(paged, store, paging=zero.Paging(prefetch=prefetch))
        optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)

        def inspect(step: int) -> None:
            if look and step % 5 == 2:  # looking must not change anything
                paged.state_dict()
                with torch.no_grad():
                    paged.loss(1000 + step)
                optimizer.state_dict()

        numbers = train(paged, optimizer, optimizer.clip_grad_norm_, inspect)
        statistics = store.statistics()
        assert statistics.tiers[0].peak <= statistics.tiers[0].capacity
        assert equal(twin.model, paged.state_dict())
        ours = optimizer.state_dict()["state"]
        assert ours.keys() == twin.state.keys()
        for index, state in twin.state.items():
            assert equal(state, ours[index])
        store.close()
    return twin.numbers, numbers, statistics.evictions


@pytest.mark.parametrize("mode", quick(["plain", "checkpoint", "reentrant"], ["plain", "checkpoint"]))
def test_a_tied_transformer_in_the_smallest_budget(tmp_path: Path, mode: str) -> None:
    expected, numbers, evictions = compare(tmp_path, mode)
    assert numbers == expected
    assert evictions > 10 * STEPS, "the budget was meant to be too small to keep anything"


def test_without_prefetch(tmp_path: Path) -> None:
    expected, numbers, _ = compare(tmp_path, "plain", prefetch="off")
    assert numbers == expected


def test_looking_in_between_changes_nothing(tmp_path: Path) -> None:
    for kind in ("deterministic", "tied"):
        expected, numbers, _ = compare(tmp_path / kind, kind, look=True)
        assert numbers == expected


@pytest.mark.parametrize("dram", [SMALLEST, "64MiB"])
def test_convolution_batchnorm_lstm_attention(tmp_path: Path, dram: str) -> None:
    expected, numbers, _ = compare(tmp_path, "mixed", dram=dram)
    assert numbers == expected


def test_loading_an_optimizer_state_of_torch_goes_on_identically(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Tied()
    fused = torch.optim.AdamW(parameter_groups(reference), lr=1e-3, fused=True)
    for step in range(3):
        fused.zero_grad()
        reference.loss(step).backward()
        fused.step()
    paged = Tied()
    with TieredStore.open(tmp_path / "store", dram=SMALLEST) as store:
        zero.page(paged, store)
        paged.load_state_dict(reference.state_dict())
        optimizer = zero.AdamW(parameter_groups(paged), lr=5.0)
        optimizer.load_state_dict(copy.deepcopy(fused.state_dict()))
        for step in range(3, 6):
            for model, adam in ((reference, fused), (paged, optimizer)):
                adam.zero_grad()
                model.loss(step).backward()
                adam.step()
        assert equal(reference.state_dict(), paged.state_dict())


def test_low_precision_parameters_keep_an_fp32_master(tmp_path: Path) -> None:
    """Tiny updates that bf16 alone would lose add up in the master."""
    torch.manual_seed(0)
    reference = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        reference.weight.fill_(1.0)
    master = copy.deepcopy(reference)
    paged = copy.deepcopy(reference).to(torch.bfloat16)
    fused = torch.optim.AdamW(master.parameters(), lr=1e-4, fused=True)
    with TieredStore.open(tmp_path / "store", dram=SMALLEST) as store:
        zero.page(paged, store)
        optimizer = zero.AdamW(paged.parameters(), lr=1e-4)
        for _ in range(60):
            optimizer.zero_grad()
            paged(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            master.weight.grad = torch.ones(8, 8)
            fused.step()
        assert torch.equal(paged.state_dict()["weight"], master.weight.detach().bfloat16())
        assert paged.state_dict()["weight"].max() < 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 12, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


@pytest.mark.parametrize("make", [partial(nn.Linear, 4, 12, bias=False), Attention, Recurrent])
def test_inference_mode_has_the_bits_of_memory(make: Any, store: TieredStore) -> None:
    """torch's products go another way where a weight requires no gradient, as an inference tensor does, and the input is not
    contiguous."""
    torch.manual_seed(0)
    reference = make().eval()
    paged = zero.page(copy.deepcopy(reference), store)
    for x in (torch.randn(7, 3, 4).transpose(0, 1), torch.randn(3, 7, 4), torch.randn(5, 8)[:, None, ::2]):
        with torch.inference_mode():
            expected = reference(x)
            found = paged(x)
        assert torch.equal(found, expected)
        assert found.is_inference()
    assert not any(parameter.is_inference() for parameter in paged.parameters())
    paged(torch.randn(3, 7, 4)).sum().backward()


def test_a_fresh_optimizer_and_a_rolled_back_one_start_from_zeros(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Tied()
    paged = copy.deepcopy(reference)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 3):
            optimizer.zero_grad()
            model.loss(step).backward()  # type: ignore[operator]
            optimizer.step()

    with TieredStore.open(tmp_path / "store", dram=SMALLEST) as store:
        zero.page(paged, store)
        with torch.inference_mode():  # before anything else: there is nothing to hook yet
            paged.loss(0)
        for model, make in ((reference, partial(torch.optim.AdamW, fused=True)), (paged, zero.AdamW)):
            steps(model, make(model.parameters(), lr=1e-3), 0)
            second = make(model.parameters(), lr=1e-2)
            empty = copy.deepcopy(second.state_dict())
            steps(model, second, 3)
            second.load_state_dict(empty)
            steps(model, second, 6)
            model.optimizer = second
        assert equal(reference.state_dict(), paged.state_dict())
        handed_over = torch.optim.AdamW(reference.parameters(), lr=5.0)
        handed_over.load_state_dict(paged.optimizer.state_dict())
        steps(reference, handed_over, 9)
        steps(paged, paged.optimizer, 9)
        assert equal(reference.state_dict(), paged.state_dict())
        with pytest.raises(MisuseError, match=r"assign=True\) would replace the paged parameter '"):
            paged.load_state_dict(reference.state_dict(), assign=True)
        store.commit()
