"""What is written comes back, whatever else is in a file raises ManifestError, and the write protocol keeps its order.

Run as a program (``python -m tests.format.test_manifest COUNT SEED``) it is the fuzzer, under a memory limit of its own.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forged import signed as sign
from tiered.errors import CommitError, ManifestError, MisuseError
from tiered.format import generations as protocol
from tiered.format import manifest as subject
from tiered.format.manifest import Extent, Manifest, RecordedFile, TensorRecord, decode, encode
from tiered.types import CHECKSUM_BYTES, PIECE_BYTES, Owner, TensorSpec, owner_decoded

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CAP_BYTES = 256 << 20
QUICK_INPUTS = 2_500
SOAK_INPUTS = 1_000_000


def record(key: str, tensor_id: int, shape: tuple[int, ...], offset: int | None, **other: Any) -> TensorRecord:
    nbytes = 4
    for dim in shape:
        nbytes *= dim
    padded = -(-nbytes // 4096) * 4096
    fields: dict[str, Any] = {
        "dtype": "float32",
        "itemsize": 4,
        "generation": 1,
        "extent": None if offset is None else Extent(0, offset, padded),
        "checksums": bytes(range(CHECKSUM_BYTES)) * subject.pieces(nbytes),
    }
    return TensorRecord(key=key, tensor_id=tensor_id, shape=shape, **{**fields, **other})


def sample(generation: int = 3) -> Manifest:
    """A 1-d tensor, a 0-d one, an empty one, and one of two pieces."""
    return Manifest(
        store="0123456789abcdef" * 2,
        generation=generation,
        meta={"step": 7, "nested": {"list": [1, 2.5, None, True, "é"]}},
        files=(RecordedFile("data.0", "ab" * 16, 0, 32 << 20), RecordedFile("data.1", "cd" * 16, 1, 0)),
        next_tensor_id=9,
        tensors=(
            record("w", 0, (3,), 0),
            record("scalar", 8, (), 4096, generation=generation),
            record("empty", 5, (2, 0), None),
            record("big", 2, (PIECE_BYTES // 4 + 1,), 8 << 20),
        ),
    )


def striped_sample() -> Manifest:
    """A tensor in each of two files, and one of 9 MiB that is striped over both: 5 MiB in one, 4 MiB in the other."""
    striped = record("striped", 2, (9 << 18,), None, extent=Extent(2, MIB, 9 * MIB))
    return msgspec.structs.replace(
        sample(),
        files=(RecordedFile("data.0", "ab" * 16, 0, 6 * MIB), RecordedFile("data.1", "cd" * 16, 1, 5 * MIB + 4096)),
        tensors=(record("w", 0, (3,), 0), striped, record("x", 1, (3,), None, extent=Extent(1, 5 * MIB, 4096))),
    )


def body_of(manifest: Manifest) -> bytes:
    return encode(manifest)[44:]


def change(path: str, value: object) -> bytes:
    """The sample with one field replaced (``tensors.0.key``), signed."""
    document = json.loads(body_of(sample()))
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    target = document
    for step in way:
        target = target[step]
    target[last] = value
    return sign(json.dumps(document).encode())


# Round trip

json_leaf = (
    st.none()
    | st.booleans()
    | st.integers(-(2**255), 2**255)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
json_value = st.recursive(
    json_leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
)
keys = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["", "/", "..", "../../etc/passwd", "\0", "a\0b", "manifest.1", "\U0001f600", '"', "\\", "k" * 100_000]),
)
tensors = st.tuples(
    st.lists(st.integers(0, 9), max_size=5),
    st.sampled_from([("float32", 4), ("bfloat16", 2), ("complex128", 16), ("bool", 1), ("float8_e4m3fn", 1)]),
    st.integers(0, 3),
    st.binary(min_size=CHECKSUM_BYTES, max_size=CHECKSUM_BYTES),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    generation = draw(st.integers(1, 10**18 - 1))
    names = draw(st.lists(keys, unique=True, max_size=12))
    ids = draw(st.lists(st.integers(0, 2**62), unique=True, min_size=len(names), max_size=len(names)))
    offset, found = 0, []
    for name, tensor_id in zip(names, ids, strict=True):
        shape, (dtype, itemsize), gap, checksum = draw(tensors)
        spec = TensorSpec(dtype, tuple(shape), itemsize)
        extent = None
        if spec.nbytes:
            offset += gap * 4096
            extent = Extent(draw(st.integers(0, 2)), offset, -(-spec.nbytes // 4096) * 4096)
            offset += extent.nbytes
        sums = checksum * subject.pieces(spec.nbytes)
        written = draw(st.integers(1, generation))
        found.append(TensorRecord(name, tensor_id, dtype, spec.shape, itemsize, written, extent, sums))
    files = (RecordedFile("data.0", "0f" * 16, 0, offset), RecordedFile("data.1", "1f" * 16, 1, offset))
    meta = draw(st.dictionaries(st.text(max_size=9), json_value, max_size=4))
    order = tuple(draw(st.permutations(found)))
    return Manifest("a0" * 16, generation, meta, files, max(ids, default=-1) + 1, order)


@given(manifests())
@settings(max_examples=300, deadline=None)
def test_comes_back_as_it_was(manifest: Manifest) -> None:
    data = encode(manifest)
    back = decode(data, generation=manifest.generation)
    assert back == manifest
    assert encode(back) == data
    assert [tensor.spec.nbytes for tensor in back.tensors] == [tensor.spec.nbytes for tensor in manifest.tensors]


def test_format_is_the_described_one() -> None:
    data = encode(sample())
    assert data == sign(data[44:])
    document = json.loads(data[44:])
    assert list(document) == ["store", "generation", "meta", "files", "next_tensor_id", "tensors"]
    assert document["tensors"][2]["extent"] is None
    assert document["tensors"][2]["checksums"] == ""


def test_order_of_meta_does_not_show() -> None:
    one, other = ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1})
    assert encode(msgspec.structs.replace(sample(), meta=one)) == encode(msgspec.structs.replace(sample(), meta=other))


@pytest.mark.parametrize(
    "meta",
    [
        {"loss": float("nan")},
        {"loss": float("-inf")},
        {1: "one"},
        {"bytes": b""},
        {"set": {1}},
        {"lone surrogate": "\ud800"},
        {"\ud800": 1},
        {"large": 2**256},
        {"object": object()},
        {"long": "x" * subject.MAX_META_BYTES},
        [],
        None,
    ],
    ids=lambda meta: repr(meta)[:24],
)
def test_meta_that_would_not_come_back_is_refused(meta: Any) -> None:
    with pytest.raises(MisuseError, match="meta"):
        encode(msgspec.structs.replace(sample(), meta=meta))


def test_meta_has_a_depth_limit_and_may_use_all_of_it() -> None:
    def nested(depth: int) -> dict[str, object]:
        value: object = 1
        for _ in range(depth - 1):
            value = [value]
        return {"x": value}

    deepest = msgspec.structs.replace(sample(), meta=nested(subject.MAX_META_DEPTH))
    assert decode(encode(deepest)) == deepest
    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    for meta in (nested(subject.MAX_META_DEPTH + 1), nested(100_000), cycle):
        with pytest.raises(MisuseError, match="nested deeper"):
            encode(msgspec.structs.replace(sample(), meta=meta))


def test_encode_refuses_what_decode_would_refuse() -> None:
    with pytest.raises(ManifestError, match="overlap"):
        encode(msgspec.structs.replace(sample(), tensors=(record("a", 0, (1,), 0), record("b", 1, (1,), 0))))
    with pytest.raises(MisuseError, match="key"):
        encode(msgspec.structs.replace(sample(), tensors=(record("\ud800", 0, (1,), 0),)))
    with pytest.raises(ManifestError, match="limit"):
        encode(sample(), limit=100)
    for wrong in ({"generation": "3"}, {"generation": 0}, {"next_tensor_id": 2**63}, {"store": b"x"}, {"files": None}):
        with pytest.raises(ManifestError):
            encode(msgspec.structs.replace(sample(), **wrong))


# Damage


def test_every_changed_byte_is_noticed() -> None:
    data = encode(sample())
    for place in range(len(data)):
        for flip in (0x01, 0x20, 0x80, 0xFF, data[place] or 0x55):
            damaged = bytearray(data)
            damaged[place] ^= flip
            with pytest.raises(ManifestError):
                decode(bytes(damaged))


def test_every_other_length_is_noticed() -> None:
    data = encode(sample())
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            decode(data[:length])
    for more in (b"\0", b"\n", b"\0" * 4096, data):
        with pytest.raises(ManifestError, match="payload"):
            decode(data + more)


def test_unknown_version_is_named() -> None:
    with pytest.raises(ManifestError, match=r"version 4711; this release reads versions 1 to 3"):
        decode(sign(body_of(sample()), version=4711))


def test_generation_must_be_the_file_names() -> None:
    with pytest.raises(ManifestError, match="named generation 4, but inside it is 3"):
        decode(encode(sample(3)), generation=4)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("store", "AB" * 16, "store"),
        ("store", "ab" * 16 + "\n", "store"),
        ("generation", 0, "generation"),
        ("generation", 1.5, "generation"),
        ("generation", True, "generation"),
        ("generation", 10**400, "generation"),
        ("unknown", 1, "unknown"),
        ("meta", [], "payload"),
        ("meta", None, "payload"),
        ("files.0.name", "../data.0", "name"),
        ("files.0.name", "..", "name"),
        ("files.0.name", "", "name"),
        ("files.0.name", "data.0\n", "name"),
        ("files.1.name", "data.0", "two data files have the name"),
        ("files.1.uuid", "ab" * 16, "two data files have the UUID"),
        ("files.1.index", 0, "has index 0 at place 1"),
        ("files.0.nbytes", -1, "nbytes"),
        ("files.0.nbytes", 4096, "of a file of 4096"),
        ("next_tensor_id", 8, "id 8 is in use"),
        ("tensors.0.key", "big", "two tensors are named 'big'"),
        ("tensors.0.tensor_id", 8, "two tensors have the id 8"),
        ("tensors.0.tensor_id", 9, "id 9 is in use"),
        ("tensors.0.dtype", "", "dtype"),
        ("tensors.0.dtype", "os.system", "not the name"),
        ("tensors.0.dtype", "flöat", "not the name"),
        ("tensors.0.shape", [-1], "shape"),
        ("tensors.0.shape", [1.0], "shape"),
        ("tensors.0.shape", [1] * 65, "shape"),
        ("tensors.0.shape", [2**63 - 1] * 64, "has 16 bytes of checksums"),
        ("tensors.0.shape", [2**63], "shape"),
        ("tensors.0.shape", [1025], "has 4100 bytes in an extent of 4096"),
        ("tensors.0.shape", [0], "checksums"),
        ("tensors.2.shape", [2**40, 2**40, 0], "'empty' has the shape (1099511627776, 1099511627776, 0), whose"),
        ("tensors.2.shape", [0, 2**62, 2], "'empty' has the shape (0, 4611686018427387904, 2), whose strides overflow"),
        ("tensors.0.itemsize", 0, "itemsize"),
        ("tensors.0.generation", 4, "written in generation 4, after this one"),
        ("tensors.0.checksums", "", "has 0 bytes of checksums for 1 pieces"),
        ("tensors.0.checksums", "!", "checksums"),
        ("tensors.3.checksums", "AAAAAAAAAAAAAAAAAAAAAA==", "has 16 bytes of checksums for 2 pieces"),
        ("tensors.0.extent", None, "has 12 bytes and no extent"),
        ("tensors.2.extent", {"file": 0, "offset": 4096, "nbytes": 4096}, "has an extent and no bytes"),
        ("tensors.0.extent.file", 3, "data file 3; there are 2"),
        ("tensors.0.extent.file", 1, "of a file of 0"),
        ("tensors.0.extent.offset", 512, "not aligned"),
        ("tensors.0.extent.offset", 2**63 - 4096, "of a file of"),
        ("tensors.0.extent.offset", -4096, "offset"),
        ("tensors.0.extent.nbytes", 4097, "not aligned"),
        ("tensors.0.extent.nbytes", 8192, "'w' and 'scalar' overlap at byte 4096"),
        ("tensors.0.extent.extra", 0, "extra"),
    ],
)
def test_contradictions_are_named(path: str, value: object, says: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(says)):
        decode(change(path, value))


def test_striped_extents_have_a_version_of_their_own() -> None:
    data = encode(striped_sample())
    assert data == sign(data[44:])
    assert decode(data) == striped_sample() == decode(sign(data[44:], version=2))
    with pytest.raises(ManifestError, match="'striped' lies in data file 2; there are 2"):
        decode(sign(data[44:], version=1))


def test_owners() -> None:
    owned = msgspec.structs.replace(sample().tensors[0], owner="model:a: b")
    manifest = msgspec.structs.replace(sample(), tensors=(owned, *sample().tensors[1:]))
    data = encode(manifest)
    assert decode(data) == manifest
    assert owner_decoded(decode(data).tensors[0].owner) == Owner("model", "a: b")
    for version in (1, 2):
        with pytest.raises(ManifestError, match="it has owners, which its format version does not have"):
            decode(sign(data[44:], version=version))
    with pytest.raises(ManifestError, match="'w' has ':nobody' for its owner, which has no kind"):
        decode(change("tensors.0.owner", ":nobody"))


def test_who_owned_the_tensors_of_manifests_without_owners() -> None:
    """By their keys, where a name lies within another, too."""
    kinds = {"a/checkpoint": "model:a", "a/param/x": "model:a", "a/b/table": "table:a/b", "a/b/block0": "table:a/b"}
    kinds |= {"c/kv/record": "cache:c", "c/kv/0/0": "cache:c", "t/steps": "table:t", "t/table": "table:t"}
    kinds |= {"t/e/table": "table:t/e", "t/z": "table:t"}
    kinds |= {"o/steps": "optimizer:o", "o/0/layout": "optimizer:o", "s/small": "small tensors:s", "s/page0": "small tensors:s"}
    kinds |= {"mine": "", "ab/x": "", "a": "", "x/a/checkpoints": ""}
    tensors = tuple(record(key, at, (3,), at * 4096) for at, key in enumerate(kinds))
    manifest = msgspec.structs.replace(sample(), next_tensor_id=len(kinds), tensors=tensors)
    for version in (1, 2):
        found = decode(sign(body_of(manifest), version=version))
        assert {tensor.key: tensor.owner for tensor in found.tensors} == kinds
        assert [msgspec.structs.replace(tensor, owner="") for tensor in found.tensors] == list(tensors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"files.0.nbytes": 6 * MIB - 4096}, "'striped' ends at byte 6291456 of a file of 6287360"),
        ({"files.1.nbytes": 5 * MIB - 4096}, "'striped' ends at byte 5242880 of a file of 5238784"),
        ({"tensors.0.extent.offset": MIB}, "'w' and 'striped' overlap at byte 1048576 of data file 0"),
        ({"tensors.0.extent.offset": 6 * MIB - 4096}, "'striped' and 'w' overlap at byte 6287360 of data file 0"),
        ({"tensors.2.extent.offset": 5 * MIB - 4096}, "'striped' and 'x' overlap at byte 5238784 of data file 1"),
        ({"tensors.1.extent.file": 3}, "data file 3; there are 2"),
        ({"tensors.1.extent.nbytes": 9 * MIB - 4096}, "has 9437184 bytes in an extent of 9433088"),
        ({"tensors.1.extent.nbytes": 9 * MIB + 512}, "not aligned"),
        ({"tensors.1.extent.offset": 512}, "not aligned"),
        ({"tensors.1.extent.offset": 2**63 - 4096}, "of a file of"),
        ({"tensors.1.extent.nbytes": 2**63 - 4096}, "of a file of"),
        ({"files.1": None}, "files"),
    ],
)
def test_contradictions_of_striped_extents_are_named(change: dict[str, object], says: str) -> None:
    document = json.loads(body_of(striped_sample()))
    for path, value in change.items():
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        target = document
        for step in way:
            target = target[step]
        target[last] = value
    with pytest.raises(ManifestError, match=re.escape(says)):
        decode(sign(json.dumps(document).encode()))


def test_nothing_is_striped_over_one_file() -> None:
    document = json.loads(body_of(striped_sample()))
    del document["files"][1], document["tensors"][2]
    document["tensors"][1]["extent"]["file"] = 1
    with pytest.raises(ManifestError, match="data file 1; there are 1"):
        decode(sign(json.dumps(document).encode()))


def test_empty_tensor_with_a_huge_dimension_is_legal() -> None:
    assert decode(change("tensors.2.shape", [2**60, 0])).tensors[2].spec.nbytes == 0


@pytest.mark.parametrize("body", [b"[" * 1_000_000, b'{"meta":' + b'{"a":' * 500_000, b"", b"null", b"{}", b"\xff\xfe"])
def test_bodies_that_are_no_manifest(body: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(sign(body))


def test_deep_meta_costs_no_stack() -> None:
    whole = body_of(sample())
    for depth in (65, 500, 100_000):
        with pytest.raises(ManifestError):
            decode(sign(whole.replace(b"2.5", b"[" * depth + b"]" * depth)))


def test_size_limits_come_first(tmp_path: Path) -> None:
    data = encode(sample())
    with pytest.raises(ManifestError, match="limit"):
        decode(data, limit=len(data) - 1)
    long = body_of(sample()).replace(b"2.5", b'"' + b"x" * subject.MAX_META_BYTES + b'"')
    with pytest.raises(ManifestError, match="meta is"):
        decode(sign(long))
    with open(tmp_path / "manifest.1", "wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that takes no space, and must take no memory either
    with pytest.raises(ManifestError, match="1099511627776 bytes are more than the limit"):
        protocol.load(tmp_path)


# Fuzz: everything is signed (but for one kind), so that it is the parsing that is tried and not the digest

INTEGERS = [0, -1, 1, 2, 4095, 4096, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**300]
STRINGS = ["", "w", "big", "../x", "\0", "a" * 70, "ab" * 16, "\u00e9", "\ud800", "AAAA", "A" * 43 + "="]
NASTY: list[Any] = [
    *INTEGERS, *STRINGS, None, True, False, 0.5, -0.0, 1e308, 5e-324, [], {}, [[]], [0], [2**63 - 1] * 3, [1] * 70,
    [{}], {"": 0}, {"file": 0, "offset": 0, "nbytes": 4096},
]  # fmt: skip
TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"null",
    b"1e999",
    b"-",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"NaN",
    b"0" * 40,
    b"[" * 1500,
]


def mutate_document(rng: random.Random, document: Any) -> None:
    """Replace, remove, add, double or exchange values at random places of a JSON document."""
    for _ in range(rng.randint(1, 3)):
        target = document
        while True:
            places = list(target) if isinstance(target, dict) else list(range(len(target)))
            if not places:
                break
            place = rng.choice(places)
            if isinstance(target[place], dict | list) and target[place] and rng.random() < 0.8:
                target = target[place]
                continue
            action = rng.randrange(6)
            if action == 0:
                del target[place]
            elif action == 1 and isinstance(target, dict):
                target[rng.choice([*places, "extra", ""])] = deepcopy(rng.choice(NASTY))
            elif action == 2 and isinstance(target, list):
                target.insert(place, json.loads(json.dumps(target[rng.choice(places)])))
            elif action == 3:
                other = rng.choice(places)
                target[place], target[other] = target[other], target[place]
            elif action == 4 and type(target[place]) is int:
                target[place] += rng.choice([-4096, -1, 1, 4096])
            else:
                target[place] = deepcopy(rng.choice(NASTY))
            break


def mutate_bytes(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        action = rng.randrange(4)
        if action == 0 and place < len(data):
            data[place] = rng.choice(string.printable.encode()) if rng.random() < 0.7 else rng.randrange(256)
        elif action == 1:
            del data[place : place + rng.randint(1, 30)]
        elif action == 2:
            start = rng.randrange(len(body))
            data[place:place] = body[start : start + rng.randint(1, 60)]
        else:
            data[place:place] = rng.choice(TOKENS)
    return bytes(data)


def fuzz_input(rng: random.Random, whole: bytes) -> tuple[str, bytes]:
    body, version = whole[44:], whole[8]
    kind = rng.choice(["document", "document", "bytes", "header", "unsigned"])
    if kind == "document":
        document = json.loads(body)
        mutate_document(rng, document)
        return kind, sign(json.dumps(document, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass"), version)
    if kind == "bytes":
        return kind, sign(mutate_bytes(rng, body), version)
    if kind == "header":
        length = rng.choice([None, 0, len(body) - 1, len(body) + 44, 2**32, 2**63, 2**64 - 1])
        return kind, sign(body, version=rng.choice([0, 1, 2, 3, 4, 2**32 - 1]), length=length)
    data = whole
    while data == whole:
        data = mutate_bytes(rng, whole)
    return kind, data


def fuzz(count: int, seed: int) -> Counter[str]:
    rng, samples = random.Random(seed), (encode(sample()), encode(striped_sample()))
    seen: Counter[str] = Counter()
    for _ in range(count):
        kind, data = fuzz_input(rng, rng.choice(samples))
        try:
            manifest = decode(data)
        except ManifestError:
            seen[f"{kind} refused"] += 1
            continue
        again = encode(manifest)  # valid: so it can be written, and is the same afterwards
        if decode(again) != manifest:
            raise AssertionError(f"not the same when written again: {data!r}")
        seen[f"{kind} accepted"] += 1
    return seen


def bombs() -> list[bytes]:
    """The largest ``meta`` that is let in, of what grows most when it is decoded."""
    whole = body_of(sample())
    lists = b"[" + b",".join([b"[]"] * (subject.MAX_META_BYTES // 3 - 100)) + b"]"
    objects = b"[" + b",".join([b'{"a":0}'] * (subject.MAX_META_BYTES // 8 - 100)) + b"]"
    return [sign(whole.replace(b"2.5", bomb)) for bomb in (lists, objects)]


def main(count: int, seed: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + CAP_BYTES, used + CAP_BYTES))
    seen = fuzz(count, seed)
    for bomb in bombs():
        try:
            decode(bomb)
            seen["bombs accepted"] += 1
        except ManifestError:
            seen["bombs refused"] += 1
    print(json.dumps(seen))


def run_python(*arguments: str, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*(before or []), sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("count", [QUICK_INPUTS, pytest.param(SOAK_INPUTS, marks=pytest.mark.soak)])
def test_hostile_manifests_do_no_harm(count: int) -> None:
    ran = run_python("-m", "tests.format.test_manifest", str(count), "20")
    assert ran.returncode == 0, ran.stderr[-2000:]
    seen = json.loads(ran.stdout)
    print(f"hostile manifests: {count} injected under a cap of {CAP_BYTES >> 20} MiB: {seen}")
    assert sum(seen.values()) == count + 2
    for kind in ("document refused", "document accepted", "bytes refused", "bytes accepted", "header refused"):
        assert seen.get(kind, 0) > 0, f"no input was a {kind}"
    assert "unsigned accepted" not in seen


# The protocol


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def write(folder: protocol.Folder, manifest: Manifest) -> None:
    """As a commit does."""
    protocol.prepare(folder, manifest.generation, encode(manifest))
    protocol.publish(folder, manifest.generation)


def test_write_and_load(tmp_path: Path) -> None:
    assert protocol.generations(tmp_path) == []
    assert protocol.load(tmp_path) is None
    for generation in (1, 2, 10):
        write(tmp_path, sample(generation))
    assert names(tmp_path) == ["manifest.1", "manifest.10", "manifest.2"]
    assert protocol.generations(tmp_path) == [1, 2, 10]
    assert protocol.load(tmp_path) == sample(10)
    assert protocol.load(tmp_path, 2) == sample(2)
    assert (tmp_path / "manifest.2").stat().st_mode & 0o7777 == 0o600
    protocol.drop(tmp_path, 10)
    assert protocol.load(str(tmp_path)) == sample(2)


def test_a_descriptor_of_the_folder_serves_as_well(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        write(folder, sample(1))
        assert protocol.generations(folder) == protocol.generations(folder) == [1]
        assert protocol.load(folder) == sample(1)
        with pytest.raises(ManifestError, match=re.escape(str(tmp_path))):
            protocol.load(folder, 2)
        protocol.drop(folder, 1)
        assert protocol.clean(folder) == []
        assert protocol.generations(folder) == []
    finally:
        os.close(folder)


def test_a_generation_is_written_once(tmp_path: Path) -> None:
    write(tmp_path, sample(1))
    before = (tmp_path / "manifest.1").read_bytes()
    with pytest.raises(CommitError, match=r"manifest\.1 exists already"):
        write(tmp_path, msgspec.structs.replace(sample(1), meta={}))
    assert (tmp_path / "manifest.1").read_bytes() == before
    assert names(tmp_path) == ["manifest.1"]


def test_damaged_newest_raises_and_older_opens_by_choice(tmp_path: Path) -> None:
    for generation in (1, 2, 3):
        write(tmp_path, sample(generation))
    (tmp_path / "manifest.3").write_bytes(b"")
    with pytest.raises(ManifestError, match=r"manifest\.3: cut short.*generations here: 1, 2, 3.*move manifest\.3 out"):
        protocol.load(tmp_path)
    assert protocol.load(tmp_path, generation=2) == sample(2)
    with pytest.raises(ManifestError, match=r"no generation 7.* there are: 1, 2, 3"):
        protocol.load(tmp_path, generation=7)
    os.rename(tmp_path / "manifest.2", tmp_path / "manifest.4")
    with pytest.raises(ManifestError, match="named generation 4, but inside it is 2"):
        protocol.load(tmp_path)


def test_other_names_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, sample(5))
    noise = [
        *(
            "manifest",
            "manifest.",
            "manifest.x",
            "manifest.01",
            "manifest.0",
            "manifest.-9",
            "manifest.9 ",
            "manifest.9\n",
        ),
        *("manifest.6.tmp", "manifest.6.bak", "Manifest.9", "xmanifest.9", "manifest.1e9", "manifest." + "9" * 19),
        "manifest.\u0669",  # a digit, but not an ASCII one
    ]
    for name in noise:
        (tmp_path / name).touch()
    (tmp_path / os.fsdecode(b"manifest.9\xff")).touch()
    assert protocol.generations(tmp_path) == [5]
    assert protocol.load(tmp_path) == sample(5)
    assert protocol.clean(tmp_path) == ["manifest.6.tmp"]
    assert len(names(tmp_path)) == 1 + len(noise)


def test_leftover_of_an_interrupted_write_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "manifest.1.tmp").write_bytes(b"torn" * 10_000)
    (tmp_path / "manifest.1.tmp").chmod(0o644)
    write(tmp_path, sample(1))
    assert names(tmp_path) == ["manifest.1"]
    assert protocol.load(tmp_path) == sample(1)
    assert (tmp_path / "manifest.1").stat().st_mode & 0o7777 == 0o600


def test_symbolic_links_and_odd_files_are_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "store", tmp_path / "outside"
    folder.mkdir()
    outside.write_bytes(encode(sample(1)))
    (folder / "manifest.1").symlink_to(outside)
    with pytest.raises(ManifestError, match=rf"errno {errno.ELOOP}"):
        protocol.load(folder)
    with pytest.raises(CommitError, match="exists already"):
        write(folder, sample(1))
    (folder / "manifest.2.tmp").symlink_to(outside)
    with pytest.raises(CommitError, match=rf"manifest\.2\.tmp: .*errno {errno.EEXIST}"):
        write(folder, sample(2))
    assert protocol.clean(folder) == []
    assert outside.read_bytes() == encode(sample(1))
    os.mkfifo(folder / "manifest.3")
    with pytest.raises(ManifestError, match="not a regular file"):
        protocol.load(folder)
    (folder / "manifest.4").mkdir()
    with pytest.raises(ManifestError, match="not a regular file"):
        protocol.load(folder)
    with pytest.raises(ManifestError, match=r"cannot remove .*manifest\.4.*errno"):
        protocol.drop(folder, 4)


@pytest.mark.parametrize("call", [protocol.load, protocol.generations, protocol.clean, lambda folder: protocol.drop(folder, 1)])
def test_missing_folder(tmp_path: Path, call: Callable[[Path], object]) -> None:
    with pytest.raises(ManifestError, match=rf"cannot open .*nowhere.*errno {errno.ENOENT}"):
        call(tmp_path / "nowhere")
    with pytest.raises(CommitError, match=rf"errno {errno.ENOENT}"):
        write(tmp_path / "nowhere", sample(1))


def test_file_size_limit_is_a_commit_error(tmp_path: Path) -> None:
    write(tmp_path, sample(1))
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); " + WRITE  # a short write, then EFBIG
    ran = run_python("-c", program, str(tmp_path), "2")
    assert ran.stdout.startswith("CommitError cannot write"), ran.stdout + ran.stderr
    assert f"(errno {errno.EFBIG})" in ran.stdout
    assert names(tmp_path) == ["manifest.1"]


# What reaches the kernel, seen and disturbed by strace

WRITE = """
import sys
from tests.format import test_manifest
from tiered import errors
try:
    test_manifest.write(sys.argv[1], test_manifest.sample(int(sys.argv[2])))
    print("done")
except errors.TieredError as error:
    print(type(error).__name__, error)
"""


def strace_refusal() -> str | None:
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.strip()[:100]}"


needs_strace = pytest.mark.skipif(strace_refusal() is not None, reason=str(strace_refusal()))


@needs_strace
def test_order_of_a_write(tmp_path: Path) -> None:
    folder, log = tmp_path / "store", tmp_path / "log"
    folder.mkdir()
    calls = "openat,write,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat"
    ran = run_python("-c", WRITE, str(folder), "1", before=["strace", "-f", "-y", "-o", str(log), "-e", f"trace={calls}"])
    assert ran.stdout == "done\n", ran.stderr
    seen = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines() if str(folder) in line]
    tmp = re.escape(f"{folder}/manifest.1.tmp")
    expected = [
        rf"openat\(AT_FDCWD.*{re.escape(str(folder))}\", .*O_DIRECTORY",
        r"openat\(.*\"manifest\.1\.tmp\", O_WRONLY\|O_CREAT\|O_EXCL\|O_NOFOLLOW\|O_CLOEXEC, 0600\)",
        rf"write\(\d+<{tmp}>, \"TIEREDMF",
        rf"fsync\(\d+<{tmp}>\) += 0",
        rf"openat\(AT_FDCWD.*{re.escape(str(folder))}\", .*O_DIRECTORY",
        r"renameat\(.*\"manifest\.1\.tmp\", .*\"manifest\.1\"\) += 0",
        rf"fsync\(\d+<{re.escape(str(folder))}>\) += 0",
    ]
    assert len(seen) == len(expected), seen
    for line, pattern in zip(seen, expected, strict=True):
        assert re.match(pattern, line), f"{line!r} is not {pattern!r}"


@needs_strace
@pytest.mark.parametrize(
    ("inject", "says", "number"),
    [
        ("fsync:error=EIO:when=1", "cannot sync", errno.EIO),
        ("fsync:error=EIO:when=2", "cannot sync the folder of", errno.EIO),
        ("renameat:error=ENOSPC:when=1", "cannot rename", errno.ENOSPC),
    ],
)
def test_failing_call_leaves_the_previous_generation(tmp_path: Path, inject: str, says: str, number: int) -> None:
    folder, log = tmp_path / "store", tmp_path / "log"
    folder.mkdir()
    write(folder, sample(1))
    call = inject.split(":")[0]
    strace = ["strace", "-f", "-o", str(log), "-e", f"trace={call}", "-e", f"inject={inject}"]
    ran = run_python("-c", WRITE, str(folder), "2", before=strace)
    assert "INJECTED" in log.read_text(), "the fault never fired"
    assert ran.stdout.startswith(f"CommitError {says}"), ran.stdout + ran.stderr
    assert f"(errno {number})" in ran.stdout
    assert f"{folder}/manifest.2" in ran.stdout
    assert names(folder) == ["manifest.1"]
    assert protocol.load(folder) == sample(1)


@needs_strace
@pytest.mark.parametrize(("kill", "left"), [("fsync:1", 1), ("renameat:1", 1), ("fsync:2", 2)])
def test_killed_at_any_step(tmp_path: Path, kill: str, left: int) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    write(folder, sample(1))
    call, when = kill.split(":")
    log = tmp_path / "log"
    strace = ["strace", "-f", "-o", str(log), "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={when}"]
    ran = run_python("-c", WRITE, str(folder), "2", before=strace)
    assert ran.stdout == ""
    assert "killed by SIGKILL" in log.read_text()
    found = protocol.load(folder)
    assert found is not None
    assert found.generation in {left, 2}
    assert found == sample(found.generation)
    protocol.clean(folder)
    assert names(folder) == [f"manifest.{g}" for g in range(1, found.generation + 1)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))


def test_more_data_files_than_drives_a_store_can_have() -> None:
    """Each tensor could be striped over all of them: a small file would need much memory."""
    files = tuple(RecordedFile(f"drive.{index}", f"{index:032x}", index, 4096) for index in range(65))
    with pytest.raises(ManifestError, match="65 data files; a store has at most 64"):
        encode(Manifest("ab" * 16, 1, {}, files, 1, ()))
    encode(Manifest("ab" * 16, 1, {}, files[:64], 1, ()))
