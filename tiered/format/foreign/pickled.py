"""Pickles, read without running anything in them.

``unpickled`` is a stack machine of its own over the opcodes of a pickle (https://docs.python.org/3/library/pickletools.html).
It imports nothing and calls nothing that a pickle names: a name is looked up in a table of what can be made here, or becomes an
inert ``Instance`` where the caller's list has it. Any other name raises.

Time and memory are bounded by the size of the pickle: some microseconds and some hundred bytes for each of its bytes, however
often it uses one value. So each of these has a limit: the bytes of a pickle (``MAX_PICKLE``), the size of what is hashed (a key
of a dict, the name of a class or a storage: ``LONGEST_KEY``), keys whose hash a file can choose (``MOST_CHOSEN``), dimensions
(``MOST_DIMENSIONS``), bits of an integer (``LONGEST``), what calls make (``MOST_REPEATED``), nesting (``DEEPEST``), and how
large the object is when a value that it has twice is counted twice (``MOST_SHARED``): readers walk through it. Needs no torch.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tiered.errors import TorchFileError, shown

__all__ = ["MAX_PICKLE", "Instance", "Name", "PickleMachine", "as_dict", "as_list", "as_text", "sizes_of", "unpickled"]

MAX_PICKLE = 512 << 20
"""Bytes of one pickle: of some million names."""
LONGEST_KEY = 4096
"""Characters, bytes and values of a key of a dict, and characters of a name: a key is hashed, and compared, wherever it is
used."""
MOST_CHOSEN = 1 << 16
"""Keys that are numbers; a tuple counts as 8 and its size. Python hashes texts with a secret, and not these: a file may have
chosen them so that each is compared with all others."""
MOST_DIMENSIONS = 64
"""Dimensions of a tensor; torch's limit."""
LONGEST = 8192
"""Bits of an integer: Python writes no text of one with more than 4300 digits."""
DEEPEST = 500
"""Levels of nesting."""
MOST_REPEATED = 4
"""Values that calls may make of a pickle's containers and texts, for each of its bytes: one container may be given to many
calls."""
MOST_SHARED = 16
"""Values of the object that is read, for each byte of the pickle, where each is counted as often as it can be reached."""
ALWAYS = 1 << 20
"""Such values that any pickle may have."""

_NUMBERS = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "i2": "<h", "i1": "<b", "u1": "<B", "b1": "<?"}


@dataclass(frozen=True)
class Name:
    """Class or function that a pickle names. Nothing is behind it."""

    text: str


@dataclass(eq=False)
class Instance:
    """Object of a class that stands in the caller's list: its arguments and its state, as the pickle has them."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def attribute(self, name: str) -> Any:
        """Return an attribute that the state has; None where it has none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def unpickled(data: bytes, path: str, inert: Collection[str] = ()) -> Any:
    """Return the object that a pickle describes: plain values and containers, ``Instance`` for objects of the classes in
    ``inert`` (full names), and ``Name`` for a class or element type by itself.

    Nothing that the pickle names is imported or called. Raises TorchFileError, which begins with ``path``, for any other name,
    for opcodes that are not of plain pickles, for what is damaged, and for what passes the limits of this module.
    """
    return PickleMachine(path, inert).read(data)


_DAMAGED = (
    *(ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error, RecursionError),
)


class _PastLimit(Exception):
    """A pickle would take more time or memory than a file of tensors needs; the message says what it has."""


def as_dict(value: Any) -> Mapping[Any, Any]:
    """Return ``value``, a dict of a pickle. Raises ValueError for another type."""
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} is taken for a dict")
    return value


def as_list(value: Any) -> Sequence[Any]:
    """Return ``value``, a list or a tuple. Raises ValueError for another type."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"a {type(value).__name__} is taken for a list")
    return value


def as_text(value: Any) -> str:
    """Return ``value``, a text. Raises ValueError for another type."""
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} is taken for a name")
    return value


def sizes_of(sizes: Any) -> tuple[int, ...]:
    """Return a shape, strides or offsets of a pickle. Raises ValueError for what is none."""
    if isinstance(sizes, tuple | list) and len(sizes) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(sizes):,} dimensions; the limit is {MOST_DIMENSIONS}")
    if not isinstance(sizes, tuple | list) or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError("a shape is none")
    return tuple(sizes)


def _inside(value: Any) -> Iterator[Any] | None:
    """Return the values in a container or an object; None where it is neither, or empty."""
    if isinstance(value, list | tuple | set):
        return iter(value) if value else None
    if isinstance(value, dict):
        return chain(value.keys(), value.values()) if value else None
    return iter((value.arguments, value.state)) if isinstance(value, Instance) else None


def _refuse_multiplied(value: Any, most: int) -> None:
    """Raise _PastLimit where ``value`` is nested deep, contains itself, or has more than ``most`` values, each counted as often
    as it can be reached; 16 characters of a text count as one."""
    measured: dict[int, tuple[int, int]] = {}  # values and levels, of each container that was walked through
    path: list[tuple[Any, Iterator[Any]]] = [((value,), iter((value,)))]
    sums, below, under_way = [0], [0], {id(path[0][0])}
    while True:
        for one in path[-1][1]:
            inside = None
            if isinstance(one, str | bytes | bytearray):
                sums[-1] += 1 + len(one) // 16
            elif id(one) in measured:
                count, levels = measured[id(one)]
                sums[-1] += count
                below[-1] = max(below[-1], levels)
            elif (inside := _inside(one)) is None:
                sums[-1] += 1
            if len(path) + below[-1] > DEEPEST:
                raise _PastLimit(f"is nested deeper than {DEEPEST} levels")
            if sums[-1] > most:
                raise _PastLimit(f"has one value so often that there are more than {most:,} altogether")
            if inside is not None:
                if id(one) in under_way:
                    raise _PastLimit("has a container that contains itself")
                path.append((one, inside))
                under_way.add(id(one))
                sums.append(1)
                below.append(0)
                break
        else:
            done, _ = path.pop()
            if not path:
                return
            under_way.remove(id(done))
            count, levels = measured[id(done)] = sums.pop(), below.pop() + 1
            sums[-1] += count
            below[-1] = max(below[-1], levels)


_MARK = object()
_CONSTANTS = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False,
}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _size(one: Any) -> int:
    """Return the characters, bytes or words of a plain value that is a key, or in one. Raises ValueError for another."""
    if isinstance(one, str | bytes):
        return len(one) + 1
    if isinstance(one, int):  # a bool, too
        if one.bit_length() > 64:
            raise _PastLimit(f"has an integer of {one.bit_length():,} bits for a key; the limit is 64")
        return 1
    if one is None or isinstance(one, float | Name):
        return 1
    raise ValueError(f"a {type(one).__name__} is a key, or in one")


class PickleMachine:
    """Stack machine of a pickle: one object per run. ``made``: what it makes of the calls of these names, beside plain
    containers."""

    def __init__(self, path: str, inert: Collection[str] = (), made: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self._path, self._inert = path, inert
        self._room, self._chosen = 0, MOST_CHOSEN
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._made: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": lambda pairs=(): self._dict(pairs),
            "collections.defaultdict": lambda factory=None, pairs=(): self._dict(pairs),
            "collections.Counter": lambda counts=(): self._dict(counts.items() if isinstance(counts, dict) else counts),
            "builtins.set": lambda items=(): {self._key(item) for item in self._room_for(items)},
            "__builtin__.set": lambda items=(): {self._key(item) for item in self._room_for(items)},
            "builtins.frozenset": lambda items=(): {self._key(item) for item in self._room_for(items)},
            "torch.Size": lambda sizes=(): sizes_of(sizes),
            "_codecs.encode": lambda text, code="latin1": self._room_for(text).encode("latin1"),
            "numpy.core.multiarray.scalar": self._number,
            "numpy._core.multiarray.scalar": self._number,
            "numpy.dtype": lambda kind, *rest: Instance("numpy.dtype", (kind,)),
            **(made or {}),
        }

    def read(self, data: bytes) -> Any:
        """Return the object that ``data`` describes. Raises TorchFileError, as ``unpickled``."""
        path = self._path
        if len(data) > MAX_PICKLE:
            raise TorchFileError(f"{path}: its pickle has {len(data):,} bytes; the limit is {MAX_PICKLE:,}")
        try:
            return self._run(data)
        except _PastLimit as error:
            raise TorchFileError(f"{path}: its pickle {error}, which no file of tensors needs, so it is not read") from None
        except _DAMAGED as error:
            raise TorchFileError(f"{path}: its pickle is damaged ({shown(str(error), 100)})") from error

    def stored(self, reference: Any) -> Any:
        """Return what a reference to something beside the pickle is. Raises ValueError: there is nothing."""
        raise ValueError("a reference is to no storage")

    def _run(self, data: bytes) -> Any:
        self._room = MOST_REPEATED * len(data)
        for code, argument, _ in pickletools.genops(data):
            name = code.name
            if name in _LITERALS:
                if type(argument) is int and argument.bit_length() > LONGEST:
                    raise _PastLimit(f"has an integer of {argument.bit_length():,} bits")
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name == "STOP":
                (value,) = self._stack
                if value is _MARK:
                    break
                _refuse_multiplied(value, MOST_SHARED * len(data) + ALWAYS)
                return value
            else:
                self._step(name, argument)
        raise ValueError("it does not end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "EMPTY_SET":
            stack.append(set())
        elif name in _TUPLES:
            stack.append(tuple(self._popped(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name == "LIST":
            stack.append(self._since_mark())
        elif name == "DICT":
            stack.append(self._dict(self._pairs(self._since_mark())))
        elif name == "FROZENSET":
            stack.append({self._key(item) for item in self._since_mark()})
        elif name == "APPEND":
            (item,) = self._popped(1)
            self._container(list).append(item)
        elif name == "APPENDS":
            items = self._since_mark()
            self._container(list).extend(items)
        elif name == "ADDITEMS":
            items = self._since_mark()
            self._container(set).update(map(self._key, items))
        elif name == "SETITEM":
            key, item = self._popped(2)
            self._container(dict)[self._key(key)] = item
        elif name == "SETITEMS":
            pairs = self._pairs(self._since_mark())
            self._container(dict).update((self._key(key), item) for key, item in pairs)
        elif name == "GLOBAL":
            stack.append(self._name(*argument.split(" ")))
        elif name == "STACK_GLOBAL":
            stack.append(self._name(*self._popped(2)))
        elif name == "REDUCE":
            called, arguments = self._popped(2)
            stack.append(self.called(called, arguments))
        elif name == "NEWOBJ":
            kind, arguments = self._popped(2)
            stack.append(self._instance(kind, arguments))
        elif name == "BUILD":
            (state,) = self._popped(1)
            target = self._top()
            if isinstance(target, Instance):
                target.state = state
            elif not isinstance(target, dict):  # of an OrderedDict: attributes, which no value depends on
                raise ValueError("a state is for what has none")
        elif name == "BINPERSID":
            (found,) = self._popped(1)
            stack.append(self.stored(found))
        elif name == "POP":
            self._popped(1)
        elif name == "POP_MARK":
            self._since_mark()
        elif name == "DUP":
            stack.append(self._top())
        else:
            raise TorchFileError(f"{self._path}: its pickle has the opcode {name}, which files of tensors do not need")

    # -- the stack -----------------------------------------------------------------------------------------------------------

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise ValueError("a mark is taken for a value")
        return self._stack[-1]

    def _popped(self, count: int) -> list[Any]:
        found = self._stack[-count:]
        if len(found) != count or any(item is _MARK for item in found):
            raise ValueError("its stack is too short")
        del self._stack[-count:]
        return found

    def _since_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                found = self._stack[index + 1 :]
                del self._stack[index:]
                return found
        raise ValueError("a mark is missing")

    def _container(self, kind: type[Any]) -> Any:
        found = self._top()
        if type(found) is not kind:
            raise ValueError(f"a {type(found).__name__} is taken for a {kind.__name__}")
        return found

    @staticmethod
    def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
        if len(items) % 2:
            raise ValueError("a key has no value")
        return list(zip(items[::2], items[1::2], strict=True))

    def _dict(self, pairs: Any) -> dict[Any, Any]:
        return {self._key(key): item for key, item in self._room_for(pairs)}

    def _room_for(self, given: Any) -> Any:
        """Return what a call is given. Raises ValueError where calls have made very much of what the pickle has once."""
        self._room -= len(given)
        if self._room < 0:
            raise ValueError(f"its calls make more than {MOST_REPEATED} values for each of its bytes")
        return given

    def _key(self, key: Any) -> Any:
        """Return a key of a dict, which is a plain value: the hash of a deep tuple would overflow the stack."""
        kind, chosen = type(key), 0
        if kind is str or kind is bytes:
            size = len(key)
        elif kind is tuple:
            size = len(key) if len(key) > LONGEST_KEY else sum(map(_size, key))
            chosen = 8 + size
        else:
            size = 1 if kind is Instance else _size(key)
            chosen = size if kind is int or kind is float else 0
        if size > LONGEST_KEY:
            raise _PastLimit(f"has a key of {size:,} characters or values (a {kind.__name__}); the limit is {LONGEST_KEY:,}")
        self._chosen -= chosen
        if self._chosen < 0:
            raise _PastLimit(f"has more than {MOST_CHOSEN:,} numbers (or {MOST_CHOSEN // 10:,} tuples) for keys")
        return key

    def _name(self, *parts: Any) -> Name:
        return Name(".".join(map(self.text, parts)))

    @staticmethod
    def text(text: Any) -> str:
        """Return a name. Raises ValueError for what is no text, or long."""
        if not isinstance(text, str):
            raise ValueError("a name is no text")
        if len(text) > LONGEST_KEY:
            raise _PastLimit(f"has a name of {len(text):,} characters; the limit is {LONGEST_KEY:,}")
        return text

    # -- what is made --------------------------------------------------------------------------------------------------------

    def called(self, called: Any, arguments: Any) -> Any:
        """Return what a call makes. Raises ValueError, and TorchFileError for a name that may not stand there."""
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise ValueError("a call is of no name")
        if called.text in self._made:
            return self._made[called.text](*arguments)
        if called.text == "copyreg._reconstructor" and arguments:
            return self._instance(arguments[0], ())
        return self._instance(called, arguments)

    def _instance(self, kind: Any, arguments: Any) -> Any:
        if not isinstance(kind, Name) or not isinstance(arguments, tuple):
            raise ValueError("an object is of no class")
        if kind.text == "collections.OrderedDict" and not arguments:
            return {}
        if kind.text not in self._inert:
            raise TorchFileError(
                f"{self._path}: its pickle calls {shown(kind.text, 200)}, which is not among the names that may stand in "
                "such a file; nothing was called"
            )
        return Instance(kind.text, arguments)

    @staticmethod
    def _number(dtype: Any, data: Any) -> Any:
        kind = dtype.arguments[0] if isinstance(dtype, Instance) and dtype.name == "numpy.dtype" else None
        data = data.encode("latin1") if isinstance(data, str) else data
        if kind not in _NUMBERS or not isinstance(data, bytes):
            raise ValueError("a NumPy scalar is of no known type")
        (value,) = struct.unpack(_NUMBERS[kind], data)
        return value
