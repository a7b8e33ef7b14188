"""Parameters that stay in memory, states in the store: the bits of torch's own AdamW."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero.harness import equal
from tests.zero.models import Tied, parameter_groups
from tests.zero.narrow import MasterAdamW, Narrow, half_up
from tiered import MisuseError, TieredStore, zero

STEPS = 5
LR = 1e-2


def train(model: Any, optimizer: Any, first: int, last: int, scheduler: Any = None, clip: float | None = 0.1) -> list[float]:
    """Losses and norms."""
    numbers = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = model.loss(step)
        loss.backward()
        numbers.append(loss.item())
        if clip is not None:
            numbers.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return numbers


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return list(optimizer.state_dict()["state"].values())


def same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    left, right = one.state_dict()["state"], other.state_dict()["state"]
    return left.keys() == right.keys() and all(equal(left[index], right[index]) for index in left)


class Wide(nn.Module):
    """Types of two widths, a matrix with strides of its own, some parameters frozen and some unused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(300, 500)
        self.inner.weight = nn.Parameter(self.inner.weight.detach().t().contiguous().t())
        self.outer = nn.Linear(500, 3, dtype=torch.float64)
        self.outer.bias.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.scalar = nn.Parameter(torch.ones(()))

    def loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(2, 300, generator=torch.Generator().manual_seed(seed))
        return self.outer(self.inner(x).double() * self.scalar).square().mean().float()


# One process


@pytest.mark.parametrize("make", [functools.partial(Tied, width=64), Wide])
def test_training_is_that_of_torch_bit_for_bit(tmp_path: Path, make: Any) -> None:
    """Groups, clipping, a scheduler, states that do not fit the budget."""
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    theirs = torch.optim.AdamW(parameter_groups(reference), lr=LR, fused=True)
    expected = train(reference, theirs, 0, STEPS, torch.optim.lr_scheduler.StepLR(theirs, 2, 0.5))
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        ours = zero.AdamW(parameter_groups(model), lr=LR, store=store)
        assert train(model, ours, 0, STEPS, torch.optim.lr_scheduler.StepLR(ours, 2, 0.5)) == expected
        assert equal(reference.state_dict(), model.state_dict())
        assert same(ours, theirs)
        statistics = store.statistics()
        kept = sum(store.spec(key).nbytes for key in store)
        assert statistics.tiers[0].peak <= 1 << 20 < kept
        graded = [p for p in model.parameters() if p.grad is not None]
        assert sum(2 * p.numel() * p.element_size() for p in graded) <= kept
        store.close()


@pytest.mark.parametrize("make", [Narrow, lambda: Tied(width=64).to(torch.bfloat16)])
def test_narrow_parameters_have_masters(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    masters = MasterAdamW([{"params": list(reference.parameters())}], lr=LR)
    expected = train(reference, masters, 0, STEPS, clip=None)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        ours = zero.AdamW(model.parameters(), lr=LR, store=store)
        assert train(model, ours, 0, STEPS, clip=None) == expected
        assert equal(reference.state_dict(), model.state_dict())
        flat = [master for group in masters.param_groups for master in group["params"]]
        narrow = {id(master) for _, master in masters.pairs}
        found = ours.state_dict()["state"]
        for index, state in masters.state_dict()["state"].items():
            whole = {**state, "master": flat[index].detach()} if id(flat[index]) in narrow else state
            assert equal(whole, found[index])
        store.close()


@pytest.mark.parametrize("make", [functools.partial(Tied, layers=2), Narrow])
def test_it_goes_on_from_a_commit_bit_for_bit(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = zero.AdamW(model.parameters(), lr=LR, store=store, name="adam")
        train(model, optimizer, 0, 3, clip=None)
        values = copy.deepcopy(model.state_dict())
        store.commit()
        expected = train(model, optimizer, 3, STEPS, clip=None)
        store.close()
    other = make()
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        with pytest.raises(MisuseError, match=r"tensors under 'adam': give another name=, existing='overwrite'"):
            zero.AdamW(other.parameters(), lr=LR, store=store, name="adam")
        optimizer = zero.AdamW(other.parameters(), lr=LR, store=store, name="adam", existing="resume")
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}
        other.load_state_dict(values)
        assert train(other, optimizer, 3, STEPS, clip=None) == expected
        assert equal(model.state_dict(), other.state_dict())
        store.rollback()
        other.load_state_dict(values)
        assert train(other, optimizer, 3, STEPS, clip=None) == expected
        fresh = zero.AdamW(other.parameters(), lr=LR, store=store, name="adam", existing="overwrite")
        assert not moments(fresh)
        assert {key for key in store if "#" in key} == set()
        store.close()


def test_groups_that_were_added_later_go_on_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Tied(layers=2)
    model = copy.deepcopy(reference)
    first, *others = list(model.parameters())
    theirs = torch.optim.AdamW([next(reference.parameters())], lr=LR, fused=True)
    train(reference, theirs, 0, 1)
    theirs.add_param_group({"params": list(reference.parameters())[1:], "lr": 1e-3})
    train(reference, theirs, 1, STEPS)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = zero.AdamW([first], lr=LR, store=store)
        train(model, optimizer, 0, 1)
        optimizer.add_param_group({"params": others, "lr": 1e-3})
        train(model, optimizer, 1, 3)
        store.commit()
        optimizer = zero.AdamW([first], lr=LR, store=store, existing="resume")
        with pytest.raises(MisuseError, match="add the param groups that it had"):
            optimizer.step()
        optimizer.add_param_group({"params": others, "lr": 1e-3})
        train(model, optimizer, 3, STEPS)
        assert equal(reference.state_dict(), model.state_dict())
        assert same(optimizer, theirs)


@pytest.mark.parametrize("make", [functools.partial(Tied, layers=2), Narrow])
def test_state_dicts_go_both_ways(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = zero.AdamW(model.parameters(), lr=LR, store=store, name="one")
        train(model, optimizer, 0, 3, clip=None)
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.grad = None
        other = zero.AdamW(twin.parameters(), lr=1.0, store=store, name="other")
        other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["lr"] == LR
        assert train(model, optimizer, 3, STEPS, clip=None) == train(twin, other, 3, STEPS, clip=None)
        assert equal(model.state_dict(), twin.state_dict())
        assert same(optimizer, other)
        if make is not Narrow:
            plain = copy.deepcopy(model)
            theirs = torch.optim.AdamW(plain.parameters(), lr=1.0, fused=True)
            theirs.load_state_dict(optimizer.state_dict())
            assert train(plain, theirs, STEPS, 7) == train(model, optimizer, STEPS, 7)


def write(number: int, model: nn.Module) -> None:
    """Change values between steps: a mask, other weights, zeros, clipping, a few elements; with and without a trace."""
    chance = torch.Generator().manual_seed(number)
    first, *others = (parameter for parameter in model.parameters() if parameter.dtype in (torch.bfloat16, torch.float16))
    with torch.no_grad():
        if number % 5 == 0:
            first.data.mul_(torch.rand(first.shape, generator=chance) > 0.5)
        elif number % 5 == 1:
            values = {name: value.roll(1) for name, value in model.state_dict().items()}
            model.load_state_dict(values)
        elif number % 5 == 2:
            others[0].zero_()
            first.neg_()
        elif number % 5 == 3:
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)
        else:
            first.data.view(-1)[::7] = -0.0


def test_a_value_that_was_changed_is_its_own_master(tmp_path: Path) -> None:
    """Bit for bit: where it is another one than the last step left, and nowhere else. Over a rollback and a commit, too."""
    torch.manual_seed(0)
    reference = Narrow(layers=2)
    model = copy.deepcopy(reference)
    masters = MasterAdamW([{"params": list(reference.parameters())}], lr=LR)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        ours = zero.AdamW(model.parameters(), lr=LR, store=store)
        for number in range(10):
            assert train(model, ours, number, number + 1, clip=None) == train(reference, masters, number, number + 1, clip=None)
            assert equal(reference.state_dict(), model.state_dict())
            write(number, reference)
            write(number, model)
            found = ours.state_dict()["state"]
            index = {id(parameter): index for index, parameter in enumerate(reference.parameters())}
            for parameter, master in masters.pairs:
                if parameter.dtype is torch.bfloat16 and index[id(parameter)] in found:
                    unchanged = half_up(master).view(torch.int16) == parameter.view(torch.int16)
                    expected_master = torch.where(unchanged, master, parameter.float())
                    assert torch.equal(found[index[id(parameter)]]["master"], expected_master)
        store.commit()
        committed = copy.deepcopy(model.state_dict())
        expected = train(reference, masters, 10, 12, clip=None)
        train(model, ours, 10, 12, clip=None)
        store.rollback()
        model.load_state_dict(committed)
        assert train(model, ours, 10, 12, clip=None) == expected
        store.rollback()
        store.close()
    for older in (False, True):
        torch.manual_seed(older)
        model = Narrow(layers=2)  # other values, until they are loaded
        with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
            for key in [key for key in store if "/lo.value#" in key] if older else ():
                store.delete(key, owner=store.owner_of(key))  # as an earlier release left it
            ours = zero.AdamW(model.parameters(), lr=LR, store=store, existing="resume")
            model.load_state_dict(committed)
            numbers = train(model, ours, 10, 12, clip=None)
            if not older:  # whose values are all taken for those that the last step left
                assert numbers == expected
                assert equal(reference.state_dict(), model.state_dict())
            assert all("/lo.value#" in key or key.replace("/lo#", "/lo.value#") in store for key in store if "/lo#" in key)
            store.close()


def test_what_is_no_gradient_moves_nothing(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = nn.Linear(3, 3)
        optimizer = zero.AdamW(model.parameters(), lr=LR, store=store)
        optimizer.step()
        assert not optimizer.state_dict()["state"]
        model.weight.grad = torch.ones(3, 3).t()
        assert optimizer.step(lambda: 5.0) == 5.0
        assert list(optimizer.state_dict()["state"]) == [0]
        grad = optimizer.grad(model.weight)
        assert grad is not None
        assert torch.equal(grad, torch.ones(3, 3))
        assert float(optimizer.clip_grad_norm_(1.0)) == 3.0
        optimizer.zero_grad()
        assert model.weight.grad is None


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, zero.GradScaler])
def test_loss_scaling_is_torchs_own(tmp_path: Path, scaler: Any) -> None:
    torch.manual_seed(0)
    reference = Tied(layers=2)
    model = copy.deepcopy(reference)
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, fused=True)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        for mine, optimizer in ((reference, theirs), (model, zero.AdamW(model.parameters(), lr=LR, store=store))):
            scale = scaler("cpu", growth_interval=2)
            for step in range(STEPS):
                optimizer.zero_grad()
                scale.scale(mine.loss(step)).backward()  # type: ignore[operator]
                if step == 1:
                    next(mine.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
                scale.unscale_(optimizer)
                scale.step(optimizer)
                scale.update()
        assert equal(reference.state_dict(), model.state_dict())


def test_torchs_kernel_does_not_care_for_cuts_at_multiples_of_sixteen() -> None:
    """Elsewhere it does: the end of a tensor is rounded in another way."""
    rule = zero.AdamWRule(LR, (0.9, 0.999), 1e-8, 1e-2, False)
    size = 40_003

    def after(cut: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        state = torch.zeros(3, size)
        for step in range(1, 4):
            gradient = torch.randn(size, generator=generator)
            for pieces in zip(*(row.split(cut) for row in (gradient, *state)), strict=True):
                rule.update(pieces[1], pieces[0], {"m": pieces[2], "v": pieces[3]}, step)
        return state

    expected = after(size)
    assert all(torch.equal(after(16 * cut), expected) for cut in (1, 7, 100))


# What is refused


def test_a_step_that_was_interrupted_is_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Tied(layers=2)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = zero.AdamW(model.parameters(), lr=LR, store=store)
        train(model, optimizer, 0, 2)
        store.commit()
        values = copy.deepcopy(model.state_dict())
        real, calls = zero.AdamWRule.update_each, 0

        def interrupted(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt
            real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(zero.AdamWRule, "update_each", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, 2, 3)
        for again in (optimizer.step, optimizer.state_dict):
            with pytest.raises(MisuseError, match=r"'optimizer' was interrupted.*store\.rollback"):
                again()
        with pytest.raises(MisuseError, match="interrupted"):
            zero.AdamW(model.parameters(), lr=LR, store=store, existing="resume")
        store.rollback()
        model.load_state_dict(values)
        train(model, optimizer, 2, 3)
        assert {int(state["step"]) for state in moments(optimizer)} == {3}


def test_a_bfloat16_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = zero.AdamW(model.named_parameters(), lr=LR, store=store)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model[1].bias.grad[2] = float("nan")  # type: ignore[index]
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(MisuseError, match=r"gradient of '1\.bias' is not finite"):
            optimizer.step()
        assert equal(model.state_dict(), before)
        optimizer.zero_grad()
        optimizer.step()


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        make = functools.partial(zero.AdamW, model.parameters(), lr=LR, store=store)
        for options, why in (
            ({"update": "in_backward"}, "for paged parameters"),
            ({"stage": zero.Stage3()}, r"Stage3 divides more than states.*zero\.Stage1\(\)"),
            ({"stage": zero.Stage1()}, "init_process_group first"),
            ({"existing": "perhaps"}, "'perhaps'"),
            ({"existing": "resume"}, "no states under 'optimizer'"),
        ):
            with pytest.raises(MisuseError, match=why):
                make(**options)  # type: ignore[arg-type]
        with pytest.raises(MisuseError, match=r"not paged: .* or make it with store="):
            zero.AdamW(model.parameters())
        with pytest.raises(MisuseError, match="go with store="):
            zero.AdamW(model.parameters(), name="adam")
        for parameter, why in (
            (torch.zeros(3, dtype=torch.complex64), r"parameter 1 \(of shape \(3,\)\) is torch.complex64"),
            (torch.zeros(3, device="meta"), "is on the meta device"),
            (torch.zeros(3, 4)[:, :2], "gaps in memory"),
        ):
            with pytest.raises(MisuseError, match=why):
                zero.AdamW([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(parameter)], lr=LR, store=store)
        assert len(store) == 0
        optimizer = make()
        with pytest.raises(MisuseError, match="gaps"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, 4)[:, :2])]})
        optimizer.step()
        with pytest.raises(MisuseError, match=r"param group 0 .*: parameter 0 was \[\[3, 3\].* and is \[\[3, 4\]"):
            zero.AdamW(nn.Linear(4, 3).parameters(), lr=LR, store=store, existing="resume")
        paged = zero.page(nn.Linear(5, 5), store)
        with pytest.raises(MisuseError, match="leave store= out"):
            zero.AdamW(paged.parameters(), lr=LR, store=store, name="other")
        for options in ({}, {"store": store, "name": "other"}):
            with pytest.raises(MisuseError, match="an optimizer for each kind"):
                zero.AdamW([*paged.parameters(), *model.parameters()], lr=LR, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("resident", [False, True])
def test_an_optimizer_cannot_be_copied(store: TieredStore, resident: bool) -> None:
    model = nn.Linear(4, 4)
    if not resident:
        zero.page(model, store)
    optimizer = zero.SGD(model.parameters(), momentum=0.9, **({"store": store} if resident else {}))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(MisuseError, match=r"SGD cannot be copied or pickled.*state_dict"):
            copied(optimizer)


def test_what_states_were_computed_with_stays(tmp_path: Path) -> None:
    """NAdam computes ``mu_product`` from the number of the step."""
    model = Wide()
    with TieredStore.open(tmp_path, dram="4MiB") as store:
        train(model, zero.NAdam(model.parameters(), store=store), 0, 2)
    with TieredStore.open(tmp_path, dram="4MiB") as store:
        with pytest.raises(MisuseError, match=r"param group 0 is not what was committed.*0\.9.*0\.5"):
            zero.NAdam(model.parameters(), betas=(0.5, 0.999), store=store, existing="resume")
        zero.NAdam(model.parameters(), lr=1.0, store=store, existing="resume")


def test_a_commit_that_does_not_say_what_states_were_computed_with(tmp_path: Path) -> None:
    """As those before were."""
    model, reference = Wide(), Wide()
    reference.load_state_dict(model.state_dict())
    with TieredStore.open(tmp_path / "beside", dram="4MiB") as store:
        train(reference, zero.NAdam(reference.parameters(), store=store), 0, 4)
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        train(model, zero.NAdam(model.parameters(), store=store), 0, 2)
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        (key,) = (key for key in store if key.endswith("/layout"))
        layout = json.loads(bytes(store.get(key).tolist()))
        assert layout["rule"].pop("constants")
        written = torch.tensor(list(json.dumps(layout).encode()), dtype=torch.uint8)
        store.put(key, written, owner=store.owner_of(key))
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        train(model, zero.NAdam(model.parameters(), store=store, existing="resume"), 2, 4)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in reference.state_dict().items())
