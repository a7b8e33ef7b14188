"""Find the part of a parameter in memory that this process has: the parameter itself, or this rank's shard of a DTensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tiered.errors import MisuseError
from tiered.zero.paging.units import is_dense
from tiered.zero.paging.update import all_finite, flat_view

__all__ = ["LocalShard"]

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LocalShard:
    """Part of a parameter in this process. ``shape`` and ``stride`` are those of the part; *flat* is its elements in memory
    order.

    Raises MisuseError for a parameter that cannot have states: on the meta device, of another type, with gaps in memory.
    """

    def __init__(self, parameter: nn.Parameter, name: str, group: int) -> None:
        self.parameter, self.name, self.group = parameter, name, group
        here = _part(parameter.detach())
        self.shape, self.stride, self.dtype = here.shape, here.stride(), here.dtype
        self.device = here.device
        if here.is_meta:
            raise MisuseError(f"{name} is on the meta device: give it values before making the optimizer")
        if here.dtype not in TYPES or here.layout is not torch.strided:
            raise MisuseError(f"{name} is {here.dtype}, {here.layout}: states are for dense {', '.join(map(str, TYPES))}")
        if self.numel and not is_dense(self.shape, self.stride):
            raise MisuseError(f"{name} has gaps in memory: make it contiguous before making the optimizer")

    values: torch.Tensor
    """Its own memory, flat, wherever it is; from ``bind`` to ``unbind``."""
    gradient: torch.Tensor
    """The same of its gradient, or a copy in the parameter's order."""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def part(self) -> torch.Tensor:
        """Return the part that is here, as it is now."""
        return _part(self.parameter.detach())

    @property
    def divided(self) -> bool:
        """Return whether the parameter is a DTensor."""
        return hasattr(self.parameter, "to_local")

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups of the ranks that have other parts of the parameter."""
        if not self.divided:
            return []
        mesh: Any = self.parameter.device_mesh  # type: ignore[attr-defined]
        return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]

    def ends_at(self, block: int) -> bool:
        """Return whether all shards of the DTensor, in memory order, begin and end at multiples of ``block`` elements, or with
        the parameter. The same on all ranks."""
        whole: Any = self.parameter
        divided = [
            (placement, size) for placement, size in zip(whole.placements, whole.device_mesh.shape, strict=True) if size > 1
        ]
        sharded = [(placement, size) for placement, size in divided if not placement.is_replicate()]
        if not sharded:
            return True
        if len(sharded) > 1 or not sharded[0][0].is_shard(0) or not whole.is_contiguous():
            return False
        rows = -(-whole.shape[0] // sharded[0][1])  # as torch.chunk divides
        return bool(rows >= whole.shape[0] or rows * whole.shape[1:].numel() % block == 0)

    def describe(self) -> list[Any]:
        """Return what must be the same for its states to fit, as JSON."""
        found: list[Any] = [list(self.shape), list(self.stride), str(self.dtype)]
        if self.divided:
            whole: Any = self.parameter
            found += [list(whole.shape), str(whole.placements), list(whole.device_mesh.get_coordinate() or [])]
        return found

    def shown_whole(self) -> str:
        """Return what is the same on all ranks that have a shard of this DTensor."""
        whole: Any = self.parameter
        return f"{self.dtype} of shape {tuple(whole.shape)}, {whole.placements} over {tuple(whole.device_mesh.shape)}"

    # -- for a step --------------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Set ``values`` and ``gradient`` for a step. Raises MisuseError where the parameter is not what it was, or its
        gradient is sparse."""
        here = _part(self.parameter.detach())
        if (here.shape, here.stride(), here.dtype, here.device) != (self.shape, self.stride, self.dtype, self.device):
            raise MisuseError(f"{self.name} has another shape, type or device than when the optimizer was made: make a new one")
        self.values = flat_view(here)
        gradient: Any = self.parameter.grad
        if gradient is None:
            return
        if self.divided and gradient.placements != self.parameter.placements:  # type: ignore[attr-defined]
            gradient = gradient.redistribute(placements=self.parameter.placements)  # type: ignore[attr-defined]
        gradient = _part(gradient.detach())
        if gradient.layout is not torch.strided:
            raise MisuseError(
                f"{self.name} has a sparse gradient, for which there is no step here: make its embedding with sparse=False, "
                "or keep torch.optim.SparseAdam for it, with states in memory"
            )
        self.gradient = flat_view(gradient) if gradient.stride() == self.stride else self.flat(gradient, gradient.dtype)

    def unbind(self) -> None:
        for what in ("values", "gradient"):
            self.__dict__.pop(what, None)

    def refuse_infinite(self) -> None:
        """Raise MisuseError for a bf16 parameter whose gradient is not finite, because its master could not be."""
        if self.dtype is torch.bfloat16 and not all_finite(self.gradient):
            raise MisuseError(
                f"the gradient of {self.name} is not finite, and a bfloat16 parameter cannot follow it: nothing was updated; "
                "use torch.amp.GradScaler, or leave this step out"
            )

    # -- what is like it ---------------------------------------------------------------------------------------------------

    def flat(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat copy of ``value``, which has the shape of the parameter or of the part that is here."""
        return flat_view(torch.empty_strided(self.shape, self.stride, dtype=dtype, device="cpu").copy_(self._cut(value)))

    def like(self, flat: torch.Tensor) -> torch.Tensor:
        """Return ``flat`` in the shape of the parameter, as a DTensor with its placements where it is one."""
        part = flat.as_strided(self.shape, self.stride)
        if not self.divided:
            return part
        part = part.to(self.device)  # where its collectives are
        from torch.distributed.tensor import DTensor  # it is imported already, and takes long elsewhere

        whole: Any = self.parameter
        return DTensor.from_local(part, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride())

    def _cut(self, value: Any) -> torch.Tensor:
        if hasattr(value, "to_local"):
            whole: Any = self.parameter
            if self.divided and value.placements != whole.placements:
                value = value.redistribute(placements=whole.placements)
            return _part(value)
        if self.divided and value.shape == self.parameter.shape and value.shape != self.shape:
            from torch.distributed.tensor import DTensor, Replicate

            mesh: Any = self.parameter.device_mesh  # type: ignore[attr-defined]
            whole = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return _part(whole.redistribute(placements=self.parameter.placements))  # type: ignore[attr-defined]
        if value.shape != self.shape:
            raise MisuseError(f"{self.name} has shape {tuple(self.shape)}, and a state for it has {tuple(value.shape)}")
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def _part(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that is here, as an ordinary tensor."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()
