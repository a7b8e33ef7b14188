"""Run collectives over ``torch.distributed`` among the processes that train a model together, and name the rank that fails one.

Every collective is told what it is for, and all ranks compare that before they look at the data: ranks that went different ways
get an error that names both, never each other's bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tiered import RankError

__all__ = ["Progress", "Ranks", "Under"]

TAG = 192
"""Bytes that say what a collective is for, and at their end how far the rank is."""
NUMBER = 8
"""Bytes of these that say how far the rank is."""
TEXT = TAG - NUMBER
ADDED_AT_ONCE = 1 << 18
"""Elements that are added up at a time."""
GRACE = 5.0
"""Seconds in which the other ranks, which waited for as long, say that it failed there, too."""


@dataclass
class Progress:
    """How far this rank (``here``) and the rank that is furthest behind (``everywhere``, as far as it is known) are in work
    that all ranks do in one order. Every rank learns ``everywhere`` from the same collectives, so all may act on it alike."""

    here: int = 0
    everywhere: int = 0


class Under:
    """Collective that is under way, and the comparison, sent before it, of what it is for."""

    def __init__(self, ranks: Ranks, what: str, tags: torch.Tensor, tagging: Any, progress: Progress | None) -> None:
        self._ranks, self._what, self._tags, self._tagging, self._progress = ranks, what, tags, tagging, progress
        self.moving: Any = None

    @property
    def done(self) -> bool:
        return bool(self._tagging.is_completed() and self.moving.is_completed())

    def agree(self) -> None:
        """Wait until all ranks say what they do. Raises RankError where another rank is lost, late, or does something else."""
        with self._ranks.named(self._what):
            self._tagging.wait()
            self._compare()

    def wait(self) -> None:
        """Wait until the collective has ended, also where it failed: nothing reads or writes its tensors afterwards. Raises as
        ``agree``."""
        try:
            self.agree()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.moving.wait()
            raise
        with self._ranks.named(self._what):
            self.moving.wait()

    def _compare(self) -> None:
        said = [bytes(tag[:TEXT].tolist()).rstrip(b"\0").decode(errors="replace") for tag in self._tags]
        here = said[self._ranks.rank]
        for rank, other in enumerate(said):
            if other != here:
                raise RankError(
                    f"the ranks do different things: rank {self._ranks.rank} is at {here!r}, and rank {rank} at {other!r}. All "
                    "ranks must run the same modules in the same order, and call what looks at a model (state_dict, "
                    "evaluation, clipping, commit) together"
                )
        if self._progress is not None:
            numbers = self._tags[:, TEXT:].contiguous().view(torch.int64)
            self._progress.everywhere = max(self._progress.everywhere, int(numbers.amin()))


class Ranks:
    """Ranks of ``group`` (None: all processes), with three groups of their own: gathers of parameters and reductions of
    gradients are each in an order of their own, so that one is never in the way of the other, and calls for help are out of
    order. ``timeout``: seconds that a rank waits for the others (None: as ``group`` has it)."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float | None = None) -> None:
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank, self.size = dist.get_rank(group), len(members)
        self._whole = group  # as long as this is there no other group has its identity
        seconds = timeout if timeout is not None else _timeout_of(group)
        self.timeout = timedelta(seconds=seconds)
        self._calls: _Calls | None = None
        self.failed = False
        """A collective did; nothing can be agreed on any more."""
        self.progress: Progress | None = None
        """What ``gather`` sends along and learns from the others. All ranks have one, or none, at the same gathers."""
        with self.named("the other ranks"):
            self._gathers, self._reductions, calls = (
                dist.new_group(members, timeout=self.timeout, backend="gloo", use_local_synchronization=len(members) > 1)
                for _ in range(3)
            )
            self._calls = _Calls(calls, [self._gathers, self._reductions], self.rank, self.size)
        self._numbers = {self._gathers: 0, self._reductions: 0}

    @staticmethod
    def of(group: dist.ProcessGroup | None, timeout: float | None = None) -> Ranks:
        """Return the ranks of a group and timeout, made once for as long as the group exists: all ranks ask in the same order.
        """
        key = (id(group if group is not None else dist.group.WORLD), timeout)
        found = _made.get(key)
        if found is None or not found.alive:
            found = _made[key] = Ranks(group, timeout)
        return found

    @property
    def alive(self) -> bool:
        """Return whether the groups were not destroyed."""
        return dist.is_initialized() and self._gathers in dist.distributed_c10d._world.pg_map

    # -- collectives -------------------------------------------------------------------------------------------------------

    def gather(self, whole: torch.Tensor, own: torch.Tensor, what: str, *, ahead: bool = False) -> Under:
        """Begin to fill ``whole`` with all ranks' ``own``, in order. ``own`` may be its place in ``whole``. Both uint8.
        ``ahead``: it is not waited for at once, so it does not wait for agreement either."""
        said = f"{what}, {own.numel():,} bytes"
        return self._begin(self._gathers, said, lambda: _gather(whole, own, self._gathers), ahead, self.progress)

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, what: str) -> Under:
        """Begin to send each rank its part of ``whole``; ``received`` will have what each had of this rank's part, in order.
        Both uint8 of one size. ``add_up`` makes their sum of it.

        That is a reduce-scatter whose sum has the same order everywhere. gloo's own sends twice as many bytes: it is its
        all-reduce, of which each rank keeps a part.
        """
        return self._begin(
            self._reductions,
            what,
            lambda: dist.all_to_all_single(received, whole, group=self._reductions, async_op=True),
            ahead=True,
        )

    def add_up(self, received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the mean over the ranks of what ``all_to_all`` received, in its memory. bf16 and fp16 are added up as fp32."""
        parts = received.view(dtype).view(self.size, -1)
        total = parts[0]
        for start in range(0, total.numel(), ADDED_AT_ONCE):
            pieces = parts[:, start : start + ADDED_AT_ONCE]
            mean = pieces[0].to(torch.float64 if dtype is torch.float64 else torch.float32)
            for piece in pieces[1:]:
                mean.add_(piece)
            mean.div_(self.size)
            total[start : start + ADDED_AT_ONCE].copy_(mean)
        return total

    def all_gather(self, own: torch.Tensor, what: str, *, apart: bool = False) -> torch.Tensor:
        """Return the tensors ``own`` of all ranks, which have as many elements on each: shape (ranks, elements). It is for few
        bytes. ``apart``: not in the order of reductions."""
        group = self._gathers if apart else self._reductions
        flat = own.contiguous().view(-1)
        found = torch.empty(self.size * flat.numel(), dtype=own.dtype, device="cpu")
        if flat.numel():
            into, mine = found.view(torch.uint8), flat.view(torch.uint8)
            said = f"{what}, {flat.numel():,} of {own.dtype}"
            self._begin(group, said, lambda: _gather(into, mine, group)).wait()
        return found.view(self.size, -1)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Overwrite ``tensor``, of any type and strides, with that of rank 0."""
        if tensor.numel():
            source, group = dist.get_global_rank(self._gathers, 0), self._gathers
            data = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
            sent = data.view(-1).view(torch.uint8)
            self._begin(group, what, lambda: dist.broadcast(sent, source, group=group, async_op=True)).wait()
            if self.rank and data.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(data)

    def _begin(
        self, group: Any, what: str, start: Callable[[], Any], ahead: bool = False, progress: Progress | None = None
    ) -> Under:
        self._numbers[group] += 1
        tag = torch.zeros(TAG, dtype=torch.uint8, device="cpu")
        said = f"collective {self._numbers[group]}: {what}".encode()
        if len(said) > TEXT:  # sizes are at the end
            said = said[: TEXT // 2] + b"..." + said[TEXT // 2 + 3 - TEXT :]
        tag[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        if progress is not None:
            tag[TEXT:].view(torch.int64).fill_(progress.here)
        tags = torch.empty(self.size * TAG, dtype=torch.uint8, device="cpu")
        with self.named(what):
            under = Under(self, what, tags.view(self.size, TAG), _gather(tags, tag, group), progress)
        if not ahead:
            under.agree()  # gloo ends a process that receives more than it expects
        with self.named(what):
            under.moving = start()
        return under

    # -- failure -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Turn what torch raises in the block into a RankError that says which rank is missing."""
        until = time.monotonic() + self.timeout.total_seconds() + GRACE
        try:
            yield
        except RankError:
            self.failed = True
            raise
        except (RuntimeError, ValueError) as error:
            self.failed = True
            who = "another rank did not answer" if self._calls is None else self._calls.missing(until)
            raise RankError(
                f"rank {self.rank} waited for {what}, and {who} (timeout: {self.timeout.total_seconds():g} s). The last commit "
                "of all ranks is whole: start all of them again; torchrun --max-restarts does so by itself. "
                f"({_first_line(error)})"
            ) from error


class _Calls:
    """Calls for help: a byte to each other rank, once. Each rank listens for the others' from the beginning, so a call arrives
    whatever its receiver does, and a connection that breaks before that is a process that ended.

    That is not left to the store in which the processes met: it ends or hangs with the rank that has it, and then blocks.
    """

    def __init__(self, group: Any, failing: list[Any], rank: int, size: int) -> None:
        self._group, self._failing = group, failing
        self._call = torch.ones(1, dtype=torch.uint8, device="cpu")
        self._heard = {other: _receive(group, other) for other in range(size) if other != rank}
        self._sent: list[Any] = []
        self._found: str | None = None

    def missing(self, until: float) -> str:
        """Return which ranks do not call, and why; wait for calls until ``until`` (of ``time.monotonic``)."""
        if self._found is None:
            for other in self._heard:
                with contextlib.suppress(RuntimeError):  # it is gone
                    self._sent.append(self._group.send([self._call], other, 0))
            self.abort()
            self._found = self._listen(until)
        return self._found

    def abort(self) -> None:
        """End all connections, so that ranks that wait for this one need not wait for their timeout: gloo does so where
        anything times out."""
        for group in self._failing:
            for other in self._heard:
                with contextlib.suppress(RuntimeError):
                    _receive(group, other).wait(timedelta(milliseconds=1))

    def _listen(self, until: float) -> str:
        ended: list[int] = []
        silent: list[int] = []
        for other, heard in self._heard.items():
            left = max(0.001, until - time.monotonic())  # 0 would be without a limit
            try:
                heard.wait(timedelta(seconds=left))
            except RuntimeError as error:
                # The first that is waited for in vain ends all connections; what came before is still there to be had.
                timed_out = "imeout" in str(error) or "imed out" in str(error)
                (silent if timed_out else ended).append(other)
        told = []
        if ended:
            told.append(f"{_named(ended)} ended")
        if silent:
            told.append(f"{_named(silent)} did not answer: it hangs, or cannot be reached")
        return ", and ".join(told) or "it failed, though all ranks are there"


def _receive(group: Any, other: int) -> Any:
    return group.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], other, 0)


def _named(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


_made: dict[tuple[int, float | None], Ranks] = {}


def _gather(whole: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
    renamed = getattr(dist, "all_gather_single", None)  # in torch 2.13
    return (renamed or dist.all_gather_into_tensor)(whole, own, group=group, async_op=True)


def _timeout_of(group: dist.ProcessGroup | None) -> float:
    found = group if group is not None else dist.group.WORLD
    try:
        options: Any = found._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
        return float(options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return 1800.0  # torch's own default for gloo


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
