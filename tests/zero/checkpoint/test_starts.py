"""What a start of a program means where an earlier one left a model (``existing=``), and what the end of a ``with`` block
commits: each run goes on bit for bit where the last one left the store, whether or not it called ``zero.commit``."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.quick import quick
from tests.zero.models import Normed, Tied
from tiered import CapacityError, InterruptedStep, LeaseConflict, MisuseError, TieredStore, UncommittedWarning, zero
from tiered.store.at_rest import StoreAtRest
from tiered.zero.checkpoint.safetensors import export_at_rest

DRAM = "1MiB"
UPDATES = quick(["on_fetch", "in_backward"], ["on_fetch", "in_backward"])


def run(folder: Path, steps: int, *, existing: str = "continue", update: str = "on_fetch", seed: int = 0) -> list[float]:
    """One life of a program, which never calls ``zero.commit``."""
    with TieredStore.open(folder, dram=DRAM) as store:
        torch.manual_seed(seed)
        model = zero.page(Tied(), store, existing=existing)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2, update=update)
        scheduler, data = StepLR(optimizer, 2, 0.5), torch.Generator().manual_seed(3)
        assert zero.resume(model, optimizer, scheduler=scheduler, data=data) is None
        return [step(model, optimizer, scheduler, data) for _ in range(steps)]


def step(model: Any, optimizer: Any, scheduler: Any = None, data: torch.Generator | None = None) -> float:
    optimizer.zero_grad()
    loss = model.loss(0 if data is None else int(torch.randint(0, 1000, (), generator=data)))
    loss.backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss.item()


@pytest.mark.parametrize("change", ["nothing", "a forward", "a step", "a tensor", "a deletion"])
def test_closing_warns_of_what_is_lost_alone(tmp_path: Path, change: str) -> None:
    """Not of updates that the commit had pending, and that a forward has applied."""
    store = TieredStore.open(tmp_path / "store", dram="1MiB")
    store["mine"] = torch.ones(3)
    model = zero.page(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), store)
    optimizer = zero.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    zero.commit(model, optimizer)
    if change == "a tensor":
        store["mine"] = torch.zeros(3)
    elif change == "a deletion":
        del store["mine"]
    if change != "nothing":
        loss = model(torch.ones(1, 64)).sum()
    if change == "a step":
        loss.backward()
        optimizer.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        store.close()
    assert [one.category for one in said] == ([UncommittedWarning] if change in ("a step", "a tensor", "a deletion") else [])


@pytest.mark.parametrize("update", UPDATES)
def test_one_program_begins_and_goes_on(tmp_path: Path, update: str) -> None:
    whole = run(tmp_path / "whole", 6, update=update)
    parts = [run(tmp_path / "parts", 2, update=update, seed=seed) for seed in range(3)]
    assert [loss for part in parts for loss in part] == whole
    assert run(tmp_path / "parts", 2, existing="overwrite", update=update) == whole[:2]
    with pytest.raises(MisuseError, match="existing='overwrite' to begin anew, or existing='continue' to go on"):
        run(tmp_path / "parts", 2, existing="refuse", update=update)
    assert run(tmp_path / "parts", 2, update=update, seed=9) == whole[2:4]


class Halves(nn.Module):
    """Two halves, of which each has an optimizer of its own; with this budget the second is divided into slices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 640), nn.Linear(640, 640)

    def loss(self, number: int) -> torch.Tensor:
        batch = torch.randn(4, 48, generator=torch.Generator().manual_seed(number))
        return self.second(torch.relu(self.first(batch))).square().mean()


def halves(
    folder: Path, steps: int, *, update: str = "on_fetch", given: slice = slice(None)
) -> list[float]:
    """A program whose model has two optimizers, of which those that are ``given`` go to ``zero.commit``."""
    with TieredStore.open(folder, dram=DRAM) as store:
        torch.manual_seed(0)
        model = zero.page(Halves(), store, existing="continue")
        both = [
            zero.AdamW(model.first.parameters(), lr=1e-2, update=update),
            zero.SGD(model.second.parameters(), lr=1e-2, momentum=0.9, update=update),
        ]
        before = zero.resume(model, both)
        made, losses = 0 if before is None else before["made"], []
        for number in range(made, made + steps):
            loss = model.loss(number)
            loss.backward()
            losses.append(loss.item())
            for optimizer in both:
                optimizer.step()
            for optimizer in both:
                optimizer.zero_grad()
            zero.commit(model, both[given], extra={"made": number + 1})
        return losses


@pytest.mark.parametrize("update", UPDATES)
def test_a_commit_has_all_optimizers_of_a_model(tmp_path: Path, update: str) -> None:
    whole = halves(tmp_path / "whole", 6, update=update)
    parts = [halves(tmp_path / "parts", 2, update=update) for _ in range(3)]
    assert [loss for part in parts for loss in part] == whole
    with pytest.raises(MisuseError, match=r"another optimizer, SGD, which updates 'second.weight', .*=\[first, second\]"):
        halves(tmp_path / "parts", 1, update=update, given=slice(1))
    with TieredStore.open(tmp_path / "parts", dram=DRAM) as store:
        model = zero.page(Halves(), store, existing="resume")
        first = zero.AdamW(model.first.parameters(), lr=1e-2, update=update)
        second = zero.SGD(model.second.parameters(), lr=1e-2, momentum=0.9, update=update)
        for wrong in (first, [second, first], [first, second, second]):
            with pytest.raises(MisuseError, match="several as a list in that order"):
                zero.resume(model, wrong)
        for wrong in ([], [first, first], "both", [first, "second"]):
            with pytest.raises(MisuseError):
                zero.commit(model, wrong)  # type: ignore[arg-type]
        assert zero.resume(model, [first, second]) == {"made": 6}
        assert first.state[model.first.weight]["step"] == 6


def test_the_end_of_a_block_commits_all_optimizers_of_a_model(tmp_path: Path) -> None:
    def run(folder: Path, *lives: int) -> list[float]:
        losses: list[float] = []
        for steps in lives:
            with TieredStore.open(folder, dram=DRAM) as store:
                torch.manual_seed(0)
                model = zero.page(Halves(), store, existing="continue")
                both = [zero.AdamW(half.parameters(), lr=1e-2) for half in (model.first, model.second)]
                zero.resume(model, both)
                for _ in range(steps):
                    loss = model.loss(len(losses))
                    loss.backward()
                    for optimizer in both[: 1 if len(losses) == 2 else 2]:  # one that rests since resume is in a commit, too
                        optimizer.step()
                    for optimizer in both:
                        optimizer.zero_grad()
                    losses.append(loss.item())
        return losses

    assert run(tmp_path / "parts", 2, 1, 3) == run(tmp_path / "whole", 6)


def test_an_optimizer_that_has_served_is_no_part_of_a_commit(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Halves(), store)
        head = zero.AdamW(model.first.parameters())
        model.loss(0).backward()
        head.step()
        head.zero_grad()
        body = zero.AdamW(model.parameters())
        zero.commit(model, body)  # the parameters are its now
        body.zero_grad()
        del head, body
        gc.collect()
        other = zero.AdamW(model.second.parameters())
        model.loss(0).backward()
        other.step()
        zero.commit(model, other)


@pytest.mark.parametrize("update", UPDATES)
def test_whoever_goes_on_without_resume_is_told_before_a_step(tmp_path: Path, update: str) -> None:
    whole = run(tmp_path / "state", 2, update=update)
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store, existing="continue")
        optimizer = zero.AdamW(model.parameters(), lr=1e-2, update=update)
        for what in (model.loss(0).backward, optimizer.step, lambda: zero.commit(model, optimizer)):
            with pytest.raises(MisuseError, match=r"call zero\.resume\(model, optimizer\) before the first step"):
                what()
    assert run(tmp_path / "state", 2, update=update) == run(tmp_path / "whole", 4, update=update)[2:] != whole


@pytest.mark.parametrize("less", [{"dram": "2MiB"}, {"dram": "16MiB", "hbm": "2MiB", "device": "cpu"}], ids=["dram", "hbm"])
@pytest.mark.parametrize("existing", ["resume", "continue"])
def test_a_store_that_was_divided_for_a_larger_budget_says_so(tmp_path: Path, existing: str, less: dict[str, str]) -> None:
    """What it says to do goes on where that store was left; slices add up gradients in another order."""

    def trained(store: TieredStore, steps: int, **asked: Any) -> list[float]:
        torch.manual_seed(0)
        model = zero.page(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), store, **asked)
        optimizer = zero.AdamW(model.parameters(), lr=1e-3)
        zero.resume(model, optimizer)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 512)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    with TieredStore.open(tmp_path / "whole", dram="32MiB") as store:
        expected = trained(store, 4, existing="continue")
    with TieredStore.open(tmp_path / "large", dram="32MiB") as store:
        assert trained(store, 2, existing="continue") == expected[:2]
    said = r"divided for a larger one: so it needs 3,158,016 bytes .*anew it works with this budget: .*'resume' and source="
    with TieredStore.open(tmp_path / "large", **less) as store, pytest.raises(CapacityError, match=said):
        zero.page(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), store, existing=existing)
    with TieredStore.open(tmp_path / "small", **less) as store:
        assert trained(store, 2, existing="resume", source=tmp_path / "large") == pytest.approx(expected[2:], rel=1e-5)


def test_tensors_without_a_checkpoint_are_not_taken_for_one(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        zero.page(Tied(), store)
        store.commit()
        store.close()
    with TieredStore.open(tmp_path, dram=DRAM) as store, pytest.raises(MisuseError, match="no checkpoint to go on from"):
        zero.page(Tied(), store, existing="continue")


def test_a_model_that_nobody_refers_to_any_more_is_in_the_commit_at_the_end(tmp_path: Path) -> None:
    def train(store: TieredStore, name: str) -> list[float]:
        torch.manual_seed(1)
        model = zero.page(Tied(), store, name=name, existing="continue")
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        zero.resume(model, optimizer)
        return [step(model, optimizer) for _ in range(2)]

    def only_evaluate(store: TieredStore, name: str) -> float:
        with torch.no_grad():
            return zero.page(Tied(), store, name=name, existing="continue").loss(0).item()

    found: dict[str, list[float]] = {"one": [], "other": []}
    for life in range(2):
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            for name, losses in found.items():
                losses += train(store, name)
            still = only_evaluate(store, "still")
            gc.collect()
        found.setdefault("still", []) if life else None
    assert found.pop("still") == []
    assert found["one"] == found["other"]
    assert len(set(found["one"])) == 4
    assert still > 0
    with TieredStore.open(tmp_path, dram=DRAM) as store:  # never trained, and there nevertheless
        assert only_evaluate(store, "still") == still


def test_the_commit_at_the_end_can_be_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        zero.page(model, store)
        step(model, zero.AdamW(model.parameters()))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    with StoreAtRest(tmp_path / "state") as at_rest:
        export_at_rest(at_rest, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in expected.items() if name in written)
    assert written


def test_what_changed_in_memory_alone_is_in_the_commit_and_nothing_is_not_one(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(3, 4)
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Normed(), store)
        optimizer = zero.AdamW(model.parameters())
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.flush()
        made = zero.commit(model, optimizer)
    for resumes, trains in ((True, False), (False, True), (True, True)):
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            assert store.generation == made
            model = zero.page(Normed(), store, existing="resume")
            if resumes:
                zero.resume(model, zero.AdamW(model.parameters()))
            model.train(trains)
            with torch.no_grad():
                model(x)
            tracked = int(model.norm.num_batches_tracked)
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        assert store.generation == made + 1
        model = zero.page(Normed(), store, existing="resume")
        zero.resume(model, zero.AdamW(model.parameters()))
        assert int(model.norm.num_batches_tracked) == tracked == 2


READS: dict[str, Callable[[Any, TieredStore, Path], object]] = {
    "nothing": lambda model, store, folder: None,
    "a forward": lambda model, store, folder: model.loss(0),
    "a parameter": lambda model, store, folder: [parameter.norm() for parameter in model.parameters()],
    "a state_dict": lambda model, store, folder: model.state_dict(),
    "an export": lambda model, store, folder: zero.export(model, folder),
    "a tensor of one's own": lambda model, store, folder: store.put("mine", torch.ones(3)),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("read", READS)
def test_what_is_read_after_the_last_commit_leaves_it_whole(tmp_path: Path, read: str, update: str) -> None:
    """Updates are applied as parameters are fetched, which is no change."""
    found: dict[str, list[float]] = {}
    for way in ("whole", read):
        found[way] = []
        for life in range(2):
            with TieredStore.open(tmp_path / way, dram=DRAM) as store:
                torch.manual_seed(life)
                model = zero.page(Tied(), store, existing="continue")
                optimizer = zero.AdamW(model.parameters(), lr=1e-2, update=update)
                data = torch.Generator().manual_seed(3)
                done = (zero.resume(model, optimizer, data=data) or {"done": 0})["done"]
                assert done == 2 * life
                for number in range(done, done + 2):
                    found[way].append(step(model, optimizer, data=data))
                    zero.commit(model, optimizer, data=data, extra={"done": number + 1})
                READS[way if way in READS else "nothing"](model, store, tmp_path / f"out{life}")
                if way == "a tensor of one's own":
                    assert "mine" in store
    assert found["whole"] == found[read]


@pytest.mark.parametrize("read", READS)
def test_what_reads_is_not_said_to_be_later_than_meta(tmp_path: Path, read: str) -> None:
    def life(end: Callable[[Any, Any, TieredStore], object]) -> list[str]:
        """Warnings of a block that begins or goes on, makes a step with a commit of meta, and ends."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UncommittedWarning)
            with TieredStore.open(tmp_path / "store", dram=DRAM) as store:
                model = zero.page(Tied(), store, existing="continue")
                optimizer = zero.AdamW(model.parameters(), lr=1e-2)
                zero.resume(model, optimizer)
                step(model, optimizer)
                zero.commit(model, optimizer, meta={"done": 1})
                end(model, optimizer, store)
        return [str(warning.message) for warning in found if warning.category is UncommittedWarning]

    own = read == "a tensor of one's own"
    assert len(life(lambda model, _, store: READS[read](model, store, tmp_path / "out"))) == own
    (said,) = life(lambda model, optimizer, _: step(model, optimizer))
    assert "has the meta of commit" in said


ZEROED = ("before backward", "after step", "after commit", "after commit, to zeros")


@pytest.mark.filterwarnings(f"error::{UncommittedWarning.__module__}.UncommittedWarning")
@pytest.mark.parametrize("zeroed", quick(ZEROED, ZEROED[:3]))
@pytest.mark.parametrize("ends", ["at a step", "between two backward passes", "after a step that was left out"])
def test_gradients_that_a_step_has_used_are_in_no_commit(tmp_path: Path, zeroed: str, ends: str) -> None:
    """Wherever the loop calls ``zero_grad``, each life goes on bit for bit, as with the state_dicts of torch; what is
    accumulated for a step to come is in the commit, and is added to."""

    def life(folder: Path, passes: int) -> list[float]:
        losses = []
        with TieredStore.open(folder, dram=DRAM) as store:
            torch.manual_seed(0)
            model = zero.page(Tied(), store, existing="continue")
            optimizer, scaler = zero.AdamW(model.parameters(), lr=1e-2), zero.GradScaler(init_scale=4.0)
            made = (zero.resume(model, optimizer, scaler=scaler) or {"made": 0})["made"]
            for number in range(made, made + passes):
                steps = number % 2 == 1
                if zeroed == "before backward" and not steps:
                    optimizer.zero_grad()
                loss = model.loss(number)
                losses.append(loss.item())
                (scaler.scale(loss) * (float("inf") if number == 5 else 1.0)).backward()
                if steps:
                    scaler.step(optimizer)
                    scaler.update()
                    if zeroed == "after step":
                        optimizer.zero_grad()
                zero.commit(model, optimizer, scaler=scaler, extra={"made": number + 1})
                if steps and zeroed.startswith("after commit"):
                    optimizer.zero_grad(set_to_none="zeros" not in zeroed)
                    if "zeros" in zeroed:
                        zero.commit(model, optimizer, scaler=scaler, extra={"made": number + 1})
        return losses

    lives = {"at a step": (2, 4, 4), "between two backward passes": (1, 4, 5), "after a step that was left out": (6, 2)}[ends]
    whole = life(tmp_path / "whole", sum(lives))
    assert [loss for passes in lives for loss in life(tmp_path / "parts", passes)] == whole
    assert len(set(whole)) == len(whole)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda p: None,
    "by a number": lambda p: p.grad.mul_(0.5),
    "by a factor above one": lambda p: p.grad.mul_(1.5),
    "by one that is negative": lambda p: p.grad.neg_(),
    "a part": lambda p: p.grad[0].add_(1.0),
    "by clipping": lambda p: torch.nn.utils.clip_grad_norm_([p], 1e-3),
    "assigned": lambda p: setattr(p, "grad", p.grad * 2.0),
    "to zeros": lambda p: p.grad.zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_was_changed_after_its_step_is_in_the_commit(tmp_path: Path, change: str) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer)
        parameter = next(model.parameters())
        CHANGES[change](parameter)
        expected = None if change == "nothing" else parameter.grad.clone()
        zero.commit(model, optimizer)
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store, existing="resume")
        zero.resume(model, zero.AdamW(model.parameters(), lr=1e-2))
        found = next(model.parameters()).grad
        assert (found is None) == (expected is None)
        assert expected is None or torch.equal(found.clone(), expected)


def test_steps_after_the_last_commit_with_an_extra_are_made_again(tmp_path: Path) -> None:
    """Only the program knows what its extra would be by then: the last moment that it named is the one that stays."""
    losses: list[float] = []

    def live(begins: int) -> None:
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            model = zero.page(Tied(), store, existing="continue")
            optimizer, data = zero.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(3)
            done = (zero.resume(model, optimizer, data=data) or {"done": 0})["done"]
            assert done == begins
            for number in range(done, done + 4):
                losses.append(step(model, optimizer, data=data))
                if number % 3 == 2:
                    zero.commit(model, optimizer, data=data, extra={"done": number + 1})
            store.put("mine", torch.ones(3))

    for begins in (0, 3):
        with pytest.warns(UncommittedWarning, match=r"without a commit .*among them mine\): .* has extra="):
            live(begins)
        with TieredStore.open(tmp_path, dram=DRAM, access="read") as store:
            assert "mine" not in store
    assert losses[3] == losses[4]


def test_what_the_commit_at_the_end_lacks_is_told(tmp_path: Path) -> None:
    def life(name: str, what: str) -> None:
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            model = zero.page(Tied(), store, name=name)
            optimizer = zero.AdamW(model.parameters())
            if what == "one of two optimizers":
                half = list(model.parameters())
                first, second = zero.AdamW(half[:3]), zero.AdamW(half[3:])
                model.loss(0).backward()
                first.step()
                second.step()
                del first
                gc.collect()
            elif what == "a scheduler":
                StepLR(optimizer, 2)
                step(model, optimizer)
            elif what == "an exception":
                model.loss(0).backward()
                model.position.register_hook(lambda _: 1 / 0)  # type: ignore[union-attr, operator]
                with pytest.raises(ZeroDivisionError):
                    model.loss(0).backward()
                model.position.requires_grad_(False)  # type: ignore[union-attr, operator]
            else:
                step(model, optimizer)

    for name, what, told in (
        ("a", "one of two optimizers", "is no checkpoint of model 'a': an optimizer that made steps of it is gone"),
        ("b", "a scheduler", "has no scheduler of model 'b'"),
    ):
        with pytest.warns(UncommittedWarning, match=told):
            life(name, what)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        life("c", "nothing")


def test_whoever_only_evaluates_leaves_the_checkpoint(tmp_path: Path) -> None:
    """Updates that were pending in it are applied meanwhile."""
    run(tmp_path / "state", 2)
    for existing in ("resume", "continue"):
        with TieredStore.open(tmp_path / "state", dram=DRAM) as store, torch.no_grad():
            zero.page(Tied(), store, existing=existing).loss(0)
    assert run(tmp_path / "state", 2) == run(tmp_path / "whole", 4)[2:]


def test_an_exception_commits_nothing(tmp_path: Path) -> None:
    run(tmp_path, 2)

    def broken() -> None:
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            model = zero.page(Tied(), store, existing="continue")
            optimizer = zero.AdamW(model.parameters())
            data = torch.Generator()
            zero.resume(model, optimizer, scheduler=StepLR(optimizer, 2, 0.5), data=data)
            step(model, optimizer)
            raise InterruptedStep("in the loop")

    with pytest.raises(InterruptedStep, match="in the loop"):
        broken()
    assert run(tmp_path, 2) == run(tmp_path / "whole", 4)[2:]


def test_values_are_read_from_files_only_to_begin(tmp_path: Path) -> None:
    torch.manual_seed(4)
    (tmp_path / "weights").mkdir()
    save_file(nn.Linear(8, 8).state_dict(), tmp_path / "weights" / "model.safetensors")
    losses = []
    for _ in range(3):
        with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
            model = zero.page(nn.Linear(8, 8), store, existing="continue", weights=tmp_path / "weights")
            optimizer = zero.SGD(model.parameters(), lr=0.1)
            zero.resume(model, optimizer)
            loss = model(torch.ones(1, 8)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


@dataclass(frozen=True)
class Own(zero.SGDRule):
    """A rule that no record names."""


def test_an_update_that_no_checkpoint_can_hold_is_applied_at_the_end(tmp_path: Path) -> None:
    losses = []
    for _ in range(2):
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            torch.manual_seed(0)
            model = zero.page(Tied(), store, existing="continue")
            optimizer = zero.Optimizer(model.parameters(), Own(lr=0.1))
            zero.resume(model, optimizer)
            losses.append(step(model, optimizer))
    assert losses[0] != losses[1]


def test_states_of_parameters_in_memory_begin_and_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    other = nn.Linear(64, 64)
    other.load_state_dict(model.state_dict())
    expected = torch.optim.AdamW(other.parameters(), fused=True)
    for life in range(3):
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            optimizer = zero.AdamW(model.parameters(), store=store, existing="continue")
            for one, its in ((model, optimizer), (other, expected)):
                one.zero_grad()
                one(x).square().sum().backward()
                its.step()
            assert optimizer.state_dict()["state"][0]["step"] == life + 1
    assert torch.equal(model.weight, other.weight)


def test_one_commit_is_a_checkpoint_of_all_models(tmp_path: Path) -> None:
    """Of the last moment that all have: a crash comes before the calls for the others."""

    def open_all(store: TieredStore) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(2)
        models = [zero.page(Tied(), store, name=name, existing="continue") for name in ("one", "other", "average")]
        optimizers = [zero.AdamW(model.parameters(), lr=1e-2) for model in models[:2]]
        for model, optimizer in zip(models, [*optimizers, None], strict=True):
            zero.resume(model, optimizer)
        return models, optimizers

    def round_of(models: list[Any], optimizers: list[Any]) -> list[float]:
        losses = [step(model, optimizer) for model, optimizer in zip(models, optimizers, strict=False)]
        with torch.no_grad():
            for average, parameter in zip(models[2].parameters(), models[0].parameters(), strict=True):
                average.lerp_(parameter, 0.5)
            return [*losses, models[2].loss(0).item()]

    with TieredStore.open(tmp_path, dram=DRAM) as store:
        models, optimizers = open_all(store)
        round_of(models, optimizers)
        zero.commit(models[0], optimizers[0])
        expected = [round_of(models, optimizers) for _ in range(2)]
        zero.rollback(models[0], optimizers[0])
        for model, optimizer in ((models[1], optimizers[1]), (models[2], None)):
            zero.rollback(model, optimizer)
        assert [round_of(models, optimizers) for _ in range(2)] == expected
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncommittedWarning)
            store.close()
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        models, optimizers = open_all(store)
        assert [round_of(models, optimizers) for _ in range(2)] == expected


def test_a_commit_does_not_touch_a_model_that_another_thread_uses(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        one, other = (zero.page(Tied(), store, name=name) for name in ("one", "other"))
        optimizers = [zero.AdamW(model.parameters()) for model in (one, other)]
        expected = step(one, optimizers[0]), step(other, optimizers[1])
        before, go_on = threading.Event(), threading.Event()

        def within(*_: object) -> None:
            before.set()
            assert go_on.wait(60)

        def theirs() -> list[float]:
            return [step(other, optimizers[1]) for _ in range(2)]

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(step, other, optimizers[1]).result() != expected[1]
            hook = other.position.register_hook(within)
            found = pool.submit(theirs)
            assert before.wait(60)  # it is in backward
            hook.remove()
            step(one, optimizers[0])
            try:
                zero.commit(one, optimizers[0])
            except LeaseConflict:
                assert "one/checkpoint" in store
            assert "other/checkpoint" not in store
            go_on.set()
            assert len(set(found.result())) == 2


def test_a_commit_of_one_model_leaves_that_of_another_with_an_extra_to_its_own_call(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        one, other = (zero.page(Tied(), store, name=name) for name in ("one", "other"))
        optimizers = [zero.AdamW(model.parameters()) for model in (one, other)]
        step(other, optimizers[1])
        zero.commit(other, optimizers[1], extra={"step": 1})
        step(one, optimizers[0])
        step(other, optimizers[1])
        zero.commit(one, optimizers[0])
        assert "one/checkpoint" in store
        assert "other/checkpoint" not in store
        zero.commit(other, optimizers[1], extra={"step": 2})
        assert "one/checkpoint" in store


def test_an_optimizer_that_makes_no_step_does_not_take_the_place_of_the_one_that_did(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer)
        zero.commit(model, optimizer)
        other = zero.AdamW(model.parameters(), lr=0.5)
        step(model, optimizer)
    assert other is not None
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store, existing="continue")
        optimizer = zero.AdamW(model.parameters())
        zero.resume(model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {2}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("commits", [False, True])
def test_random_numbers_go_on_where_the_newest_commit_has_them(tmp_path: Path, order: int, commits: bool) -> None:
    """Of two models, one of which nothing has changed since an earlier commit."""

    def live(folder: Path, steps: int) -> list[float]:
        torch.manual_seed(0)
        with TieredStore.open(folder, dram=DRAM) as store:
            models = [zero.page(Tied(), store, name=name, existing="continue") for name in ("student", "teacher")]
            optimizers = [zero.AdamW(models[0].parameters()), None]
            for model, optimizer in list(zip(models, optimizers, strict=True))[::order]:
                zero.resume(model, optimizer)
            found = []
            for _ in range(steps):
                found.append(torch.rand(()).item())
                step(models[0], optimizers[0])
                if commits:
                    zero.commit(models[0], optimizers[0])
            return found

    assert live(tmp_path / "parts", 2) + live(tmp_path / "parts", 2) == live(tmp_path / "whole", 4)


def test_a_model_that_has_yet_to_make_a_step_begins_again_after_a_commit_of_another(tmp_path: Path) -> None:
    for _ in range(2):
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            models = [zero.page(Tied(), store, name=name, existing="continue") for name in ("one", "other")]
            optimizers = [zero.AdamW(model.parameters()) for model in models]
            for model, optimizer in zip(models, optimizers, strict=True):
                zero.resume(model, optimizer)
            step(models[0], optimizers[0])
            zero.commit(models[0], optimizers[0])
            made = {int(state["step"]) for state in optimizers[0].state_dict()["state"].values()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UncommittedWarning)
                store.close()
    assert made == {2}


def test_what_changed_in_memory_of_another_model_is_in_a_commit(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(3, 4)
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        one, other = zero.page(Tied(), store, name="one"), zero.page(Normed(), store, name="other")
        optimizer = zero.AdamW(one.parameters())
        zero.commit(other)
        with torch.no_grad():
            other(x)
        step(one, optimizer)
        zero.commit(one, optimizer)
        store.close()
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        other = zero.page(Normed(), store, name="other", existing="resume")
        zero.resume(other)
        assert int(other.norm.num_batches_tracked) == 1


def test_a_commit_of_the_store_after_an_evaluation_keeps_the_checkpoint(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters())
        step(model, optimizer)
        zero.commit(model, optimizer, extra={"step": 1})
        with torch.no_grad():
            model.loss(0)
        store.put("metrics", torch.ones(3))
        store.commit()
        store.close()
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store, existing="continue")
        assert zero.resume(model, zero.AdamW(model.parameters())) == {"step": 1}


def test_nothing_is_written_before_resume(tmp_path: Path) -> None:
    run(tmp_path / "state", 2)
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(Tied(), store, existing="continue")
        with torch.no_grad(), pytest.raises(MisuseError, match=r"call zero\.resume"):
            model.position.mul_(0.5)
    assert run(tmp_path / "state", 2) == run(tmp_path / "whole", 4)[2:]


def test_an_end_that_can_have_no_checkpoint_leaves_the_last_one(tmp_path: Path) -> None:
    def live(*, ends_within_a_step: bool) -> float:
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            model = zero.page(Tied(), store, existing="continue")
            optimizer, scaler = zero.AdamW(model.parameters()), zero.GradScaler()
            zero.resume(model, optimizer, scaler=scaler)
            scaler.scale(model.loss(0)).backward()
            if ends_within_a_step:
                scaler.unscale_(optimizer)
                return 0.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            zero.commit(model, optimizer, scaler=scaler)
            return model.loss(1).item()

    live(ends_within_a_step=False)
    with pytest.warns(UncommittedWarning, match=r"left without a commit .* is no checkpoint of model 'model': the gradients"):
        live(ends_within_a_step=True)
    assert live(ends_within_a_step=False)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    ],
    ids=["step", "warm-up", "one cycle"],
)
@pytest.mark.parametrize("trains", [False, True])
def test_a_scheduler_that_is_made_changes_nothing_yet(
    tmp_path: Path, schedule: Callable[[zero.Optimizer], object], trains: bool
) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters())
        step(model, optimizer)
        zero.commit(model, optimizer, extra={"step": 1})

    def again() -> None:
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            model = zero.page(Tied(), store, existing="resume")
            optimizer = zero.AdamW(model.parameters())
            zero.resume(model, optimizer)
            made = schedule(optimizer)  # noqa: F841
            if trains:
                step(model, optimizer)

    if trains:
        with pytest.warns(UncommittedWarning, match=r"has extra=, which is of that moment"):
            again()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UncommittedWarning)
            again()
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            assert store.generation == 1


def test_gradients_that_were_clipped_after_a_commit_are_a_change(tmp_path: Path) -> None:
    def clipped() -> None:
        with TieredStore.open(tmp_path, dram=DRAM) as store:
            model = zero.page(Tied(), store)
            optimizer = zero.AdamW(model.parameters())
            step(model, optimizer)
            model.loss(1).backward()
            zero.commit(model, optimizer, extra={"at": "before"})
            model.state_dict()
            optimizer.clip_grad_norm_(1e-3)

    with pytest.warns(UncommittedWarning, match=r"has extra=, which is of that moment"):
        clipped()


def test_an_optimizer_that_was_given_the_states_of_another_is_the_one_that_goes_on(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer)
        other = zero.AdamW(model.parameters(), lr=0.5)
        other.load_state_dict(optimizer.state_dict() | {"param_groups": other.state_dict()["param_groups"]})
    with TieredStore.open(tmp_path, dram=DRAM) as store:
        model = zero.page(Tied(), store, existing="continue")
        optimizer = zero.AdamW(model.parameters())
        zero.resume(model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1}
