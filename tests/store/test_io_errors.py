"""Errors of single calls that once came out raw, or did more harm than they had to."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import PythonOver
from tiered import CapacityError, CommitError, TieredError, TieredStore
from tiered.format.generations import dropped, generations
from tiered.io.probe import libaio_unavailable

MIB = 1 << 20


def failing(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: int, number: int = 1) -> list[int]:
    """Have the ``number``-th call of ``module.name`` raise an OSError; the calls that there were."""
    real, calls = getattr(module, name), []

    def fail(*arguments: Any, **named: Any) -> Any:
        calls.append(len(calls) + 1)
        if len(calls) == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, fail)
    return calls


@pytest.mark.parametrize(("call", "number"), [("unlink", 1), ("fsync", 3)])
def test_old_generations_that_cannot_be_dropped_are_no_error_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """It is durable by then; they go with the next one, and keep their bytes until then."""
    with TieredStore.open(tmp_path / "state", dram=MIB, keep=1) as store:
        store.put("t", torch.zeros(5))
        assert store.commit() == 1
        with monkeypatch.context() as patched:  # fsync: of the manifest, of the folder that has it, of that without the old one
            calls = failing(patched, os, call, errno.EIO, number)
            store.put("t", torch.ones(5))
            assert store.commit() == 2
        assert len(calls) == number
        assert generations(store.folder) == [2]
        assert dropped(store.folder) == ([1] if call == "unlink" else [])
        assert store._parts.nvme is not None
        assert store._parts.nvme.generations == (1, 2)
        store.put("t", torch.full((5,), 3.0))
        assert store.commit() == 3
        assert (generations(store.folder), dropped(store.folder)) == ([3], [])
        assert store.get("t").eq(3).all()
        assert store._parts.nvme.generations == (3,)


@pytest.mark.parametrize(
    ("call", "number", "kept"), [("fsync", 1, False), ("rename", 1, True), ("fsync", 2, True)], ids=["itself", "name", "folder"]
)
def test_what_a_failed_commit_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kept: bool
) -> None:
    """Its extents only where its manifest may have got its name, and until the next commit."""
    with TieredStore.open(tmp_path / "state", dram=MIB, keep=1) as store:
        nvme = store._parts.nvme
        assert nvme is not None
        store.put("t", torch.zeros(5))
        store.commit()
        with monkeypatch.context() as patched:
            calls = failing(patched, os, call, errno.ENOSPC, number)
            store.put("t", torch.ones(5))
            with pytest.raises(CommitError):
                store.commit()
        assert len(calls) == number
        assert nvme.generations == ((1, 2) if kept else (1,))
        store.delete("t")
        assert nvme.used == (2 if kept else 1) * nvme.alignment
        assert os.listdir(store.folder).count("manifest.2.tmp") == 0
        store.put("t", torch.full((5,), 3.0))
        assert store.commit() == 3
        assert nvme.generations == (3,)
        assert nvme.used == nvme.alignment


def test_a_data_file_that_cannot_grow_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on, and so does everything that is in memory."""
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("t", torch.ones(5))
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "")))
        with pytest.raises(CapacityError, match=r"write 4,096 bytes .*data\.0 cannot grow: input/output error \(errno 5\)"):
            store.commit()
        assert store.get("t").eq(1).all()
        monkeypatch.undo()
        assert store.commit() == 1


def test_a_lock_that_cannot_be_let_go_ends_with_its_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = fcntl.flock, 0

    def flock(fd: int, how: int) -> None:
        nonlocal calls
        if how == fcntl.LOCK_UN:
            calls += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        TieredStore.open(tmp_path / "state", dram=MIB).close()
    assert calls == 1
    TieredStore.open(tmp_path / "state", dram=MIB).close()


@pytest.mark.parametrize("call", ["listdir", "ftruncate"])
def test_an_error_at_open_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    failing(monkeypatch, os, call, errno.EIO)
    with pytest.raises(TieredError, match=r"cannot open the store: .*state: Input/output error \(errno 5\)"):
        TieredStore.open(tmp_path / "state", dram=MIB)
    monkeypatch.undo()
    TieredStore.open(tmp_path / "state", dram=MIB).close()


@pytest.mark.skipif(libaio_unavailable() is not None, reason="no libaio here")
@pytest.mark.parametrize("link", ["python", "native"])
def test_completions_that_could_not_be_fetched_once_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    """Of io_getevents; they stay in the ring meanwhile."""
    from tiered.io import libaio

    class Failing:
        left = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def aio_ring_reap(self, ring: Any, at_least: int, timeout: int, out: Any, room: int) -> int:
            if self.left:
                self.left -= 1
                return -errno.EIO
            return int(real.aio_ring_reap(ring, at_least, timeout, out, room))

    real, failing = libaio.lib, Failing()
    backend: Any = "libaio"
    if link == "python":
        monkeypatch.setattr(libaio, "lib", failing)
        backend = lambda: PythonOver(libaio.LibaioBackend())  # noqa: E731
    else:
        native = pytest.importorskip("tiered.links._disk")

        def reap(ring: Any, at_least: int, timeout: int, out: Any, room: int) -> int:
            here, there = (("aio_ring *", ring), ("ring_completion *", out)), native.ffi
            mine = [libaio.ffi.cast(kind, int(there.cast("uintptr_t", one))) for kind, one in here]
            return failing.aio_ring_reap(mine[0], at_least, timeout, mine[1], room)

        called = native.ffi.callback("int(void *, unsigned, int64_t, ring_completion *, unsigned)", reap)
        ring = libaio.LibaioBackend.native
        replaced = property(lambda self: ring.fget(self)._replace(reap=int(native.ffi.cast("uintptr_t", called))))
        monkeypatch.setattr(libaio.LibaioBackend, "native", replaced)
    with TieredStore.open(tmp_path / "state", dram=MIB, backend=backend) as store:
        for number in range(20):
            store.put(f"t{number}", torch.full((200 << 10,), number, dtype=torch.uint8))
        failing.left = 2
        assert store.get("t0").eq(0).all()
        assert not failing.left
        failing.left = 1 << 60  # for good
        with pytest.raises(TieredError, match="does not give completions"):
            [store.get(f"t{number}") for number in range(20)]
        failing.left = 0
        store.close()


@pytest.mark.parametrize("again", ["by another call", "by the collector"])
def test_what_ctrl_c_interrupts_of_closing_is_done_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str) -> None:
    """It once left the store locked until the process ended."""
    store = TieredStore.open(tmp_path / "state", dram=MIB)
    with monkeypatch.context() as patched:
        patched.setattr(store._engine, "stop", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.close()
    if again == "by another call":
        store.close()
        store.close()
    del store
    gc.collect()
    TieredStore.open(tmp_path / "state", dram=MIB).close()
