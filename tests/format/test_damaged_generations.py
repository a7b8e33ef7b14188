"""A manifest that cannot be read is in the way of its own generation alone; listings of a store that goes on never go back."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stress.contents import content, holds
from tiered import ManifestError, MisuseError, TieredError, TieredStore
from tiered.format import generations
from tiered.format.manifest import Manifest
from tiered.store.at_rest import listing

MIB = 1 << 20
SIZES = {"a": 70_000, "b": 5, "c": 0}


def put(store: TieredStore, version: int) -> int:
    for key, nbytes in SIZES.items():
        store.put(key, content(key, version, nbytes))
    return store.commit({"version": version})


def is_version(store: TieredStore, version: int) -> None:
    assert store.meta == {"version": version}
    for key, nbytes in SIZES.items():
        holds(store, key, version, nbytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Generations 1 to 3 are kept."""
    with TieredStore.open(tmp_path / "state", dram=MIB, keep=3) as store:
        for version in (1, 2, 3):
            put(store, version)
    return tmp_path / "state"


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES = [emptied, flipped, a_folder, a_link]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("number", [1, 2])
def test_an_older_one_is_not_in_the_way(folder: Path, number: int, damage: Callable[[Path], None]) -> None:
    damage(folder / f"manifest.{number}")
    with pytest.warns(UserWarning, match=rf"generation {number} is damaged.*manifest\.{number}"):
        store = TieredStore.open(folder, dram=MIB, keep=2)
    with store:
        assert store.generation == 3
        is_version(store, 3)
        with pytest.raises(ManifestError, match=rf"manifest\.{number}"):
            store.rollback(number)
        assert put(store, 4) == 4
        is_version(store, 4)
        assert store.rollback(3) == 3, "a damaged one does not take the place of one that is kept"
        is_version(store, 3)
        for version in (5, 6):
            put(store, version)
    kept = [5, 6] if damage is not a_folder else [number, 5, 6]
    assert [one for one in generations.generations(folder) if one > 4 or one == number] == kept


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("chosen", [1, 2])
def test_a_chosen_one_opens_past_the_newest(folder: Path, chosen: int, damage: Callable[[Path], None]) -> None:
    damage(folder / "manifest.3")
    for access in ("write", "read"):
        with pytest.raises(ManifestError, match=r"manifest\.3.*to go back to generation 2, open with generation=2"):
            TieredStore.open(folder, dram=MIB, access=access)
    with TieredStore.open(folder, dram=MIB, generation=chosen, access="read") as store:
        is_version(store, chosen)
    with pytest.warns(UserWarning, match="generation 3 is damaged"):
        store = TieredStore.open(folder, dram=MIB, generation=chosen, keep=2)
    with store:
        assert store.generation == chosen
        is_version(store, chosen)
        assert put(store, 4) == 4, "the number of the damaged one is not given again"
        assert store.rollback(chosen if chosen == 2 else 2) == 2
        is_version(store, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = TieredStore.open(folder, dram=MIB)
    with store:
        is_version(store, 2)  # leaving the block committed it


def test_one_that_can_be_read_again_is_not_gone_back_to(folder: Path) -> None:
    """What its extents hold by now is not what it says."""
    whole = (folder / "manifest.1").read_bytes()
    emptied(folder / "manifest.1")
    with pytest.warns(UserWarning, match="generation 1 is damaged"):
        store = TieredStore.open(folder, dram=MIB, keep=3)
    with store:
        (folder / "manifest.1").write_bytes(whole)
        with pytest.raises(ManifestError, match=r"manifest\.1"):
            store.rollback(1)
        is_version(store, 3)


@pytest.mark.parametrize("number", [1, 3])
def test_a_shortage_is_no_damage(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor for it nothing is known of a manifest, and nothing is passed over."""
    opened = os.open

    def none_left(name: str | Path, *rest: object, **others: object) -> int:
        if str(name) == f"manifest.{number}":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(name, *rest, **others)  # type: ignore[arg-type]

    for access in ["write", "read"] if number == 3 else ["write"]:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", none_left)
            with pytest.raises(TieredError, match=r"Too many open files.*nothing is known to be wrong with it") as refused:
                TieredStore.open(folder, dram=MIB, access=access)
            assert not isinstance(refused.value, ManifestError | MisuseError)
    with TieredStore.open(folder, dram=MIB, keep=3) as store:
        assert store.rollback(1) == 1


# Listings beside a job that goes on


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("commits", [1, 2, 4])
def test_no_listing_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, at: int, commits: int) -> None:
    """Commits come right before a manifest is read that was there when the folder was listed."""
    with TieredStore.open(tmp_path / "state", dram=MIB, keep=keep) as store:
        for version in (1, 2, 3):
            put(store, version)
        before = listing(tmp_path / "state")
        load, loads = generations.load, [0]

        def meanwhile(folder: generations.Folder, number: int | None = None) -> Manifest | None:
            if loads[0] == at:
                loads[0] += 1
                for _ in range(commits):
                    put(store, store.generation + 1)
            loads[0] += 1
            return load(folder, number)

        with monkeypatch.context() as patch:
            patch.setattr(generations, "load", meanwhile)
            store.commit({"version": 4})
            found = listing(tmp_path / "state")
        assert before.number == 3
        assert found.number >= 4
        assert found.generations[-1].number == found.number
        assert found.generations[-1].meta == {"version": found.number}
        assert all(one.problem is None for one in found.generations)


@pytest.mark.parametrize("access", ["read", "write"])
def test_opening_finds_the_newest_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: str) -> None:
    """The one that was listed is gone when it is to be read, and a newer one is there."""
    with TieredStore.open(tmp_path / "state", dram=MIB, keep=1) as store:
        put(store, 1)
    generations_of, listings = generations.generations, [0]

    def meanwhile(folder: generations.Folder) -> list[int]:
        found = generations_of(folder)
        listings[0] += 1
        if listings[0] == 2:  # after the one that says whether it is a store
            (tmp_path / "state" / "manifest.1").rename(tmp_path / "moved")
            return found
        if listings[0] == 3:
            (tmp_path / "moved").rename(tmp_path / "state" / "manifest.1")
            return generations_of(folder)
        return found

    monkeypatch.setattr(generations, "generations", meanwhile)
    with TieredStore.open(tmp_path / "state", dram=MIB, access=access) as store:
        is_version(store, 1)
