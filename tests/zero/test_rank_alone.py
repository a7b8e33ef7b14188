"""What goes wrong on one rank alone, or otherwise on each: the error says what it is, and nobody waits for long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero.ranks import PATIENCE, on_ranks
from tiered import CapacityError, RankError, zero
from tiered.zero.collectives import TAG, Ranks
from tiered.zero.paging.pager import placement_of

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
@pytest.mark.parametrize("what", ["numbers", "numbers of " + "a.b." * TAG])
def test_ranks_that_share_other_sizes_are_told(
    tmp_path: Path, what: str, of: list[torch.Tensor], named: tuple[str, str]
) -> None:
    """gloo ends a process that receives more than it expects."""
    for said in on_ranks(2, told, tmp_path / "run", what, of):
        assert all(one in said for one in named)


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


def test_what_is_in_the_folder_of_an_export_on_another_node_does_not_matter(tmp_path: Path) -> None:
    (first, _), (second, there) = on_ranks(2, exported, tmp_path / "run", tmp_path / "out")
    assert first == second
    assert len(first) > 1
    assert sorted(path.name for path in (tmp_path / "out" / "new").iterdir()) == [*first, "model.safetensors.index.json"]
    assert there == ["model.safetensors"]
