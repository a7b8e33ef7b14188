"""Stores with striped tensors: each byte lies where the format says, and comes back through everything that reads a store."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import forged
from tests.filesystems import fill, root, two_ext4
from tests.store.chains import MIB, numbers, same
from tests.striping import lower_stripes
from tiered import CorruptionError, ManifestError, ReadError, ShortTransfer, TieredStore, TransferError, WriteError, verify
from tiered.cli.main import main
from tiered.format.generations import generations, load
from tiered.format.manifest import Manifest, TensorRecord
from tiered.io.posix import PosixBackend
from tiered.store.at_rest import StoreAtRest
from tiered.types import IOCompletion, IORequest, Operation

STRIPE, WHOLE = 64 << 10, 128 << 10
Open = Callable[..., TieredStore]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_stripes(monkeypatch, STRIPE, WHOLE)


@pytest.fixture
def open_store(open_on_drives: Open) -> Open:
    return open_on_drives


def put_some(store: TieredStore, seed: int = 0) -> dict[str, torch.Tensor]:
    """Of 20,000 to 299,999 bytes, and one of each size at which something ends."""
    sizes = [STRIPE, WHOLE, WHOLE + 1, 2 * WHOLE, 2 * WHOLE + 1, *range(20_000, 300_000, 55_999)]
    tensors = {f"t{nbytes}": numbers(nbytes, seed + nbytes, torch.uint8) for nbytes in sizes}
    for key, tensor in tensors.items():
        store.put(key, tensor)
    return tensors


def check(store: Any, tensors: dict[str, torch.Tensor]) -> None:
    assert sorted(store) == sorted(tensors)
    for key, tensor in tensors.items():
        same(store.get(key), tensor)


def newest(folder: Path) -> Manifest:
    manifest = load(folder)
    assert manifest is not None
    return manifest


def is_striped(record: TensorRecord, paths: list[Path]) -> bool:
    return record.extent is not None and record.extent.file == len(paths)


def places(record: TensorRecord, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Of each stripe: its first byte in the tensor, its drive, its offset there, and its bytes, by the rule of the format."""
    assert record.extent is not None
    for stripe, begin in enumerate(range(0, record.spec.nbytes, STRIPE)):
        offset = record.extent.offset + stripe // count * STRIPE
        yield begin, stripe % count, offset, min(STRIPE, record.spec.nbytes - begin)


def drive(paths: list[Path], index: int) -> Path:
    return paths[index] / f"drive.{index}"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        was = file.read(1)[0]
        file.seek(at)
        file.write(bytes([was ^ 1]))


@pytest.mark.usefixtures("lowered")
class TestRoundTrip:
    def test_bytes_lie_where_the_format_says_and_come_back(self, open_store: Open, folder: Path, paths: list[Path]) -> None:
        store = open_store()
        tensors = put_some(store)
        store.commit()
        check(store, tensors)
        store.close()
        data = [drive(paths, index).read_bytes() for index in range(len(paths))]
        for record in newest(folder).tensors:
            assert is_striped(record, paths) == (record.spec.nbytes > WHOLE)
            if is_striped(record, paths):
                parts = [data[file][offset : offset + nbytes] for _, file, offset, nbytes in places(record, len(paths))]
                assert b"".join(parts) == tensors[record.key].numpy().tobytes()
        for order in (paths[::-1], paths):
            again = open_store(paths=[str(path) for path in order])
            check(again, tensors)
            again.close()
            with StoreAtRest(folder, paths=order) as rest:
                check(rest, tensors)
            assert verify(folder, paths=order).sound

    def test_part_of_a_tensor(self, open_store: Open, folder: Path, paths: list[Path]) -> None:
        with open_store() as store:
            tensor = numbers(299_995, 1, torch.uint8)
            store.put("it", tensor)
        source = random.Random(1)
        with StoreAtRest(folder, paths=paths) as rest:
            for _ in range(50):
                start, stop = sorted(source.sample(range(tensor.numel() + 1), 2))
                assert torch.cat(list(rest.read("it", start, stop))).equal(tensor[start:stop])

    def test_a_random_history_with_kept_generations(self, open_store: Open, folder: Path, paths: list[Path]) -> None:
        chance = random.Random(len(paths))
        now: dict[str, torch.Tensor] = {}
        kept: dict[int, dict[str, torch.Tensor]] = {}
        store = open_store(keep=3)
        steps = ["put", "put", "put", "get", "write", "delete", "commit", "commit", "reopen", "rollback", "read"]
        for step in range(300):
            key = f"t{chance.randrange(10)}"
            what = chance.choice(steps)
            if what == "put":
                now[key] = numbers(chance.choice([50_000, 150_000, chance.randrange(320_000)]), step, torch.uint8)
                store.put(key, now[key])
            elif what == "get" and key in now:
                same(store.get(key), now[key])
            elif what == "write" and key in now:
                now[key] = numbers(now[key].numel(), step, torch.uint8)
                with store.lease(key, access="write") as tensor:
                    tensor.copy_(now[key])
                del tensor
            elif what == "delete" and key in now:
                store.delete(key)
                del now[key]
            elif what == "commit":
                kept[store.commit()] = dict(now)
            elif what == "rollback" and generations(folder):
                chosen = chance.choice(generations(folder))
                assert store.rollback(chosen) == chosen
                now = dict(kept[chosen])
                check(store, now)
            elif what == "reopen" and chance.random() < 0.3:
                store.close()
                chance.shuffle(paths)
                store = open_store(keep=3)
                now = dict(kept[max(kept)]) if kept else {}
                check(store, now)
            elif what == "read" and kept:
                chosen = chance.choice(generations(folder))
                with open_store(access="read", generation=chosen) as reader:
                    check(reader, kept[chosen])
        kept[store.commit()] = now
        assert any(is_striped(record, paths) for record in newest(folder).tensors)
        store.close()
        there = generations(folder)
        for generation in there:
            with open_store(keep=3, generation=generation) as old:
                check(old, kept[generation])
                old.close()
        assert verify(folder, paths=paths).sound

    def test_readers_beside_a_writer(self, open_store: Open, folder: Path, paths: list[Path]) -> None:
        writer = open_store(keep=1)
        before = put_some(writer)
        writer.commit()
        reader = open_store(access="read", paths=paths[::-1])
        check(reader, before)
        for seed in (1000, 2000, 3000):
            after = put_some(writer, seed)
            after |= {"t20000": before["t20000"]}
            writer.put("t20000", before["t20000"])
            writer.commit()
            check(reader, before)
            reader.refresh()
            check(reader, after)
            before = after

    def test_export_and_ls(
        self, open_store: Open, folder: Path, paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open_store() as store:
            tensors = put_some(store)
        words = ["--paths", *map(str, paths)]
        assert main(["export", str(folder), "--out", str(tmp_path / "out"), *words]) == 0
        found: dict[str, torch.Tensor] = {}
        for file in (tmp_path / "out").glob("*.safetensors"):
            found |= load_file(file)
        assert sorted(found) == sorted(tensors)
        for key, tensor in tensors.items():
            same(found[key], tensor)
        assert main(["verify", str(folder), *words]) == 0
        capsys.readouterr()
        assert main(["ls", str(folder), "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert str(tensors["t131073"].numel()) in json.dumps(listed)

    def test_scratch(self, open_store: Open, tmp_path: Path) -> None:
        with open_store(durability="none") as store:
            check(store, put_some(store))
        assert list(tmp_path.iterdir()) == []


def test_of_the_size_that_is_striped(tmp_path: Path) -> None:
    """Nothing is lowered: 64 MiB lie on one drive, a byte more on both."""
    paths = [tmp_path / "a", tmp_path / "b"]
    tensors = {f"t{more}": numbers((64 << 20) + more, more, torch.uint8) for more in (0, 1)}
    with TieredStore.open(tmp_path / "state", dram="80MiB", paths=paths) as store:
        for key, tensor in tensors.items():
            store.put(key, tensor)
    records = {record.key: record for record in newest(tmp_path / "state").tensors}
    assert not is_striped(records["t0"], paths)
    assert is_striped(records["t1"], paths)
    with TieredStore.open(tmp_path / "state", dram="80MiB", paths=paths[::-1]) as store:
        check(store, tensors)
    assert verify(tmp_path / "state", paths=paths).sound
    extent = records["t1"].extent
    assert extent is not None
    flip(drive(paths, 1), extent.offset + (4 << 20) + 5)  # in the fourth piece, which is the second on this drive
    with TieredStore.open(tmp_path / "state", dram="80MiB", paths=paths) as store, pytest.raises(CorruptionError) as raised:
        store.get("t1")
    assert (raised.value.path, raised.value.offset) == (str(drive(paths, 1)), extent.offset + (4 << 20))


# Faults


@pytest.mark.usefixtures("lowered")
class TestFaults:
    def test_a_flipped_byte_on_any_drive_names_the_tensor_and_the_drive(
        self, open_store: Open, folder: Path, paths: list[Path]
    ) -> None:
        with open_store() as store:
            tensors = put_some(store)
        records = [record for record in newest(folder).tensors if is_striped(record, paths)]
        chance, seen = random.Random(3), set()
        for record in records:
            for _, index, offset, nbytes in places(record, len(paths)):
                at = offset + chance.randrange(nbytes)
                flip(drive(paths, index), at)
                (damage,) = verify(folder, paths=paths).damages
                found = (damage.key, damage.path, damage.offset, damage.nbytes)
                assert found == (record.key, str(drive(paths, index)), offset, nbytes)
                with open_store() as store, open_store(access="read") as reader, StoreAtRest(folder, paths=paths) as rest:
                    for one in (store, reader, rest):
                        with pytest.raises(CorruptionError) as raised:
                            one.get(record.key)
                        assert (raised.value.key, raised.value.path) == (record.key, str(drive(paths, index)))
                        assert raised.value.offset == offset
                    other = chance.choice([key for key in tensors if key != record.key])
                    same(store.get(other), tensors[other])
                    store.close()
                flip(drive(paths, index), at)
                seen.add(index)
        assert seen == set(range(len(paths)))
        check(open_store(), tensors)

    def test_stripes_that_are_exchanged_are_noticed(self, open_store: Open, folder: Path, paths: list[Path]) -> None:
        """Intact pieces of the same tensor, on each other's place."""
        with open_store() as store:
            tensors = put_some(store)
        record = next(record for record in newest(folder).tensors if record.key == "t243996")
        (_, one, at, nbytes), (_, other, there, _) = list(places(record, len(paths)))[:2]
        pieces = []
        for index, offset in ((one, at), (other, there)):
            pieces.append(drive(paths, index).read_bytes()[offset : offset + nbytes])
        for index, offset, piece in ((one, at, pieces[1]), (other, there, pieces[0])):
            with drive(paths, index).open("r+b") as file:
                file.seek(offset)
                file.write(piece)
        damages = verify(folder, paths=paths).damages
        assert {damage.path for damage in damages} == {str(drive(paths, one)), str(drive(paths, other))}
        store = open_store()
        with pytest.raises(CorruptionError):
            store.get(record.key)
        del tensors[record.key]
        for key, tensor in tensors.items():
            same(store.get(key), tensor)

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_drive_that_was_cut(self, open_store: Open, folder: Path, paths: list[Path], index: int) -> None:
        with open_store() as store:
            put_some(store)
        record = max(newest(folder).tensors, key=lambda record: record.extent.offset if is_striped(record, paths) else 0)  # type: ignore[union-attr]
        cut = next(offset for _, file, offset, _ in places(record, len(paths)) if file == index) + 4096
        store = open_store()
        reader = open_store(access="read")
        size = drive(paths, index).stat().st_size
        os.truncate(drive(paths, index), cut)
        for one in (store, reader):
            with pytest.raises((ShortTransfer, ReadError, CorruptionError)) as raised:
                one.get(record.key)
            assert (raised.value.key, raised.value.path) == (record.key, str(drive(paths, index)))
            assert raised.value.offset in {offset for _, file, offset, _ in places(record, len(paths)) if file == index}
        store.close()
        with pytest.raises(ManifestError, match=str(drive(paths, index))):
            open_store()
        damages = verify(folder, paths=paths).damages
        assert any((one.key, one.path) == (record.key, str(drive(paths, index))) for one in damages)
        assert {one.path for one in damages} == {str(drive(paths, index))}
        os.truncate(drive(paths, index), size)

    def test_a_missing_drive_leaves_the_others_to_verify(self, open_store: Open, folder: Path, paths: list[Path]) -> None:
        with open_store() as store:
            put_some(store)
        found = verify(folder, paths=[paths[0], *paths[2:]])
        lost = sum(
            nbytes
            for record in newest(folder).tensors
            for _, index, _, nbytes in (places(record, len(paths)) if is_striped(record, paths) else ())
            if index == 1
        )
        of_striped = [damage for damage in found.damages if damage.key and int(damage.key[1:]) > WHOLE]
        assert sum(damage.nbytes for damage in of_striped) == lost > 0
        assert {damage.path for damage in of_striped} == {"drive.1"}

    @pytest.mark.parametrize("change", ["file", "offset", "nbytes", "offset of a plain one"])
    def test_a_manifest_that_is_wrong_is_refused(self, open_store: Open, folder: Path, paths: list[Path], change: str) -> None:
        with open_store() as store:
            put_some(store)

        def alter(document: Any) -> None:
            striped = next(one for one in document["tensors"] if one["extent"]["file"] == len(paths))
            plain = next(one for one in document["tensors"] if one["extent"]["file"] == 0)
            if change == "offset of a plain one":
                plain["extent"]["offset"] = striped["extent"]["offset"]
            else:
                striped["extent"][change] += {"file": 1, "offset": 1 << 40, "nbytes": 1 << 40}[change]

        forged.change_manifest(folder, alter)
        says = {"file": "data file", "offset of a plain one": "overlap"}.get(change, "ends at byte")
        for access in ("write", "read"):
            with pytest.raises(ManifestError, match=says):
                open_store(access=access)

    @pytest.mark.parametrize("how", ["error", "short"])
    @pytest.mark.parametrize("index", [0, 1])
    def test_reads_that_fail_on_one_drive(
        self, open_store: Open, folder: Path, paths: list[Path], index: int, how: str
    ) -> None:
        with open_store() as store:
            tensors = put_some(store)
        record = next(record for record in newest(folder).tensors if record.key == "t262145")
        _, _, offset, _ = next(place for place in places(record, len(paths)) if place[1] == index)
        faulty = Faulty()
        store = open_store(backend=lambda: faulty)
        faulty.fail(Operation.READ, drive(paths, index), offset, how)
        with pytest.raises(TransferError) as raised:
            store.get(record.key)
        assert type(raised.value) is (ReadError if how == "error" else ShortTransfer)
        found = (raised.value.key, raised.value.path, raised.value.offset, raised.value.errno)
        expected = errno.EIO if how == "error" else None
        assert found == (record.key, str(drive(paths, index)), offset, expected)
        faulty.mend()
        check(store, tensors)

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_write_that_fails_on_one_drive(self, open_store: Open, folder: Path, paths: list[Path], index: int) -> None:
        faulty = Faulty()
        store = open_store(backend=lambda: faulty)
        tensors = put_some(store)
        store.commit()
        faulty.fail(Operation.WRITE, drive(paths, index), None, "error")
        store.put("new", numbers(300_000, 7, torch.uint8))
        with pytest.raises(WriteError) as raised:
            store.commit()
        assert (raised.value.key, raised.value.path) == ("new", str(drive(paths, index)))
        faulty.mend()
        store.commit()
        tensors["new"] = numbers(300_000, 7, torch.uint8)
        check(store, tensors)
        store.close()
        check(open_store(), tensors)


class Faulty(PosixBackend):
    """Reads and writes one file badly."""

    def __init__(self) -> None:
        super().__init__()
        self._rule: tuple[Operation, Path, int | None, str] | None = None
        self._bad: set[int] = set()

    def fail(self, operation: Operation, path: Path, offset: int | None, how: str) -> None:
        self._rule = operation, path, offset, how

    def mend(self) -> None:
        self._rule = None

    def submit(self, batch: Sequence[IORequest]) -> int:
        taken = super().submit(batch)
        if self._rule is not None:
            operation, path, offset, _ = self._rule
            self._bad |= {
                request.tag
                for request in batch[:taken]
                if request.operation is operation
                and offset in (None, request.offset)
                and os.path.samestat(os.fstat(request.fd), path.stat())
            }
        return taken

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        return [self._altered(completion) for completion in super().reap(min_events, timeout)]

    def _altered(self, completion: IOCompletion) -> IOCompletion:
        if completion.tag not in self._bad:
            return completion
        self._bad.remove(completion.tag)
        short = self._rule is not None and self._rule[3] == "short"
        return completion._replace(result=completion.result - 4096 if short else -errno.EIO)


# Full drives


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Two ext4 filesystems, of 16 and of 24 MiB."""
    with two_ext4(tmp_path, 16 * MIB, 24 * MIB) as found:
        yield found


@root
@pytest.mark.usefixtures("lowered")
class TestFullDrives:
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_one_full_the_other_has_tensors_whole(self, disks: list[Path], folder: Path, order: tuple[int, int]) -> None:
        paths = [disks[index] for index in order]
        with TieredStore.open(folder, dram=MIB, paths=paths) as store:
            tensors = put_some(store)
            store.commit()
            fill(disks[0])
            for number in range(40):  # 10 MB: more than what the full drive's file has left
                tensors[f"m{number}"] = numbers(250_000, 500 + number, torch.uint8)
                store.put(f"m{number}", tensors[f"m{number}"])
            store.commit()
            check(store, tensors)
            found = {record.extent.file for record in newest(folder).tensors if record.extent and record.key[0] == "m"}
            assert order.index(1) in found
            (disks[0] / "neighbour").unlink()
            store.delete("m3")
            tensors["again"] = tensors.pop("m3")
            for _ in range(3):  # until no kept generation has it
                store.commit()
            store.put("again", tensors["again"])
            store.commit()
            assert is_striped(next(record for record in newest(folder).tensors if record.key == "again"), disks)
        with TieredStore.open(folder, dram=MIB, paths=disks) as store:
            check(store, tensors)

    def test_a_tensor_that_no_single_drive_can_take(self, disks: list[Path], folder: Path) -> None:
        tensor = numbers(24 * MIB, 1, torch.uint8)
        with TieredStore.open(folder, dram="28MiB", paths=disks) as store:
            store.put("large", tensor)
            store.commit()
        with TieredStore.open(folder, dram="28MiB", paths=disks) as store:
            same(store.get("large"), tensor)
