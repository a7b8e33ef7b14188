"""``tiered.offload_activations``: the same numbers as in memory, what is stored and what is not, and how often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import tiered
from tests.store.saved import Network, block, nothing_is_left
from tiered import ChangedInPlace, MisuseError, TieredStore

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram=MIB) as opened:
        yield opened
        opened.close()


class Keeps(torch.autograd.Function):
    """Saves what it is given, as it is, and shows in backward what came back."""

    @staticmethod
    def forward(ctx, seen, x, *saved):  # type: ignore[no-untyped-def]
        ctx.seen = seen
        ctx.save_for_backward(*saved)
        return x * 1

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.seen += ctx.saved_tensors
        return (None, grad, *(None for _ in ctx.needs_input_grad[2:]))


def there_and_back(store: TieredStore, make: Callable[[], list[torch.Tensor]], **how: int) -> list[torch.Tensor]:
    """What comes back of tensors that nobody has any more once forward has ended."""
    seen: list[torch.Tensor] = []
    with block(store, **how):
        loss = Keeps.apply(seen, torch.ones(1, requires_grad=True), *make())
        loss = loss.exp()  # one more that is saved: what was saved before is looked at again
    loss.backward()
    return seen


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits, type, strides and flags."""
    one_bits, other_bits = (t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (one, other))
    return (
        one.dtype is other.dtype
        and one.stride() == other.stride()
        and one.shape == other.shape
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        and torch.equal(one_bits, other_bits)
    )


def shapes() -> dict[str, Callable[[], torch.Tensor]]:
    base = torch.arange(4096, dtype=torch.float32)
    return {
        "contiguous": lambda: base.clone(),
        "transposed": lambda: base.clone().view(64, 64).t(),
        "every other": lambda: base.clone()[::2],
        "a part": lambda: base.clone()[1000:1010],
        "expanded": lambda: base.clone()[:64].expand(64, 64),
        "all expanded": lambda: torch.ones(()).expand(64, 64),
        "overlapping": lambda: base.clone().unfold(0, 64, 8),
        "no elements": lambda: torch.empty(0, 7),
        "no elements of many": lambda: base.clone()[:0],
        "no dimension": lambda: torch.tensor(3.0),
        "negative strides cannot be": lambda: base.clone().flip(0),
        "complex": lambda: torch.complex(base[:64], -base[:64]),
        "conjugated": lambda: torch.complex(base[:64], -base[:64]).conj(),
        "negated": lambda: torch.complex(base[:64], -base[:64]).conj().imag,
        "one part of complex": lambda: torch.complex(base[:64], base[64:128]).imag,
        "integers": lambda: base.to(torch.int64),
        "small integers": lambda: base.to(torch.uint8)[1:],
        "truths": lambda: base > 7,
        "half": lambda: base.half()[3:],
        "bf16": lambda: base.bfloat16().view(64, 64)[:, 5],
        "float8": lambda: base.to(torch.float8_e4m3fn),
        "double": lambda: base.double()[7:100],
        "not a number": lambda: torch.full((300,), float("nan")),
        "channels last": lambda: base.clone().view(2, 8, 16, 16).to(memory_format=torch.channels_last),
        "larger than a piece": lambda: torch.arange(3 * 32768 // 4 + 5, dtype=torch.float32),
    }


@pytest.mark.parametrize("name", shapes())
def test_every_kind_of_tensor_comes_back_as_it_was(name: str, store: TieredStore) -> None:
    make = shapes()[name]
    (found,) = there_and_back(store, lambda: [make()])
    assert same(found, make())
    nothing_is_left(store)


def test_a_tensor_that_is_saved_twice_is_stored_once_and_views_share_it(store: TieredStore) -> None:
    def views() -> list[torch.Tensor]:
        base = torch.arange(4096, dtype=torch.float32)
        return [base, base, base.view(64, 64).t(), base[17:], base[::3], base.view(torch.int32), base[:8]]

    seen: list[torch.Tensor] = []
    with block(store) as activations:
        loss = Keeps.apply(seen, torch.ones(1, requires_grad=True), *views())
        loss = loss.exp()
        assert activations.statistics().offloaded == 4096 * 4
        assert activations.statistics().in_store == 4096 * 4
    loss.backward()
    assert all(same(one, other) for one, other in zip(seen, views(), strict=True))
    nothing_is_left(store)


def test_parameters_buffers_inputs_and_leased_tensors_are_left_alone(store: TieredStore) -> None:
    store.put("weight", torch.randn(64, 64))
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).eval()
    x = torch.randn(64, 64)
    with block(store) as activations:
        with store.lease("weight") as weight:
            loss = (network[0](x) * 1).sum() + (x.requires_grad_() @ weight).sum()
            del weight
        for _ in range(300):
            loss = loss * 1.0
        assert activations.statistics().offloaded == 0
    loss.backward()
    assert activations.statistics().offloaded == 0
    del loss
    assert list(store) == ["weight"]
    nothing_is_left(store)


def test_the_newest_bytes_stay_in_memory_and_are_never_written(store: TieredStore) -> None:
    size = 64 << 10
    with block(store, keep=4 * size) as activations:
        x = torch.randn(size // 4, requires_grad=True)
        for _ in range(12):
            x = x.tanh()
        assert activations.statistics().in_store == 8 * size
    x.sum().backward()
    assert activations.statistics().restored == 8 * size
    with block(store, keep="64MiB") as activations:  # type: ignore[arg-type]
        x = torch.randn(size // 4, requires_grad=True)
        for _ in range(12):
            x = x.tanh()
        x.sum().backward()
    assert activations.statistics().offloaded == 0
    del x
    nothing_is_left(store)


def test_small_tensors_stay_in_memory(store: TieredStore) -> None:
    with block(store, min_bytes=4096) as activations:
        x = torch.randn(4096 // 4 - 1, requires_grad=True)
        for _ in range(12):
            x = x.tanh()
        x.sum().backward()
    assert activations.statistics().offloaded == 0
    assert activations.statistics().left == 12


def test_a_small_part_of_large_memory_does_not_keep_the_memory(store: TieredStore) -> None:
    seen: list[torch.Tensor] = []
    large = torch.arange(1 << 16, dtype=torch.float32)
    storage = StorageWeakRef(large.untyped_storage())
    with block(store, min_bytes=4096) as activations:
        loss = Keeps.apply(seen, torch.ones(1, requires_grad=True), large[77:87])
        del large
        loss = loss * torch.randn(1 << 14, requires_grad=True)
    assert storage.expired()
    loss.sum().backward()
    assert torch.equal(seen[0], torch.arange(77.0, 87.0))
    assert activations.statistics().offloaded == 0


@pytest.mark.parametrize("keep", [0, 1 << 30])
def test_what_is_changed_in_place_after_it_was_saved_raises_as_torch_does(keep: int, store: TieredStore) -> None:
    def forward() -> torch.Tensor:
        x = torch.randn(4096, requires_grad=True).tanh()
        y = x * 2
        for _ in range(3):
            y = y.tanh()
        x.add_(1)
        return y.sum() + x.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward().backward()
    with block(store, keep=keep):
        loss = forward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        loss.backward()
    assert isinstance(raised.value, ChangedInPlace)
    del raised, loss
    nothing_is_left(store)


def test_a_parameter_that_was_stepped_before_backward_raises_as_torch_does(store: TieredStore) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with block(store):
        loss = network(torch.randn(8, 64, requires_grad=True)).sum()
    with torch.no_grad():
        network[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_a_function_had_in_its_hands_goes_to_the_store_at_the_end_of_the_block(store: TieredStore) -> None:
    def forward() -> torch.Tensor:
        held = [torch.randn(4096, requires_grad=True)]
        for _ in range(40):
            held.append(held[-1].tanh())
        return held[-1].sum()

    with block(store) as activations:
        loss = forward()
    assert activations.statistics().in_store == 40 * 4 * 4096
    loss.backward()
    del loss
    nothing_is_left(store)


def test_a_tensor_that_changed_in_place_is_stored_anew(store: TieredStore) -> None:
    seen: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        x = torch.ones(4096)
        first = Keeps.apply(seen, torch.ones(1, requires_grad=True), x.clone())
        x.mul_(2)
        second = Keeps.apply(seen, first, x)
        for _ in range(3):
            second = second.exp().log()
        return second

    with block(store):
        loss = forward()
    loss.backward()
    assert [float(one[0]) for one in seen] == [2.0, 1.0]


def test_memory_of_another_tensor_at_the_same_place_is_another_tensor(store: TieredStore) -> None:
    seen: list[torch.Tensor] = []
    with block(store):
        loss = torch.ones(1, requires_grad=True)
        for value in range(20):  # the allocator gives the same memory again and again
            loss = Keeps.apply(seen, loss, torch.full((4096,), float(value)))
    loss.backward()
    assert [float(one[5]) for one in seen] == list(reversed([float(value) for value in range(20)]))


def test_autocast(store: TieredStore) -> None:
    def gradients(inside: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        network = Network()
        with inside, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = network()
        loss.backward()
        return network.gradients()

    wanted, found = gradients(contextlib.nullcontext()), gradients(block(store))
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    nothing_is_left(store)


def test_each_step_uses_the_same_keys(store: TieredStore) -> None:
    orders = []
    for _ in range(3):
        with store.trace() as order, block(store):
            loss = Network()()
            loss.backward()
            del loss
        orders.append([(touch.key, touch.use) for touch in order if touch.key.startswith("tiered.saved/")])
    assert orders[0] == orders[1] == orders[2] != []


def test_what_is_saved_is_in_no_commit_and_no_name_of_others(store: TieredStore) -> None:
    store.put("a", torch.ones(3))
    with block(store):
        loss = Network()()
    assert any(key.startswith("tiered.saved/") for key in store)
    assert store.commit() == 1
    loss.backward()
    assert store.commit() == 2
    with pytest.raises(MisuseError, match="another name"):
        store.put("tiered.saved/0", torch.ones(3))
    with pytest.raises(MisuseError, match="another name"):
        store.create("tiered.saved/0", [3])
    folder = store.folder
    del loss
    nothing_is_left(store)
    store.close()
    with TieredStore.open(folder, dram=MIB, generation=1) as again:
        assert list(again) == ["a"]


def test_a_store_that_cannot_take_them_is_refused(tmp_path: Path) -> None:
    with TieredStore.open(None, dram=MIB) as store, pytest.raises(MisuseError, match="memory alone"):
        tiered.offload_activations(store)
    with TieredStore.open(tmp_path / "store", dram=MIB) as store:
        store.put("a", torch.ones(3))
    with TieredStore.open(tmp_path / "store", access="read") as store, pytest.raises(MisuseError, match="open for reading"):
        tiered.offload_activations(store)
    with pytest.raises(MisuseError, match="closed"):
        tiered.offload_activations(store)
    with pytest.raises(MisuseError, match="takes the store"):
        tiered.offload_activations("activations/")  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{"keep": "many"}, {"keep": -1}, {"min_bytes": 1.5}])
def test_sizes_that_are_none_are_refused(how: dict[str, object], store: TieredStore) -> None:
    with pytest.raises(MisuseError):
        tiered.offload_activations(store, **how)  # type: ignore[arg-type]


def test_it_says_what_it_did(store: TieredStore) -> None:
    with block(store) as activations:
        loss = Network()()
    said = activations.statistics()
    assert said.saved > said.left > 0
    assert said.in_store == said.offloaded > 0
    assert said.restored == said.hidden == 0
    loss.backward()
    del loss
    said = activations.statistics()
    assert said.restored >= said.offloaded - said.shared
    assert 0 <= said.hidden <= said.restored
    assert said.in_store == said.in_memory == 0
    assert said.waited_in_forward >= 0
    assert said.waited_in_backward >= 0


def test_the_store_may_have_a_device(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram=MIB, hbm=MIB, device="cpu") as store:
        wanted = Network()
        wanted().backward()
        network = Network()
        with block(store) as activations:
            loss = network()
        loss.backward()
        assert activations.statistics().restored > 0
        assert all(torch.equal(one, other) for one, other in zip(wanted.gradients(), network.gradients(), strict=True))
        del loss
        nothing_is_left(store)
        store.close()


# -- any program -------------------------------------------------------------------------------------------------------------

OPERATIONS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a * b,
    lambda a, b: torch.tanh(a) + b,
    lambda a, b: a.t() @ b,
    lambda a, b: (a + 1).expand_as(a).sigmoid() * b[:1],
    lambda a, b: torch.cat([a[::2], b[1::2]]),
    lambda a, b: (torch.complex(a, b).conj() * torch.complex(b, a).conj().imag).real,
    lambda a, b: torch.where(a > b, a, b).relu(),
    lambda a, b: a.unfold(0, 2, 2).mean(-1).repeat(2, 1) - b,
    lambda a, b: a.clone().mul_(b),
    lambda a, b: torch.nn.functional.dropout(a, 0.5) - b.exp().clamp(max=2),
    lambda a, b: a.softmax(-1).cumsum(0) * b.detach(),
    lambda a, b: a[b.argsort(0)[:, 0]],
)

programs = st.lists(
    st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=14
)


def computed(program: list[tuple[int, int, int]], inside: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
    """The gradients of a program: each of its lines computes from two earlier results."""
    torch.manual_seed(3)
    leaves = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    with inside:
        results = list(leaves)
        for operation, left, right in program:
            results.append(OPERATIONS[operation](results[left % len(results)], results[right % len(results)]))
        loss = torch.stack([result.square().mean() for result in results[-3:]]).sum()
        del results
    loss.backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path_factory.mktemp("shared") / "store", dram=MIB) as opened:
        yield opened
        opened.close()


@settings(max_examples=60, deadline=None)
@given(program=programs, keep=st.sampled_from([0, 300, 2000]), least=st.sampled_from([1, 200, 300]))
def test_any_program_has_the_gradients_of_memory(
    program: list[tuple[int, int, int]], keep: int, least: int, shared_store: TieredStore
) -> None:
    wanted = computed(program, contextlib.nullcontext())
    found = computed(program, block(shared_store, keep=keep, min_bytes=least))
    assert len(wanted) == len(found)
    assert all(same(one, other) for one, other in zip(wanted, found, strict=True))
    nothing_is_left(shared_store)
