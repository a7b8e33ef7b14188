"""What torch's autograd does at this moment, as far as paging has to know."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiered import MisuseError

__all__ = [
    *("drop_queued", "graph_task", "hooks_active", "in_backward", "is_called_within", "pop_hooks", "push_hooks"),
    *("refuse_tracing", "restore_recording", "without_grad"),
]

_MODES = torch._C._TorchDispatchModeKey


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


def push_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Have them in force until ``pop_hooks``. The context manager of torch would keep an object for it, which an exception may
    lose."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_hooks() -> None:
    """The innermost pair, which is in force no longer."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


_unrecorded: set[without_grad] = set()
"""Those that are in force, or that an exception has kept from ending."""


class without_grad:  # as torch.no_grad, which it is but for ``restore_recording``
    """``with without_grad():`` nothing is recorded."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        if self._before:
            _unrecorded.add(self)
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)
        _unrecorded.discard(self)


def restore_recording() -> None:
    """Nothing of ours is running: have torch record again where an exception struck as a ``without_grad`` ended."""
    if _unrecorded:
        torch._C._set_grad_enabled(True)
        _unrecorded.clear()


def refuse_tracing() -> None:
    """Raise MisuseError where torch does not compute but writes down what would be computed: with tensors that have no values,
    or with the addresses of parameters that will be elsewhere."""
    what = ""
    if torch.compiler.is_compiling():  # first, for what comes next cannot be compiled
        what = "torch.compile, or torch.export,"
    elif torch._C._get_tracing_state() is not None:
        what = "torch.jit.trace"
    elif torch._C._len_torch_dispatch_stack():
        if torch._C._get_dispatch_mode(_MODES.FAKE) is not None:
            what = "torch.export, or a FakeTensorMode,"
        elif any(torch._C._get_dispatch_mode(mode) is not None for mode in (_MODES.PROXY, _MODES.FUNCTIONAL)):
            what = "torch.fx (make_fx)"
    elif _compiles(torch._C._dynamo.eval_frame.get_eval_frame_callback()):  # it gave the model up, and would compile us instead
        what = "torch.compile"
    if what:
        raise MisuseError(
            f"{what} cannot look into a paged model, whose parameters are in memory only while they are used: give it a model "
            "that is not paged (one made anew, with load_state_dict(model.state_dict()))"
        )


def _compiles(callback: object) -> bool:
    """Whether torch.compile is at work with ``callback``. Its backend "eager" runs everything as it is, and is right."""
    if not callable(callback):
        return False
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return getattr(callback, "compiler_name", None) != "eager"


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
