"""Promise 12: Ctrl-C. Buffers live until their I/O has completed, and the store reopens clean, with the last commit's bytes.

A child works with a store; SIGINT comes when some thread of it makes its N-th system call, or while a transfer is stalled. The
child catches KeyboardInterrupt outside of its ``with`` block and opens the store again, in the same process.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stress import syscalls
from tests.stress.children import forked
from tests.stress.contents import content, evict_all, holds
from tests.stress.fusefs import FaultyDisk, Rule
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tiered import TieredStore

PROMISE = "12 (Ctrl-C)"
MIB = 1 << 20
SIZES = {f"t{number}": 90_000 * number + 1 for number in range(6)}


def work(store: TieredStore, child: Child, rounds: int) -> None:
    for version in range(store.generation + 1, store.generation + 1 + rounds):
        for key, nbytes in SIZES.items():
            store.put(key, content(key, version, nbytes))
        with store.lease(["t1", "t3"], access="write") as (one, other):
            one.copy_(content("t1", version, SIZES["t1"]))
            other.copy_(content("t3", version, SIZES["t3"]))
        del one, other
        for key in SIZES:
            store.get(key)
        child.say(f"committing {version}")
        store.commit({"version": version})
        child.say(f"committed {version}")


def last(said: list[str], what: str) -> int:
    return max([0, *(int(words.split()[1]) for words in said if words.startswith(what + " "))])


def right(store: TieredStore) -> int:
    """All that its generation has is there, byte for byte; which it is."""
    version = store.meta.get("version", 0)
    assert sorted(store) == sorted(SIZES if version else [])
    for key in store:
        holds(store, key, version, SIZES[key])
    return store.generation


def interrupted(folder: Path, backend: str, rounds: int) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        try:
            with TieredStore.open(folder, dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
                work(store, child, rounds)
                store.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            child.say("to its end")
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            child.say("interrupted")
        store = None  # type: ignore[assignment]
        gc.collect()
        with TieredStore.open(folder, dram=MIB, backend=backend) as again:  # type: ignore[arg-type]
            child.say(f"reopened {right(again)}")
            evict_all(again)
            pool = again.statistics().tiers[0]
            assert (pool.used, pool.held) == (0, 0)
            again.close()

    return body


@syscalls.needs_notifications
@counts(2, 80)
def test_at_any_moment(tmp_path: Path, backend: str, count: int, tally: Tally) -> None:
    TieredStore.open(tmp_path / "other", dram=MIB, backend=backend).close()  # type: ignore[arg-type]
    source, folder = random.Random(f"{backend} {count}"), tmp_path / "state"
    calls = [*syscalls.CHANGING, "read", "openat"]
    most = syscalls.run(interrupted(folder, backend, 2), calls, lambda _: syscalls.go_on).calls
    with TieredStore.open(folder, dram=MIB) as store:
        generation = right(store)
    done = 0
    while done < count:
        moments = sorted(source.sample(range(1, most * 3 // 4), source.choice([1, 1, 1, 2])))
        sent: list[int] = []

        def decide(call: syscalls.Call, moments: list[int] = moments, sent: list[int] = sent) -> syscalls.Answer:
            if call.number in moments[:1] or (sent and call.number in moments[1:] and call.number < sent[0] + 3):
                sent.append(call.number)
                return syscalls.interrupt
            return syscalls.go_on

        ended = syscalls.run(interrupted(folder, backend, 2), calls, decide)
        what = f"interrupted at calls {sent}: {ended.said}"
        assert (ended.status, ended.error) == (0, ""), f"{what} {ended.error}"
        acknowledged = max(generation, last(ended.said, "committed"))
        assert acknowledged <= last(ended.said, "reopened") <= max(acknowledged, last(ended.said, "committing")), what
        with TieredStore.open(folder, dram=MIB) as store:
            generation = right(store)
            assert generation == last(ended.said, "reopened"), what
        if "interrupted" in ended.said:  # and not when the work was done
            tally.count("SIGINT", len(sent))
            done += 1


def stalled(folder: Path, backend: str, what: str, go: int) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        try:
            with TieredStore.open(folder, dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
                weakref.finalize(store._parts.memories[0].arena, child.say, "the pool is gone")  # type: ignore[attr-defined]
                announce_close(store._parts.backend, child)
                work(store, child, 1)
                evict_all(store)
                child.say("ready")
                os.read(go, 1)
                if what == "read":
                    store.get("t5")
                else:
                    store.put("t5", content("t5", 0, SIZES["t5"]))
                    store.commit()
        except KeyboardInterrupt:
            child.say("interrupted")
        del store
        gc.collect()
        child.say("let go")
        with TieredStore.open(folder, dram=MIB, backend=backend) as again:  # type: ignore[arg-type]
            if what != "read" and again.generation == 2:  # the signal came when the manifest was being written, or later
                holds(again, "t5", 0, SIZES["t5"])
                again.rollback(1)
            child.say(f"reopened {right(again)}")
            again.close()

    return body


def announce_close(backend: Any, child: Child) -> None:
    close = backend.close
    backend.close = lambda: [close(), child.say("the ring is closed")]


@counts(1, 8)
@pytest.mark.parametrize("what", ["read", "write", "fsync"])
def test_while_a_transfer_is_stalled(disk: FaultyDisk, backend: str, what: str, count: int, tally: Tally) -> None:
    """The pool is still mapped when the last of its I/O completes."""
    for number in range(count):
        folder = disk.folder / f"{backend} {what} {count} {number}"
        wait, go = os.pipe()
        with forked(stalled(folder, backend, what, wait)) as running:
            running.wait_for("ready")
            disk.add(Rule(what, "stall", name=r"data\.0", times=-1))
            os.write(go, b"x")
            disk.wait_stalled()
            running.send(signal.SIGINT)
            assert not {"the ring is closed", "the pool is gone", "let go"} & set(running.said)
            assert disk.stalled()
            fired = sum(disk.clear())
            assert running.wait_end() == 0, "\n".join(running.said)
        os.close(wait)
        os.close(go)
        tally.count(f"SIGINT during a {what}", fired)
        assert running.said.index("the ring is closed") < running.said.index("the pool is gone"), running.said
        assert "interrupted" in running.said
        assert last(running.said, "reopened") == 1, running.said
