"""What the optimum is computed from is all that the store was asked for."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy", reason="bench/optimum.py needs the dev extra")

import torch
from torch import nn

from bench.traces import Access
from bench.watched import watch
from tiered import TensorSpec, TieredStore, zero

READ, WRITE, PUT = Access.READ, Access.WRITE, Access.PUT


def test_what_is_held_is_read_again_after_each_lease_and_each_put() -> None:
    with TieredStore.open(None, dram="1MiB") as store, watch(store) as seen:
        store.put("a", torch.zeros(1000))
        with store.lease("a"):
            store.put("b", torch.zeros(3000))
            store.create("c", TensorSpec("float32", (10,), 4))
        seen.cut()
        with store.lease(["a", "b"], access="write"):
            pass
    assert seen.rounds == [
        [("a", PUT), ("a", READ), ("a", READ), ("b", PUT), ("a", READ), ("c", PUT), ("a", READ)],
        [("a", WRITE), ("b", WRITE), ("a", READ), ("b", READ)],
    ]
    assert seen.sizes == {"a": 4096, "b": 12288, "c": 4096}


def test_a_step_that_keeps_inputs_is_watched_whole() -> None:
    """Puts of kept inputs too: else the optimum would be given their write-backs."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    with TieredStore.open(None, dram="4MiB") as store:
        zero.page(model, store, micro_batch=2)
        optimizer = zero.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):  # the second one makes the moments
            model(torch.ones(32, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with watch(store) as seen, store.trace() as order:
            model(torch.ones(32, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    watched = iter(seen.rounds[0])
    assert {touch.use for touch in order if touch.key.startswith("tiered.saved/")} == {PUT, READ}
    assert all((touch.key, touch.use) in watched for touch in order), "in this order"
