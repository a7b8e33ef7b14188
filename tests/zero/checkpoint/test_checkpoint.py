"""Training that was killed and resumed, or rolled back, goes on bit for bit as if nothing had been."""

from __future__ import annotations

import errno
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.quick import quick
from tests.zero.models import Mixed, Tied, parameter_groups
from tiered import CapacityError, InterruptedStep, ManifestError, MisuseError, TieredStore, UncommittedWarning, zero
from tiered.format.pins import Pin
from tiered.zero.checkpoint.checkpoint import extra_of
from tiered.zero.record import INLINE, dumps, loads

DRAM = "1MiB"
STEPS = 8


class Noisy(Tied):
    """Numbers of every generator there is go into the loss."""

    def loss(self, seed: int) -> torch.Tensor:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return super().loss(seed) * (1 + 0.01 * noise)


@dataclass
class Job:
    """One process's life: it opens the store, goes on where the last one stopped, and trains until it is killed."""

    folder: Path
    make: Callable[[], nn.Module]
    update: str = "on_fetch"
    dram: str = DRAM
    scaled: bool = False
    policy: zero.Policy = field(default_factory=zero.Policy)

    def run(self, until: int, commits: Callable[[str, int], bool], fresh: bool) -> dict[int, list[float]]:
        """Train to step ``until``; what each step computed. Ends without a commit."""
        numbers: dict[int, list[float]] = {}
        with TieredStore.open(self.folder, dram=self.dram) as store:
            torch.manual_seed(0 if fresh else 99)
            random.seed(0 if fresh else 99)
            np.random.seed(0 if fresh else 99)
            model = zero.page(self.make(), store, existing="refuse" if fresh else "resume", policy=self.policy)
            optimizer = zero.AdamW(parameter_groups(model), lr=1e-3, update=self.update)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            scaler = zero.GradScaler(init_scale=2.0**8, growth_interval=3, enabled=self.scaled)
            data = torch.Generator().manual_seed(5)
            with_them: dict[str, Any] = {"scheduler": scheduler, "scaler": scaler, "data": data}
            first, done = 0, 0
            if not fresh:
                extra = zero.resume(model, optimizer, **with_them)
                first, done = extra["step"], extra["micro"]
                numbers[first] = list(extra["numbers"])
            for step in range(first, until):
                found = numbers.setdefault(step, [])

                def at(where: str, micro: int, step: int = step, found: list[float] = found) -> None:
                    if commits(where, step):
                        following = step + (where == "end")
                        kept = [] if where == "end" else found
                        extra = {"step": following, "micro": micro, "numbers": kept, "large": torch.arange(INLINE)}
                        zero.commit(model, optimizer, **with_them, extra=extra, meta={"step": following})

                for micro in range(done, 1 if self.update == "in_backward" else 2):
                    if micro == 0:
                        optimizer.zero_grad(set_to_none=step % 5 != 3)
                    loss = model.loss(int(torch.randint(0, 1000, (), generator=data)))  # type: ignore[operator]
                    scaler.scale(loss / 2).backward()
                    found.append(loss.item())
                    at("micro", micro + 1)
                done = 0
                if self.update != "in_backward":
                    scaler.unscale_(optimizer)
                    found.append(optimizer.clip_grad_norm_(0.5).item())
                    at("clipped", 2) if not self.scaled else None
                scaler.step(optimizer) if self.scaled else optimizer.step()
                scaler.update()
                scheduler.step()
                at("end", 0)
            if until == STEPS:
                self.last = {name: value.clone() for name, value in model.state_dict().items()}
                self.states = optimizer.state_dict()["state"]
            store.close()
        return numbers


def never(where: str, step: int) -> bool:
    return False


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)


KINDS = {
    "tied": {"make": Noisy},
    "recomputed": {"make": partial(Noisy, mode="recompute")},
    "in backward": {"make": Noisy, "update": "in_backward"},
    "scaled": {"make": Noisy, "scaled": True},
    "bf16": {"make": Noisy, "policy": zero.Policy(torch.bfloat16)},
}


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Job, dict[int, list[float]]]]:
    """By kind: what was never killed, and what its steps computed; run once."""

    @functools.cache
    def run(kind: str) -> tuple[Job, dict[int, list[float]]]:
        whole = Job(tmp_path_factory.mktemp("uncut") / "whole", **KINDS[kind])  # type: ignore[arg-type]
        return whole, whole.run(STEPS, never, fresh=True)

    return run


@pytest.mark.parametrize(
    ("kind", "where"),
    quick(
        [(kind, where) for kind in KINDS for where in ("micro", "end")],
        [("recomputed", "end"), ("in backward", "micro")],
    ),
)
def test_killed_and_resumed(tmp_path: Path, uncut: Any, kind: str, where: str) -> None:
    whole, expected = uncut(kind)
    source = random.Random(kind + where)
    killed = Job(tmp_path / "killed", **KINDS[kind])  # type: ignore[arg-type]
    found: dict[int, list[float]] = {}
    committed, until = 0, 0
    while until < STEPS:
        until = min(STEPS, max(committed + 2, until + source.randint(1, 4)))
        chosen = {source.randrange(committed, until)}
        first = not killed.folder.exists()
        found |= killed.run(until, lambda at, step, chosen=chosen: at == where and step in chosen, fresh=first)  # type: ignore[misc]
        committed = max(chosen)
    assert found == expected
    assert equal(killed.last, whole.last)
    assert equal(killed.states, whole.states)


def test_a_commit_applies_no_update_and_changes_nothing(tmp_path: Path, uncut: Any) -> None:
    """Nor does a larger pool at the next opening: units stay as they were divided."""
    whole, expected = uncut("tied")
    often = Job(tmp_path / "often", Noisy)
    found = often.run(5, lambda at, step: at != "clipped", fresh=True)
    often.dram = "8MiB"
    found |= often.run(STEPS, lambda at, step: True, fresh=False)
    assert found == expected
    assert equal(often.last, whole.last)


def test_buffers_and_a_model_on_the_meta_device(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram="2MiB") as store:
        torch.manual_seed(0)
        model = zero.page(Mixed(), store)
        optimizer = zero.AdamW(model.parameters())
        model.loss(1).backward()  # type: ignore[operator]
        optimizer.step()
        zero.commit(model, optimizer, extra={"at": (1, 2)})
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        values = {name: value.clone() for name, value in model.state_dict().items()}
        store.close()
    with torch.device("meta"):
        again = Mixed()
    with TieredStore.open(tmp_path / "state", dram="2MiB") as store:
        model = zero.page(again, store, existing="resume")
        assert zero.resume(model, zero.AdamW(model.parameters())) == {"at": (1, 2)}
        assert equal(dict(model.named_buffers()), buffers)
        assert equal(dict(model.state_dict()), values)


def test_built_by_zero_init_and_resumed(tmp_path: Path) -> None:
    for existing in ("refuse", "resume"):
        with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
            torch.manual_seed(1)
            with zero.init(store):
                model = Tied()
            zero.page(model, store, existing=existing)
            if existing == "refuse":
                zero.commit(model)
                values = {name: value.clone() for name, value in model.state_dict().items()}
            else:
                zero.resume(model)
                assert equal(dict(model.state_dict()), values)
            assert not [key for key in store if not key.startswith("model/")]


# The way back


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    ("where", "update"),
    quick(
        product(["forward", "backward", "update", "after"], ["on_fetch", "in_backward"]),
        [("forward", "on_fetch"), ("backward", "in_backward"), ("update", "on_fetch"), ("after", "in_backward")],
    ),
)
def test_rollback_after_a_bad_step(tmp_path: Path, where: str, update: str) -> None:
    torch.manual_seed(0)
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2, update=update)

        def step(number: int) -> float:
            optimizer.zero_grad()
            loss = model.loss(number)  # type: ignore[operator]
            loss.backward()
            optimizer.step()
            return float(loss.item())

        for number in range(3):
            step(number)
        zero.commit(model, optimizer, extra={"step": 3})
        expected = [step(3), step(4)]
        values = {name: value.clone() for name, value in model.state_dict().items()}
        assert zero.rollback(model, optimizer) == {"step": 3}

        block = model.blocks[1].out  # type: ignore[union-attr, index]
        error = Broken("as a test wants it")
        handles = []
        if where == "forward":
            handles.append(block.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error)))
        elif where == "backward":
            handles.append(block.register_full_backward_hook(lambda *_: (_ for _ in ()).throw(error)))
        if where in ("forward", "backward"):
            with pytest.raises(Broken):
                step(3)
        else:
            for group in optimizer.param_groups:
                group["lr"] = float("nan") if where == "update" else 1e9
            step(3)
            if where == "update":
                model.state_dict()
        for handle in handles:
            handle.remove()
        zero.rollback(model, optimizer)
        assert store.statistics().tiers[0].held == 0
        assert [step(3), step(4)] == expected
        assert equal(dict(model.state_dict()), values)


def test_rollback_to_an_earlier_commit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with TieredStore.open(tmp_path / "state", dram=DRAM, keep=3) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        losses: list[float] = []

        def step() -> float:
            optimizer.zero_grad()
            loss = model.loss(len(losses))  # type: ignore[operator]
            loss.backward()
            optimizer.step()
            losses.append(float(loss.item()))
            return losses[-1]

        for _ in range(3):
            step()
            zero.commit(model, optimizer, extra={"step": len(losses)})
        with pytest.raises(ManifestError, match="no generation 9"):
            zero.rollback(model, optimizer, generation=9)
        step()
        expected, losses = losses[1:], losses[:1]
        assert zero.rollback(model, optimizer, generation=1) == {"step": 1}
        assert [step() for _ in expected] == expected


def added(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


WRONG: dict[str, tuple[Callable[[nn.Module, Any, Any], object], str]] = {
    "no optimizer": (lambda m, o, s: zero.rollback(m, scheduler=s), "optimizer= is missing.*has one: give it, as zero.commit"),
    "no scheduler": (lambda m, o, s: zero.rollback(m, o), "scheduler= is missing, .*has one: give it, as zero.commit"),
    "data": (
        lambda m, o, s: zero.rollback(m, o, scheduler=s, data=torch.Generator()),
        "data= was given, and the checkpoint has none: leave it out here, and make it after this call",
    ),
    "other groups": (
        lambda m, o, s: zero.rollback(m, zero.AdamW(list(m.parameters())[:1]), scheduler=s),
        "the param groups of the optimizer have other parameters",
    ),
    "another rule": (lambda m, o, s: zero.rollback(m, zero.SGD(m.parameters()), scheduler=s), "was updated by"),
    "another model": (lambda m, o, s: (added(m), zero.rollback(m, o, scheduler=s)), "that had no 'extra.weight'"),
    "an earlier commit": (
        lambda m, o, s: zero.rollback(m, o, scheduler=s, generation=1),
        "optimizer= was given, and the checkpoint has none",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_rollback_that_is_refused_changes_nothing(tmp_path: Path, wrong: str) -> None:
    """Neither values, nor an update that is pending, nor what the next steps give."""
    call, message = WRONG[wrong]

    def run(folder: str, refused: bool) -> list[float]:
        torch.manual_seed(0)
        with TieredStore.open(tmp_path / folder, dram=DRAM) as store:
            model = zero.page(Tied(), store)
            zero.commit(model)
            optimizer = zero.AdamW(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            losses: list[float] = []

            def step() -> None:
                loss = model.loss(len(losses))  # type: ignore[operator]
                loss.backward()
                losses.append(float(loss.item()))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

            step()
            zero.commit(model, optimizer, scheduler=scheduler, extra={"losses": len(losses)})
            step()
            if refused:
                with pytest.raises(MisuseError, match=message):
                    call(model, optimizer, scheduler)
                if hasattr(model, "extra"):
                    del model.extra
            step()
            assert zero.rollback(model, optimizer, scheduler=scheduler) == {"losses": 1}
            del losses[1:]
            step()
            store.close()
            return losses

    assert run("refused", True) == run("undisturbed", False)


@pytest.mark.parametrize("existing", ["resume", "continue"])
def test_what_a_refused_resume_tells_to_do_works(tmp_path: Path, existing: str) -> None:
    def step(model: nn.Module, optimizer: zero.AdamW) -> torch.Tensor:
        model.loss(1).backward()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        return next(model.parameters()).detach().clone()

    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        committed = step(model, optimizer)
        zero.commit(model, optimizer)
        expected = step(model, optimizer)
        store.close()
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store, existing=existing)
        with pytest.raises(MisuseError, match=r"is missing.*to evaluate or export, leave zero\.resume out: the parameters are"):
            zero.resume(model)
        zero.export(model, tmp_path / "out")
        assert torch.equal(next(iter(load_file(tmp_path / "out" / "model.safetensors").values())), committed)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        early = torch.optim.lr_scheduler.StepLR(zero.AdamW(model.parameters()), 1)
        with pytest.raises(MisuseError, match=r"scheduler= was given, .* leave it out here, and make it after this call"):
            zero.resume(model, optimizer, scheduler=early)
        zero.resume(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        assert torch.equal(step(model, optimizer), expected)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 5e-3
        store.close()


def test_where_a_commit_cannot_be_read_beside_the_store_a_rollback_finds_out_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, on which a reader cannot make its file."""
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters())
        zero.commit(model, optimizer)
        expected = model.loss(1).item()  # type: ignore[operator]
        model.loss(1).backward()  # type: ignore[operator]
        optimizer.step()
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(Pin, "__init__", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(MisuseError, match="optimizer= is missing"):
            zero.rollback(model)
        with pytest.raises(InterruptedStep, match="has not followed yet"):
            model.loss(1)  # type: ignore[operator]
        zero.rollback(model, optimizer)
        assert model.loss(1).item() == expected  # type: ignore[operator]


def test_a_commit_of_the_store_alone_never_pairs_an_old_record_with_newer_tensors(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters())
        zero.commit(model, optimizer)
        store.commit()  # nothing has changed: the record still fits
        model.loss(1).backward()  # type: ignore[operator]
        optimizer.step()
        optimizer.flush()
        store.commit()
        store.close()
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        assert store.generation == 3
        with pytest.raises(MisuseError, match="open an earlier generation"):
            zero.page(Tied(), store, existing="resume")
        store.close()
    with TieredStore.open(tmp_path / "state", dram=DRAM, generation=2) as store:
        model = zero.page(Tied(), store, existing="resume")
        zero.resume(model, zero.AdamW(model.parameters()))


def test_nor_after_the_store_went_back_by_itself(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters())
        zero.commit(model, optimizer)

        def step() -> float:
            loss = model.loss(1)  # type: ignore[operator]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()
            return float(loss.item())

        expected = step()
        store.rollback()
        for call in (step, lambda: zero.commit(model, optimizer)):
            with pytest.raises(InterruptedStep, match="has not followed yet"):
                call()
        store.commit()
        zero.rollback(model, optimizer)
        assert step() == expected
        store.commit()
        assert "model/checkpoint" not in store
        with pytest.raises(MisuseError, match="nothing was rolled back"):
            zero.rollback(model, optimizer)


def test_an_optimizer_that_has_made_steps_is_not_left_out(tmp_path: Path) -> None:
    """Its moments and counts would be lost with a crash, and a rollback would take back the parameters alone."""
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        zero.commit(model)  # it has made none yet
        model.loss(1).backward()  # type: ignore[operator]
        optimizer.step()
        for call in (zero.commit, zero.commit_async):
            with pytest.raises(MisuseError, match=r"an optimizer, AdamW, which updates '.*', has made steps of 'model', and"):
                call(model)
        zero.commit(model, optimizer)
        store.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"extra": 5}, "extra is a dict of JSON values, tuples and tensors, by name, not 5"),
        ({"extra": "epoch 3"}, "extra is a dict .*, not 'epoch 3'"),
        ({"scheduler": 5}, r"scheduler= has a state_dict\(\) and a load_state_dict\(\), and 5 has none"),
        ({"scaler": "x"}, "scaler= has a state_dict"),
        ({"data": [1, 2]}, "data= has a state_dict"),
    ],
)
def test_what_is_no_part_of_a_training_is_named(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        with pytest.raises(MisuseError, match=says):
            zero.commit(model, **wrong)
        store.close()


def test_a_commit_of_the_store_alone_is_no_way_back_for_a_model(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Noisy(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        store.commit()
        model.loss(1).backward()  # type: ignore[operator]
        optimizer.step()
        with pytest.raises(MisuseError, match=r"has no 'model/checkpoint': nothing was rolled back \(zero\.commit makes"):
            zero.rollback(model, optimizer)
        optimizer.flush()
        store.rollback()
        with pytest.raises(InterruptedStep, match=r"no checkpoint of model 'model' \(zero\.commit makes one\): page it"):
            model.loss(1)  # type: ignore[operator]
        store.close()


def test_a_commit_that_fails_leaves_no_record_of_two_moments(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        zero.commit(model, extra={"step": 3, "table": torch.full((10_000,), 3.0)})
        with pytest.raises(CapacityError):
            zero.commit(model, extra={"step": 4, "table": torch.full((10_000,), 4.0), "big": torch.zeros(1 << 20)})
        with pytest.warns(UncommittedWarning, match="left without a commit"):
            store.__exit__(None, None, None)
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:  # the commit before holds
        found = zero.resume(zero.page(Tied(), store, existing="resume"))
        assert found["step"] == 3
        assert torch.equal(found["table"], torch.full((10_000,), 3.0))


@pytest.mark.parametrize("value", [10**5000, np.longdouble(1.5)], ids=["a number of 5,001 digits", "a long double"])
def test_a_number_that_cannot_be_written_down_is_refused(tmp_path: Path, value: Any) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(nn.Linear(4, 4), store)
        with pytest.raises(MisuseError, match="the checkpoint"):
            zero.commit(model, extra={"number": value})


def test_gradients_that_are_unscaled_and_not_used_yet_are_not_committed(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer, scaler = zero.AdamW(model.parameters()), zero.GradScaler()
        scaler.scale(model.loss(1)).backward()  # type: ignore[operator]
        zero.commit(model, optimizer, scaler=scaler)
        scaler.unscale_(optimizer)
        with pytest.raises(MisuseError, match=r"before scaler\.unscale_"):
            zero.commit(model, optimizer, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        zero.commit(model, optimizer, scaler=scaler)


# What is refused


def committed(folder: Path) -> None:
    with TieredStore.open(folder, dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters())
        zero.commit(model, optimizer)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    committed(tmp_path / "state")
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        both = r"the commit has 'position' \(.*\(16, 32\)\), and this model 'position' \(.*\(16, 64\)\)"
        with pytest.raises(MisuseError, match=both):
            zero.page(Tied(width=64), store, existing="resume")
        with pytest.raises(MisuseError, match=r"stored as torch\.bfloat16"):
            zero.page(Tied(), store, existing="resume", policy=zero.Policy(torch.bfloat16))
        with pytest.raises(MisuseError, match="no model named 'other' to go on with; it has 'model'"):
            zero.page(Tied(), store, name="other", existing="resume")
        with pytest.raises(MisuseError, match="existing='continue'"):
            zero.page(Tied(), store)
        model = zero.page(Tied(), store, existing="resume")
        with pytest.raises(MisuseError, match="optimizer= is missing"):
            zero.resume(model)
        with pytest.raises(MisuseError, match="other parameters"):
            zero.resume(model, zero.AdamW(list(model.parameters())[:3]))
        store.close()


@pytest.mark.parametrize("where", quick(["forward", "backward"], ["backward"]))
def test_a_step_that_was_given_up_is_not_in_a_commit(tmp_path: Path, where: str) -> None:
    """An exception has struck in it; ``zero_grad``, and a commit is of the state before, with the updates that were pending."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    def losses(folder: str, interrupted: int) -> list[float]:
        found: list[float] = []
        for step in range(6):
            with TieredStore.open(tmp_path / folder, dram=DRAM) as store:
                torch.manual_seed(0)
                model: Any = zero.page(Tied(), store, existing="resume" if step else "refuse")
                optimizer = zero.AdamW(model.parameters(), lr=1e-2)
                if step:
                    zero.resume(model, optimizer)
                if step == interrupted:
                    optimizer.zero_grad()
                    hook = broken if where == "forward" else lambda _, given: given[0].register_hook(broken) and None
                    model.norm.register_forward_pre_hook(hook)
                    with pytest.raises(ZeroDivisionError):
                        model.loss(99).backward()
                    optimizer.zero_grad()
                else:
                    optimizer.zero_grad()
                    loss = model.loss(len(found))
                    loss.backward()
                    optimizer.step()
                    found.append(loss.item())
                zero.commit(model, optimizer)
                store.close()
        return found

    assert losses("interrupted", 3) == losses("whole", -1)[:5]


def test_what_was_committed_can_be_asked_before_there_is_a_model(tmp_path: Path) -> None:
    committed(tmp_path / "state")
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        assert extra_of(store, "model") is None
        with pytest.raises(MisuseError, match="no model named 'other' to go on with; it has 'model'"):
            extra_of(store, "other")
        store.close()


def test_within_forward_it_is_refused(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store)
        model.norm.register_forward_hook(lambda *_: zero.commit(model))  # type: ignore[union-attr]
        with pytest.raises(MisuseError, match="outside forward and backward"):
            model.loss(1)  # type: ignore[operator]
        store.close()


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x"], "b": (1, (2, 3)), 7: {"nested": {1: 2}}, (1, 2): 3},
        {"nan": [float("inf"), -0.0, 1e-320, 2**100]},
        Counter({1: 2, "a": 3}),
        torch.tensor(float("nan")),
        {"empty": torch.empty(0, 3), "bf16": torch.ones(3, dtype=torch.bfloat16), "large": torch.arange(INLINE)},
        {"dtype": torch.float16, "dict": {"dict": [], "tensor": "no"}},
        {"numpy": np.arange(3, dtype=np.uint32)},
    ],
)
def test_a_record_comes_back(value: Any) -> None:
    kept: dict[str, torch.Tensor] = {}

    def store(tensor: torch.Tensor) -> str:
        kept[str(len(kept))] = tensor
        return str(len(kept) - 1)

    again = loads(dumps(value, "it", store), "it", kept.__getitem__)
    assert repr(again) == repr(value)
    assert type(again) is type(value)


def test_a_number_of_numpys_comes_back_as_pythons() -> None:
    assert loads(dumps([np.float64(0.1), np.int8(3)], "it", lambda _: ""), "it", {}.__getitem__) == [0.1, 3]


def test_what_a_record_does_not_hold_is_named() -> None:
    with pytest.raises(MisuseError, match=r"it\['a'\]\[1\] is a object"):
        dumps({"a": [1, object()]}, "it", lambda _: "")
    with pytest.raises(MisuseError, match="sparse"):
        dumps(torch.eye(3).to_sparse(), "it", lambda _: "")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff", b'{"tensor": ["float32", [4], "AAAA"]}', b'{"tensor": ["load", [1], "AAAA"]}', b'{"dtype": "nn"}',
        b'{"dict": [[1]]}', b'{"what": 1}', b'{"tuple": 3}', b'{"a": 1, "b": 2}', b'{"stored": "x"}', b"[" * 100_000,
        b'{"tensor": ["uint8", [-5], ""]}', b'{"dict": [[[1], 2]]}', b'{"tensor": ["float32", [1e9], "AAAA"]}',
    ],
)  # fmt: skip
def test_a_damaged_record_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(ManifestError, match="it is damaged"):
        loads(data, "it", {}.__getitem__)
