"""A round that was written down is followed: which one is expected, and what following it saves."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tiered import TieredStore, Touch, zero
from tiered.zero.paging.step_trace import StepTrace, _Loop


def rounds(words: str) -> list[list[Touch]]:
    """Rounds of the letters of each word."""
    return [[Touch(letter) for letter in word] for word in words.split()]


def expected(words: str) -> str:
    loop = _Loop()
    for touches in rounds(words):
        loop.happened(touches)
    return "".join(touch.key for touch in loop.order())


@pytest.mark.parametrize(
    ("words", "next_ones"),
    [
        ("ab", "ab"),  # the only one known
        ("ab abc", "abc"),  # the first steps make what later ones find
        ("ab abc abc", "abc"),
        ("ab abc abc xyz", "abc"),  # an exception
        ("ab abc abc xyz abc", "abc"),
        ("ab abc abc xyz xyz", "xyz"),  # another loop
        ("ab cd ab cd", "abcd"),  # two optimizers take turns
        ("ab cd ab cd ab", "cdab"),
        ("ab cd ef ab cd ef ab cd", "efabcd"),
        ("abcd acbd", "abcd"),  # the same touches, some earlier or later: no order is better known than another
        ("abcd acbd abcd adbc", "abcd"),
        ("abcd acbd acbd", "acbd"),  # another order that comes again is one
        ("abcd acbb", "acbb"),
    ],
)
def test_which_order_is_expected(words: str, next_ones: str) -> None:
    assert expected(words) == next_ones


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def moved(store: TieredStore) -> int:
    link = store.statistics().links[-1]
    return link.up.bytes + link.down.bytes


def train(model: nn.Module, optimizer: zero.AdamW, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()


def test_a_followed_step_moves_fewer_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state has 1.8 times the budget. On the same cyclic order least recently used keeps nothing."""

    def bytes_of_four_steps(folder: str) -> int:
        torch.manual_seed(0)
        with TieredStore.open(tmp_path / folder, dram="1MiB") as store:
            model = zero.page(_Deep(), store)
            optimizer = zero.AdamW(model.parameters())
            train(model, optimizer, 4)
            before = moved(store)
            train(model, optimizer, 4)
            return moved(store) - before

    followed = bytes_of_four_steps("followed")
    monkeypatch.setattr(StepTrace, "_end_round", lambda self, kind: None)
    by_use = bytes_of_four_steps("by_use")
    assert followed < 0.75 * by_use


def test_one_plan_serves_steps_that_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = []
    follow = TieredStore.follow

    def counted(self: TieredStore, order: list[Touch], **more: object) -> int:
        followed.append(len(order))
        return follow(self, order, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(TieredStore, "follow", counted)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(_Deep(), store)
        optimizer = zero.AdamW(model.parameters())
        train(model, optimizer, 4)
        planned = len(followed)
        assert planned == 3, "the first step has no updates, the second makes the moments, the fourth is as the third"
        train(model, optimizer, 3)
        optimizer.state_dict()
        train(model, optimizer, 2)
        assert len(followed) == planned
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(1, 64))
        assert followed[planned:] == [168, 24], "inference has an order of its own; its first round applied the updates"
        train(model, optimizer, 2)
        assert followed[planned + 2 :] == [followed[planned - 1]], "and training finds its again"


def test_models_in_one_store_share_an_order_and_the_store_is_let_go(tmp_path: Path) -> None:
    store = TieredStore.open(tmp_path / "store", dram="1MiB")
    first, second = (zero.page(nn.Linear(8, 8), store, name=name) for name in ("first", "second"))
    optimizers = [zero.AdamW(model.parameters()) for model in (first, second)]
    for _ in range(6):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    assert StepTrace.of(store).following
    store.close()
    gone = weakref.ref(store)
    del store, first, second, optimizers, model, optimizer
    gc.collect()
    assert gone() is None


class _Watching(nn.Module):
    """Call ``seen`` before layer ``at``."""

    def __init__(self, seen: Callable[[], object], at: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(40))
        self.seen, self.at = seen, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.at:
                self.seen()
            if not 8 <= number < 20:
                x = torch.tanh(layer(x))
        return x


def test_the_first_forward_reads_ahead_in_the_order_of_the_modules(tmp_path: Path) -> None:
    """Before an order was recorded, and where some modules do not run."""
    model = _Watching(int, 0)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        zero.page(model, store)
        zero.commit(model)
        expected = model(torch.ones(2, 128)).detach()
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB", access="read") as store:

        def ahead() -> None:
            deadline = time.monotonic() + 60
            while store.statistics().prefetched < 4:
                assert time.monotonic() < deadline, "nothing is read ahead"
                os.sched_yield()

        with torch.device("meta"):
            model = _Watching(ahead, 1)
        zero.page(model, store, existing="resume")
        with torch.no_grad():
            assert torch.equal(model(torch.ones(2, 128)), expected)
            assert torch.equal(model(torch.ones(2, 128)), expected)
