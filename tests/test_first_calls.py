"""The first calls that a person makes, with values of other types: all that is public says what is right, in one line.
(Those of other libraries' modules are tested beside these.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_calls import WRONG, refused_in_one_line


@pytest.mark.parametrize(("module", "calls"), [("tiered", 15), ("tiered.zero", 30)])
def test_wrong_types_are_refused_in_one_line(
    module: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused_in_one_line(module) > calls * len(WRONG)
