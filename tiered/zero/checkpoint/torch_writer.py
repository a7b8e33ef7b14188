"""Write files of ``torch.save`` with one tensor in memory at a time, and read those of others without running anything.

Such a file is a zip archive, not compressed, whose entries may lie in any order
(https://pytorch.org/docs/stable/notes/serialization.html; ``tiered.format.foreign.torch_file`` reads them). ``torch.save``
begins with the object, so it has to have all tensors. Here each tensor becomes an entry when it is there, and the object, which
names the entries, is the last one.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from tiered.errors import CapacityError, MisuseError
from tiered.format.foreign.torch_file import STORAGES, FileTensor, TorchFile
from tiered.zero.checkpoint.safetensors import pieces_of
from tiered.zero.optimizers.optimizer import Optimizer

__all__ = ["TorchFileWriter", "mapped", "save_optimizer"]

ALIGNED = 64
"""The bytes of a tensor begin at multiples of so many, as those of ``torch.save`` do: ``torch.load(mmap=True)`` needs it."""
PADDING = 0x4246
"""Torch's number of the field of an entry's header that is only padding."""
_STORAGE_OF = {dtype: storage for storage, dtype in STORAGES.items() if storage != "UntypedStorage"}


class _Storage:
    """A storage whose bytes are an entry of the file."""

    def __init__(self, key: str, dtype: str, numel: int) -> None:
        self.reference = ("storage", getattr(torch, _STORAGE_OF[dtype]), key, "cpu", numel)


class _Written:
    """Stands for a tensor that has been written."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        """Of the function that makes the tensor of its storage: storage, offset, shape, strides, and what autograd has."""


class TorchFileWriter:
    """A file that ``torch.load(path, weights_only=True)`` reads; a context manager. ``end`` makes it whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Begin the file, in place of one that is there. Raises OSError."""
        self._path = Path(path)
        self._file: BinaryIO = self._path.open("wb")
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
        self._count = 0
        self._ended = False

    def __enter__(self) -> TorchFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file. One that was not ended is deleted. Raises CapacityError where the disk is full."""
        if not self._ended:
            self._path.unlink()
            with suppress(OSError, ValueError):  # of what could not be written, or was not
                self._archive.close()
        with suppress(OSError):
            self._file.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CapacityError(
                f"no room for {self._path} ({error.strerror}); nothing was left there: make room, or name a folder on another "
                "drive"
            ) from error

    def tensor(self, value: torch.Tensor) -> Any:
        """Write a tensor of any shape now. Returns what stands for it in the object that ``end`` is given. Raises MisuseError
        for an element type that is in no such file, OSError."""
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _STORAGE_OF or value.layout is not torch.strided:
            raise MisuseError(f"a tensor of {value.dtype}, {value.layout}, is written to no file of torch.save here")
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        if not value.permute(order).is_contiguous():  # gaps, or elements that show the same memory
            value, order = value.contiguous(), list(range(value.dim()))
        key = str(self._count)
        self._count += 1
        with self._archive.open(self._entry(f"data/{key}", value.nbytes), "w") as entry:
            for piece in pieces_of(value.permute(order), value.dtype):
                entry.write(piece)
        storage = _Storage(key, dtype, value.numel())
        return _Written(storage, 0, tuple(value.shape), value.stride(), False, OrderedDict())

    def end(self, value: Any) -> None:
        """Write the object, in which tensors may stand too, and have all of the file on the disk. Raises OSError."""
        document = io.BytesIO()
        _Pickler(document, self).dump(value)
        for name, data in (("data.pkl", document.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            with self._archive.open(self._entry(name, len(data)), "w") as entry:
                entry.write(data)
        self._archive.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._ended = True

    def _entry(self, name: str, nbytes: int) -> zipfile.ZipInfo:
        """Return the header of the next entry."""
        entry = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
        entry.file_size = nbytes
        wide = 20 if nbytes * 1.05 > zipfile.ZIP64_LIMIT else 0  # zipfile adds a field where sizes may need eight bytes
        padding = -(self._file.tell() + 30 + len(entry.filename) + wide + 4) % ALIGNED
        entry.extra = struct.pack("<HH", PADDING, padding) + bytes(padding)
        return entry


class _Pickler(pickle.Pickler):
    """Pickles an object with tensors that are in a file."""

    def __init__(self, file: io.BytesIO, writer: TorchFileWriter) -> None:
        super().__init__(file, protocol=2)
        self._writer = writer

    def persistent_id(self, value: Any) -> Any:
        return value.reference if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = self._writer.tensor(value)
        return (torch._utils._rebuild_tensor_v2, value.arguments) if isinstance(value, _Written) else NotImplemented


def save_optimizer(optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
    """Write what ``torch.save(optimizer.state_dict(), path)`` would, with the states of two parameters in memory at most.

    Pending updates are applied first. Raises CapacityError where the disk has no room, OSError, and what the store raises; then
    no file is left.
    """
    packed, states = optimizer.state_in_turn()
    with TorchFileWriter(path) as file:
        written = {
            index: {name: file.tensor(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
            for index, state in states
        }
        file.end({**packed, "state": written})


def mapped(path: str | os.PathLike[str]) -> Any:
    """Return the object of a file of ``torch.save``, with tensors on memory that shows the file: a page is read as it is used.

    ``TorchFile`` reads it, so nothing in it is run; each tensor is compared with its checksum. Raises TorchFileError for what
    is damaged or names anything else than tensors and plain values, OSError.
    """
    with TorchFile(path) as file:
        memory: Any = torch.UntypedStorage.from_file(str(path), False, file.nbytes)

        def made(value: Any) -> Any:
            if isinstance(value, FileTensor):
                return _shown(value, memory)
            if isinstance(value, dict):
                return {name: made(one) for name, one in value.items()}
            return type(value)(map(made, value)) if type(value) in (list, tuple) else value

        return made(file.value)


def _shown(tensor: FileTensor, memory: Any) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    at = tensor.file.begin_of(tensor.key)
    if at % dtype.itemsize:  # of a program that does not align
        found = torch.frombuffer(tensor.read(0, tensor.span) or bytearray(dtype.itemsize), dtype=dtype)
        return found.as_strided(tensor.shape, tensor.stride)
    first = at // dtype.itemsize + tensor.offset
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, first, tensor.shape, tensor.stride)
