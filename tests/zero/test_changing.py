"""What becomes of a paged model: out of its store (``zero.unpage``) it is the one that it would be in memory, and can be paged
again; with other types and shapes it is the one that it would be with these in memory."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero.harness import Deterministic, equal, train
from tests.zero.models import Tied
from tests.zero.striking import Struck, described, shuffled, struck_at
from tiered import CapacityError, InterruptedStep, MisuseError, TieredStore, zero
from tiered.zero.paging.pager import pager_of


class Experts(nn.Module):
    """A mixture whose experts are in one parameter, and an attribute that shows a part of another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 24) / 4), nn.Parameter(torch.randn(4, 24, 16) / 4)
        self.mix = nn.Linear(16, 16)
        self.rows = [self.mix.weight.detach()[2:5]]

    def loss(self, seed: int) -> torch.Tensor:
        x = self.mix(torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)))
        made = [torch.tanh(x @ self.up[number]) @ self.down[number] for number in (seed % 4, (seed + 1) % 4)]
        return torch.stack(made).square().mean() + self.rows[0].sum()


def paged(store: TieredStore) -> tuple[Any, Any]:
    """A model in memory, and the same one in a store."""
    reference = Tied()
    return reference, zero.page(copy.deepcopy(reference), store)


WAYS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (Tied, {}),
    "buffers": (Deterministic, {}),
    "parts": (Tied, {"micro_batch": 2}),
    "again": (Tied, {"activations": "recompute"}),
    "experts": (Experts, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_in_memory_and_in_the_store(way: str, store: TieredStore) -> None:
    """Three steps in the store, three in memory, three in the store: the bits of nine in memory; and what the store has kept
    goes on from the third."""
    make, options = WAYS[way]
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    model = make()  # of a view in an attribute a deep copy is a tensor of its own
    if "micro_batch" in options:  # whose numbers are those of the same split
        zero.page(reference, store, name="reference", **options)
        adam: Any = zero.AdamW(reference.parameters(), lr=1e-2)
    else:
        adam = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    before, objects = [sorted(vars(module)) for module in model.modules()], list(model.parameters())
    zero.page(model, store, **options)
    optimizer: Any = zero.AdamW(model.parameters(), lr=1e-2)
    losses = [train(reference, adam, steps=3, batches=1), train(model, optimizer, steps=3, batches=1)]
    assert losses[0] == losses[1]
    third = {name: value.clone() for name, value in reference.state_dict().items()}
    zero.commit(model, optimizer)
    state = optimizer.state_dict()

    assert zero.unpage(model) is model
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    assert {type(one) for one in objects} == {nn.Parameter}
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert not any(hooks for module in model.modules() for name, hooks in vars(module).items() if "hooks" in name)
    assert equal(model.state_dict(), reference.state_dict())
    if way == "experts":
        assert model.rows[0].data_ptr() == model.mix.weight[2:5].data_ptr()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    if "micro_batch" not in options:
        mine = torch.optim.AdamW(model.parameters(), fused=True)
        mine.load_state_dict(state)
        assert train(model, mine, steps=3, batches=1) == train(reference, adam, steps=3, batches=1)
        state = mine.state_dict()
        assert equal(model.state_dict(), reference.state_dict())

    kept = zero.page(make(), store, existing="resume", **options)
    zero.resume(kept, zero.AdamW(kept.parameters(), lr=1e-2))
    assert equal(kept.state_dict(), third)

    zero.page(model, store, existing="overwrite", **options)
    optimizer = zero.AdamW(model.parameters())
    optimizer.load_state_dict(state)
    assert train(model, optimizer, steps=3, batches=1) == train(reference, adam, steps=3, batches=1)
    assert equal(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("policy", [zero.Policy(quantize="int8"), zero.Policy(storage=torch.bfloat16)], ids=["int8", "bf16"])
def test_what_is_stored_in_fewer_bits_has_the_type_that_it_computes_with(store: TieredStore, policy: zero.Policy) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    zero.page(model, store, policy=policy)
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = model(x)
        zero.unpage(model)
        assert torch.equal(model(x), expected)


def test_an_update_that_is_pending_and_a_gradient_come_along(store: TieredStore) -> None:
    reference, model = paged(store)
    adam, optimizer = torch.optim.AdamW(reference.parameters(), fused=True), zero.AdamW(model.parameters())
    for one, its in ((reference, adam), (model, optimizer)):
        one.loss(0).backward()
        its.step()
        its.zero_grad()
        one.loss(1).backward()
        its.step()  # pending in the store, and the gradients stay
    zero.unpage(model)
    assert equal(model.state_dict(), reference.state_dict())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)


def test_the_end_of_the_block_commits_what_was_trained_before(tmp_path: Path) -> None:
    """Also where nobody committed; and what is done in memory afterwards is not in it."""
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters())
        train(model, optimizer, steps=3, batches=1)
        zero.unpage(model)
        trained = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            model.head.weight.zero_()
        assert train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(Tied(), store, existing="resume")
        again = zero.AdamW(model.parameters())
        zero.resume(model, again)
        assert equal(model.state_dict(), trained)
        assert {int(one["step"]) for one in again.state_dict()["state"].values()} == {3}


def test_hooks_and_handles_of_others_stay(store: TieredStore) -> None:
    model = Tied()
    calls: list[str] = []
    early = model.head.register_forward_hook(lambda *_: calls.append("early"))
    zero.page(model, store)
    late = model.head.register_forward_hook(lambda *_: calls.append("late"))
    model.head.weight.register_post_accumulate_grad_hook(lambda one: calls.append(f"{one.grad.abs().sum() > 0}"))
    model.loss(0).backward()
    zero.unpage(model)
    model.loss(1).backward()
    assert calls == ["early", "late", "True"] * 2
    early.remove()
    late.remove()
    model.loss(0)
    assert len(calls) == 6


def test_a_graph_of_before_raises_or_is_right(store: TieredStore) -> None:
    reference, model = paged(store)
    loss, theirs = model.loss(0), reference.loss(0)
    zero.unpage(model)
    try:
        loss.backward()
    except (MisuseError, InterruptedStep):
        return
    theirs.backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_cannot_be_is_refused_and_changes_nothing(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, model = paged(store)
    with pytest.raises(MisuseError, match="not paged, so its parameters are in memory"):
        zero.unpage(Tied())
    with pytest.raises(MisuseError, match=r"torch\.nn\.Module"):
        zero.unpage(model.head.weight)
    with pytest.raises(MisuseError, match=r"a part of model 'model', which has '.*', too: unpage the whole"):
        zero.unpage(model.blocks[0])
    handle = model.head.register_forward_hook(lambda *_: zero.unpage(model))
    with pytest.raises(MisuseError, match="between steps"):
        model.loss(0)
    handle.remove()
    with zero.gathered(model), pytest.raises(MisuseError, match="leave its block first"):
        zero.unpage(model)
    forward = model.head.forward
    model.head.forward = lambda x: forward(x)
    with pytest.raises(MisuseError, match="forward of a Linear was replaced after"):
        zero.unpage(model)
    model.head.forward = forward
    monkeypatch.setattr(sys.modules["tiered.zero.changing"], "memory_of_process", lambda: type("", (), {"headroom": 1000})())
    with pytest.raises(CapacityError, match=r"is .* KiB with its gradients, and cpu has 1000 bytes free: .* zero\.export"):
        zero.unpage(model)
    assert pager_of(model).model is model
    assert model.loss(0).item() == reference.loss(0).item()


def test_two_models_in_one_become_ordinary_ones(store: TieredStore) -> None:
    both = nn.ModuleList([zero.page(Tied(), store, name="one"), zero.page(Tied(), store, name="other"), nn.Linear(2, 2)])
    zero.unpage(both)
    assert all(type(one) is nn.Parameter and not hasattr(one, "_tiered") for one in both.parameters())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to": lambda model: model.to(dtype=torch.bfloat16),
    "back": lambda model: model.half().float(),
    "a part": lambda model: model.get_submodule("mix" if isinstance(model, Experts) else "head").to(torch.float64),
    "around it": lambda model: nn.ModuleDict({"inner": model}).bfloat16(),
}


class Wide(nn.Module):
    """Its embedding is sliced, a convolution has its channels last, and what is 0-d has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, 64)
        self.image = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.frozen = nn.Parameter(torch.arange(6), requires_grad=False)
        self.register_buffer("count", torch.ones(3))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [Tied, Experts, Wide])
def test_other_types_are_those_of_the_same_change_in_memory(make: type, change: str, store: TieredStore) -> None:
    if make is Wide and change == "a part":
        return
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    model = zero.page(make(), store)
    objects = list(model.parameters())
    assert bool(pager_of(model).sliced) == (make is not Tied)
    assert zero.statistics(model).divided == ()
    for one in (reference, model):
        CHANGES[change](one)
    found, expected = model.state_dict(), reference.state_dict()
    assert equal(found, expected)
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    assert all(value.stride() == expected[name].stride() for name, value in found.items())
    assert [one for one in store if "import" in one] == []
    if make is Tied and change in ("double", "back"):  # of 16 bits there are masters
        assert train(model, zero.SGD(model.parameters(), lr=0.1, foreach=False)) == train(
            reference, torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False)
        )
        assert equal(model.state_dict(), reference.state_dict())
    elif make is Tied and change != "a part":
        assert model.loss(0).item() == reference.loss(0).item()
    elif make is Experts and change != "a part":
        dtype = next(iter(reference.parameters())).dtype
        given = torch.randn(2, 16).to(dtype)
        assert torch.equal(model.mix(given), reference.mix(given))


def test_another_shape_and_another_table_of_tied_weights(store: TieredStore) -> None:
    """As transformers resizes embeddings; and what was seen before shows what it showed."""
    reference, model = paged(store)
    kept = [one.head.weight.detach()[:2] for one in (reference, model)]
    for one in (reference, model):
        larger = torch.ones(80, 32)
        larger[:64] = one.embedding.weight.data
        one.embedding.weight.data = larger
        one.embedding.num_embeddings = 80
        larger.zero_()  # the model's own values from here on
        with torch.no_grad():
            one.head.weight[:64] += 1
    with torch.no_grad():
        reference.embedding.weight.copy_(model.embedding.weight)  # in memory `larger` is the weight itself
    assert torch.equal(*kept)
    assert model.head.weight is model.embedding.weight or not hasattr(model, "tied")
    assert torch.equal(model.embedding.weight[64:], torch.ones(16, 32))
    assert equal(model.state_dict(), reference.state_dict())
    theirs = torch.optim.AdamW(reference.parameters(), fused=True)
    assert train(model, zero.AdamW(model.parameters())) == train(reference, theirs)


def test_a_change_is_committed_and_resumed(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        reference, model = paged(store)
        zero.commit(model, extra={"done": 1})
        for one in (reference, model):
            one.half()
        zero.commit(model, extra={"done": 2})
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        with pytest.raises(MisuseError, match=r"float16|half"):
            zero.page(Tied(), store, existing="resume")
        model = zero.page(Tied().half(), store, existing="resume")
        assert zero.resume(model) == {"done": 2}
        assert equal(model.state_dict(), reference.state_dict())
        model.float()
        assert equal(model.state_dict(), reference.float().state_dict())


def test_changes_that_cannot_be_are_refused_by_name(store: TieredStore) -> None:
    reference, model = paged(store)
    model.loss(0).backward()
    said = "the type or the shape of parameter '.*' cannot change in the store"
    with pytest.raises(MisuseError, match=f"{said} while there are gradients: call zero_grad"):
        model.half()
    model.zero_grad()
    optimizer = zero.AdamW(model.parameters())
    with pytest.raises(MisuseError, match=rf"{said} once an optimizer keeps states \(.*\): .*zero\.unpage"):
        model.half()
    train(model, optimizer, steps=1)
    optimizer.zero_grad()
    with pytest.raises(MisuseError, match=rf"{said} once an optimizer keeps states"):
        model.embedding.weight.data = torch.ones(3, 32)
    quantised = zero.page(nn.Linear(64, 64), store, name="packed", policy=zero.Policy(quantize="int8"))
    with pytest.raises(MisuseError, match=f"{said}, where 'weight' is packed"):
        quantised.half()
    with pytest.raises(MisuseError, match="cannot be moved to meta"):
        model.to("meta")
    other = zero.page(copy.deepcopy(reference), store, name="other")
    with zero.gathered(other), pytest.raises(MisuseError, match="leave its block first"):
        other.half()
    assert equal(other.state_dict(), reference.state_dict())


def test_a_refusal_leaves_a_model_with_a_module_in_memory_as_it_was(store: TieredStore) -> None:
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model = zero.page(copy.deepcopy(reference), store)
    for one in (reference, model):
        torch.manual_seed(1)
        one[1] = nn.Linear(8, 2)  # added after zero.page: it stays in memory
    hooks = [len(hooks) for module in model.modules() for name, hooks in vars(module).items() if "hooks" in name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pager_of(model), "leaving", lambda *_: strike())
        with pytest.raises(Struck):
            model.half()
    assert [len(hooks) for module in model.modules() for name, hooks in vars(module).items() if "hooks" in name] == hooks
    x = torch.randn(3, 8)
    assert torch.equal(model(x), reference(x))
    assert torch.equal(model.half()[0].weight.detach().clone(), reference.half()[0].weight)
    assert all(hasattr(one, "_tiered") for one in model.parameters())  # as the whole model is paged anew


def strike() -> None:
    raise Struck


def test_a_disk_that_is_too_small_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB", nvme="1536KiB") as store:
        reference = nn.Sequential(*(nn.Linear(128, 128) for _ in range(18)))
        model = zero.page(copy.deepcopy(reference), store)
        before = sorted(store)
        x = torch.randn(3, 128)
        with pytest.raises(CapacityError):
            model.double()
        assert sorted(key for key in store if "/checkpoint" not in key) == before
        assert equal(model.state_dict(), reference.state_dict())
        assert torch.equal(model(x), reference(x))
        store.close()


@pytest.mark.parametrize("count", [12, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_strike_leaves_the_types_of_before_or_of_after(store: TieredStore, count: int) -> None:
    torch.manual_seed(0)
    reference: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    x = torch.randn(2, 16)
    expected = {dtype: copy.deepcopy(reference).to(dtype)(x.to(dtype)) for dtype in (torch.bfloat16, torch.float32)}
    said = dict.fromkeys(["before", "after", "anew"], 0)

    def anew(number: int) -> Any:
        made = copy.deepcopy(reference)
        return zero.page(made, store, name=f"m{number}")

    with struck_at(None) as lines:
        anew(0).bfloat16()
    values = {name: value.clone() for name, value in reference.state_dict().items()}
    for number, place in enumerate(shuffled(lines.seen, count)[:count], 1):
        model = anew(number)
        with struck_at(place):
            model.bfloat16()
        kinds = {one.dtype for one in model.parameters()}
        try:
            if not any(hasattr(one, "_tiered") for one in model.parameters()):
                raise InterruptedStep("the strike came as the change was undone")
            model.to(torch.float32) if len(kinds) > 1 else model(x.to(next(iter(kinds))))
            kinds = {one.dtype for one in model.parameters()}
            found = model(x.to(next(iter(kinds))))
        except InterruptedStep:
            said["anew"] += 1
            model = zero.page(copy.deepcopy(reference), store, name=f"m{number}", existing="resume")
            kinds, found = {torch.float32}, model(x)
        said["before" if torch.float32 in kinds else "after"] += 1
        if len(kinds) == 1:
            (kind,) = kinds
            assert torch.equal(found, expected[kind]), described(place, Struck)
            model.float()
            if kind is torch.float32:
                assert equal(model.state_dict(), values), described(place, Struck)
        store.delete_owned(pager_of(model).owner)
        del model
    print(said)
    assert said["before"]
    assert said["after"] or count < 100


@pytest.mark.parametrize("count", [12, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_strike_leaves_a_paged_model_or_an_ordinary_one(store: TieredStore, count: int) -> None:
    """Whichever line it strikes; a model that was cut off between becomes an ordinary one when it is used next."""
    reference = Tied()
    expected, values = reference.loss(0).item(), reference.state_dict()
    said = dict.fromkeys(["paged", "ordinary", "finished"], 0)

    def anew(number: int) -> Any:
        return zero.page(copy.deepcopy(reference), store, name=f"m{number}")

    with struck_at(None) as lines:
        zero.unpage(anew(0))
    for number, place in enumerate(shuffled(lines.seen, count)[:count], 1):
        model = anew(number)
        with struck_at(place):
            zero.unpage(model)
        try:
            found = model.loss(0).item()
        except InterruptedStep as problem:
            if "complete now" not in str(problem):
                raise
            said["finished"] += 1
            found = model.loss(0).item()
        assert found == expected, described(place, Struck)
        if any(hasattr(one, "_tiered") for one in model.parameters()):
            said["paged"] += 1
            zero.unpage(model)
        else:
            said["ordinary"] += 1
        assert equal(model.state_dict(), values), described(place, Struck)
        assert model.loss(0).item() == expected
        assert not any(hasattr(one, "_tiered") for one in model.parameters()), described(place, Struck)
        del model
    print(said)
    assert said["paged"]
