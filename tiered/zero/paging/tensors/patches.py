"""What paging changes of torch, because torch asks no class about it: in force from the first paged model of a process until
the last one is gone. ``import tiered.zero`` changes nothing.

- ``Tensor.data``, ``Tensor.set_`` and ``to_dlpack`` refuse to share memory that is not there; ``nn.Parameter.data`` tells the
  unit that holds a parameter what may be written to.
- Functions that read memory of tensors without asking for their class take copies: ``torch.tensor`` and the like, calls of
  scripted functions, the transforms of torch.func, the gradients that a backward pass begins with.
- ``torch.autograd.backward(inputs=)`` takes slices in place of a parameter that is divided into them. Where nothing that it is
  given needs a gradient, its error names a paged model that is quantised, of which nothing is trained.
- Before torch 2.13, what finds the node of a tensor in the graph (``get_gradient_edge``, ``register_multi_grad_hook``) keeps
  the view by which it finds it: the node of a view in the store is one of Python, which forgets its own with the view.
- Functions of lists (``clip_grad_norm_``) take their list forms for stored gradients, as torch adds DTensor there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.utils._device
import torch.utils._foreach_utils
import torch.utils.dlpack
from torch import nn

from tiered.errors import MisuseError
from tiered.zero.paging.tensors.compiling import passed, traced
from tiered.zero.paging.tensors.functions import changed, leaves
from tiered.zero.paging.tensors.parameters import PagedParameter, PagedStorage
from tiered.zero.paging.tensors.sliced import Divided, slices_of
from tiered.zero.paging.tensors.stored import StoredTensor, copied, is_without_memory, refuse_in_transform

__all__ = ["in_force_for"]

_DATA: Any = torch._C.TensorBase.data


def _data(tensor: Any) -> Any:
    return _DATA.__get__(tensor)


def _set_data(tensor: Any, values: Any) -> None:
    if isinstance(values, StoredTensor) and not isinstance(tensor, StoredTensor):
        raise MisuseError(
            f"{values.source.shown} has no memory that another tensor could share: write tensor.data.copy_(values)"
        )
    _DATA.__set__(tensor, values)


def _data_of_parameter(parameter: Any) -> Any:
    values = _DATA.__get__(parameter)
    handle = None if isinstance(parameter, PagedParameter) else parameter.__dict__.get("_tiered")
    if handle is not None:
        handle.lend(values)
    return values


_data.__name__ = _data_of_parameter.__name__ = "data"  # by which functions are known
# Properties, which C asks for themselves: where a signal strikes a descriptor that torch asks of its class, the process ends.
_WATCHED_DATA = property(_data, _set_data)
"""``torch.Tensor.data``, which refuses memory of a tensor that has none: torch asks only the tensor that is assigned to."""
_PARAMETER_DATA = property(_data_of_parameter, _set_data)
"""``nn.Parameter.data``, which also tells the unit that holds a parameter what may be written to. A write to ``parameter.data``
leaves ``parameter._version`` as it is: only the version of the tensor that was given tells of it."""


def _with_copies(takes: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Return ``takes``, which does not ask tensors for their class, with copies of what is stored as its argument ``at``."""

    @passed  # dynamo would call what it makes of it where a graph of its own calls the function
    @functools.wraps(takes)
    def take(*args: Any, **kwargs: Any) -> Any:
        if any(is_without_memory(value) for value in leaves(args[at])):
            args = (*args[:at], copied(args[at]), *args[at + 1 :])
        return takes(*args, **kwargs)

    return take


def _unwritten(takes: Callable[..., Any], given: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """Return ``takes``, which runs a function on transformed arguments, with ``given(copy, *args)``, which copies what is
    stored of them."""

    @passed
    @functools.wraps(takes)
    def take(*args: Any, **kwargs: Any) -> Any:
        if not any(map(is_without_memory, leaves(args))):
            return takes(*args, **kwargs)
        with _WrittenTo() as copy:
            return takes(*given(copy, *args), **kwargs)

    return take


def _mapped(copy: Callable[[Any], Any], func: Any, size: Any, dims: Any, args: Any, *rest: Any) -> Sequence[Any]:
    """Copy the arguments of vmap that have a dimension to be cut along."""
    return func, size, dims, [arg if dim is None else copy(arg) for dim, arg in zip(dims, args, strict=True)], *rest


def _dual(copy: Callable[[Any], Any], func: Any, primals: Any, tangents: Any, *rest: Any) -> Sequence[Any]:
    """Copy the arguments of jvp."""
    return func, changed(primals, copy), changed(tangents, copy), *rest


class _WrittenTo:
    """Make copies for a transform of torch.func, and raise MisuseError after it where its function wrote to one of them."""

    def __init__(self) -> None:
        self._copies: list[tuple[Any, torch.Tensor, int]] = []

    def __enter__(self) -> Callable[[Any], Any]:
        return self._copy

    def _copy(self, value: Any) -> Any:
        if not is_without_memory(value):
            return value
        recording = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(recording):  # of inference, nothing would tell a write to it
            made: torch.Tensor = copied(value)
        self._copies.append((value, made, made._version))
        return made

    def __exit__(self, *_: object) -> None:
        for value, made, version in self._copies:
            if made._version != version:
                refuse_in_transform([value])


def _with_values(takes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``takes``, which reads memory of tensors that it does not ask for their class, with copies of what is stored, and
    of lists of it. What it writes to a copy is written to what that is of."""

    @passed
    @functools.wraps(takes)
    def take(*args: Any, **kwargs: Any) -> Any:
        if not (any(map(_has_no_values, args)) or any(map(_has_no_values, kwargs.values()))):
            return takes(*args, **kwargs)
        copies: dict[int, tuple[torch.Tensor, int]] = {}

        def copy(value: Any) -> Any:
            if not is_without_memory(value):
                return value
            if id(value) not in copies:
                made = value.clone()
                copies[id(value)] = made, 0 if made.is_inference() else made._version
            return copies[id(value)][0]

        given = changed((args, kwargs), copy)
        found = takes(*given[0], **given[1])
        for value in leaves((args, kwargs)):
            made, version = copies.get(id(value), (None, 0))
            if made is not None and not made.is_inference() and made._version != version:
                with torch.no_grad():
                    value.copy_(made)
        return found

    return take


def _as_it_is(takes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``takes``, which gives back the tensor that it is given, or one on its memory, unless it is to convert or to copy.
    """
    with_values = _with_values(takes)

    @passed
    @functools.wraps(takes)
    def take(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_without_memory(data) or args or kwargs.get("copy"):
            return with_values(data, *args, **kwargs)
        made = takes(torch.empty(0, dtype=data.dtype, device=data.device, requires_grad=data.requires_grad), **kwargs)
        if (made.dtype, made.device) != (data.dtype, data.device) or made.requires_grad > data.requires_grad:
            return with_values(data, *args, **kwargs)
        return data if made.requires_grad == data.requires_grad else data.detach()

    return take


def _with_memory(takes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``takes``, which gives memory of a tensor away, and refuses one that has none."""

    @passed
    @functools.wraps(takes)
    def take(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor.__dlpack__() if is_without_memory(tensor) else takes(tensor, *args, **kwargs)

    return take


def _in_place(takes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``takes``, which writes to the very tensor that it was given, and refuses one that is stored."""

    @passed
    @functools.wraps(takes)
    def take(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if is_without_memory(tensor):
            raise MisuseError(f"{tensor.source.shown}: torch.func.functionalize cannot take it: give it a copy (.clone())")
        return takes(tensor, *args, **kwargs)

    return take


def _on_memory(takes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``takes``, which puts a tensor on the memory of another one, or of a storage, and refuses what has none."""

    @passed
    @functools.wraps(takes)
    def take(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        for given in (*args[:1], *kwargs.values()):
            if is_without_memory(given) or isinstance(given, PagedStorage):
                shown = given.source.shown if is_without_memory(given) else given.tiered[1]
                raise MisuseError(f"{shown} has no memory that set_ could put another tensor on: use a copy (.clone())")
        return takes(tensor, *args, **kwargs)

    return take


@traced
def _has_no_values(value: Any) -> bool:
    """Return whether ``value`` is stored, or a list that has something that is."""
    if isinstance(value, list | tuple):
        return any(issubclass(kind, StoredTensor) for kind in set(map(type, value)))
    return isinstance(value, StoredTensor)


def _with_slices(takes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``takes``, a function with an argument ``inputs``, with slices in place of parameters that are divided."""

    @passed
    @functools.wraps(takes)
    def take(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs")
        if inputs is not None:
            given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            kwargs["inputs"] = [part for one in given for part in _parts(one)]
        return takes(*args, **kwargs)

    return take


def _saying_why(takes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``takes``, a backward pass, whose error says what is not trained."""

    @passed
    @functools.wraps(takes)
    def take(*args: Any, **kwargs: Any) -> Any:
        try:
            return takes(*args, **kwargs)
        except RuntimeError as error:
            given = [one for one in leaves((args[:1], kwargs.get("tensors"))) if isinstance(one, torch.Tensor)]
            why = [said for ask in list(_models.values()) if (said := ask()) is not None]
            if type(error) is not RuntimeError or not why or any(one.requires_grad for one in given):
                raise
            raise RuntimeError(f"{error}: {why[0]}") from None

    return take


def _with_view(takes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``takes``, which finds the node that accumulates the gradient of a tensor by the node of a view, with a view that
    is there meanwhile."""

    @passed
    @functools.wraps(takes)
    def take(tensor: Any) -> Any:
        if not is_without_memory(tensor) or not tensor.requires_grad or tensor.grad_fn is not None:
            return takes(tensor)
        with torch.enable_grad():
            view = tensor.view_as(tensor)
        return view.grad_fn.next_functions[0][0]

    return take


def _parts(value: Any) -> list[Any]:
    if is_without_memory(value) and value.step is None and isinstance(value.source, Divided):
        return list(slices_of(value.source.parameter))
    return [value]


def _changes() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield what is changed: of what, its name, and what makes of it what takes its place."""
    yield torch.Tensor, "data", lambda _: _WATCHED_DATA
    yield nn.Parameter, "data", lambda _: _PARAMETER_DATA
    yield torch.Tensor, "set_", _on_memory
    yield torch.utils.dlpack, "to_dlpack", _with_memory
    yield torch, "to_dlpack", _with_memory
    for name in ("as_tensor", "asarray"):
        yield torch, name, _as_it_is
    for name in ("tensor", "sparse_coo_tensor", "sparse_csr_tensor", "sparse_compressed_tensor"):
        yield torch, name, _with_values
    yield torch.Tensor, "new_tensor", _with_values
    yield torch._C.ScriptFunction, "__call__", _with_values
    yield torch._C.ScriptMethod, "__call__", _with_values
    yield torch._functorch.vmap, "_flat_vmap", functools.partial(_unwritten, given=_mapped)
    yield torch._functorch.eager_transforms, "_jvp_with_argnums", functools.partial(_unwritten, given=_dual)
    yield torch._functorch.eager_transforms, "_wrap_for_grad", functools.partial(_with_copies, at=0)
    yield torch._functorch.eager_transforms, "_wrap_functional_tensor", _in_place
    yield torch.autograd, "_make_grads", functools.partial(_with_copies, at=1)
    yield torch.autograd, "backward", lambda found: _saying_why(_with_slices(found))
    if torch.__version__ < "2.13":
        yield torch.autograd.graph, "_get_grad_fn_or_grad_acc", _with_view


_ABSENT = object()
_FOREACH: list[type] = getattr(torch.utils._foreach_utils, "_foreach_supported_types", [])
_before: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""What is changed now: of what, and its name; what was there before, and what is there."""
_models: dict[int, Callable[[], str | None]] = {}
"""By number, of the paged models that there are: what says why nothing of one is trained."""


def in_force_for(model: object, untrained: Callable[[], str | None]) -> None:
    """Have the changes in force at least as long as ``model`` lives, which is not held here. ``untrained``: says why nothing of
    it is trained; None where something is, or where that is as in memory."""
    _models[id(model)] = untrained  # first: a model that ends meanwhile takes nothing away
    weakref.finalize(model, _gone, id(model)).atexit = False
    _put_in_force()


def _gone(model: int) -> None:
    _models.pop(model, None)
    if not _models:
        _take_away()


def _put_in_force() -> None:
    torch.utils._device._device_constructors()  # made once: a default device knows functions by those that torch has until here
    builtins: Any = torch.jit._builtins
    builtins._get_builtin_table()  # made once, too
    for owner, name, make in _changes():
        found = getattr(owner, name, _ABSENT)
        if (
            found is _ABSENT or (owner, name) in _before
        ):  # of another version of torch: what that gives needs a check of its own
            continue
        made = make(found)
        _before[owner, name] = owner.__dict__.get(name, _ABSENT), made
        setattr(owner, name, made)
        known = builtins._find_builtin(found)
        if known is not None:
            builtins._register_builtin(made, known)
    if StoredTensor not in _FOREACH:
        _FOREACH.append(StoredTensor)


def _take_away() -> None:
    """Give torch back what it had; not where somebody has put something else there since, which may call what was ours."""
    builtins: Any = torch.jit._builtins
    while _before:
        (owner, name), (there, made) = _before.popitem()
        if owner.__dict__.get(name) is not made:
            continue
        if there is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, there)
        builtins._builtin_table.pop(id(made), None)  # another function may have its number from here on
    if StoredTensor in _FOREACH:
        _FOREACH.remove(StoredTensor)
