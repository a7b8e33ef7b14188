"""The format, as the real package reads and writes it; and files that somebody made to do harm."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.filesystems import instead
from tiered import CapacityError, MisuseError, SafetensorsError, TensorSpec, TieredStore, import_safetensors
from tiered.format.safetensors import CODES, INDEX, WeightFiles, encode_header, entry_of
from tiered.format.safetensors_writer import Shards


def tensors() -> dict[str, torch.Tensor]:
    made = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in CODES}
    return {**made, "empty": torch.empty(0, 3), "0-d": torch.tensor(1.5), "ü \n\"": torch.ones(2)}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def saved(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_every_type_goes_there_and_back(tmp_path: Path) -> None:
    given = tensors()
    save_file(given, tmp_path / "model.safetensors", {"format": "pt"})
    with TieredStore.open(tmp_path / "state", dram="2MiB") as store:
        assert import_safetensors(store, tmp_path) == len(given)
        assert set(store) == set(given)
        assert all(same(store.get(name), value) for name, value in given.items())
        specs = {name: store.spec(name) for name in store}
    entries = [entry_of(name, spec) for name, spec in specs.items()]
    contents = (given[name].reshape(-1).view(torch.uint8).numpy().data for name in specs if given[name].numel())
    Shards(tmp_path / "out", entries, "5GB", "refuse").write(contents)
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == given.keys()
    assert all(same(again[name], value) for name, value in given.items())


def test_wide_types_come_first_so_that_all_are_aligned() -> None:
    kinds = {"bool": 1, "float32": 4, "bfloat16": 2, "int64": 8}
    specs = [TensorSpec(name, (3,), itemsize) for name, itemsize in kinds.items()]
    header, placed = encode_header([entry_of(spec.dtype, spec) for spec in specs])
    assert len(header) % 8 == 0
    assert all(entry.offset % entry.spec.itemsize == 0 for entry in placed)


def test_a_type_that_there_is_not() -> None:
    with pytest.raises(MisuseError, match="'x' is complex128, which safetensors files do not have"):
        entry_of("x", TensorSpec("complex128", (1,), 16))


def one(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"", b"", "not what a safetensors file has"),
        (b"[" * 100_000, b"", "not what a safetensors file has"),
        (b"\xff\xfe", b"", "not what a safetensors file has"),
        ([1], b"", "not what a safetensors file has"),
        ({"w": 1}, b"", "not what a safetensors file has"),
        ({"__metadata__": {"a": 1}}, b"", "not what a safetensors file has"),
        (one(more=1), bytes(8), "not what a safetensors file has"),
        (one(shape=[-2]), bytes(8), "not what a safetensors file has"),
        (one(shape=[2**64]), bytes(8), "not what a safetensors file has"),
        (one(shape=[1] * 65), bytes(8), "not what a safetensors file has"),
        (one(data_offsets=[0]), bytes(8), "not what a safetensors file has"),
        (one(dtype="F4"), bytes(8), "of type 'F4'"),
        (one(shape=[3]), bytes(8), r"of shape \(3,\) has 8 bytes"),
        (one(shape=[2**40, 2**40]), bytes(8), "has 8 bytes"),
        (one(data_offsets=[8, 0]), bytes(8), "has -8 bytes"),
        (one(data_offsets=[4, 12]), bytes(12), "follows 4 bytes"),
        (one(), bytes(4), "the file has 4 for them; the file is cut short: copy or download it again"),
        (one(), bytes(12), "the tensors have 8 bytes, the file has 12 for them$"),
        ({**one(), "v": one(data_offsets=[4, 12])["w"]}, bytes(12), "overlaps"),
        ({**one(), "v": one()["w"]}, bytes(8), "overlaps"),
        (one(shape=[2**61], data_offsets=[0, 2**63 - 1]), bytes(8), "has 9223372036854775807 bytes"),
        (one(shape=[2**40, 2**40, 0], data_offsets=[0, 0]), b"", "strides overflow"),
        (one(shape=[0, 2**62, 2], data_offsets=[0, 0]), b"", "strides overflow"),
        (one(dtype="nn"), bytes(8), "of type 'nn'"),
    ],
)  # fmt: skip
def test_a_hostile_header(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    path = saved(tmp_path / "it.safetensors", header, data)
    with pytest.raises(SafetensorsError, match=says):
        WeightFiles(path)


@pytest.mark.parametrize(
    ("begins", "says"),
    [
        (b"GGUF\3\0\0\0", "a GGUF file, .*: tiered import FILE.gguf STORE"),
        (b"PK\3\4", "save_pretrained"),
        (b"\x80\2", "save_pretrained"),
    ],
)
def test_what_another_program_writes_is_named(tmp_path: Path, begins: bytes, says: str) -> None:
    (tmp_path / "it.safetensors").write_bytes(begins + b"\1" * 16)
    with pytest.raises(SafetensorsError, match=f"is not a safetensors file, but .*{says}"):
        WeightFiles(tmp_path)


def test_a_header_may_be_as_long_as_another_program_begins_a_file(tmp_path: Path) -> None:
    header = json.dumps(one()).encode().ljust(0x280)  # whose length begins with the bytes of a pickle
    assert len(header).to_bytes(8, "little").startswith(b"\x80\2")
    assert set(WeightFiles(saved(tmp_path / "it.safetensors", header, bytes(8))).entries) == {"w"}


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001, 1_000])
def test_a_header_that_says_it_is_long_takes_no_memory(tmp_path: Path, length: int) -> None:
    path = saved(tmp_path / "it.safetensors", b"{}", length=length)
    with pytest.raises(SafetensorsError, match=f"its header has {length} bytes"):
        WeightFiles(path)
    (tmp_path / "it.safetensors").write_bytes(b"1234")
    with pytest.raises(SafetensorsError, match="it has 4 bytes"):
        WeightFiles(path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ("{}", "has no weight_map, so it is no index .*: name its folder"),
        ({"weight_map": {"w": 1}}, "is not an index"),
        ({"weight_map": {"w": "../a.safetensors"}}, "not a file beside it"),
        ({"weight_map": {"w": "/etc/passwd"}}, "not a file beside it"),
        ({"weight_map": {"w": ".."}}, "not a file beside it"),
        ({"weight_map": {"w": "c.safetensors"}}, "names 'c.safetensors', which is missing"),
        ({"weight_map": {"v": "a.safetensors"}}, "lacks 'v'"),
        ({"weight_map": {"w": "a.safetensors"}, "metadata": 1}, "has 'x', which no index names"),
    ],
)
def test_a_hostile_index(tmp_path: Path, index: Any, says: str) -> None:
    saved(tmp_path / "a.safetensors", {**one(), "x": one(data_offsets=[8, 16])["w"]}, bytes(16))
    (tmp_path / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(SafetensorsError, match=says):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", INDEX])
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, shard in enumerate(shards):
        save_file({f"{number}": torch.ones(2)}, tmp_path / shard)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"0": shards[0], "1": shards[1]}}))
    instead(tmp_path / name, kind)
    with pytest.raises(SafetensorsError, match=f"{name} is not a regular file"):
        WeightFiles(tmp_path)
    with TieredStore.open(None, dram="1MiB") as store, pytest.raises(SafetensorsError, match=f"{name} is not a regular file"):
        import_safetensors(store, tmp_path)


def test_which_files(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="neither a safetensors file nor a folder"):
        WeightFiles(tmp_path / "absent")
    with pytest.raises(MisuseError, match="has no safetensors file: name a folder"):
        WeightFiles(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    assert set(WeightFiles(tmp_path).entries) == {"a"}
    save_file({"b": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(MisuseError, match=r"has 2 safetensors files and no model\.safetensors\.index\.json: .* name that file"):
        WeightFiles(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    for path in (tmp_path, tmp_path / INDEX):
        assert set(WeightFiles(path).entries) == {"a", "b"}
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "b.safetensors")  # as in Hugging Face's cache
    assert set(WeightFiles(tmp_path / "snapshot").entries) == {"b"}


def test_an_import_that_fails(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5), "large": torch.ones(3 << 20), "z": torch.ones(3)}, tmp_path / "model.safetensors")

    def stop(done: int, total: int) -> None:
        if done > 6 << 20:
            raise KeyboardInterrupt

    with TieredStore.open(tmp_path / "state", dram="16MiB") as store:
        store.put("z", torch.zeros(1))
        with pytest.raises(MisuseError, match="'z'"):
            import_safetensors(store, tmp_path)
        with pytest.raises(KeyboardInterrupt):
            import_safetensors(store, tmp_path, existing="overwrite", progress=stop)
        assert "large" not in store
        assert store.statistics().tiers[0].held == 0
        import_safetensors(store, tmp_path, existing="overwrite")
        assert torch.equal(store.get("large"), torch.ones(3 << 20))
        assert torch.equal(store.get("z"), torch.ones(3))
        store.put("large", torch.zeros(7))
        with pytest.raises(KeyboardInterrupt):
            import_safetensors(store, tmp_path, existing="overwrite", progress=stop)
        assert torch.equal(store.get("large"), torch.zeros(7))  # and not a part of the other
        import_safetensors(store, tmp_path, existing="overwrite")
        assert torch.equal(store.get("large"), torch.ones(3 << 20))
        assert sorted(store) == ["a", "large", "z"]
        store.delete("a")
        store.table("a", 3, 3)
        store.rename({"z": "mine"})
        save_file({"mine": torch.ones(3), "a/table": torch.ones(3)}, tmp_path / "model.safetensors")
        with pytest.raises(MisuseError, match=r"tensor 'a/table' in .* belongs to the table 'a'"):
            import_safetensors(store, tmp_path, existing="overwrite")


def test_larger_than_the_store_has_memory(tmp_path: Path) -> None:
    given = {f"{number}": torch.full((1 << 18,), float(number)) for number in range(8)}
    save_file(given, tmp_path / "model.safetensors")
    with TieredStore.open(tmp_path / "state", dram="2MiB") as store:
        import_safetensors(store, tmp_path)
    with TieredStore.open(tmp_path / "state", dram="2MiB") as store:
        assert all(torch.equal(store.get(name), value) for name, value in given.items())


F32 = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
EMPTY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("header", "twice"),
    [
        (b'{"w":%b,"w":%b}' % (F32, F32), "'w'"),
        (b'{"w":%b,"v":%b,"w":%b}' % (EMPTY, F32, EMPTY), "'w'"),
        (b'{"w":%b, "\\u0077" : %b}' % (F32, F32), "'w'"),
        (b'{"w":{"dtype":"I32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "'dtype'"),
        (b'{"w":{"dtype":"F32","shape":[9],"shape":[1],"data_offsets":[0,4]}}', "'shape'"),
        (b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8],"data_offsets":[0,4]}}', "'data_offsets'"),
        (b'{"__metadata__":{"a":"1"},"w":%b,"__metadata__":{}}' % F32, "'__metadata__'"),
        (b'{"__metadata__":{"a":"1","a":"2"},"w":%b}' % F32, "'a'"),
        (b'{"dtype":%b,"dtype":%b}' % (F32, F32), "'dtype'"),
    ],
)
def test_a_key_that_is_there_twice_is_named(tmp_path: Path, header: bytes, twice: str) -> None:
    path = saved(tmp_path / "model.safetensors", header, bytes(4))
    with pytest.raises(SafetensorsError, match=f"{twice} occurs twice"):
        WeightFiles(path)


@pytest.mark.parametrize("name", ["dtype", "shape", "data_offsets", '"data_offsets"', "\\", 'x"dtype', "ü"])
def test_names_that_look_like_keys_of_the_format(tmp_path: Path, name: str) -> None:
    values = {name: torch.ones(3), "other": torch.zeros(2)}
    save_file(values, tmp_path / "model.safetensors", {"dtype": "shape", "note": '"data_offsets"'})
    with WeightFiles(tmp_path / "model.safetensors") as files:
        assert set(files.entries) == set(values)


def test_an_import_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5), "large": torch.ones(3 << 20)}, tmp_path / "model.safetensors")
    with TieredStore.open(tmp_path / "state", dram="16MiB", nvme="8MiB") as store:
        with pytest.raises(CapacityError, match=r"takes 12\.0 MiB, and tier nvme has 8\.0 MiB free: make room"):
            import_safetensors(store, tmp_path)
        assert list(store) == []
