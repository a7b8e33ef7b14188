"""Compare the two sides of a row, in a process of their own that may crash or hang."""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from bench.compatible.side import Row, Side
from tiered import TieredError
from tiered.errors import shown

__all__ = ["CLEAR", "IDENTICAL", "INVALID", "LIMIT", "MISSING", "WRONG", "Outcome", "difference", "judge"]

Verdict = Literal["identical", "clear error", "stated limit", "wrong", "not valid", "not installed"]
IDENTICAL, CLEAR, LIMIT, WRONG = "identical", "clear error", "stated limit", "wrong"
INVALID = "not valid"
"""The row itself is at fault: its side in memory failed, or would not notice a difference."""
MISSING = "not installed"

ROOT = Path(__file__).resolve().parents[2]
MOST_MEMORY = 2 << 30
ON_CUDA = 8 << 30
"""Bytes, with what the driver and its libraries take."""
READ_ONLY = "assignment destination is read-only"
"""What NumPy says."""
WIDEST = 240


@dataclass(frozen=True)
class Outcome:
    """What became of a row. ``read``: bytes that came from the disk on the paged side; ``trace``: where it failed, or empty;
    ``tier``: where the parameters of the paged side computed; ``commit``: of the package."""

    group: str
    name: str
    verdict: str
    detail: str
    seconds: float
    read: int = 0
    trace: str = ""
    tier: str = "dram"
    commit: str = ""


def judge(row: Row, *, timeout: float, check: bool = False, folder: str | None = None, tier: str = "dram") -> Outcome:
    """Run both sides of ``row`` in a forked child. A hang is wrong, and so is a crash, and more than 2 GiB.

    ``check``: have the row itself examined: in memory twice it must give the same, and other values must be noticed. ``tier``:
    where the parameters of the paged side compute.
    """
    here = Path(tempfile.mkdtemp(prefix="compatibility-", dir=folder))
    start = time.perf_counter()
    limit = timeout * row.slow
    child = _forked(row, here, check, tier)
    try:
        why = _waited(child, limit, ON_CUDA if tier == "cuda" else MOST_MEMORY)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
    seconds = time.perf_counter() - start
    log = (here / "log").read_text(errors="replace")[-20_000:] if (here / "log").exists() else ""
    try:
        verdict, detail, read, trace = pickle.loads((here / "outcome").read_bytes())
    except FileNotFoundError:
        verdict, detail, read, trace = (WRONG if (here / "paged").exists() else INVALID), why, 0, log
    shutil.rmtree(here, ignore_errors=True)
    for folder, name in ((str(here), "FOLDER"), (f"{ROOT}/", ""), (f"{Path(os.__file__).parent.parent}/", "")):
        detail, trace = detail.replace(folder, name), trace.replace(folder, name)
    return Outcome(row.group, row.name, verdict, detail, round(seconds, 2), read, trace, tier)


def _forked(row: Row, here: Path, check: bool, tier: str) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's about threads: the parent has computed nothing
        child = os.fork()
    if child:
        with suppress(OSError):
            os.setpgid(child, child)
        return child
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        log = os.open(here / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, log)
        os.chdir(here)
        warnings.simplefilter("ignore")
        found = _examined(row, here) if check else _compared(row, here, tier)
        (here / "unfinished").write_bytes(pickle.dumps(found))
        (here / "unfinished").rename(here / "outcome")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _waited(child: int, limit: float, memory: int) -> str:
    """Wait for ``child`` and return why there may be no outcome."""
    deadline = time.monotonic() + limit
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            ended = f"by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "without a result"
            return f"the process ended {ended}"
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGUSR1)  # where it is
            time.sleep(0.2)
            return f"no result after {limit:g} s"
        with suppress(psutil.Error):
            if psutil.Process(child).memory_info().rss > memory:
                return f"took more than {memory >> 30} GiB"
        time.sleep(0.02)


def _compared(row: Row, here: Path, tier: str) -> tuple[str, str, int, str]:
    torch.set_num_threads(1)
    plain = Side(False, here / "memory", tier=tier)
    try:
        row.function(plain)
        undefined(plain.shown)
    except BaseException as error:
        return INVALID, f"in memory: {_said(error)}", 0, traceback.format_exc()
    paged = Side(True, here / "paged", tier=tier)
    try:
        row.function(paged)
        found = difference(plain.shown, paged.shown)
        differs = (LIMIT, f"{row.limit}: {found}") if row.limit and not _has_numbers(plain.shown) else (WRONG, found)
        result = (*(differs if found else (IDENTICAL, "")), paged.bytes_read(), "")
        paged.close()
    except BaseException as error:
        before = difference(plain.shown[: len(paged.shown)], paged.shown)
        text = f"{before}; then {_said(error)}" if before else _said(error)
        return (CLEAR if _clear(error) and not before else WRONG), text, 0, traceback.format_exc()
    return result


def _examined(row: Row, here: Path) -> tuple[str, str, int, str]:
    torch.set_num_threads(1)
    sides = [Side(False, here / "first")]
    try:
        row.function(sides[0])
        undefined(sides[0].shown)
        sides.append(Side(False, here / "again"))
        row.function(sides[1])
        sides.append(Side(False, here / "other", planted=True))
        row.function(sides[2])
    except BaseException as error:
        return INVALID, f"in memory: {_said(error)}", 0, traceback.format_exc()
    found = difference(sides[0].shown, sides[1].shown)
    if found:
        return INVALID, f"in memory twice: {found}", 0, ""
    if row.depends and not difference(sides[0].shown, sides[2].shown):
        return INVALID, "other values of parameters make no difference", 0, ""
    return IDENTICAL, "", 0, ""


def undefined(shown: list[tuple[str, object]]) -> None:
    """Raise ValueError for a result in memory that has NaN: it would equal values that were never read."""
    if not shown:
        raise ValueError("the row shows nothing")
    for what, value in shown:
        for where, one in _leaves(what, value):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and bool(one.isnan().any()):
                raise ValueError(f"{where} has NaN")
            if isinstance(one, float) and one != one:
                raise ValueError(f"{where} is NaN")


def _has_numbers(shown: list[tuple[str, object]]) -> bool:
    """Return whether a row shows numbers, which may never differ."""
    return any(isinstance(one, torch.Tensor | float) for what, value in shown for _, one in _leaves(what, value))


def _clear(error: BaseException | None) -> bool:
    """Return whether ``error`` is the package's own, or was raised because of one whose text it repeats; or is how NumPy
    refuses to write to an array that was made read-only, because nothing would tell of the write."""
    if isinstance(error, TieredError) or (isinstance(error, ValueError) and str(error) == READ_ONLY):
        return True
    cause = error
    while cause is not None:
        cause = cause.__cause__ or cause.__context__
        if isinstance(cause, TieredError) and str(cause) in str(error):
            return True
    return False


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {shown(' '.join(str(error).split()), WIDEST)}"


def _leaves(what: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{what}[{key}]", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(f"{what}[{index}]", item)
    else:
        yield what, value


def difference(expected: list[tuple[str, object]], found: list[tuple[str, object]]) -> str:
    """Return where ``found`` differs first from ``expected`` and how, or an empty text. Both hold what ``Side.show`` kept."""
    for (what, left), (other, right) in zip(expected, found, strict=False):
        if what != other:
            return f"shows {other!r} where memory shows {what!r}"
        text = _differs(what, left, right)
        if text:
            return text
    if len(expected) != len(found):
        return f"shows {len(found)} results, in memory {len(expected)}"
    return ""


def _differs(what: str, left: object, right: object) -> str:
    if type(left) is not type(right):
        return f"{what} is {type(right).__name__}, in memory {type(left).__name__}"
    if isinstance(left, dict):
        if list(left) != list(right):
            lost, extra = set(left) - set(right), set(right) - set(left)
            return f"{what} has other keys: without {sorted(lost)[:3]}, with {sorted(extra)[:3]}"
        return next(filter(None, (_differs(f"{what}[{key}]", item, right[key]) for key, item in left.items())), "")
    if isinstance(left, list):
        if len(left) != len(right):
            return f"{what} has {len(right)} elements, in memory {len(left)}"
        pairs = enumerate(zip(left, right, strict=True))
        return next(filter(None, (_differs(f"{what}[{index}]", *pair) for index, pair in pairs)), "")
    if isinstance(left, torch.Tensor):
        return _tensors_differ(what, left, right)
    if isinstance(left, float):
        return "" if struct.pack("d", left) == struct.pack("d", right) else f"{what} is {right!r}, in memory {left!r}"
    return "" if left == right else f"{what} is {shown(repr(right), 60)}, in memory {shown(repr(left), 60)}"


def _tensors_differ(what: str, left: torch.Tensor, right: torch.Tensor) -> str:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{what} is {right.dtype} of {tuple(right.shape)}, in memory {left.dtype} of {tuple(left.shape)}"
    if left.numel() == 0 or torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)):
        return ""
    if left.numel() == 1:
        return f"{what} is {right.item()!r}, in memory {left.item()!r}"
    undefined = int(right.isnan().sum())
    if undefined:
        return f"{what}: {undefined} of {right.numel()} elements are NaN"
    apart = (left.double() - right.double()).abs()
    return f"{what}: {int((left != right).sum())} of {right.numel()} elements differ, by up to {float(apart.max()):.2g}"
