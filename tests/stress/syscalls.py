"""System calls of a forked child, each of them held until the test says what comes of it: goes on, fails, kills.

seccomp's user notification (seccomp_unotify(2)) does it: a filter in the child sends the calls that are named to the parent. It
needs neither root nor a tracer, and the child is forked from a process that has torch, so a trial takes milliseconds; strace
could do the same things, and takes seconds for each.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

__all__ = ["CHANGING", "NUMBERS", "Call", "Child", "Ended", "fail", "go_on", "kill", "needs_notifications", "run"]

# x86-64, from asm/unistd_64.h; the calls with which a store changes what is on the disk, or waits for it.
NUMBERS = {
    "read": 0, "write": 1, "close": 3, "pread64": 17, "pwrite64": 18, "flock": 73, "fsync": 74, "fdatasync": 75,
    "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "unlink": 87, "io_setup": 206, "io_destroy": 207,
    "io_getevents": 208, "io_submit": 209, "openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "fallocate": 285,
    "preadv": 295, "pwritev": 296, "renameat2": 316, "preadv2": 327, "pwritev2": 328, "io_pgetevents": 333,
}  # fmt: skip
CHANGING = (
    "write", "pwrite64", "pwritev", "pwritev2", "flock", "fsync", "fdatasync", "ftruncate", "rename", "renameat", "renameat2",
    "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "fallocate", "io_submit", "io_setup",
)  # fmt: skip
"""All that changes files or their names, and the wake-ups of threads, after which anything may be half done."""

_NAMES = {number: name for name, number in NUMBERS.items()}
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTICE = struct.Struct("<QII iI Q 6Q")  # id, pid, flags; number, architecture, instruction, arguments
_ANSWER = struct.Struct("<QqiI")  # id, value, error, flags
_LIBC = ctypes.CDLL(None, use_errno=True)


class Call(NamedTuple):
    """The ``number``-th of the calls that are watched (from 1), by whichever thread ``tid`` of the child."""

    number: int
    name: str
    tid: int
    arguments: tuple[int, ...]

    def path(self) -> str:
        """What its first argument, a descriptor, is open on; empty where it is none."""
        try:
            return os.readlink(f"/proc/{self.tid}/fd/{self.arguments[0]}")
        except OSError:
            return ""


class Answer(NamedTuple):
    value: int = 0
    error: int = 0
    signal: int = 0
    goes_on: bool = False


go_on = Answer(goes_on=True)
kill = Answer(signal=signal.SIGKILL)
interrupt = Answer(signal=signal.SIGINT, goes_on=True)


def fail(number: int) -> Answer:
    return Answer(error=-number)


@dataclass
class Ended:
    """``status``: exit code, or minus a signal. ``said``: what the child said, in order. ``calls`` were watched."""

    status: int
    said: list[str]
    calls: int
    error: str = ""


@dataclass
class Child:
    """What the body of a child is given."""

    channel: socket.socket

    def say(self, words: str) -> None:
        """Tell the parent; sendto is not among the calls that are watched."""
        self.channel.send(words.encode())


@dataclass
class _Parent:
    pid: int
    channel: socket.socket
    decide: Callable[[Call], Answer]
    said: list[str] = field(default_factory=list)
    calls: int = 0


def _why_not() -> str:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return "the numbers of system calls are those of Linux on x86-64"
    try:
        ended = run(lambda child: os.fsync(child.channel.fileno()), ["fsync"], lambda call: Answer())
    except OSError as error:
        return f"no seccomp notifications here: {error}"
    return "" if (ended.status, ended.calls) == (0, 1) else f"no seccomp notifications here: {ended.error}"


def _program(calls: Iterable[str]) -> ctypes.Array[ctypes.c_char]:
    """BPF: load the call's number; jump to NOTIFY where it is one of them."""
    numbers = [NUMBERS[name] for name in calls]
    lines = [struct.pack("<HBBI", 0x20, 0, 0, 0)]
    for index, number in enumerate(numbers):
        lines.append(struct.pack("<HBBI", 0x15, len(numbers) - index, 0, number))
    lines += [struct.pack("<HBBI", 0x06, 0, 0, _ALLOW), struct.pack("<HBBI", 0x06, 0, 0, _NOTIFY)]
    return ctypes.create_string_buffer(b"".join(lines), 8 * len(lines))


def _install(calls: Iterable[str]) -> int:
    """In the child: from here on every such call of every thread that is made later waits for the parent."""
    program = _program(calls)
    fprog = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(program)), 16)
    if _LIBC.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "prctl")
    listener = int(_LIBC.syscall(317, 1, 1 << 3, fprog))  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER
    if listener < 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
    return listener


def run(
    body: Callable[[Child], object],
    calls: Iterable[str],
    decide: Callable[[Call], Answer],
    *,
    patience: float = 120.0,
) -> Ended:
    """Fork; ``body`` runs in the child, which then ends at once; ``decide`` is asked about each of ``calls`` it makes.

    A child that is neither watched nor done for ``patience`` seconds is killed: AssertionError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _child(body, list(calls), theirs)
    theirs.close()
    with ours:
        parent = _Parent(pid, ours, decide)
        listener = -1
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
            if not descriptors:
                raise OSError(errno.ENOSYS, ours.recv(1 << 16).decode())
            listener = descriptors[0]
            _watch(parent, listener, patience)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            if listener >= 0:
                os.close(listener)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _hear(parent)
    error = "\n".join(words for words in parent.said if words.startswith("Traceback"))
    return Ended(status, [words for words in parent.said if not words.startswith("Traceback")], parent.calls, error)


def _child(body: Callable[[Child], object], calls: list[str], channel: socket.socket) -> None:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)  # the parent's pool of threads was not forked
        try:
            listener = _install(calls)
        except OSError as error:
            channel.send(b"-")
            channel.send(str(error).encode())
            os._exit(1)
        socket.send_fds(channel, [b"+"], [listener])
        body(Child(channel))
        status = 0
    except BaseException:
        channel.send(traceback.format_exc().encode()[-60000:])
    os._exit(status)


def _watch(parent: _Parent, listener: int, patience: float) -> None:
    """Until the child has ended."""
    ending = os.pidfd_open(parent.pid)
    poller = select.poll()
    for fd in (listener, ending, parent.channel.fileno()):
        poller.register(fd, select.POLLIN)
    try:
        while True:
            ready = dict(poller.poll(patience * 1000))
            assert ready, f"the child did nothing for {patience} s; it said {parent.said}"
            if parent.channel.fileno() in ready and not _hear(parent):
                poller.unregister(parent.channel.fileno())
            if ready.get(listener, 0) & select.POLLIN:
                _answer(parent, listener)
            elif listener in ready:
                poller.unregister(listener)
            if ending in ready:
                return
    finally:
        os.close(ending)


def _answer(parent: _Parent, listener: int) -> None:
    notice = array.array("B", bytes(_NOTICE.size))
    try:
        fcntl.ioctl(listener, _RECEIVE, notice)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):  # killed meanwhile
            return
        raise
    identity, tid, _, number, _, _, *arguments = _NOTICE.unpack(notice)
    parent.calls += 1
    _hear(parent)
    answer = parent.decide(Call(parent.calls, _NAMES[number], tid, tuple(arguments)))
    if answer.signal:
        os.kill(parent.pid, answer.signal)
    if answer.signal != signal.SIGKILL:
        packed = _ANSWER.pack(identity, answer.value, answer.error, _CONTINUE if answer.goes_on else 0)
        try:
            fcntl.ioctl(listener, _SEND, array.array("B", packed))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise


def _hear(parent: _Parent) -> bool:
    """Take in what the child has said; False at its end."""
    while True:
        try:
            words = parent.channel.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not words:
            return False
        parent.said.append(words.decode())


_WHY_NOT = _why_not()
needs_notifications = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "it works")
