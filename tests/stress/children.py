"""Forked children that talk to the test while they run: a process of its own in milliseconds, since torch is there already."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tests.stress.syscalls import Child

__all__ = ["Running", "forked"]


class Running:
    """The test's side. Nothing waits for longer than ``patience`` seconds: AssertionError."""

    def __init__(self, pid: int, channel: socket.socket, patience: float) -> None:
        self.pid, self.said = pid, list[str]()
        self._channel, self._patience = channel, patience
        self._status: int | None = None

    def wait_for(self, words: str) -> None:
        """Until the child has said ``words``."""
        while words not in self.said:
            assert self._hear(self._patience), f"the child never said {words!r}, but {self.said}"

    def hear(self) -> str:
        """What it says next."""
        before = len(self.said)
        while len(self.said) == before:
            assert self._hear(self._patience), f"the child says no more than {self.said}"
        return self.said[before]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def has_ended(self) -> bool:
        """Whether it is gone for good, its descriptors and its I/O included."""
        if self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if found else None
        return self._status is not None

    def wait_end(self) -> int:
        """Exit code, or minus the signal that killed it; what it said until then is in ``said``."""
        if self._status is None:
            fd = os.pidfd_open(self.pid)
            try:
                assert select.select([fd], [], [], self._patience)[0], f"the child does not end; it said {self.said}"
            finally:
                os.close(fd)
            assert self.has_ended()
        while self._hear(0):
            pass
        assert self._status is not None
        return self._status

    def _hear(self, timeout: float) -> bool:
        if not select.select([self._channel], [], [], timeout)[0]:
            return False
        try:
            words = self._channel.recv(1 << 16).decode()
        except ConnectionResetError:
            return False
        if words:
            self.said.append(words)
        return bool(words)


@contextmanager
def forked(body: Callable[[Child], object], patience: float = 60.0) -> Iterator[Running]:
    """``body`` runs in a child that ends after it, by ``os._exit``: 0, or 1 after an exception, whose traceback it says."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # pytest's keeps what Python cannot raise, as in a destructor, and with it the frames and the tensors below it
            sys.unraisablehook = sys.__unraisablehook__
            torch.set_num_threads(1)  # the parent's pool of threads was not forked
            body(Child(theirs))
            status = 0
        except BaseException:
            theirs.send(traceback.format_exc().encode()[-60000:])
        os._exit(status)
    theirs.close()
    running = Running(pid, ours, patience)
    try:
        with ours:
            yield running
    finally:
        if not running.has_ended():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
