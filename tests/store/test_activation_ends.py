"""However a graph ends, what it saved is gone: from the store, from memory, from the books."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.store.saved import Network, Watched, block, descriptors, nothing_is_left
from tiered import MisuseError, StoreClosed, TieredStore
from tiered.store.activations import hooks_active

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram=MIB) as opened:
        yield opened
        opened.close()


Way = Callable[[TieredStore, Network], torch.Tensor | None]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


class Struck(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


@way
def backward_after_the_block(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network()
    loss.backward()
    return loss


@way
def backward_within_the_block(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network()
        loss.backward()
    return loss


@way
def dropped_without_a_backward(store: TieredStore, network: Network) -> None:
    with block(store):
        network()


@way
def dropped_within_the_block(store: TieredStore, network: Network) -> None:
    with block(store):
        loss = network()
        del loss


@way
def two_backwards_of_a_retained_graph(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network()
    loss.backward(retain_graph=True)
    network.zero_grad()
    loss.backward()
    return loss


@way
def a_retained_graph_is_dropped(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network()
    loss.backward(retain_graph=True)
    return loss


@way
def a_graph_of_the_backward_is_dropped(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network()
        grads = torch.autograd.grad(loss, list(network.parameters()), create_graph=True)
    for parameter, grad in zip(network.parameters(), grads, strict=True):
        parameter.grad = grad.detach()
    return loss


@way
def backward_of_some_inputs(store: TieredStore, network: Network) -> None:
    with block(store):
        loss = network()
    loss.backward(inputs=[network.second.weight])
    network.zero_grad()


@way
def an_exception_in_forward(store: TieredStore, network: Network) -> None:
    def fails(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        part(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), block(store):
        network(fails)


@way
def an_exception_that_is_none_in_forward(store: TieredStore, network: Network) -> None:
    def struck(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        part(x)
        raise Struck

    with pytest.raises(Struck), block(store):
        network(struck)


@way
def an_exception_in_backward(store: TieredStore, network: Network) -> None:
    def fails(grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    def hooked(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        made = part(x)
        made.register_hook(fails)
        return made

    with block(store):
        loss = network(hooked)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    network.zero_grad()


@way
def checkpoints_inside(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network(lambda part, x: checkpoint(part, x, use_reentrant=False))
    loss.backward()
    return loss


@way
def reentrant_checkpoints_inside(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network(lambda part, x: checkpoint(part, x, use_reentrant=True))
        loss.backward()
    return loss


@way
def reentrant_checkpoints_whose_backward_is_after_the_block(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network(lambda part, x: checkpoint(part, x, use_reentrant=True))
    loss.backward()
    return loss


@way
def checkpoints_are_dropped(store: TieredStore, network: Network) -> None:
    with block(store):
        network(lambda part, x: checkpoint(part, x, use_reentrant=False))


def blocked(store: TieredStore) -> Callable[..., torch.Tensor]:
    def inside(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with block(store):
            return part(x)

    return inside


@way
def blocks_inside_of_checkpoints(store: TieredStore, network: Network) -> torch.Tensor:
    inside = blocked(store)
    loss = network(lambda part, x: checkpoint(inside, part, x, use_reentrant=False))
    loss.backward()
    return loss


@way
def blocks_inside_of_reentrant_checkpoints(store: TieredStore, network: Network) -> torch.Tensor:
    inside = blocked(store)
    loss = network(lambda part, x: checkpoint(inside, part, x, use_reentrant=True))
    loss.backward()
    return loss


@way
def hooks_of_others_inside(store: TieredStore, network: Network) -> torch.Tensor:
    def held(part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return part(x)

    with block(store):
        loss = network(held)
    loss.backward()
    return loss


@way
def hooks_of_others_outside(store: TieredStore, network: Network) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t), block(store):
        loss = network()
    loss.backward()
    return loss


@way
def a_block_within_a_block(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network(blocked(store))
    loss.backward()
    return loss


@way
def a_generator_that_is_dropped(store: TieredStore, network: Network) -> None:
    def steps() -> Iterator[torch.Tensor]:
        with block(store):
            yield network()
            raise AssertionError("nobody asks for a second one")

    running = steps()
    next(running)
    torch.ones(3, requires_grad=True).exp().sum().backward()  # the block of a generator that waits is in force
    del running
    gc.collect()


@way
def a_generator_that_ends_within_hooks_of_others(store: TieredStore, network: Network) -> torch.Tensor:
    def steps() -> Iterator[torch.Tensor]:
        with block(store):
            yield network()

    running = steps()
    loss = next(running)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t.detach(), lambda t: t):
        running.close()
        torch.ones(3, requires_grad=True).exp()
    assert seen, "the others' hooks are in force until their own end"
    loss.backward()
    return loss


@way
def backward_in_another_thread(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss


@way
def forward_in_a_thread_that_ended(store: TieredStore, network: Network) -> torch.Tensor:
    made: list[torch.Tensor] = []

    def forward() -> None:
        with block(store):
            made.append(network())

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    made[0].backward()
    return made[0]


@way
def a_cycle_that_the_collector_finds(store: TieredStore, network: Network) -> None:
    with block(store):
        loss = network()
    cycle: list[object] = [loss]
    cycle.append(cycle)


@way
def a_second_forward_before_the_first_backward(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        other = network()
        loss = network()
    other.backward()
    network.zero_grad()
    loss.backward()
    return loss


@way
def a_commit_in_between(store: TieredStore, network: Network) -> torch.Tensor:
    with block(store):
        loss = network()
    store.commit()
    loss.backward()
    return loss


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_left_and_gradients_are_those_of_memory(name: str, store: TieredStore) -> None:
    plain = Network()
    wanted_loss = plain()
    wanted_loss.backward()
    wanted = plain.gradients()
    network = Network()
    watched = Watched(network)
    before = descriptors()
    loss = WAYS[name](store, network)
    if loss is not None:
        assert torch.equal(loss, wanted_loss)
        found = network.gradients()
        assert len(found) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    del loss
    nothing_is_left(store)
    assert watched.alive == 0
    assert descriptors() == before
    assert not hooks_active()


def test_the_gradient_of_a_gradient(store: TieredStore) -> None:
    def penalty(inside: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        network = Network()
        with inside:
            loss = network()
            grads = torch.autograd.grad(loss, list(network.parameters()), create_graph=True)
            total = sum(grad.pow(2).sum() for grad in grads)
        assert isinstance(total, torch.Tensor)
        total.backward()
        return network.gradients()

    wanted = penalty(contextlib.nullcontext())
    found = penalty(block(store))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    nothing_is_left(store)


def test_two_threads_at_once(store: TieredStore) -> None:
    plain = Network()
    plain().backward()
    wanted = plain.gradients()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            network = Network.__new__(Network)
            torch.nn.Module.__init__(network)
            network.first, network.second, network.x = plain.first, plain.second, plain.x
            for _ in range(5):
                with block(store):
                    x = network.x.clone().requires_grad_()
                    loss = torch.tanh(network.first(x)).pow(2).sum()
                (mine,) = torch.autograd.grad(loss, [x])
                x = network.x.clone().requires_grad_()
                (memory,) = torch.autograd.grad(torch.tanh(network.first(x)).pow(2).sum(), [x])
                assert torch.equal(mine, memory)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert wanted
    nothing_is_left(store)


def test_a_graph_of_before_a_rollback_says_so(store: TieredStore) -> None:
    store.put("a", torch.ones(3))
    store.commit()
    network = Network()
    with block(store):
        loss = network()
    store.rollback()
    with pytest.raises(MisuseError, match="before a rollback"):
        loss.backward()
    del loss
    assert list(store) == ["a"]
    nothing_is_left(store)


def test_a_graph_of_a_store_that_was_closed_says_so(tmp_path: Path) -> None:
    network = Network()
    watched = Watched(network)
    with TieredStore.open(tmp_path / "other", dram=MIB) as store, block(store):
        loss = network()
    with pytest.raises(StoreClosed):
        loss.backward()
    del loss
    gc.collect()
    assert watched.alive == 0
    with TieredStore.open(tmp_path / "other", dram=MIB) as store:
        assert len(store) == 0  # what a block has is in no commit
