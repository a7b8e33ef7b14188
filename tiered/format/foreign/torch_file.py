"""Files of ``torch.save``, read without running anything in them.

A file of ``torch.save`` is a zip archive, not compressed: ``data.pkl`` is a pickle of the object, in which tensors name the
entries ``data/KEY`` that hold their elements (https://pytorch.org/docs/stable/notes/serialization.html). ``pickled`` reads the
pickle, and runs nothing. Reading trusts nothing else either: entries have to lie within the file, apart from each other, and
are read only where their checksum is right. Needs no torch.
"""

from __future__ import annotations

import io
import math
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from tiered.errors import TorchFileError, shown
from tiered.format.foreign.pickled import MAX_PICKLE, Name, PickleMachine, sizes_of

__all__ = ["STORAGES", "FileTensor", "TorchFile"]

READ_BYTES = 4 << 20

ELEMENTS = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}
"""Bytes of an element, by torch's names of types."""
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}
"""Torch's names of types, by its names of storages."""


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    numel: int


@dataclass(frozen=True, eq=False)
class FileTensor:
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
            self.value = _Tensors(self, inert).read(self._whole("data.pkl", MAX_PICKLE))
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
        end = 0
        for begin, size, _ in sorted(found.values()):
            if size and begin < end:
                self._refuse("two of its entries lie in the same bytes")
            end = max(end, begin + size)
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

    def begin_of(self, key: str) -> int:
        """Return the first byte in the file of the entry of a storage. The first time, all of the entry is compared with its
        checksum. Raises TorchFileError for what is damaged, OSError."""
        at, size, checksum = self._entries[f"data/{key}"]
        if key not in self._checked:
            found = 0
            for start in range(at, at + size, READ_BYTES):
                found = zlib.crc32(self._file.pread(start, min(READ_BYTES, at + size - start)), found)
            if found != checksum:
                self._refuse(f"the checksum of its entry data/{shown(key, 100)} is wrong")
            self._checked.add(key)
        return at

    def read(self, key: str, begin: int, end: int) -> bytearray:
        """Return bytes ``begin`` to ``end`` of the entry of a storage. The first time, all of the entry is compared with its
        checksum. Raises TorchFileError for what is damaged, OSError."""
        _, size, _ = self._entries[f"data/{key}"]
        if not 0 <= begin <= end <= size:
            self._refuse(f"bytes {begin} to {end} of its entry data/{shown(key, 100)} are asked for, which has {size}")
        at = self.begin_of(key)
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


class _Tensors(PickleMachine):
    """Machine of the pickle of ``file``: it makes tensors, too."""

    def __init__(self, file: TorchFile, inert: Collection[str]) -> None:
        self._file = file
        super().__init__(
            file.path,
            inert,
            {
                "torch._utils._rebuild_tensor_v2": self._tensor,
                "torch._utils._rebuild_tensor_v3": self._tensor_of_type,
                "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
                "torch._utils._rebuild_parameter_with_state": lambda tensor, *rest: tensor,
                "torch._tensor._rebuild_from_type_v2": self._of_type,
            },
        )

    def stored(self, reference: Any) -> _Storage:
        """Return the storage that a tensor names. Raises ValueError for what is none."""
        if not isinstance(reference, tuple) or len(reference) < 5 or reference[0] != "storage":
            raise ValueError("a reference is to no storage")
        _, kind, key, _, numel = reference[:5]
        dtype = STORAGES.get(kind.text.rpartition(".")[2]) if isinstance(kind, Name) else None
        if dtype is None or type(numel) is not int or numel < 0:
            raise ValueError("a storage is of no known type")
        key = self.text(key)
        if numel * ELEMENTS[dtype] > self._file.size_of(key):
            raise ValueError(f"a storage has {numel} elements, and its entry fewer")
        return _Storage(dtype, key, numel)

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> FileTensor:
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor is of no storage")
        return self._checked_tensor(storage.dtype, storage, offset, shape, stride)

    def _tensor_of_type(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
    ) -> FileTensor:
        name = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else ""
        if not isinstance(storage, _Storage) or name not in ELEMENTS:
            raise ValueError("a tensor is of no known type")
        return self._checked_tensor(name, storage, offset, shape, stride)

    def _of_type(self, called: Any, kind: Any, arguments: Any, *rest: Any) -> Any:
        """Make a tensor of a subclass: the tensor in it."""
        found = self.called(called, arguments)
        if not isinstance(found, FileTensor):
            raise ValueError("an object of a tensor's class is none")
        return found

    def _checked_tensor(self, dtype: str, storage: _Storage, offset: Any, shape: Any, stride: Any) -> FileTensor:
        sizes, strides = sizes_of(shape), sizes_of(stride)
        if type(offset) is not int or offset < 0 or len(sizes) != len(strides):
            raise ValueError("a tensor has no place")
        numel = storage.numel * ELEMENTS[storage.dtype] // ELEMENTS[dtype]
        found = FileTensor(self._file, storage.key, dtype, sizes, strides, offset, numel)
        if offset + found.span > numel:
            raise ValueError("a tensor is larger than its storage")
        return found
