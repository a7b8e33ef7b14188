"""Files of ``torch.save``, and other pickles, read without running anything in them.

A file of ``torch.save`` is a zip archive, not compressed: ``data.pkl`` is a pickle of the object, in which tensors name the
entries ``data/KEY`` that hold their elements (https://pytorch.org/docs/stable/notes/serialization.html). ``unpickled`` is a
stack machine of its own over the opcodes of a pickle (https://docs.python.org/3/library/pickletools.html). It imports
nothing and calls nothing that a pickle names: a name is looked up in a table of what can be made here, or becomes an inert
``Instance`` where the caller's list has it. Any other name raises. Reading trusts nothing else either: entries have to lie
within the file, and are read only where their checksum is right. Needs no torch.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from tiered.errors import TorchFileError, shown

__all__ = ["Instance", "Name", "StoredTensor", "TorchFile", "unpickled"]

MAX_PICKLE = 512 << 20
"""Bytes of one pickle: of some million names."""
READ_BYTES = 4 << 20
MOST_REPEATED = 4
"""Values that calls may make of a pickle's containers and texts, for each of its bytes: one container may be given to many
calls."""

ELEMENTS = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}
"""Bytes of an element, by torch's names of types."""
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}
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


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    numel: int


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Tensor of a file: element type (torch's name), shape, strides and first element in the entry ``key``, which has
    ``numel`` elements."""

    file: TorchFile = field(repr=False)
    key: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int

    @property
    def count(self) -> int:
        """Return how many elements the tensor has."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements lie in the entry one after the other, row-major."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True

    @property
    def span(self) -> int:
        """Return how many elements of the entry lie between its first and its last, these included."""
        if not self.count:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    def read(self, begin: int, end: int) -> bytearray:
        """Return the bytes of elements ``begin`` to ``end``, counted in the entry from the tensor's first one."""
        size = ELEMENTS[self.dtype]
        return self.file.read(self.key, (self.offset + begin) * size, (self.offset + end) * size)


class TorchFile:
    """A file of ``torch.save``, open for reading; a context manager. ``value``: the object, with inert stand-ins."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        inert: Collection[str] = (),
        start: int = 0,
        length: int | None = None,
    ) -> None:
        """Open the file and read the object in it, without its tensors. ``inert``: full names of the classes of which it may
        have objects. ``start``, ``length``: the bytes of a larger file that are this one.

        Raises TorchFileError for what is damaged or names something else, OSError.
        """
        self.path = str(path)
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is refused, not waited for
        try:
            self._file = _Part(fd, self.path, start, length)
            self._entries = self._directory()
            self._checked: set[str] = set()
            order = self._whole("byteorder", 16) if "byteorder" in self._entries else b"little"
            if order != b"little":
                self._refuse(f"its numbers are {order!r:.40} endian")
            self.value = unpickled(self._whole("data.pkl", MAX_PICKLE), self.path, inert, self)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the file."""
        return self._file.length

    def _directory(self) -> dict[str, tuple[int, int, int]]:
        """Return where each entry is: its first byte, its bytes, its checksum."""
        if self._file.pread(0, 2) != b"PK":
            self._refuse("it is no zip archive, which torch.save writes since version 1.6: save it again with a newer torch")
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OverflowError, struct.error) as error:
            self._refuse(f"the archive cannot be read ({shown(str(error), 100)})")
        found: dict[str, tuple[int, int, int]] = {}
        for info in infos:
            name = info.filename.partition("/")[2]
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
                self._refuse(f"its entry {shown(info.filename, 100)} is compressed")
            header = self._file.pread(info.header_offset, 30)
            if len(header) < 30 or header[:4] != b"PK\3\4":
                self._refuse(f"its entry {shown(info.filename, 100)} has no header")
            names, extra = struct.unpack("<HH", header[26:30])
            begin = info.header_offset + 30 + names + extra
            if begin + info.file_size > self._file.length:
                self._refuse(f"its entry {shown(info.filename, 100)} ends after the file")
            if name in found:
                self._refuse(f"it has two entries {shown(info.filename, 100)}")
            found[name] = (begin, info.file_size, info.CRC)
        if "data.pkl" not in found:
            self._refuse("it has no data.pkl: it is not of torch.save")
        return found

    def _whole(self, name: str, most: int) -> bytes:
        begin, size, checksum = self._entries[name]
        if size > most:
            self._refuse(f"its {name} has {size:,} bytes; the limit is {most:,}")
        data = self._file.pread(begin, size)
        if len(data) != size or zlib.crc32(data) != checksum:
            self._refuse(f"the checksum of its {name} is wrong")
        return data

    def size_of(self, key: str) -> int:
        """Return the bytes of the entry of a storage. Raises TorchFileError where there is none."""
        if f"data/{key}" not in self._entries:
            self._refuse(f"it has no entry data/{shown(key, 100)}")
        return self._entries[f"data/{key}"][1]

    def read(self, key: str, begin: int, end: int) -> bytearray:
        """Return bytes ``begin`` to ``end`` of the entry of a storage. The first time, all of the entry is compared with its
        checksum. Raises TorchFileError for what is damaged, OSError."""
        at, size, checksum = self._entries[f"data/{key}"]
        if not 0 <= begin <= end <= size:
            self._refuse(f"bytes {begin} to {end} of its entry data/{shown(key, 100)} are asked for, which has {size}")
        if key not in self._checked:
            found = 0
            for start in range(at, at + size, READ_BYTES):
                found = zlib.crc32(self._file.pread(start, min(READ_BYTES, at + size - start)), found)
            if found != checksum:
                self._refuse(f"the checksum of its entry data/{shown(key, 100)} is wrong")
            self._checked.add(key)
        data = bytearray(end - begin)
        view, done = memoryview(data), 0
        while done < len(data):
            piece = self._file.pread(at + begin + done, min(READ_BYTES, len(data) - done))
            if not piece:
                self._refuse("it became shorter while it was read")
            view[done : done + len(piece)] = piece
            done += len(piece)
        return data

    def _refuse(self, why: str) -> NoReturn:
        raise TorchFileError(f"{self.path}: {why}")


class _Part(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, fd: int, path: str, start: int, length: int | None) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise TorchFileError(f"{path} is not a regular file")
        rest = status.st_size - start
        self.length = rest if length is None else length
        if start < 0 or not 0 <= self.length <= rest:
            raise TorchFileError(f"{path}: bytes {start} to {start + (length or 0)} are asked for, of {status.st_size}")
        self._fd_, self._start, self._at = fd, start, 0

    def pread(self, offset: int, nbytes: int) -> bytes:
        """Return at most ``nbytes`` from ``offset``: fewer at the end only."""
        stop = min(offset + nbytes, self.length)
        found = b""
        while 0 <= offset < stop:
            piece = os.pread(self._fd_, stop - offset, self._start + offset)
            if not piece:
                break
            found, offset = found + piece if found else piece, offset + len(piece)
        return found

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self.length)[whence]
        if at < 0:
            raise OSError(22, "seek before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        wanted = self.length - self._at if size is None or size < 0 else size
        data = self.pread(self._at, wanted)
        self._at += len(data)
        return data


def unpickled(data: bytes, path: str, inert: Collection[str] = (), file: TorchFile | None = None) -> Any:
    """Return the object that a pickle describes: plain values and containers, ``Instance`` for objects of the classes in
    ``inert`` (full names), ``StoredTensor`` for tensors of ``file``, and ``Name`` for a class or element type by itself.

    Nothing that the pickle names is imported or called. Raises TorchFileError, which begins with ``path``, for any other name,
    for opcodes that are not of plain pickles, and for what is damaged.
    """
    try:
        return _Machine(path, inert, file).run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error, RecursionError) as error:
        raise TorchFileError(f"{path}: its pickle is damaged ({shown(str(error), 100)})") from error


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


class _Machine:
    """Stack machine of a pickle: one object per run."""

    def __init__(self, path: str, inert: Collection[str], file: TorchFile | None) -> None:
        self._path, self._inert, self._file = path, inert, file
        self._room = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._made: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_type,
            "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
            "torch._utils._rebuild_parameter_with_state": lambda tensor, *rest: tensor,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
            "collections.OrderedDict": lambda pairs=(): self._dict(pairs),
            "collections.defaultdict": lambda factory=None, pairs=(): self._dict(pairs),
            "collections.Counter": lambda counts=(): self._dict(counts.items() if isinstance(counts, dict) else counts),
            "builtins.set": lambda items=(): {self._key(item) for item in self._room_for(items)},
            "__builtin__.set": lambda items=(): {self._key(item) for item in self._room_for(items)},
            "builtins.frozenset": lambda items=(): {self._key(item) for item in self._room_for(items)},
            "torch.Size": lambda sizes=(): self._sizes(self._room_for(sizes)),
            "_codecs.encode": lambda text, code="latin1": self._room_for(text).encode("latin1"),
            "numpy.core.multiarray.scalar": self._number,
            "numpy._core.multiarray.scalar": self._number,
            "numpy.dtype": lambda kind, *rest: Instance("numpy.dtype", (kind,)),
        }

    def run(self, data: bytes) -> Any:
        self._room = MOST_REPEATED * len(data)
        for code, argument, _ in pickletools.genops(data):
            name = code.name
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name == "STOP":
                (value,) = self._stack
                if value is _MARK:
                    break
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
            stack.append(Name(".".join(argument.split(" "))))
        elif name == "STACK_GLOBAL":
            module, qualified = self._popped(2)
            if not isinstance(module, str) or not isinstance(qualified, str):
                raise ValueError("a name is no text")
            stack.append(Name(f"{module}.{qualified}"))
        elif name == "REDUCE":
            called, arguments = self._popped(2)
            stack.append(self._called(called, arguments))
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
            stack.append(self._storage(found))
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

    @staticmethod
    def _key(key: Any) -> Any:
        """Return a key of a dict, which is a plain value: the hash of a deep tuple would overflow the stack."""
        if isinstance(key, tuple):
            plain = all(type(one) in (str, int, float, bool, bytes, type(None)) for one in key)
        else:
            plain = type(key) in (str, int, float, bool, bytes, type(None), Name, Instance)
        if not plain:
            raise ValueError(f"a {type(key).__name__} is a key")
        return key

    # -- what is made --------------------------------------------------------------------------------------------------------

    def _called(self, called: Any, arguments: Any) -> Any:
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

    def _storage(self, found: Any) -> _Storage:
        if not isinstance(found, tuple) or len(found) < 5 or found[0] != "storage" or self._file is None:
            raise ValueError("a reference is to no storage")
        _, kind, key, _, numel = found[:5]
        dtype = _STORAGES.get(kind.text.rpartition(".")[2]) if isinstance(kind, Name) else None
        if dtype is None or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise ValueError("a storage is of no known type")
        if numel * ELEMENTS[dtype] > self._file.size_of(key):
            raise ValueError(f"a storage has {numel} elements, and its entry fewer")
        return _Storage(dtype, key, numel)

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor is of no storage")
        return self._checked_tensor(storage.dtype, storage, offset, shape, stride)

    def _tensor_of_type(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
    ) -> StoredTensor:
        name = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else ""
        if not isinstance(storage, _Storage) or name not in ELEMENTS:
            raise ValueError("a tensor is of no known type")
        return self._checked_tensor(name, storage, offset, shape, stride)

    def _of_type(self, called: Any, kind: Any, arguments: Any, *rest: Any) -> Any:
        """Make a tensor of a subclass: the tensor in it."""
        found = self._called(called, arguments)
        if not isinstance(found, StoredTensor):
            raise ValueError("an object of a tensor's class is none")
        return found

    def _checked_tensor(self, dtype: str, storage: _Storage, offset: Any, shape: Any, stride: Any) -> StoredTensor:
        assert self._file is not None
        sizes, strides = self._sizes(shape), self._sizes(stride)
        if type(offset) is not int or offset < 0 or len(sizes) != len(strides) or len(sizes) > 64:
            raise ValueError("a tensor has no place")
        numel = storage.numel * ELEMENTS[storage.dtype] // ELEMENTS[dtype]
        found = StoredTensor(self._file, storage.key, dtype, sizes, strides, offset, numel)
        if offset + found.span > numel:
            raise ValueError("a tensor is larger than its storage")
        return found

    @staticmethod
    def _sizes(sizes: Any) -> tuple[int, ...]:
        if not isinstance(sizes, tuple | list) or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
            raise ValueError("a shape is none")
        return tuple(sizes)

    @staticmethod
    def _number(dtype: Any, data: Any) -> Any:
        kind = dtype.arguments[0] if isinstance(dtype, Instance) and dtype.name == "numpy.dtype" else None
        data = data.encode("latin1") if isinstance(data, str) else data
        if kind not in _NUMBERS or not isinstance(data, bytes):
            raise ValueError("a NumPy scalar is of no known type")
        (value,) = struct.unpack(_NUMBERS[kind], data)
        return value
