"""What element types parameters have in the store, and what ones modules compute with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiered.errors import MisuseError

__all__ = ["Policy"]


@dataclass(frozen=True)
class Policy:
    """Parameters of type ``compute`` are stored as ``storage`` (None: as they are); others as they are.

    ``Policy(storage=torch.bfloat16, compute=torch.float32)`` is for processors without fast bf16: a step moves the bytes of
    bf16 parameters, and modules compute in fp32 with the bf16 values. The model is built in fp32; its parameters are rounded
    (to even) when they are paged and when values are loaded, and gradients are fp32. Masters are as for parameters of type
    ``storage``. Raises MisuseError for types other than bfloat16 or float16, and float32.
    """

    storage: torch.dtype | None = None
    compute: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.storage not in (None, torch.bfloat16, torch.float16) or self.compute is not torch.float32:
            raise MisuseError(f"parameters can be stored as bfloat16 or float16 and computed as float32, not as {self}")

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The type in the store of a parameter that is ``dtype``."""
        return self.storage if self.storage is not None and dtype is self.compute else dtype
