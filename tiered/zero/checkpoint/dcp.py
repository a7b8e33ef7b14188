"""torch.distributed.checkpoint: a state that is a commit of the store, and folders of that format, read into a paged model.

A folder (https://pytorch.org/docs/stable/distributed.checkpoint.html) has ``.metadata``, a pickle that says of each key its
type and its chunks, and of each chunk the file and the bytes of it; and files in which each chunk is what ``torch.save``
writes. torch reads ``.metadata`` with ``pickle.load``, which runs whatever it says. ``Folder`` reads it with
``format.foreign.pickled``, which runs nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from tiered.errors import MisuseError, TorchFileError, path_of, shown
from tiered.format.foreign.pickled import MAX_PICKLE, Instance, Name, as_dict, as_list, as_text, sizes_of, unpickled
from tiered.format.foreign.torch_file import ELEMENTS, FileTensor, TorchFile
from tiered.store.at_rest import listing
from tiered.zero.checkpoint import checkpoint
from tiered.zero.checkpoint.foreign import ONE, Described, ForeignGroup, Sound, record_of, take_over
from tiered.zero.checkpoint.loaders import Stateful
from tiered.zero.optimizers.optimizer import Optimizer
from tiered.zero.paging.pager import name_of, pager_of
from tiered.zero.paging.sharding import Sharded
from tiered.zero.rank_stores import shared_json
from tiered.zero.rules.rule import settings_of, torch_name

__all__ = ["Committed", "Folder", "load_dcp"]

METADATA = ".metadata"
MARK = "tiered.committed"
"""Where the meta of a commit has the mark of the state that names it."""
_KIND = "torch.distributed.checkpoint.metadata."
INERT = (
    *(f"{_KIND}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(f"{_KIND}{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.device"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
)
"""What ``.metadata`` may have objects of, and calls."""


class Committed:
    """A ``Stateful`` of torch.distributed.checkpoint, whose state is a commit: ``dcp.save({"tiered": state}, ...)``.

    Its state is small: it names a commit of the store, which has the tensors, and all that ``zero.commit`` writes. So a folder
    needs its store, and stays loadable as long as the store keeps the commit (``TieredStore.open(keep=)``,
    ``store.retain``). ``state_dict`` commits where the optimizer has made steps since the last commit or load of this
    object, or the store has no commit; otherwise it names the last one. ``commit`` does it in any case. ``load_state_dict``
    goes back to the commit, as ``zero.rollback``. All ranks call them together, as torch.distributed.checkpoint does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        data: Stateful | torch.Generator | None = None,
    ) -> None:
        """Raises MisuseError for a model that is not paged."""
        self._pager = pager_of(model)
        self._model, self._optimizer = model, optimizer
        self._with: dict[str, Any] = {"scheduler": scheduler, "scaler": scaler, "data": data}
        self._last: dict[str, Any] | None = None
        self._steps = self._made()

    def _made(self) -> int:
        return 0 if self._optimizer is None else max(self._optimizer.steps.values(), default=0)

    def commit(self) -> dict[str, Any]:
        """Commit, and return the state that names it."""
        store, mark = self._pager.store, uuid4().hex
        partition = self._pager.partition
        if isinstance(partition, Sharded):
            mark = shared_json(partition.ranks, mark, str)[0]
        meta = {**store.meta, MARK: mark}
        generation = checkpoint.commit(self._model, self._optimizer, meta=meta, **self._with)
        numbers = [generation]
        if isinstance(partition, Sharded):
            numbers = shared_json(partition.ranks, generation, int)
        self._last = {"mark": mark, "generations": numbers, "store": str(store.folder)}
        self._steps = self._made()
        return dict(self._last)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, after a commit where one is needed."""
        if self._made() != self._steps or (self._last is None and self._pager.store.generation == 0):
            return self.commit()
        if self._last is None:  # before the first load: the values of these keys are read
            return {"mark": "", "generations": [], "store": ""}
        return dict(self._last)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to the commit that a state names. Raises MisuseError where this store does not have it."""
        mark, numbers = state_dict.get("mark"), state_dict.get("generations")
        store, partition = self._pager.store, self._pager.partition
        if not isinstance(numbers, list) or len(numbers) != partition.shares or not mark:
            raise MisuseError(
                f"the state names {shown(str(state_dict), 200)}, and is no commit of {partition.shares} ranks: it was saved "
                "before the first step (call commit() first then), or by another number of ranks"
            )
        generation = numbers[partition.rank]
        there = next((one.meta for one in listing(store.folder).generations if one.number == generation), {})
        mine = generation in store.generations and there.get(MARK) == mark
        if not all(partition.all_true([mine], "whether a store has the commit")):
            raise MisuseError(
                f"the state names generation {generation} of the store in {shown(str(state_dict.get('store')), 200)}, and "
                f"{store} does not have it: open that one, or have it keep more commits (store.retain)"
            )
        checkpoint.rollback(self._model, self._optimizer, generation=generation, **self._with)
        self._last = {"mark": mark, "generations": numbers, "store": str(state_dict.get("store"))}
        self._steps = self._made()


def load_dcp(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, prefix: str | None = None
) -> None:
    """Replace the values of a paged model, and the states and settings of its optimizer, by those of a folder that
    torch.distributed.checkpoint wrote, of any number of ranks.

    Its keys are those of ``torch.distributed.checkpoint.state_dict``: ``model.NAME`` (``prefix``: what stands before the names;
    None: "model.", or nothing), ``optimizer.state.NAME.STATE``, ``optimizer.param_groups``. Where it has no optimizer's
    states, the optimizer begins anew. A state "master" is taken for the fp32 master of a narrow parameter. Nothing in the
    folder is run, and no gradient stays. Commit afterwards. All ranks call it.

    Raises MisuseError where the model or the optimizer is another one, TorchFileError for what is damaged or could run code;
    then load again, or call ``zero.rollback``.
    """
    pager = pager_of(model)
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "_tiered"):
            raise MisuseError(
                f"parameter {name!r} was added, or replaced, after zero.page, and load_dcp loads paged ones: call it before"
            )
    folder = path_of(folder, "the folder of torch.distributed.checkpoint")
    with Folder(folder, model, prefix) as found:
        groups = [] if optimizer is None else _groups(optimizer, found)
        record = record_of(found, groups, {})
        take_over(pager, found, groups, record)
    written = checkpoint.read_record(pager.store, pager.name)
    checkpoint.load_record(pager.model, pager, written, checkpoint.Training(optimizer))


def _groups(optimizer: Optimizer, found: Folder) -> list[ForeignGroup]:
    """Return the param groups of an optimizer, with what the folder has of their settings."""
    made = []
    for index, group in enumerate(optimizer.param_groups):
        names, rule = tuple(name_of(parameter) for parameter in group["params"]), optimizer.rule_of(index)
        kept = [torch_name(rule, state) for state in rule.state_specs(ONE)]
        for name in names:
            lacks = [state for state in kept if not found.has(name, state)]
            if found.parameters[name].steps and lacks:
                raise MisuseError(f"{found.where} has no {lacks[0]!r} of {name!r}: it is of another optimizer")
        settings = {key: group[key] for key in settings_of(rule)}
        made.append(ForeignGroup(names, rule, {**settings, **found.settings(names, settings)}))
    return made


class Folder:
    """A folder of torch.distributed.checkpoint, open for reading; a ``Foreign`` of the parameters of a model."""

    def __init__(self, folder: str | os.PathLike[str], model: nn.Module, prefix: str | None = None) -> None:
        """Read what there is. Raises MisuseError where it lacks a parameter, TorchFileError for what is damaged, OSError."""
        self.where, self._folder = str(folder), Path(os.path.expanduser(folder))
        self._stack = ExitStack()
        self._files: dict[tuple[str, int, int], TorchFile] = {}
        self._last: tuple[str, torch.Tensor] | None = None
        if not (self._folder / METADATA).is_file():
            raise MisuseError(f"{folder} is no folder of torch.distributed.checkpoint: it has no file {METADATA}")
        try:
            with self._sound():
                self._read(model, prefix)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._files.clear()
        self._stack.close()

    def _sound(self) -> Sound:
        return Sound(self.where, "torch.distributed.checkpoint")

    def _read(self, model: nn.Module, prefix: str | None) -> None:
        path = self._folder / METADATA
        with path.open("rb") as file:
            metadata = unpickled(file.read(MAX_PICKLE + 1), str(path), INERT)
        self._tensors: dict[str, Instance] = {}
        self._bytes: set[str] = set()
        for key, one in as_dict(metadata.attribute("state_dict_metadata")).items():
            if as_text(key) and one.name == f"{_KIND}TensorStorageMetadata":
                self._tensors[key] = one
            else:
                self._bytes.add(key)
        self._places: dict[tuple[str, str], tuple[str, int, int]] = {}
        for index, info in as_dict(metadata.attribute("storage_data")).items():
            offsets = sizes_of(index.attribute("offset") or ())
            self._places[as_text(index.attribute("fqn")), repr(offsets)] = _place(info)
        _refuse_shared(self._places.values())
        if prefix is None:
            prefix = "model." if any(key.startswith("model.") for key in self._tensors) else ""
        self._prefix = prefix
        parameters: dict[str, Described] = {}
        for name, parameter in model.named_parameters():
            found = self._tensors.get(f"{prefix}{name}")
            if found is None:
                raise MisuseError(f"{self.where} has no {prefix}{name}")
            shape, dtype = _described(found)
            steps = self._steps(name)
            parameters[name] = Described(shape, dtype, parameter.requires_grad, steps)
        self.parameters: Mapping[str, Described] = parameters
        self.aliases: Mapping[str, str] = {}
        named = checkpoint.persistent_buffers(model)
        lacking = [name for name in named if f"{prefix}{name}" not in self._tensors]
        if lacking:
            raise MisuseError(f"{self.where} has no {prefix}{lacking[0]}, a buffer of this model")
        self.buffers: Mapping[str, torch.Tensor] = {name: self._whole(f"{prefix}{name}") for name in named}
        own = {f"{prefix}{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
        own |= {f"{prefix}{name}" for name, _ in model.named_buffers(remove_duplicate=False)}
        for key in self._tensors:
            if key.startswith(prefix) and key not in own and not key.startswith("optimizer.") and prefix:
                raise MisuseError(f"{self.where} has {key}, which this model does not have")

    def _steps(self, name: str) -> int:
        key = f"optimizer.state.{name}.step"
        if key in self._tensors:
            if math.prod(_described(self._tensors[key])[0]) != 1:
                raise ValueError(f"{key} is more than a number")
            value = float(self._whole(key))
            if not value.is_integer() or not 0 <= value < 2**53:
                raise ValueError(f"{key} is {value}")
            return int(value)
        found = self._object(key) if key in self._bytes else 0
        return int(found) if type(found) in (int, float) else 0

    def has(self, name: str, state: str) -> bool:
        """Return whether there is a state of this name of a parameter."""
        return f"optimizer.state.{name}.{state}" in self._tensors

    def settings(self, names: tuple[str, ...], wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the folder says of the settings ``wanted`` of the param group of these parameters."""
        found: dict[str, Any] = {}
        with self._sound():
            heads = [f"optimizer.param_groups.{name}" for name in names[:1]]
            heads += [
                f"optimizer.param_groups.{index}"
                for index in range(len(self._bytes))
                if f"optimizer.param_groups.{index}.params" in self._bytes
                and any(one in names for one in as_list(self._object(f"optimizer.param_groups.{index}.params")))
            ]
            for head in heads:
                for key in wanted:
                    if f"{head}.{key}" in self._bytes and key != "fused":
                        value = self._object(f"{head}.{key}")
                        found[key] = tuple(value) if isinstance(value, list) else value
        return {key: value for key, value in found.items() if type(value) in (int, float, bool, tuple, str)}

    def read(self, name: str, state: str, begin: int, end: int) -> torch.Tensor | None:
        """Return elements of a parameter, row-major: "param", or a state by the name that torch has for it."""
        key = f"optimizer.state.{name}.{state}"
        if state == "param":
            master = f"optimizer.state.{name}.master"
            key = master if master in self._tensors else f"{self._prefix}{name}"
        if key not in self._tensors:
            return None
        shape, _ = _described(self._tensors[key])
        if shape != self.parameters[name].shape:
            raise TorchFileError(f"{self.where}: {key} is of shape {shape}, and its parameter of {self.parameters[name].shape}")
        with self._sound():
            return self._whole(key).view(-1)[begin:end]

    def _whole(self, key: str) -> torch.Tensor:
        """Return a tensor, put together from its chunks. The last one is kept, because it is read in parts."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None
        shape, dtype = _described(self._tensors[key])
        chunks = [
            (sizes_of(chunk.attribute("offsets")), sizes_of(chunk.attribute("sizes")))
            for chunk in as_list(self._tensors[key].attribute("chunks"))
        ]
        counts = [math.prod(sizes) for _, sizes in chunks]
        room = sum(self._at(key, offsets)[2] for offsets, _ in chunks)
        if sum(counts) != math.prod(shape) or math.prod(shape) * dtype.itemsize > room:
            raise ValueError(f"the chunks of {key} have {sum(counts)} elements, and it {math.prod(shape)}")
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        filled = torch.zeros(shape if len(chunks) > 1 else (), dtype=torch.bool, device="cpu")
        for offsets, sizes in chunks:
            stored = self._open(*self._at(key, offsets)).value
            name = str(dtype).removeprefix("torch.")
            if not isinstance(stored, FileTensor) or stored.shape != sizes or stored.dtype != name:
                raise ValueError(f"a chunk of {key} is another tensor")
            if stored.count > stored.numel:
                raise ValueError(f"a chunk of {key} is larger than its bytes")
            values = torch.empty(sizes, dtype=dtype, device="cpu")
            if stored.count:
                flat = torch.frombuffer(stored.read(0, stored.span), dtype=torch.uint8).view(dtype)
                values = flat.as_strided(sizes, stored.stride)
            where = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            target = whole[where]
            if len(chunks) > 1:
                if filled[where].any():
                    raise ValueError(f"chunks of {key} overlap")
                filled[where] = True
            if target.shape != values.shape:
                raise ValueError(f"a chunk of {key} lies outside of it")
            target.copy_(values)
        self._close_files()
        self._last = key, whole
        return whole

    def _at(self, key: str, offsets: tuple[int, ...]) -> tuple[str, int, int]:
        """Return the file of a chunk, and where in it the chunk begins and how long it is."""
        return self._places.get((key, repr(offsets))) or self._places[key, "()"]

    def _object(self, key: str) -> Any:
        """Return what is not a tensor."""
        found = self._open(*self._places[key, "()"]).value
        self._close_files()
        return found

    def _open(self, path: str, start: int, length: int) -> TorchFile:
        return self._stack.enter_context(TorchFile(self._folder / path, start=start, length=length))

    def _close_files(self) -> None:
        self._stack.close()


def _place(info: Instance) -> tuple[str, int, int]:
    path, offset, length = (info.attribute(name) for name in ("relative_path", "offset", "length"))
    plain = isinstance(path, str) and path == os.path.basename(path) and path not in ("", ".", "..") and "\0" not in path
    if not plain or not path.isprintable() or type(offset) is not int or type(length) is not int:
        raise ValueError("a chunk is in no file of the folder")
    if info.attribute("transform_descriptors"):
        raise ValueError("a chunk is compressed or encrypted")
    return path, offset, length


def _refuse_shared(places: Collection[tuple[str, int, int]]) -> None:
    """Raise ValueError where two chunks lie in the same bytes: small files would be read as very much."""
    last, end = "", 0
    for path, begin, length in sorted(places):
        if path == last and begin < end:
            raise ValueError("two chunks lie in the same bytes of a file")
        last, end = path, begin + length


def _described(found: Instance) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the type of a tensor."""
    properties = found.attribute("properties")
    kind = properties.state[0] if isinstance(properties.state, tuple) else properties.attribute("dtype")
    name = kind.text.removeprefix("torch.") if isinstance(kind, Name) else ""
    if name not in ELEMENTS:
        raise ValueError("a tensor is of no known type")
    shape = sizes_of(found.attribute("size"))
    if math.prod(shape) >= 2**48:
        raise ValueError("a tensor has too many elements")
    dtype: torch.dtype = getattr(torch, name)
    return shape, dtype
