"""Keep dynamo, the front end of torch.compile, out of paging, and ask it what it is doing.

torch.compile works on a paged model because dynamo sees no part of a pager: it compiles what a module computes between its
hooks, while the module's units are held. A call of a function that is ``uncompiled`` breaks the graph, and runs as it is.

All functions of dynamo that paging needs are here. They are private functions of torch, but of C: torch.compile's own modules,
which take seconds to import, are imported when a program uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from tiered.errors import MisuseError

__all__ = [
    "ForwardHooks",
    "around",
    "break_graph",
    "is_compiled",
    "is_of_forward",
    "keep_out",
    "passed",
    "refuse_constants",
    "traced",
    "uncompiled",
    "unentered",
]

_dynamo: Any = torch._C._dynamo.eval_frame
SUPPORTED = all(hasattr(_dynamo, name) for name in ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"))
"""Older versions of torch have no way to say which functions dynamo leaves alone."""
_SKIP, _DEFAULT = (_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT) if SUPPORTED else (None, None)


def _is_borrowed() -> bool:
    """Return whether dynamo gives a reference away that it does not have, each time it is asked what compiles: torch 2.6 does.
    Before Python 3.12 some ten thousand forwards of a unit would then free None itself, which ends the process."""
    before = sys.getrefcount(None)
    for _ in range(64):
        _dynamo.get_eval_frame_callback()
    return sys.getrefcount(None) < before - 32  # other threads may use None meanwhile


_IS_BORROWED = _is_borrowed()
ENTERED = "tiered moves parameters between memory and store here, which is not compiled: leave out fullgraph=True"
KEY = -1
"""Of a hook, among the numbers that torch gives to hooks."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Have dynamo compile neither ``function`` nor what that calls: its call breaks the graph. It costs a call nothing, unlike
    ``torch.compiler.disable``, which adds a function around this one."""
    _skip(function, _SKIP)
    _break(function)
    return function


def unentered(function: _Function) -> _Function:
    """Have dynamo break the graph at ``function``, and compile what it calls."""
    _skip(function, _DEFAULT)
    _break(function)
    return function


def traced(function: _Function) -> _Function:
    """Have dynamo trace ``function`` where it is called by what is compiled. Elsewhere neither it nor what it calls is."""
    _skip(function, _SKIP)
    return function


def passed(function: _Function) -> _Function:
    """Have dynamo trace ``function`` where it is called by what is compiled. Elsewhere what it calls is compiled."""
    _skip(function, _DEFAULT)
    return function


_known: set[CodeType] = set()
"""Code of functions that say themselves what dynamo does with them."""


def _skip(function: Any, within: Any) -> None:
    _known.add(function.__code__)
    if SUPPORTED:
        _dynamo.set_code_exec_strategy(function.__code__, _dynamo._FrameExecStrategy(_SKIP, within))


def _break(function: Any) -> None:
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, ENTERED


def keep_out(package: str) -> None:
    """Have all functions of the modules of ``package`` that were imported ``uncompiled``, but for those that say otherwise."""
    modules = [module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")]
    folders = tuple(folder for module in modules if module.__name__ == package for folder in module.__path__)
    for module in modules:
        for found in list(vars(module).values()):
            if getattr(found, "__module__", None) == module.__name__:
                for function in _functions(found):
                    _keep_out(function, folders)


def _functions(found: Any) -> Iterator[FunctionType]:
    """Return the functions that ``found`` is, or has as a class."""
    for one in vars(found).values() if isinstance(found, type) else (found,):
        if isinstance(one, property):
            yield from (get for get in (one.fget, one.fset, one.fdel) if isinstance(get, FunctionType))
        elif isinstance(one, classmethod | staticmethod):
            if isinstance(one.__func__, FunctionType):
                yield one.__func__
        elif isinstance(one, FunctionType):
            yield one


def _keep_out(function: Any, folders: tuple[str, ...]) -> None:
    inner = function
    while hasattr(inner, "__wrapped__"):  # a context manager, whose outer code is of the standard library
        inner = inner.__wrapped__
    if inner.__code__.co_filename.startswith(folders) and inner.__code__ not in _known:
        _skip(inner, _SKIP)
        _break(inner)
        _break(function)


@cache
def _twin(code: CodeType) -> CodeType:
    """Return another object of the same code: what dynamo does with code is a property of the object."""
    return code.replace(co_name=code.co_name)


def around(module: nn.Module, function: _Function) -> _Function:
    """Return ``function``, which calls the forward of ``module``, for dynamo to see through. A single operation of torch is
    left as it is where nothing around it is compiled: all layers of one kind would be in one cache, which has eight entries."""
    if type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children()):
        function.__code__ = _twin(function.__code__)
        return traced(function)
    return passed(function)


class HeldUnit(Protocol):
    """Unit of a paged model."""

    @property
    def in_hand(self) -> bool: ...


class ForwardHooks:
    """Hooks before and after the forward of a module, which hold its units. Dynamo leaves them out where the units are held
    already, by a module around this one, so that it can compile that one in one piece. It guards what is asked here, and the
    class of each parameter that is used."""

    def __init__(
        self,
        units: Sequence[HeldUnit],
        before: Callable[[nn.Module, Any], None],
        after: Callable[[nn.Module, Any, Any], None],
    ) -> None:
        self.units, self._enter, self._leave = tuple(units), before, after
        self.entered = False

    def register(self, module: nn.Module) -> None:
        """Register the hooks, before all others and after all others. Under one key in all modules: that of torch, a running
        number, would be guarded, so that nothing could be compiled once for several layers."""
        handle = module.register_forward_pre_hook(self.before)
        module._forward_pre_hooks[KEY] = module._forward_pre_hooks.pop(handle.id)
        module._forward_pre_hooks.move_to_end(KEY, last=False)  # type: ignore[attr-defined]
        handle = module.register_forward_hook(self.after, always_call=True)
        for hooks in (module._forward_hooks, module._forward_hooks_always_called):
            hooks[KEY] = hooks.pop(handle.id)  # type: ignore[assignment]

    @traced
    def before(self, module: nn.Module, args: Any) -> None:
        if is_dynamo_compiling() and self._are_held():
            return
        self.entered = True
        self._enter(module, args)

    @traced
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_dynamo_compiling() and not self.entered:
            return
        self._leave(module, args, output)
        self.entered = False

    @traced
    def _are_held(self) -> bool:
        for unit in self.units:
            if not unit.in_hand:
                return False
        return len(self.units) > 0


def is_of_forward(hook: object) -> bool:
    """Return whether ``hook`` is one of ``ForwardHooks``."""
    return isinstance(getattr(hook, "__self__", None), ForwardHooks)


def break_graph(caller: str) -> None:
    """Break the graph where dynamo, a function of the module ``caller``, asks a parameter that is out what it is like: it would
    trace it as a tensor of a class of its own, with the geometry of a placeholder."""
    if caller.startswith("torch._dynamo.variables."):
        errors: Any = sys.modules["torch._dynamo.exc"]
        getattr(errors, "unimplemented_v2", errors.unimplemented)(  # its name in older versions
            gb_type="Parameter of a paged model that is out of memory", context="", explanation=ENTERED, hints=[]
        )


def _compiler() -> object:
    """Return what compiles the functions that this thread calls; nothing that can be called where none are."""
    if not _IS_BORROWED:
        found: object = _dynamo.get_eval_frame_callback()
        return found
    found = _dynamo.set_eval_frame(None)
    _dynamo.set_eval_frame(found)
    return found


def refuse_constants() -> None:
    """Raise MisuseError where inductor would keep the values of parameters in what it makes of a model, and where a version of
    torch is compiling that cannot be told what to leave alone."""
    if not SUPPORTED and callable(_compiler()):
        raise MisuseError(
            f"torch.compile of a paged model needs a newer torch than {torch.__version__}: leave torch.compile out, or install "
            "the newest torch"
        )
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and config.freezing and _is_within("torch._dynamo.eval_frame"):
        raise MisuseError(
            "torch._inductor.config.freezing keeps copies of all parameters in what it compiles, as they were then: compile a "
            "paged model without it"
        )


def is_compiled() -> bool:
    """Return whether torch.compile sees to what this thread computes: also in a hook of paging, which it leaves alone."""
    return callable(_compiler()) or _is_within("torch._dynamo.eval_frame")


def _is_within(module: str) -> bool:
    """Return whether a function of ``module`` is being called further up in this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None
