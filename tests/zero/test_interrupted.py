"""An exception at any line of ``tiered.zero`` in a training step: ``zero.rollback`` works, and the steps after it are those of
a run that was never struck; without it a step is right or says so. Real signals: ``tests/stress/test_struck_training.py``."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.quick import quick
from tests.zero.harness import equal
from tests.zero.models import Normed, Tied
from tests.zero.striking import KINDS, Result, Struck, StruckError, Trainer, described, outcome, shuffled, struck_at
from tiered import Eviction, InterruptedStep, ManifestError, MisuseError, TieredStore, zero
from tiered.store.activations import hooks_active
from tiered.tiers.nvme import NvmeTier
from tiered.types import Access
from tiered.zero.paging.pager import pager_of, placement_of

DRAM = "1.25MiB"
ERRORS = itertools.cycle([Struck, Struck, StruckError])
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # callbacks are struck, too


def counts(quick: int) -> pytest.MarkDecorator:
    """So many lines in every run, and all of them in the long one."""
    return pytest.mark.parametrize("count", [quick, pytest.param(10_000, marks=pytest.mark.soak)])


@pytest.fixture(scope="module")
def trainers() -> Iterator[dict[str, Trainer]]:
    """By kind. Making one takes as long as striking it twice."""
    made: dict[str, Trainer] = {}
    yield made
    for trainer in made.values():
        trainer.close()


@pytest.fixture
def trainer(trainers: dict[str, Trainer], tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> Iterator[Trainer]:
    """At its commit, where a test that passes leaves it, too."""
    if kind not in trainers:
        trainers[kind] = Trainer(tmp_path / "store", kind)
    failed = request.session.testsfailed
    yield trainers[kind]
    if request.session.testsfailed > failed:
        trainers.pop(kind).close()
    else:
        trainers[kind].rollback()


def lines_of(trainer: Trainer, call: Callable[[], object], count: int) -> list[tuple[str, int, int]]:
    with struck_at(None) as lines:
        call()
    trainer.rollback()
    return shuffled(lines.seen, count)[:count]


@pytest.mark.parametrize("kind", quick(KINDS, ["in backward", "scaled", "averaged"]))
@counts(3)
def test_rollback_works_after_a_strike_at_any_line(trainer: Trainer, kind: str, count: int) -> None:
    fired = 0
    for place in lines_of(trainer, lambda: trainer.step(Trainer.WARM), count):
        error = next(ERRORS)
        with struck_at(place, error=error) as lines:
            trainer.step(Trainer.WARM)
        fired += lines.fired
        assert outcome(trainer) == "right", described(place, error)
    print(f"{kind}: {fired} lines struck, all right after rollback")
    assert fired


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["plain", "checkpoint"])
def test_what_keeps_a_strike_that_python_swallows_alone_holds_memory(
    trainer: Trainer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises nothing out of a destructor: the step goes on. Whoever keeps the exception, as a hook for such may, keeps
    the frames below the destructor, and the tensors in them."""
    swallowed: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: swallowed.append(event.exc_value))
    destructor = StorageWeakRef.__del__.__code__
    within, line = destructor.co_filename, destructor.co_firstlineno + 1
    with struck_at(None, within=within) as lines:
        trainer.step(Trainer.WARM)
    trainer.rollback()
    held = []
    for number in range(1, lines.seen[within, line] + 1):
        with struck_at((within, line, number), within=within, error=next(ERRORS)):
            trainer.step(Trainer.WARM)
        assert len(swallowed) == 1
        trainer.rollback()
        gc.collect()
        held.append(trainer.store.statistics().tiers[0].held)
        swallowed.clear()
        trainer.nothing_is_held()
        trainer.goes_on()
    assert max(held) > 0
    print(f"{kind}: {len(held)} strikes in a destructor, {sum(map(bool, held))} held memory while the exception was kept")


@pytest.mark.parametrize("kind", quick(["plain", "in backward"], ["in backward"]))
@counts(2)
def test_rollback_works_after_a_strike_in_rollback(trainer: Trainer, kind: str, count: int) -> None:
    def back() -> None:
        trainer.step(Trainer.WARM)
        trainer.rollback()

    for place in lines_of(trainer, back, count):
        error = next(ERRORS)
        with struck_at(place, error=error):
            back()
        assert outcome(trainer) == "right", described(place, error)


@pytest.mark.parametrize("kind", quick([kind for kind in KINDS if kind not in ("scaled", "averaged")], ["plain"]))
@counts(2)
def test_without_rollback_a_step_is_right_or_raises(trainer: Trainer, kind: str, count: int) -> None:
    """Right is: the step that was struck has been made, all of it, or none of it."""

    def on() -> Result:
        """What comes after it."""
        losses = trainer.step(Trainer.WARM + 1)
        values = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        state = trainer.optimizer.state_dict()["state"]
        return Result(losses, values, [state[number][name] for number in sorted(state) for name in ("exp_avg", "exp_avg_sq")])

    places = lines_of(trainer, lambda: trainer.step(Trainer.WARM), count)
    left_out = on()
    trainer.rollback()
    trainer.step(Trainer.WARM)
    made = on()
    trainer.rollback()
    said = dict.fromkeys(["made", "left out", "raised"], 0)
    for place in places:
        error = next(ERRORS)
        with struck_at(place, error=error):
            trainer.step(Trainer.WARM)
        try:
            found = on()
        except (InterruptedStep, MisuseError) as problem:
            if "zero.rollback" not in str(problem):
                raise
            said["raised"] += 1
        else:
            assert found in (left_out, made), described(place, error)
            said["made" if found == made else "left out"] += 1
        trainer.rollback()
    print(f"{kind}: {said}")


@pytest.mark.parametrize("kind", quick(["plain", "stored as bf16"], ["plain"]))
@counts(3)
def test_a_state_is_loaded_whole_or_training_raises(trainer: Trainer, kind: str, count: int) -> None:
    """It is the state that there is, so that a step after it is right in any case; and to load it again mends it."""
    state = copy.deepcopy(trainer.optimizer.state_dict())

    def load() -> None:
        trainer.optimizer.load_state_dict(state)

    raised = 0
    for place in lines_of(trainer, load, count):
        error = next(ERRORS)
        with struck_at(place, error=error):
            load()
        try:
            found = trainer.two_steps()
        except InterruptedStep as problem:
            mend = load if "load_state_dict" in str(problem) else trainer.rollback  # of an update that was pending
            raised += 1
            mend()
            found = trainer.two_steps()
        assert found == trainer.right, described(place, error)
        trainer.rollback()
    print(f"{kind}: {raised} raised")


@pytest.mark.parametrize("kind", ["plain"])
def test_a_state_that_does_not_fit_changes_nothing(trainer: Trainer, kind: str) -> None:
    good = trainer.optimizer.state_dict()
    last = max(good["state"])
    for key, value, message in (
        ("exp_avg", torch.zeros(3), r"'exp_avg' of '.*' has shape \(3,\), and the parameter has shape"),
        ("exp_avg_sq", 1.0, r"'exp_avg_sq' of '.*' is float"),
        ("step", None, r"has no 'step'"),
    ):
        state = copy.deepcopy(good)
        if value is None:
            del state["state"][last][key]
        else:
            state["state"][last][key] = value
        with pytest.raises(MisuseError, match=message):
            trainer.optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="param"):
        trainer.optimizer.load_state_dict({**good, "param_groups": good["param_groups"] * 2})
    assert trainer.two_steps() == trainer.right


@pytest.mark.parametrize("kind", quick(["plain", "checkpoint", "micro batch"], ["checkpoint"]))
@counts(3)
def test_other_models_do_not_notice(trainer: Trainer, kind: str, count: int, tmp_path: Path) -> None:
    """Neither one in memory, nor a paged one that was never touched, before anybody has cleaned up after the strike."""
    reference: Any = Tied()
    adam = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    with TieredStore.open(tmp_path / "other", dram="1.25MiB", eviction=Eviction(deadline=20)) as store:
        model: Any = zero.page(copy.deepcopy(reference), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-3)
        for number, place in enumerate(lines_of(trainer, lambda: trainer.step(Trainer.WARM), count)):
            error = next(ERRORS)
            with struck_at(place, error=error):
                trainer.step(Trainer.WARM)
            if not torch.is_grad_enabled():
                trainer.rollback()
            for other, its in ((reference, adam), (model, optimizer)):
                its.zero_grad()
                other.loss(number).backward()
                its.step()
            assert equal(reference.state_dict(), model.state_dict()), described(place, error)
            assert outcome(trainer) == "right", described(place, error)


def penalise(trainer: Trainer) -> None:
    sum(parameter.abs().sum() for parameter in trainer.model.parameters() if parameter.requires_grad).backward()  # type: ignore[union-attr]


@torch.no_grad()
def write_views(trainer: Trainer) -> None:
    trainer.model.head.weight.t()[3:5].mul_(2)
    trainer.model.position.data.view(-1)[::2].add_(1)


def assign_data(trainer: Trainer) -> None:
    trainer.model.position.data = trainer.model.position.data * 3
    trainer.model.head.weight.data = torch.ones_like(trainer.model.head.weight)


@torch.no_grad()
def write_gathered(trainer: Trainer) -> None:
    with zero.gathered([trainer.model.position, trainer.model.blocks[0].out.weight], write=True):
        trainer.model.position.mul_(0.5)
        trainer.model.blocks[0].out.weight.data = torch.ones_like(trainer.model.blocks[0].out.weight)


@torch.no_grad()
def write_gathered_to_read(trainer: Trainer) -> None:
    with zero.gathered([trainer.model.position, trainer.model.blocks[0].out.weight]):
        trainer.model.position.mul_(0.5)
        trainer.model.blocks[0].out.weight.add_(1)


def clip(trainer: Trainer) -> None:
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.01)


def change_gradients(trainer: Trainer) -> None:
    trainer.model.position.grad.mul_(trainer.model.position.detach())
    trainer.model.head.weight.grad.t()[1].add_(1)
    trainer.model.blocks[0].out.bias.grad.data.mul_(3)


@torch.no_grad()
def average(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        torch.zeros_like(parameter).lerp_(parameter, 0.5).copy_(parameter)


def read_custom(trainer: Trainer) -> None:
    """Views that gradients pass, and copies for torch.func."""
    weight = trainer.model.head.weight
    with torch.autograd.graph.save_on_cpu():
        (weight.t()[2:].sin().sum() + torch.func.vmap(torch.sum)(weight).abs().sum()).backward()


USES: dict[str, Callable[[Trainer], None]] = {
    "penalty": penalise,
    "views": write_views,
    "data": assign_data,
    "gathered": write_gathered,
    "gathered to read": write_gathered_to_read,
    "clip": clip,
    "gradients": change_gradients,
    "average": average,
    "custom": read_custom,
}


@counts(30)
@pytest.mark.parametrize("use", ["a view", "gathered", "gathered to read"])
def test_what_is_read_after_a_strike_is_what_the_store_has(tmp_path: Path, use: str, count: int) -> None:
    """Rounded, where it is stored in fewer bits."""
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model: Any = zero.page(nn.Linear(8, 8), store, policy=zero.Policy(torch.bfloat16))
        def write() -> None:
            if use == "a view":
                model.weight.data.view(-1)[::2].add_(1.001)
            else:
                with torch.no_grad(), zero.gathered([model.weight], write=use == "gathered"):
                    model.weight.add_(1.001)

        with torch.no_grad():
            model.weight.copy_(torch.zeros(8, 8))
        zero.commit(model)
        with struck_at(None) as lines:
            write()
        zero.rollback(model)
        fired = 0
        for place in shuffled(lines.seen, 5)[:count]:
            with struck_at(place) as lines:
                write()
            fired += lines.fired
            with suppress(InterruptedStep):
                found = model.weight.detach().clone()
                assert torch.equal(found, model.state_dict()["weight"]), described(place, Struck)
                assert torch.equal(found, found.bfloat16().float()), described(place, Struck)
            zero.rollback(model)
            assert not model.weight.detach().any(), described(place, Struck)
        assert fired >= 20  # a line may run in the first of all writes alone


def test_a_block_that_ends_late_lets_go_of_nothing_that_others_hold(tmp_path: Path) -> None:
    """Where a signal struck its end, the collector ends it, whenever it comes."""
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model: Any = zero.page(nn.Linear(8, 8), store)
        weight, before = model.weight, model.weight.detach().clone()
        for left in (pager_of(model).accessing([weight], Access.READ), pager_of(model).gathering([weight], Access.READ)):
            left.__enter__()
            pager_of(model)._gatherings.clear()  # as where its end was struck
            pager_of(model).start_anew()
            with zero.gathered([weight]):
                left.__exit__(None, None, None)
                assert type(weight) is nn.Parameter  # which is in memory still
                assert torch.equal(weight, before)
            assert torch.equal(weight.detach().clone(), before)


@pytest.mark.parametrize("kind", ["plain", pytest.param("stored as bf16", marks=pytest.mark.soak)])
@pytest.mark.parametrize("use", quick(USES, ["penalty", "data", "gathered", "gradients", "custom"]))
@counts(1)
def test_parameters_and_gradients_are_right_after_a_strike(trainer: Trainer, kind: str, use: str, count: int) -> None:
    """In a use of them outside of forward: each value is the one of before or of after it, or every call raises; and after
    ``zero.rollback`` all is right."""

    def begin() -> None:
        trainer.loss(5).backward()

    def seen() -> dict[str, torch.Tensor]:
        """Every value twice: as reads and as ``state_dict`` have it."""
        model = trainer.model
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items() if name in values)
        gradients = {f"{n} grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {**values, **gradients}

    begin()
    before = seen()
    with struck_at(None) as lines:
        USES[use](trainer)
    after = seen()
    trainer.rollback()
    said = dict.fromkeys(["before", "after", "some", "raised"], 0)
    for place in shuffled(lines.seen, count)[:count]:
        error = next(ERRORS)
        begin()
        with struck_at(place, error=error):
            USES[use](trainer)
        try:
            found = seen()
        except InterruptedStep:
            said["raised"] += 1
        else:
            wrong = []
            for name, value in found.items():
                whole = torch.equal(value, after[name]) or (name in before and torch.equal(value, before[name]))
                part = not whole and part_of(value, before.get(name), after[name])
                if not (whole or part):
                    wrong.append(name)
            if wrong:  # a sum that was cut off, which no step is made with
                assert all(name.endswith(" grad") for name in wrong), f"{described(place, error)}: {wrong}"
                with pytest.raises(InterruptedStep):
                    trainer.optimizer.step()
                said["raised"] += 1
            else:
                assert trainer.loss(7).isfinite()
                same = [equal(found, one) for one in (before, after)]
                said["before" if same[0] else "after" if same[1] else "some"] += 1
        assert outcome(trainer) == "right", described(place, error)
    print(f"{kind}, {use}: {said}")


def part_of(value: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor) -> bool:
    """Whether each element is one of before or of after: a unit has been written to in two calls, and one was made."""
    return before is not None and bool(((value == before) | (value == after)).all())


def strike(*_: object) -> None:
    raise Struck


@pytest.mark.parametrize("mode", ["plain", "checkpoint", "reentrant"])
def test_after_a_strike_in_forward_nothing_is_in_force_or_held(store: TieredStore, mode: str) -> None:
    """At once, and not when the model is used next."""
    model: Any = zero.page(Tied(mode=mode), store)
    handle = model.blocks[1].out.register_forward_pre_hook(strike)
    with pytest.raises(Struck):
        model.loss(0)
    handle.remove()
    assert hooks_active() is None
    assert torch.is_grad_enabled()
    gc.collect()
    assert store.statistics().tiers[0].held == 0


def test_hooks_that_are_left_behind_do_nothing_and_go(store: TieredStore) -> None:
    """As after a strike in the line after they were put in force."""
    model: Any = zero.page(Tied(), store)
    pager = placement_of(model.position)[0]
    torch._C._autograd._push_saved_tensors_default_hooks(pager.pack, pager.unpack)
    plain = Tied()
    plain.loss(0).backward()
    other: Any = zero.page(copy.deepcopy(plain), store, name="other")
    other.zero_grad(set_to_none=True)
    other.loss(0).backward()
    assert hooks_active() is None
    optimizer = zero.AdamW(other.parameters())
    for name, parameter in plain.named_parameters():
        found = optimizer.grad(other.get_parameter(name))
        assert (found is None) == (parameter.grad is None)
        assert found is None or torch.equal(found, parameter.grad)


def test_an_update_that_is_cut_off_in_a_piece_is_refused_until_rollback(store: TieredStore) -> None:
    model: Any = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    zero.commit(model, optimizer)
    expected = model.loss(1).item()
    model.loss(0).backward()
    optimizer.step()
    _, unit, _ = placement_of(model.blocks[1].out.weight)
    real, unit.states._update_piece = unit.states._update_piece, strike  # type: ignore[method-assign]
    with pytest.raises(Struck):
        model.loss(1)
    unit.states._update_piece = real  # type: ignore[method-assign]
    commit = partial(zero.commit, model, optimizer)
    for use in (lambda: model.loss(1), model.state_dict, optimizer.flush, optimizer.state_dict, commit):
        with pytest.raises(InterruptedStep, match=r"middle of an optimizer update.*zero\.rollback"):
            use()
    zero.rollback(model, optimizer)
    assert model.loss(1).item() == expected


def test_a_gradient_that_is_cut_off_while_it_is_added_is_refused_until_it_is_dropped(store: TieredStore) -> None:
    reference: Any = Tied()
    model: Any = zero.page(copy.deepcopy(reference), store)
    optimizer, adam = zero.AdamW(model.parameters()), torch.optim.AdamW(reference.parameters(), fused=True)
    model.loss(0).backward()
    _, unit, _ = placement_of(model.blocks[1].out.weight)
    real, unit.gradients.write = unit.gradients.write, strike  # type: ignore[method-assign]
    with pytest.raises(Struck):
        model.loss(1).backward()
    unit.gradients.write = real  # type: ignore[method-assign]
    for use in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), lambda: model.loss(1).backward()):
        with pytest.raises(InterruptedStep, match=r"was added to one of before.*zero_grad\(\).*zero\.rollback"):
            use()
    with pytest.raises(InterruptedStep):
        zero.commit(model, optimizer)
    for one, its in ((model, optimizer), (reference, adam)):
        its.zero_grad()
        one.loss(2).backward()
        its.step()
    assert equal(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("what", ["step", "clip", "zero_grad"])
def test_what_was_decided_is_done_by_whoever_comes_next(store: TieredStore, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference: Any = Tied()
    model: Any = zero.page(copy.deepcopy(reference), store)
    optimizer, adam = zero.AdamW(model.parameters()), torch.optim.AdamW(reference.parameters(), fused=True)
    for one in (model, reference):
        one.loss(0).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    calls = itertools.count(1)
    carry_out = zero.intent._Decision.carry_out

    def cut_off(self: Any) -> None:
        last = next(calls)
        if last == 1:
            self._left[-1]()
            raise Struck
        carry_out(self)

    def clip() -> None:
        optimizer.clip_grad_norm_(0.1)

    def struck(call: Callable[[], object]) -> None:
        monkeypatch.setattr(zero.intent._Decision, "carry_out", cut_off)
        with pytest.raises(Struck):
            call()

    if what == "clip":
        struck(clip)
        optimizer.step()
        adam.step()
    elif what == "step":
        clip()
        struck(optimizer.step)
        adam.step()
    else:
        struck(optimizer.zero_grad)
        adam.zero_grad()
        for one in (model, reference):
            one.loss(2).backward()
        optimizer.step()
        adam.step()
    for one, its in ((model, optimizer), (reference, adam)):
        its.zero_grad()
        one.loss(1).backward()
        its.step()
    assert equal(model.state_dict(), reference.state_dict())


def test_a_backward_pass_that_updates_and_is_cut_off_says_so(store: TieredStore) -> None:
    model: Any = zero.page(Tied(layers=6), store)
    optimizer = zero.AdamW(model.parameters(), update="in_backward")
    zero.commit(model, optimizer)
    expected = model.loss(1).item()
    handle = model.position.register_hook(strike)
    with pytest.raises(Struck):
        model.loss(0).backward()
    handle.remove()
    optimizer.zero_grad()
    for use in (lambda: model.loss(1), lambda: zero.commit(model, optimizer)):
        with pytest.raises(InterruptedStep, match=r"some have had the step and others have not; call zero\.rollback"):
            use()
    zero.rollback(model, optimizer)
    assert model.loss(1).item() == expected


def test_rollback_of_one_model_tells_the_others_in_the_store(store: TieredStore) -> None:
    one, other = (zero.page(Tied(), store, name=name) for name in ("one", "other"))
    frozen = zero.page(Tied(), store, name="frozen")
    optimizers = [zero.AdamW(model.parameters()) for model in (one, other)]
    for model, optimizer in zip((one, other), optimizers, strict=True):
        zero.commit(model, optimizer)
    expected = [model.loss(0).item() for model in (one, other, frozen)]
    for model, optimizer in zip((one, other), optimizers, strict=True):
        model.loss(0).backward()
        optimizer.step()
        optimizer.flush()
    zero.rollback(one, optimizers[0])
    with pytest.raises(InterruptedStep, match=r"model 'other' in it has not followed yet"):
        other.loss(0)
    zero.rollback(other, optimizers[1])
    assert [model.loss(0).item() for model in (one, other, frozen)] == expected


def test_rollback_tells_models_that_its_commit_has_otherwise_or_not_at_all(store: TieredStore) -> None:
    """A model that took another's place would compute with that one's values; one that went on would have a step too many."""
    one, replaced, steady = (zero.page(Tied(), store, name=name) for name in ("one", "other", "steady"))
    optimizer = zero.AdamW(one.parameters())
    zero.commit(replaced)
    first = zero.commit(one, optimizer)
    expected = [model.loss(0).item() for model in (one, steady)]
    other = zero.page(nn.Linear(4, 4), store, name="other", existing="overwrite")
    new = zero.page(nn.Linear(4, 4), store, name="new")
    zero.rollback(one, optimizer)
    for model, says in ((other, "model 'other' in it has not followed yet"), (new, "no checkpoint of model 'new' .*page it")):
        with pytest.raises(InterruptedStep, match=says):
            model(torch.ones(4))
    with pytest.raises(MisuseError, match="'other'"):
        zero.rollback(other)
    again = zero.page(Tied(), store, name="other", existing="resume")
    steps = zero.AdamW(again.parameters())
    again.loss(0).backward()
    steps.step()
    zero.commit(again, steps)
    zero.rollback(one, optimizer, generation=first)
    with pytest.raises(InterruptedStep, match="model 'other' in it has not followed yet"):
        again.loss(0)
    assert [model.loss(0).item() for model in (one, steady)] == expected


def test_a_model_whose_tensors_a_rollback_leaves_as_they_are_goes_on(store: TieredStore) -> None:
    """A reference that a program pages anew each time, with the same values, and of which no commit has a record."""
    one = zero.page(Tied(), store, name="one")
    source = Tied()
    reference = zero.page(copy.deepcopy(source), store, name="reference")
    expected = reference.loss(0).item()
    optimizer = zero.AdamW(one.parameters())
    first = zero.commit(one, optimizer)
    zero.commit(one, optimizer)
    for generation in (first, None):
        reference = zero.page(copy.deepcopy(source), store, name="reference", existing="overwrite")
        zero.rollback(one, optimizer, generation=generation)
        assert reference.loss(0).item() == expected
    reference = zero.page(copy.deepcopy(source), store, name="reference", existing="overwrite")
    before = store.generation
    zero.commit(one, optimizer)  # both commits have the same bytes, which were written twice
    zero.rollback(one, optimizer, generation=before)
    assert reference.loss(0).item() == expected
    with torch.no_grad():
        next(source.parameters())[0, 0] += 1
    reference = zero.page(source, store, name="reference", existing="overwrite")
    store.rollback()
    with pytest.raises(InterruptedStep, match=r"has no checkpoint of model 'reference' .*page it anew"):
        reference.loss(0)


@pytest.mark.parametrize("generation", [None, 1])
def test_a_rollback_of_the_store_alone_tells_models_that_changed(store: TieredStore, generation: int | None) -> None:
    """They would go on with another optimizer state, or another step, than their tensors have."""
    model, still = (zero.page(Tied(), store, name=name) for name in ("model", "still"))
    optimizer = zero.AdamW(model.parameters())
    zero.commit(model, optimizer)
    expected = [one.loss(0).item() for one in (model, still)]
    model.loss(0).backward()
    optimizer.step()
    if generation is not None:
        zero.commit(model, optimizer)
    store.rollback(generation)
    with pytest.raises(InterruptedStep, match="model 'model' in it has not followed yet"):
        model.loss(0)
    zero.rollback(model, optimizer, generation=generation)
    assert [one.loss(0).item() for one in (model, still)] == expected


def test_what_changes_while_a_commit_is_under_way_is_not_in_it(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of gradients is no tensor in the store."""
    model = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters())
    model.loss(0).backward()
    scaled, sync = threading.Event(), NvmeTier.sync
    monkeypatch.setattr(NvmeTier, "sync", lambda tier: (scaled.wait(), sync(tier))[1])
    made = zero.commit_async(model, optimizer)
    try:
        expected = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        for name in expected:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            gradient.mul_(0.5)
    finally:
        scaled.set()
    store.rollback(made.result())
    with pytest.raises(InterruptedStep, match="has not followed yet"):
        model.loss(0)
    zero.rollback(model, optimizer)
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def test_a_rollback_that_fails_is_not_remembered(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters())
    zero.commit(model, optimizer)
    with pytest.raises(ManifestError):
        store.rollback(99)
    model.loss(1).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.flush()
    store.rollback()
    with pytest.raises(InterruptedStep, match=r"has not followed yet.*generation=1"):
        model.loss(9)


class Position:
    fails = False

    def state_dict(self) -> dict[str, int]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise StruckError("as a test wants it")


def test_a_model_that_only_half_followed_is_refused_though_its_tensors_stayed(store: TieredStore) -> None:
    """Of a model with a position in data that cannot be loaded, buffers are as in the commit already."""
    model, x = zero.page(Normed(), store), torch.arange(12.0).view(3, 4)
    optimizer, data = zero.AdamW(model.parameters()), Position()
    zero.commit(model, optimizer, data=data)
    with torch.no_grad():
        model(x)
    data.fails = True
    with pytest.raises(MisuseError, match="data= cannot take over what was committed of it"):
        zero.rollback(model, optimizer, data=data)
    with pytest.raises(InterruptedStep, match="has not followed yet"):
        model(x)
    data.fails = False
    zero.rollback(model, optimizer, data=data)
    assert model.norm.num_batches_tracked == 0
    model(x)


def test_of_two_models_of_one_name_the_one_goes_on_that_was_rolled_back_last(store: TieredStore) -> None:
    first = zero.page(Tied(), store)
    zero.commit(first)
    expected = first.loss(0).item()
    second = zero.page(Tied(), store, existing="overwrite")
    for last, other in ((first, second), (second, first)):
        zero.rollback(last)
        assert last.loss(0).item() == expected
        with pytest.raises(InterruptedStep, match="was replaced"):
            other.loss(0)


def traced_by_make_fx(model: nn.Module, tokens: torch.Tensor) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(model)(tokens)


def without_values(model: nn.Module, tokens: torch.Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model(tokens)


TRACERS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "torch.export": lambda model, tokens: torch.export.export(model, (tokens,), strict=False),  # torch 2.6 has another default
    "torch.jit.trace": lambda model, tokens: torch.jit.trace(model, (tokens,)),
    "make_fx": traced_by_make_fx,
    "FakeTensorMode": without_values,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", quick(TRACERS, ["torch.export", "FakeTensorMode"]))
def test_a_model_that_is_traced_refuses_and_leaves_nothing(tmp_path: Path, store: TieredStore, what: str) -> None:
    torch.manual_seed(0)
    reference: Any = Tied()
    model: Any = zero.page(copy.deepcopy(reference), store)
    tokens = torch.randint(0, 64, (2, 16))
    with pytest.raises(MisuseError, match=rf"{what}.* cannot look into a paged model"):
        TRACERS[what](model, tokens)
    assert hooks_active() is None
    assert store.statistics().tiers[0].held == 0
    with TieredStore.open(tmp_path / "another", dram="1.25MiB", eviction=Eviction(deadline=20)) as another:
        models = [model, zero.page(copy.deepcopy(reference), store, name="other"), zero.page(copy.deepcopy(reference), another)]
        optimizers = [zero.AdamW(one.parameters()) for one in models]
        adam = torch.optim.AdamW(reference.parameters(), fused=True)
        for number in range(2):
            for one, its in zip([reference, *models], [adam, *optimizers], strict=True):
                its.zero_grad()
                one.loss(number).backward()
                its.step()
        for one in models:
            assert equal(one.state_dict(), reference.state_dict())
