"""Promise 20 for saved activations: an exception strikes forward, backward, or the end of a graph, at any line.

Afterwards nothing is left of the struck graph, and the next one has the gradients of memory.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.store.saved import Network, block, nothing_is_left
from tests.stress.strikes import lines_of, struck_at
from tests.stress.tally import TALLY, Tally, counts
from tiered import TieredStore
from tiered.store.activations import hooks_active

PROMISE = "20 (exceptions that strike a call)"
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


@counts(5, 2000)
def test_an_exception_at_any_line(count: int, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    source, tally = random.Random(count), Tally(PROMISE)
    plain = Network()
    plain().backward()
    wanted = plain.gradients()
    with TieredStore.open(tmp_path / "store", dram="1MiB", durability="none") as store:
        network = Network()

        def step() -> None:
            with block(store, keep=20_000):
                loss = network()
            loss.backward()

        step()
        network.zero_grad()
        lines = lines_of(step)
        network.zero_grad()
        for _ in range(count):
            where = struck_at(source.randrange(lines // 2), step)  # each step takes some lines more or fewer
            tally.count(str(where).partition(":")[0], where is not None)
            network.zero_grad()
            gc.collect()
            while hooks_active():  # struck before the first line of __exit__
                torch._C._autograd._pop_saved_tensors_default_hooks()
            torch.zeros((), requires_grad=True).clone().backward()  # autograd's queue keeps what was struck until then
            step()
            assert all(torch.equal(one, other) for one, other in zip(network.gradients(), wanted, strict=True))
            nothing_is_left(store)
    tally.refuse_silence()
    record_property(TALLY, tally.as_property())
