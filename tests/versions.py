"""What versions of torch have and lack, for tests that run on all that are supported."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tiered.zero.paging.tensors.compiling import SUPPORTED

__all__ = ["ADAM_DECOUPLES", "COMPILES", "FULLY_SHARDS", "MUON", "NO_DIST"]

NO_DIST: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
"""Of functions of torch.distributed.checkpoint: one process, without a process group."""
ADAM_DECOUPLES = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
"""Whether torch.optim.Adam has a weight decay that is decoupled. torch 2.6 has it as torch.optim.AdamW alone."""
COMPILES = pytest.mark.skipif(not SUPPORTED, reason=f"paged models cannot be compiled with torch {torch.__version__}")
MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason=f"torch {torch.__version__} has no Muon")
FULLY_SHARDS = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason=f"fully_shard of torch {torch.__version__} needs a device"
)
