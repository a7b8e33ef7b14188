"""A filesystem of ours, in memory, that does to exact bytes of a file what disks do seldom: errors, short transfers, flipped
bits, and answers that do not come before the test lets them.

It speaks the kernel's FUSE protocol (linux/fuse.h) itself, so it needs /dev/fuse and root, and no library. It runs in a process
of its own (``python -m tests.stress.fusefs``), without torch: whatever waits in it, the test goes on, and a test that is killed
takes the mount down with it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import select
import socket
import stat
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

__all__ = ["RECORD", "FaultyDisk", "Rule", "faulty_disk", "why_not"]

ROOT = Path(__file__).resolve().parents[2]
_LIBC = ctypes.CDLL(None, use_errno=True)
_LARGEST = 1 << 20  # bytes of one request
RECORD = struct.Struct("<1sBxxIQ")
"""Head of a record: W(rite), F(sync), E (an fsync's error) or M(ark); bytes of name and data, which follow; data's place."""


@dataclass
class Rule:
    """Requests ``operation`` on a file whose name matches ``name`` that touch bytes in [``start``, ``stop``) get ``effect``:
    "direct write" and "direct read" are those with O_DIRECT.

    "error" with ``errno``; "short": only so many bytes as lie before ``start`` are moved, or ``moves`` of them; "flip": the
    byte at ``start`` is read as another; "stall": no answer until ``release``. The first ``skip`` are left alone, then
    ``times`` are not (-1: none ever is).
    """

    operation: str
    effect: str
    errno: int = 0
    name: str = ".*"
    start: int = 0
    stop: int = 1 << 62
    skip: int = 0
    times: int = 1
    moves: int = -1


def why_not() -> str:
    """Why it does not work here; empty where it does."""
    if os.geteuid() != 0:
        return "mounting a FUSE filesystem needs root"
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    return ""


class FaultyDisk:
    """The test's side."""

    def __init__(self, folder: Path, channel: socket.socket) -> None:
        self.folder = folder
        self._channel = channel

    def _ask(self, what: str, **arguments: Any) -> Any:
        self._channel.send(json.dumps([what, arguments]).encode())
        return json.loads(self._channel.recv(1 << 20))

    def add(self, rule: Rule) -> None:
        self._ask("add", rule=asdict(rule))

    def clear(self) -> list[int]:
        """Forget all rules, answer what is stalled; how often each rule fired."""
        return list(self._ask("clear"))

    def fired(self) -> list[int]:
        """By rule, in the order in which they were added."""
        return list(self._ask("fired"))

    def release(self, count: int = -1) -> int:
        """Answer so many stalled requests (-1: all there are), the oldest first; how many that were."""
        return int(self._ask("release", count=count))

    def stalled(self) -> int:
        """How many requests wait for ``release``."""
        return int(self._ask("stalled"))

    def wait_stalled(self, count: int = 1) -> None:
        """Until so many requests wait; fails where they never do."""
        assert self._ask("wait_stalled", count=count, patience=60.0), f"{self.stalled()} requests stalled, not {count}"

    def writes(self) -> list[list[int]]:
        """Every write that changed a file, in order: [process, offset, bytes]."""
        return list(self._ask("writes"))

    def record(self, path: Path) -> None:
        """From here on append every write and fsync, of any file, to the file ``path``, as ``RECORD`` says."""
        self._ask("record", path=str(path))

    def mark(self, words: str) -> None:
        """Append ``words``; what was answered before comes before them, and all that was appended is in the file then."""
        self._ask("mark", words=words)


@contextmanager
def faulty_disk(folder: Path, direct: Literal["async", "sync"] = "async") -> Iterator[FaultyDisk]:
    """``direct``: whether the kernel waits for the answers to direct I/O. When it does not, as with a drive, it makes EIO of a
    short write (fuse_get_res_by_io in fs/fuse/file.c)."""
    folder.mkdir(exist_ok=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.stress.fusefs", str(folder), str(theirs.fileno()), direct],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
    )
    theirs.close()
    with ours:
        try:
            assert ours.recv(64) == b"mounted", "the filesystem could not be mounted"
            yield FaultyDisk(folder, ours)
        finally:
            _LIBC.umount2(os.fsencode(folder), 2)  # MNT_DETACH
            server.kill()
            server.wait()


# -- the server ----------------------------------------------------------------------------------------------------------------

_IN = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _MKDIR, _UNLINK, _RMDIR, _RENAME, _OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC = (
    1, 2, 3, 4, 9, 10, 11, 12, 14, 15, 16, 17, 18, 20,
)  # fmt: skip
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _FSYNCDIR, _CREATE, _INTERRUPT, _BATCH_FORGET, _FALLOCATE, _RENAME2 = (
    25, 26, 27, 28, 29, 30, 35, 36, 42, 43, 45,
)  # fmt: skip
_KINDS = {_READ: "read", _WRITE: "write", _FSYNC: "fsync", _FSYNCDIR: "fsyncdir", _FALLOCATE: "fallocate", _CREATE: "create",
          _RENAME: "rename", _RENAME2: "rename", _UNLINK: "unlink", _OPEN: "open"}  # fmt: skip


class _Node:
    def __init__(self, number: int, mode: int) -> None:
        self.number, self.mode = number, mode
        self.data = bytearray()
        self.names: dict[str, _Node] = {}
        self.name = ""
        self.links, self.open = 1, 0


@dataclass
class _Request:
    opcode: int
    unique: int
    node: _Node
    pid: int
    body: bytes


class _Server:
    def __init__(self, folder: str, channel: socket.socket, direct: str) -> None:
        self.flags = 1 << 0 | 1 << 5 | 1 << 18 | 1 << 22  # ASYNC_READ, BIG_WRITES, PARALLEL_DIROPS, MAX_PAGES
        self.flags |= 1 << 15 if direct == "async" else 0  # ASYNC_DIO
        self.fd = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read={_LARGEST}"
        if _LIBC.mount(b"faulty", os.fsencode(folder), b"fuse", 0, options.encode()):
            sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
        self.channel = channel
        self.nodes = {1: _Node(1, stat.S_IFDIR | 0o755)}
        self.rules: list[tuple[Rule, list[int]]] = []  # with how often it applied, and how often it fired
        self.stalled: deque[_Request] = deque()
        self.awaited: tuple[int, float] | None = None
        self.written: list[tuple[int, int, int]] = []
        self.capacity = 256 << 20
        self.recording: BinaryIO | None = None

    def run(self) -> None:
        self.channel.send(b"mounted")
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.register(self.channel, select.POLLIN)
        while True:
            # A killed test waits for I/O that is stalled here before it closes anything. Its memory is gone by then.
            if not Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
                return
            for fd, events in poller.poll(20 if self.awaited else 1000):
                if fd == self.channel.fileno():
                    words = self.channel.recv(1 << 16)
                    if not words:
                        return
                    what, arguments = json.loads(words)
                    answer = getattr(self, "do_" + what)(**arguments)
                    if answer is not None:
                        self.channel.send(json.dumps(answer).encode())
                elif events & select.POLLIN:
                    self._serve()
                else:
                    return  # unmounted
            if self.awaited and (len(self.stalled) >= self.awaited[0] or time.monotonic() > self.awaited[1]):
                self.channel.send(json.dumps(len(self.stalled) >= self.awaited[0]).encode())
                self.awaited = None

    # what the test asks for

    def do_add(self, rule: dict[str, Any]) -> bool:
        self.rules.append((Rule(**rule), [0, 0]))
        return True

    def do_clear(self) -> list[int]:
        fired = self.do_fired()
        self.rules.clear()
        self.do_release(-1)
        return fired

    def do_fired(self) -> list[int]:
        return [counts[1] for _, counts in self.rules]

    def do_release(self, count: int) -> int:
        released = 0
        while self.stalled and released != count:
            request = self.stalled.popleft()
            self._answer(request, None)
            released += 1
        return released

    def do_stalled(self) -> int:
        return len(self.stalled)

    def do_wait_stalled(self, count: int, patience: float) -> None:
        self.awaited = count, time.monotonic() + patience

    def do_writes(self) -> list[tuple[int, int, int]]:
        return self.written

    def do_record(self, path: str) -> bool:
        self.recording = open(path, "wb")  # noqa: SIM115
        return True

    def do_mark(self, words: str) -> bool:
        self._record(b"M", "", 0, words.encode())
        assert self.recording is not None
        self.recording.flush()
        return True

    def _record(self, kind: bytes, name: str, offset: int, data: bytes) -> None:
        if self.recording is not None:
            encoded = name.encode()
            self.recording.write(RECORD.pack(kind, len(encoded), len(data), offset) + encoded + data)

    # what the kernel asks for

    def _serve(self) -> None:
        try:
            data = os.read(self.fd, _LARGEST + 65536)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                return
            sys.exit(0)  # ENODEV: unmounted
        _, opcode, unique, node, _, _, pid, _, _ = _IN.unpack_from(data)
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return
        request = _Request(opcode, unique, self.nodes.get(node, self.nodes[1]), pid, data[_IN.size :])
        rule = self._rule(request)
        if rule is not None and rule.effect == "stall":
            self.stalled.append(request)
        else:
            self._answer(request, rule)

    def _rule(self, request: _Request) -> Rule | None:
        kind = _KINDS.get(request.opcode)
        start, stop, direct = 0, 1 << 62, False
        if kind in ("read", "write"):
            _, start, size = struct.unpack_from("<QQI", request.body)
            stop = start + size
            direct = bool(struct.unpack_from("<I", request.body, 32)[0] & os.O_DIRECT)
        elif kind == "fallocate":
            _, start, size = struct.unpack_from("<QQQ", request.body)
            stop = start + size
        name = request.node.name
        if kind in ("create", "rename", "unlink"):
            name = request.body.split(b"\0")[-2].decode(errors="replace")
        for rule, counts in self.rules:
            applies = rule.operation == kind or (direct and rule.operation == f"direct {kind}")
            if applies and start < rule.stop and rule.start < stop and re.fullmatch(rule.name, name):
                counts[0] += 1
                if counts[0] > rule.skip and (rule.times < 0 or counts[1] < rule.times):
                    counts[1] += 1
                    return rule
        return None

    def _answer(self, request: _Request, rule: Rule | None) -> None:
        try:
            if rule is not None and rule.effect == "error":
                if request.opcode == _FSYNC:
                    self._record(b"E", request.node.name, 0, b"")
                raise OSError(rule.errno, "")
            body, code = self._do(request, rule), 0
        except OSError as error:
            body, code = b"", -(error.errno or errno.EIO)
        try:
            os.write(self.fd, _OUT.pack(_OUT.size + len(body), code, request.unique) + body)
        except OSError as error:
            if error.errno != errno.ENOENT:  # interrupted, and gone
                raise

    def _do(self, request: _Request, rule: Rule | None) -> bytes:
        node, body, opcode = request.node, request.body, request.opcode
        if opcode == _INIT:
            _, minor, _, flags = struct.unpack_from("<IIII", body)
            flags &= self.flags
            return struct.pack("<IIIIHHIIHHI28x", 7, min(minor, 36), 0, flags, 64, 48, _LARGEST, 1, _LARGEST >> 12, 0, 0)
        if opcode in (_READ, _WRITE):
            return self._move(request, rule)
        if opcode == _LOOKUP:
            return self._entry(self._child(node, body[:-1].decode()))
        if opcode == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
        if opcode == _SETATTR:
            return self._set(node, body)
        if opcode == _MKDIR:
            mode, _ = struct.unpack_from("<II", body)
            return self._entry(self._make(node, body[8:-1].decode(), stat.S_IFDIR | mode))
        if opcode == _CREATE:
            _, mode, _, _ = struct.unpack_from("<IIII", body)
            made = self._make(node, body[16:-1].decode(), stat.S_IFREG | mode & 0o7777)
            made.open += 1
            return self._entry(made) + struct.pack("<QII", made.number, 0, 0)
        if opcode in (_OPEN, _OPENDIR):
            node.open += 1
            return struct.pack("<QII", node.number, 0, 0)
        if opcode in (_UNLINK, _RMDIR):
            name = body[:-1].decode()
            if self._child(node, name).names:
                raise OSError(errno.ENOTEMPTY, "")
            self._unlink(node.names.pop(name))
            return b""
        if opcode in (_RENAME, _RENAME2):
            return self._rename(node, body, 8 if opcode == _RENAME else 16)
        if opcode == _READDIR:
            return self._list(node, *struct.unpack_from("<QQI", body))
        if opcode == _STATFS:
            blocks = self.capacity >> 12
            free = max(0, blocks - (sum(len(other.data) for other in self.nodes.values()) >> 12))
            return struct.pack("<QQQQQIIII24x", blocks, free, free, 1 << 20, 1 << 20, 4096, 255, 4096, 0)
        if opcode == _FALLOCATE:
            _, start, size, mode = struct.unpack_from("<QQQI", body)
            if not mode & 1:  # FALLOC_FL_KEEP_SIZE
                node.data.extend(bytes(max(0, start + size - len(node.data))))
            if mode & 0x12:  # FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE: what a loop device makes of "write zeroes"
                size = min(size, len(node.data) - start)
                node.data[start : start + size] = bytes(size)
                self._record(b"W", node.name, start, bytes(size))
            return b""
        if opcode in (_RELEASE, _RELEASEDIR):
            node.open -= 1
            self._forget(node)
            return b""
        if opcode in (_FLUSH, _FSYNC, _FSYNCDIR):
            if opcode == _FSYNC:
                self._record(b"F", node.name, 0, b"")
            return b""
        raise OSError(errno.ENOSYS, "")

    def _move(self, request: _Request, rule: Rule | None) -> bytes:
        _, start, size = struct.unpack_from("<QQI", request.body)
        node = request.node
        if rule is not None and rule.effect == "short":
            size = min(size, rule.moves if rule.moves >= 0 else max(0, rule.start - start))
        if request.opcode == _READ:
            data = bytes(node.data[start : start + size])
            if rule is not None and rule.effect == "flip":
                at = max(rule.start, start) - start
                data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            return data
        node.data.extend(bytes(max(0, start + size - len(node.data))))
        node.data[start : start + size] = request.body[40 : 40 + size]
        self.written.append((request.pid, start, size))
        self._record(b"W", node.name, start, request.body[40 : 40 + size])
        return struct.pack("<II", size, 0)

    # names and attributes

    def _child(self, node: _Node, name: str) -> _Node:
        if name not in node.names:
            raise OSError(errno.ENOENT, "")
        return node.names[name]

    def _make(self, node: _Node, name: str, mode: int) -> _Node:
        if name in node.names:
            raise OSError(errno.EEXIST, "")
        made = _Node(max(self.nodes) + 1, mode)
        made.name = name
        self.nodes[made.number] = node.names[name] = made
        return made

    def _unlink(self, node: _Node) -> None:
        node.links = 0
        self._forget(node)

    def _forget(self, node: _Node) -> None:
        if not node.links and not node.open:
            node.data.clear()

    def _rename(self, node: _Node, body: bytes, header: int) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        old, new = (name.decode() for name in body[header:].split(b"\0")[:2])
        moved = self._child(node, old)
        del node.names[old]
        if new in self.nodes[target].names:
            self._unlink(self.nodes[target].names[new])
        self.nodes[target].names[new] = moved
        moved.name = new
        return b""

    def _set(self, node: _Node, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & 1:
            (mode,) = struct.unpack_from("<I", body, 68)
            node.mode = stat.S_IFMT(node.mode) | mode & 0o7777
        if valid & 8:
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
        return struct.pack("<QII", 0, 0, 0) + self._attributes(node)

    def _attributes(self, node: _Node) -> bytes:
        size = len(node.data)
        return _ATTR.pack(node.number, size, -(-size // 512), 0, 0, 0, 0, 0, 0, node.mode, 1, 0, 0, 0, 4096, 0)

    def _entry(self, node: _Node) -> bytes:
        return struct.pack("<QQQQII", node.number, 0, 0, 0, 0, 0) + self._attributes(node)

    def _list(self, node: _Node, _: int, offset: int, size: int) -> bytes:
        out = b""
        for index, (name, child) in enumerate(list(node.names.items())[offset:], offset + 1):
            encoded = name.encode()
            entry = struct.pack("<QQII", child.number, index, len(encoded), child.mode >> 12) + encoded
            entry += bytes(-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return out


if __name__ == "__main__":
    _Server(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), sys.argv[3]).run()
