"""Commits of several ranks: resumed bit for bit, by another number of ranks too, and never half."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.quick import quick
from tests.zero.models import Tied
from tests.zero.ranks import on_ranks
from tests.zero.test_ranks import same
from tiered import CapacityError, CommitError, ManifestError, MisuseError, TieredStore, zero
from tiered.cli.main import main
from tiered.store.at_rest import StoreAtRest
from tiered.zero import rank_stores
from tiered.zero.checkpoint.reshard import opened
from tiered.zero.checkpoint.safetensors import export_at_rest
from tiered.zero.rank_stores import newest_set

MAKE = functools.partial(Tied, layers=2)
STAGES = {"1": zero.Stage1(), "2": zero.Stage2(), "3": zero.Stage3()}
LR = 1e-2


def test_what_another_rank_says_of_its_store_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"problem": "\x1b[2J\u202e" * 1000, "joints": [], "generations": [], "others": 0, "opened": False}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(rank_stores.Ranks, "of", staticmethod(lambda group: SimpleNamespace(rank=0, size=2)))
    told = [{**said, "problem": ""}, said]
    monkeypatch.setattr(rank_stores, "shared_json", lambda ranks, mine, kind: [msgspec.convert(one, kind) for one in told])
    with pytest.raises(ManifestError, match="store of rank 1 cannot be read") as raised:
        zero.open_store(tmp_path, dram="1MiB")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


def begin(store: TieredStore, stage: str, rank: int, **options: Any) -> tuple[Any, zero.AdamW, Any]:
    torch.manual_seed(5 + rank)
    model = MAKE()
    if torch.distributed.get_world_size() > 1:
        options["stage"] = STAGES[stage]
    zero.page(model, store, **options)
    optimizer = zero.AdamW(model.parameters(), lr=LR)
    model.__dict__["ema"] = zero.EMA(model, 0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def step(model: Any, optimizer: zero.AdamW, scheduler: Any, rank: int, number: int) -> float:
    optimizer.zero_grad()
    loss = model.loss(100 * rank + number)
    loss.backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    scheduler.step()
    model.ema.update()
    return float(loss.item())


def state(model: Any, optimizer: zero.AdamW) -> dict[str, Any]:
    model_state = {key: value.clone() for key, value in model.state_dict().items()}
    with model.ema.applied():
        average = {key: value.clone() for key, value in model.state_dict().items()}
    return {"model": model_state, "average": average, "optimizer": optimizer.state_dict()["state"]}


def train(rank: int, folder: Path, where: Path, stage: str, steps: list[int], between: bool = False) -> dict[str, Any]:
    """Steps from nothing, or from the last commit in ``where``; and a commit, with updates that are pending (or, ``between``,
    with gradients that no step has used)."""
    with zero.open_store(where, dram="2MiB") as store:
        there = "model/checkpoint" in store
        model, optimizer, scheduler = begin(store, stage, rank, **({"existing": "resume"} if there else {}))
        extra = zero.resume(model, optimizer, scheduler=scheduler) if there else {"done": 0}
        losses = [step(model, optimizer, scheduler, rank, number) for number in steps if number >= extra["done"]]
        if between:
            optimizer.zero_grad()
            model.loss(7 + rank).backward()
        done = steps[-1] + 1
        zero.commit(model, optimizer, scheduler=scheduler, extra={"done": done}, meta={"note": "ours"})
        noted = store.meta["note"]
        found = state(model, optimizer)
        if between:
            gradients = {name: optimizer.grad(parameter) for name, parameter in model.named_parameters()}
            found["gradients"] = gradients
        store.close()
    return {"losses": losses, "note": noted, **found}


def take_over(rank: int, folder: Path, source: Path, where: Path, stage: str, between: bool = False) -> dict[str, Any]:
    """Another number of ranks goes on."""
    with zero.open_store(where, dram="3MiB") as store:
        model, optimizer, scheduler = begin(store, stage, rank, existing="resume", source=source)
        extra = zero.resume(model, optimizer, scheduler=scheduler)
        found = state(model, optimizer)
        if between:
            found["gradients"] = {name: optimizer.grad(parameter) for name, parameter in model.named_parameters()}
        loss = step(model, optimizer, scheduler, rank, extra["done"])
        assert loss == loss
        zero.commit(model, optimizer, scheduler=scheduler, extra={"done": extra["done"] + 1})
        store.close()
    return found


Ways = list[tuple[str, bool]]
CUT: Ways = [(stage, between) for stage in STAGES for between in (False, True)]
SOME: Ways = [("1", True), ("2", False), ("3", True)]


def cut_off(rank: int, folder: Path, where: Path, ways: Ways) -> None:
    for stage, between in ways:
        train(rank, folder, where / f"{stage}{between}", stage, [0, 1], between)


def gone_on(rank: int, folder: Path, where: Path, ways: Ways) -> dict[Any, dict[str, Any]]:
    return {way: train(rank, folder, where / f"{way[0]}{way[1]}", way[0], [0, 1, 2, 3]) for way in ways}


def uncut(rank: int, folder: Path, where: Path) -> dict[Any, dict[str, Any]]:
    return {stage: train(rank, folder, where / stage, stage, [0, 1, 2, 3]) for stage in STAGES}


@pytest.fixture(scope="module")
def commits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[dict[Any, Any], dict[Any, Any]]]]:
    """Of each rank, by the run: what it found that went on in new processes, and what it found that was never cut off."""

    @functools.cache
    def made(run: str) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        folder, ways = tmp_path_factory.mktemp("commits"), CUT if run == "all" else SOME
        on_ranks(2, cut_off, folder / "a", folder / "cut", ways)
        cut = on_ranks(2, gone_on, folder / "b", folder / "cut", ways)
        return list(zip(cut, on_ranks(2, uncut, folder / "c", folder / "whole"), strict=True))

    return made


@pytest.mark.parametrize(
    ("stage", "between", "run"),
    [*((*way, "some") for way in SOME), *quick([(*way, "all") for way in CUT], [])],
)
def test_a_commit_of_ranks_is_gone_on_with_bit_for_bit(commits: Any, stage: str, between: bool, run: str) -> None:
    for one, other in ((cut[stage, between], whole[stage]) for cut, whole in commits(run)):
        assert same(one["model"], other["model"])
        assert same(one["average"], other["average"])
        assert same(one["optimizer"], other["optimizer"])
        assert one["losses"] == other["losses"][2:]
        assert one["note"] == "ours"


WAYS = [(1, "1", 2, "3"), (2, "3", 1, "1"), (2, "1", 2, "3"), (2, "2", 3, "3"), (3, "3", 2, "2"), (4, "1", 3, "3")]  # fmt: skip
MORE = [(1, "1", 3, "1"), (1, "1", 4, "2"), (2, "3", 2, "1"), (2, "1", 4, "3"), (3, "1", 1, "1"), (3, "3", 4, "3"),
        (4, "3", 1, "1"), (4, "2", 2, "3")]  # fmt: skip
"""Ranks and stage, before and after: together each number of ranks to each other, and to itself with another stage."""
ALL = quick(
    [(*way, between) for way in WAYS + MORE for between in (True, False)],
    [(*way, number % 2 == 0) for number, way in enumerate(WAYS[::2])],
)


@pytest.mark.parametrize(("before", "stage", "after", "then", "between"), ALL)
def test_other_ranks_go_on_with_the_same_state(
    tmp_path: Path, before: int, stage: str, after: int, then: str, between: bool
) -> None:
    had = on_ranks(before, train, tmp_path / "a", tmp_path / "old", stage, [0, 1], between)
    has = on_ranks(after, take_over, tmp_path / "b", tmp_path / "old", tmp_path / "new", then, between)
    for found in has:
        assert same(found["model"], had[0]["model"])
        assert same(found["average"], had[0]["average"])
        assert same(found["optimizer"], had[0]["optimizer"])
        assert same(found.get("gradients"), had[0].get("gradients"))


def fail_on_one(rank: int, folder: Path, where: Path) -> dict[str, Any]:
    """Rank 1 cannot commit the second time."""
    with zero.open_store(where, dram="2MiB") as store:
        model, optimizer, scheduler = begin(store, "2", rank)
        step(model, optimizer, scheduler, rank, 0)
        zero.commit(model, optimizer, scheduler=scheduler, extra={"done": 1})
        step(model, optimizer, scheduler, rank, 1)
        if rank == 1:
            store.commit = refuse  # type: ignore[method-assign]
        said = []
        for _ in range(2):  # the second one is not even begun
            try:
                zero.commit(model, optimizer, scheduler=scheduler, extra={"done": 2})
            except CommitError as error:
                said.append(str(error))
        generation = store.generation
        store.close()
    return {"said": said, "generation": generation}


def refuse(meta: Any) -> int:
    raise CommitError("no room for this one")


def test_a_commit_that_fails_on_one_rank_counts_on_none(tmp_path: Path) -> None:
    found = on_ranks(2, fail_on_one, tmp_path / "a", tmp_path / "state")
    assert "rank 1, which says why, could not commit" in found[0]["said"][0]
    assert found[1]["said"][0] == "no room for this one"
    assert all("zero.open_store" in one["said"][1] for one in found)
    assert [one["generation"] for one in found] == [3, 2]  # each began with one of its own
    cut = on_ranks(2, train, tmp_path / "b", tmp_path / "state", "2", [0, 1, 2])
    whole = on_ranks(2, train, tmp_path / "c", tmp_path / "whole", "2", [0, 1, 2])
    assert same(cut[0]["model"], whole[0]["model"])
    assert cut[0]["losses"] == whole[0]["losses"][1:]


def export_together(rank: int, folder: Path, where: Path, out: Path, stage: str) -> list[str]:
    """By all ranks, with updates that are pending, and the average with them."""
    with zero.open_store(where, dram="2MiB") as store:
        model, optimizer, scheduler = begin(store, stage, rank)
        for number in range(2):
            step(model, optimizer, scheduler, rank, number)
        zero.commit(model, optimizer, scheduler=scheduler, extra={"done": 2})

        def stop(done: int, total: int) -> None:  # rank 0 alone writes
            raise OSError(errno.ENOSPC, "no room")

        with pytest.raises((CapacityError, MisuseError), match="rank 0 could not export" if rank else "no room for"):
            zero.export(model, out, progress=stop)
        files = zero.export(model, out)
        with model.ema.applied():
            zero.export(model, out.with_name("our average"))
        refused = ""
        try:
            zero.export(model, out)
        except MisuseError as error:
            refused = str(error)
        assert refused
        store.close()
    return files


@pytest.mark.parametrize("stage", ["1", "3"])
def test_ranks_and_one_process_export_the_same(tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = on_ranks(2, export_together, tmp_path / "a", tmp_path / "state", tmp_path / "ours", stage)
    assert main(["export", str(tmp_path / "state"), "--out", str(tmp_path / "alone")]) == 0
    assert "the last commit of all ranks" in capsys.readouterr().out
    assert files[0] == files[1] == ["model.safetensors"]
    ours, alone = (load_file(tmp_path / where / "model.safetensors") for where in ("ours", "alone"))
    assert same(ours, alone)
    assert len(ours) > 20
    assert main(["export", str(tmp_path / "state"), "--average", "--out", str(tmp_path / "average")]) == 0
    averages = [load_file(tmp_path / where / "model.safetensors") for where in ("our average", "average")]
    assert same(*averages)
    assert not same(averages[0], ours)
    if stage == "3":
        with StoreAtRest(tmp_path / "state" / "rank-0-of-2") as rest, pytest.raises(MisuseError, match="has one rank's share"):
            export_at_rest(rest, tmp_path / "one")


def commit_applied(rank: int, folder: Path, where: Path) -> None:
    """With whole parameters on each rank, and no update that is pending."""
    with zero.open_store(where, dram="2MiB") as store:
        model, optimizer, scheduler = begin(store, "1", rank)
        step(model, optimizer, scheduler, rank, 0)
        optimizer.flush()
        zero.commit(model, optimizer, scheduler=scheduler)
        store.close()


def test_a_rank_that_has_whole_parameters_is_exported_alone(tmp_path: Path) -> None:
    on_ranks(2, commit_applied, tmp_path / "a", tmp_path / "state")
    assert main(["export", str(tmp_path / "state"), "--out", str(tmp_path / "all")]) == 0
    everything = load_file(tmp_path / "all" / "model.safetensors")
    for rank in range(2):
        with StoreAtRest(tmp_path / "state" / f"rank-{rank}-of-2") as rest:
            export_at_rest(rest, tmp_path / f"of {rank}")
        assert same(load_file(tmp_path / f"of {rank}" / "model.safetensors"), everything)
    assert len(everything) > 20


def test_the_newest_of_several_sets_in_one_folder_is_known(tmp_path: Path) -> None:
    """A number of ranks that goes on counts on from the commit it goes on from; what has no commit yet does not count."""
    root = tmp_path / "state"
    for last in (0, 1, 2):
        on_ranks(2, train, tmp_path / f"a{last}", root, "3", list(range(last + 1)))
    on_ranks(3, take_over, tmp_path / "b", root, root, "3")
    newest = newest_set(root)
    assert newest is not None
    assert (newest.ranks, newest.number) == (3, 4)
    away = (root / "rank-2-of-3").rename(root / "away")
    with pytest.raises(ManifestError, match=r"a commit 4, newer than 3, .*rank-2-of-3 lacks it"), ExitStack() as stack:
        opened(root, stack)
    assert newest_set(root, apart=3) is not None
    away.rename(root / "rank-2-of-3")
    on_ranks(1, take_over, tmp_path / "c", root, root / "rank-0-of-1", "3")
    newest = newest_set(root)
    assert newest is not None
    assert (newest.ranks, newest.number) == (1, 5)
    for rank in range(4):
        (root / f"rank-{rank}-of-4").mkdir()
    with ExitStack() as stack:
        assert [store.folder.name for store in opened(root, stack)] == ["rank-0-of-1"]
