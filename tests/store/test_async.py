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

import tiered.store.store
import tiered.tensors.specs
from tests.store.chains import CHAINS, MIB, Chain, GatedBackend, hurried, kib, nothing_is_held, numbers, push_out, same
from tiered import CapacityError, CorruptionError, Eviction, KeyNotFound, LeaseConflict, MisuseError, StoreClosed, TieredStore
from tiered.engine.state import EngineState
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


# -- changed ------------------------------------------------------------------------------------------------------------------


def test_put_delete_and_commit(chained: TieredStore) -> None:
    large = numbers(tiered.store.store.AT_ONCE // 64, 3).view(torch.uint8)[:400_001]

    async def body() -> None:
        await chained.put_async("w", numbers(1000))
        await chained.put_async("empty", torch.empty(0, 3))
        await chained.put_async("turned", numbers(60).view(6, 10).t())
        await asyncio.gather(*(chained.put_async("w", numbers(1000, seed)) for seed in range(9)))
        await chained.put_async("large", large)
        await chained.put_async("gone", numbers(10))
        await chained.delete_async("gone")
        with pytest.raises(KeyNotFound):
            await chained.delete_async("gone")
        for wrong in (3, torch.zeros(2).to_sparse()):
            with pytest.raises(MisuseError):
                await chained.put_async("wrong", wrong)  # type: ignore[arg-type]
        async with chained.lease("w"):
            with pytest.raises(LeaseConflict):
                await chained.put_async("w", numbers(3))
            with pytest.raises(LeaseConflict):
                await chained.delete_async("w")

    run(body())
    assert any(torch.equal(chained.get("w").view(torch.uint8), numbers(1000, seed).view(torch.uint8)) for seed in range(9))
    same(chained.get("large"), large)
    same(chained.get("turned"), numbers(60).view(6, 10).t())
    assert chained.get("empty").shape == (0, 3)
    nothing_is_held(chained)


def test_a_commit_that_is_awaited(store: TieredStore) -> None:
    async def body() -> None:
        store.put("w", numbers(1000))
        assert await store.commit_async({"step": 1}) == 1
        await store.put_async("w", numbers(1000, 1))
        task = asyncio.ensure_future(store.commit_async({"step": 2}))
        await cancelled(asyncio.create_task(asyncio.wait_for(task, 60)))
        assert await store.commit_async({"step": 3}) == 3

    run(body())
    assert (store.generation, store.meta, store.generations) == (3, {"step": 3}, (2, 3))


def test_a_put_that_is_cancelled_while_it_waits_for_room(store: TieredStore) -> None:
    store.put("w", kib(200, 7))
    held = fill_up(store)

    async def body() -> None:
        task = asyncio.create_task(store.put_async("w", kib(300, 8)))
        await until(lambda: waiting(store))
        await cancelled(task)
        assert not waiting(store)

    run(body())
    held.clear()
    assert store.get("w").eq(7).all()
    nothing_is_held(store)


def test_a_put_that_is_cancelled_while_a_thread_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, go_on = threading.Event(), threading.Event()
    filled = tiered.store.store._filled

    def slowly(target: torch.Tensor, source: torch.Tensor, room: object) -> None:
        copying.set()
        assert go_on.wait(300)  # set by the loop, which goes on meanwhile
        filled(target, source, room)  # type: ignore[arg-type]

    monkeypatch.setattr(tiered.store.store, "_filled", slowly)
    size = (tiered.store.store.AT_ONCE >> 10) * 2
    with TieredStore.open(tmp_path / "state", dram="9MiB") as store:

        async def body() -> None:
            task = asyncio.create_task(store.put_async("w", kib(size, 7)))
            await until(copying.is_set)
            await cancelled(task)
            other = asyncio.create_task(store.put_async("v", kib(1024, 8)))
            await other  # beside it
            third = asyncio.create_task(store.put_async("u", kib(2048, 9)))
            await until(lambda: waiting(store))  # the memory is not free while the thread writes to it
            go_on.set()
            await third

        run(body())
        assert sorted(store) == ["u", "v"]
        assert store.get("v").eq(8).all()
        assert store.get("u").eq(9).all()
        nothing_is_held(store)


def a_thousand_clients(folder: Path, seed: int, clients: int, wishes: int) -> tuple[int, int, int]:
    """Clients that fetch, lease, put and are cancelled at random, over a pool that holds a tenth; returns how many wishes were
    granted, how many cancelled, and how many tensors came from the disk."""
    source, keys = random.Random(seed), 60
    with TieredStore.open(folder, dram=MIB, eviction=Eviction(deadline=float("inf"))) as store:
        for number in range(keys):
            store.put(f"t{number}", kib(160, number))
        store.commit()
        store.offload()
        before, granted = store.statistics(), 0

        async def client(number: int) -> None:
            nonlocal granted
            mine = random.Random(number)
            for _ in range(wishes):
                chosen = mine.sample(range(keys), 2)
                kind = mine.randrange(8)
                if kind == 0:
                    async with store.lease([f"t{n}" for n in chosen]) as tensors:
                        assert [int(tensor[-1]) for tensor in tensors] == chosen
                    del tensors
                elif kind == 1:
                    assert [int(tensor[0]) for tensor in await store.fetch_many([f"t{n}" for n in chosen])] == chosen
                elif kind == 2:
                    await store.put_async(f"own {number}", kib(4, number % 251))
                else:
                    assert int((await store.fetch(f"t{chosen[0]}"))[7]) == chosen[0]
                granted += 1 + (kind < 2)

        async def body() -> int:
            tasks = [asyncio.create_task(client(number)) for number in range(clients)]
            for number in source.sample(range(clients), clients // 3):
                await asyncio.sleep(0)
                tasks[number].cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ended), ended
            return sum(end is not None for end in ended)

        gone = run(body())
        after = store.statistics()
        for key in [key for key in store if key.startswith("own")]:
            assert store.get(key).eq(int(key.split()[1]) % 251).all()
        nothing_is_held(store)
        store.close()
    return granted, gone, after.links[-1].up.transfers - before.links[-1].up.transfers


def test_a_thousand_clients(tmp_path: Path) -> None:
    granted, gone, read = a_thousand_clients(tmp_path / "state", 0, clients=1000, wishes=1)
    assert gone > 20, "how many are done before their cancellation comes depends on the machine"
    assert granted > 600
    assert read < granted / 2, "those who wait for the same tensor share a transfer"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_thousands_of_clients(tmp_path: Path, seed: int) -> None:
    granted, _, read = a_thousand_clients(tmp_path / "state", seed, clients=1000, wishes=6)
    assert read < granted / 2


def test_nothing_is_read_twice_for_one_wish(tmp_path: Path) -> None:
    """A tensor that came for somebody stays until it is granted; and nobody looks through all who wait for each of them."""
    looked = 0
    wanted = EngineState.wanted

    def counted(self: EngineState, *arguments: Any, **options: Any) -> Any:
        nonlocal looked
        looked += 1
        return wanted(self, *arguments, **options)

    with TieredStore.open(tmp_path / "state", dram=MIB, eviction=Eviction(deadline=float("inf"))) as store:
        for number in range(60):
            store.put(f"t{number}", kib(120, number))
        store.commit()
        store.offload()
        before = store.statistics().links[-1].up.transfers

        async def client(seed: int) -> None:
            source = random.Random(seed)
            for _ in range(10):
                number = source.randrange(60)
                assert int((await store.fetch(f"t{number}"))[0]) == number

        async def body() -> None:
            await asyncio.gather(*(client(seed) for seed in range(64)))

        EngineState.wanted = counted  # type: ignore[method-assign]
        try:
            run(body())
        finally:
            EngineState.wanted = wanted  # type: ignore[method-assign]
        read = store.statistics().links[-1].up.transfers - before
        nothing_is_held(store)
        store.close()
    assert 60 <= read <= 640
    assert looked < 30 * read


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
    copied = tiered.tensors.specs.copied

    def slowly(tensor: torch.Tensor, **how: Any) -> torch.Tensor:
        copying.set()
        assert go_on.wait(300)  # set by the loop, which goes on meanwhile
        return copied(tensor, **how)

    monkeypatch.setattr(tiered.tensors.specs, "copied", slowly)
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
    with TieredStore.open(tmp_path / "state", dram=MIB, eviction=Eviction(deadline=float("inf"))) as store:
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
