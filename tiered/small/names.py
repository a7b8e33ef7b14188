"""How small tensors lie together in tensors of a store: in pages, with a log of their names.

Small tensors named NAME are these tensors of their store, all uint8 of one dimension:

- ``NAME/small``: the record, JSON, written once: the format, and the bytes of a page.
- ``NAME/open``: the page that is being filled. It begins with the head (``PageHead``). The log of what was put into this page
  follows, and grows upwards; the bytes of the tensors grow downwards from its end.
- ``NAME/page0``, ``NAME/page1``, …: pages that are full. Each is the end of what ``open`` was then: only bytes of tensors,
  which have the same distance from the end. A tensor of more than a quarter of a page has a page of its own.
- ``NAME/names0``, ``NAME/names1``, …: the log of the pages that are full, one part after the other.

A place is a page and a distance from its end, in units of 16 bytes. An entry of the log says that a key is at a place now, that
it is deleted, or what a number of a shape and type means; later entries replace earlier ones. Numbers are little-endian.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable

import msgspec

from tiered.errors import ManifestError, MisuseError
from tiered.types import LARGEST, Key, Owner, TensorSpec

__all__ = [
    "HEAD_BYTES",
    "LARGEST_PLACE",
    "LONGEST_KEY",
    "MOST_DIMENSIONS",
    "MOST_SPECS",
    "UNIT",
    "Names",
    "NamesRecord",
    "PageHead",
    "deletion",
    "location",
    "names_key",
    "number_after",
    "open_key",
    "page_key",
    "page_of",
    "place_of",
    "record_key",
    "small_owner",
    "spec_of",
]

UNIT = 16
"""Bytes: tensors begin at a multiple of it."""
HEAD_BYTES = 64
LARGEST_PLACE = UNIT << 32
"""Bytes: no tensor is so far from the end of its page."""
LONGEST_KEY = 1024
"""Bytes of a key in UTF-8."""
MOST_SPECS = 1 << 24
"""Different pairs of a shape and a type."""
FORMAT = 1
SMALLEST_PAGE = 4096

_END, _PUT, _DELETE, _SPEC = range(4)
_ENTRY_OF_KEY = struct.Struct("<BHIQI")
"""Kind, bytes of the key, number of the spec, page, distance from its end in units."""
_ENTRY_OF_SPEC = struct.Struct("<BHIB")
"""Kind, bytes of the name of the type, number of the spec, dimensions."""
MOST_DIMENSIONS = 64
"""Dimensions of a small tensor."""


class NamesRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written once: ``page`` is the bytes of a page."""

    format: int
    page: int

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decoded(name: str, data: bytes) -> NamesRecord:
        """Return the record that ``data`` is. Raises ManifestError where it is damaged, or of a newer version."""
        try:
            found = msgspec.json.decode(data, type=NamesRecord, strict=True)
            if found.format != FORMAT:
                raise ValueError(f"it has the format {found.format}, this version knows {FORMAT}")
            if not SMALLEST_PAGE <= found.page <= LARGEST or found.page % UNIT:
                raise ValueError(f"its pages cannot have {found.page} bytes")
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise ManifestError(f"{record_key(name)!r} is not the record of small tensors: {error}") from error
        return found

    @staticmethod
    def of(page: int) -> NamesRecord:
        """Return the record of pages of about so many bytes."""
        return NamesRecord(FORMAT, max(SMALLEST_PAGE, page // SMALLEST_PAGE * SMALLEST_PAGE))


class PageHead(ctypes.LittleEndianStructure):
    """The first 64 bytes of the open page.

    ``stamp`` is another number after each change. The open page will have the number ``page``, ``next_page`` is the first one
    that no page has. ``log`` and ``values`` are bytes of the open page that its log and tensors take. The log of the full pages
    is in ``NAME/names{first}`` to ``NAME/names{last}``, of which the last one has ``used`` bytes; there is none where
    ``used`` is 0.
    """

    _fields_ = (
        ("stamp", ctypes.c_int64),
        ("page", ctypes.c_int64),
        ("next_page", ctypes.c_int64),
        ("log", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("used", ctypes.c_int64),
    )
    stamp: int
    page: int
    next_page: int
    log: int
    values: int
    first: int
    last: int
    used: int

    def problem(self, page_bytes: int) -> str | None:
        """Return what is wrong with a head that was read; None where nothing is."""
        room = page_bytes - HEAD_BYTES
        if not 0 <= self.page < self.next_page < 1 << 62:
            return f"page {self.page} is open, and {self.next_page} the next one"
        if min(self.log, self.values) < 0 or self.log + self.values > room or self.values % UNIT:
            return f"{self.log} bytes of log and {self.values} of tensors are in a page of {page_bytes}"
        if not 0 <= self.first <= self.last < 1 << 62 or not 0 <= self.used <= page_bytes:
            return f"the log goes from part {self.first} to {self.last}, with {self.used} bytes in the last"
        return None


def small_owner(name: str) -> Owner:
    """Return the owner of the pages, the names and the record of small tensors."""
    return Owner("small tensors", name)


def record_key(name: str) -> Key:
    return f"{name}/small"


def open_key(name: str) -> Key:
    return f"{name}/open"


def page_key(name: str, page: int) -> Key:
    return f"{name}/page{page}"


def names_key(name: str, part: int) -> Key:
    return f"{name}/names{part}"


def number_after(prefix: str, key: Key) -> int | None:
    """Return the number that follows ``prefix`` in ``key``; None where ``key`` is not exactly that."""
    rest = key[len(prefix) :] if key.startswith(prefix) else ""
    exact = rest.isascii() and rest.isdecimal() and len(rest) < 20 and (rest[0] != "0" or rest == "0")
    return int(rest) if exact else None


def location(page: int, place: int, spec: int) -> int:
    """Return a place and the number of a spec as one number: a million of them are kept, and tuples are larger."""
    return page << 56 | place << 24 | spec


def page_of(where: int) -> int:
    return where >> 56


def place_of(where: int) -> int:
    """Return the distance from the end of the page, in units."""
    return where >> 24 & 0xFFFFFFFF


def spec_of(where: int) -> int:
    return where & 0xFFFFFF


class Names:
    """Where each key is: what the log says so far."""

    def __init__(self) -> None:
        self.where: dict[Key, int] = {}
        self.specs: list[TensorSpec] = []
        self.rooms: list[int] = []
        """Units that a tensor of each spec takes in its page."""
        self.numbers: dict[TensorSpec, int] = {}
        self.live: dict[int, int] = {}
        """Units of each page that keys take; no page that has none."""

    def know(self, spec: TensorSpec) -> int:
        """Give ``spec`` the next number, and return it."""
        number = self.numbers[spec] = len(self.specs)
        self.specs.append(spec)
        self.rooms.append(units(spec.nbytes))
        return number

    def put(self, key: Key, where: int) -> int | None:
        """Have ``key`` at a location from now on; return the page that it has left, or None."""
        before = self.where.get(key)
        self.where[key] = where
        live, page = self.live, where >> 56
        live[page] = live.get(page, 0) + self.rooms[where & 0xFFFFFF]
        return None if before is None else self._left(before)

    def remove(self, key: Key) -> int:
        """Forget ``key``, which is there; return the page that it has left."""
        return self._left(self.where.pop(key))

    def _left(self, before: int) -> int:
        page = before >> 56
        rest = self.live[page] - self.rooms[before & 0xFFFFFF]
        if rest:
            self.live[page] = rest
        else:
            del self.live[page]
        return page

    def read(self, log: bytes) -> None:
        """Add what a part of the log says; call ``count`` after the last one. Raises ValueError where it is damaged."""
        at, end, where, specs = 0, len(log), self.where, len(self.specs)
        unpack, head = _ENTRY_OF_KEY.unpack_from, _ENTRY_OF_KEY.size
        try:
            while at < end:
                kind = log[at]
                if kind == _PUT:
                    _, length, spec, page, place = unpack(log, at)
                    at += head
                    if spec >= specs or page >= 1 << 62 or at + length > end:
                        raise ValueError(f"its entry at byte {at - head} is not possible")
                    where[log[at : at + length].decode()] = page << 56 | place << 24 | spec
                    at += length
                elif kind == _DELETE:
                    _, length, *_ = unpack(log, at)
                    at += head
                    if at + length > end:
                        raise ValueError(f"its entry at byte {at - head} is cut off")
                    where.pop(log[at : at + length].decode(), None)
                    at += length
                elif kind == _SPEC:
                    at = self._read_spec(log, at)
                    specs = len(self.specs)
                elif kind == _END:
                    return
                else:
                    raise ValueError(f"it has an entry of kind {kind} at byte {at}")
        except struct.error:
            raise ValueError(f"its entry at byte {at} is cut off") from None

    def _read_spec(self, log: bytes, at: int) -> int:
        _, length, number, dimensions = _ENTRY_OF_SPEC.unpack_from(log, at)
        begin, at = at, at + _ENTRY_OF_SPEC.size
        shape = struct.unpack_from(f"<{dimensions}Q", log, at)
        at += 8 * dimensions
        name = log[at : at + length].decode()
        wrong = f"its entry at byte {begin} is of no shape and type"
        if dimensions > MOST_DIMENSIONS or not name.isidentifier() or len(name) != length:
            raise ValueError(wrong)
        try:
            spec = TensorSpec(name, shape)
        except MisuseError as error:
            raise ValueError(f"{wrong}: {error}") from None
        known = self.numbers.get(spec)
        if spec.span > LARGEST or number != (len(self.specs) if known is None else known):
            raise ValueError(wrong)
        if known is None:
            self.know(spec)
        return at + int(length)

    def count(self) -> None:
        """Count the units of each page that keys take, when the log was read."""
        live: dict[int, int] = {}
        rooms = self.rooms
        for where in self.where.values():
            page = where >> 56
            live[page] = live.get(page, 0) + rooms[where & 0xFFFFFF]
        self.live = live

    def entries(self, open_page: int) -> Iterable[bytes]:
        """Return a log that says the same of all specs and of all keys but those in ``open_page``, entry by entry."""
        for number, spec in enumerate(self.specs):
            yield description(number, spec)
        for key, where in self.where.items():
            if where >> 56 != open_page:
                yield presence(key.encode(), where)


def units(nbytes: int) -> int:
    """Return the units that a tensor of so many bytes takes: at least one, so that each has a place of its own."""
    return -(-nbytes // UNIT) or 1


def presence(key: bytes, where: int) -> bytes:
    """Return the entry that says where a key is."""
    return _ENTRY_OF_KEY.pack(_PUT, len(key), where & 0xFFFFFF, where >> 56, where >> 24 & 0xFFFFFFFF) + key


def deletion(key: bytes) -> bytes:
    """Return the entry that says that a key is deleted."""
    return _ENTRY_OF_KEY.pack(_DELETE, len(key), 0, 0, 0) + key


def description(number: int, spec: TensorSpec) -> bytes:
    """Return the entry that says which shape and type a number means."""
    name, shape = spec.dtype.encode(), spec.shape
    return _ENTRY_OF_SPEC.pack(_SPEC, len(name), number, len(shape)) + struct.pack(f"<{len(shape)}Q", *shape) + name
