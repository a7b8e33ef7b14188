"""An error on one rank only, and what somebody does who catches it: no rank goes another way than the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.zero.ranks import on_ranks
from tests.zero.test_rank_trouble import parts, refused, step
from tiered import CapacityError, CommitError, ManifestError, MisuseError, TieredError, TieredStore, zero
from tiered.zero.paging.unit import Unit


def lost_its_manifests(rank: int, folder: Path, where: Path) -> Any:
    """Rank 1, after one commit, which was acknowledged."""
    store, model, optimizer = parts(where, rank)
    step(model, optimizer)
    zero.commit(model, optimizer)
    store.close()
    dist.barrier()
    for manifest in (where / "rank-1-of-2").glob("manifest.*") if rank == 1 else ():
        manifest.rename(manifest.with_name(f"lost.{manifest.name}"))
    dist.barrier()
    lost = refused(ManifestError, lambda: parts(where, rank))
    dist.barrier()
    for manifest in (where / "rank-1-of-2").glob("lost.*") if rank == 1 else ():
        manifest.rename(manifest.with_name(manifest.name.removeprefix("lost.")))
    dist.barrier()
    store, model, optimizer = parts(where, rank)
    zero.resume(model, optimizer)
    store.close()
    return lost


def test_a_commit_that_one_rank_has_lost_is_not_given_up(tmp_path: Path) -> None:
    for lost in on_ranks(2, lost_its_manifests, tmp_path / "a", tmp_path / "state"):
        assert "rank 0 has 1; rank 1 has none" in lost


def caught(rank: int, folder: Path, where: Path) -> Any:
    """Rank 1 cannot begin a commit, or cannot end it; somebody catches that, and goes on in the store."""
    found = []
    for way in ("begin", "key", "end"):
        with zero.open_store(where / way, dram="4MiB") as store:
            model, optimizer = made(store)
            step(model, optimizer)
            zero.commit(model, optimizer, extra={"done": 1})
            step(model, optimizer)
            bad = object() if rank == 1 and way == "begin" else 2
            scheduler = Broken() if way == "key" else None
            if scheduler is not None:
                scheduler.broken = rank == 1
            if rank == 1 and way == "end":
                store.commit = no_room  # type: ignore[method-assign]
            wrong = (CommitError, MisuseError, KeyError)
            with pytest.raises(wrong):
                zero.commit(model, optimizer, scheduler=scheduler, extra={"done": bad})
            store.__dict__.pop("commit", None)
            with pytest.raises(MisuseError, match=r"zero\.commit"):
                store.commit()
            step(model, optimizer)
            optimizer.flush()  # and the end of the block commits nothing
        dist.barrier()
        with zero.open_store(where / way, dram="4MiB") as store:
            model, optimizer = made(store)
            found.append((zero.resume(model, optimizer)["done"], sorted(set(optimizer.steps.values()))))
        dist.barrier()
    return found


class Broken:
    """A scheduler whose state cannot be had."""

    broken = False

    def state_dict(self) -> dict[str, Any]:
        return {} if not self.broken else {}["state"]

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def no_room(meta: Any = None) -> int:
    raise CommitError("no room")


def made(store: TieredStore) -> tuple[nn.Module, zero.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    zero.page(model, store, existing="resume" if "model/checkpoint" in store else "refuse")
    return model, zero.AdamW(model.parameters(), lr=1e-2)


def test_ranks_resume_from_one_step_whatever_somebody_caught(tmp_path: Path) -> None:
    for found in on_ranks(2, caught, tmp_path / "a", tmp_path / "state"):
        assert found == [(1, [1])] * 3


def frozen_in_between(rank: int, folder: Path) -> Any:
    """After a pass within no_sync, before the one that reduces: one parameter of a unit, or all of another."""
    found = []
    for frozen in ("0.weight", "0.", "2.bias"):
        for stage in (zero.Stage1(), zero.Stage2(), zero.Stage3()):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
            with TieredStore.open(folder / f"{frozen}{type(stage).__name__}{rank}", dram="6MiB", durability="none") as store:
                zero.page(model, store, stage=stage)
                optimizer = zero.AdamW(model.parameters(), lr=1e-2)
                for _ in range(2):  # memory has been used
                    optimizer.zero_grad()
                    (7 * model(torch.ones(4, 256))).square().sum().backward()
                    optimizer.step()
                optimizer.zero_grad()
                with zero.no_sync(model):
                    model(torch.full((4, 256), 1.0 + rank)).square().mean().backward()
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(not name.startswith(frozen))
                model(torch.ones(4, 256)).square().mean().backward()
                gradients = [optimizer.grad(parameter) for parameter in model.parameters()]
                norm = optimizer.clip_grad_norm_(0.1)
                optimizer.step()
                found.append((frozen, [norm, *gradients, *model.state_dict().values()]))
    return found


def test_what_is_frozen_between_no_sync_and_a_reduction_keeps_its_gradient(tmp_path: Path) -> None:
    for found in on_ranks(2, frozen_in_between, tmp_path / "a"):
        for first in range(0, 9, 3):
            one, *others = found[first : first + 3]
            for frozen, tensors in others:
                assert frozen == one[0]
                assert all(map(torch.equal, tensors, one[1])), frozen


def steps_apart(rank: int, folder: Path) -> Any:
    """Rank 1 cannot apply an earlier update when ``step`` asks for it; somebody catches that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with TieredStore.open(folder / f"store{rank}", dram="4MiB", durability="none") as store:
        zero.page(model, store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer)
        model(torch.ones(4, 64)).square().mean().backward()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Unit, "apply_update", full)
            with pytest.raises(TieredError) as raised:
                optimizer.step()
        optimizer.zero_grad()
        return sorted(set(optimizer.steps.values())), str(raised.value)


def full(unit: Unit) -> None:
    raise CapacityError("no room here")


def test_a_step_that_one_rank_cannot_make_is_made_by_none(tmp_path: Path) -> None:
    (steps, other), (more, own) = on_ranks(2, steps_apart, tmp_path / "a")
    assert steps == more == [1]
    assert "another rank could not make this step" in other
    assert own == "no room here"
