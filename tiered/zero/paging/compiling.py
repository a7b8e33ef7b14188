"""Keep dynamo, the front end of torch.compile, out of paging, and ask it what it is doing.

torch.compile works on a paged model because dynamo sees no part of a pager: it compiles what a module computes between its hooks,
while the module's units are held. A call of a function that is ``uncompiled`` breaks the graph, and runs as it is written.

All functions of dynamo that paging needs are here. They are private functions of torch, but of C: torch.compile's own modules,
which take seconds to import, are imported when a program uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tiered import MisuseError

__all__ = ["refuse_constants", "traced", "uncompiled", "unentered"]

_dynamo: Any = torch._C._dynamo.eval_frame
_SKIP, _DEFAULT = _dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT
ENTERED = "tiered moves parameters between memory and store here, which is not compiled: leave out fullgraph=True"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Have dynamo compile neither ``function`` nor what that calls: its call breaks the graph. It costs a call nothing, unlike
    ``torch.compiler.disable``, which adds a function around this one."""
    return _breaking(_skipped(function, _SKIP))


def unentered(function: _Function) -> _Function:
    """Have dynamo break the graph at ``function`` and not compile it, but what it calls."""
    return _breaking(_skipped(function, _DEFAULT))


def traced(function: _Function) -> _Function:
    """Have dynamo trace ``function`` as a part of what it compiles, and leave it as it is where that is not compiled."""
    return _skipped(function, _SKIP)


def _skipped(function: Any, within: Any) -> Any:
    _dynamo.set_code_exec_strategy(function.__code__, _dynamo._FrameExecStrategy(_SKIP, within))
    return function


def _breaking(function: Any) -> Any:
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, ENTERED
    return function


def refuse_constants() -> None:
    """Raise MisuseError where inductor would keep the values of parameters in what it makes of a model."""
    if callable(_dynamo.get_eval_frame_callback()):
        config: Any = sys.modules.get("torch._inductor.config")
        if config is not None and config.freezing:
            raise MisuseError(
                "torch._inductor.config.freezing keeps copies of parameters in compiled code, all of them in memory: compile a "
                "paged model without it"
            )
