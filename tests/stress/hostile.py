"""The program behind ``test_hostile``: reads what was changed, under a limit of memory, and says how often it was refused.

``python -m tests.stress.hostile KIND COUNT FOLDER``
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import io
import json
import math
import os
import pickle
import random
import resource
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.forged import signed
from tests.stress.mutations import changed_bytes, changed_document
from tests.versions import NO_DIST
from tiered import (
    MisuseError,
    RankError,
    SafetensorsError,
    TensorSpec,
    TieredError,
    TieredStore,
    import_safetensors,
    verify,
    zero,
)
from tiered.cli.main import main as tiered
from tiered.format.foreign.pickled import Instance, Name, unpickled
from tiered.format.safetensors import INDEX, SINGLE, WeightFiles, encode_header, entry_of
from tiered.planning.machine import Machine
from tiered.reporting.page import page, read_run
from tiered.store.at_rest import StoreAtRest
from tiered.zero.checkpoint.checkpoint import extra_of
from tiered.zero.checkpoint.dcp import INERT, Folder
from tiered.zero.checkpoint.reshard import CheckpointSource
from tiered.zero.checkpoint.safetensors import export_at_rest, parameters_of
from tiered.zero.collectives import Ranks
from tiered.zero.paging.pager import placement_of
from tiered.zero.paging.storage import model_named
from tiered.zero.rank_stores import META, _Rank, number_of, shared_json

try:
    from tiered.integrations.transformers.shapes import refuse_config
except ImportError:  # without transformers
    refuse_config = None  # type: ignore[assignment]

CAP = 768 << 20
"""Bytes of address space that all trials together may take beyond what the process has before."""
ROOM = "2MiB"
"""Of a store whose files are compared."""
ARENA_MAX = -8
"""``M_ARENA_MAX`` of malloc.h: each arena takes 64 MiB of address space, however little of it is used."""
WIDEST = 1200
"""Characters of a line that a command prints, about."""

Trial = Callable[[random.Random], "tuple[str, bool]"]
"""What was changed, and whether that was refused. Fails where anything else came of it."""


def main(kind: str, count: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).mallopt(ARENA_MAX, 2)
    trial = KINDS[kind](folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + CAP, used + CAP))
    seen: Counter[str] = Counter()
    for number in range(count):
        source = random.Random(f"{kind} {number}")
        try:
            _, refused = trial(source)
        except BaseException:
            print(f"{kind} {number}", file=sys.stderr)
            raise
        seen["refused" if refused else "accepted"] += 1
    print(json.dumps(seen))


def _only_ours(what: str, call: Callable[[], Any]) -> tuple[Any, TieredError | None]:
    """The result of ``call``, or the error, which is one of ours and can be printed."""
    try:
        return call(), None
    except TieredError as error:
        return None, error
    except BaseException:
        print(what, file=sys.stderr)
        raise


# Checkpoint records


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 48)
        self.normal = nn.BatchNorm1d(48)
        self.last = nn.Linear(48, 8)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.relu(self.normal(self.first(x))))
        return found


@dataclass
class Job:
    """All that a training has beside its model."""

    model: nn.Module

    def __post_init__(self) -> None:
        self.optimizer = zero.AdamW(
            [{"params": list(self.model.parameters())[:2]}, {"params": list(self.model.parameters())[2:], "lr": 1e-4}], lr=1e-3
        )
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10),
            ],
            [2],
        )
        self.scaler = zero.GradScaler(init_scale=2.0**4)
        self.data = torch.Generator().manual_seed(1)

    @property
    def others(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler, "data": self.data}

    def backward(self) -> None:
        x = torch.randn(4, 8, generator=self.data)
        self.scaler.scale((self.model(x) - x).square().mean()).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def goes_on(self) -> None:
        if any(parameter.grad is not None for parameter in self.model.parameters()):  # which no step has used yet
            self.step()
        self.optimizer.zero_grad()
        self.backward()
        self.step()
        self.model.state_dict()

    def state(self) -> Any:
        """Everything; nothing is applied or moved for it."""
        pager = placement_of(self.optimizer.param_groups[0]["params"][0])[0]
        return [
            *(dict(self.model.named_buffers()), self.data.get_state(), self.scaler.state_dict(), self.scheduler.state_dict()),
            [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups],
            {placement.name: step for placement, step in self.optimizer.steps.items()},
            [repr(unit.pending) for unit in pager.units],
            [sorted(part.name for part in unit.states.stale_masters) for unit in pager.units],
            [repr({**vars(state), "marker": None}) for unit in pager.units for state in unit.gradients.states.values()],
            [parameter.grad is None for parameter in self.model.parameters()],
            generators(),
        ]


def generators() -> list[Any]:
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def digest(value: Any) -> str:
    """Byte for byte."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found.update(repr((one.dtype, tuple(one.shape))).encode())
            found.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, np.ndarray):
            found.update(one.tobytes())
        elif isinstance(one, dict):
            for key, inner in one.items():
                found.update(repr(key).encode())
                add(inner)
        elif isinstance(one, list | tuple):
            found.update(b"[")
            for inner in one:
                add(inner)
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()


def contents(store: TieredStore) -> str:
    return digest({key: (repr(store.spec(key)), store.get(key)) for key in sorted(store)})


class Reading:
    """An open store as one that is at rest."""

    def __init__(self, store: TieredStore) -> None:
        self.spec, self.get, self._store = store.spec, store.get, store

    def __contains__(self, key: object) -> bool:
        return key in self._store

    def __iter__(self) -> Iterator[str]:
        return iter(self._store)

    def written(self, key: str) -> int:
        self.spec(key)
        return 1

    def read(self, key: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        data = self.get(key).reshape(-1).view(torch.uint8)
        assert 0 <= start <= stop <= data.numel()
        yield data[start:stop]


POLICIES = zero.Policy(torch.bfloat16), zero.Policy()


class Images:
    """Two checkpoints: of an update that is pending, and of gradients that are clipped and accumulated."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.folders = [self._made(folder / name, name) for name in ("pending", "gradients")]
        self.records = [self._record(found) for found in self.folders]
        for found, policy in zip(self.folders, POLICIES, strict=True):
            with contextlib.closing(TieredStore.open(found, dram="1MiB")) as store:
                assert not self._refused("nothing was changed", store, policy)

    def _made(self, folder: Path, what: str) -> Path:
        with TieredStore.open(folder, dram="1MiB") as store:
            torch.manual_seed(0)
            job = Job(zero.page(Model(), store, policy=POLICIES[what == "gradients"]))
            for _ in range(3):
                job.optimizer.zero_grad()
                job.backward()
                job.scaler.unscale_(job.optimizer)
                job.optimizer.clip_grad_norm_(0.1)
                job.step()
            if what == "gradients":
                job.optimizer.zero_grad()
                job.backward()
                job.optimizer.clip_grad_norm_(0.1)
            extra = {"step": 3, "at": (1, 2.5), "table": torch.arange(9000), "small": torch.ones(2)}
            zero.commit(job.model, job.optimizer, **job.others, extra=extra)
            store.close()
        return folder

    def _record(self, folder: Path) -> bytes:
        with StoreAtRest(folder) as rest:
            return rest.get("model/checkpoint").numpy().tobytes()

    def trial(self, source: random.Random) -> tuple[str, bool]:
        which = source.randrange(2)
        record = self.records[which]
        with contextlib.closing(TieredStore.open(self.folders[which], dram="1MiB")) as store:
            kind = source.choice(["record"] * 7 + ["bytes", "tensors", "tensors"])
            if kind == "tensors":
                what = self._changed_tensors(source, store)
            else:
                change = changed_bytes(source, record) if kind == "bytes" else changed_document(source, json.loads(record))
                what, data = change
                written = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
                store.put("model/checkpoint", written, owner=model_named("model"))
            return what, self._refused(what, store, POLICIES[which])

    def _changed_tensors(self, source: random.Random, store: TieredStore) -> str:
        """Beside a record that is right."""
        key = source.choice(sorted(store))
        tensor = store.get(key)
        kind, owner = source.choice(["deleted", "shorter", "longer", "type", "shape"]), store.owner_of(key)
        if kind == "deleted":
            store.delete(key, owner=owner)
        elif kind == "type":
            other = source.choice([torch.float64, torch.bfloat16, torch.int8, torch.bool])
            store.put(key, torch.zeros(tensor.numel(), dtype=other), owner=owner)
        elif kind == "shape":
            store.put(key, tensor.reshape(1, -1), owner=owner)
        else:
            changed = tensor.reshape(-1)[:-1] if kind == "shorter" else torch.cat([tensor.reshape(-1)] * 2)
            store.put(key, changed, owner=owner)
        return f"{kind} {key}"

    def _values(self, rest: Reading) -> None:
        there = CheckpointSource([rest], "model")
        for name in ("first.weight", "first.bias", "last.weight"):
            for kind in ("param", "m", "v", "master", "grad"):
                there.values(name, kind, 0, 9)

    def _refused(self, what: str, store: TieredStore, policy: zero.Policy) -> bool:
        before = contents(store)
        rest = Reading(store)
        errors = []
        for read in (
            lambda: extra_of(store, "model"),
            lambda: parameters_of(rest, "model"),
            lambda: export_at_rest(rest, self.out, existing="overwrite"),
            lambda: self._values(rest),
        ):
            errors.append(_only_ours(what, read)[1])
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        model = Model()
        untouched = digest([dict(model.state_dict()), generators()])
        _, error = _only_ours(what, lambda: zero.page(model, store, existing="resume", policy=policy))
        if error is None:
            job = Job(model)
            here = digest(copy.deepcopy(job.state()))
            _, error = _only_ours(what, lambda: zero.resume(job.model, job.optimizer, **job.others))
            if error is None:
                _only_ours(what, job.goes_on)
                return False
            assert digest(job.state()) == here, f"{what}: half of it was resumed ({error})"
        else:
            now = digest([dict(model.state_dict()), generators()])
            assert now == untouched, f"{what}: a part of the model was changed ({error})"
            assert not any(hasattr(parameter, "_tiered") for parameter in model.parameters()), what
        assert contents(store) == before, f"{what}: the store was changed ({error})"
        assert str(error).isprintable(), repr(str(error))
        return True


# Manifests


class Manifests:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state"
        with TieredStore.open(self.folder, dram="1MiB", nvme=ROOM) as store:
            model = zero.page(nn.Linear(8, 8), store)
            store.put("é\x1b[2J", torch.ones(5))
            store.put("empty", torch.zeros(0, 3))
            store.put("scalar", torch.tensor(1.5))
            store.put("large", torch.zeros(70_000))
            ranks = {"name": "a" * 32, "number": 3, "of": 2}
            zero.commit(model, meta={"step": 7, "nested": {"list": [1, 2.5, None, "\x1b[31m"]}, META: ranks})
            store.close()
        self.path = next(self.folder.glob("manifest.*"))
        self.whole, self.data = self.path.read_bytes(), (self.folder / "data.0").read_bytes()
        assert not self._refused("nothing was changed")

    def trial(self, source: random.Random) -> tuple[str, bool]:
        body = self.whole[44:]
        if source.random() < 0.8:
            what, body = changed_document(source, json.loads(body))
            written = signed(body)
        else:
            what, body = changed_bytes(source, body)
            written = signed(body, source.choice([3, 3, 3, 2, 1, 0, 4]), source.choice([None, None, None, 0, 2**63, 2**64 - 1]))
        self.path.write_bytes(written)
        try:
            return what, self._refused(what)
        finally:
            if (self.folder / "data.0").read_bytes() != self.data:
                (self.folder / "data.0").write_bytes(self.data)
            for other in self.folder.glob("manifest.*"):
                other.unlink()

    def _refused(self, what: str) -> bool:
        _, refused = _only_ours(what, self._at_rest)
        _only_ours(what, lambda: verify(self.folder))
        printed(what, ["ls", str(self.folder)])
        printed(what, ["verify", str(self.folder)])
        before = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        store, error = _only_ours(what, lambda: TieredStore.open(self.folder, dram="1MiB", nvme=ROOM))
        if store is None:
            assert {path.name: path.read_bytes() for path in self.folder.iterdir()} == before, f"{what}: {error}"
            assert str(error).isprintable(), repr(str(error))
            return True
        with contextlib.closing(store):
            for key in store:
                _, error = _only_ours(what, lambda key=key: store.get(key))  # type: ignore[misc]
                refused = refused or error
            _only_ours(what, lambda: number_of(store.meta))
        return refused is not None

    def _at_rest(self) -> None:
        with StoreAtRest(self.folder) as rest:
            for key in rest:
                rest.get(key)


def printed(what: str, command: list[str]) -> None:
    """By the command line, on a terminal that has no other characters than ASCII's."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    told = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        code = tiered(command)
    assert code in (0, 1), f"{what}: {code}"
    for stream in (out, told):
        stream.flush()
        for line in stream.buffer.getvalue().decode().splitlines():  # type: ignore[attr-defined]
            assert line.isprintable(), f"{what}: {line!r}"
            assert len(line) < 5 * WIDEST, f"{what}: a line of {len(line)} characters"


# Safetensors


class Headers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        self.folder.mkdir(parents=True)
        tensors = {"w": (3, 4), "b": (4,), "scalar": (), "empty": (0, 5), "é\x1b[2J": (2,)}
        header, placed = encode_header([entry_of(name, TensorSpec("float32", shape, 4)) for name, shape in tensors.items()])
        self.document = json.loads(header[8:])
        self.header, self.data = header[8:], bytes(sum(entry.spec.nbytes for entry in placed))
        self.index = {"metadata": {"total_size": len(self.data)}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
        self.store = TieredStore.open(None, dram="1MiB")

    def trial(self, source: random.Random) -> tuple[str, bool]:
        for old in self.folder.iterdir():
            old.unlink()
        header, index, what = self.header, None, ""
        if source.random() < 0.15:
            document, written = self.index, json.dumps(self.index).encode()
            what, index = changed_document(source, document) if source.random() < 0.7 else changed_bytes(source, written)
        elif source.random() < 0.8:
            what, header = changed_document(source, self.document)
        else:
            what, header = changed_bytes(source, self.header)
        length = len(header) if source.random() < 0.95 else source.choice([0, 2**63, 2**64 - 1, len(header) + 1, 99_999_999])
        file = self.folder / (SINGLE if index is None else "model-1.safetensors")
        file.write_bytes(struct.pack("<Q", length) + header + self.data)
        if index is not None:
            (self.folder / INDEX).write_bytes(index)
        for key in list(self.store):
            self.store.delete(key)
        _, error = _only_ours(what, lambda: import_safetensors(self.store, self.folder))
        if error is not None:
            assert str(error).isprintable(), repr(str(error))
            if isinstance(error, SafetensorsError):
                assert not list(self.store), what
            return what, True
        with WeightFiles(self.folder) as files:
            for name, entry in files.entries.items():
                files.read(name, 0, memoryview(bytearray(entry.spec.nbytes)))
        return what, False


# Files of other programs


class Metadata:
    """A folder of torch.distributed.checkpoint: what its ``.metadata`` says, changed and pickled again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "dcp"
        torch.manual_seed(0)
        self.model = Model()
        state = {"model": self.model.state_dict(), "optimizer": {"state": {"first.weight": {"step": 3}}}}
        dcp.save(state, checkpoint_id=self.folder, **NO_DIST)
        self.path = self.folder / ".metadata"
        self.whole = self.path.read_bytes()
        self.document = described(unpickled(self.whole, "there", INERT))
        self.path.write_bytes(pickled(self.document))
        assert not self._refused("nothing was changed")

    def trial(self, source: random.Random) -> tuple[str, bool]:
        if source.random() < 0.8:
            what, data = changed_document(source, self.document)
            self.path.write_bytes(pickled(json.loads(data)))
        else:
            what, data = changed_bytes(source, self.whole)
            self.path.write_bytes(data)
        return what, self._refused(what)

    def _refused(self, what: str) -> bool:
        def read() -> None:
            with Folder(self.folder, self.model) as found:
                for name, one in found.parameters.items():
                    found.read(name, "param", 0, math.prod(one.shape))
                found.settings(("first.weight",), {"lr": 1.0})

        error = _only_ours(what, read)[1]
        assert error is None or str(error).isprintable(), repr(str(error))
        return error is not None


def described(value: Any) -> Any:
    """What ``unpickled`` returns, as JSON: dicts as pairs, objects and names by what ``pickled`` takes for them."""
    if isinstance(value, Instance):
        return {"object": [value.name, described(list(value.arguments)), described(value.state)]}
    if isinstance(value, Name):
        return {"name": value.text}
    if isinstance(value, dict):
        return {"pairs": [[described(key), described(one)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        found = [described(one) for one in value]
        return {"tuple": found} if isinstance(value, tuple) else found
    return value


def pickled(document: Any) -> bytes:
    """A pickle of what ``described`` returns, and of what was changed in it."""

    def text(value: str) -> bytes:
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data

    def name(value: Any) -> bytes:
        module, _, last = value.rpartition(".") if isinstance(value, str) else ("", "", "")
        return text(module) + text(last) + b"\x93"

    def of(value: Any) -> bytes:
        kind, inside = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
        if kind == "object" and isinstance(inside, list) and len(inside) == 3:
            given = b"(" + b"".join(map(of, inside[1] if isinstance(inside[1], list) else [])) + b"t"
            return name(inside[0]) + given + b"R" + (b"" if inside[2] is None else of(inside[2]) + b"b")
        if kind == "name":
            return name(inside)
        if kind == "tuple" and isinstance(inside, list):
            return b"(" + b"".join(map(of, inside)) + b"t"
        if kind == "pairs" and isinstance(inside, list):
            pairs = [one for one in inside if isinstance(one, list) and len(one) == 2]
            return b"}(" + b"".join(of(key) + of(one) for key, one in pairs) + b"u"
        if isinstance(value, dict):
            return b"}(" + b"".join(text(key) + of(one) for key, one in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(of, value)) + b"e"
        return pickle.dumps(value, 2)[2:-1] if not isinstance(value, str) else text(value)

    return b"\x80\x04" + of(document) + b"."


class Documents:
    """Small JSON files: a report of a training, a machine, a configuration of a model; by the command line, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        seconds = "seconds", "read", "written", "waited_reads", "waited_room", "update", "compute"
        steps = {name: [1.0, 2.0] for name in seconds}
        memory = {name: [10, 20] for name in ("memory_base", "memory_pool", "memory_beyond")}
        self.documents: dict[str, Any] = {
            "report": {
                "tiered": "0.1.0", "model": "m", "losses": {"steps": [1, 2], "values": [2.0, 1.5]}, "memory_limit": 1 << 30,
                "series": {"step": [1, 2], "tokens": [4, 4], **steps, **memory},
                "plan": {"ways": {"a": "store"}, "why": "w", "predicted": 1.0, "measured": 2.0, "memory": 3, "planned": 4},
                "timeline": {
                    "seconds": 1.0, "steps": [["s", 0.0, 1.0]], "rows": [{"name": "x", "lanes": 1, "level": [[0.0, 1.0]]}],
                },
            },
            "machine": {"tiered": "machine 1", "read": 1e9, "write": "2GB", "cores": 2, "name": "here", "dram": 1 << 30},
            "config": {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100, "depths": [1, 2]},
        }  # fmt: skip
        self.readers: dict[str, Callable[[str], Any]] = {
            "report": lambda path: page(read_run(path), path),
            "machine": Machine.of,
            "config": lambda path: refuse_config and refuse_config(os.path.dirname(path)),
        }
        for kind in self.documents:
            assert not self._refused(kind, json.dumps(self.documents[kind]).encode(), "nothing was changed")

    def trial(self, source: random.Random) -> tuple[str, bool]:
        kind = source.choice(["report", "report", "machine"] + (["config"] if refuse_config is not None else []))
        document = self.documents[kind]
        if source.random() < 0.75:
            what, data = changed_document(source, document)
        else:
            what, data = changed_bytes(source, json.dumps(document).encode())
        return what, self._refused(kind, data, what)

    def _refused(self, kind: str, data: bytes, what: str) -> bool:
        path = self.folder / f"{kind}.json"
        path.write_bytes(data)
        _, error = _only_ours(what, lambda: self.readers[kind](str(path)))
        assert error is None or str(error).isprintable(), repr(str(error))
        if kind == "report":
            printed(what, ["report", str(path), "--out", str(self.folder / "page.html")])
        return error is not None


def others(folder: Path) -> Trial:
    """Files of other programs of either kind."""
    metadata, documents = Metadata(folder), Documents(folder)
    return lambda source: (metadata if source.random() < 0.4 else documents).trial(source)


# Peers


class Peers:
    """What another rank says, and what a commit says of the ranks that made it."""

    def __init__(self, folder: Path) -> None:
        self.said: dict[str, Any] = {
            "problem": "", "joints": [[3, "a" * 32, 7, ["model"], False]], "generations": [6, 7], "others": 0, "opened": True
        }  # fmt: skip
        self.meta = {META: {"name": "a" * 32, "number": 3, "of": 2, "first": False}}
        self.kinds: list[tuple[Any, Any]] = [(self.said, _Rank), ([3, 0, 12], list[int]), ("a" * 32, str | None)]

    def trial(self, source: random.Random) -> tuple[str, bool]:
        if source.random() < 0.3:
            return self._agreement(source)
        if source.random() < 0.3:
            what, data = changed_document(source, self.meta)
            meta = json.loads(data)
            if not isinstance(meta, dict):
                return what, False
            return what, _only_ours(what, lambda: number_of(meta))[1] is not None
        own, kind = source.choice(self.kinds)
        written = json.dumps([own]).encode()
        what, data = changed_document(source, [own]) if source.random() < 0.7 else changed_bytes(source, written)
        data = data[1:-1] or b"1"
        lengths = [len(data), source.choice([len(data)] * 9 + [2**62])]

        class Sharing:
            def all_gather(self, mine: torch.Tensor, what: str) -> torch.Tensor:
                if mine.dtype is torch.int64:
                    return torch.tensor([[len(json.dumps(own))], [max(lengths)]])
                other = torch.zeros_like(mine)
                other[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: mine.numel()]
                return torch.stack([mine, other])

        _, error = _only_ours(what, lambda: shared_json(Sharing(), own, kind))  # type: ignore[arg-type]
        assert error is None or isinstance(error, RankError | MisuseError), what
        return what, error is not None


    def _agreement(self, source: random.Random) -> tuple[str, bool]:
        """What another rank says as ranks compare what they are about to do."""
        terms: list[Any] = [(f"é\x1b[2J {number}", source.choice(["text\n", 0.5, "\ud800" * 900])) for number in range(9)]

        class Other(Ranks):
            def __init__(self) -> None:
                self.rank, self.size, self.failed = 0, 2, False

            def all_gather(self, own: torch.Tensor, what: str, *, apart: bool = False) -> torch.Tensor:
                written = own.numpy().tobytes().rstrip(b"\0")
                kind = source.random()
                if kind < 0.3:
                    data = written or b"\0"
                elif kind < 0.5:
                    data = json.dumps([f"\x1b[2J{source.random()}" * 99, source.choice([1, 2.5, "\x07" * 99])]).encode()
                else:
                    data = (changed_bytes(source, written)[1] if kind < 0.8 else source.randbytes(own.numel())) or b"1"
                other = torch.zeros_like(own)
                data = data[: own.numel()]
                other[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                return torch.stack([own, other])

        def compare() -> None:
            with Other().agreeing("page this model") as agree:
                agree(terms)

        _, error = _only_ours("an agreement", compare)
        assert error is None or isinstance(error, RankError), error
        assert error is None or (str(error).isprintable() and len(str(error)) < 2 * WIDEST), str(error)
        return "an agreement", error is not None


KINDS: dict[str, Callable[[Path], Trial]] = {
    "records": lambda folder: Images(folder).trial,
    "manifests": lambda folder: Manifests(folder).trial,
    "headers": lambda folder: Headers(folder).trial,
    "peers": lambda folder: Peers(folder).trial,
    "files": lambda folder: others(folder),
}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
