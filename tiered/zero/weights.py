"""A pretrained model's weights, from safetensors files into units while they are made."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from tiered import MisuseError
from tiered.safetensors import WeightFiles
from tiered.zero.checkpoint import persistent_buffers
from tiered.zero.units import Placement

__all__ = ["Pretrained"]

PIECE = 4 << 20
"""Bytes that are read at a time, where a row of a tensor is not larger."""


class Pretrained:
    """Files whose tensors are ``model``'s, by name; a context manager."""

    def __init__(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Raises MisuseError for names that are missing or unexpected, other shapes, and buffers that nothing gives values;
        SafetensorsError and OSError for the files."""
        self.files = WeightFiles(path)
        try:
            self._parameters = _aliases(model)
            self._buffers = persistent_buffers(model)
            self._refuse_names(model)
            self._refuse_shapes(model)
        except BaseException:
            self.files.close()
            raise

    def __enter__(self) -> Pretrained:
        return self

    def __exit__(self, *exception: object) -> None:
        self.files.close()

    def _refuse_names(self, model: nn.Module) -> None:
        there = self.files.entries.keys()
        missing = [names[0] for names in self._parameters.values() if not any(name in there for name in names)]
        missing += [name for name in self._buffers if name not in there]
        if missing:
            raise MisuseError(f"{self.files.path} has no tensor for {_some(missing)} of this model")
        expected = {name for names in self._parameters.values() for name in names}
        expected |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        unexpected = [name for name in there if name not in expected]
        if unexpected:
            raise MisuseError(f"{self.files.path} has {_some(unexpected)}, which this model does not have")
        blank = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in self._buffers]
        if blank:
            raise MisuseError(
                f"the buffer {_some(blank)} is on the meta device and is not among a model's weights: build the model under "
                "zero.init, which computes it"
            )

    def _refuse_shapes(self, model: nn.Module) -> None:
        wanted = {self._source(parameter): parameter for parameter in self._parameters}
        buffers = dict(model.named_buffers())
        for name, tensor in [*wanted.items(), *((name, buffers[name]) for name in self._buffers)]:
            spec = self.files.entries[name].spec
            if spec.shape != tuple(tensor.shape):
                raise MisuseError(
                    f"{name!r} has shape {spec.shape} in {self.files.path}, and {tuple(tensor.shape)} in this model"
                )

    def _source(self, parameter: nn.Parameter) -> str:
        """By which of its names a parameter is in the files."""
        return next(name for name in self._parameters[parameter] if name in self.files.entries)

    def renamed(self, meta: dict[nn.Parameter, nn.Parameter]) -> None:
        """Parameters on the meta device were replaced: ``meta`` has the old one of each new one."""
        for fresh, old in meta.items():
            self._parameters[fresh] = self._parameters.pop(old)

    def fill(self, placement: Placement, unit: torch.Tensor) -> None:
        """Write a parameter's values to its place in ``unit``, which is as in the store; a piece at a time."""
        self._read(self._source(placement.parameter), placement.stored_view(unit), placement.dtype)

    def fill_buffers(self, model: nn.Module) -> None:
        """All that ``state_dict`` has."""
        modules = dict(model.named_modules())
        for name in self._buffers:
            where, _, last = name.rpartition(".")
            buffer = modules[where]._buffers[last]
            assert buffer is not None
            if buffer.is_meta:
                buffer = modules[where]._buffers[last] = torch.empty_like(buffer, device="cpu")
            self._read(name, buffer, buffer.dtype)

    @torch.no_grad()
    def _read(self, name: str, target: torch.Tensor, between: torch.dtype) -> None:
        """``between``: the type that values have on the way."""
        spec = self.files.entries[name].spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if not spec.nbytes:
            return
        if target.is_contiguous():
            target = target.as_strided((spec.numel,), (1,))
        size = spec.nbytes // target.shape[0]  # of a row
        step = max(1, PIECE // size)
        plain = target.dim() == 1 and target.stride() == (1,) and target.device.type == "cpu"
        direct = plain and dtype is between is target.dtype
        for start in range(0, target.shape[0], step):
            rows = target[start : start + step]
            if direct:
                self.files.read(name, start * size, rows.view(torch.uint8).numpy().data)
                continue
            data = torch.empty(rows.shape[0] * size, dtype=torch.uint8, device="cpu")
            self.files.read(name, start * size, data.numpy().data)
            rows.copy_(data.view(dtype).view(rows.shape).to(between))


def _aliases(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter's names; the first is the one that paging gives it."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
