"""What goes wrong on one rank alone, or otherwise on each: the error says what it is, and nobody waits for long."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.zero.ranks import PATIENCE, on_ranks
from tiered import CapacityError, MisuseError, RankError, zero
from tiered.zero.collectives import TAG, Ranks
from tiered.zero.paging.pager import placement_of
from tiered.zero.paging.storage import model_named

TIMEOUT = 2 * PATIENCE
"""Of the process group: ranks that wait for so long are killed before, and their test fails."""


def told(rank: int, folder: Path, what: str, of: list[torch.Tensor]) -> str:
    with pytest.raises(RankError) as raised:
        Ranks.of(None).all_gather(of[rank], what)
    return str(raised.value)


@pytest.mark.parametrize(
    ("of", "named"),
    [
        ([torch.zeros(2), torch.zeros(3)], ("2 of torch.float32", "3 of torch.float32")),
        ([torch.zeros(2), torch.zeros(2).double()], ("2 of torch.float32", "2 of torch.float64")),
    ],
)
@pytest.mark.parametrize("what", ["numbers \x1b[2J\u202e", "numbers of " + "a.b." * TAG])
def test_ranks_that_share_other_sizes_are_told(
    tmp_path: Path, what: str, of: list[torch.Tensor], named: tuple[str, str]
) -> None:
    """gloo ends a process that receives more than it expects."""
    for said in on_ranks(2, told, tmp_path / "run", what, of):
        assert all(one in said for one in named)
        assert said.isprintable()  # part of it is another rank's


def apart(rank: int, folder: Path) -> str:
    """Ranks that wait for each other in orders of their own: nobody notices before the timeout."""
    ranks = Ranks(None, 10.0)
    with pytest.raises(RankError) as raised:
        ranks.all_gather(torch.zeros(1), ("norms", "parameters \x1b[2J")[rank], apart=rank == 1)
    return str(raised.value)


@pytest.mark.soak
def test_a_timeout_says_what_each_rank_waited_for(tmp_path: Path) -> None:
    for said in on_ranks(2, apart, tmp_path / "run", timeout=TIMEOUT):
        assert "norms, 1 of torch.float32" in said
        assert "parameters" in said
        assert "waited for '" in said


class Layers(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(128, 128) for _ in range(4)))


def unreadable(rank: int, folder: Path, out: Path) -> tuple[str, list[str]]:
    """Rank 0 cannot read the second unit."""
    with zero.open_store(folder / "state", dram="4MiB") as store:
        model = Layers()
        zero.page(model, store)
        pager = placement_of(model[0].weight)[0]
        real, taken = pager.take, list[Any]()

        def take(unit: Any) -> None:
            taken.append(unit)
            if rank == 0 and len(taken) == 2:
                raise CapacityError("no room for this unit")
            real(unit)

        pager.take = take  # type: ignore[method-assign]
        with pytest.raises(RankError if rank else CapacityError) as raised:
            zero.export(model, out)
        store.close()
    return str(raised.value), [path.name for path in out.iterdir()]


def test_what_rank_0_cannot_read_in_an_export_is_said_at_once(tmp_path: Path) -> None:
    (first, left), (other, _) = on_ranks(2, unreadable, tmp_path / "run", tmp_path / "out", timeout=TIMEOUT)
    assert first == "no room for this unit"
    assert left == []
    assert "rank 0 ended" in other


def alone(rank: int, folder: Path) -> dict[str, str]:
    """Rank 1 cannot do what all are about to do; then all can."""
    found = {}

    def refused(what: str, kind: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(RankError if rank == 0 else kind) as raised:
            call()
        found[what] = str(raised.value)

    with zero.open_store(folder / "state", dram="4MiB") as store:
        if rank == 1:
            store.put("model/param/0", torch.zeros(1))  # the user's, with a key that the model needs
        model = Layers()
        refused("page", MisuseError, lambda: zero.page(model, store))
        if rank == 1:
            store.delete("model/param/0")
        zero.page(model, store)
        groups = [{"params": list(model.parameters()), **({"rule": "AdamW"} if rank == 1 else {})}]
        refused("optimizer", MisuseError, lambda: zero.AdamW(groups, lr=1e-2))
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(2, 128)).square().mean().backward()
        optimizer.step()
        zero.commit(model, optimizer)
        other = optimizer if rank == 0 else None
        refused("commit", MisuseError, lambda: zero.commit(model, other))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) if rank == 0 else None
        refused("scheduler", RankError, lambda: zero.commit(model, optimizer, scheduler=schedule))
        refused("resume", MisuseError, lambda: zero.resume(model, other))
        zero.resume(model, optimizer)
        if rank == 0:
            shutil.copytree(folder / "state", folder / "older")
        dist.barrier()
        zero.commit(model, optimizer)
        for what, more in (
            ("added in another shape", nn.Linear(4, 4 + rank)),
            ("trained apart", nn.Linear(4, 4, bias=False)),
        ):
            nn.init.constant_(more.weight, float(rank))
            model.add_module("more", more)
            refused(what, RankError, lambda: zero.commit(model, optimizer))
            del model.more
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        store.rollback()
        store.close()
    with zero.open_store(folder / "state", dram="4MiB") as store:
        with torch.device("meta"):
            unmade = Layers()

        def initialise(module: nn.Module) -> None:
            if rank == 1 and module is unmade[2]:
                raise ValueError("no values for this layer")
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)

        if rank == 1:
            store.put("model.importing/param/2", torch.zeros(1))
        refused("a key", MisuseError, lambda: zero.page(Layers(), store, existing="overwrite"))
        if rank == 1:
            store.delete("model.importing/param/2")
        refused("overwrite", ValueError, lambda: zero.page(unmade, store, existing="overwrite", param_init_fn=initialise))
        model = zero.page(Layers(), store, existing="resume")  # what the ranks had is there still, on both
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        store.close()
    with zero.open_store(folder / "new", dram="4MiB") as store:
        if rank == 1:
            store.put("one/param/0", torch.zeros(1), owner=model_named("one"))
        zero.page(Layers(), store, name="one", existing="overwrite")  # of which one rank has something, and the other nothing
        source = folder / ("state", "older")[rank]
        refused("source", RankError, lambda: zero.page(Layers(), store, existing="resume", source=source))
        zero.page(Layers(), store, existing="resume", source=folder / "older")
        store.close()
    return found


def exported(rank: int, folder: Path, out: Path) -> tuple[list[str], list[str]]:
    """To a folder of each node's own."""
    mine = out / str(rank)
    mine.mkdir(parents=True)
    (mine / "model.safetensors").write_text("another's")
    with zero.open_store(folder / "state", dram="4MiB") as store:
        model = Layers()
        zero.page(model, store)
        files = zero.export(model, mine if rank else out / "new", shard="150KB")
        store.close()
    return files, sorted(path.name for path in mine.iterdir())


def play(rank: int, folder: Path, out: Path) -> Any:
    return exported(rank, folder / "exported", out), alone(rank, folder / "alone")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, out: Path) -> list[Any]:
    return on_ranks(2, play, tmp_path_factory.mktemp("run"), out, timeout=TIMEOUT)


def test_what_one_rank_cannot_do_is_said_by_all(played: list[Any]) -> None:
    (_, first), (_, second) = played
    for what in ("page", "optimizer", "commit", "resume"):
        assert first[what].startswith("another rank could not "), what
        assert f"rank 1 says MisuseError: {second[what][:50]}" in first[what]
    assert first["scheduler"] == second["scheduler"]
    assert "scheduler= is given on rank 0, and None on rank 1" in first["scheduler"]
    for what, says in (
        ("added in another shape", r"'more.weight'.*\(4, 4\) on rank 0, and .*\(5, 4\)"),
        ("trained apart", "values of"),
    ):
        assert first[what] == second[what]
        assert re.search(says, first[what]), first[what]
    assert first["source"] == second["source"]
    assert re.search("take over this checkpoint together: .* generation 3 on rank 0, and .* generation 2 on", first["source"])


def test_what_is_in_the_folder_of_an_export_on_another_node_does_not_matter(played: list[Any], out: Path) -> None:
    ((first, _), _), ((second, there), _) = played
    assert first == second
    assert len(first) > 1
    assert sorted(path.name for path in (out / "new").iterdir()) == [*first, "model.safetensors.index.json"]
    assert there == ["model.safetensors"]
