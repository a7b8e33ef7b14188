"""Safetensors files: their headers, and tensors read out of them in pieces; folders of several files with their index, too.

A file is 8 bytes (little-endian length of the header), the header (a JSON object from names to type, shape and position, padded
with spaces), and the tensors, row-major and little-endian: https://huggingface.co/docs/safetensors. Reading trusts nothing:
sizes are limited before memory is taken, and every byte after the header belongs to exactly one tensor. Needs no torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, ClassVar

import msgspec

from tiered.errors import MisuseError, SafetensorsError, TieredError, shortened, shown
from tiered.format.direct_reader import DirectReader
from tiered.types import LARGEST, TensorSpec

__all__ = [
    *("CODES", "INDEX", "SINGLE", "SafetensorsEntry", "WeightFiles", "encode_header", "entry_of", "first_of", "read_header"),
]

INDEX = "model.safetensors.index.json"
"""The index: which tensor is in which file."""
SINGLE = "model.safetensors"
OTHERS = {
    b"GGUF": "a GGUF file, which is read as a model: tiered import FILE.gguf STORE",
    b"PK\x03\x04": "one of torch.save: transformers' model.save_pretrained(folder) writes safetensors",
    b"\x80\x02": "one of torch.save: transformers' model.save_pretrained(folder) writes safetensors",
}
"""What a file is whose first bytes are these, and what to give in its place."""
MAX_HEADER = 100_000_000
"""Bytes; the limit of the ``safetensors`` package."""
READ_BYTES = 4 << 20
DIRECT_BYTES = 1 << 20
"""Bytes from which on a read goes past the page cache."""

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The format's codes by torch's names of element types."""
_BITS = {"BF16": 16, "BOOL": 8, **{code: int(match[1]) for code in CODES.values() if (match := re.match(r"[A-Z](\d+)", code))}}
_TYPES = {code: (name, _BITS[code] // 8) for name, code in CODES.items()}

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Info(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Count, _Count]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INFO = msgspec.json.Decoder(_Info)
_METADATA = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of a file: its name, shape and element type (torch's name), and its first byte in the file."""

    name: str
    spec: TensorSpec
    offset: int = 0


def entry_of(name: str, spec: TensorSpec) -> SafetensorsEntry:
    """Return the entry of a tensor to be written. Raises MisuseError for an element type that the format does not have."""
    if spec.dtype not in CODES:
        raise MisuseError(f"{name!r} is {spec.dtype}, which safetensors files do not have: they take {', '.join(CODES)}")
    return SafetensorsEntry(name, spec)


def encode_header(entries: Sequence[SafetensorsEntry]) -> tuple[bytes, list[SafetensorsEntry]]:
    """Return the beginning of a file with ``entries``, and the entries with their offsets.

    Wider types come first, so that each tensor is aligned to its elements. Raises MisuseError for a header that is too large.
    """
    placed, at = [], 0
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in sorted(entries, key=lambda entry: -entry.spec.itemsize):
        end = at + entry.spec.nbytes
        described[entry.name] = {
            "dtype": CODES[entry.spec.dtype], "shape": list(entry.spec.shape), "data_offsets": [at, end]
        }  # fmt: skip
        placed.append((entry, at))
        at = end
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER:
        raise MisuseError(f"the names of {len(entries)} tensors do not fit into one file: give a smaller shard")
    begin = 8 + len(header)
    moved = [SafetensorsEntry(entry.name, entry.spec, begin + at) for entry, at in placed]
    return struct.pack("<Q", len(header)) + header, moved


def read_header(fd: int, path: str) -> list[SafetensorsEntry]:
    """Return the tensors of an open file, in the order of their offsets. Raises SafetensorsError and OSError."""
    status = os.fstat(fd)
    if status.st_size < 8:
        raise SafetensorsError(f"{path} is not a safetensors file: it has {status.st_size} bytes")
    first = _pread(fd, 8, 0, path)
    (length,) = struct.unpack("<Q", first)
    if length > min(MAX_HEADER, status.st_size - 8):  # else these bytes may be a length, too
        for magic, other in OTHERS.items():
            if first.startswith(magic):
                raise SafetensorsError(f"{path} is not a safetensors file, but {other}")
        raise SafetensorsError(f"{path} is not a safetensors file, or cut short: it says that its header has {length} bytes")
    data = status.st_size - 8 - length
    try:
        header = _pread(fd, length, 8, path)
        raw = _HEADER.decode(header)
        metadata = raw.pop("__metadata__", msgspec.Raw(b"{}"))
        _METADATA.decode(metadata)
        _refuse_twice(header, len(raw), metadata)
        infos = {name: _INFO.decode(info) for name, info in raw.items()}
    except (ValueError, RecursionError, OverflowError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise SafetensorsError(f"{path}: the header is not what a safetensors file has: {shown(str(error), 300)}") from None
    except MemoryError:
        raise SafetensorsError(f"{path}: decoding a header of {length} bytes needs more memory than there is") from None
    entries, at = [], 0
    for name, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        begin, end = info.data_offsets
        known, whose = _TYPES.get(info.dtype), f"{path}: tensor {shortened(name)!r}"
        if known is None:
            raise SafetensorsError(f"{whose} is of type {shortened(info.dtype)!r}, which a store does not hold")
        spec = TensorSpec(known[0], info.shape, known[1])
        if math.prod(info.shape) * known[1] != end - begin:
            raise SafetensorsError(f"{whose} of shape {info.shape} has {end - begin} bytes")
        if spec.span > LARGEST:
            raise SafetensorsError(f"{whose} has the shape {info.shape}, whose strides overflow")
        if begin != at:
            what = "overlaps another" if begin < at else f"follows {begin - at} bytes that belong to no tensor"
            raise SafetensorsError(f"{whose} {what}")
        entries.append(SafetensorsEntry(name, spec, 8 + length + begin))
        at = end
    if at != data:
        cut = "; the file is cut short: copy or download it again" if data < at else ""
        raise SafetensorsError(f"{path}: the tensors have {at:,} bytes, the file has {data:,} for them{cut}")
    return entries


def _refuse_twice(header: bytes, tensors: int, metadata: msgspec.Raw) -> None:
    """Raise ValueError where an object has one key twice: decoders take the last, and drop the first.

    Each tensor's object has each of its keys exactly once. So where each key occurs as often as there are different names, no
    name occurs twice; only where other text matches the keys is the whole header decoded once more, slowly.
    """
    once = tensors, tensors, tensors, bytes(metadata) != b"{}"
    seen = [header.count(key) for key in (b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"')]
    if b"\\" in header or tuple(seen) != once:
        json.loads(header, object_pairs_hook=_refuse_pairs)
    else:
        json.loads(bytes(metadata), object_pairs_hook=_refuse_pairs)


def _refuse_pairs(pairs: list[tuple[str, object]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"{name!r} occurs twice")
        names.add(name)


class WeightFiles:
    """A reader of the tensors of a safetensors file, or of a folder as Hugging Face writes them (``model.safetensors``, or
    several files with ``model.safetensors.index.json``). ``entries`` are by name. A context manager; one file is open at a
    time."""

    damaged: ClassVar[type[TieredError]] = SafetensorsError
    """What a file that changes while it is read raises."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the headers. Raises MisuseError where there is no such file, SafetensorsError for damage, and OSError."""
        self.path = os.fspath(path)
        self.entries: dict[str, SafetensorsEntry] = {}
        self._files: dict[str, str] = {}
        self._fd, self._open_path = -1, ""
        self._direct: DirectReader | None = None
        self._expected: dict[str, list[tuple[int, int]]] = {}
        try:
            for file, names in _files_of(Path(os.path.expanduser(path))):
                self._add(str(file), names)
        except BaseException:
            self.close()
            raise

    def _add(self, file: str, names: set[str] | None) -> None:
        told = _told(file)
        entries = self.read_entries(self._open(file), told)
        there = {entry.name for entry in entries}
        if names is not None and names != there:
            lacks, has = sorted(names - there), sorted(there - names)
            what = f"lacks {first_of(lacks)}, which its index names" if lacks else f"has {first_of(has)}, which no index names"
            raise SafetensorsError(f"{told} {what}")
        for entry in entries:
            self.entries[entry.name] = entry
            self._files[entry.name] = file

    def read_entries(self, fd: int, told: str) -> list[SafetensorsEntry]:
        """Return the tensors of an open file, which errors name ``told``. Raises as ``__init__``."""
        return read_header(fd, told)

    def _open(self, file: str) -> int:
        if file != self._open_path or self._fd < 0:
            self.close()
            self._fd, self._open_path = _opened(file), file
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # within a tensor it is; the kernel reads further ahead
        return self._fd

    def expect(self, reads: Iterable[tuple[str, int, int]]) -> None:
        """Tell what will be read, in that order: tensor, first byte of it, number of bytes. Large reads of one file then go on
        ahead. Only time depends on it."""
        self._expected = {}
        for name, start, nbytes in reads:
            if nbytes >= DIRECT_BYTES:
                self._expected.setdefault(self._files[name], []).append((self.entries[name].offset + start, nbytes))

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Read the bytes of ``name`` from ``start`` on into ``into`` (bytes, writable), which says how many.

        Raises SafetensorsError, OSError.
        """
        entry = self.entries[name]
        assert start + len(into) <= entry.spec.nbytes
        fd, done = self._open(self._files[name]), 0
        if len(into) >= DIRECT_BYTES:
            done = self._read_direct(fd, entry.offset + start, into)
        while done < len(into):
            piece = into[done : done + READ_BYTES]
            at = entry.offset + start + done
            count = os.preadv(fd, [piece], at)
            if not count:
                raise self.damaged(f"{_told(self._files[name])} became shorter while it was read")
            # In whole pieces of the file: the kernel reads ahead in large folios, and to drop a part of one costs more than to
            # read it.
            begin, end = at // READ_BYTES * READ_BYTES, (at + count) // READ_BYTES * READ_BYTES
            if begin < end:
                os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
            done += count

    def _read_direct(self, fd: int, at: int, into: memoryview) -> int:
        """Read past the page cache, where that is possible. Returns how many of the first bytes were read."""
        if self._direct is None:
            self._direct = DirectReader(self._open_path, fd)
            self._direct.expect(self._expected.get(self._open_path, ()))
        if not self._direct.direct:
            return 0
        try:
            return self._direct.read(at, into)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0  # a filesystem that has direct I/O with other alignments

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the open file. Idempotent."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _files_of(path: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yield each file and the names that it must have (None: any names)."""
    if path.is_file():
        if path.name.endswith(".json"):
            yield from _indexed(path)
        else:
            yield path, None
        return
    if not path.is_dir():
        raise MisuseError(f"{path} is neither a safetensors file nor a folder with some")
    if (path / SINGLE).exists():  # takes precedence, as in transformers
        yield path / SINGLE, None
    elif (path / INDEX).exists():
        yield from _indexed(path / INDEX)
    else:
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            if not found:
                raise MisuseError(f"{path} has no safetensors file: name a folder that has some, or one such file")
            raise MisuseError(
                f"{path} has {len(found)} safetensors files and no {INDEX}: a model's whole folder has one, with its "
                "config.json; for the tensors of one file alone name that file"
            )
        yield found[0], None


def _indexed(index: Path) -> Iterator[tuple[Path, set[str]]]:
    found: dict[str, msgspec.Raw] | None = None
    try:
        found = msgspec.json.decode(_index_of(str(index)), type=dict[str, msgspec.Raw])
        places = msgspec.json.decode(found.get("weight_map", msgspec.Raw(b"null")), type=dict[str, str])
    except (ValueError, RecursionError) as error:
        if isinstance(found, dict) and "weight_map" not in found:
            told = f"{index} has no weight_map, so it is no index of safetensors files: name its folder"
            raise SafetensorsError(told) from None
        raise SafetensorsError(f"{index} is not an index of safetensors files: {shown(str(error), 300)}") from None
    names: dict[str, set[str]] = {}
    for name, file in places.items():
        names.setdefault(file, set()).add(name)
    for file in sorted(names):
        if not file or os.path.basename(file) != file or file in (".", "..") or "\0" in file:
            raise SafetensorsError(f"{index} names {shortened(file)!r}, which is not a file beside it")
        if not (index.parent / file).exists():
            raise SafetensorsError(f"{index} names {shortened(file)!r}, which is missing")
        yield index.parent / file, names[file]


def _opened(file: str) -> int:
    """Open a file for reading. A pipe, which nobody may ever write to, is refused and not waited for. Raises SafetensorsError
    for what is no regular file, and OSError."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise SafetensorsError(f"{_told(file)} is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SafetensorsError(f"{_told(file)} is not a regular file")
    return fd


def _index_of(file: str) -> bytes:
    """Return the contents of an index. Raises as ``_opened``, and SafetensorsError for one that is too large."""
    with open(_opened(file), "rb") as opened:
        data = opened.read(MAX_HEADER + 1)
    if len(data) > MAX_HEADER:
        raise SafetensorsError(f"{_told(file)} has more than {MAX_HEADER:,} bytes, the limit of an index")
    return data


def _told(file: str) -> str:
    """Return the name of a file, which may come from an index, escaped so that it cannot control a terminal."""
    return file if file.isprintable() else repr(file)


def first_of(names: Sequence[str]) -> str:
    """List the first names of ``names``, shortened, and how many more there are, for an error."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(shortened(name)) for name in names[:3]) + more


def _pread(fd: int, nbytes: int, offset: int, path: str) -> bytes:
    data = bytearray(nbytes)
    view, done = memoryview(data), 0
    while done < nbytes:
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            raise SafetensorsError(f"{path} ends within its header")
        done += count
    return bytes(data)
