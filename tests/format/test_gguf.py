"""Headers of GGUF files: those that the library ``gguf`` writes, and whatever else may be in a file."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gguf_files import family, write
from tiered import GgufError
from tiered.format.foreign.gguf import BlockType, GgufFile, GgufTensor

gguf = pytest.importorskip("gguf")
TYPES = {int(kind): BlockType(kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    fields, tensors = family("qwen3moe")
    more = {"add_token_list": ["a", "b"], "add_token_types": [1, 1], "add_custom_alignment": 64, "add_file_type": 15}
    write(path, "qwen3moe", fields, dict(list(tensors.items())[:12]), **more)
    return path


def test_it_finds_what_the_library_finds(whole: Path) -> None:
    reader = gguf.GGUFReader(whole)
    with GgufFile(whole, TYPES) as found:
        assert len(reader.tensors) == 12
        for one in reader.tensors:
            assert found.tensors[one.name] == GgufTensor(one.tensor_type.name, tuple(reversed(one.shape.tolist())))
            entry, data = found.entries[one.name], one.data.tobytes()
            read = bytearray(entry.spec.nbytes - 5)
            found.read(one.name, 5, memoryview(read))
            assert read == data[5:]
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        lengths = {name: len(value) if isinstance(value, list) else value for name, value in fields.items()}
        assert found.metadata == lengths


def test_an_outline_has_all_but_long_lists_and_values(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered.format.foreign.gguf.SHORT_LIST", 24)
    (tmp_path / "outline.gguf").write_bytes(GgufFile(whole, TYPES).outline({"added": 3}))
    found, reader = gguf.GGUFReader(tmp_path / "outline.gguf"), gguf.GGUFReader(whole)
    assert sorted(one.name for one in found.tensors) == sorted(one.name for one in reader.tensors)
    left = {name for name in reader.fields if name not in found.fields}
    assert left == {"general.alignment", "tokenizer.ggml.tokens"}
    assert found.fields["added"].contents() == [0, 0, 0]
    for name in found.fields.keys() - {"added", "GGUF.kv_count"}:
        assert found.fields[name].contents() == reader.fields[name].contents()
    assert GgufFile(tmp_path / "outline.gguf", TYPES).metadata.keys() == found.fields.keys() - {
        "GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"
    }  # fmt: skip


def test_an_outline_is_small_whatever_the_alignment_is(tmp_path: Path) -> None:
    aligned = text(b"general.alignment") + struct.pack("<IQ", 10, 1 << 40)
    (tmp_path / "x.gguf").write_bytes(head(0, 1) + aligned)
    (tmp_path / "outline.gguf").write_bytes(GgufFile(tmp_path / "x.gguf", TYPES).outline({}))
    assert (tmp_path / "outline.gguf").stat().st_size < 100
    assert GgufFile(tmp_path / "outline.gguf", TYPES).metadata == {}


def test_every_cut_and_any_byte_in_the_header_is_a_file_or_an_error(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    header = min(entry.offset for entry in GgufFile(whole, TYPES).entries.values())
    path, errors, draw = tmp_path / "other.gguf", 0, random.Random(0)
    for nbytes in [*range(0, header, 7), len(data) - 1]:
        path.write_bytes(data[:nbytes])
        with pytest.raises(GgufError, match=r"other\.gguf"):
            GgufFile(path, TYPES)
    with open(path, "wb") as file:
        file.write(data)
    for _ in range(400):
        at, byte = draw.randrange(header), draw.choice([0, 1, 127, 255])
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
        said = ""
        try:
            GgufFile(path, TYPES).close()
        except GgufError as error:
            said = str(error)
            errors += 1
        assert not said or "other.gguf" in said
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(data[at : at + 1])
    assert 100 < errors < 400


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, place: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, place)


WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "no magic": (lambda: b"GGML" + bytes(40), "is not a GGUF file"),
    "another version": (lambda: b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 of GGUF; known are 2 and 3"),
    "big-endian": (lambda: b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian; known are little-endian files"),
    "more metadata than bytes": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "has '' twice"),
    "a long text": (lambda: head(0, 1) + struct.pack("<Q", 1 << 40), "has a text of 1,099,511,627,776 bytes"),
    "no text": (lambda: head(0, 1) + text(b"\xff") + struct.pack("<II", 4, 1), "is damaged: .*decode"),
    "a name twice": (lambda: head(0, 2) + 2 * (text(b"a") + struct.pack("<II", 4, 1)), "has 'a' twice"),
    "an unknown value": (lambda: head(0, 1) + text(b"a") + struct.pack("<II", 13, 1), "a value of type 13"),
    "a list of lists": (lambda: head(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 9, 1), "a value of type 9"),
    "a long list": (lambda: head(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 61), "ends within its header"),
    "an alignment": (
        lambda: head(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 24),
        "aligns tensors to 24, which is no power of 2",
    ),
    "a tensor twice": (lambda: head(2) + tensor(b"a", (8,), 0, 0) + tensor(b"a", (8,), 0, 32), "'a' is there twice"),
    "one in another": (lambda: head(2) + tensor(b"a", (9,), 0, 0) + tensor(b"b", (8,), 0, 32), "'b' begins at 32, within"),
    "between places": (lambda: head(1) + tensor(b"a", (8,), 0, 8), "'a' begins at 8, within another one or between"),
    "no dimensions": (lambda: head(1) + tensor(b"a", (), 0, 0), "'a' has 0 dimensions"),
    "five dimensions": (lambda: head(1) + tensor(b"a", (1,) * 5, 0, 0), "'a' has 5 dimensions"),
    "nothing in it": (lambda: head(1) + tensor(b"a", (8, 0), 0, 0), r"of type F32 has the shape \(0, 8\)"),
    "very much in it": (lambda: head(1) + tensor(b"a", (1 << 40, 1 << 40), 0, 0), "of type F32 has the shape"),
    "half a block": (lambda: head(1) + tensor(b"a", (128, 2), 12, 0), r"of type Q4_K has the shape \(2, 128\)"),
    "an unknown type": (lambda: head(1) + tensor(b"a", (8,), 999, 0), "'a' is of type 999, which is not known"),
    "cut short": (lambda: head(1) + tensor(b"a", (8, 4000), 0, 0) + bytes(100), "and the file is cut short"),
}


def head(tensors: int, fields: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong: str, tmp_path: Path) -> None:
    make, says = WRONG[wrong]
    (tmp_path / "x.gguf").write_bytes(make() + (bytes(4096) if wrong != "cut short" else b""))
    with pytest.raises(GgufError, match=f"x.gguf.*{says}"):
        GgufFile(tmp_path / "x.gguf", TYPES)
