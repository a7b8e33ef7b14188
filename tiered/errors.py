"""Every error that ``tiered`` raises, in one tree, and how errors quote names that come from a file or a peer.

::

    TieredError
     +- MisuseError               the call is wrong as made
     |   +- KeyNotFound           (also a KeyError)
     |   +- LeaseConflict
     |   +- StoreClosed
     |   +- StoreLocked
     |   +- ForkedStore
     |   +- ChangedInPlace        (also a RuntimeError, as torch raises it)
     +- InterruptedStore          an exception struck a call and left a store that has to be reopened
     +- CapacityError             it does not fit: says what is needed, what there is, who holds it
     +- TransferError             bytes could not be moved: key, tier, path, offset, errno
     |   +- ReadError
     |   +- WriteError
     |   +- ShortTransfer
     |   +- CorruptionError       the bytes that were read are not those that were written
     +- CommitError
     +- ManifestError
     +- RankError                 another rank is lost, late, or does something else
     +- SafetensorsError
     +- GgufError
     +- TorchFileError            a file of torch.save is damaged, or has what could run code
     +- InterruptedStep           an exception cut off a training step that cannot be resumed: says what to call

Warnings are no errors: ``close`` warns with ``UncommittedWarning`` of changes that it drops, and the end of a ``with`` block of
what its commit lacks of a model; ``zero.page`` with ``SharedMemoryWarning`` of tensors that show parameters, and with
``QuantizedWarning`` of parameters that it packs though somebody may want to train them.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import islice
from types import UnionType
from typing import ParamSpec, TypeVar

WIDEST = 100
"""Most characters of a name, or of another text from a file, that an error prints."""

NEAREST_OF = 4096
"""Most names of a store among which an error looks for the nearest to one that is not there: some 10 ms."""

LONGEST_NAME = 255
"""Bytes of the name of a file, on Linux."""

__all__ = [
    "CapacityError",
    "ChangedInPlace",
    "CommitError",
    "CorruptionError",
    "ForkedStore",
    "GgufError",
    "InterruptedStep",
    "InterruptedStore",
    "KeyNotFound",
    "LeaseConflict",
    "ManifestError",
    "MisuseError",
    "RankError",
    "ReadError",
    "SafetensorsError",
    "ShortTransfer",
    "StoreClosed",
    "StoreLocked",
    "TieredError",
    "TorchFileError",
    "TransferError",
    "WriteError",
]  # errors only: the package exports all of these


_P = ParamSpec("_P")
_R = TypeVar("_R")


def from_here(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have ``method``, which callers use, raise a TieredError without the package's frames below it."""

    @wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except TieredError as error:
            drop_frames(error)
            raise error

    return called


def drop_frames(error: TieredError) -> None:
    """Remove the traceback of ``error`` where all frames in it are the package's: they say nothing to a caller.

    A frame of a caller's own function (a policy, an order that is a generator) keeps the traceback as it is.
    """
    trace = error.__traceback__
    while trace is not None:
        if not str(trace.tb_frame.f_globals.get("__name__", "")).startswith("tiered."):
            return
        trace = trace.tb_next
    error.__traceback__ = None


def shortened(text: str, most: int = WIDEST) -> str:
    """Return ``text``, without its middle where it has more than ``most`` characters."""
    left = (most - 2) // 2
    return text if len(text) <= most else f"{text[:left]}...{text[left + 3 - most :]}"


def shown(text: str, most: int = WIDEST) -> str:
    """Return ``text`` on one line, ``shortened``, with unprintable characters escaped as in Python, so that it cannot control a
    terminal."""
    return shortened(_escaped(shortened(text, 2 * most)), most)


def quoted(value: object, most: int = WIDEST) -> str:
    """Return a number, a text or None as Python writes it, ``shown``; of any other value its type. To write a container of a
    foreign file takes as long as the file wants, and an object of a caller's may write anything."""
    if isinstance(value, str | bytes):
        return shown(repr(value[: 2 * most]), most)
    if value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 1024):
        return shown(repr(value), most)
    return f"a {type(value).__name__}"


def expect_type(value: object, kinds: type | UnionType | tuple[type, ...], what: str) -> None:
    """Raise MisuseError where an argument is of none of ``kinds``. The message is ``what``, which says what is right, and
    what is given."""
    if not isinstance(value, kinds):
        raise MisuseError(f"{what}, not {quoted(value)}")


def one_of(name: str, value: object, allowed: Iterable[str | None]) -> None:
    """Raise MisuseError where an argument is none of the texts (or None) that it may be. The message names the argument, what
    it may be, and what is given."""
    known = tuple(allowed)
    if not isinstance(value, str | None) or value not in known:
        *others, last = map(repr, known)
        raise MisuseError(f"{name} is {', '.join(others)} or {last}, not {quoted(value)}")


def whole_number(what: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise MisuseError where an argument is no whole number from ``least`` to ``most`` (None: to any). The message is
    ``what``, which says what it counts, and what is given."""
    if type(value) is not int or value < least or (most is not None and value > most):
        span = f"from {least} on" if most is None else f"from {least} to {most:,}"
        raise MisuseError(f"{what}, a whole number {span}, not {quoted(value)}")


def number_between(what: str, value: object, above: float, below: float) -> None:
    """Raise MisuseError where an argument is no number above one and below another. The message is ``what``, which says what it
    measures, and what is given."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < below:
        span = f"above {above}" if below == math.inf else f"above {above} and below {below}"
        raise MisuseError(f"{what}, a number {span}, not {quoted(value)}")


def listed(given: Iterable[_R], what: str) -> list[_R]:
    """Return the items of an iterable that a caller gives. Raises MisuseError, as ``expect_type``, for another type, and for a
    text."""
    expect_type(given, Iterable, what)
    try:
        if not isinstance(given, str | bytes):
            return list(given)
    except TypeError:  # of a tensor without a dimension
        pass
    raise MisuseError(f"{what}, not {quoted(given)}")


def path_of(path: object, what: str) -> str:
    """Return a path that a caller gives as text. Raises MisuseError for another type, and for what is no name of a file."""
    expect_type(path, str | os.PathLike, f"{what} is a str or a pathlib.Path")
    text = os.fspath(path)  # type: ignore[call-overload]
    expect_type(text, str, f"{what} is a str or a pathlib.Path")
    try:
        parts = os.fsencode(text).split(b"/")
    except UnicodeEncodeError:
        parts = []
    if not text or not parts or "\0" in text:
        here = "" if text else "; '.' is the current one"
        raise MisuseError(f"{what} is {quoted(text)}, which is not the name of a file or folder{here}")
    if max(map(len, parts)) > LONGEST_NAME:
        raise MisuseError(f"{what} is {quoted(text)}, with a name of more than {LONGEST_NAME} bytes: give a shorter path")
    return str(text)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class TieredError(Exception):
    """Base of every error that this package raises."""


class MisuseError(TieredError):
    """The call is wrong as made; the message says how to make it right."""


class ChangedInPlace(MisuseError, RuntimeError):
    """A tensor that autograd saved for backward was modified in place after that."""


class KeyNotFound(MisuseError, KeyError):
    """The store has no tensor of that name. ``sought``: the key; the message ends with the nearest of the first names in
    ``names``."""

    def __init__(self, message: str, sought: str = "", names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self._sought, self._names = sought, list(islice(names, NEAREST_OF))

    def __str__(self) -> str:
        """Return the message. The nearest name is looked for here, because a program may catch many of these and show none."""
        said = Exception.__str__(self)  # KeyError would print the repr of its argument
        return f"{said}{meant(self._sought, self._names)}"


def meant(sought: object, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the nearest of the first names in ``names``, or with the one whose part after the last
    "/" is nearest; nothing where none is near, and for what is no name, or a very long one."""
    if not isinstance(sought, str) or len(sought) > LONGEST_NAME:
        return ""
    known = list(islice(names, NEAREST_OF))
    ends = {name.rpartition("/")[2]: name for name in known}
    near = difflib.get_close_matches(sought, known, 1) or [ends[end] for end in difflib.get_close_matches(sought, ends, 1)]
    return f"; did you mean {near[0]!r}?" if near else ""


class LeaseConflict(MisuseError):
    """A lease that excludes this one is open."""


class StoreClosed(MisuseError):
    """The store was closed before."""


class StoreLocked(MisuseError):
    """Another process holds the store."""


class ForkedStore(MisuseError):
    """A store was used in a forked child; only the process that opened it may."""


class InterruptedStore(TieredError):
    """An exception (Ctrl-C, or one of a signal handler) struck a call of the store and left state that cannot be repaired:
    close the store and reopen it. Nothing is committed any more; the last commit holds."""


class CapacityError(TieredError):
    """Something does not fit into a tier, now (after a bounded wait) or ever."""


class TransferError(TieredError):
    """Bytes of one tensor could not be moved. Other tensors are not affected.

    Attributes: ``key``, ``tier`` (name), ``path`` (file or None), ``offset`` (bytes in that file), ``errno`` (or None).
    """

    _mend = ""
    """What to do where a file is concerned, for the end of the message."""

    def __init__(
        self, what: str, *, key: str, tier: str, path: str | None, offset: int, errno: int | None
    ) -> None:
        self.key, self.tier, self.path, self.offset, self.errno = key, tier, path, offset, errno
        where = f"{path} at byte {offset}" if path else f"tier {tier} at byte {offset}"
        why = f": {os.strerror(errno)} (errno {errno})" if errno else ""
        super().__init__(f"{what} tensor {key!r}, {where}{why}{self._mend if path else ''}")
        self._what = what

    def having(self, what: str) -> TransferError:
        """Return the same error, which also says what was wanted of the tensor."""
        rest = (self.key, self.tier, self.path, self.offset, self.errno)
        return _unpickled(type(self), f"{what} cannot be read: {self._what}", *rest)

    def __reduce__(self) -> tuple[Callable[..., TransferError], tuple[object, ...]]:
        rest = (self._what, self.key, self.tier, self.path, self.offset, self.errno)
        return _unpickled, (type(self), *rest)


def _unpickled(
    kind: type[TransferError], what: str, key: str, tier: str, path: str | None, offset: int, errno: int | None
) -> TransferError:
    return kind(what, key=key, tier=tier, path=path, offset=offset, errno=errno)


class ReadError(TransferError):
    """The device answered a read with an error."""


class WriteError(TransferError):
    """The device answered a write with an error; the tensor is still whole in the tier above."""


class ShortTransfer(TransferError):
    """Fewer bytes moved than were asked for, and the rest cannot be read (end of file)."""


class CorruptionError(TransferError):
    """The bytes that were read do not have the checksum of those that were written."""

    _mend = "; run tiered verify on the store's folder, which names all damage, or open an older commit with generation="


class CommitError(TieredError):
    """A commit did not become durable; the last acknowledged one still holds."""


class ManifestError(TieredError):
    """A manifest or a store's folder is damaged, foreign, or of an unknown version."""


class UncommittedWarning(UserWarning):
    """``close``, the end of a program or of the last reference to a store, or the end of a ``with`` block after steps that
    followed a commit with an ``extra``, dropped changes that were not committed; or the commit at the end is no checkpoint of a
    model, or lacks its scheduler. The message says what to do."""


class SharedMemoryWarning(UserWarning):
    """Something outside of a model keeps tensors that show memory of its parameters, which ``zero.page`` takes away."""


class QuantizedWarning(UserWarning):
    """``zero.page`` packs and freezes parameters that need a gradient, although others were frozen before: too few for these to
    be a base that something is trained over. The message says what to do."""


class RankError(TieredError):
    """Another rank of several is lost, did not answer in time, or does something else; the message says which, and what for."""


class SafetensorsError(TieredError):
    """A file is not a safetensors file, is damaged, or does not match its folder's index."""


class GgufError(TieredError):
    """A file is not a GGUF file, is damaged, or is cut short."""


class TorchFileError(TieredError):
    """A file of ``torch.save`` is damaged, or has something that is not read because it could run code."""


class InterruptedStep(TieredError):
    """An exception struck inside a training step and left a model that would compute wrong numbers; ``zero.rollback`` repairs
    it."""
