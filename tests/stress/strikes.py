"""Exceptions that strike a call of the package: by a real signal at a random moment, or by tracing at a line of one's choice.

A strike is a ``KeyboardInterrupt``, as Ctrl-C is one. It is only made where a frame of the package is on the main thread's
stack; elsewhere the handler passes over it.
"""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tiered

__all__ = ["Strike", "armed", "interrupted_at", "is_free", "lines_of", "struck_after_call", "struck_at", "struck_or_raise"]

PACKAGE = str(Path(tiered.__file__).parent)


class Strike(KeyboardInterrupt):
    """``where``: the innermost frame of the package."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


def _inside(frame: FrameType | None) -> str | None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return None


@contextmanager
def armed(seconds: float, again: float = 0.0) -> Iterator[None]:
    """A strike after ``seconds``, by SIGALRM, and where ``again`` is given, others in such intervals."""

    def handler(number: int, frame: FrameType | None) -> None:
        where = _inside(frame)
        if where is not None:
            raise Strike(where)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, again)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@cache
def _safe(code: CodeType) -> frozenset[int]:
    """Where ``with`` calls ``__exit__``, also after an exception. The interpreter looks for signals at the start of functions,
    at backward jumps and after calls, so not between the block's last call and this one; a tracer is told of the line all the
    same."""
    found, names = set(), [(step.offset, step.opname, step.argval) for step in dis.get_instructions(code)]
    for at, (offset, name, value) in enumerate(names[:-3]):
        rest = [other for _, other, _ in names[at + 1 : at + 3]]
        if name == "LOAD_CONST" and value is None and rest in (["LOAD_CONST", "LOAD_CONST"], ["DUP_TOP", "DUP_TOP"]):
            found.add(offset)
            if at and names[at - 1][1] in ("SWAP", "ROT_TWO"):  # of a value that is returned
                found.add(names[at - 1][0])
    # As before ``try``, where nothing happens; and where ``with`` calls ``__exit__`` after an exception.
    nothing = ("NOP", "POP_BLOCK", "PUSH_EXC_INFO", "WITH_EXCEPT_START")
    found |= {offset for offset, name, _ in names if name in nothing}
    return frozenset(found)


def _traced(work: Callable[[], object], each: Callable[[FrameType], None]) -> None:
    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event in ("call", "line") and frame.f_lasti not in _safe(frame.f_code):
            each(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of the package ``work`` comes to in this thread, calls included."""
    count = 0

    def each(frame: FrameType) -> None:
        nonlocal count
        count += 1

    _traced(work, each)
    return count


def interrupted_at(number: int, work: Callable[[], object], handler: Callable[[], object]) -> None:
    """Run ``work``, and ``handler`` within it, at its line ``number``, counted from 0."""
    count = 0

    def each(frame: FrameType) -> None:
        nonlocal count
        count += 1
        if count == number + 1:
            before = sys.gettrace()
            sys.settrace(None)
            handler()
            sys.settrace(before)

    _traced(work, each)


def struck_or_raise(number: int, work: Callable[[], object]) -> None:
    """Run ``work`` and strike at its line ``number``, counted from 0, where it comes to so many."""
    count = 0

    def each(frame: FrameType) -> None:
        nonlocal count
        count += 1
        if count == number + 1:
            raise Strike(_inside(frame) or "?")

    _traced(work, each)


def struck_at(number: int, work: Callable[[], object]) -> str | None:
    """The same; where it was struck, or None where it ended before."""
    try:
        struck_or_raise(number, work)
    except Strike as strike:
        return strike.where
    return None


@cache
def _after_calls(code: CodeType) -> frozenset[int]:
    """Where the interpreter looks for signals after a call: the offset of the instruction that follows it."""
    steps = list(dis.get_instructions(code))
    return frozenset(after.offset for step, after in pairwise(steps) if step.opname.startswith("CALL"))


def struck_after_call(number: int, work: Callable[[], object], files: tuple[str, ...]) -> str | None:
    """Run ``work`` and strike after the call ``number``, counted from 0, that this thread makes in functions of ``files``.
    Returns where that is, or None where there are not so many calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in _after_calls(frame.f_code):
            count += 1
            if count == number + 1:
                raise Strike(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Strike as strike:
        return strike.where
    finally:
        sys.settrace(before)
    return None


def is_free(lock: Any) -> bool:
    """Whether another thread gets the lock."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]
