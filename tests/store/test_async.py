"""``await store.fetch`` and ``async with store.lease``: many at once, cancelled anywhere, from several loops and threads."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import tiered.store.lease
import tiered.store.store
from tests.store.chains import CHAINS, MIB, Chain, GatedBackend, hurried, kib, nothing_is_held, numbers, push_out, same
from tiered import CapacityError, CorruptionError, KeyNotFound, LeaseConflict, MisuseError, StoreClosed, TieredStore
from tiered.format.generations import load

Answer = TypeVar("Answer")


@pytest.fixture(params=CHAINS, ids=lambda chain: chain.name)
def chained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    chain: Chain = request.param
    store = chain.open(tmp_path / "state")
    yield store
    store.close()


@pytest.fixture
def gate() -> GatedBackend:
    return GatedBackend()


@pytest.fixture
def store(tmp_path: Path, gate: GatedBackend) -> Iterator[TieredStore]:
    opened = TieredStore.open(tmp_path / "state", dram=MIB, backend=lambda: gate)
    yield opened
    gate.shut = False
    opened.close()


def run(body: Coroutine[Any, Any, Answer]) -> Answer:
    """In a loop whose complaints (an exception that nobody saw) are failures."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> Answer:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        return await body

    answer = asyncio.run(watched())
    assert not complaints, complaints
    return answer


async def until(condition: Callable[[], object]) -> None:
    """Others run meanwhile."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        await asyncio.sleep(0)


def spin(condition: Callable[[], object]) -> None:
    """Other threads run meanwhile, but nothing else of this loop."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        os.sched_yield()


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def waiting(store: TieredStore) -> list[Any]:
    return store._engine.requests.waiting


async def leasing(store: TieredStore, key: str, **options: Any) -> torch.Tensor:
    async with store.lease(key, **options) as tensor:
        return tensor.clone()


def fill_up(store: TieredStore) -> list[torch.Tensor]:
    """Tensors that leave no room in host memory for as long as somebody has them."""
    held = []
    for number in range(5):
        store.put(f"held {number}", kib(200))
        with store.lease(f"held {number}", tier="dram") as tensor:
            held.append(tensor)
    return held


# -- what they give ----------------------------------------------------------------------------------------------------------


def test_fetch_gives_a_copy(chained: TieredStore) -> None:
    chained.put("w", numbers(1000))
    copy = run(chained.fetch("w"))
    same(copy, numbers(1000))
    assert copy.device.type == "cpu"
    copy.zero_()
    same(run(chained.fetch("w")), numbers(1000))
    nothing_is_held(chained)


def test_an_async_lease_gives_the_tensor_itself(chained: TieredStore) -> None:
    chained.put("w", numbers(1000))
    chained.put("v", numbers(10, 1))

    async def body() -> None:
        async with chained.lease("w", access="write") as w:
            w.copy_(numbers(1000, 2))
        async with chained.lease(["v", "w"]) as (v, w):
            same(v, numbers(10, 1))
            same(w, numbers(1000, 2))

    run(body())
    same(chained.get("w"), numbers(1000, 2))
    nothing_is_held(chained)


def test_errors_are_those_of_the_blocking_calls(chained: TieredStore) -> None:
    chained.put("w", kib(4))

    async def body() -> None:
        with pytest.raises(KeyNotFound):
            await chained.fetch("nobody")
        with pytest.raises(MisuseError):
            await chained.fetch(3)  # type: ignore[arg-type]
        async with chained.lease("w", access="write"):
            for refused in (chained.fetch("w"), leasing(chained, "w"), leasing(chained, "w", tier="dram")):
                with pytest.raises(LeaseConflict, match="'w'"):
                    await refused
        lease = chained.lease("w")
        async with lease:
            with pytest.raises(MisuseError, match="open already"):
                await lease.__aenter__()
        with pytest.raises(MisuseError, match="written to under a READ lease"):
            async with chained.lease("w") as w:
                w.zero_()

    run(body())
    nothing_is_held(chained)


def test_an_exception_in_the_block_ends_the_lease(chained: TieredStore) -> None:
    chained.put("w", kib(4))

    async def body() -> None:
        with pytest.raises(ZeroDivisionError):
            async with chained.lease("w", access="write"):
                raise ZeroDivisionError
        chained.delete("w")

    run(body())


def test_async_leases_are_traced_and_counted(store: TieredStore) -> None:
    store.put("w", kib(100))
    push_out(store)
    before = store.statistics()
    with store.trace() as order:
        run(leasing(store, "w"))
        run(store.fetch("w"))
    after = store.statistics()
    assert [touch.key for touch in order] == ["w", "w"]
    assert (after.leases - before.leases, after.hits - before.hits, after.misses - before.misses) == (2, 1, 1)
    assert after.stalled_for_reads > before.stalled_for_reads


# -- many at once ------------------------------------------------------------------------------------------------------------


def test_hundreds_of_coroutines_on_a_pool_that_holds_a_few(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        for number in range(24):
            store.put(f"t{number}", kib(120, number))
        finished = set()

        async def reader(number: int) -> None:
            key = number % 24
            if number % 3:
                assert (await store.fetch(f"t{key}")).eq(key).all()
            else:
                async with store.lease(f"t{key}") as tensor:
                    await asyncio.sleep(0)
                    assert tensor.eq(key).all()
            finished.add(number)

        async def body() -> None:
            await asyncio.gather(*(reader(number) for number in range(300)))

        run(body())
        assert len(finished) == 300
        pool = store.statistics().tiers[0]
        assert pool.peak <= pool.capacity
        assert store.statistics().evictions > 20
        nothing_is_held(store)


@pytest.mark.parametrize("chain", [c for c in CHAINS if c.disk], ids=lambda chain: chain.name)
def test_some_of_hundreds_are_cancelled_and_the_others_go_on(tmp_path: Path, chain: Chain) -> None:
    source = random.Random(0)
    with chain.open(tmp_path / "state") as store:
        for number in range(16):
            store.put(f"t{number}", kib(100, number))

        async def reader(number: int) -> int:
            if number % 2:
                return int((await store.fetch(f"t{number % 16}"))[0])
            async with store.lease(f"t{number % 16}") as tensor:
                await asyncio.sleep(0)
                return int(tensor[-1])

        async def body() -> None:
            tasks = [asyncio.create_task(reader(number)) for number in range(200)]
            doomed = source.sample(range(200), 100)
            for number in doomed:
                await asyncio.sleep(0)
                tasks[number].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            for number, answer in enumerate(answers):
                if isinstance(answer, BaseException):
                    assert isinstance(answer, asyncio.CancelledError)
                    assert number in doomed
                else:
                    assert answer == number % 16

        run(body())
        nothing_is_held(store)


def test_two_event_loops_in_two_threads_and_threads_that_lease(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        for number in range(16):
            store.put(f"t{number}", kib(100, number))

        async def reader(seed: int) -> None:
            for number in random.Random(seed).sample(range(16), 6):
                if seed % 2:
                    assert (await store.fetch(f"t{number}")).eq(number).all()
                else:
                    async with store.lease(f"t{number}") as tensor:
                        assert tensor.eq(number).all()

        def looping(seed: int) -> None:
            async def body() -> None:
                await asyncio.gather(*(reader(10 * seed + number) for number in range(10)))

            run(body())

        def blocking(seed: int) -> None:
            for number in random.Random(seed).choices(range(16), k=60):
                with store.lease(f"t{number}") as tensor:
                    assert tensor.eq(number).all()
                del tensor

        def caught(work: Callable[[int], None], seed: int) -> None:
            try:
                work(seed)
            except BaseException as error:
                failures.append(error)

        works = [looping, looping, blocking, blocking]
        threads = [threading.Thread(target=caught, args=(work, seed)) for seed, work in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        nothing_is_held(store)


def test_a_damaged_tensor_fails_only_who_asked_for_it(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        for key in "abc":
            store.put(key, numbers(5000, ord(key)))
    manifest = load(tmp_path / "state")
    assert manifest is not None
    (extent,) = [record.extent for record in manifest.tensors if record.key == "b"]
    assert extent is not None
    with open(tmp_path / "state" / "data.0", "r+b") as file:
        file.seek(extent.offset)
        file.write(bytes([numbers(5000, ord("b")).view(torch.uint8)[0].item() ^ 1]))  # type: ignore[operator]
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:

        async def body() -> list[Any]:
            return await asyncio.gather(*(store.fetch(key) for key in "abcb"), return_exceptions=True)

        a, b, c, again = run(body())
        same(a, numbers(5000, ord("a")))
        same(c, numbers(5000, ord("c")))
        assert isinstance(b, CorruptionError)
        assert isinstance(again, CorruptionError)
        nothing_is_held(store)


# -- cancelled ---------------------------------------------------------------------------------------------------------------

Ask = Callable[[TieredStore, str], Awaitable[torch.Tensor]]
ASKS = pytest.mark.parametrize(
    "ask",
    [TieredStore.fetch, leasing, lambda store, key: leasing(store, key, access="write")],
    ids=["fetch", "read lease", "write lease"],
)


def task_of(ask: Ask, store: TieredStore, key: str) -> asyncio.Task[torch.Tensor]:
    async def asking() -> torch.Tensor:
        return await ask(store, key)

    return asyncio.create_task(asking())


@ASKS
def test_cancelled_before_it_ran(store: TieredStore, ask: Ask) -> None:
    store.put("w", kib(100))

    async def body() -> None:
        await cancelled(task_of(ask, store, "w"))

    run(body())
    nothing_is_held(store)


@ASKS
def test_cancelled_while_it_waits_for_bytes(store: TieredStore, gate: GatedBackend, ask: Ask) -> None:
    store.put("w", kib(100, 7))
    push_out(store)

    async def body() -> None:
        gate.shut = True
        one, other = task_of(ask, store, "w"), asyncio.create_task(store.fetch("w"))
        await until(lambda: gate.pending and len(waiting(store)) == 2)
        await cancelled(one)
        assert len(waiting(store)) == 1
        gate.let_go()
        assert (await other).eq(7).all()

    run(body())
    nothing_is_held(store)


@ASKS
def test_cancelled_while_it_waits_for_room(store: TieredStore, ask: Ask) -> None:
    store.put("w", kib(200, 7))
    push_out(store)
    held = fill_up(store)

    async def body() -> None:
        task = task_of(ask, store, "w")
        await until(lambda: waiting(store))
        await cancelled(task)
        assert not waiting(store)
        other = asyncio.create_task(store.fetch("w"))
        await until(lambda: waiting(store))
        held.clear()
        assert (await other).eq(7).all()

    run(body())
    nothing_is_held(store)


@ASKS
def test_cancelled_after_the_grant_and_before_it_knows(store: TieredStore, ask: Ask) -> None:
    """Nor does the cancellation get lost, as one did in ``asyncio.wait_for`` before Python 3.12."""
    store.put("w", kib(200, 7))
    push_out(store)
    held = fill_up(store)

    async def body() -> None:
        task = task_of(ask, store, "w")
        await until(lambda: waiting(store))
        held.clear()
        spin(lambda: not waiting(store))
        with pytest.raises(LeaseConflict):  # it has it
            store.delete("w")
        await cancelled(task)
        store.delete("w")

    run(body())
    nothing_is_held(store)


def test_cancelled_while_a_thread_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, go_on = threading.Event(), threading.Event()
    copied = tiered.store.lease.copied

    def slowly(tensor: torch.Tensor, *, queued: bool) -> torch.Tensor:
        copying.set()
        assert go_on.wait(300)  # set by the loop, which goes on meanwhile
        return copied(tensor, queued=queued)

    monkeypatch.setattr(tiered.store.lease, "copied", slowly)
    with TieredStore.open(tmp_path / "state", dram="16MiB") as store:
        store.put("w", kib(tiered.store.store.AT_ONCE >> 10, 7).repeat(2))

        async def body() -> None:
            task = asyncio.create_task(store.fetch("w"))
            await until(copying.is_set)
            await cancelled(task)
            async with store.lease("w", access="write") as w:  # it is nobody's
                w.fill_(8)
            go_on.set()
            del w
            assert (await store.fetch("w")).eq(8).all()

        run(body())
        nothing_is_held(store)


@ASKS
def test_a_timeout_of_the_callers_is_a_cancellation(store: TieredStore, gate: GatedBackend, ask: Ask) -> None:
    store.put("w", kib(100, 7))
    push_out(store)

    async def body() -> None:
        gate.shut = True
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(task_of(ask, store, "w"), 0.01)
        assert not waiting(store)
        gate.let_go()
        assert (await store.fetch("w")).eq(7).all()

    run(body())
    nothing_is_held(store)


def test_cancelled_in_the_block(chained: TieredStore) -> None:
    chained.put("w", kib(4))

    async def holding(inside: asyncio.Event) -> None:
        async with chained.lease("w", access="write"):
            inside.set()
            await asyncio.Event().wait()

    async def body() -> None:
        inside = asyncio.Event()
        task = asyncio.create_task(holding(inside))
        await inside.wait()
        with pytest.raises(LeaseConflict):
            chained.get("w")
        await cancelled(task)

    run(body())
    nothing_is_held(chained)


# -- no room, no store, no loop ----------------------------------------------------------------------------------------------


@ASKS
def test_the_deadline_names_who_holds_the_room(tmp_path: Path, ask: Ask) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("w", kib(200))
        push_out(store)
        held = fill_up(store)

        async def body() -> None:
            with pytest.raises(CapacityError) as raised, hurried(store, 0.1):
                await ask(store, "w")
            assert re.search(r"lease of 'w' waited [0-9.]+ s for room in tier dram", str(raised.value))
            assert "'held 0' (204,800 bytes, still referenced after its lease)" in str(raised.value)

        run(body())
        held.clear()
        nothing_is_held(store)


def test_no_deadline_at_all(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB, deadline=float("inf")) as store:
        store.put("w", kib(200, 7))
        push_out(store)
        assert run(store.fetch("w")).eq(7).all()


@pytest.mark.parametrize("where", ["in the loop", "in another thread"])
def test_closing_while_coroutines_wait(store: TieredStore, where: str) -> None:
    store.put("w", kib(200))
    push_out(store)
    held = fill_up(store)

    async def body() -> None:
        tasks = [task_of(ask, store, "w") for ask in (TieredStore.fetch, leasing) for _ in range(5)]
        await until(lambda: len(waiting(store)) == 10)
        if where == "in the loop":
            store.close()
        else:
            await asyncio.to_thread(store.close)
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(answer, StoreClosed)
        with pytest.raises(StoreClosed):
            await store.fetch("w")

    run(body())
    assert all(tensor.eq(0).all() for tensor in held)


def abandoned(store: TieredStore) -> tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], list[torch.Tensor]]:
    """A coroutine that waits for room to write 'w', in a loop that does not run; and who has the room."""
    store.put("w", kib(200, 7))
    push_out(store)
    held = fill_up(store)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending": so it was
    task = loop.create_task(leasing(store, "w", access="write"))
    loop.run_until_complete(until(lambda: waiting(store)))
    return loop, task, held


def test_what_is_granted_after_the_loop_was_closed_is_nobodys(store: TieredStore) -> None:
    loop, task, held = abandoned(store)
    loop.close()
    held.clear()
    assert store.get("w").eq(7).all()
    del task
    gc.collect()
    nothing_is_held(store)


def test_a_coroutine_may_be_collected_by_a_thread_that_has_the_lock(store: TieredStore) -> None:
    """Collectors run wherever memory is asked for; a finalizer that waits for a lock would wait for its own thread."""
    loop, task, held = abandoned(store)
    held.clear()
    spin(lambda: not waiting(store))
    with pytest.raises(LeaseConflict):
        store.get("w")
    loop.close()
    with store._engine.lock:
        del task
        gc.collect()
    assert store.get("w").eq(7).all()
    nothing_is_held(store)


@pytest.mark.parametrize("kind", ["generator", "trace"])
def test_a_generator_may_be_collected_by_a_thread_that_has_the_lock(store: TieredStore, kind: str) -> None:
    store.put("w", kib(4))

    def generator() -> Iterator[None]:
        with store.lease("w", access="write") if kind == "generator" else store.trace():
            yield

    suspended = generator()
    next(suspended)
    with store._engine.lock:
        del suspended
        gc.collect()
    nothing_is_held(store)
    store.put("w", kib(4))
    assert not store._engine.state.records


def test_a_coroutine_in_its_lease_may_be_collected_by_a_thread_that_has_the_lock(store: TieredStore) -> None:
    store.put("w", kib(4))

    async def holding() -> None:
        async with store.lease("w", access="write"):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    task = loop.create_task(holding())
    loop.run_until_complete(asyncio.sleep(0))
    with pytest.raises(LeaseConflict):
        store.get("w")
    loop.close()
    with store._engine.lock:
        del task
        gc.collect()
    nothing_is_held(store)
