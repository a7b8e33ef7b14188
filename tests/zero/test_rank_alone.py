"""What goes wrong on one rank alone, or otherwise on each: the error says what it is, and nobody waits for long."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.zero.ranks import on_ranks
from tiered import RankError
from tiered.zero.ranks import TAG, Ranks


def told(rank: int, folder: Path, what: str, of: list[torch.Tensor]) -> str:
    with pytest.raises(RankError) as raised:
        Ranks.of(None).shared(of[rank], what)
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
