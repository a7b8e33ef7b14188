"""What ranks find imported already. Every optimizer imports ``torch._dynamo``, which takes seconds, as torch itself does."""

from __future__ import annotations

import gc
import importlib

for _name in (
    *("pytest", "safetensors.torch", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint.state_dict", "tests.zero.models", "tiered.cli", "tiered.zero"),
):
    importlib.import_module(_name)
gc.collect()
gc.freeze()  # a collection would look at all of that again
