"""Measure a machine for plans: drive, memory, processor, and what paging costs per tensor. Takes some ten seconds."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Literal

import psutil
import torch
import xxhash
from torch import nn

from tiered import zero
from tiered.errors import MisuseError
from tiered.measuring.meters import measure, scratch_folder, scratch_store
from tiered.planning.machine import Machine
from tiered.store import TieredStore
from tiered.types import PIECE_BYTES

__all__ = ["measured_machine"]

POOL = 64 << 20
SMALL, MANY = 16 << 10, 256
"""Bytes of a small tensor, and how many are read to see what one takes beside its bytes."""
PRODUCT = (512, 1024, 2048)
LONG = 2.0
"""Seconds after which a piece of work is not timed again."""
MOVED = 64 << 20
"""Bytes of an operand that is only moved: larger than caches."""
UPDATED = 1 << 20
"""Parameters of a layer that is updated."""
STREAMED, UPDATES = 16 << 20, 20
"""Bytes of the pool in which updates are timed: two thirds of the states of two such layers; and how many steps."""
ROWS = 128
"""Rows of the batch meanwhile: computing uses the caches of the processor, too, as it does while a model trains."""
HASHED = 256 << 20
"""Bytes of memory whose checksums are computed: more than caches have."""
UNITS, WIDTH = 24, 320
STEPS = 15
TURNS = 3
"""Times that updates and leases are measured, in turns; the median counts. Other programs, and other virtual machines on the
same processor, make some seconds slower by a factor of five."""
RESIDENT = 96 << 20
"""Bytes of a pool that has such a model with its states."""


def measured_machine(
    folder: str,
    *,
    progress: Callable[[str, float], object] = lambda what, share: None,
    of: Literal["training", "generation"] = "training",
) -> Machine:
    """Measure this machine with a scratch store in ``folder``; ``progress`` is called with what is measured next, and the share
    of all that was, and may raise, to stop. ``of`` what the machine is planned for: generation updates nothing, and updates are
    not measured for it.

    Raises MisuseError where the folder cannot have a store, or its filesystem has no room.
    """
    with scratch_folder(folder):
        progress("measuring what a process takes", 0.0)
    import_module("torch._dynamo")  # torch imports it with its first optimizer, so it is part of what a process takes
    ones = torch.ones(512, 512, dtype=torch.float32, device="cpu")
    (ones @ ones).sum()  # and the buffers of its libraries
    base = psutil.Process().memory_info().rss
    progress("measuring the drive", 0.1)
    with scratch_store(folder, dram=POOL) as store:
        rates = measure(store)
        if rates is None:
            raise MisuseError(f"{folder} has no room for a measurement: free some, or name another folder with --drive")
        progress("measuring the drive with small tensors", 0.3)
        transfer = _transfer(store, rates.read)
    progress("measuring the processor", 0.35)
    flops, half = _product(torch.float32), _product(torch.bfloat16)
    half_backward = _product(torch.bfloat16, backward=True) if of == "training" else half
    progress("measuring the memory", 0.45)
    a, b = (torch.ones(MOVED // 4, dtype=torch.float32, device="cpu") for _ in range(2))
    memory = 3 * MOVED / _least(lambda: a + b, 15)
    one = torch.ones(4, dtype=torch.float32, device="cpu", requires_grad=True)
    operation = statistics.median(_seconds(lambda: one + 1) for _ in range(500))
    hashing = _hashing()
    updates, leases = [], []
    for turn in range(TURNS):
        if of == "training":
            progress(f"measuring updates, {turn + 1} of {TURNS}", 0.5 + turn / 2 / TURNS)
            updates.append(_update(folder, hashing))
        progress(f"measuring leases, {turn + 1} of {TURNS}", 0.5 + (turn + 0.5) / 2 / TURNS)
        leases.append(_lease(folder))
    lease = statistics.median(leases)
    machine = Machine(
        read=rates.read,
        write=rates.write,
        transfer=transfer,
        dram=psutil.virtual_memory().total,
        flops=flops,
        flops_half=half,
        flops_half_backward=half_backward,
        memory=memory,
        operation=operation,
        lease=lease,
        gradient=lease,
        hashing=hashing,
        threads=torch.get_num_threads(),
        cores=psutil.cpu_count() or 1,
        base=base,
        name=f"{platform.node()}, {psutil.cpu_count()} cores, {torch.get_num_threads()} threads",
    )
    if of == "generation":
        return machine
    update, handling = (statistics.median(one) for one in zip(*updates, strict=True))
    return machine.but(update=update, handling=handling)


def _least(work: Callable[[], object], times: int) -> float:
    """Return the least seconds of ``work``, after one call that does not count: other programs only make it longer. Once these
    take ``LONG`` seconds together there is no other call."""
    work()
    found = [_seconds(work)]
    while len(found) < times and sum(found) < LONG:
        found.append(_seconds(work))
    return min(found)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _product(dtype: torch.dtype, *, backward: bool = False) -> float:
    """Return operations a second of the product of a linear layer, or of its two of a backward pass. They are other routines:
    without instructions for bf16 a product by a matrix that is not transposed may take twenty times as long."""
    rows, inner, columns = PRODUCT
    shapes = (rows, inner), (columns, inner), (rows, columns)
    x, weight, gradient = (torch.ones(shape, dtype=dtype, device="cpu") for shape in shapes)
    if not backward:
        return 2.0 * rows * inner * columns / _least(lambda: torch.nn.functional.linear(x, weight), 9)
    return 4.0 * rows * inner * columns / _least(lambda: (gradient @ weight, gradient.T @ x), 9)


def _transfer(store: TieredStore, rate: float) -> float:
    """Return the seconds that a small tensor takes to be read, beside its bytes."""
    keys = [f"small/{number}" for number in range(MANY)]
    for key in keys:
        store.put(key, torch.zeros(SMALL, dtype=torch.uint8, device="cpu"))
    taken = []
    for _ in range(3):
        store.offload(keys)
        began = time.perf_counter()
        store.prefetch(keys)
        for key in keys:
            with store.lease(key):
                pass
        taken.append(time.perf_counter() - began)
    for key in keys:
        store.delete(key)
    return max(1e-6, statistics.median(taken) / MANY - SMALL / rate)


def _hashing() -> float:
    """Return the bytes whose checksum is computed in a second, of memory that no cache of the processor has."""
    memory = memoryview(bytearray(HASHED))

    def hash_all() -> None:
        for at in range(0, HASHED, PIECE_BYTES):
            xxhash.xxh3_128_digest(memory[at : at + PIECE_BYTES])

    return HASHED / _least(hash_all, 3)


def _stack(layers: int, inner: int, outer: int) -> nn.Sequential:
    """Make linear layers one after the other, of ``inner`` inputs and ``outer`` outputs each."""
    return nn.Sequential(*(nn.Linear(inner, outer) for _ in range(layers)))


def _update(folder: str, hashing: float) -> tuple[float, float]:
    """Return the elements that Adam updates in a second, as paging does it, and the seconds of the processor that the store's
    thread takes for a transfer, beside checksums: of a model whose states come from the drive, so that no cache of the
    processor has them. Time that it waits for the drive does not count."""
    others = {thread.id for thread in psutil.Process().threads()}
    with scratch_store(folder, dram=STREAMED) as store:
        own = {thread.id for thread in psutil.Process().threads()} - others
        model = zero.page(_stack(2, UPDATED // 1024, 1024), store)
        optimizer = zero.AdamW(model.parameters())
        x = torch.ones(ROWS, UPDATED // 1024, dtype=torch.float32, device="cpu")
        taken, before = [], 0.0
        used, moved = 0.0, (0, 0)
        for number in range(2 + UPDATES):
            if number == 2:
                used, moved = _used_by(own), _moved(store)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = zero.statistics(model).update_seconds
            taken.append(after - before)
            before = after
        elements = sum(parameter.numel() for parameter in model.parameters())
        transfers, nbytes = (now - then for now, then in zip(_moved(store), moved, strict=True))
        handling = (_used_by(own) - used - nbytes / hashing) / max(1, transfers)
    return elements / statistics.median(one for one in taken if one > 0), max(1e-6, handling)


def _used_by(threads: Collection[int]) -> float:
    """Return the seconds of the processor that threads of this process have used, to some hundredths."""
    return float(sum(thread.user_time + thread.system_time for thread in psutil.Process().threads() if thread.id in threads))


def _moved(store: TieredStore) -> tuple[int, int]:
    """Return the transfers of a store's drive, and their bytes."""
    flows = store.statistics().links[-1]
    return flows.up.transfers + flows.down.transfers, flows.up.bytes + flows.down.bytes


def _lease(folder: str) -> float:
    """Return what paging takes for a lease or a gradient, all being resident: a step of a small paged model, less that of the
    same model in memory. Both take turns, and the median difference counts. The batch is large, so that computing uses the
    caches of the processor between two leases."""
    x = torch.ones(4 * ROWS, WIDTH, dtype=torch.float32, device="cpu")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = _stack(UNITS, WIDTH, WIDTH)
    alone = torch.optim.AdamW(plain.parameters(), fused=True)
    with scratch_store(folder, dram=RESIDENT) as store:
        paged = zero.page(_stack(UNITS, WIDTH, WIDTH), store, paging=zero.Paging(largest_unit=5 * WIDTH * WIDTH))
        optimizer = zero.AdamW(paged.parameters())
        for _ in range(3):  # the order of a step is known after two
            step(plain, alone)
            step(paged, optimizer)
        both = [(_seconds(lambda: step(plain, alone)), _seconds(lambda: step(paged, optimizer))) for _ in range(STEPS)]
        with store.trace() as touches:
            paged(x).square().mean().backward()
            optimizer.step()
        taken = statistics.median(after - before for before, after in both)
        return max(1e-6, taken / (len(touches) + 2 * UNITS))
