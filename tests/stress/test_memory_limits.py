"""Promise 23: what a process takes beside the pool stays within what was said, or the call is refused before it begins.

A forked child is put under a memory cgroup whose limit goes from generous to too small, and builds, pages, loads, trains or
exports a model that is larger than all that it may have. It ends with the very bytes of a run without a limit, or with a
CapacityError that names the limit; the kernel never kills it. Where the limit holds what was said, it must end right. Sizes are
beyond what the process has after its imports: its own pages are made private before it enters the cgroup, and count elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import mmap
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import xxhash
from torch import nn

from tests.stress.cgroups import cgroup, enter
from tests.stress.children import forked
from tests.stress.contents import content
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tiered import CapacityError, TensorSpec, TieredStore, zero
from tiered.format.safetensors import entry_of
from tiered.format.safetensors_writer import Shards
from tiered.system import anonymous
from tiered.zero.paging.pager import placement_of

PROMISE = "23 (memory beside the pool)"
MIB = 1 << 20
POOL = 64 * MIB
OPEN = 8 * MIB + POOL // 256
PIECES = 10 * MIB
TABLE = POOL + (16 + 64) * MIB + PIECES
"""By the rows of docs/memory.md, which are sharper than the sum: the largest parameter or gradient, freed memory, pieces."""
FREED_COPIES = 16 * MIB
LIBRARIES = 20 * MIB
"""Buffers of MKL and oneDNN, in training."""
KERNEL = 8 * MIB
"""What the kernel has in the cgroup for the process: tables of pages, inodes."""
ACTIVATIONS = 2 * MIB

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="making a cgroup needs root"),
    pytest.mark.skipif(psutil.swap_memory().total > 0, reason="with swap a limit of memory is none"),
]


def said_of(pool: int) -> int:
    """Bytes beyond the imports that are promised (DESIGN, "Memory")."""
    return pool + pool // 10 + 128 * MIB


class Model(nn.Module):
    """224 MiB of parameters: two of 16 MiB, and 24 of 8 MiB."""

    def __init__(self, width: int = 1024, pairs: int = 12, words: int = 4096) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(pairs))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(pairs))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.head(x)


def blank(pairs: int = 12) -> Model:
    with torch.device("meta"):
        return Model(pairs=pairs)


# -- what is done under a limit, and leaves in the store what can be compared ------------------------------------------


def build(store: TieredStore, folder: Path) -> None:
    torch.manual_seed(0)
    with zero.init(store):
        model = Model()
        for parameter in model.parameters():  # as models are initialised, a second time
            parameter.data.normal_(0, 0.02)
    zero.page(model, store)


def page(store: TieredStore, folder: Path) -> None:
    torch.manual_seed(0)
    zero.page(blank(), store)


def load(store: TieredStore, folder: Path) -> None:
    zero.page(blank(), store, weights=folder / "weights")


def train(store: TieredStore, folder: Path, pairs: int = 3) -> None:
    """What is larger than all that it may have are 80 MiB of parameters and their states, together."""
    torch.manual_seed(0)
    model = zero.page(blank(pairs), store)
    optimizer = zero.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(4) + step).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    optimizer.flush()


def train_large(store: TieredStore, folder: Path) -> None:
    train(store, folder, 12)


def export(store: TieredStore, folder: Path) -> None:
    torch.manual_seed(0)
    model = zero.page(blank(), store)
    try:
        zero.export(model, folder / "out", shard="100MB", dtype=torch.bfloat16)
    finally:
        shutil.rmtree(folder / "out", ignore_errors=True)


Work = Callable[[TieredStore, Path], None]

KINDS: dict[str, Work] = {found.__name__: found for found in (build, page, load, train, train_large, export)}


def large() -> Model:
    """Of 2,932 MiB: two parameters of 250 MiB, and 76 of 32."""
    with torch.device("meta"):
        return Model(2048, 38, 32000)


def load_large(store: TieredStore, folder: Path) -> None:
    model = zero.page(large(), store, weights=folder / "large")
    for name, parameter in model.named_parameters():
        pager, unit, placement = placement_of(parameter)
        pager.take(unit)
        stored = placement.flat(unit.base, 0, placement.numel).view(torch.uint8)
        for start in range(0, placement.nbytes, 4 * MIB):  # what they repeat is a part of that
            piece = stored[start : start + 4 * MIB]
            assert torch.equal(piece, values(name, len(piece))), f"{name} from byte {start:,}"
            del piece
        del stored
        unit.drop()


# -- the child ---------------------------------------------------------------------------------------------------------------


def own_pages() -> None:
    """Of a forked child: what it shares with its parent until it writes would otherwise come to count as it goes on. What its
    parent freed is not there for it to take."""
    populate = 23  # MADV_POPULATE_WRITE, Linux 5.14
    libc = ctypes.CDLL(None)
    madvise = libc.madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, *_ = line.split()
        if rights == "rw-p":
            start, stop = (int(number, 16) for number in where.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), populate)
    libc.malloc_trim(0)


def limited(work: Work, folder: Path, into: Path | None, pool: int) -> Callable[[Child], None]:
    def body(child: Child) -> None:
        warm = nn.Linear(64, 64)
        warm(torch.ones(4, 64)).sum().backward()
        if into is not None:
            own_pages()
        child.say(str(anonymous()))
        child.say("begin")
        if into is not None:
            enter(into)
        state = folder / "state"
        try:
            with TieredStore.open(state, dram=pool) as store:
                work(store, folder)
                digest = xxhash.xxh3_128()
                for key in sorted(store):
                    with store.lease(key) as tensor:
                        digest.update(key.encode())
                        digest.update(tensor.view(torch.uint8).numpy().data)
                        del tensor
                store.close()
            child.say(f"right: {digest.hexdigest()}")
        except CapacityError as error:
            child.say(f"refused: {error}")

    return body


@dataclass
class Ended:
    code: int
    said: str
    peak: int


def under(limit: int | None, work: Work, folder: Path, pool: int = POOL) -> Ended:
    with contextlib.ExitStack() as stack:
        into = None if limit is None else stack.enter_context(cgroup(limit))
        with forked(limited(work, folder, into, pool), patience=1800.0) as running:
            peak, over = [0], threading.Event()

            def watch() -> None:
                with contextlib.suppress(OSError, IndexError):
                    while not over.is_set():
                        pages = Path(f"/proc/{running.pid}/statm").read_text().split()
                        peak[0] = max(peak[0], (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE)
                        over.wait(0.001)

            running.wait_for("begin")
            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                code = running.wait_end()
            finally:
                over.set()
                watcher.join()
    shutil.rmtree(folder / "state", ignore_errors=True)
    return Ended(code, running.said[-1], peak[0] - int(running.said[0]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a pretrained model's files; the compiler that torch imports for its optimizers is there, too."""
    importlib.import_module("torch._dynamo")
    folder = tmp_path_factory.mktemp("memory")
    write_weights(blank(), folder / "weights")
    yield folder
    shutil.rmtree(folder)


def write_weights(model: nn.Module, folder: Path) -> None:
    entries = [entry_of(name, TensorSpec("float32", tuple(p.shape), 4)) for name, p in model.named_parameters()]
    files = Shards(folder, entries, "500MB", "refuse")
    files.write((values(entry.name, entry.spec.nbytes).numpy().data for entry in entries), None)


def values(name: str, nbytes: int) -> torch.Tensor:
    """Finite ones."""
    return content(name, 0, nbytes).bitwise_and_(0x3B)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("train", 1)]
    + [pytest.param(kind, 1, marks=pytest.mark.soak) for kind in ("load", "export", "build", "page")]
    + [pytest.param(kind, 50, marks=pytest.mark.soak) for kind in KINDS if kind != "train"],
)
def test_limits(kind: str, weights: Path, count: int, tally: Tally) -> None:
    """From 24 MiB, where nothing fits, to 318 MiB, where all does; where only the store can be opened; and at exactly what was
    said."""
    free = under(None, KINDS[kind], weights)
    assert free.code == 0, free
    assert free.said.startswith("right"), free
    said, most = said_of(POOL), 0
    for limit in [*((24 + 6 * number) * MIB for number in range(count)), 100 * MIB, said + ACTIVATIONS + KERNEL]:
        limit = limit // 4096 * 4096
        ended = under(limit, KINDS[kind], weights)
        assert ended.code == 0, f"{kind} under {limit:,}: {ended}"
        if ended.said.startswith("refused"):
            numbers = [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*\d", ended.said)]
            assert limit in numbers, ended
            assert limit < said + ACTIVATIONS + KERNEL, f"what was said is refused: {ended}"
            tally.count("a limit", 1)
        else:
            assert ended.said == free.said, f"{kind} under {limit:,}"
            most = max(most, ended.peak)
            tally.ran()
    print(f"{kind}: at most {most / MIB:.1f} MiB beyond the imports, of {said / MIB:.1f}")
    assert 0 < most <= said + ACTIVATIONS
    assert most <= TABLE + (LIBRARIES + ACTIVATIONS if kind.startswith("train") else 0)


def copies(store: TieredStore, rounds: int, threads: int) -> None:
    """Loops of one's own, each of which has the last copy while it asks for the next one."""
    source = random.Random(rounds)
    sizes = [source.randrange(64 << 10 << octave, 128 << 10 << octave) & ~3 for octave in range(8) for _ in range(3)]
    keys = [f"{number}" for number in range(len(sizes))]
    for key, nbytes in zip(keys, sizes, strict=True):
        store.put(key, torch.full((nbytes // 4,), int(key), dtype=torch.int32))
    small = [key for key, nbytes in zip(keys, sizes, strict=True) if nbytes < 2 * MIB]

    def right(key: str, tensor: torch.Tensor) -> None:
        assert tensor[0] == tensor[-1] == int(key), key

    def loop(thread: int) -> None:
        source = random.Random(thread)
        out = torch.empty(sizes[12] // 4, dtype=torch.int32)
        for number in range(rounds // threads):
            key = source.choice(keys)
            if number % 8 == 0:
                tensor = asyncio.run(store.fetch(key))
            elif number % 8 == 1:
                several = source.sample(small, 2)
                for key, tensor in zip(several, store.get_many(several), strict=True):
                    right(key, tensor)
            elif number % 8 == 2:
                right(keys[12], store.get(keys[12], out=out))
                continue
            else:
                tensor = store.get(key)
            right(key, tensor)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(loop, range(threads)))


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.soak), 4])
@counts(40, 1000)
def test_loops_that_copy(tmp_path: Path, threads: int, count: int, tally: Tally) -> None:
    """Copies of 64 KiB to 16 MiB, in a cgroup of what was said and what the caller has at a time."""
    callers = 2 * threads * 16 * MIB
    ended = under(said_of(POOL) + KERNEL + callers, lambda store, folder: copies(store, count, threads), tmp_path)
    assert ended.code == 0, ended
    assert ended.said.startswith("right"), ended
    print(f"{count} rounds in {threads} threads: at most {ended.peak / MIB:.1f} MiB beyond the imports")
    heap = 2 * (OPEN + PIECES)  # which may keep as much as was in use at once
    assert ended.peak <= POOL + callers + FREED_COPIES + heap, "by the rows of docs/memory.md"
    for _ in range(count):
        tally.ran()


@counts(4, 50)
def test_open(tmp_path: Path, count: int, tally: Tally) -> None:
    """Limits around the pool: it is refused, or used to its last byte."""

    def body(limit: Path) -> Callable[[Child], None]:
        def use(child: Child) -> None:
            own_pages()
            enter(limit)
            try:
                with TieredStore.open(tmp_path / "state", dram=POOL) as store:
                    for index in range(2 * POOL // MIB):
                        store.put(str(index), torch.full((MIB,), index, dtype=torch.uint8))
                    assert store.statistics().tier("dram").peak == POOL
                    store.close()
                child.say("right")
            except CapacityError as error:
                child.say(f"refused: {error}")

        return use

    for number in range(count):
        limit = POOL + ((number - count // 4) * 32 // count) * MIB
        with cgroup(limit) as folder, forked(body(folder)) as running:
            assert running.wait_end() == 0, f"{limit:,}: {running.said}"
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        if running.said == ["right"]:
            tally.ran()
        else:
            assert re.match(f"refused: a DRAM budget of {POOL:,} bytes.* its limit of {limit:,}", running.said[0]), running.said
            assert limit < POOL + 20 * MIB, running.said
            tally.count("a limit", 1)


@pytest.mark.soak
def test_a_model_of_3_gb_in_a_pool_of_1700_mib(tmp_path: Path, tally: Tally) -> None:
    """From safetensors, under a limit of exactly what is said."""
    write_weights(large(), tmp_path / "large")
    pool = 1700 * MIB
    limit = said_of(pool) + KERNEL
    ended = under(limit, load_large, tmp_path, pool)
    assert ended.code == 0, ended
    assert ended.said.startswith("right"), ended
    print(f"at most {ended.peak / MIB:.1f} MiB beyond the imports, of {said_of(pool) / MIB:.1f}")
    assert ended.peak <= said_of(pool)
    tally.ran()
    ended = under(limit - 64 * MIB, load_large, tmp_path, pool)
    assert ended.code == 0, ended
    assert ended.said.startswith("refused: paging this model may take"), ended
    tally.count("a limit", 1)
