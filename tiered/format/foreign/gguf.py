"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): headers, and tensors read out of them in pieces.

A file is magic and version, metadata by name, the tensors' names, dimensions (the innermost first), types and places, and the
tensors, each at a multiple of the alignment. Little-endian. Reading trusts nothing: the header is limited, each count in it by
the bytes that are there, and no two tensors overlap. So other readers find a header that is whole. Needs no torch.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from tiered.errors import GgufError, shortened, shown
from tiered.format.safetensors import SafetensorsEntry, WeightFiles
from tiered.types import LARGEST, TensorSpec

__all__ = ["BlockType", "GgufFile", "GgufTensor"]

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_HEADER = 256 << 20
"""Bytes; vocabularies are in it."""
LONGEST_STRING = 16 << 20
MOST_DIMENSIONS, ALIGNMENT, ALIGNED = 4, 32, "general.alignment"
SHORT_LIST = 8192
"""Bytes; lists with something for each layer are shorter, and those of a vocabulary longer."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
PLAIN = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}


class BlockType(NamedTuple):
    """A type of tensors: its name, and elements and bytes of a block."""

    name: str
    elements: int
    nbytes: int


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: the name of its type, and its shape, the innermost dimension last."""

    type: str
    shape: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Return whether the elements are floats that follow one another."""
        return self.type in PLAIN


class GgufFile(WeightFiles):
    """A reader of one file. ``entries``: tensors as matrices, all dimensions but the last in one (or vectors): of plain types
    as they are, of others the bytes of each row. ``tensors``: what they are. ``metadata``: strings and numbers by name; of
    lists their lengths."""

    damaged = GgufError

    def __init__(self, path: str | os.PathLike[str], types: Mapping[int, BlockType]) -> None:
        """Read the header. ``types``: by their numbers. Raises GgufError for damage, and OSError."""
        self._types = types
        self.tensors: dict[str, GgufTensor] = {}
        self.metadata: dict[str, str | int | float] = {}
        self._kept: dict[str, bytes] = {}
        super().__init__(path)

    def read_entries(self, fd: int, told: str) -> list[SafetensorsEntry]:
        nbytes = os.fstat(fd).st_size
        with open(fd, "rb", closefd=False) as opened:
            opened.seek(0)
            header = _Header(opened, nbytes, told)
            if header.take(4) != MAGIC:
                raise GgufError(f"{told} is not a GGUF file")
            version, count, fields = header.numbers("IQQ")
            if version not in VERSIONS and struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS:
                raise GgufError(f"{told} is big-endian; known are little-endian files: convert the model again")
            if version not in VERSIONS:
                raise GgufError(f"{told} is of version {version} of GGUF; known are {' and '.join(map(str, VERSIONS))}")
            for _ in range(fields):
                name = header.text()
                if name in self.metadata:
                    raise GgufError(f"{told} has {shortened(name)!r} twice")
                begin = opened.tell()
                self.metadata[name] = header.value()
                if header.short:
                    self._kept[name] = os.pread(fd, opened.tell() - begin, begin)
            described = [self._described(header) for _ in range(count)]
            begin = -(-opened.tell() // self.alignment) * self.alignment
        return list(self._placed(described, begin, nbytes, told))

    def outline(self, counts: Mapping[str, int]) -> bytes:
        """Return a file with the same metadata, but without its long lists and its alignment, and with tensors of the same
        names, of one number each: for readers that take a long time for lists. ``counts``: names of lists, and how many zeros
        are in them."""
        lists = {name: struct.pack("<IIQ", ARRAY, 0, count) + bytes(count) for name, count in counts.items()}
        fields = [_text(name) + value for name, value in (self._kept | lists).items() if name != ALIGNED]
        tensors = [_text(name) + struct.pack("<IQIQ", 1, 1, 0, place * ALIGNMENT) for place, name in enumerate(self.tensors)]
        head = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(fields))
        found = b"".join([head, *fields, *tensors])
        return found + bytes(-len(found) % ALIGNMENT + ALIGNMENT * len(tensors))

    @property
    def alignment(self) -> int:
        """Bytes at multiples of which tensors begin."""
        found = self.metadata.get(ALIGNED, ALIGNMENT)
        if not isinstance(found, int) or found < 1 or found & (found - 1):
            raise GgufError(f"{self.path} aligns tensors to {found!r:.30}, which is no power of 2")
        return found

    def _described(self, header: _Header) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type and place of a tensor."""
        name = header.text()
        (rank,) = header.numbers("I")
        if not 1 <= rank <= MOST_DIMENSIONS:
            raise GgufError(f"{header.told}: tensor {shortened(name)!r} has {rank} dimensions")
        dimensions = header.numbers(f"{rank}Q")
        kind, place = header.numbers("IQ")
        return name, tuple(reversed(dimensions)), kind, place

    def _placed(
        self, described: list[tuple[str, tuple[int, ...], int, int]], begin: int, nbytes: int, told: str
    ) -> Iterator[SafetensorsEntry]:
        """Yield the entries of what is ``described``, in the order of places; tensors begin at byte ``begin``."""
        end = 0
        for name, shape, kind, place in sorted(described, key=lambda one: one[3]):
            whose, known = f"{told}: tensor {shortened(name)!r}", self._types.get(kind)
            if name in self.tensors:
                raise GgufError(f"{whose} is there twice")
            if known is None:
                raise GgufError(f"{whose} is of type {kind}, which is not known")
            if min(shape) < 1 or shape[-1] % known.elements or math.prod(shape) * 8 > LARGEST:
                raise GgufError(f"{whose} of type {known.name} has the shape {shape}")
            dtype, itemsize = PLAIN.get(known.name, ("uint8", 1))
            row = shape[-1] // known.elements * known.nbytes // itemsize
            rows = (math.prod(shape[:-1]),) if shape[1:] or known.name not in PLAIN else ()
            spec = TensorSpec(dtype, (*rows, row), itemsize)
            if place < end or place % self.alignment:
                raise GgufError(f"{whose} begins at {place:,}, within another one or between places")
            end = place + spec.nbytes
            if begin + end > nbytes:
                raise GgufError(f"{whose} ends at byte {begin + end:,}, and the file is cut short: copy or download it again")
            self.tensors[name] = GgufTensor(known.name, shape)
            yield SafetensorsEntry(name, spec, begin + place)


def _text(name: str) -> bytes:
    encoded = name.encode()
    return struct.pack("<Q", len(encoded)) + encoded


class _Header:
    """The header of a file that is ``opened`` and has ``nbytes``."""

    def __init__(self, opened: BinaryIO, nbytes: int, told: str) -> None:
        self.told = told
        self.short = True
        """Whether the last value was no long list."""
        self._opened, self._left, self._within = opened, min(nbytes, MOST_HEADER), nbytes <= MOST_HEADER

    def _count(self, nbytes: int) -> int:
        """Return ``nbytes``, which are read next. Raises GgufError where the header has fewer."""
        if nbytes > self._left:
            why = "the file is cut short or damaged" if self._within else f"it has more than {MOST_HEADER:,} bytes"
            raise GgufError(f"{self.told} ends within its header: {why}")
        self._left -= nbytes
        return nbytes

    def take(self, nbytes: int) -> bytes:
        found = self._opened.read(self._count(nbytes))
        if len(found) < nbytes:
            raise GgufError(f"{self.told} became shorter while it was read")
        return found

    def numbers(self, kinds: str) -> tuple[int, ...]:
        return struct.unpack(f"<{kinds}", self.take(struct.calcsize(f"<{kinds}")))

    def text(self) -> str:
        (nbytes,) = self.numbers("Q")
        if nbytes > LONGEST_STRING:
            raise GgufError(f"{self.told} is damaged: it has a text of {nbytes:,} bytes")
        try:
            return self.take(nbytes).decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"{self.told} is damaged: {shown(str(error), 300)}") from None

    def value(self) -> str | int | float:
        """Return a value of the metadata, of a list its length."""
        begin, self.short = self._left, True
        (kind,) = self.numbers("I")
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0]
        inner, count = self.numbers("IQ") if kind == ARRAY else (kind, 0)
        if inner in SCALARS:
            self._opened.seek(self._count(count * struct.calcsize(f"<{SCALARS[inner]}")), os.SEEK_CUR)
        elif inner == STRING:
            for _ in range(count):
                (nbytes,) = self.numbers("Q")
                self._opened.seek(self._count(nbytes), os.SEEK_CUR)
        else:
            raise GgufError(f"{self.told} has a value of type {inner}, which is not known")
        self.short = begin - self._left <= SHORT_LIST
        return count
