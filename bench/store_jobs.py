"""Ten jobs of a store of tensors, each beside what one would pick for it, within a memory limit and without.

    .venv/bin/python -m bench.store_jobs --rounds 5                      Markdown; minutes
    .venv/bin/python -m bench.store_jobs --job look_up --job update      only these
    .venv/bin/python -m bench.store_jobs --job look_up --blocks          the same table with blocks of several sizes

Jobs: ``dataset`` (256 KiB arrays in random order, one at a time), ``batches`` (64 of them together), ``experts`` (4 MiB
tensors, drawn by Zipf's law), ``look_up`` and ``update`` (512 rows of a table of 256 bytes a row, drawn by Zipf's law over
shuffled rows), ``fill`` (rows of 1 KiB, appended one at a time), ``sample`` (256 rows of them at random), ``put_named`` and
``get_named`` (the same rows by name), ``state`` (save 4 MiB tensors durably, and load them).

Peers: numpy.memmap, with and without MADV_RANDOM; LMDB; safetensors; zarr, uncompressed, one chunk an array. All are as a first
program would use them; LMDB without sync and with one transaction a batch (or a row, in ``fill``).

Each run is a process forked from one that has imported everything. "limit": a memory cgroup that takes twice ``--memory``
and 48 MiB beyond that; tiered's pool is ``--memory``, the peers have the page cache, which is dropped before (tiered reads past
it). "free": no limit, a run before the one that is measured, and a pool that holds all. Runs take turns, and each round begins
with another. Every reader's sum of what it read is compared with the others'. ``fill`` and ``update`` make nothing durable,
``state`` does. The peers are in no list of requirements: pip install lmdb zarr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from bench.limited import drop, enter, memory_cgroup
from tiered import TieredStore
from tiered.cli.output import told_environment
from tiered.measuring.meters import environment, turns
from tiered.types import format_size, parse_size

SEED = 7
MOST = 256
"""Arrays that a run reads, of those that there are."""


@dataclass(frozen=True)
class Sizes:
    """``memory``: the pool's bytes within a limit. Everything else is four times that, the ring of 50,000 rows at most."""

    memory: int
    arrays: int
    experts: int
    rows: int
    ring: int
    steps: int

    @classmethod
    def of(cls, memory: int) -> Sizes:
        whole = 4 * memory
        return cls(memory, whole >> 18, whole >> 22, whole >> 8, min(50_000, whole >> 10), 60)


def array(index: int, count: int = 1 << 16) -> numpy.ndarray[Any, Any]:
    """The array of that number: float32, different for each."""
    return numpy.full(count, index % 977, numpy.float32) + numpy.arange(count, dtype=numpy.float32) / 65_536


class Clock:
    """Seconds and CPU seconds of the measured part, and the sum of what was read."""

    def __init__(self) -> None:
        self.total = 0.0
        self.wall = self.cpu = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        yield
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.wall = time.perf_counter() - began
        self.cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# -- peers: each has what a job asks for ---------------------------------------------------------------------------------------


class Tiered:
    def __init__(self, folder: Path, memory: int, block: str | None = None) -> None:
        self.store, self.block = TieredStore.open(folder / "store", dram=memory), block

    def close(self) -> None:
        self.store.commit()
        self.store.close()

    def put(self, index: int, values: numpy.ndarray[Any, Any]) -> None:
        self.store[f"a{index}"] = values

    def get(self, index: int) -> float:
        return float(self.store.get(f"a{index}").sum())

    def many(self, indices: Sequence[int]) -> float:
        return sum(float(found.sum()) for found in self.store.get_many([f"a{index}" for index in indices]))

    def table(self, rows: int, columns: int) -> None:
        self.rows = self.store.table("t", rows, columns, block=self.block)

    def write(self, begin: int, values: torch.Tensor) -> None:
        self.rows[begin : begin + len(values)] = values

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows.look_up(ids)

    def update(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        self.rows.update(ids, values)

    def append(self, index: int, row: torch.Tensor) -> None:
        self.rows.append(row)

    def save(self, tensors: dict[str, torch.Tensor]) -> None:
        self.store.update(tensors)
        self.store.commit()

    def load(self) -> dict[str, torch.Tensor]:
        keys = list(self.store)
        return dict(zip(keys, self.store.get_many(keys), strict=True))


class TieredSmall(Tiered):
    """Rows by name, in pages."""

    def __init__(self, folder: Path, memory: int) -> None:
        super().__init__(folder, memory)
        self.small = self.store.small("rows")

    def put_named(self, name: str, row: torch.Tensor) -> None:
        self.small[name] = row

    def put_all_named(self, rows: dict[str, torch.Tensor]) -> None:
        self.small.update(rows)

    def named(self, names: Sequence[str]) -> torch.Tensor:
        return self.small.stack(names)


class TieredLeases(Tiered):
    """Without copies: values are used where the store has them."""

    def get(self, index: int) -> float:
        with self.store.lease(f"a{index}") as found:
            total = float(found.sum())
        del found
        return total

    def many(self, indices: Sequence[int]) -> float:
        with self.store.lease([f"a{index}" for index in indices]) as found:
            total = sum(float(one.sum()) for one in found)
        del found
        return total


class Memmap:
    advice: int | None = None

    def __init__(self, folder: Path, memory: int) -> None:
        self.folder, self.maps = folder, dict[str, numpy.ndarray[Any, Any]]()

    def close(self) -> None:
        for mapped in self.maps.values():
            mapped.flush()  # type: ignore[attr-defined]

    def mapped(self, name: str, shape: tuple[int, ...] = ()) -> numpy.ndarray[Any, Any]:
        if name not in self.maps:
            path, about = self.folder / f"{name}.bin", self.folder / f"{name}.json"
            if shape:
                about.write_text(json.dumps(shape))
            shape = tuple(json.loads(about.read_text()))
            found = numpy.memmap(path, numpy.float32, "r+" if path.exists() else "w+", shape=shape)
            if self.advice is not None:
                found._mmap.madvise(self.advice)  # type: ignore[attr-defined]
            self.maps[name] = found
        return self.maps[name]

    def begin(self, count: int, elements: int) -> None:
        self.mapped("arrays", (count, elements))

    def put(self, index: int, values: numpy.ndarray[Any, Any]) -> None:
        self.mapped("arrays")[index] = values

    def get(self, index: int) -> float:
        return float(torch.from_numpy(numpy.array(self.mapped("arrays")[index])).sum())

    def many(self, indices: Sequence[int]) -> float:
        return sum(self.get(index) for index in indices)

    def table(self, rows: int, columns: int) -> None:
        self.mapped("table", (rows, columns))

    def write(self, begin: int, values: torch.Tensor) -> None:
        self.mapped("table")[begin : begin + len(values)] = values.numpy()

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.mapped("table")[ids.numpy()])

    def update(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        self.mapped("table")[ids.numpy()] = values.numpy()

    def append(self, index: int, row: torch.Tensor) -> None:
        self.mapped("table")[index] = row.numpy()


class MemmapRandom(Memmap):
    advice = mmap.MADV_RANDOM


class Lmdb:
    def __init__(self, folder: Path, memory: int) -> None:
        import lmdb

        self.environment = lmdb.open(str(folder / "lmdb"), map_size=1 << 34, sync=False, readahead=False)
        self.columns = 0

    def close(self) -> None:
        self.environment.sync(True)
        self.environment.close()

    def put(self, index: int, values: numpy.ndarray[Any, Any]) -> None:
        with self.environment.begin(write=True) as change:
            change.put(b"%08d" % index, values.tobytes())

    def get(self, index: int) -> float:
        with self.environment.begin(buffers=True) as read:
            return float(torch.from_numpy(numpy.frombuffer(read.get(b"%08d" % index), numpy.float32).copy()).sum())

    def many(self, indices: Sequence[int]) -> float:
        total = 0.0
        with self.environment.begin(buffers=True) as read:
            for index in indices:
                total += float(torch.from_numpy(numpy.frombuffer(read.get(b"%08d" % index), numpy.float32).copy()).sum())
        return total

    def table(self, rows: int, columns: int) -> None:
        self.columns = columns

    def write(self, begin: int, values: torch.Tensor) -> None:
        with self.environment.begin(write=True) as change:
            for place, row in enumerate(values.numpy()):
                change.put(b"%08d" % (begin + place), row.tobytes(), append=True)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        found = numpy.empty((len(ids), self.columns), numpy.float32)
        with self.environment.begin(buffers=True) as read:
            for place, row in enumerate(ids.tolist()):
                found[place] = numpy.frombuffer(read.get(b"%08d" % row), numpy.float32)
        return torch.from_numpy(found)

    def update(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        with self.environment.begin(write=True) as change:
            for row, given in zip(ids.tolist(), values.numpy(), strict=True):
                change.put(b"%08d" % row, given.tobytes())

    def append(self, index: int, row: torch.Tensor) -> None:
        with self.environment.begin(write=True) as change:
            change.put(b"%08d" % index, row.numpy().tobytes())

    def put_named(self, name: str, row: torch.Tensor) -> None:
        with self.environment.begin(write=True) as change:
            change.put(name.encode(), row.numpy().tobytes())

    def put_all_named(self, rows: dict[str, torch.Tensor]) -> None:
        with self.environment.begin(write=True) as change:
            for name, row in rows.items():
                change.put(name.encode(), row.numpy().tobytes())

    def named(self, names: Sequence[str]) -> torch.Tensor:
        with self.environment.begin(buffers=True) as read:
            rows = [numpy.frombuffer(read.get(name.encode()), numpy.float32) for name in names]
            return torch.from_numpy(numpy.stack(rows))


class Safetensors:
    def __init__(self, folder: Path, memory: int) -> None:
        self.path, self.written = folder / "arrays.safetensors", dict[str, torch.Tensor]()
        self.opened: Any = None

    def close(self) -> None:
        from safetensors.torch import save_file

        if self.written:
            save_file(self.written, self.path)

    def put(self, index: int, values: numpy.ndarray[Any, Any]) -> None:
        self.written[f"a{index}"] = torch.from_numpy(values)

    def get(self, index: int) -> float:
        from safetensors import safe_open

        if self.opened is None:
            self.opened = safe_open(self.path, "pt")
        return float(self.opened.get_tensor(f"a{index}").sum())

    def many(self, indices: Sequence[int]) -> float:
        return sum(self.get(index) for index in indices)

    def save(self, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        save_file(tensors, self.path)
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def load(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.path)


class TorchSave(Safetensors):
    def __init__(self, folder: Path, memory: int) -> None:
        super().__init__(folder, memory)
        self.path = folder / "state.pt"  # torch.load goes by the name

    def save(self, tensors: dict[str, torch.Tensor]) -> None:
        torch.save(tensors, self.path)
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def load(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.path)
        return found


class Zarr:
    def __init__(self, folder: Path, memory: int) -> None:
        self.path, self.opened = folder / "arrays.zarr", None

    def close(self) -> None:
        pass

    def begin(self, count: int, elements: int) -> None:
        import zarr

        shapes = {"shape": (count, elements), "chunks": (1, elements)}
        self.opened = zarr.create_array(str(self.path), dtype="float32", compressors=None, **shapes)

    def put(self, index: int, values: numpy.ndarray[Any, Any]) -> None:
        self.opened[index] = values  # type: ignore[index]

    def get(self, index: int) -> float:
        import zarr

        if self.opened is None:
            self.opened = zarr.open_array(str(self.path), mode="r")
        return float(torch.from_numpy(self.opened[index]).sum())  # type: ignore[index]

    def many(self, indices: Sequence[int]) -> float:
        return sum(self.get(index) for index in indices)


ARRAYS = {
    "tiered": Tiered,
    "tiered, leases": TieredLeases,
    "memmap": Memmap,
    "memmap, MADV_RANDOM": MemmapRandom,
    "LMDB": Lmdb,
    "safetensors": Safetensors,
    "zarr": Zarr,
}
ROWS = {"tiered": Tiered, "memmap": Memmap, "memmap, MADV_RANDOM": MemmapRandom, "LMDB": Lmdb}
NAMED = {"tiered, small tensors": TieredSmall, "LMDB": Lmdb}
STATE = {"tiered": Tiered, "safetensors": Safetensors, "torch.save": TorchSave}


# -- jobs: ``make`` writes what ``run`` uses; ``run`` returns how many operations that was -------------------------------------


def zipf(count: int, draws: int, seed: int) -> torch.Tensor:
    """Draws by Zipf's law (exponent 1) from shuffled numbers."""
    generator = numpy.random.default_rng(seed)
    weights = 1 / numpy.arange(1.0, count + 1)
    places = numpy.searchsorted(numpy.cumsum(weights) / weights.sum(), generator.random(draws)).clip(max=count - 1)
    return torch.from_numpy(numpy.random.default_rng(SEED).permutation(count)[places])


def make_arrays(peer: Any, count: int, elements: int) -> None:
    if hasattr(peer, "begin"):
        peer.begin(count, elements)
    for index in range(count):
        peer.put(index, array(index, elements))


def run_dataset(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    order = random.Random(seed).sample(range(sizes.arrays), min(sizes.arrays, MOST))
    with clock.running():
        clock.total = sum(map(peer.get, order))
    return len(order)


def run_batches(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    order = random.Random(seed).sample(range(sizes.arrays), min(sizes.arrays, MOST))
    batches = [order[at : at + 64] for at in range(0, len(order), 64)]
    with clock.running():
        clock.total = sum(map(peer.many, batches))
    return len(batches)


def run_experts(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    order = zipf(sizes.experts, 4 * sizes.experts, seed).tolist()
    with clock.running():
        clock.total = sum(map(peer.get, order))
    return len(order)


def make_table(peer: Any, sizes: Sizes) -> None:
    peer.table(sizes.rows, 64)
    for begin in range(0, sizes.rows, 1 << 14):
        ids = torch.arange(begin, min(sizes.rows, begin + (1 << 14)))
        peer.write(begin, (ids % 9973).float()[:, None].expand(-1, 64).contiguous())


def run_look_up(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    peer.table(sizes.rows, 64)
    batches = zipf(sizes.rows, sizes.steps * 512, seed).split(512)
    with clock.running():
        clock.total = sum(float(peer.look_up(ids)[:, 0].double().sum()) for ids in batches)
    return len(batches)


def run_update(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    peer.table(sizes.rows, 64)
    batches = zipf(sizes.rows, sizes.steps * 512, seed).split(512)
    values = torch.ones(512, 64)
    with clock.running():
        for ids in batches:
            peer.update(ids, values)
    clock.total = float(peer.look_up(batches[0]).double().sum())
    return len(batches)


def run_fill(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    rows = torch.arange(256.0)[None] + torch.arange(97.0)[:, None]
    peer.table(sizes.ring, 256)
    with clock.running():
        for index in range(sizes.ring):
            peer.append(index, rows[index % 97])
    clock.total = float(peer.look_up(torch.tensor([0, 5, sizes.ring - 1])).double().sum())
    return sizes.ring


def make_ring(peer: Any, sizes: Sizes) -> None:
    peer.table(sizes.ring, 256)
    for begin in range(0, sizes.ring, 1 << 12):
        peer.write(begin, torch.arange(begin, min(sizes.ring, begin + (1 << 12))).float()[:, None].expand(-1, 256).contiguous())


def run_sample(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    peer.table(sizes.ring, 256)
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, sizes.ring, (256,), generator=generator) for _ in range(sizes.steps)]
    with clock.running():
        clock.total = sum(float(peer.look_up(ids)[:, 0].double().sum()) for ids in batches)
    return len(batches)


def name_of(index: int) -> str:
    return f"users/{index * 7919 % 1_000_003}"


def run_put_named(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    rows = torch.arange(256.0)[None] + torch.arange(97.0)[:, None]
    with clock.running():
        for index in range(sizes.ring):
            peer.put_named(name_of(index), rows[index % 97])
    return sizes.ring


def make_named(peer: Any, sizes: Sizes) -> None:
    for begin in range(0, sizes.ring, 1 << 12):
        end = min(sizes.ring, begin + (1 << 12))
        peer.put_all_named({name_of(index): torch.full((256,), float(index)) for index in range(begin, end)})


def run_get_named(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, sizes.ring, (256,), generator=generator).tolist() for _ in range(sizes.steps)]
    named = [[name_of(index) for index in ids] for ids in batches]
    with clock.running():
        clock.total = sum(float(peer.named(names)[:, 0].double().sum()) for names in named)
    return len(batches)


def run_state(peer: Any, sizes: Sizes, clock: Clock, seed: int) -> int:
    tensors = {f"a{index}": torch.from_numpy(array(index + seed, 1 << 20)) for index in range(sizes.experts // 4)}
    with clock.running():
        peer.save(tensors)
        clock.total = sum(float(found[0]) for found in peer.load().values())
    return 1


@dataclass(frozen=True)
class Job:
    """``make`` None: each run begins with an empty folder. ``unit``: what one operation is."""

    peers: dict[str, Any]
    make: Callable[[Any, Sizes], None] | None
    run: Callable[[Any, Sizes, Clock, int], int]
    unit: str


JOBS = {
    "dataset": Job(ARRAYS, lambda peer, sizes: make_arrays(peer, sizes.arrays, 1 << 16), run_dataset, "array"),
    "batches": Job(ARRAYS, lambda peer, sizes: make_arrays(peer, sizes.arrays, 1 << 16), run_batches, "batch of 64"),
    "experts": Job(ARRAYS, lambda peer, sizes: make_arrays(peer, sizes.experts, 1 << 20), run_experts, "tensor"),
    "look_up": Job(ROWS, make_table, run_look_up, "batch of 512"),
    "update": Job(ROWS, make_table, run_update, "batch of 512"),
    "fill": Job(ROWS, None, run_fill, "row"),
    "sample": Job(ROWS, make_ring, run_sample, "batch of 256"),
    "put_named": Job(NAMED, None, run_put_named, "row"),
    "get_named": Job(NAMED, make_named, run_get_named, "batch of 256"),
    "state": Job(STATE, None, run_state, "state"),
}


# -- runs ----------------------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], dict[str, Any]], group: Path | None = None) -> dict[str, Any]:
    """Run ``work`` in a forked process, within ``group``; return what it returns, or {"failed": why}."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            enter(group)
            found = work()
        except BaseException as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:200]}
        os.write(writing, json.dumps(found).encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(said) if said else {"failed": f"ended by signal {os.waitstatus_to_exitcode(status)}"}


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def made(kind: Any, job: Job, sizes: Sizes, folder: Path) -> dict[str, Any]:
    peer = kind(folder, 2 * sizes.memory)
    assert job.make is not None
    job.make(peer, sizes)
    peer.close()
    return {}


def measured(kind: Any, job: Job, sizes: Sizes, folder: Path, memory: int, warm: int | None, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    peer, clock = kind(folder, memory), Clock()
    if warm is not None:
        job.run(peer, sizes, Clock(), warm)
    count = job.run(peer, sizes, clock, seed)
    peer.close()
    return {"wall": clock.wall / count, "cpu": clock.cpu / count, "sum": clock.total}


def blocks(name: str) -> dict[str, Any]:
    """Tables whose blocks have several sizes."""

    def of(size: str) -> Callable[[Path, int], Tiered]:
        return lambda folder, memory: Tiered(folder, memory, size)

    assert name in ("look_up", "update", "sample", "fill")
    return {f"blocks of {size}": of(size) for size in ("8KiB", "16KiB", "32KiB", "64KiB", "128KiB")}


def compare(name: str, kinds: dict[str, Any], sizes: Sizes, rounds: int, place: Path, group: Path | None, mode: str) -> None:
    """Run one job in one mode, and print its rows."""
    job, found = JOBS[name], {kind: list[dict[str, Any]]() for kind in kinds}
    folders = {kind: place / str(number) for number, kind in enumerate(kinds)}
    for kind, folder in folders.items():
        folder.mkdir()
        if job.make is not None:
            failed = in_child(partial(made, kinds[kind], job, sizes, folder))
            if failed:
                found[kind].append(failed)
    memory, warm = (sizes.memory, None) if mode == "limit" else (6 * sizes.memory, 1)
    for number, order in turns(list(kinds), rounds):
        for kind in order:
            folder = folders[kind]
            if any("failed" in run for run in found[kind]):
                continue
            if job.make is None:
                shutil.rmtree(folder)
                folder.mkdir()
            if mode == "limit":
                drop(folder)
            once = warm if job.make is not None else None
            work = partial(measured, kinds[kind], job, sizes, folder, memory, once, number + 2)
            found[kind].append(in_child(work, group if mode == "limit" else None))
    sums = [{run.get("sum") for kind in kinds for run in found[kind][at : at + 1] if "sum" in run} for at in range(rounds)]
    for each in sums:
        assert max(each) - min(each) <= 1e-3 * max(map(abs, each)), f"{name}: {each}"  # float32 sums of arrays
    for kind, runs in found.items():
        failed = next((run["failed"] for run in runs if "failed" in run), None)
        if failed is not None:
            print(f"| {name} | {mode} | {kind} | {failed} | | | |", flush=True)
            continue
        walls, cpus = sorted(run["wall"] * 1e3 for run in runs), [run["cpu"] * 1e3 for run in runs]
        least, most = told(walls[0]), told(walls[-1])
        size = format_size(disk_bytes(folders[kind]))
        print(
            f"| {name} | {mode} | {kind} | {told(statistics.median(walls))} [{least}, {most}] | "
            f"{told(statistics.median(cpus))} | {job.unit} | {size} |",
            flush=True,
        )
    for folder in folders.values():
        shutil.rmtree(folder)


def told(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--job", action="append", choices=list(JOBS), help="only this one; may be given more than once")
    parser.add_argument("--mode", action="append", choices=["limit", "free"], help="default: both")
    parser.add_argument("--memory", type=parse_size, default=64 << 20, help="the pool within a limit (default: 64MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", action="store_true", help="tables with blocks of several sizes, in place of peers")
    parser.add_argument("--with", action="append", dest="peers", metavar="NAME", help="only these, such as tiered and LMDB")
    options = parser.parse_args()
    sizes = Sizes.of(options.memory)
    print(told_environment(environment()) + "\n")
    print(f"{format_size(sizes.memory)} of memory; medians of {options.rounds} rounds [least, most]\n")
    print("| job | memory | with | ms | CPU ms | for one | on the disk |\n|---|---|---|---:|---:|---|---:|")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder, memory_cgroup(2 * sizes.memory + (48 << 20)) as group:
        for name in options.job or JOBS:
            for mode in options.mode or ("limit", "free"):
                if mode == "limit" and group is None:
                    print(f"| {name} | limit | no memory cgroup can be made here | | | | |")
                    continue
                place = Path(folder, f"{name}-{mode}")
                place.mkdir()
                kinds = blocks(name) if options.blocks else JOBS[name].peers
                kinds = {kind: peer for kind, peer in kinds.items() if options.peers is None or kind in options.peers}
                compare(name, kinds, sizes, options.rounds, place, group, mode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
