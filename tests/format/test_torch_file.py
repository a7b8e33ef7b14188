"""Files of ``torch.save`` read without running anything: values, tensors, files that ask for code, damaged files."""

from __future__ import annotations

import argparse
import collections
import copy
import io
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed.shared import BEFORE, unpacked
from tiered import TieredError, TorchFileError
from tiered.format.foreign.pickled import Instance, Name, unpickled
from tiered.format.foreign.torch_file import FileTensor, TorchFile
from tiered.integrations.deepspeed.saved import INERT, SavedCheckpoint, plain, tensor_of

RAN: list[str] = []
"""What a hostile file appends to, if it can."""


def ran(*arguments: Any) -> str:
    """What hostile files name: it leaves a trace when it is called."""
    RAN.append(repr(arguments))
    return "ran"


class Calling:
    """An object that is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Restored:
    """An object whose ``__setstate__`` runs when it is unpickled."""

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}

    def __setstate__(self, state: object) -> None:
        RAN.append("setstate")


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def test_values_and_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    value = {
        "whole": base,
        "view": base[1:3, ::2],
        "turned": base.t(),
        "narrow": torch.randn(3, 5).bfloat16(),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "plain": [1, -(2**70), 1.5, None, True, "text", ("a", {"b": {1, 2}}), b"bytes", 10**20],
        "ordered": collections.OrderedDict(a=1),
        "many": collections.defaultdict(list, {"x": [1]}),
        "size": torch.Size([2, 3]),
        "type": torch.float16,
        "options": argparse.Namespace(lr=0.1, names=["a"]),
    }
    with TorchFile(saved(value, tmp_path / "a.pt"), inert=INERT) as file:
        found = file.value
        for name in ("whole", "view", "turned", "narrow", "number", "flags", "none", "parameter"):
            assert isinstance(found[name], FileTensor)
            assert torch.equal(tensor_of(found[name]), value[name])
        assert not found["turned"].is_contiguous
        assert plain(found["plain"]) == [*value["plain"][:6], ("a", {"b": [1, 2]}), list(b"bytes"), 10**20]
        assert (found["ordered"], found["many"], found["size"]) == ({"a": 1}, {"x": [1]}, (2, 3))
        assert found["type"] == Name("torch.float16")
        assert plain(found["options"]) == {"lr": 0.1, "names": ["a"]}


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(protocol: int) -> None:
    value = {"a": [1, 2.5, "x", None, True, (1, 2)], "b": {"c": -5}, "long": 2**200}
    assert unpickled(pickle.dumps(value, protocol), "there") == value


@pytest.mark.parametrize(
    "made",
    [
        lambda: Calling(ran, 1),
        lambda: [Calling(os.system, "exit 3")],
        lambda: {"a": Calling(eval, "RAN.append(1)")},
        lambda: Calling(getattr, Calling(__import__, "os"), "system"),
        lambda: {"optimizer": Restored()},
        lambda: Calling(io.open, "/etc/passwd"),
        lambda: Calling(shutil.rmtree, "/nowhere"),
        lambda: {Calling(ran): 1},
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_asks_for_code_is_refused(made: Callable[[], Any], protocol: int, tmp_path: Path) -> None:
    RAN.clear()
    torch.save({"module": torch.ones(2), "x": made()}, tmp_path / "a.pt", pickle_protocol=protocol)
    with pytest.raises(TorchFileError, match=r"a\.pt.*nothing was called|opcode"):
        TorchFile(tmp_path / "a.pt", inert=INERT)
    assert RAN == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"cos\nsystem\n(S'exit 3'\ntR.", "os.system"),
        (b"(S'exit 3'\nios\nsystem\n.", "opcode INST"),
        (b"(cos\nsystem\nS'exit 3'\no.", "opcode OBJ"),
        (b"\x80\x02\x82\x01.", "opcode EXT1"),
        (b"Pabc\n.", "opcode PERSID"),
        (b"\x80\x02U\x01aQ.", "reference"),
        (b"\x80\x02]q\x00h\x00Rh.", "damaged"),
        (b"\x80\x02}]K\x01s.", "a list is a key"),
        (b"\x80\x02" + b"(" * 50 + b".", "damaged"),
        (b"\x80\x02.", "damaged"),
        (b"", "damaged"),
        (b"\x80\x02h\x05.", "damaged"),
        (b"\x80\x02r\xff\xff\xff\x7f.", "damaged"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "damaged"),
        (b"\x80\x02\x8b\xff\xff\xff\x7fabc.", "damaged"),
        (b"\x80\x02K\x01}b.", "a state is for what has none"),
    ],
)
def test_pickles_by_hand(data: bytes, says: str) -> None:
    """Deep tuples, huge lengths and memo numbers take neither the stack nor memory."""
    with pytest.raises(TorchFileError, match=says):
        unpickled(data, "there")


def test_deep_tuples_are_no_keys() -> None:
    """Their hash would overflow the stack of the interpreter."""
    data = b"\x80\x02})" + b"\x85" * 50_000 + b"K\x01s."
    with pytest.raises(TorchFileError, match="a tuple is a key"):
        unpickled(data, "there")


def doubled(times: int) -> Any:
    """A list of lists that are each twice in the next: small in a file, 2**times values when written out."""
    value: Any = [0]
    for _ in range(times):
        value = [value, value]
    return value


def test_shared_parts_do_not_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered.integrations.deepspeed.saved.MOST_VALUES", 1000)
    with TorchFile(saved({"x": doubled(12)}, tmp_path / "a.pt")) as file, pytest.raises(ValueError, match="a million values"):
        plain(file.value)
    with pytest.raises(TorchFileError, match="one value so often"):
        TorchFile(saved({"x": doubled(40)}, tmp_path / "b.pt"))


def memoised(value: bytes, use: bytes, times: int) -> bytes:
    """A pickle with a value (opcodes) that is used many times as a key of a dict: each of ``use`` (opcodes) is one value."""
    return b"\x80\x02" + value + b"q\x000}" + (b"h\x00" + use) * times + b"."


BIG = 2**9000
BOMBS: dict[str, tuple[bytes, str]] = {
    "a tuple as a key": (memoised(b"(" + b"N" * 5000 + b"t", b"Ns", 3), "a key of 5,000 characters or values"),
    "a text as a key": (memoised(b"X" + struct.pack("<I", 5000) + b"a" * 5000, b"Ns", 3), "a key of 5,000 characters"),
    "bytes as a key": (memoised(b"B" + struct.pack("<I", 5000) + b"a" * 5000, b"Ns", 3), "a key of 5,000 characters"),
    "a text in a key": (memoised(b"X" + struct.pack("<I", 5000) + b"a" * 5000 + b"\x85", b"Ns", 3), "a key of 5,001 char"),
    "an integer as a key": (memoised(b"\x8a\x0b" + b"\x7f" * 11, b"Ns", 3), "an integer of 87 bits for a key"),
    "an integer": (pickle.dumps([BIG], 2), "an integer of 9,001 bits"),
    "integers as keys": (pickle.dumps(dict.fromkeys(range(70_000)), 2), "more than 65,536 numbers"),
    "floats in a set": (pickle.dumps({float(number) for number in range(70_000)}, 4), "more than 65,536 numbers"),
    "tuples as keys": (pickle.dumps(dict.fromkeys((number, 1) for number in range(7_000)), 2), "more than 65,536 numbers"),
    "a name of a class": (b"\x80\x02c" + b"a" * 5000 + b"\nb\n.", "a name of 5,000 characters"),
    "a name in two parts": (b"\x80\x04X" + struct.pack("<I", 5000) + b"a" * 5000 + b"X\1\0\0\0b\x93.", "a name of 5,000"),
    "a shape": (b"\x80\x02ctorch\nSize\n(" + b"K\1" * 65 + b"t\x85R.", "65 dimensions"),
    "nesting": (b"\x80\x02" + b"]" * 600 + b"a" * 599 + b".", "nested deeper than 500 levels"),
    "nesting of what is used twice": (
        b"\x80\x02" + b"]" * 300 + b"a" * 299 + b"q\x000(h\x00" + b"]" * 300 + b"h\x00" + b"a" * 300 + b"t.",
        "nested deeper",
    ),
    "itself": (b"\x80\x02]q\x00h\x00a.", "a container that contains itself"),
    "itself, by an object": (b"\x80\x02cargparse\nNamespace\n)\x81q\x00}X\1\0\0\0ah\x00sb.", "contains itself"),
    "a list that is used often": (pickle.dumps([[0] * 2000] * 2000, 2), "one value so often"),
    "a text that is used often": (pickle.dumps(["a" * 200_000] * 2000, 2), "one value so often"),
    "lists of lists": (pickle.dumps(doubled(40), 2), "one value so often"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_would_take_very_long_is_refused(bomb: str) -> None:
    """Small pickles whose time or memory grows faster than their size. (As small as that shows.)"""
    data, says = BOMBS[bomb]
    with pytest.raises(TorchFileError, match=says) as refused:
        unpickled(data, "there", INERT)
    assert str(refused.value).startswith("there: its pickle ")
    assert len(str(refused.value).splitlines()) == 1


def test_what_files_of_tensors_have_is_within_the_limits() -> None:
    """A state of 20,000 parameters: their names as keys many times, one value in all of them, numbers as keys."""
    names = [f"model.layers.{number}.mlp.experts.down_proj.weight" for number in range(20_000)]
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "names": ["a", "b"]}
    value = {
        "shapes": dict.fromkeys(names, torch.Size([4, 4])),
        "settings": dict.fromkeys(names, settings),
        "state": {number: {"step": number} for number in range(20_000)},
        "long": {"x" * 2000: 1, ("a", 1): 2},
    }
    assert unpickled(pickle.dumps(value, 2), "there") == {**value, "shapes": dict.fromkeys(names, (4, 4))}


def test_tensors_in_the_same_bytes_do_not_multiply(tmp_path: Path) -> None:
    """A tensor that is 5,000 times in a value: each time it would be read into memory of its own."""
    tensor = torch.zeros(4096)
    with TorchFile(saved({"few": [tensor] * 8, "many": [tensor] * 5000}, tmp_path / "a.pt")) as file:
        assert len(plain(file.value["few"])) == 8
        with pytest.raises(ValueError, match="more than 16 times the bytes of the file"):
            plain(file.value["many"])


def test_integers_that_have_no_text(tmp_path: Path) -> None:
    with TorchFile(saved([2**8000], tmp_path / "a.pt")) as file:
        assert plain(file.value) == [2**8000]
    with pytest.raises(TorchFileError, match="an integer of 9,001 bits"):
        TorchFile(saved([-(2**9000)], tmp_path / "a.pt"))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(TorchFileError, match="not a regular file"):
        TorchFile(tmp_path / "a.pt")


def rewritten(source: Path, target: Path, **changed: Any) -> Path:
    """Copy an archive with other entries, compression, or names."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", changed.get("compression", zipfile.ZIP_STORED)) as new:
        for info in old.infolist():
            name = info.filename.partition("/")[2]
            if name in changed.get("without", ()):
                continue
            new.writestr(info.filename, changed.get("entries", {}).get(name, old.read(info)))
    return target


def twice(source: Path, target: Path) -> Path:
    """Copy an archive with a further entry where ``data/0`` is: its checksum would be computed once more for each."""
    shutil.copy(source, target)
    with zipfile.ZipFile(target, "a") as archive:
        found = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
        other = copy.copy(found)
        other.filename = other.filename[:-1] + "1"
        archive.filelist.append(other)
        archive._didModify = True  # type: ignore[attr-defined]
    return target


def test_archives_that_are_none(tmp_path: Path) -> None:
    path = saved({"a": torch.arange(6.0)}, tmp_path / "a.pt")
    for made, says in (
        (rewritten(path, tmp_path / "b", compression=zipfile.ZIP_DEFLATED), "is compressed"),
        (rewritten(path, tmp_path / "c", without=("data.pkl",)), "has no data.pkl"),
        (rewritten(path, tmp_path / "d", without=("data/0",)), "no entry data/0"),
        (rewritten(path, tmp_path / "e", entries={"data/0": b"short"}), "its entry fewer"),
        (rewritten(path, tmp_path / "f", entries={"byteorder": b"big"}), "endian"),
    ):
        with pytest.raises(TorchFileError, match=says):
            TorchFile(made)
    with pytest.raises(TorchFileError, match="two of its entries lie in the same bytes"):
        TorchFile(twice(path, tmp_path / "h"))
    (tmp_path / "g").write_bytes(b"\x80\x02}.")
    with pytest.raises(TorchFileError, match="no zip archive"):
        TorchFile(tmp_path / "g")
    with pytest.raises(TorchFileError, match="not a regular file"):
        TorchFile(tmp_path)


def test_a_wrong_byte_in_a_tensor_is_found(tmp_path: Path) -> None:
    path = saved({"a": torch.arange(600.0)}, tmp_path / "a.pt")
    data = bytearray(path.read_bytes())
    at = data.index(torch.tensor([77.0]).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with TorchFile(path) as file, pytest.raises(TorchFileError, match="checksum of its entry data/0 is wrong"):
        file.value["a"].read(0, 1)


MUTATIONS = 240


def test_mutations_of_a_checkpoint(tmp_path: Path) -> None:
    """Of 240 damaged copies of real checkpoints each is refused by an error of this project, or has the values that it had;
    and nothing runs. In a third the pickle is changed and its checksum put right, which the machine itself must stand."""
    RAN.clear()
    chosen = random.Random(5)
    counts: collections.Counter[str] = collections.Counter()
    for name in ("stage2-fp32", "stage3-nvme"):
        tag = unpacked(name, tmp_path) / f"global_step{BEFORE}"
        expected = values_of(tag)
        files = sorted(path for path in tag.rglob("*") if path.is_file())
        for number in range(MUTATIONS // 2):
            path = chosen.choice(files)
            before = path.read_bytes()
            kind = ("flip", "cut", "pickle")[number % 3] if path.suffix == ".pt" else "cut"
            path.write_bytes(mutated(before, kind, chosen, tmp_path))
            try:
                found = values_of(tag)
            except (TieredError, OSError):
                counts["refused"] += 1
            else:
                same = found.keys() == expected.keys()
                same = same and all(torch.equal(found[key], expected[key]) for key in expected)
                counts["same" if same else f"other: {kind}"] += 1
            path.write_bytes(before)
        shutil.rmtree(tag.parent)
    assert counts["refused"] + counts["same"] + counts["other: pickle"] == MUTATIONS, counts
    assert counts["refused"] > MUTATIONS * 0.7, counts
    assert RAN == []


def mutated(data: bytes, kind: str, chosen: random.Random, folder: Path) -> bytes:
    if kind == "flip":
        changed = bytearray(data)
        changed[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        return bytes(changed)
    if kind == "cut":
        return data[: chosen.randrange(len(data))]
    source = folder / "source.pt"
    source.write_bytes(data)
    with zipfile.ZipFile(source) as archive:
        name = next(one for one in archive.namelist() if one.endswith("data.pkl"))
        pickled = bytearray(archive.read(name))
    for _ in range(chosen.randrange(1, 4)):
        pickled[chosen.randrange(len(pickled))] = chosen.randrange(256)
    return rewritten(source, folder / "target.pt", entries={"data.pkl": bytes(pickled)}).read_bytes()


def values_of(tag: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with SavedCheckpoint(tag) as checkpoint:
        for name, one in checkpoint.parameters.items():
            for state in ("param", "exp_avg", "exp_avg_sq"):
                values = checkpoint.read(name, state, 0, torch.Size(one.shape).numel())
                if values is not None:
                    found[f"{name}.{state}"] = values
    return found


def test_stand_ins_have_attributes() -> None:
    assert Instance("a", (), {"b": 1}).attribute("b") == 1
    assert Instance("a").attribute("b") is None
