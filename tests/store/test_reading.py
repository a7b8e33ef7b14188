"""``access="read"``: any kept generation, byte for byte, and not one byte of the folder changes that is there."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stress.children import forked
from tests.stress.contents import content, holds
from tests.stress.syscalls import Child
from tests.zero.models import Tied
from tiered import Access, CorruptionError, ManifestError, MisuseError, StoreLocked, TensorSpec, TieredError, TieredStore, zero

MIB = 1 << 20
SIZES = {"empty": 0, "none": 0, "tiny": 3, "page": 4096, "large": 5 * MIB + 7}


def made(folder: Path, **options: Any) -> Path:
    """Generations 2 and 3 are kept; what was written after them is in no manifest."""
    store = TieredStore.open(folder, dram=8 * MIB, **options)
    for version in (1, 2, 3):
        for key, nbytes in SIZES.items():
            store.put(key, content(key, version, nbytes))
        store.commit({"version": version})
    store.put("tiny", content("tiny", 4, 9 * MIB // 2))
    store.close()
    return folder


def seen(*folders: Path) -> dict[str, object]:
    """All that is there."""
    found: dict[str, object] = {}
    for folder in folders:
        for path in [folder, *folder.rglob("*")]:
            stat = path.stat()
            if path.is_dir() and stat.st_mode & 0o200:  # a reader makes a file there, and removes it
                found[str(path)] = (stat.st_mode, sorted(os.listdir(path)))
                continue
            data = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
            found[str(path)] = (stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_blocks, data)
    return found


@pytest.mark.parametrize("backend", ["auto", "posix", "aiofiles"])
@pytest.mark.parametrize(("generation", "version"), [(None, 3), (3, 3), (2, 2)])
def test_every_kept_generation(tmp_path: Path, backend: Any, generation: int | None, version: int) -> None:
    folder = made(tmp_path / "state")
    (folder / "manifest.9.tmp").write_bytes(b"of a commit that was killed")
    before = seen(folder)
    for access in ("read", Access.READ):
        with TieredStore.open(folder, dram=6 * MIB, generation=generation, access=access, backend=backend) as store:
            assert (store.generation, store.meta) == (version, {"version": version})
            assert store.access is Access.READ
            assert sorted(store) == sorted(SIZES)
            store.prefetch(["large"])
            for key, nbytes in SIZES.items():
                holds(store, key, version, nbytes)
                with store.lease(key) as tensor:
                    assert torch.equal(tensor, content(key, version, nbytes))
            assert store.statistics().generation == version
    assert seen(folder) == before


def test_with_less_memory_than_there_is_and_a_tier_above(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=8 * MIB) as store:
        for number in range(40):
            store.put(f"t{number}", content(f"t{number}", 1, 300_000))
        assert store.access is Access.WRITE
    before = seen(tmp_path / "state")
    with TieredStore.open(tmp_path / "state", dram=MIB, hbm=MIB, device="cpu", access="read") as store:
        for number in [*range(40), *range(40)]:
            holds(store, f"t{number}", 1, 300_000)
        assert store.statistics().evictions
    assert seen(tmp_path / "state") == before


CHANGES: dict[str, Callable[[TieredStore], object]] = {
    "put": lambda store: store.put("new", torch.ones(3)),
    "create": lambda store: store.create("new", TensorSpec("float32", (3,), 4)),
    "delete": lambda store: store.delete("tiny"),
    "lease": lambda store: store.lease("tiny", access="write").__enter__(),
    "commit": lambda store: store.commit(),
    "commit_async": lambda store: store.commit_async(),
    "rollback": lambda store: store.rollback(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_would_change_it_is_refused(tmp_path: Path, what: str) -> None:
    folder = made(tmp_path / "state")
    before = seen(folder)
    with TieredStore.open(folder, dram=6 * MIB, generation=2, access="read") as store:
        with pytest.raises(MisuseError, match=r"state is open for reading, at generation 2, .* without access='read'"):
            CHANGES[what](store)
        holds(store, "tiny", 2, 3)
        assert store.statistics().tiers[0].held == 0
    assert seen(folder) == before


def test_several_read_beside_a_writer(tmp_path: Path) -> None:
    folder = made(tmp_path / "state")
    with (
        TieredStore.open(folder, dram=6 * MIB, generation=2, access="read") as one,
        TieredStore.open(folder, dram=6 * MIB, generation=3, access="read") as other,
    ):
        holds(one, "large", 2, SIZES["large"])
        holds(other, "large", 3, SIZES["large"])
        with TieredStore.open(folder, dram=8 * MIB, keep=1) as store:
            store.put("large", content("large", 4, SIZES["large"]))
            store.commit({"version": 4})
            with pytest.raises(StoreLocked, match="in use by process"):
                TieredStore.open(folder, dram=6 * MIB)
            for reader, version in ((one, 2), (other, 3)):
                for key, nbytes in SIZES.items():
                    holds(reader, key, version, nbytes)
            assert one.refresh() == other.refresh() == 4
            for key, nbytes in SIZES.items():
                holds(one, key, 4 if key == "large" else 3, nbytes)


def test_beside_a_job_that_died(tmp_path: Path) -> None:
    def job(child: Child) -> None:
        made(tmp_path / "state")
        store = TieredStore.open(tmp_path / "state", dram=8 * MIB)
        store.put("large", content("large", 4, SIZES["large"]))
        child.say(f"at {store.generation}")
        os.kill(os.getpid(), 9)

    with forked(job) as running:
        assert running.wait_end() == -9
    assert running.said == ["at 3"]
    before = seen(tmp_path / "state")
    for version in (2, 3):
        with TieredStore.open(tmp_path / "state", dram=8 * MIB, generation=version, access="read") as store:
            for key, nbytes in SIZES.items():
                holds(store, key, version, nbytes)
    assert seen(tmp_path / "state") == before


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_in_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    """By a user who may read it, and no more."""
    folder = made(tmp_path / "state", paths=[tmp_path / "a", tmp_path / "b"])
    folders = [folder, tmp_path / "a", tmp_path / "b"]
    for place in folders:
        place.chmod(0o555)
        for file in place.iterdir():
            file.chmod(0o444)
    parent = tmp_path
    while parent != parent.parent:
        parent.chmod(parent.stat().st_mode | 0o055)
        parent = parent.parent
    before = seen(*folders)

    def other_user(child: Child) -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with TieredStore.open(folder, dram=8 * MIB, generation=2, access="read", paths=folders[1:]) as store:
            for key, nbytes in SIZES.items():
                holds(store, key, 2, nbytes)
        child.say("read")
        try:
            TieredStore.open(folder, dram=8 * MIB, paths=folders[1:])
        except TieredError as error:
            child.say(type(error).__name__)

    with forked(other_user) as running:
        assert running.wait_end() == 0, running.said
    assert running.said == ["read", "MisuseError"]
    assert seen(*folders) == before


def test_a_model_to_look_at(tmp_path: Path) -> None:
    """Its forward gives what it gave when it was committed, with a pool that it does not fit into."""
    torch.manual_seed(0)
    expected = []
    with TieredStore.open(tmp_path / "state", dram="1MiB") as store:
        model: Any = zero.page(Tied(width=64), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            optimizer.zero_grad()
            model.loss(step).backward()
            optimizer.step()
            optimizer.flush()
            optimizer.zero_grad()
            zero.commit(model, optimizer)
            with torch.no_grad():
                expected.append(model.loss(9).item())
        store.close()
    before = seen(tmp_path / "state")
    for generation in (1, 2):
        with TieredStore.open(tmp_path / "state", dram="1MiB", generation=generation, access="read") as store:
            model = zero.page(Tied(width=64), store, existing="resume")
            with torch.no_grad():
                assert model.loss(9).item() == expected[generation - 1]
    assert expected[0] != expected[1]
    assert seen(tmp_path / "state") == before


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(MisuseError, match=r"not a folder|no manifest"):
            TieredStore.open(path, dram=MIB, access="read")
    folder = made(tmp_path / "state")
    with pytest.raises(MisuseError, match="no generation 1; there are: 2, 3"):
        TieredStore.open(folder, dram=MIB, generation=1, access="read")
    with pytest.raises(MisuseError, match="access is 'read' or 'write', not 'r'"):
        TieredStore.open(folder, dram=MIB, access="r")
    for wrong in ({"path": None}, {"path": folder, "durability": "none"}, {"path": folder, "nvme": "1GiB"}):
        with pytest.raises(MisuseError, match="access='read'"):
            TieredStore.open(dram=MIB, access="read", **wrong)  # type: ignore[arg-type]
    os.truncate(folder / "data.0", 2 * MIB)
    with pytest.raises(ManifestError, match=r"bytes at \d+ of data file 0: not there"):
        TieredStore.open(folder, dram=MIB, access="read")
    TieredStore.open(made(tmp_path / "again"), dram=MIB).close()  # no lock stayed


def test_damage_is_never_returned(tmp_path: Path) -> None:
    folder = made(tmp_path / "state")
    with TieredStore.open(folder, dram=6 * MIB, access="read") as store:
        place = store._engine.state.directory.entry("page").copies[-1]
        assert place is not None
        assert store._parts.nvme is not None
        offset = store._parts.nvme.locate(place.slot).offset
    with open(folder / "data.0", "r+b") as file:
        file.seek(offset + 9)
        byte = file.read(1)
        file.seek(offset + 9)
        file.write(bytes([byte[0] ^ 1]))
    with TieredStore.open(folder, dram=6 * MIB, access="read") as store:
        with pytest.raises(CorruptionError, match="'page'"):
            store.get("page")
        holds(store, "large", 3, SIZES["large"])
    shutil.rmtree(folder)
