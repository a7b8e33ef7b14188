"""Kernels that run long after the lease under which they were queued has ended: nobody overwrites what they read, nobody reads
what they have not written yet. Everything is compared with the same steps on the host, byte by byte."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Open
from tests.gpu.device import KIB, MIB, Device, numbers, raw, require_device, same
from tiered import Eviction, TieredStore

require_device()

COUNT = 64 * KIB
"""int32, 256 KiB: four fit into HBM."""


def integers(seed: int) -> torch.Tensor:
    return numbers(COUNT, seed, torch.int32)


def filled(store: TieredStore, count: int) -> dict[str, torch.Tensor]:
    tensors = {f"t{number}": integers(number) for number in range(count)}
    for key, tensor in tensors.items():
        store.put(key, tensor)
    return tensors


def read(gpu: Device, store: TieredStore, key: str, stream: torch.cuda.Stream | None) -> tuple[torch.Tensor, bool]:
    """One more than the tensor, computed behind a long kernel; whether that was still to run when the lease had ended."""
    with gpu.use(stream):
        with store.lease(key) as tensor:
            gpu.busy()
            result = tensor + 1
        return result, gpu.pending(stream)


def write(gpu: Device, store: TieredStore, key: str, stream: torch.cuda.Stream | None, factor: int) -> None:
    with gpu.use(stream), store.lease(key, access="write") as tensor:
        gpu.busy()
        tensor.mul_(factor).add_(1)


def test_slots_are_refilled_only_after_their_readers(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    tensors = filled(store, 12)
    streams = gpu.streams(3)
    results = []
    late = 0
    for step in range(24):
        key = f"t{step % 12}"
        result, pending = read(gpu, store, key, streams[step % 3])
        results.append((key, result))
        late += pending
    gpu.finish()
    assert late > 12, "leases that ended before their kernels"
    assert store.statistics().evictions >= 16
    for key, result in results:
        same(result, tensors[key] + 1)


def test_a_put_waits_for_the_readers_of_its_slot(open_store: Open, path: Path | None, gpu: Device) -> None:
    """On the device, not on the host: the put is queued on another stream."""
    store = open_store(path)
    tensors = filled(store, 4)
    reading, putting = gpu.streams(2)
    fresh = [integers(100 + number).to(gpu.device) for number in range(4)]
    gpu.finish()
    for _ in range(3):
        results = []
        for key in tensors:
            results.append(read(gpu, store, key, reading)[0])
        with gpu.use(putting):
            for number, tensor in enumerate(fresh):
                gpu.put(store, f"fresh{number}", tensor)
        gpu.finish()
        for key, result in zip(tensors, results, strict=True):
            same(result, tensors[key] + 1)
        for number, tensor in enumerate(fresh):
            same(store.get(f"fresh{number}"), tensor)


def test_what_is_written_late_is_what_is_evicted_and_comes_back(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    tensors = filled(store, 10)
    streams = gpu.streams(3)
    for step in range(20):
        key = f"t{step * 7 % 10}"
        write(gpu, store, key, streams[step % 3], step)
        tensors[key].mul_(step).add_(1)
    for key, tensor in tensors.items():
        same(store.get(key), tensor)
    for key, tensor in tensors.items():
        with store.lease(key) as leased:
            same(leased, tensor)


def test_one_stream_after_the_other_without_the_host(open_store: Open, path: Path | None, gpu: Device) -> None:
    """Write, read, write, read, each queued at once on another stream."""
    store = open_store(path)
    expected = integers(1)
    store.put("t", expected)
    streams = gpu.streams(4)
    results = []
    for step in range(6):
        write(gpu, store, "t", streams[step % 4], step + 2)
        expected = expected * (step + 2) + 1
        results.append((read(gpu, store, "t", streams[(step + 1) % 4])[0], expected))
    gpu.finish()
    for result, wanted in results:
        same(result, wanted + 1)
    same(store.get("t"), expected)


def test_the_host_sees_what_was_queued_before(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    expected = integers(2)
    store.put("t", expected)
    (stream,) = gpu.streams(1)
    for factor in (3, 5):
        write(gpu, store, "t", stream, factor)
        expected = expected * factor + 1
        same(store.get("t"), expected)
        write(gpu, store, "t", stream, factor)
        expected = expected * factor + 1
        with store.lease("t", tier="dram") as tensor:
            same(tensor, expected)
        del tensor


def test_a_put_of_what_is_still_computed(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    (stream,) = gpu.streams(1)
    expected = {}
    for number in range(8):
        expected[f"t{number}"] = integers(number) + 1
        with gpu.use(stream):
            source = integers(number).to(gpu.device)
            gpu.busy()
            source.add_(1)
            store.put(f"t{number}", source)
            source.zero_()
            del source
    for key, tensor in expected.items():
        same(store.get(key), tensor)


def test_put_and_delete_do_not_disturb_a_late_reader(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path)
    reading, putting = gpu.streams(2)
    fresh = integers(50).to(gpu.device)
    gpu.finish()
    for number, how in enumerate(("put host", "put device", "delete") * 2):
        store.put("t", integers(number))
        result, _ = read(gpu, store, "t", reading)
        with gpu.use(putting):
            if how == "delete":
                store.delete("t")
            else:
                store.put("t", integers(51)) if how == "put host" else gpu.put(store, "t", fresh)
            for other in range(6):
                gpu.put(store, f"other{other}", fresh)
        gpu.finish()
        same(result, integers(number) + 1)


def test_an_alias_is_used_after_its_lease_and_dies_before_its_kernel(
    open_store: Open, path: Path | None, gpu: Device
) -> None:
    store = open_store(path)
    tensors = filled(store, 8)
    reading, putting = gpu.streams(2)
    fresh = integers(60).to(gpu.device)
    gpu.finish()
    for key in tensors:
        with gpu.use(reading):
            with store.lease(key) as tensor:
                alias = tensor[COUNT // 2 :]
            del tensor
            gpu.busy()
            result = alias + 1
            del alias
        with gpu.use(putting):
            for other in range(6):
                gpu.put(store, f"other{other}", fresh)
        gpu.finish()
        same(result, tensors[key][COUNT // 2 :] + 1)


@pytest.mark.parametrize("fate", ["evicted", "replaced", "deleted", "closed"])
def test_an_alias_keeps_its_bytes(open_store: Open, path: Path | None, gpu: Device, fate: str) -> None:
    store = open_store(path)
    store.put("a", integers(1))
    with store.lease("a") as a:
        alias = a.view(256, 256)[3:].t()
    del a
    expected = raw(integers(1).view(256, 256)[3:].t())
    if fate == "replaced":
        gpu.put(store, "a", integers(2))
    elif fate == "deleted":
        store.delete("a")
    elif fate == "closed":
        store.close()
    if fate != "closed":
        assert store.statistics().tiers[0].held == 1
        for number in range(12):
            gpu.put(store, f"other{number % 6}", integers(number))
        assert raw(alias) == expected
        del alias
        for number in range(12):
            gpu.put(store, f"other{number % 6}", integers(number))
        assert store.statistics().tiers[0].held == 0
    else:
        junk = [torch.full((MIB,), 7, dtype=torch.uint8, device=gpu.device) for _ in range(4)]
        assert raw(alias) == expected
        del junk


def test_a_store_is_closed_before_a_kernel_has_read(open_store: Open, gpu: Device) -> None:
    """torch may hand the memory on at once."""
    (stream,) = gpu.streams(1)
    for number in range(3):
        store = open_store(None)
        store.put("t", integers(number))
        result, _ = read(gpu, store, "t", stream)
        store.close()
        junk = [torch.full((MIB,), 7, dtype=torch.uint8, device=gpu.device) for _ in range(4)]
        gpu.finish()
        same(result, integers(number) + 1)
        del junk


def test_a_commit_waits_for_what_is_queued(open_store: Open, tmp_path: Path, gpu: Device) -> None:
    store = open_store(tmp_path / "state")
    tensors = filled(store, 6)
    streams = gpu.streams(2)
    for generation in range(1, 3):
        for number, key in enumerate(tensors):
            write(gpu, store, key, streams[number % 2], generation + 1)
            tensors[key].mul_(generation + 1).add_(1)
        assert store.commit({"step": generation}) == generation
    for number, key in enumerate(tensors):
        write(gpu, store, key, streams[number % 2], 9)  # not committed
    store.close()
    again = open_store(tmp_path / "state")
    assert again.meta == {"step": 2}
    for key, tensor in tensors.items():
        same(again.get(key), tensor)


def test_a_commit_copies_what_an_alias_still_shows(open_store: Open, tmp_path: Path, gpu: Device) -> None:
    """What is written through it afterwards is not stored."""
    store = open_store(tmp_path / "state")
    store.put("t", integers(1))
    (stream,) = gpu.streams(1)
    with gpu.use(stream):
        with store.lease("t", access="write") as tensor:
            gpu.busy()
            tensor.add_(1)
            alias = tensor
        del tensor
        store.commit()
        alias.zero_()
    gpu.finish()
    same(store.get("t"), integers(1) + 1)
    del alias
    store.close()
    same(open_store(tmp_path / "state").get("t"), integers(1) + 1)


def test_threads_with_streams_of_their_own(open_store: Open, path: Path | None, gpu: Device) -> None:
    store = open_store(path, hbm=6 * 256 * KIB, eviction=Eviction(deadline=60.0))
    shared = filled(store, 6)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            (stream,) = gpu.streams(1)
            own = integers(1000 + seed)
            store.put(f"own{seed}", own)
            for step in range(12):
                result, _ = read(gpu, store, f"t{(seed + step) % 6}", stream)
                write(gpu, store, f"own{seed}", stream, step + 1)
                own.mul_(step + 1).add_(1)
                with gpu.use(stream):
                    same(result, shared[f"t{(seed + step) % 6}"] + 1)
            same(store.get(f"own{seed}"), own)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_fetch_on_a_stream_sees_what_was_queued_on_it(open_store: Open, gpu: Device) -> None:
    store = open_store(None, hbm="16MiB", dram="16MiB")
    expected = numbers(2 * MIB, 1, torch.int32)
    store.put("t", expected)
    (stream,) = gpu.streams(1)
    write(gpu, store, "t", stream, 3)
    with gpu.use(stream):
        found = asyncio.run(store.fetch("t"))
    gpu.finish()
    same(found, expected * 3 + 1)
