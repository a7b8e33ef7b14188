"""torch's own database of operations, on parameters in the store: values and gradients are those in memory, bit for bit.

Each sample of an operation is computed twice, with a parameter in memory and with one in the store. The parameter is the
operand, another argument, a view, in a list, written to in place or by ``out=``; in forward and outside, with and without
gradients, in ``inference_mode``. Between the parts the unit is pushed out, and its memory is overwritten. The result is the
same, or the same error, or an error of ``tiered``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.quick import quick
from tests.zero.databases import SHARE, InMemory, InStore, Outcome, copied, outcome, seeded, seen, tensors, total
from tiered import TieredStore, zero

pytest.importorskip("expecttest", reason="torch's databases of tests need expecttest")
op_db = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations", reason="this version of torch has its operations elsewhere"
).op_db

UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Operations whose values nobody knows."""
LARGEST = 5000
"""Elements of a sample."""
DRAM = "4MiB"
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """A parameter between two others of its unit."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.full((5,), 100.0))
        self.w = nn.Parameter(value, requires_grad=value.is_floating_point())
        self.after = nn.Parameter(torch.full((5,), 200.0))

    def forward(self, call: Callable[[torch.Tensor], Any]) -> Any:
        return call(self.w)


def operand(way: str, op: Any, sample: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """The value of the parameter, and the call that takes it."""
    given, args, kwargs = sample.input, sample.args, sample.kwargs
    several = isinstance(given, list | tuple)
    if way == "argument":
        at = next(at for at, value in enumerate(args) if isinstance(value, torch.Tensor))
        return args[at], lambda w: op.op(given, *args[:at], w, *args[at + 1 :], **kwargs)
    if way.startswith("out="):
        result = op.op(given, *args, **kwargs)
        return (
            torch.zeros(3) if way == "out= of another shape" else torch.zeros_like(result),
            lambda w: op.op(given, *args, out=w, **kwargs),
        )
    function = {"method": op.method_variant, "in place": op.inplace_variant}.get(way, op.op)
    first = given[0] if several else given
    return first, lambda w: function(
        type(given)([w, *given[1:]]) if several else w[...] if way == "view" else w, *args, **kwargs
    )


def result(way: str, where: str, mode: str, op: Any, sample: Any, place: InMemory | InStore) -> list[Any]:
    seeded(0)
    sample = type(sample)(copied(sample.input), args=copied(sample.args), kwargs=copied(sample.kwargs))
    value, call = operand(way, op, sample)
    model = place.page(Net(value.detach().clone()))
    seeded(1)
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "gradients"):
        found = model(call) if where == "forward" else call(model.w)
        kept = [] if mode == "gradients" else seen(found)
    place.push_out(model)
    if mode == "gradients":
        kept = seen(found)
        loss = total(found)
        if isinstance(loss, torch.Tensor):
            loss.backward()
            place.push_out(model)
    return [kept, seen([parameter.grad for parameter in model.parameters()]), seen(copied(list(model.parameters())))]


def applies(way: str, op: Any, sample: Any) -> bool:
    single = isinstance(sample.input, torch.Tensor)
    if way == "argument":
        return any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in sample.args)
    if way.startswith("out="):
        return bool(op.supports_out)
    if way in ("method", "view"):
        return single and op.method_variant is not None
    return way != "in place" or (single and op.inplace_variant is not None)


WAYS = [
    *((way, where, mode) for way in ("function", "view", "argument") for where in ("forward", "outside") for mode in (
        "gradients", "none", "inference")),
    *((way, where, "none") for way in ("method", "in place", "out=", "out= of another shape") for where in (
        "forward", "outside")),
]  # fmt: skip


def samples_of(op: Any, count: int) -> Iterator[Any]:
    """Samples with a first operand that may be a parameter."""
    seeded(0)
    for sample in op.sample_inputs_func(op, "cpu", torch.float32, False):  # op.sample_inputs looks up which test asks
        several = isinstance(sample.input, list | tuple) and len(sample.input)
        first = sample.input[0] if several else sample.input
        plain = isinstance(first, torch.Tensor) and first.is_floating_point() and first.layout is torch.strided
        if plain and first.numel() <= LARGEST:
            yield sample
            count -= 1
            if not count:
                return


def right(way: str, where: str, memory: Outcome, store: Outcome) -> bool:
    if memory == store or store[0] == "refused" or (memory[0] == store[0] == "error"):
        return True
    # torch says itself that memory of a unit cannot grow, as an operation in place that broadcasts its operand asks, too
    return where == "forward" and way in ("out= of another shape", "in place") and store == ("error", "RuntimeError")


REFUSED = (
    *("and out= would give it", "cannot be given .data of", "the model of parameter 'w' is gone", "resize_as_ would change"),
    *("only real floating point can be trained", "use a copy (.clone())", "cannot be used within torch.func"),
    *(
        "was given the .data of another parameter",
        "which no store has",
        "set_ would change",
        "resize_ would change",
        "has no memory",
    ),
)
"""What the errors of ``tiered`` say: docs/limits.md has them."""

OPERATIONS: Sequence[Any] = [op for op in op_db if torch.float32 in op.dtypes and op.name not in UNDEFINED]
CHOSEN = random.Random(45).sample(range(len(OPERATIONS)), len(OPERATIONS) // SHARE)


STORAGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an offset": lambda w: w.as_strided((2, 2), (1, 2), 0).tolist(),
    "an offset, of a view": lambda w: w[1].as_strided((2, 2), (1, 2), 1).tolist(),
    "scattered at an offset": lambda w: w.as_strided_scatter(torch.zeros(2, 2), (2, 2), (1, 2), 3).tolist(),
    "past the end": lambda w: w.as_strided((3, 4), (4, 1), 1).tolist(),
    "a larger size": lambda w: w.as_strided((4, 4), (4, 1)).tolist(),
    "its size": lambda w: (w.untyped_storage().nbytes(), w.storage_offset()),
}


@pytest.mark.parametrize("name", STORAGES)
def test_the_storage_of_a_parameter_is_its_own(store: TieredStore, name: str) -> None:
    value, ask = torch.arange(12.0).view(3, 4), STORAGES[name]
    model = InStore(store).page(Net(value.clone()))
    expected = outcome(lambda: ask(value))
    assert outcome(lambda: model(ask)) == outcome(lambda: ask(model.w)) == expected
    with zero.gathered(model.w):
        assert outcome(lambda: ask(model.w)) == expected


def test_a_saved_parameter_has_a_storage_of_its_own(store: TieredStore) -> None:
    class Strided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return x * w.sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (w,) = ctx.saved_tensors
            return None, gradient * w.as_strided((2,), (1,), 0).sum() * w.untyped_storage().nbytes()

    model, x = InStore(store).page(Net(torch.arange(12.0).view(3, 4))), torch.ones(2, requires_grad=True)
    model(lambda w: Strided.apply(w, x)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [48.0, 48.0]


@pytest.mark.parametrize("part", quick(range(SHARE + 1), [0]))
def test_operations_of_torch(store: TieredStore, part: int) -> None:
    """``part`` 0 is a share of them, one sample each; the others have all, three samples each."""
    wrong, found = [], Counter[str]()
    for op in [OPERATIONS[at] for at in sorted(CHOSEN)] if part == 0 else OPERATIONS[part - 1 :: SHARE]:
        for sample in samples_of(op, 1 if part == 0 else 3):
            for way, where, mode in WAYS:
                if not applies(way, op, sample):
                    continue
                memory, stored = (
                    outcome(lambda: result(way, where, mode, op, sample, place))  # noqa: B023 - called at once
                    for place in (InMemory(), InStore(store))
                )
                same = "the same" if memory == stored else "another error" if stored[0] == "error" else stored[0]
                found[same] += 1
                if not right(way, where, memory, stored):
                    wrong.append(
                        (op.name, op.variant_test_name, way, where, mode, memory[0], stored[0], f"{stored[1]!s:.90}")
                    )
                if stored[0] == "refused" and memory[0] == "value":
                    assert any(text in stored[1] for text in REFUSED), (op.name, way, where, mode, stored[1])
    print(dict(found))
    assert not wrong, "\n".join(map(str, wrong))
    assert found["the same"] > 2 * (found["refused"] + found["another error"])


# -- views that autograd saves ---------------------------------------------------------------------------------------------

BITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": lambda w: torch.view_as_complex(w).conj(),
    "conjugated twice, and transposed": lambda w: torch.view_as_complex(w).conj().mT.conj().mT,
    "negative": lambda w: torch.view_as_complex(w).conj().imag,
}
COMPLEX: Sequence[Any] = [
    op for op in op_db if torch.complex64 in op.dtypes and op.supports_autograd and op.name not in UNDEFINED
]


def gradients_of(view: str, op: Any, sample: Any, place: InMemory | InStore) -> list[Any]:
    """Of the parameter, and of the other operands, whose gradients need the value that was saved."""

    def leaf(value: Any) -> Any:
        differs = isinstance(value, torch.Tensor) and (value.is_complex() or value.is_floating_point())
        return value.requires_grad_() if differs else value

    seeded(0)
    args, kwargs = (pytree.tree_map(leaf, copied(given)) for given in (sample.args, sample.kwargs))
    model = place.page(Net(torch.view_as_real(sample.input.detach().clone().resolve_conj()).contiguous()))
    seeded(1)
    found = model(lambda w: op.op(BITS[view](w), *args, **kwargs))
    kept = seen(found)
    place.push_out(model)
    loss = total(found)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return [
        kept,
        seen([parameter.grad for parameter in model.parameters()]),
        seen([one.grad for one in tensors((args, kwargs))]),
    ]


@pytest.mark.parametrize("part", quick(range(SHARE + 1), [0]))
def test_views_with_a_bit_that_autograd_saves(store: TieredStore, part: int) -> None:
    chosen = random.Random(45).sample(COMPLEX, len(COMPLEX) // SHARE) if part == 0 else COMPLEX[part - 1 :: SHARE]
    wrong, found = [], Counter[str]()
    for op in chosen:
        seeded(0)
        samples = (one for one in op.sample_inputs_func(op, "cpu", torch.complex64, False))
        plain = (
            one for one in samples if isinstance(one.input, torch.Tensor) and one.input.is_complex() and one.input.dim() > 1
        )
        sample = next((one for one in plain if one.input.numel() <= LARGEST), None)
        for view in BITS if sample is not None else ():
            memory, stored = (
                outcome(lambda: gradients_of(view, op, sample, place))  # noqa: B023 - called at once
                for place in (InMemory(), InStore(store))
            )
            found["the same" if memory == stored else stored[0]] += 1
            if not right(view, "forward", memory, stored):
                wrong.append((op.name, op.variant_test_name, view, memory[0], stored[0], f"{stored[1]!s:.90}"))
    print(dict(found))
    assert not wrong, "\n".join(map(str, wrong))
    assert found["the same"] > 10
