"""Run collectives over ``torch.distributed`` among the processes that train a model together, and name the rank that fails one.

Every collective is told what it is for, and all ranks compare that before they look at the data: ranks that went different ways
get an error that names both, never each other's bytes. Before ranks begin something together (``Ranks.agreeing``) they compare
the *terms* of it: all that must be the same on each of them so that each other's bytes mean the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from tiered.errors import RankError, shortened, shown

__all__ = ["Agree", "CollectiveProgress", "Ranks", "Term", "Under"]

_TOLD = "_tiered_told"
"""Attribute of an exception that all ranks know of."""
TAG = 192
"""Bytes that say what a collective is for, and at their end how far the rank is."""
NUMBER = 8
"""Bytes of these that say how far the rank is."""
TEXT = TAG - NUMBER
ADDED_AT_ONCE = 1 << 18
"""Elements that are added up at a time."""
CLOSE = 1e-6
"""Relative difference of two numbers that ranks may have computed from the same, on different processors."""
SUBJECT, VALUE, MOST_TERM = 200, 400, 8192
"""Characters of a term that is told to the other ranks, and bytes in which it has room, all of them escaped."""
DIGEST = 16
"""Bytes of a digest over terms."""
GRACE = 5.0
"""Seconds in which the other ranks, which waited for as long, say that it failed there, too."""

Term = tuple[str, str | float]
"""What has to be the same on all ranks: its name, and its value. A float is the same where it is ``CLOSE``."""
Agree = Callable[[Iterable[Term]], None]


@dataclass
class CollectiveProgress:
    """How far this rank (``here``) and the rank that is furthest behind (``everywhere``, as far as it is known) are in work
    that all ranks do in one order. Every rank learns ``everywhere`` from the same collectives, so all may act on it alike."""

    here: int = 0
    everywhere: int = 0


class Under:
    """Collective that is under way, and the comparison, sent before it, of what it is for."""

    def __init__(self, ranks: Ranks, what: str, tags: torch.Tensor, tagging: Any, progress: CollectiveProgress | None) -> None:
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
        except BaseException as error:
            if isinstance(error, RankError):  # it was begun ahead, and a rank that does something else never begins it
                self._ranks.end(self._what)
            with contextlib.suppress(RuntimeError):
                self.moving.wait()
            raise
        with self._ranks.named(self._what):
            self.moving.wait()

    def _compare(self) -> None:
        said = [_read_text(tag) for tag in self._tags]
        here = said[self._ranks.rank]
        for rank, other in enumerate(said):
            if other != here:
                raise RankError(
                    f"the ranks do different things: rank {self._ranks.rank} is at {_quoted(here)}, and rank {rank} at "
                    f"{_quoted(other)}. All "
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
        self.progress: CollectiveProgress | None = None
        """What ``gather`` sends along and learns from the others. All ranks have one, or none, at the same gathers."""
        self.phase = ""
        """What a pass that gathers parameters is, for ``AllGathered``: the same on all ranks."""
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

    # -- agreement ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def agreeing(self, what: str) -> Iterator[Agree]:
        """Give what takes terms, for a block of code, and compare at its end that all ranks have the same ones, in one order.
        ``what``: they are about to do that, "page this model". All ranks enter the block.

        Raises RankError, on all ranks, which names the first difference, or what another rank raises in the block. Then the
        ranks can go on to agree on something else: only digests and names were exchanged. A block may lie within another one
        for the same ``what``: what one rank raises between two inner ones, others hear in the next.
        """
        terms: list[Term] = []
        try:
            yield terms.extend
        except Exception as error:
            if not self.failed and not getattr(error, _TOLD, False):  # else an inner block told of it
                setattr(error, _TOLD, True)
                with contextlib.suppress(RankError):
                    self._agree(what, [], f"{type(error).__name__}: {error}")
            raise
        try:
            self._agree(what, [_line(*term) for term in terms])
        except RankError as error:
            setattr(error, _TOLD, True)
            raise

    def _agree(self, what: str, lines: Sequence[bytes], problem: str | None = None) -> None:
        """Compare the ``lines`` of all ranks; ``problem``: why this one has none to go on with."""
        told = self._exchange(bytes([problem is not None]) + _digest(lines), what, 1 + DIGEST)
        failed = [rank for rank, one in enumerate(told) if one[0]]
        if failed and len(failed) < self.size:
            why = self._exchange(_cut(_line("", problem or "")), f"{what}: why it cannot be", MOST_TERM)[failed[0]]
            if problem is None:
                said = shown(str(_term(why)[1]), VALUE)
                raise RankError(f"another rank could not {what}, so no rank does: rank {failed[0]} says {said}")
        elif not failed and len(set(told)) > 1:
            self._find_difference(what, lines)

    def _find_difference(self, what: str, lines: Sequence[bytes]) -> None:
        """Raise RankError for the first line that is another one on some ranks, unless all of these are numbers that are close.
        All ranks search alike, because each step of it depends only on what all were told."""
        counts = self._exchange(len(lines).to_bytes(8, "little"), f"{what}: how much there is", 8)
        fewest = min(int.from_bytes(count, "little") for count in counts)
        start = 0
        for _ in range(fewest + 1):
            if not self._differ(what, lines[start:]):
                return
            same, other = start, fewest  # lines start to same are the same, start to other + 1 are not
            while same < other:
                middle = (same + other) // 2
                if self._differ(what, lines[start : middle + 1]):
                    other = middle
                else:
                    same = middle + 1
            mine = lines[same] if same < len(lines) else b""
            told = self._exchange(_cut(mine), f"{what}: what differs", MOST_TERM)
            found = [_term(one) for one in told]
            rank = next((rank for rank, one in enumerate(found) if one != found[0] and not _alike(found[0], one)), None)
            if rank is not None:
                _raise_difference(what, rank, found[0], found[rank])
            start = same + 1
        raise RankError(f"a rank says what no rank of this release says: it cannot {what}, and nothing differs")

    def _differ(self, what: str, lines: Sequence[bytes]) -> bool:
        """Return whether some ranks have other ``lines``."""
        return len(set(self._exchange(_digest(lines), f"{what}: where the difference is", DIGEST))) > 1

    def _exchange(self, mine: bytes, what: str, size: int) -> list[bytes]:
        """Return what each rank says, at most ``size`` bytes, filled up with zeros."""
        padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return [row.numpy().tobytes() for row in self.all_gather(padded, what)]

    # -- one collective ----------------------------------------------------------------------------------------------------

    def _begin(
        self, group: Any, what: str, start: Callable[[], Any], ahead: bool = False, progress: CollectiveProgress | None = None
    ) -> Under:
        self._numbers[group] += 1
        tag = torch.zeros(TAG, dtype=torch.uint8, device="cpu")
        _write_text(tag, f"collective {self._numbers[group]}: {what}")
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

    def end(self, what: str) -> None:
        """End all connections after a collective failed, and tell the other ranks that this one was at ``what``."""
        self.failed = True
        if self._calls is not None:
            self._calls.tell(what)

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
            who = "another rank did not answer" if self._calls is None else self._calls.missing(until, what)
            raise RankError(
                f"rank {self.rank} waited for {what}, and {who} (timeout: {self.timeout.total_seconds():g} s). The last commit "
                "of all ranks is whole: start all of them again; torchrun --max-restarts does so by itself. "
                f"({shown(_first_line(error), 2 * TEXT)})"
            ) from error


class _Calls:
    """Calls for help: to each other rank, once, what this one waits for. Each rank listens for the others' from the beginning,
    so a call arrives whatever its receiver does, and a connection that breaks before that is a process that ended.

    That is not left to the store in which the processes met: it ends or hangs with the rank that has it, and then blocks.
    """

    def __init__(self, group: Any, failing: list[Any], rank: int, size: int) -> None:
        self._group, self._failing = group, failing
        others = [other for other in range(size) if other != rank]
        self._said = {other: torch.zeros(TAG, dtype=torch.uint8, device="cpu") for other in others}
        self._heard = {other: group.recv([said], other, 0) for other, said in self._said.items()}
        self._call = torch.zeros(TAG, dtype=torch.uint8, device="cpu")
        self._sent: list[Any] = []
        self._told = False
        self._found: str | None = None

    def missing(self, until: float, what: str) -> str:
        """Return which ranks do not call, and why, or what those wait for that do; wait for calls until ``until`` (of
        ``time.monotonic``). ``what`` this rank waits for."""
        self.tell(what)
        if self._found is None:
            self._found = self._listen(until)
        return self._found

    def tell(self, what: str) -> None:
        """Call, and end all other connections; the first time."""
        if self._told:
            return
        self._told = True
        _write_text(self._call, what)
        for other in self._heard:
            with contextlib.suppress(RuntimeError):  # it is gone
                self._sent.append(self._group.send([self._call], other, 0))
        self.abort()

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
        there: list[int] = []
        for other, heard in self._heard.items():
            left = max(0.001, until - time.monotonic())  # 0 would be without a limit
            try:
                heard.wait(timedelta(seconds=left))
            except RuntimeError as error:
                # The first that is waited for in vain ends all connections; what came before is still there to be had.
                timed_out = "imeout" in str(error) or "imed out" in str(error)
                (silent if timed_out else ended).append(other)
            else:
                there.append(other)
        told = []
        if ended:
            told.append(f"{_named(ended)} ended")
        if silent:
            told.append(f"{_named(silent)} did not answer: it hangs, or cannot be reached")
        told += [f"rank {other} waited for {_quoted(_read_text(self._said[other]))}" for other in there[:2]]
        return ", and ".join(told)


def _receive(group: Any, other: int) -> Any:
    return group.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], other, 0)


def _write_text(tag: torch.Tensor, text: str) -> None:
    """Write ``text`` to the beginning of ``tag``, without its middle where it is too long: sizes are at the end."""
    said = text.encode(errors="backslashreplace")
    if len(said) > TEXT:
        said = said[: TEXT // 2] + b"..." + said[TEXT // 2 + 3 - TEXT :]
    tag[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)


def _read_text(tag: torch.Tensor) -> str:
    return bytes(tag[:TEXT].tolist()).rstrip(b"\0").decode(errors="replace")


def _quoted(text: str) -> str:
    """Return what a rank says of itself, as errors print it."""
    return f"'{shown(text, 2 * TEXT)}'"


def _line(subject: str, value: str | float) -> bytes:
    """Return a term as it is compared."""
    number = isinstance(value, float) and math.isfinite(value)
    return json.dumps([subject, value if number else str(value)]).encode()


def _cut(line: bytes) -> bytes:
    """Return a line as it is told to other ranks, not longer than ``MOST_TERM``."""
    if not line:
        return b""
    subject, value = json.loads(line)
    if len(subject) > SUBJECT or (isinstance(value, str) and len(value) > VALUE):  # what differs may be where it is cut
        value = f"{shortened(str(value), VALUE - 40)} (digest {_digest([line]).hex()})"
    return _line(shortened(subject, SUBJECT), value)


def _digest(lines: Iterable[bytes]) -> bytes:
    found = blake2b(digest_size=DIGEST)
    for line in lines:
        found.update(line)
        found.update(b"\n")
    return found.digest()


def _term(told: bytes) -> Term:
    """Return the term that a rank told; an empty one where it has no more. Raises RankError for what is none."""
    data = told.rstrip(b"\0")
    if not data:
        return "nothing more", ""
    try:
        return msgspec.json.decode(data, type=tuple[str, str | float], strict=True)
    except ValueError as error:  # msgspec's and Unicode's errors are ValueErrors
        raise RankError(f"a rank says what no rank of this release says: {shown(repr(error), 200)}") from error


def _alike(one: Term, other: Term) -> bool:
    """Return whether two terms whose lines differ are numbers that are close."""
    return (
        one[0] == other[0]
        and isinstance(one[1], float)
        and isinstance(other[1], float)
        and math.isclose(one[1], other[1], rel_tol=CLOSE)
    )


def _raise_difference(what: str, rank: int, first: Term, other: Term) -> NoReturn:
    (subject, value), (theirs, another) = ((shown(one, SUBJECT), shown(str(it), VALUE)) for one, it in (first, other))
    if subject == theirs:
        found = f"{subject} is {value} on rank 0, and {another} on rank {rank}"
    else:
        found = f"rank 0 has {f'{subject} {value}'.rstrip()} where rank {rank} has {f'{theirs} {another}'.rstrip()}"
    raise RankError(f"the ranks cannot {what} together: {found}. Nothing of another rank was used: give all ranks the same")


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
