"""What torch's autograd does at this moment, as far as paging has to know."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

__all__ = ["drop_queued", "graph_task", "hooks_active", "in_backward", "is_called_within"]


def graph_task() -> int:
    """The number of the backward pass that runs this function, -1 outside."""
    number: int = torch._C._current_graph_task_id()
    return number


def in_backward() -> bool:
    """Whether a backward pass runs this function: a hook, or a part of forward that is computed again."""
    return graph_task() != -1


def hooks_active() -> Any:
    """The saved-tensor hooks in force, of whoever (torch.utils.checkpoint, for one); the innermost pair wins."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def drop_queued() -> None:
    """Autograd's queue of this thread keeps what an exception left in it, with all that the graph saved (aliases of units,
    too), until the thread's next backward. Here is one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True, device="cpu").clone().backward()  # type: ignore[no-untyped-call]


def is_called_within(modules: set[nn.Module]) -> bool:
    """Whether one of them is being called, further up in this thread."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") in modules:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
