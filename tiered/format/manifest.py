"""The format of a manifest: which tensors a generation has, where their bytes lie, and the checksums of these bytes.

One file ``manifest.G`` per generation G. A generation exists from the moment its manifest has its name and the folder is
synced; there is no "latest" file, the highest number wins. Format version 3, integers little-endian::

    offset  bytes
         0      8  b"TIEREDMF"
         8      4  format version, u32
        12      8  payload length, u64
        20     16  xxh3-128 of the payload
        36      8  xxh3-64 of the 36 bytes before
        44      -  payload: UTF-8 JSON of exactly the fields that ``Manifest`` declares; bytes are base64

Every version keeps these 44 bytes, so that a reader can always tell a newer format from damage; a change of the payload is a
new version. Version 1 had no striped extents (whose ``file`` is the number of data files), and version 2 no owners: who owns
the tensors of those is told by their keys.
Reading trusts nothing: sizes are limited before memory is taken, no field may be missing, unknown or of another type, no
objects other than those declared below are made, and ``ManifestError`` is the only error for a file's contents. Needs no torch.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
import xxhash

from tiered.errors import ManifestError, MisuseError, shortened, shown
from tiered.format import stripes
from tiered.format.drives import MOST_DRIVES
from tiered.types import CHECKSUM_BYTES, LARGEST, PIECE_BYTES, Key, Owner, TensorSpec

__all__ = [
    "EXTENT_ALIGNMENT",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "LAST_GENERATION",
    "MAX_BYTES",
    "MAX_META_BYTES",
    "MAX_META_DEPTH",
    "Extent",
    "Head",
    "Manifest",
    "RecordedFile",
    "TensorRecord",
    "assemble",
    "decode",
    "decode_meta",
    "decode_tensor",
    "encode",
    "encode_again",
    "encode_meta",
    "encode_tensor",
    "pieces",
]

FORMAT_VERSION = 3
"""The format version that is written. Those before are read, too."""
_STRIPED, _OWNED = 2, 3
"""The first format versions with striped extents, and with owners."""
EXTENT_ALIGNMENT = 4096
"""Bytes; extents start and end at multiples of this, whatever alignment the drive would allow."""
MAX_BYTES = 256 << 20
"""Largest manifest, in bytes: about a million tensors."""
MAX_META_BYTES = 8 << 20
"""Largest ``meta``, in bytes of JSON. Nested brackets grow thirtyfold when decoded, so it has a limit of its own."""
MAX_META_DEPTH = 64
"""Deepest nesting of lists and objects in ``meta``."""

_T = TypeVar("_T")

_MAGIC = b"TIEREDMF"
_FIELDS = struct.Struct("<8sIQ16s")
_SEAL = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SEAL.size
_META_INT_BITS = 256
LAST_GENERATION = 10**18 - 1

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Generation = Annotated[int, msgspec.Meta(ge=1, le=LAST_GENERATION)]
_Uuid = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


# The structs are frozen and hold no containers that could form a cycle; gc=False exempts them from garbage collection.
class RecordedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A data file. ``name`` is a bare file name (the store knows the folder), ``uuid`` 32 hex digits that the file itself
    carries too, ``index`` its position in ``Manifest.files``, ``nbytes`` its size."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")]
    uuid: _Uuid
    index: _Count
    nbytes: _Count


class Extent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A range of bytes in ``files[file]``, or, with ``file`` one beyond the last, one that is striped over all of them
    (``stripes``); ``nbytes`` is the allocated size, padding included."""

    file: _Count
    offset: _Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A tensor's name, spec and extent.

    ``generation`` is the one in which its bytes were written; with ``tensor_id`` it is covered by the checksums. ``checksums``
    are those of its ``pieces(nbytes)`` pieces, concatenated. A tensor without bytes (a dimension is 0) has no extent and no
    checksums; every other one, 0-d ones too, has both. ``owner`` is ``Owner.encoded``, and is not written where it is empty.
    """

    key: Key
    tensor_id: _Count
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    itemsize: Annotated[int, msgspec.Meta(ge=1, le=256)]
    generation: _Generation
    extent: Extent | None
    checksums: bytes
    owner: str = ""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape, self.itemsize)


class Manifest(msgspec.Struct, frozen=True):
    """Everything that one generation makes durable.

    ``store`` is the store's UUID in 32 hex digits. ``meta`` belongs to the user and holds what JSON can hold: objects with
    string keys, lists (a tuple comes back as a list), strings, finite floats, integers of at most 256 bits, bools and None.
    ``next_tensor_id`` is larger than every id assigned so far, those of deleted tensors included.
    """

    store: str
    generation: int
    meta: Mapping[str, object]
    files: tuple[RecordedFile, ...]
    next_tensor_id: int
    tensors: tuple[TensorRecord, ...]


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest without its tensors, as it is written. ``meta`` is JSON that is not decoded before its size was checked."""

    store: _Uuid
    generation: _Generation
    meta: msgspec.Raw
    files: tuple[RecordedFile, ...]
    next_tensor_id: _Count


class _Payload(Head, frozen=True, forbid_unknown_fields=True):
    tensors: tuple[TensorRecord, ...]


_ENCODER = msgspec.json.Encoder(order="deterministic")
_HEAD_DECODER = msgspec.json.Decoder(Head)
_TENSOR_DECODER = msgspec.json.Decoder(TensorRecord)
_PAYLOAD_DECODER = msgspec.json.Decoder(_Payload)
_META_DECODER = msgspec.json.Decoder(dict[str, object])


def pieces(nbytes: int) -> int:
    """Return the number of checksums of a tensor of ``nbytes`` bytes (without padding)."""
    return -(-nbytes // PIECE_BYTES)


def encode(manifest: Manifest, *, limit: int = MAX_BYTES) -> bytes:
    """Encode ``manifest``; equal manifests give equal bytes, and ``decode`` of them gives an equal manifest.

    Raises ``MisuseError`` when ``meta`` or a key cannot be encoded, ``ManifestError`` when the manifest contradicts itself or
    would be larger than ``limit`` bytes.
    """
    meta = msgspec.Raw(encode_meta(manifest.meta))
    head = Head(manifest.store, manifest.generation, meta, manifest.files, manifest.next_tensor_id)
    data = bytes(assemble(head, map(encode_tensor, manifest.tensors), limit=limit))
    decode(data, limit=limit)
    return data


def encode_meta(meta: Mapping[str, object]) -> bytes:
    """Encode ``meta`` as JSON, and check it by decoding. Raises MisuseError for values that JSON would not return unchanged."""
    try:
        problem = _meta_problem(meta)
        if problem:
            raise MisuseError(problem)
        data = _ENCODER.encode(meta)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"meta cannot be written as JSON: {error}") from None
    if len(data) > MAX_META_BYTES:
        raise MisuseError(f"meta is {len(data)} bytes of JSON, the limit is {MAX_META_BYTES}; large data goes into tensors")
    decode_meta(data)
    return data


def encode_tensor(record: TensorRecord) -> bytes:
    """Encode one tensor as JSON for ``assemble``, and check it by decoding.

    Raises ``MisuseError`` when the key cannot be encoded, ``ManifestError`` when the record contradicts itself.
    """
    try:
        data = _ENCODER.encode(record)
    except UnicodeEncodeError as error:
        raise MisuseError(f"a key is not valid Unicode: {error}") from None
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ManifestError(f"tensor {_short(record.key)} cannot be encoded: {error}") from None
    again = decode_tensor(data)
    problem = _own_problem(again) if again == record else "does not come back as it was"
    if problem:
        raise ManifestError(f"tensor {_short(record.key)} {problem}")
    return data


def encode_again(manifest: Manifest) -> dict[Key, bytes]:
    """Return the ``encode_tensor`` of each tensor of a manifest that was read, and so was checked before."""
    return {tensor.key: _ENCODER.encode(tensor) for tensor in manifest.tensors}


def decode_tensor(data: bytes) -> TensorRecord:
    """Decode the record that ``encode_tensor`` encoded. Raises ManifestError."""
    try:
        return _TENSOR_DECODER.decode(data)
    except ValueError as error:
        raise ManifestError(f"this is not what a manifest holds of a tensor: {_told(error)}") from None


def assemble(head: Head, tensors: Iterable[bytes], *, limit: int = MAX_BYTES) -> bytearray:
    """Assemble a manifest of ``head`` and encoded tensors (``encode_tensor``), without checking the latter again.

    So the caller must ensure that no two tensors share a key, an id or a byte of a file, that each lies within its file, and
    was written in this generation or before: ``decode`` checks all that. Raises ``ManifestError`` when ``head`` cannot be read
    back, or the manifest would be larger than ``limit`` bytes.
    """
    try:
        data = _ENCODER.encode(head)
        again = _HEAD_DECODER.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ManifestError(f"generation {head.generation} cannot be encoded: {error}") from None
    _check_files(again.files)
    parts = list(tensors)
    if parts:
        parts[0] = b"".join((bytes(HEADER_BYTES), data[:-1], b',"tensors":[', parts[0]))
        parts[-1] += b"]}"
    else:
        parts = [b"".join((bytes(HEADER_BYTES), data[:-1], b',"tensors":[]}'))]
    whole = bytearray(b",").join(parts)
    if len(whole) > limit:
        raise ManifestError(f"the manifest would be {len(whole)} bytes; the limit is {limit}")
    with memoryview(whole) as view:
        digest = xxhash.xxh3_128_digest(view[HEADER_BYTES:])
        _FIELDS.pack_into(view, 0, _MAGIC, FORMAT_VERSION, len(whole) - HEADER_BYTES, digest)
        _SEAL.pack_into(view, _FIELDS.size, xxhash.xxh3_64_intdigest(view[: _FIELDS.size]))
    return whole


def decode(data: bytes | bytearray, *, generation: int | None = None, limit: int = MAX_BYTES) -> Manifest:
    """Decode and check the manifest in ``data``; ``generation`` is the one that its file name says.

    Raises ``ManifestError``, and no other error for any content.
    """
    if len(data) > limit:
        raise ManifestError(f"{len(data)} bytes are more than the limit of {limit}")
    if len(data) < HEADER_BYTES:
        raise ManifestError(f"cut short: {len(data)} bytes, the header alone has {HEADER_BYTES}")
    magic, version, length, digest = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise ManifestError("not a manifest (it does not begin with TIEREDMF)")
    if _SEAL.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
        raise ManifestError("the header is damaged (its checksum does not match)")
    if not 1 <= version <= FORMAT_VERSION:
        raise ManifestError(f"format version {version}; this release reads versions 1 to {FORMAT_VERSION}")
    if length != len(data) - HEADER_BYTES:
        raise ManifestError(f"the header says {length} bytes of payload, there are {len(data) - HEADER_BYTES}")
    body = memoryview(data)[HEADER_BYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        raise ManifestError("the payload is damaged (its checksum does not match)")
    manifest = _parse(body, version)
    if generation is not None and manifest.generation != generation:
        raise ManifestError(f"named generation {generation}, but inside it is {manifest.generation}")
    return manifest


def _parse(body: bytes | memoryview, version: int) -> Manifest:
    try:
        payload = _PAYLOAD_DECODER.decode(body)
        meta = decode_meta(bytes(payload.meta))
    except (ValueError, RecursionError, OverflowError) as error:  # msgspec's and Unicode's errors are ValueErrors
        raise ManifestError(f"the payload is not what a manifest holds: {_told(error)}") from None
    except MemoryError:
        raise ManifestError(f"decoding {len(body)} bytes of payload needs more memory than there is") from None
    tensors = payload.tensors if version >= _OWNED else _owned_by_keys(payload.tensors)
    manifest = Manifest(payload.store, payload.generation, meta, payload.files, payload.next_tensor_id, tensors)
    _check_files(manifest.files)
    try:
        _check_tensors(manifest, version)
    except MemoryError:
        what = f"comparing the extents of {len(manifest.tensors)} tensors"
        raise ManifestError(f"{what} needs more memory than there is") from None
    return manifest


_RECORDS = {"checkpoint": "model", "kv/record": "cache", "steps": "optimizer", "small": "small tensors", "table": "table"}
"""By what comes after the name of an owner in the key of its record, which kind of owner has it; of two, the last counts."""


def _owned_by_keys(tensors: tuple[TensorRecord, ...]) -> tuple[TensorRecord, ...]:
    """Return ``tensors`` of a time before they had owners, with those that their keys tell: each belongs to whoever has a
    record under the longest name that its key begins with."""
    if any(tensor.owner for tensor in tensors):
        raise ManifestError("it has owners, which its format version does not have")
    keys, kinds = sorted({tensor.key for tensor in tensors}), dict[str, str]()
    for end, kind in _RECORDS.items():
        kinds |= {key.removesuffix(end): kind for key in keys if key.endswith(f"/{end}")}
    if not kinds:
        return tensors
    names, owners, around, at = sorted(kinds), dict[Key, str](), list[str](), 0
    for key in keys:  # what begins with a name comes after it, and before all others: so each pair is compared once
        while at < len(names) and names[at] <= key:
            _leave(around, names[at])
            around.append(names[at])
            at += 1
        _leave(around, key)
        owners[key] = Owner(kinds[around[-1]], around[-1][:-1]).encoded if around else ""
    return tuple(msgspec.structs.replace(tensor, owner=owners[tensor.key]) for tensor in tensors)


def _leave(around: list[str], key: str) -> None:
    """Remove the last ones of names, each of which begins with the one before, that ``key`` does not begin with."""
    while around and not key.startswith(around[-1]):
        around.pop()


def decode_meta(data: bytes) -> dict[str, object]:
    """Decode the ``meta`` that ``encode_meta`` encoded. Raises ManifestError."""
    if len(data) > MAX_META_BYTES:
        raise ManifestError(f"meta is {len(data)} bytes; the limit is {MAX_META_BYTES}")
    try:
        meta = _META_DECODER.decode(data)
    except (ValueError, RecursionError, OverflowError) as error:
        raise ManifestError(f"the payload is not what a manifest holds, in its meta: {_told(error)}") from None
    problem = _meta_problem(meta)
    if problem:
        raise ManifestError(problem)
    return meta


def _meta_problem(meta: object) -> str | None:
    """Return why JSON would not return ``meta`` unchanged, or None. (The codec would write NaN as null, and 1 as "1".)"""
    if not isinstance(meta, dict):
        return f"meta is a {type(meta).__name__}, not a dict"
    levels: list[Iterator[object]] = [iter((meta,))]  # a loop over iterators: neither depth nor width costs memory
    while levels:
        for value in levels[-1]:
            if value is None or type(value) is str or type(value) is bool:
                continue
            if type(value) is float:
                if not math.isfinite(value):
                    return f"meta holds the float {value}, which JSON cannot say"
            elif type(value) is int:
                if value.bit_length() > _META_INT_BITS:
                    return f"meta holds an integer of {value.bit_length()} bits; at most {_META_INT_BITS} fit"
            elif isinstance(value, dict | list | tuple):
                if len(levels) > MAX_META_DEPTH:
                    return f"meta is nested deeper than {MAX_META_DEPTH}"
                if isinstance(value, dict):
                    for name in value:
                        if type(name) is not str:
                            return f"meta has a key that is not a str: {_short(name)}"
                levels.append(iter(value.values() if isinstance(value, dict) else value))
                break
            else:
                return f"meta holds a {type(value).__name__}; it takes dict, list, str, int, float, bool and None"
        else:
            levels.pop()
    return None


def _check_files(files: tuple[RecordedFile, ...]) -> None:
    if len(files) > MOST_DRIVES:
        raise ManifestError(f"it names {len(files)} data files; a store has at most {MOST_DRIVES}")
    for place, file in enumerate(files):
        if file.index != place:
            raise ManifestError(f"data file {file.name} has index {file.index} at place {place}")
    for what, values in (("name", [f.name for f in files]), ("UUID", [f.uuid for f in files])):
        if len(set(values)) != len(values):
            raise ManifestError(f"two data files have the {what} {_repeated(values)}")


def _check_tensors(manifest: Manifest, version: int) -> None:
    tensors, sizes = manifest.tensors, [file.nbytes for file in manifest.files]
    files = len(sizes) if version >= _STRIPED else 0  # none is striped over no file
    keys = [tensor.key for tensor in tensors]
    if len(set(keys)) != len(keys):
        raise ManifestError(f"two tensors are named {_short(_repeated(keys))}")
    ids = [tensor.tensor_id for tensor in tensors]
    if len(set(ids)) != len(ids):
        raise ManifestError(f"two tensors have the id {_repeated(ids)}")
    if ids and max(ids) >= manifest.next_tensor_id:
        raise ManifestError(f"tensor id {max(ids)} is in use, but the next one is {manifest.next_tensor_id}")
    ends: dict[int, int] = {}  # end of each extent by its beginning: plain numbers, which the garbage collector skips
    for tensor in tensors:
        extent = tensor.extent
        problem = _own_problem(tensor)
        if problem:
            pass
        elif tensor.generation > manifest.generation:
            problem = f"was written in generation {tensor.generation}, after this one ({manifest.generation})"
        elif extent is None:
            continue
        else:
            for file, offset, nbytes in stripes.ranges(extent.file, extent.offset, extent.nbytes, files):
                if file >= len(sizes):
                    problem = f"lies in data file {file}; there are {len(sizes)}"
                elif offset + nbytes > sizes[file]:
                    problem = f"ends at byte {offset + nbytes} of a file of {sizes[file]}"
                else:
                    begin = file << 64 | offset
                    if begin in ends:
                        raise _overlap(tensors, begin, files)
                    ends[begin] = begin + nbytes
        if problem:
            raise ManifestError(f"tensor {_short(tensor.key)} {problem}")
    last_end = 0
    for begin in sorted(ends):
        if begin < last_end:
            raise _overlap(tensors, begin, files)
        last_end = ends[begin]


def _own_problem(tensor: TensorRecord) -> str | None:
    """Return what is wrong with a record by itself; None where nothing is."""
    nbytes, extent = math.prod(tensor.shape) * tensor.itemsize, tensor.extent  # exact: Python integers have any size
    if tensor.owner and not tensor.owner.partition(":")[0]:
        return f"has {_short(tensor.owner)} for its owner, which has no kind"
    if not (tensor.dtype.isascii() and tensor.dtype.isidentifier()):
        return f"has {tensor.dtype!r} for its element type, which is not the name of one"
    if len(tensor.checksums) != pieces(nbytes) * CHECKSUM_BYTES:
        return f"has {len(tensor.checksums)} bytes of checksums for {pieces(nbytes)} pieces"
    if extent is None and nbytes:
        return f"has {nbytes} bytes and no extent"
    if extent is None:  # an extent limits the size of the others
        return f"has the shape {_short(tensor.shape)}, whose strides overflow" if tensor.spec.span > LARGEST else None
    if not nbytes:
        return "has an extent and no bytes"
    if nbytes > extent.nbytes:
        return f"has {nbytes} bytes in an extent of {extent.nbytes}"
    if extent.offset % EXTENT_ALIGNMENT or extent.nbytes % EXTENT_ALIGNMENT:
        return f"has an extent that is not aligned to {EXTENT_ALIGNMENT} bytes"
    return None


def _overlap(tensors: Sequence[TensorRecord], begin: int, files: int) -> ManifestError:
    """Return an error that names two tensors whose extents share the byte at ``begin``: one number across all files."""
    both = [
        (file << 64 | offset, _short(tensor.key))
        for tensor in tensors
        if tensor.extent is not None
        for file, offset, nbytes in stripes.ranges(tensor.extent.file, tensor.extent.offset, tensor.extent.nbytes, files)
        if file << 64 | offset <= begin < (file << 64 | offset) + nbytes
    ]
    (_, one), (_, other), *_ = sorted(both, key=lambda found: found[0])
    return ManifestError(f"tensors {one} and {other} overlap at byte {begin & (1 << 64) - 1} of data file {begin >> 64}")


def _repeated(values: Sequence[_T]) -> _T:
    return Counter(values).most_common(1)[0][0]


def _short(text: object) -> str:
    return shortened(repr(text))


def _told(error: BaseException) -> str:
    """Return a decoder's message, escaped and shortened: it quotes the file."""
    return shown(str(error), 300)
