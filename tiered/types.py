"""The values that the parts hand each other, and sizes as people write them (``"1GiB"``, ``"500MB"``, or an int of bytes).

No behaviour beyond derived numbers; no torch.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from tiered.errors import MisuseError, TieredError, quoted

__all__ = [
    "AHEAD",
    "CHECKSUM_BYTES",
    "LARGEST",
    "PIECE_BYTES",
    "SMALLEST_DRAM",
    "VERSION",
    "Access",
    "BackendName",
    "Candidate",
    "Completion",
    "Direction",
    "Fence",
    "IOCompletion",
    "IORequest",
    "Key",
    "Location",
    "Operation",
    "Owner",
    "SizeWithUnit",
    "Slot",
    "TensorSpec",
    "Transfer",
    "Urgency",
    "Use",
    "budget_text",
    "exact_size",
    "format_size",
    "owner_decoded",
    "parse_size",
    "with_unit",
]

VERSION = "0.1.0"
"""Release of this package; ``tiered.__version__`` and the build read it."""

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP")
}
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}
MOST_TEXT = 40
"""Characters of a size: Python does not take numbers of any length."""
MOST_MIB = 1 << 16
"""An amount without a unit that is meant in MiB is below: 64 GiB and more are given in GiB."""
_AMOUNT = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, name: str = "") -> int:
    """Return a size in bytes; ``name`` is the argument that it was given as. Raises MisuseError for a negative size, an unknown
    unit, or no number."""
    given = f"{name}={quoted(size)}" if name else quoted(size)
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise MisuseError(f"a size is an int of bytes or a text such as '256MiB', not {given}")
    if isinstance(size, int):
        if size < 0:
            raise MisuseError(f"a size cannot be negative: {given}")
        return size
    match = _SIZE.fullmatch(size) if len(size) <= MOST_TEXT else None
    factor = _BY_LOWER.get(match[2].lower()) if match else None
    if match is None or factor is None:
        unit = match[2].upper() if match else ""
        short = f"did you mean '{match[1]}{unit}iB'?" if match and unit in ("K", "M", "G", "T") else ""
        meant = short or "write bytes or a unit: '268435456', '256MiB', '1.5GB'"
        raise MisuseError(f"{given} is not a size; {meant}")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


class SizeWithUnit(int):
    """Bytes that were given with a unit, though there are so few that the unit might have been forgotten."""

    @classmethod
    def of(cls, text: str) -> int:
        """Return the bytes of a text, as ``parse_size``."""
        nbytes = parse_size(text)
        return cls(nbytes) if nbytes < MOST_MIB and text.strip()[-1:].isalpha() else nbytes


def with_unit(size: int | str) -> str:
    """Return the question whether an amount that is far too small was meant in another unit, for the end of an error; empty
    where it has a unit, or no unit makes it the size of a memory."""
    if isinstance(size, SizeWithUnit):
        return ""
    amount = _AMOUNT.fullmatch(str(size).strip())
    if amount is None or not 0 < float(amount[0]) < MOST_MIB:
        return ""
    return f"; an amount without a unit is in bytes: did you mean '{amount[0]}{'GiB' if float(amount[0]) < 256 else 'MiB'}'?"


def format_size(nbytes: float) -> str:
    """Return a size for people: ``268435456`` is ``"256.0 MiB"``."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def exact_size(nbytes: int) -> str:
    """Format a size as an option takes it: "4KiB"; in bytes where it is a whole number of no larger unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size:,}{unit}"
    return f"{nbytes:,}B"


def budget_text(nbytes: int) -> str:
    """Write a budget of at most so many bytes as an option and ``dram=`` take it, for people: "9.66GiB"."""
    unit, size = next((one for one in (("GiB", 1 << 30), ("MiB", 1 << 20)) if nbytes >= one[1]), ("KiB", 1 << 10))
    return f"{nbytes * 100 // size / 100:.2f}{unit}"


Key = str


@dataclass(frozen=True, slots=True)
class Owner:
    """Who made a tensor, and alone may replace or delete it: a model, an optimizer, a cache, a table, small tensors, an import,
    or whoever else has a name in a store. ``kind`` says which of them, in words without a colon.

    The keys of what ``name`` owns usually begin with ``name/``. But the record of the owner that each tensor has decides, not
    its key: others may have keys that begin so, too.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"the {self.kind} {self.name!r}"

    @property
    def encoded(self) -> str:
        """The owner as a manifest has it."""
        return f"{self.kind}:{self.name}"

    def __post_init__(self) -> None:
        kind, name = self.kind, self.name
        if not isinstance(kind, str) or not isinstance(name, str) or not kind or ":" in kind:
            raise MisuseError(f"an owner is a kind, in words without a colon, and a name, not {kind!r:.100} and {name!r:.100}")

    def apart(self, other: Owner) -> bool:
        """Return whether both may be in one store: the same, or neither name lies within the other, at a slash."""
        mine, theirs = f"{self.name}/", f"{other.name}/"
        return self == other or not (mine.startswith(theirs) or theirs.startswith(mine))


@lru_cache(4096)
def owner_decoded(text: str) -> Owner | None:
    """Return the owner that ``Owner.encoded`` describes, the same object for the same text; None for the empty text, which is
    the user. Raises MisuseError for what describes none."""
    kind, _, name = text.partition(":")
    return Owner(kind, name) if text else None


BackendName = Literal["auto", "libaio", "aiofiles", "posix"]
"""Name of an I/O backend; "auto" is the fastest that works here."""

OptimizerName = Literal[
    "adamw", "adam", "nadam", "radam", "adamax", "sgd", "adagrad", "rmsprop", "lion", "adafactor", "adamw_bf16", "adamw8bit",
    "adamw4bit",
]  # fmt: skip
"""Name of an optimizer in ``tiered.plan`` and ``tiered train --optimizer``: ``CHOICES`` in ``zero/rules/known.py`` has them."""

Then = Literal["again", "end"]
"""What follows the end of an order of touches: the same order again, or nothing that is known."""

Others = Literal["recency", "frequency"]
"""By what tensors outside an order of touches leave a tier: their last use, or how many rounds use them."""

PIECE_BYTES = 4 << 20
"""Bytes of a piece, the unit of checksums: an extent is checksummed in pieces of this size, the last one may be shorter."""
CHECKSUM_BYTES = 16
"""Bytes of one piece's checksum (xxh3-128)."""
SMALLEST_DRAM = 1 << 20
"""Smallest DRAM budget in bytes that a store opens with."""
LARGEST = 2**63 - 1
"""Largest size of a tensor in bytes: torch counts in signed 64 bits."""


class _Name(enum.Enum):
    """An enum whose members hash by identity: they are dictionary keys on the path of every transfer, and ``Enum`` hashes
    slowly."""

    __hash__ = object.__hash__


class Access(_Name):
    """Right of a lease. WRITE excludes every other lease of the tensor and supersedes its other copies."""

    READ = "read"
    WRITE = "write"


class Use(_Name):
    """What a touch does with a tensor: READ and WRITE need its bytes, PUT replaces them; WRITE and PUT leave it dirty."""

    READ = "read"
    WRITE = "write"
    PUT = "put"


class Urgency(enum.IntEnum):
    """Order in which transfers are started: smaller first. SPECULATIVE: nobody knows whether the bytes will be needed."""

    DEMAND = 0
    PREFETCH = 1
    SPECULATIVE = 2
    WRITEBACK = 3


AHEAD = frozenset({Urgency.PREFETCH, Urgency.SPECULATIVE})
"""Urgencies of fetches that nobody waits for."""


class Direction(_Name):
    """UP is towards the compute (NVMe -> DRAM -> HBM), DOWN is away from it."""

    UP = "up"
    DOWN = "down"


class Operation(_Name):
    READ = "read"
    WRITE = "write"


_BITS = re.compile(r"[0-9]+")


def _bytes_of(dtype: str) -> int:
    """Return the bytes of an element, which torch's names tell by their first number: "float8_e4m3fn" has 8 bits."""
    found = _BITS.search(dtype)
    if found is None and dtype != "bool":
        raise MisuseError(f"how many bytes has an element of {dtype!r}? Name torch's types as 'float32', or give itemsize=")
    return 1 if found is None else max(1, int(found[0]) // 8)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and element type of a tensor: ``TensorSpec("float32", (2, 3))``.

    ``dtype`` is torch's type, kept as its name without the prefix (``"float32"``). ``itemsize`` is in bytes; the type tells it.
    Raises MisuseError for a name that does not.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int = 0

    def __post_init__(self) -> None:
        if self.itemsize:
            return
        dtype: object = self.dtype
        name = str(dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", name)
        object.__setattr__(self, "itemsize", getattr(dtype, "itemsize", 0) or _bytes_of(name))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def span(self) -> int:
        """Bytes with each 0 of the shape counted as 1: torch's strides reach as far, even where there is no element. No tensor
        can be made whose span is 2**63 bytes or more."""
        return math.prod(size or 1 for size in self.shape) * self.itemsize


class Slot(NamedTuple):
    """A range of a tier's space; on NVMe it is called an extent. ``nbytes`` is the size that the tier set aside, padding
    included."""

    offset: int
    nbytes: int


class Location(NamedTuple):
    """Where a slot on the disk is: ``offset`` bytes into the file that ``fd`` is open on; errors call the file ``path``.

    ``parts``: of a striped slot, where its part in each file is; then this is where its first byte is.
    """

    fd: int
    offset: int
    path: str
    parts: tuple[Location, ...] = ()


class Candidate(Protocol):
    """A copy that an eviction policy may choose as a victim: it is not in use."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copy's slot."""
        ...

    @property
    def dirty(self) -> bool:
        """Whether no tier below has the copy's bytes: the copy can leave only after a write-back."""
        ...


class Fence(Protocol):
    """A point in the queued work of a device, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether all work before the fence has run."""
        ...


@dataclass(slots=True)
class Transfer:
    """A tensor's way over one link, in one direction.

    ``upper`` and ``lower`` are its slots in the link's two tiers, ``nbytes`` is the tensor's own size (without padding; at
    least 1). ``tensor_id`` and ``generation`` say whose bytes and from when, and go into the checksums. ``checksums`` is what
    an UP transfer must find: the concatenated checksums of the pieces, or b"" for unchecked. ``after`` are fences that must
    have passed before the upper slot is touched. ``begun`` is the urgency with which the transfer was started; ``urgency`` may
    have risen since. ``begin`` is where in the tensor the ``nbytes`` begin that an UP transfer from the disk moves, where these
    are not all: a multiple of PIECE_BYTES.
    """

    tag: int
    key: Key
    direction: Direction
    upper: Slot
    lower: Slot
    nbytes: int
    urgency: Urgency
    tensor_id: int = 0
    generation: int = 0
    checksums: bytes = b""
    after: tuple[Fence, ...] = ()
    begun: Urgency = Urgency.DEMAND
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a transfer. ``checksums`` are those of the bytes that went DOWN; ``error`` is None when the transfer
    succeeded."""

    tag: int
    checksums: bytes = b""
    error: TieredError | None = field(default=None)


class IORequest(NamedTuple):
    """A request to move ``nbytes`` between memory at ``address`` and ``fd`` at ``offset``; the completion carries ``tag``."""

    operation: Operation
    fd: int
    offset: int
    address: int
    nbytes: int
    tag: int


class IOCompletion(NamedTuple):
    """The end of a request; ``result`` is the number of bytes moved (short only at the end of a file), or a negative errno."""

    tag: int
    result: int
