"""Promise 7: corruption is never returned as data. Bytes of data files are changed behind a store's back, at random places."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stress.contents import content, evict_all, holds
from tests.stress.tally import Tally, counts
from tests.striping import lower_stripes
from tiered import CorruptionError, ManifestError, ShortTransfer, TieredError, TieredStore
from tiered.format.generations import load

PROMISE = "7 (corruption is never returned as data)"
MIB = 1 << 20
STRIPE, WHOLE = 64 << 10, 128 << 10
KEYS = {f"t{number}": (number * 37_117) % 290_000 + 1 for number in range(20)} | {"large": 5 * MIB + 77}
DRAM = 6 * MIB


@dataclass
class Image:
    """A closed store: its data files' bytes one after the other, what they were one generation ago, and where each tensor is.

    ``places`` are the ranges of each tensor: offset, and bytes.
    """

    folder: Path
    files: list[Path]
    now: bytes
    before: bytes
    places: dict[str, list[tuple[int, int]]]

    @property
    def paths(self) -> list[Path] | None:
        return [file.parent for file in self.files] if len(self.files) > 1 else None

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [one for ranges in self.places.values() for one in ranges]

    def open(self, **options: Any) -> TieredStore:
        return TieredStore.open(self.folder, dram=DRAM, paths=self.paths, **options)

    def touched(self, changes: list[tuple[int, bytes]]) -> set[str]:
        """The tensors of which a byte would be another one."""
        found = set()
        for at, data in changes:
            for key, ranges in self.places.items():
                for offset, nbytes in ranges:
                    low, high = max(at, offset), min(at + len(data), offset + nbytes)
                    if low < high and data[low - at : high - at] != self.now[low:high]:
                        found.add(key)
        return found

    def write(self, changes: list[tuple[int, bytes]]) -> None:
        begin = 0
        for file in self.files:
            size = len(self.now) // len(self.files)
            fd = os.open(file, os.O_RDWR)
            for at, data in changes:
                low, high = max(at, begin), min(at + len(data), begin + size)
                if low < high:
                    assert os.pwrite(fd, data[low - at : high - at], low - begin) == high - low
            os.close(fd)
            begin += size

    def restore(self, changes: list[tuple[int, bytes]]) -> None:
        self.write([(at, self.now[at : at + len(data)]) for at, data in changes])


def made(home: Path, drives: int) -> Image:
    """Every extent was another tensor's or another generation's once. With several ``drives``, large tensors are striped."""
    folder, paths = home / "state", [home / f"at{number}" for number in range(drives)]
    files = [path / f"drive.{number}" for number, path in enumerate(paths)] if drives > 1 else [folder / "data.0"]
    before: list[bytes] = []
    with TieredStore.open(folder, dram=DRAM, keep=1, paths=paths if drives > 1 else None) as store:
        for version in range(4):
            for key, nbytes in KEYS.items():
                store.put(key, content(key, version, nbytes))
            store.commit()
            if version == 2:
                before = [file.read_bytes() for file in files]
    now = [file.read_bytes() for file in files]
    size = max(map(len, now))
    for file, data in zip(files, now, strict=True):  # all as long, so that an offset says which file it is in
        os.truncate(file, size)
        assert len(data) <= size
    manifest = load(folder)
    assert manifest is not None
    places: dict[str, list[tuple[int, int]]] = {}
    for record in manifest.tensors:
        assert record.extent is not None
        where, nbytes = record.extent, record.spec.nbytes
        if where.file < drives:
            places[record.key] = [(where.file * size + where.offset, nbytes)]
            continue
        places[record.key] = [
            (stripe % drives * size + where.offset + stripe // drives * STRIPE, min(STRIPE, nbytes - begin))
            for stripe, begin in enumerate(range(0, nbytes, STRIPE))
        ]
    assert drives == 1 or sum(len(ranges) > 1 for ranges in places.values()) > 5
    whole = [b"".join(data.ljust(size, b"\0") for data in found) for found in (now, before)]
    return Image(folder, files, whole[0], whole[1], places)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return made(tmp_path_factory.mktemp("corruption"), 1)


@pytest.fixture(scope="module", params=[1, 3], ids=["whole", "striped"])
def any_image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param > 1:
            lower_stripes(patch, STRIPE, WHOLE)
        yield made(tmp_path_factory.mktemp("corruption"), request.param)


Damage = Callable[[Image, random.Random], list[tuple[int, bytes]]]


def _any(image: Image, source: random.Random) -> tuple[int, int]:
    """A range of any tensor."""
    return source.choice(image.places[source.choice(list(image.places))])


def _range(image: Image, source: random.Random) -> tuple[int, int]:
    """Within a tensor: offset, and how many bytes it has from there."""
    offset, nbytes = _any(image, source)
    skip = source.randrange(nbytes)
    return offset + skip, nbytes - skip


def flip(image: Image, source: random.Random) -> list[tuple[int, bytes]]:
    at, _ = _range(image, source)
    return [(at, bytes([image.now[at] ^ 1 << source.randrange(8)]))]


def zero(image: Image, source: random.Random) -> list[tuple[int, bytes]]:
    at, rest = _range(image, source)
    return [(at, bytes(min(rest, source.choice([1, 512, 4096, 65536]))))]


def stale(image: Image, source: random.Random) -> list[tuple[int, bytes]]:
    """A write that the drive acknowledged and never did: whole, or a sector of it."""
    offset, nbytes = _any(image, source)
    if source.random() < 0.5:
        offset += source.randrange(nbytes) // 512 * 512
        nbytes = 512
    return [(offset, image.before[offset : offset + nbytes])]


def swapped(image: Image, source: random.Random) -> list[tuple[int, bytes]]:
    one, other = source.sample(image.ranges, 2)
    size = min(one[1], other[1])
    return [(one[0], image.now[other[0] : other[0] + size]), (other[0], image.now[one[0] : one[0] + size])]


def misdirected(image: Image, source: random.Random) -> list[tuple[int, bytes]]:
    """A write that landed some sectors away, or on another tensor."""
    offset, nbytes = _any(image, source)
    size = min(nbytes, source.choice([512, 4096, 1 << 20]))
    to = offset + 512 * source.randrange(1, 64) if source.random() < 0.5 else _any(image, source)[0]
    to = min(to, len(image.now) - size)
    return [(to, image.now[offset : offset + size])]


KINDS: dict[str, Damage] = {kind.__name__: kind for kind in (flip, zero, stale, swapped, misdirected)}


def check(store: TieredStore, image: Image, damaged: set[str], source: random.Random, what: str) -> None:
    """What is damaged raises, in every way to read it; what is not is right."""
    for key in damaged:
        for _ in range(2):  # it does not become right by asking again
            with pytest.raises((CorruptionError, ShortTransfer)) as raised:
                store.get(key)
            assert raised.value.key == key, what
            assert raised.value.path in map(str, image.files)
    for key in source.sample(sorted(set(KEYS) - damaged), 3):
        holds(store, key, 3, KEYS[key])


def _in_a_header(image: Image, changes: list[tuple[int, bytes]]) -> bool:
    size = len(image.now) // len(image.files)
    return any(at % size < 4096 or at // size != (at + len(data) - 1) // size for at, data in changes)


@counts(40, 420)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes(any_image: Image, backend: str, kind: str, count: int, tally: Tally) -> None:
    image, source = any_image, random.Random(f"{kind} {backend} {count}")
    store = image.open(backend=backend)
    done = 0
    while done < -(-count // 3):
        changes = KINDS[kind](image, source)
        damaged = image.touched(changes)
        if not damaged or _in_a_header(image, changes):
            continue
        if source.random() < 0.2:
            store.close()
            store = image.open(backend=backend)
        else:
            evict_all(store)
        image.write(changes)
        check(store, image, damaged, source, f"{kind} at {[at for at, _ in changes]}")
        image.restore(changes)
        tally.count(kind, len(damaged))
        done += 1
    evict_all(store)
    for key, nbytes in KEYS.items():
        holds(store, key, 3, nbytes)
    store.close()


@counts(20, 200)
@pytest.mark.parametrize("when", ["open", "closed"])
def test_truncated_files(image: Image, backend: str, when: str, count: int, tally: Tally) -> None:
    """At any byte. While it is closed, opening may notice; never later than reading."""
    source = random.Random(f"{when} {backend}")
    for _ in range(-(-count // 6)):
        end = source.randrange(max(offset + nbytes for offset, nbytes in image.ranges))
        end -= source.choice([0, end % 4096])
        lost = {key for key, [(offset, nbytes)] in image.places.items() if offset + nbytes > end}
        store = TieredStore.open(image.folder, dram=DRAM, backend=backend) if when == "open" else None  # type: ignore[arg-type]
        os.truncate(image.folder / "data.0", end)
        try:
            if store is None:
                try:
                    store = TieredStore.open(image.folder, dram=DRAM, backend=backend)  # type: ignore[arg-type]
                except ManifestError as error:
                    assert "data.0" in str(error)
            if store is not None:
                check(store, image, lost, source, f"cut at {end}") if len(set(KEYS) - lost) > 3 else _all_raise(store, lost)
        finally:
            if store is not None:
                store.close()
            image.write([(end, image.now[end:])])
        tally.count("truncated", len(lost))


def _all_raise(store: TieredStore, lost: set[str]) -> None:
    for key in lost:
        with pytest.raises((CorruptionError, ShortTransfer)):
            store.get(key)


@counts(60, 600)
def test_a_damaged_header_opens_nothing(image: Image, count: int, tally: Tally) -> None:
    """Of the data file: any byte of its first block is checked."""
    source = random.Random(count)
    for number in range(count):
        at = source.randrange(4096) if number % 3 else source.randrange(64)
        changes = [(at, bytes([image.now[at] ^ source.randrange(1, 256)]))]
        image.write(changes)
        with pytest.raises(TieredError, match=r"data\.0"):
            TieredStore.open(image.folder, dram=DRAM)
        image.restore(changes)
        tally.count("header", 1)
    with TieredStore.open(image.folder, dram=DRAM) as store:
        holds(store, "t3", 3, KEYS["t3"])
