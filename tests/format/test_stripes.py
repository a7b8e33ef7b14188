"""Where bytes of striped extents lie, and offsets that all files have, beside what a loop over all of them finds."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered.format import stripes
from tiered.system import LARGEST_ALIGNMENT
from tiered.types import PIECE_BYTES, Location

STRIPE = 4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripes, "STRIPE_BYTES", STRIPE)


def test_a_piece_and_every_alignment_fit_into_a_stripe() -> None:
    assert stripes.STRIPE_BYTES % PIECE_BYTES == stripes.STRIPE_BYTES % LARGEST_ALIGNMENT == 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("files", "nbytes"), list(product(range(2, 6), range(1, 50))))
def test_every_byte_has_a_place_of_its_own_in_the_ranges(files: int, nbytes: int) -> None:
    ranges = stripes.ranges(files, 1000, nbytes, files)
    assert len({file for file, _, _ in ranges}) == len(ranges)
    there = [(file, at) for file, offset, size in ranges for at in range(offset, offset + size)]
    places = [stripes.place(at, files) for at in range(nbytes)]
    assert sorted((file, 1000 + at) for file, at in places) == sorted(there)
    for at, (file, _) in enumerate(places):
        assert file == at // STRIPE % files, "stripes go to the files in turn"
        rest = min(stripes.rest(at), nbytes - at)
        assert places[at : at + rest] == [(file, places[at][1] + more) for more in range(rest)]
        assert at + rest == nbytes or places[at + rest][0] != file
    parts = stripes.striped([Location(file, 1000, f"/{file}") for file in range(files)])
    for at, (file, within) in enumerate(places):
        assert stripes.located(parts, at) == Location(file, 1000 + within, f"/{file}")


@pytest.mark.parametrize(("file", "files"), [(0, 1), (1, 1), (0, 2), (1, 2), (3, 2), (0, 0), (-1, 2)])
def test_other_extents_are_one_range(file: int, files: int) -> None:
    """Those of files that do not exist, too: whoever reads them refuses them."""
    assert stripes.ranges(file, 4096, 8192, files) == [(file, 4096, 8192)]
    assert stripes.located(Location(5, 4096, "/x"), 77) == Location(5, 4173, "/x")


@st.composite
def starts(draw: st.DrawFn) -> list[tuple[int, int]]:
    marks = sorted(draw(st.lists(st.integers(0, 60), unique=True, max_size=12)))
    return list(zip(marks[::2], marks[1::2], strict=False))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(starts(), min_size=1, max_size=4))
def test_offsets_that_all_files_have(all_starts: list[list[tuple[int, int]]]) -> None:
    common = [at for at in range(61) if all(any(a <= at <= b for a, b in one) for one in all_starts)]
    assert stripes.lowest(all_starts) == (common[0] if common else None)
    found = stripes.tightest(all_starts)
    assert (found is None) == (not common)
    if found is not None:
        assert found in common
        runs = [sum(1 for _ in _run(all_starts, at)) for at in common if not _same_run(all_starts, at - 1, at)]
        assert sum(1 for _ in _run(all_starts, found)) == min(runs)


def _run(all_starts: list[list[tuple[int, int]]], at: int) -> range:
    """The offsets from ``at`` on that all files have in the same free ranges."""
    return range(at, 1 + min(last for one in all_starts for first, last in one if first <= at <= last))


def _same_run(all_starts: list[list[tuple[int, int]]], one: int, other: int) -> bool:
    return all(any(first <= one and other <= last for first, last in starts) for starts in all_starts)
