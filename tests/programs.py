"""Python programs in processes of their own that need not import torch: ``run`` and ``Popen`` are those of ``subprocess``.

A server forks each of them: a fresh interpreter that has imported torch and this package and has computed nothing. That takes
milliseconds, where an interpreter of its own needs seconds to import the same. The process is a child of the one that asks, and
has its own arguments, environment, working directory, standard streams, ``__main__`` and exit: threads, ``atexit``, what its
main module holds, and not what torch's modules hold. A ``tiered train`` ends with less text there (``TEXT``). What cannot be
had so (another program, options of the interpreter, other values of variables that Python or torch reads when it begins) begins
as always.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["LIBRARIES", "MODELS", "ONE_THREAD", "TEXT", "Popen", "fork_from_here", "run"]

ROOT = Path(__file__).resolve().parents[1]
RANKS = (
    *("pytest", "safetensors.torch", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint.state_dict", "tests.zero.models"),
)
"""Modules that processes of tests/zero/ranks.py need besides."""
MODELS = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
LIBRARIES = (
    *(*MODELS, "transformers.trainer", "peft", "trl", "trl.trainer.dpo_trainer", "datasets", "accelerate", "lightning"),
)
"""Modules that programs need, as far as they are installed: ``imported=MODELS`` where a model is enough, which takes a third of
the time, ``imported=LIBRARIES`` where it is trained with a library."""
TEXT = 20
"""Bytes of text that a model writes at the end of ``tiered train``: more than it sees at a time. All 240 would take longer than
the steps of most tests."""
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
"""Of the server and of what it forks: several at once on few cores are quicker so, and small models anyway."""

_EARLY = ("PYTHON", "LC_", "LANG", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "TORCH_")
_FOLLOWED = ("PYTHONPATH", "PYTHONIOENCODING")
"""How the names of variables begin that are read before a program begins; and those of them that are done here."""
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # of pyarrow, which datasets imports
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
_LENGTH = struct.Struct("=Q")


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``, forked by the server where it can be. Without ``env`` it has one thread. ``imported``: modules that
    its server has imported besides; there is a server for each such tuple."""

    def __init__(
        self, arguments: Sequence[Any], *, env: Mapping[str, str] | None = None, imported: tuple[str, ...] = (), **more: Any
    ) -> None:
        self._imported = imported
        super().__init__(arguments, env=os.environ | {"OMP_NUM_THREADS": "1"} if env is None else env, **more)

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        program = _program(asked)
        if program is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        theirs = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [place if stream == -1 else stream for place, stream in enumerate(theirs)]
        try:
            self.pid = _server(self._imported).fork(program, streams)
            self._child_created = True
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def run(
    arguments: Sequence[Any],
    *,
    input: str | bytes | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run``, with ``Popen`` of here."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more["stdout"] = more["stderr"] = subprocess.PIPE
    with Popen(arguments, **more) as child:
        try:
            out, errors = child.communicate(input, timeout=timeout)
        except BaseException:
            child.kill()
            raise
    done = subprocess.CompletedProcess(child.args, child.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


def fork_from_here() -> None:
    """For a program that the server forked and that starts others, before its first thread: forks those from what it is now."""
    ours, theirs = socket.socketpair()
    said = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = sys.path[1 + sum(map(bool, said)) :]
    _one_thread()
    server = os.fork()
    if server:
        theirs.close()
        _SERVERS[os.getpid(), ()] = _Server(ours, lambda: os.waitpid(server, 0))
        return
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with theirs:
        program, streams = _serve(theirs)
    _live(program, streams, path)


class _Program(NamedTuple):
    """``words``: ``-m name``, ``-c source`` or a script, and its arguments. ``options``: of the interpreter, ``-W error`` or
    none; what is imported already was imported without."""

    words: list[str]
    options: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    session: bool


def _program(asked: Mapping[str, Any]) -> _Program | None:
    """None: nothing for the server."""
    if isinstance(asked["args"], (str, bytes, os.PathLike)):
        return None
    words = [os.fsdecode(word) for word in asked["args"]]
    usual = {"executable": None, "preexec_fn": None, "pass_fds": (), "shell": False, "gid": None, "gids": None, "uid": None}
    if words[:1] != [sys.executable] or any(asked[name] != value for name, value in usual.items()):
        return None
    options = ("-W", "error") if words[1:3] == ["-W", "error"] else ()
    words = words[1 + len(options) :]
    if not words or (words[0].startswith("-") and (len(words) == 1 or words[0] not in ("-c", "-m"))):
        return None
    environment = os.environ if asked["env"] is None else asked["env"]
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    if _early(environment) != _early(ONE_THREAD):
        return None
    folder = os.path.abspath(os.fsdecode(asked["cwd"] or "."))
    return _Program(words, options, environment, folder, asked["start_new_session"])


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_EARLY) and name not in _FOLLOWED}


# The side of the tests

_SERVERS: dict[tuple[int, tuple[str, ...]], _Server] = {}
_STARTING = threading.RLock()


def _server(imported: tuple[str, ...]) -> _Server:
    """Of this process: one that was forked from another has its own."""
    which = os.getpid(), imported
    with _STARTING:
        if which not in _SERVERS:
            _SERVERS[which] = _started(imported)
        return _SERVERS[which]


def _started(imported: tuple[str, ...]) -> _Server:
    """What a server is asked comes through its standard input. One that imports more is forked from the one that does not."""
    channel, theirs = socket.socketpair()
    environment = {name: value for name, value in ONE_THREAD.items() if name != "PYTHONPATH"} | _NO_THREADS
    with theirs:
        if imported:
            program = _Program(["-m", "tests.programs", *imported], (), environment, str(ROOT), False)
            pid = _server(()).fork(program, [theirs.fileno(), 1, 2])
            server = _Server(channel, lambda: os.waitpid(pid, 0))
        else:
            command = [sys.executable, "-m", "tests.programs"]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs.fileno())
            server = _Server(channel, process.wait)
    _received(channel, 1)
    return server


class _Server:
    """``wait``: until it has ended, which it does when nobody can ask it any more."""

    def __init__(self, channel: socket.socket, wait: Callable[[], object]) -> None:
        self._pid, self._turn, self._channel, self._wait = os.getpid(), threading.Lock(), channel, wait
        atexit.register(self._end)

    def fork(self, program: _Program, streams: Sequence[int]) -> int:
        """The process becomes a child of this one when the one between it and the server has ended."""
        text = json.dumps(program).encode()
        with self._turn:
            _adopt(True)
            try:
                socket.send_fds(self._channel, [_LENGTH.pack(len(text))], streams)
                self._channel.sendall(text)
                return int(_LENGTH.unpack(_received(self._channel, _LENGTH.size))[0])
            finally:
                _adopt(False)

    def _end(self) -> None:
        self._channel.close()
        if self._pid == os.getpid():
            self._wait()


def _adopt(wanted: bool) -> None:
    """Whether what a descendant leaves behind when it ends becomes a child of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _received(channel: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        more = channel.recv(nbytes - len(found))
        if not more:
            raise EOFError("the other side of programs.py has ended")
        found += more
    return bytes(found)


# The side of the server


def _serve(channel: socket.socket) -> tuple[_Program, list[int]]:
    """It returns in each process that it forks. Without anybody who asks, the server ends."""
    while True:
        try:
            head, streams, _, _ = socket.recv_fds(channel, _LENGTH.size, 3)
            head += _received(channel, _LENGTH.size - len(head))
            text = _received(channel, *_LENGTH.unpack(head))
        except (EOFError, ConnectionError):
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            _wait_for_end(between)
            os.close(read)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            program = _Program(*json.loads(text))
            if program.session:
                os.setsid()
            os.write(write, _LENGTH.pack(os.getpid()))  # from here on it takes signals
            os.close(write)
            channel.close()
            return program, streams
        for fd in (write, *streams):
            os.close(fd)
        pid = os.read(read, _LENGTH.size)
        os.close(read)
        os.waitpid(between, 0)
        channel.sendall(pid)


def _wait_for_end(pid: int) -> None:
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        select.select([fd], [], [])
        os.close(fd)


def _become(program: _Program, streams: Sequence[int], path: Sequence[str]) -> None:
    """Run it as the interpreter would. What it raises is the interpreter's to handle. ``path``: of modules, without what is
    said by PYTHONPATH."""
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    if program.options:
        sys.warnoptions[:] = ["error"]
        warnings.simplefilter("error")
    for place, fd in enumerate(streams):
        os.dup2(fd, place)
        os.close(fd)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for place, (name, before) in enumerate((("stdin", sys.stdin), ("stdout", sys.stdout), ("stderr", sys.stderr))):
        lines = name == "stderr" or os.isatty(place)
        mode, buffering = "w" if place else "r", 1 if lines else -1
        how = "backslashreplace" if name == "stderr" else errors or ("strict" if encoding else before.errors)
        ours = open(place, mode, buffering, encoding=encoding or before.encoding, errors=how, closefd=False)  # noqa: SIM115
        setattr(sys, name, ours)
        setattr(sys, f"__{name}__", ours)
    how, *words = program.words
    script = how not in ("-m", "-c")
    first = os.path.dirname(os.path.realpath(how)) if script else os.getcwd() if how == "-m" else ""
    said = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [first, *said, *path]
    sys.argv[:] = [how, *words] if script else [how, *words[1:]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if how == "-m":
        package, _, name = words[0].rpartition(".")
        if sys.modules.pop(words[0], None) and package and not hasattr(sys.modules.get(words[0]), "__path__"):
            vars(sys.modules[package]).pop(name, None)
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
    elif how == "-c":
        exec(compile(words[0], "<string>", "exec"), vars(main))
    else:
        vars(main)["__file__"] = how
        exec(compile(Path(how).read_bytes(), how, "exec"), vars(main))


def _live(program: _Program, streams: Sequence[int], path: Sequence[str]) -> None:
    """Until it ends: as the interpreter would, without taking torch apart again, which takes as long as some programs do."""
    try:
        _become(program, streams, path)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    else:
        code = 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code & 0xFF)


def _one_thread() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "a thread is not forked"


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all of them, and tests end this one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the console script does before it imports torch
    for name in ("torch._dynamo", *RANKS):  # torch imports it when a layer first gets initial values: as long again
        importlib.import_module(name)
    for name in sys.argv[1:]:
        with suppress(ImportError):
            importlib.import_module(name)

    import tiered.cli.bench.command
    import tiered.cli.bench.train
    import tiered.cli.bench.trainer
    import tiered.cli.train.run
    import tiered.zero

    tiered.cli.train.run.SAMPLE = TEXT
    _one_thread()
    path = sys.path[1:]
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as channel, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        channel.sendall(b"!")
        program, streams = _serve(channel)
    _live(program, streams, path)


if __name__ == "__main__":
    _main()
