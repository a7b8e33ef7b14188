"""Activations in a store: the bits of memory, and nothing left behind however a graph ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tiered
from tiered import ActivationOffload, MisuseError, StoreClosed, TieredStore
from tiered.activations import keeper

KIB = 1 << 10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(y))
        found: torch.Tensor = x + self.mlp(x)
        return found


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*[Block(32) for _ in range(4)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as opened:
        yield opened


@pytest.fixture
def act(store: TieredStore) -> ActivationOffload:
    return tiered.offload_activations(store, keep=32 * KIB, min_bytes=1 * KIB)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "tiered-activations"]


def nothing_left(act: ActivationOffload, store: TieredStore) -> None:
    gc.collect()
    assert act.statistics().alive == 0
    assert list(store) == []
    books = act._keeper._books
    assert act._keeper._held == 0
    assert not books.slots
    assert not books.known
    thread = act._keeper._thread
    if thread is not None:
        act._keeper._inbox.put(None)
        thread.join(60)
        assert not thread.is_alive()


def inputs() -> torch.Tensor:
    return torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(5))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def trained(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients in memory."""
    torch.manual_seed(7)
    loss = model(x).square().sum()
    loss.backward()
    return loss.detach(), gradients(model)


def forward(model: nn.Module, x: torch.Tensor, act: ActivationOffload) -> torch.Tensor:
    torch.manual_seed(7)
    with act:
        found: torch.Tensor = model(x).square().sum()
    return found


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- the ends of a graph -------------------------------------------------------------------------------------------------------


def backward(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    loss, expected = trained(model, x)
    found = forward(model, x, act)
    assert act.statistics().alive
    found.backward()
    assert torch.equal(found, loss)
    assert same(gradients(model), expected)


def backward_within_the_block(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    _, expected = trained(model, x)
    torch.manual_seed(7)
    with act:
        model(x).square().sum().backward()
    assert same(gradients(model), expected)


def dropped(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    assert forward(model, x, act).isfinite()


def dropped_in_a_cycle(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    box: list[Any] = [forward(model, x, act)]
    box.append(box)


def retained(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    _, expected = trained(model, x)
    loss = forward(model, x, act)
    for _ in range(3):
        loss.backward(retain_graph=True)
        assert same(gradients(model), expected)


def retained_and_ended(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    _, expected = trained(model, x)
    loss = forward(model, x, act)
    loss.backward(retain_graph=True)
    gradients(model)
    loss.backward()
    assert same(gradients(model), expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def exception_in_forward(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    def fail(*_: object) -> None:
        raise ValueError("in forward")

    handle = model[2].register_forward_hook(fail)  # type: ignore[index]
    with pytest.raises(ValueError, match="in forward"):
        forward(model, x, act)
    handle.remove()
    backward(act, model, x)


def interrupted_forward(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model[2].register_forward_hook(fail)  # type: ignore[index]
    with pytest.raises(KeyboardInterrupt):
        forward(model, x, act)
    handle.remove()
    backward(act, model, x)


def exception_in_backward(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    def fail(*_: object) -> None:
        raise ValueError("in backward")

    handle = model[2].register_full_backward_hook(fail)  # type: ignore[index]
    with pytest.raises(ValueError, match="in backward"):
        forward(model, x, act).backward()
    handle.remove()
    model.zero_grad()
    backward(act, model, x)


def gradients_of_some(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    _, expected = trained(model, x)
    found = torch.autograd.grad(forward(model, x, act), list(model.parameters()))
    assert same(list(found), expected)


def backward_to_inputs(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    _, expected = trained(model, x)
    last = list(model[3].parameters())  # type: ignore[index]
    forward(model, x, act).backward(inputs=last)
    assert same(gradients(model), expected[-len(last) :])


def twice_differentiated(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    smooth = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
    found = []
    for context in (None, act):
        one = x.clone().requires_grad_()
        if context is None:
            (slope,) = torch.autograd.grad(smooth(one).sum(), one, create_graph=True)
            slope.square().sum().backward()
        else:
            with context:
                (slope,) = torch.autograd.grad(smooth(one).sum(), one, create_graph=True)
                loss = slope.square().sum()
            loss.backward()
        found.append(gradients(smooth))
    assert same(*found)


def checkpointed(act: ActivationOffload, model: nn.Module, x: torch.Tensor, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for block in self.model.children():
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    _, expected = trained(model, x)
    forward(Checkpointed(), x, act).backward()
    assert same(gradients(model), expected)


def checkpoint_inside(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    checkpointed(act, model, x, False)


def reentrant_checkpoint_inside(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    checkpointed(act, model, x, True)


def checkpoint_outside(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    """What the checkpoint computes again is offloaded then."""
    _, expected = trained(model, x)

    def inner(x: torch.Tensor) -> torch.Tensor:
        with act:
            found: torch.Tensor = model(x).square().sum()
        return found

    torch.manual_seed(7)
    checkpoint(inner, x, use_reentrant=False).backward()
    assert same(gradients(model), expected)


def autocast(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    x = x[:, :4]
    found = []
    for context in (None, act):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            if context is None:
                loss = model(x).square().sum()
            else:
                with context:
                    loss = model(x).square().sum()
        loss.backward()
        found.append(gradients(model))
    assert same(*found)


def hooks_of_others(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    """Outside ours, and inside: torch calls the innermost pair alone."""
    _, expected = trained(model, x)
    with save_on_cpu():
        loss = forward(model, x, act)
    loss.backward()
    assert same(gradients(model), expected)
    torch.manual_seed(7)
    with act:
        hidden = model[0](x)  # type: ignore[index]
        with saved_tensors_hooks(lambda tensor: tensor.numpy(force=True), torch.from_numpy):
            hidden = model[1](hidden)  # type: ignore[index]
        loss = model[3](model[2](hidden)).square().sum()  # type: ignore[index]
    loss.backward()
    assert same(gradients(model), expected)


def blocks_within_blocks(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    _, expected = trained(model, x)
    with act, act:
        loss = forward(model, x, act)
    loss.backward()
    assert same(gradients(model), expected)


def nothing_recorded(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        forward(model, x, act)
    with torch.inference_mode():
        forward(model, x, act)
    assert act.statistics().tensors == 0


def written_in_place(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    """Of what is in memory still, and of what is in the store."""
    for width in (64, 4096):
        one = torch.randn(width, 16, requires_grad=True)
        with act:
            found = one.exp()
            loss = found.sum() + torch.randn(4096, 16, requires_grad=True).exp().exp().exp().sum()
        with torch.no_grad():
            found.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def backward_in_another_thread(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    _, expected = trained(model, x)
    loss = forward(model, x, act)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert same(gradients(model), expected)


def forwards_in_two_threads(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    models = [Model().eval() for _ in range(2)]
    expected = [trained(one, x)[1] for one in models]
    found: list[list[torch.Tensor]] = [[], []]

    def train(number: int) -> None:
        for _ in range(3):
            with act:
                loss = models[number](x).square().sum()
            loss.backward()
            found[number] = gradients(models[number])

    running = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])


def generator_that_nobody_ends(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    def steps() -> Iterator[torch.Tensor]:
        with act:
            yield model(x).sum()

    running = steps()
    assert next(running).isfinite()
    del running


def graphs_of_several_steps(act: ActivationOffload, model: nn.Module, x: torch.Tensor) -> None:
    _, expected = trained(model, x)
    losses = [forward(model, x, act) for _ in range(3)]
    for loss in losses[::-1]:
        loss.backward()
        assert same(gradients(model), expected)


ENDS: list[Callable[[ActivationOffload, nn.Module, torch.Tensor], None]] = [
    *(backward, backward_within_the_block, dropped, dropped_in_a_cycle, retained, retained_and_ended, exception_in_forward),
    *(interrupted_forward, exception_in_backward, gradients_of_some, backward_to_inputs, twice_differentiated),
    *(checkpoint_inside, reentrant_checkpoint_inside, checkpoint_outside, autocast, hooks_of_others, blocks_within_blocks),
    *(nothing_recorded, written_in_place, backward_in_another_thread, forwards_in_two_threads, generator_that_nobody_ends),
    graphs_of_several_steps,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_nothing_is_left_behind(
    end: Callable[[ActivationOffload, nn.Module, torch.Tensor], None], act: ActivationOffload, store: TieredStore
) -> None:
    model = Model()
    end(act, model, inputs())
    nothing_left(act, store)
    backward(act, model, inputs())
    nothing_left(act, store)
    if end is not nothing_recorded:
        assert act.statistics().offloaded > 0


def test_a_store_that_was_closed(store: TieredStore, act: ActivationOffload) -> None:
    model = Model()
    loss = forward(model, inputs(), act)
    store.close()
    with pytest.raises(StoreClosed):
        loss.backward()
    del loss
    gc.collect()
    assert act.statistics().alive == 0


def test_a_store_that_was_rolled_back(store: TieredStore, act: ActivationOffload) -> None:
    store.put("x", torch.zeros(3))
    store.commit()
    model = Model()
    loss = forward(model, inputs(), act)
    store.rollback()
    with pytest.raises(MisuseError, match="before the store was rolled back"):
        loss.backward()
    del loss
    model.zero_grad()
    store.delete("x")
    backward(act, model, inputs())
    nothing_left(act, store)


def test_what_an_earlier_process_left_is_deleted(tmp_path: Path) -> None:
    model = Model()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        loss = forward(model, inputs(), tiered.offload_activations(store, keep=0, min_bytes=0))
        store.put("mine", torch.ones(3))
        store.commit()
        assert [key for key in store if key.startswith("activations/")]
    del loss
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        tiered.offload_activations(store)
        assert list(store) == ["mine"]


def test_arguments(store: TieredStore, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="is not a size"):
        tiered.offload_activations(store, keep="much")
    store.put("x", torch.zeros(2))
    store.commit()
    store.close()
    reading = TieredStore.open(tmp_path / "store", dram="1MiB", access="read")
    with reading, pytest.raises(MisuseError, match="open for reading"):
        tiered.offload_activations(reading)


# -- what goes, and what stays -------------------------------------------------------------------------------------------------


def test_each_memory_is_stored_once(store: TieredStore) -> None:
    act = tiered.offload_activations(store, keep=0, min_bytes=1)
    x = torch.randn(64, 64, requires_grad=True)
    with act:
        hidden = x * 2
        loss = (hidden[:32].exp() * hidden[32:]).sum() + hidden.t().sin().sum() + (hidden * hidden).sum()
    del hidden
    found = act.statistics()
    assert (found.tensors, found.saved) == (2, x.nbytes * 3 // 2)  # hidden, and the exponential of half of it
    loss.backward()
    expected = torch.autograd.grad(
        ((x * 2)[:32].exp() * (x * 2)[32:]).sum() + (x * 2).t().sin().sum() + ((x * 2) * (x * 2)).sum(), x
    )
    assert torch.allclose(x.grad, expected[0])  # type: ignore[arg-type]
    nothing_left(act, store)


def test_what_something_else_uses_is_not_written(store: TieredStore) -> None:
    """A batch, parameters, and what a cast keeps; what is let go of later is written later."""
    act = tiered.offload_activations(store, keep=0, min_bytes=1)
    batch, model = torch.randn(64, 32), nn.Linear(32, 64)
    with act:
        hidden = model(batch)
        kept = hidden.sigmoid()
        loss = kept.square().sum()
        assert act.statistics().offloaded == 0
        del hidden
        loss = loss + batch.mul(torch.randn(32, requires_grad=True)).sum()
        assert act.statistics().offloaded == 0
        del kept
        loss = loss * torch.randn((), requires_grad=True) + torch.randn(4, requires_grad=True).sin().sum()
        list(map(act._keeper.pack, torch.randn(4, 8)))
        act._keeper._inbox.put(None)
    loss.backward()
    assert act.statistics().offloaded < batch.nbytes + 64 * 64 * 4 + 1024
    del loss
    nothing_left(act, store)


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64, torch.int8),
    *(torch.bool, torch.uint8),
]


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9), max_size=4),
    steps=st.lists(st.sampled_from(["t", "slice", "step", "expand", "flip", "conj", "neg", "select", "window"]), max_size=4),
    offset=st.integers(0, 70),
    keep=st.booleans(),
)
def test_any_layout_comes_back(dtype: torch.dtype, shape: list[int], steps: list[str], offset: int, keep: bool) -> None:
    """The same values, sizes, strides, type and distance from a multiple of 64 bytes."""
    count = int(torch.Size(shape).numel())
    base = torch.randint(0, 100, (count + offset,), generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor = base[offset:].view(shape)
    for step in steps:
        if step == "t" and tensor.dim() > 1:
            tensor = tensor.transpose(0, -1)
        elif step == "slice" and tensor.dim():
            tensor = tensor[1:]
        elif step == "step" and tensor.dim():
            tensor = tensor[..., ::2]
        elif step == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        elif step == "conj" and tensor.is_complex():
            tensor = tensor.conj()
        elif step == "neg" and tensor.is_complex():
            tensor = tensor.conj().imag
        elif step == "select" and tensor.dim() and tensor.shape[0]:
            tensor = tensor[0]
        elif step == "window" and tensor.dim() and tensor.shape[-1] > 3:
            tensor = tensor.unfold(-1, 3, 1)
    expected, phase = tensor.clone(), tensor.data_ptr() % 64
    layout = (tensor.size(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    with TieredStore.open(None, dram="1MiB") as store:
        made = keeper.Keeper(store, "x", 1 << 20 if keep else 0, 0)
        packed = made.pack(tensor)
        del tensor, base
        made.pack(torch.zeros(1))
        for _ in range(2):
            found = made.unpack(packed)
            assert layout == (found.size(), found.stride(), found.dtype, found.is_conj(), found.is_neg())
            assert torch.equal(found.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg())
            assert not found.numel() or found.data_ptr() % 64 == phase
            del found
        del packed
        assert made.alive == 0
        assert list(store) == []


# -- faults --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_a_write_that_fails(what: BaseException, store: TieredStore, act: ActivationOffload) -> None:
    """Forward raises it, what was computed before is right, and the next forward works."""
    model, put, calls = Model(), TieredStore.put, []

    def failing(self: TieredStore, key: str, tensor: torch.Tensor) -> None:
        calls.append(key)
        if len(calls) == 3:
            raise what
        put(self, key, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TieredStore, "put", failing)
        with pytest.raises(type(what)):  # noqa: PT012 - in the forward that it strikes, or the next one
            forward(model, inputs(), act)
            forward(model, inputs(), act)
    what.with_traceback(None)
    nothing_left(act, store)
    backward(act, model, inputs())
    nothing_left(act, store)


def test_a_read_that_fails(store: TieredStore, act: ActivationOffload) -> None:
    """Backward raises it. A graph that is retained may be used again."""
    model, lease = Model(), TieredStore.lease
    _, expected = trained(model, inputs())
    loss = forward(model, inputs(), act)

    def failing(self: TieredStore, key: Any, **options: Any) -> Any:
        raise tiered.TieredError("cannot read it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TieredStore, "lease", failing)
        with pytest.raises(tiered.TieredError, match="cannot read it"):
            loss.backward(retain_graph=True)
    assert lease is TieredStore.lease
    model.zero_grad()
    loss.backward()
    assert same(gradients(model), expected)
    del loss
    nothing_left(act, store)


# -- random graphs -------------------------------------------------------------------------------------------------------------

STEPS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x * y / 2,
    lambda x, y: (x @ y.t() @ y).tanh(),
    lambda x, y: x.tanh(),
    lambda x, y: torch.cat([x[:8], y[8:]]),
    lambda x, y: nn.functional.dropout(x, 0.2),
    lambda x, y: x.t().contiguous().t() * 2,
    lambda x, y: (x.unsqueeze(0).expand(3, *x.shape) * y).mean(0),
    lambda x, y: checkpoint(torch.sin, x, use_reentrant=False),
    lambda x, y: x.clone().mul_(2).sigmoid_(),
    lambda x, y: torch.where(x > y, x, y.exp().clamp(max=3)),
]


def bits(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.detach().view(torch.int32)  # of which NaN equals itself


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 30), st.integers(0, 30)), min_size=3, max_size=20),
    keep=st.sampled_from([0, 4 * KIB, 64 * KIB]),
    least=st.sampled_from([0, 3 * KIB]),
    drops=st.integers(0, 3),
)
def test_random_graphs(steps: list[tuple[int, int, int]], keep: int, least: int, drops: int) -> None:
    """Gradients have the bits of the same functions in memory."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        leaf = torch.randn(16, 64, requires_grad=True)
        values = [leaf]
        for which, one, other in steps:
            values.append(STEPS[which](values[one % len(values)], values[other % len(values)]))
        del values[1 : 1 + drops]
        return leaf, torch.stack([value.sum() for value in values]).sum()

    leaf, loss = run()
    loss.backward()
    with TieredStore.open(None, dram="1MiB") as store:
        act = tiered.offload_activations(store, keep=keep, min_bytes=least)
        for _ in range(2):
            with act:
                other, found = run()
            assert torch.equal(bits(found), bits(loss))
            found.backward()
            assert torch.equal(bits(other.grad), bits(leaf.grad))
            del other, found
        nothing_left(act, store)


def test_it_says_what_it_did(store: TieredStore, act: ActivationOffload) -> None:
    assert "none offloaded" in str(act.statistics())
    forward(Model(), inputs(), act).backward()
    found = act.statistics()
    assert found.offloaded <= found.saved
    assert found.ready <= found.restored
    assert found.largest_held < found.saved / 2
    assert "offloaded" in str(found)
    with suppress(KeyError):
        assert not store.keys("activations/*")
