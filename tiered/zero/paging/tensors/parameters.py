"""Let a parameter whose values are in the store be used like any other: read, written to, viewed, asked for its shape.

While nobody holds its unit, a parameter has the class ``PagedParameter``, a subclass of its own one. Each function of torch
that is given such a parameter calls ``__torch_function__`` instead
(https://docs.pytorch.org/docs/stable/notes/extending.html), where there are four answers:

- What needs no values (shape, dtype, gradient, hooks) is answered by the parameter as it is, and what depends on strides by a
  tensor of the same geometry on the meta device.
- A view (``detach``, ``.data``, ``t``, an index) is a ``PagedView``: it has the geometry of the view, no memory, and the
  function that makes it, which is called again whenever the view is used. So a view never shows old values, and a write to it
  lands in the store.
- What cannot be right (another type, memory that would be shared) raises MisuseError.
- Everything else runs while the units are held. Autograd then records the parameter itself, and what it saves is packed as it
  is within forward: gradients through such reads arrive like all others.

A function that is given parameters of more units than ``SHARE`` of the largest size is given copies, made one after the other,
so that a list of all parameters needs no more of the pool than one of them. Functions of lists (``torch._foreach_...``) run on
one element after the other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.utils._device
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import get_gradient_edge

from tiered import MisuseError
from tiered.types import Access
from tiered.zero.paging.saved_tensors import in_backward
from tiered.zero.paging.tensors.compiling import break_graph, traced

__all__ = [
    "OTHER",
    "SHARE",
    "PagedParameter",
    "PagedView",
    "ParameterOwner",
    "asks_for_gradient",
    "into",
    "name_of",
    "paged_class",
    "unpage",
    "written_by",
]

_without_us: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""Calls a function of torch with no ``__torch_function__`` in force. It is of C: no exception leaves that state behind."""

Function = Callable[..., Any]
SHARE = 2
"""Units of the largest size that a function may hold at a time; there is room for eight."""


class ParameterOwner(Protocol):
    """What a paged model gives to its parameters (``parameter._tiered`` has a method ``access`` that returns it)."""

    def stride(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the strides that the parameter has when it is held."""
        ...

    def nbytes(self, parameters: Collection[torch.Tensor]) -> int:
        """Return the bytes of the units of ``parameters``."""
        ...

    @property
    def room(self) -> int:
        """Return how many bytes of units a function may hold at a time."""
        ...

    def accessing(
        self, parameters: Sequence[torch.Tensor], access: Access
    ) -> AbstractContextManager[Callable[[torch.Tensor], bool]]:
        """Hold the units of ``parameters``, which have their values meanwhile. Gives a function that tells whether a tensor
        shows memory of these units."""
        ...

    def coming(self, parameters: Sequence[torch.Tensor]) -> None:
        """Have the store read the units of ``parameters`` at once that are used next, one after the other."""
        ...

    def version(self, parameter: torch.Tensor) -> int:
        """Return a number that changes when the values of ``parameter`` do."""
        ...

    def recomputes(self) -> bool:
        """Return whether a part of forward is being computed again within backward."""
        ...

    def refuse_training(self) -> None:
        """Raise MisuseError where the parameters are for reading only."""
        ...


# -- what each function is -----------------------------------------------------------------------------------------------------


def name_of(func: Function) -> str:
    """Return the name of ``func``; of an attribute with ``.__get__``, ``.__set__`` or ``.__delete__``."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        return f"{getattr(owner, '__name__', None) or getattr(getattr(owner, 'fget', None), '__name__', '')}.{name}"
    return name.partition(".")[0]  # add.Tensor of torch.ops


def _words(names: str) -> set[str]:
    return set(names.split())


def _attributes(names: str, *ways: str) -> set[str]:
    return {f"{name}.__{way}__" for name in names.split() for way in ways or ("get",)}


AS_IT_IS = {
    *_attributes("requires_grad grad _grad _backward_hooks _post_accumulate_grad_hooks", "get", "set", "delete"),
    *_attributes("shape ndim dtype device layout is_leaf grad_fn _grad_fn retains_grad output_nr name names itemsize nbytes"),
    *_attributes("is_cpu is_cuda is_meta is_quantized is_sparse is_sparse_csr is_mkldnn is_mps is_xla is_xpu is_nested is_ipu"),
    *_attributes("is_vulkan is_maia is_mtia is_hpu _version grad_dtype _base _cdata"),
    *_words("size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed is_inference"),
    *_words("is_conj is_neg is_same_size is_shared is_pinned is_tensor __len__ __hash__ requires_grad_ register_hook"),
    *_words("register_post_accumulate_grad_hook retain_grad has_names _is_view _is_zerotensor result_type can_cast"),
    *_words("data_ptr untyped_storage _has_compatible_shallow_copy_type get_gradient_edge"),
}
"""Functions that take a parameter for what it is, without its values."""

GEOMETRY = {"stride", "is_contiguous", "storage_offset", "dim_order", "_debug_has_internal_overlap"}
"""Functions whose result depends on strides."""

LIKE = {
    *_words("zeros_like ones_like empty_like full_like rand_like randn_like randint_like"),
    *_words("new_zeros new_ones new_empty new_full new_empty_strided"),
}
"""Functions that make a new tensor of the same type, device or geometry."""

VIEWS = {
    *_attributes("data T mT H mH real imag"),
    *_words("detach alias view view_as reshape reshape_as t adjoint transpose swapaxes swapdims permute movedim moveaxis"),
    *_words("unsqueeze squeeze"),
    *_words("narrow select __getitem__ expand expand_as flatten unflatten ravel unbind split split_with_sizes chunk"),
    *_words("tensor_split hsplit vsplit dsplit diagonal as_strided unfold view_as_real view_as_complex broadcast_to __iter__"),
    *_words("atleast_1d atleast_2d atleast_3d"),
}
"""Functions whose result may be a view of their first argument."""

CONVERSIONS = {"to", "float", "double", "half", "bfloat16", "cpu", "cuda", "type", "contiguous", "type_as"}
"""Functions that return their argument where there is nothing to convert."""

SHARED = "would share the memory of the values with something outside of torch"
RESHAPED = "would change the shape, or the memory, of a parameter in place"
OTHER = (
    "this tensor has the class, or the attributes, of a paged parameter, and is another one: make it with "
    "torch.nn.Parameter(values), and leave the attribute _tiered out of what is copied from parameter.__dict__"
)
REFUSED = {
    **dict.fromkeys(("__dlpack__", "storage", "_typed_storage", "__cuda_array_interface__.__get__", "share_memory_"), SHARED),
    **dict.fromkeys(("pin_memory", "apply_", "map_", "map2_"), "needs the values in ordinary memory"),
    **dict.fromkeys(_words("set_ resize_ resize_as_ detach_ t_ squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_"), RESHAPED),
    **dict.fromkeys(_words("as_strided_ _set_data rename_ swap_tensors names.__set__ real.__set__ imag.__set__"), RESHAPED),
}
"""Functions that cannot be right, and why."""

WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel would reduce its gradients a second time",
    "torch.distributed.fsdp._fully_shard": "fully_shard would take its parameters out of the store",
    "torch.distributed.fsdp": "FullyShardedDataParallel would take its parameters out of the store",
}
"""Modules of torch that divide or reduce a model whose paging does that itself, and what they would do. The first that fits."""

COPIED = {"numpy"}
"""Functions whose result, which is no tensor, shares the memory of their argument."""

AUGMENTED = {f"__i{name}__" for name in _words("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift")}

VIEW_REFUSED = {
    *_attributes("requires_grad grad _grad _backward_hooks data", "set", "delete"),
    *_words("requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad get_gradient_edge"),
}
"""What a view that is made anew at each use cannot keep."""


def _writes(name: str) -> bool:
    """Return whether a function of this name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name in AUGMENTED
    return (name.endswith("_") and not name.endswith("__")) or name == "data.__set__"


# -- the classes ---------------------------------------------------------------------------------------------------------------


class PagedParameter(nn.Parameter):
    """A parameter while its values are in the store and nobody holds them. Use it like any other parameter."""

    held_class: type[nn.Parameter] = nn.Parameter

    def __new__(cls, *args: Any, **kwargs: Any) -> PagedParameter:
        """Refuse to make one: ``type(parameter)(values)`` has no place in a store. ``page`` changes the class of parameters."""
        raise MisuseError(
            "type(parameter)(values) cannot make a paged parameter: write to the one there is (parameter.copy_(values)), or "
            "use torch.nn.Parameter(values); offloading hooks, which do so, are not needed for a model in a store"
        )

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, tuple(types), args, dict(kwargs or {}))

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the parameter if it is given itself, as torch.nn.utils.parametrize does. torch asks no class about it."""
        if source is self and not args and not kwargs:
            return self
        raise MisuseError(f"{_shown((self,), {})}: set_ {RESHAPED}; use a copy (.clone()), or tiered.zero.gathered")

    def _use_count(self) -> int:
        """Refuse ``torch.utils.swap_tensors``, which asks this before it changes anything. torch asks no class about it."""
        raise MisuseError(f"{_shown((self,), {})}: swap_tensors {RESHAPED}; write to it instead: parameter.copy_(values)")

    def __deepcopy__(self, memo: Any) -> Any:
        raise _no_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return _array(self, dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        with ExitStack() as stack:
            _hold(stack, [self], [])
            return repr(self)  # of the class that it has now


class PagedView(torch.Tensor):
    """A view of a parameter whose values are in the store. It has no memory: ``made`` makes the view whenever it is used."""

    made: Callable[[], torch.Tensor]
    parameter: torch.Tensor
    geometry: torch.Tensor
    history: Any
    """What leads gradients to the parameter, where the view is given to a custom autograd function; else None."""
    version: int

    @staticmethod
    def of(parameter: torch.Tensor, geometry: torch.Tensor, made: Callable[[], torch.Tensor]) -> PagedView:
        """Return a view of ``parameter`` that ``made`` makes while the parameter is held; ``geometry``, on the meta device, has
        its size and strides."""
        recording = torch.is_grad_enabled()

        def make() -> torch.Tensor:
            before = torch.is_grad_enabled()
            try:
                torch._C._set_grad_enabled(recording)
                return made()
            finally:
                torch._C._set_grad_enabled(before)

        def view() -> PagedView:
            empty: PagedView = torch.Tensor._make_wrapper_subclass(
                PagedView,
                geometry.size(),
                strides=geometry.stride(),
                storage_offset=geometry.storage_offset(),
                dtype=geometry.dtype,
                device=parameter.device,
            )
            empty.parameter, empty.geometry, empty.made = parameter, geometry, make
            empty.history, empty.version = None, _owner(parameter).version(parameter)
            return empty

        if not geometry.requires_grad:
            return view()
        leading: PagedView = _Leading.apply(parameter, make, view)  # type: ignore[no-untyped-call]
        leading.history = _history(leading)
        return leading

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, tuple(types), args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the classmethod
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise MisuseError(f"{func} cannot compute with a view of a parameter that is in the store: give it a copy (.clone())")

    def __deepcopy__(self, memo: Any) -> Any:
        if self.requires_grad:  # which torch refuses, too
            raise _no_copy()
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values that it shows now, as an ordinary tensor."""
        made: Any = self.detach().clone().requires_grad_(self.requires_grad)
        return made.__reduce_ex__(protocol)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return _array(self, dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        with ExitStack() as stack:
            _hold(stack, [self.parameter], [])
            return repr(self.made())


class _Leading(torch.autograd.Function):
    """Leads gradients of a view to its parameter where torch computes with the view itself, which no function of torch but a
    custom autograd function does."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, made: Callable[[], torch.Tensor], view: Callable[[], PagedView]
    ) -> PagedView:
        ctx.parameter, ctx.made = parameter, made
        return view()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        recorded = torch.is_grad_enabled()
        with ExitStack() as stack, torch.enable_grad():
            _hold(stack, [ctx.parameter], [])
            edge = get_gradient_edge(ctx.parameter)
            return torch.autograd.grad(ctx.made(), edge, gradient, create_graph=recorded)[0], None, None


class PagedStorage(torch.UntypedStorage):
    """Storage of a parameter that nobody holds. It tells its size, and whether two tensors share it; it has no memory."""

    tiered: tuple[int, str]
    """Bytes, and how errors name the parameter."""

    def nbytes(self) -> int:
        return self.tiered[0]

    def size(self) -> int:
        return self.tiered[0]

    def __len__(self) -> int:
        return self.tiered[0]

    def __repr__(self) -> str:
        return f"[the storage of {self.tiered[1]}, of {self.tiered[0]} bytes, which are in the store]"

    __str__ = __repr__


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(storage: PagedStorage, *_: object, **__: object) -> Any:
        raise MisuseError(
            f"{storage.tiered[1]}: {name} of its storage needs memory, and its values are in the store: use the parameter, or "
            "the storage of a copy (.clone())"
        )

    return refuse


for _method in _words(
    "__getitem__ __setitem__ __iter__ __copy__ __deepcopy__ __reduce__ copy_ fill_ clone tolist cpu cuda hpu to resize_ new "
    "byteswap _byteswap pin_memory share_memory_ untyped _write_file _set_from_file _set_cdata _share_fd_cpu_ "
    "_share_filename_cpu_ _share_cuda_ double float half long int short char byte bool bfloat16 complex_double complex_float"
):
    setattr(PagedStorage, _method, _refusing(_method))


@functools.cache
def paged_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class of parameters of class ``kind`` while nobody holds them."""
    if kind is nn.Parameter:
        return PagedParameter
    return type(f"Paged{kind.__name__}", (PagedParameter, kind), {"held_class": kind})


_DATA: Any = torch._C.TensorBase.data


class _Data:
    """``nn.Parameter.data``, which tells the unit that holds a parameter what may be written to. A write to ``parameter.data``
    leaves ``parameter._version`` as it is: only the version of the tensor that was given tells of it."""

    __set__ = _DATA.__set__  # of C: no signal handler comes between an assignment and its effect

    def __get__(self, parameter: Any, kind: Any = None) -> Any:
        if parameter is None:
            return _DATA
        values = _DATA.__get__(parameter)
        handle = None if isinstance(parameter, PagedParameter) else parameter.__dict__.get("_tiered")
        if handle is not None:
            handle.lend(values)
        return values


nn.Parameter.data = _Data()  # type: ignore[assignment]
_OURS = _Data.__get__.__code__


def unpage(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Make a parameter an ordinary one, which has ``values``. Nothing interrupts this between its parts."""
    kind = parameter.held_class if isinstance(parameter, PagedParameter) else type(parameter)
    parameter.__class__, parameter.data = kind, values


def _array(tensor: torch.Tensor, dtype: Any) -> Any:
    """Return a copy for NumPy, whatever it asks for: an array on the store's memory would outlive it."""
    found: Any = tensor.numpy()
    return found if dtype is None else found.astype(dtype)


def _no_copy() -> MisuseError:
    return MisuseError("a paged model cannot be copied or pickled: copy or save model.state_dict() instead")


# -- answers -------------------------------------------------------------------------------------------------------------------


def _owner(parameter: torch.Tensor) -> ParameterOwner:
    handle: Any = parameter.__dict__.get("_tiered")
    if handle is None or not handle.is_of(parameter):
        raise MisuseError(OTHER)
    found: ParameterOwner | None = handle.owner()
    if found is None:
        raise MisuseError("the model of this parameter is gone: keep it as long as its parameters are used")
    return found


def _history(view: torch.Tensor) -> Any:
    getter: Any = torch.Tensor.grad_fn
    return _without_us(getter.__get__, (), (view,), {})


def _refuse_lost(view: PagedView) -> None:
    """Raise MisuseError where ``view`` is not only a view of its parameter any more."""
    if _history(view) is not view.history:
        raise MisuseError(
            f"{_shown((view,), {})}: a custom autograd function returned the parameter, or a view of it, and its backward "
            "would be lost: have it return a copy (.clone())"
        )
    if view.history is not None and in_backward() and view.version != _owner(view.parameter).version(view.parameter):
        raise MisuseError(
            f"{_shown((view,), {})} was updated, or written to, after this view was made, and backward may need the values of "
            "before: make the view anew, or call backward before step() and before other writes"
        )


def asks_for_gradient(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call of a function of ``AS_IT_IS`` makes a parameter one that can be trained."""
    if name not in ("requires_grad.__set__", "requires_grad_"):
        return False
    return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))


def _call(func: Function, types: tuple[type, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    caller = sys._getframe(1).f_back  # of the function, of which C has no frame
    if caller is not None and caller.f_code is _OURS:
        caller = caller.f_back
    module = "" if caller is None else caller.f_globals.get("__name__", "")
    if module.startswith("torch."):
        break_graph(module)
        _refuse_wrapper(module, args)
    elif name == "data_ptr" and module.startswith("safetensors"):  # which would read from there
        raise MisuseError(
            f"{_shown(args, kwargs)} has no memory that {module} could read: give it model.state_dict(), or a copy (.clone()), "
            "or use tiered.zero.export"
        )
    if name in AS_IT_IS:
        first = args[0] if args else None
        if not isinstance(first, PagedView):
            if name == "_has_compatible_shallow_copy_type":
                _refuse_removal(args[0], args[1])
            if asks_for_gradient(name, args, kwargs):
                _owner(args[0]).refuse_training()
            found = _without_us(func, types, args, kwargs)
            return _named_storage(first, found) if name == "untyped_storage" and isinstance(first, PagedParameter) else found
        if name not in VIEW_REFUSED:
            return _of_view(name, func, types, args, kwargs)
    if name in REFUSED:
        raise MisuseError(f"{_shown(args, kwargs)}: {name} {REFUSED[name]}; use a copy (.clone()), or tiered.zero.gathered")
    if name in VIEW_REFUSED and args and isinstance(args[0], PagedView):
        raise MisuseError(
            f"{_shown(args, kwargs)}: {name.partition('.')[0]} of a view of a parameter in the store would be lost, because "
            "the view is made anew at each use: use the parameter itself, or a copy (.clone())"
        )
    for value in _leaves((args, kwargs)):
        if isinstance(value, PagedView):
            _refuse_lost(value)
    if torch._C._are_functorch_transforms_active():
        return _transformed(name, func, args, kwargs)
    if name in GEOMETRY:
        return func(*_map(args, _geometry), **_map(kwargs, _geometry))
    if name in LIKE and "out" not in kwargs:
        return _like(func, args, kwargs)
    if func is torch.autograd.grad:
        return _gradients(args, kwargs)
    if name == "__iter__":
        return iter(args[0].unbind(0))
    if name in VIEWS:
        found = _view(name, func, args, kwargs)
        if found is not NotImplemented:
            return found
    if name in CONVERSIONS and _converts_nothing(name, args, kwargs):
        return args[0]
    if name == "data.__set__":
        return _set_data(args[0], args[1])
    if any(map(_is_paged, _leaves(kwargs.get("out")))):
        return into(func, args, kwargs, _is_paged, lambda value: _shown((value,), {}))
    if name.startswith("_foreach_"):
        return _for_each(func, args, kwargs)
    return _compute(name, func, args, kwargs)


def into(
    func: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    stored: Callable[[Any], bool],
    shown: Callable[[Any], str],
) -> Any:
    """Call ``func`` whose ``out=`` has tensors that are ``stored``: it writes to others, which are copied to these then.

    torch gives an ``out=`` of another shape the shape of the result, whatever memory it is on. Raises MisuseError instead, with
    nothing written.
    """
    out = kwargs["out"]

    def apart(value: Any) -> Any:
        if not stored(value):
            return value
        differentiated = value.requires_grad and torch.is_grad_enabled()  # which torch refuses
        return torch.empty(0, dtype=value.dtype, device=value.device, requires_grad=differentiated)

    places = _map(out, apart)
    found = func(*args, **{**kwargs, "out": places})
    pairs = [(target, made) for target, made in zip(_leaves(out), _leaves(places), strict=True) if made is not target]
    for target, made in pairs:
        if target.shape != made.shape:
            raise MisuseError(
                f"{shown(target)} has shape {tuple(target.shape)}, and out= would give it {tuple(made.shape)}: give out= "
                "a tensor of that shape"
            )
    with torch.no_grad():
        for target, made in pairs:
            target.copy_(made)
    given = {id(made): target for target, made in pairs}
    if isinstance(found, torch.Tensor):
        return given.get(id(found), found)
    return type(found)([given.get(id(value), value) for value in found])  # a tuple of torch.return_types, or of out= itself


def _refuse_removal(parameter: torch.Tensor, other: Any) -> None:
    """Raise MisuseError where a module is about to put a parameter of another kind of device (meta) in the place of one."""
    if isinstance(other, torch.Tensor) and other.device.type != parameter.device.type:
        raise MisuseError(
            f"{_shown((parameter,), {})} is paged and computes on {parameter.device}, where the store's top tier is: it "
            f"cannot be moved to {other.device}"
        )


def _named_storage(parameter: torch.Tensor, storage: Any) -> Any:
    """Return the storage of a parameter that nobody holds as what tells its size, and refuses the rest."""
    kind: type = type(storage)
    if kind is torch.UntypedStorage:
        storage.__class__ = PagedStorage
        storage.tiered = parameter.nbytes, _shown((parameter,), {})
    return storage


def _refuse_wrapper(caller: str, args: Sequence[Any]) -> None:
    """Raise MisuseError where the module that calls a function of a parameter is one that wraps models. They have no hook that
    would tell, and ask each parameter for something before they change anything of it."""
    for module, why in WRAPPERS.items():
        if caller.startswith(module):
            raise MisuseError(
                f"{_shown(args, {})} is paged, and {why}: leave the wrapper out, for several processes page their model "
                "together (zero.page, with stage=); with accelerate call tiered.integrations.accelerate.register before prepare"
            )


def _transformed(name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` within a transform of torch.func with copies, which are made outside of the transform."""
    if _written(name, args, kwargs):
        raise MisuseError(f"{_shown(args, kwargs)} cannot be written to within torch.func.grad, vmap, jvp and the like")
    given = _copied((tuple(args), kwargs))
    return func(*given[0], **given[1])


def _copied(values: Any) -> Any:
    """Return ``values`` with copies of what is paged, made outside of the transform that this is called in."""
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    with temporarily_clear_interpreter_stack():
        torch._C._autograd._saved_tensors_hooks_enable()
        try:
            return _map(values, lambda value: value.clone() if _is_paged(value) else value)
        finally:
            if disabled is not None:
                torch._C._autograd._saved_tensors_hooks_disable(disabled)


def _with_copies(module: Any, name: str, at: int) -> None:
    """Have a function of torch that does not ask tensors for their class take copies of parameters as its argument ``at``."""
    takes: Callable[..., Any] | None = getattr(module, name, None)
    if takes is None:  # another version of torch: what it gives then needs a check of its own
        return

    @functools.wraps(takes)
    def take(*args: Any, **kwargs: Any) -> Any:
        if any(_is_paged(value) for value in _leaves(args[at])):
            args = (*args[:at], _copied(args[at]), *args[at + 1 :])
        return takes(*args, **kwargs)

    setattr(module, name, take)


def _with_values(owner: Any, name: str) -> None:
    """Have a function of torch that reads memory of tensors which it does not ask for their class, take copies of parameters,
    of views of them, and of lists of them."""
    takes: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(takes)
    def take(*args: Any, **kwargs: Any) -> Any:
        if any(map(_has_no_values, args)) or any(map(_has_no_values, kwargs.values())):
            args, kwargs = _map((args, kwargs), lambda value: value.clone() if _has_no_values(value) else value)
        return takes(*args, **kwargs)

    setattr(owner, name, take)
    if torch.jit._builtins._builtin_table is not None:  # else it is made later, from what torch has then
        known = torch.jit._builtins._builtin_table.get(id(takes))
        if known is not None:
            torch.jit._builtins._register_builtin(take, known)


def _has_no_values(value: Any) -> bool:
    """Return whether ``value`` is a parameter that nobody holds, or a view of one, or a list that begins with one."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, torch.Tensor) and (hasattr(type(value), "held_class") or isinstance(value, PagedView))


torch.utils._device._device_constructors()  # made once: a default device knows functions by those that torch has until here
for _name in ("tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_csr_tensor", "sparse_compressed_tensor"):
    _with_values(torch, _name)
_with_values(torch.Tensor, "new_tensor")
_with_values(torch._C.ScriptFunction, "__call__")
_with_values(torch._C.ScriptMethod, "__call__")
_with_copies(torch._functorch.vmap, "_add_batch_dim", 0)
_with_copies(torch._functorch.eager_transforms, "_wrap_for_grad", 0)
_with_copies(torch.autograd, "_make_grads", 1)  # the gradients that a backward pass begins with


def _of_view(name: str, func: Function, types: tuple[type, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Answer for a view what needs no values, but may need to know how it was made."""
    view: PagedView = args[0]
    if name == "is_leaf.__get__":
        return not view.geometry.requires_grad
    if name == "untyped_storage":
        return view.parameter.untyped_storage()
    if name == "data_ptr":  # no memory: what tells whether tensors share theirs
        return view.parameter.data_ptr() + view.geometry.storage_offset() * view.geometry.itemsize
    if name in ("grad_fn.__get__", "_base.__get__", "_version.__get__", "output_nr.__get__"):
        with ExitStack() as stack:
            _hold(stack, [view.parameter], [])
            return _without_us(func, types, (view.made(), *args[1:]), kwargs)
    return _without_us(func, types, args, kwargs)


def _gradients(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``torch.autograd.grad`` with what identifies the parameters instead of them, so that functions within the backward
    pass (hooks, recomputations) still come here."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs = given.pop("inputs")
    sources = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if any(_is_paged(value) for value in _leaves(given)) or any(isinstance(value, PagedView) for value in sources):
        raise MisuseError(
            f"{_shown(args, kwargs)}: torch.autograd.grad takes parameters as inputs, not views of them, and no outputs that "
            "are parameters: give it the parameters, and copies (.clone()) as outputs"
        )
    zeros = given.pop("materialize_grads", False)
    if zeros:
        given["allow_unused"] = True
    edges = [_without_us(get_gradient_edge, (), (p,), {}) if isinstance(p, PagedParameter) else p for p in sources]
    found = torch.autograd.grad(inputs=edges, **given)
    if zeros:
        found = tuple(torch.zeros_like(p) if one is None else one for p, one in zip(sources, found, strict=True))
    return found


def _like(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    device = next(found.device for found in _leaves((args, kwargs)) if _is_paged(found))
    return func(*_map(args, _geometry), **{"device": device, **_map(kwargs, _geometry)})


def _geometry(value: Any) -> Any:
    """Return a tensor on the meta device with the size, strides and type of ``value``, where that is paged."""
    if isinstance(value, PagedView):
        return value.geometry
    if isinstance(value, PagedParameter):
        stride = _owner(value).stride(value)
        made = torch.empty_strided(value.shape, stride, dtype=value.dtype, device="meta")
        return made.requires_grad_() if value.requires_grad else made
    return value


def _view(name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what ``func`` returns where that is a view, in whole or in its parts; NotImplemented where it is none."""
    source = args[0] if args else kwargs.get("input", kwargs.get("self"))
    rest = _map(tuple(args[1:]), _geometry), _map(kwargs, _geometry)
    if name in ("view_as", "reshape_as", "expand_as") and isinstance(source, torch.Tensor) and not _is_paged(source):
        return func(source, *rest[0], **rest[1])  # other.view_as(parameter)
    if not args or not _is_paged(source):
        return NotImplemented
    geometry = _geometry(source)
    try:
        found = func(geometry, *rest[0], **rest[1])
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return NotImplemented  # the real one says why, or can
    memory = geometry.untyped_storage()._cdata

    def shown(view: Any, index: int | None) -> Any:
        if not isinstance(view, torch.Tensor) or view.untyped_storage()._cdata != memory:
            return NotImplemented
        parameter: Any = source.parameter if isinstance(source, PagedView) else source

        def made() -> torch.Tensor:
            whole = func(_real(source), *rest[0], **rest[1])
            return whole if index is None else whole[index]  # type: ignore[no-any-return]

        return source if view is geometry else PagedView.of(parameter, view, made)

    if isinstance(found, tuple | list):
        views = [shown(view, index) for index, view in enumerate(found)]
        return NotImplemented if any(view is NotImplemented for view in views) else type(found)(views)
    return shown(found, None)


def _converts_nothing(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a conversion of ``args[0]`` returns its argument."""
    if not args or not _is_paged(args[0]):
        return False
    source, rest = args[0], tuple(args[1:])
    geometry = _geometry(source)
    if kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format:
        return False
    if name == "contiguous":
        return not rest and geometry.is_contiguous()
    device, dtype = source.device, source.dtype
    if name == "to":
        if kwargs.get("copy") or any(isinstance(value, torch.Tensor) for value in (*rest, *kwargs.values())):
            return False
        try:
            to_device, to_dtype, _, memory_format = torch._C._nn._parse_to(*rest, **kwargs)
        except (TypeError, RuntimeError):
            return False
        if memory_format not in (None, torch.preserve_format):
            return False
        device, dtype = to_device or device, to_dtype or dtype
    elif name in ("float", "double", "half", "bfloat16"):
        dtype = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}[name]
    elif name == "cpu":
        device = torch.device("cpu")
    elif name == "type":
        if len(rest) != 1 or not isinstance(rest[0], torch.dtype):
            return False
        dtype = rest[0]
    else:
        return False
    return dtype is source.dtype and (device == source.device or (device.type == source.device.type and device.index is None))


def _set_data(parameter: torch.Tensor, value: Any) -> None:
    """Write ``value`` to a parameter whose ``.data`` it is assigned to. The values are copied, so that ``value`` and the
    parameter do not share memory afterwards."""
    if value is parameter:
        return
    if isinstance(value, torch.Tensor) and value.device.type != parameter.device.type:
        raise MisuseError(
            f"{_shown((parameter,), {})} computes on {parameter.device}, where the store's top tier is, and cannot be moved to "
            f"{value.device}: page the model into a store with hbm= and that device="
        )
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        what = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise MisuseError(
            f"{_shown((parameter,), {})} has shape {tuple(parameter.shape)} of {parameter.dtype} in the store and cannot be "
            f"given .data of {what}: page a model that has them"
        )
    source = value.parameter if isinstance(value, PagedView) else value
    if source is not parameter and isinstance(source, PagedParameter):
        raise MisuseError(
            f"{_shown((parameter,), {})} would share its memory with {_shown((source,), {})}, and they are apart in the store: "
            "give it a copy (.clone()), or tie the modules, with one Parameter object, before zero.page"
        )
    if isinstance(value, PagedView) and not value.geometry.storage_offset():
        own = _geometry(parameter)
        if (value.geometry.shape, value.geometry.stride()) == (own.shape, own.stride()):
            return  # the same elements: written to already
    with torch.no_grad():
        parameter.detach().copy_(value.clone() if source is parameter else value)  # a view of it may have another order


def _for_each(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` for one element of its lists after the other."""
    length = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, list | tuple))
    if length == 1:
        return _compute(name_of(func), func, args, kwargs)
    results: list[Any] = []
    nothing = True
    for index in range(length):

        def one(value: Any, index: int = index) -> Any:
            return [value[index]] if isinstance(value, list | tuple) and len(value) == length else value

        found = func(*(one(value) for value in args), **{key: one(value) for key, value in kwargs.items()})
        if found is not None:
            nothing = False
            results.extend(found)
    return None if nothing else results


def _compute(name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` while its parameters are held."""
    written = _written(name, args, kwargs)
    used = _parameters((args, kwargs))
    if not written and _is_too_much(used):
        copied: dict[int, torch.Tensor] = {}

        def copy(value: Any) -> Any:
            if not _is_paged(value):
                return value
            if id(value) not in copied:
                copied[id(value)] = value.clone()
            return copied[id(value)]

        return func(*_map(args, copy), **_map(kwargs, copy))
    with ExitStack() as stack:
        shows = _hold(stack, used, written)
        views: dict[int, PagedView] = {}
        recomputed = any(_owner(parameter).recomputes() for parameter in used)

        def real(value: Any) -> Any:
            if isinstance(value, PagedView):
                made = value.made()
                views[id(made)] = value
                return made
            if recomputed and isinstance(value, nn.Parameter) and not value.requires_grad and "_tiered" in value.__dict__:
                return value.detach()  # what a recomputation keeps must not be the parameter itself
            return value

        given = _map(args, real), _map(kwargs, real)
        result = func(*given[0], **given[1])
        if name in COPIED:
            result = result.copy()
            result.flags.writeable = False
            return result

        def shown(value: Any, index: int | None = None) -> Any:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or type(value) is nn.Parameter:
                return value
            if id(value) in views:
                return views[id(value)]
            if any(value is parameter for parameter in used) or _has_no_memory(value) or not shows(value):
                return value
            source = next((p for p in used if _shares(p, value)), used[0])
            geometry = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

            def made() -> torch.Tensor:
                whole = func(*_map(args, _real), **_map(kwargs, _real))
                found: torch.Tensor = whole if index is None else whole[index]
                return found

            return PagedView.of(source, geometry.requires_grad_() if value.requires_grad else geometry, made)

        if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
            found = [shown(value, index) for index, value in enumerate(result)]
            return result if all(a is b for a, b in zip(found, result, strict=True)) else type(result)(found)
        return shown(result)


def _written(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the parameters that a function of this name writes to."""
    return _parameters(written_by(name, args, kwargs))


def written_by(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments, and lists of them, that a function of this name writes to."""
    targets = [kwargs["out"]] if kwargs.get("out") is not None else []
    if _writes(name):
        targets.append(args[0] if args else [kwargs[key] for key in ("self", "input", "tensor") if key in kwargs])
    return targets


def _is_too_much(parameters: Sequence[torch.Tensor]) -> bool:
    owners = {id(owner): owner for owner in map(_owner, parameters)}
    return len(parameters) > 1 and any(
        owner.nbytes([p for p in parameters if _owner(p) is owner]) > owner.room for owner in owners.values()
    )


def _hold(
    stack: ExitStack, parameters: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], bool]:
    """Hold ``parameters`` until ``stack`` ends, those that are ``written`` to for writing. Return what tells whether a tensor
    shows their memory."""
    shows = []
    for access in (Access.WRITE, Access.READ):
        mine = [p for p in parameters if any(p is other for other in written) is (access is Access.WRITE)]
        owners = {id(owner): owner for owner in map(_owner, mine)}
        for owner in owners.values():
            shows.append(stack.enter_context(owner.accessing([p for p in mine if _owner(p) is owner], access)))
    return lambda tensor: any(show(tensor) for show in shows)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has no memory of its own, as a stored gradient has none."""
    return hasattr(type(tensor), "__torch_dispatch__") and type(tensor).__torch_dispatch__ is not _NO_DISPATCH


_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def _shares(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` begins within the memory of ``parameter``, which is held."""
    begin = parameter.data_ptr()
    return begin <= tensor.data_ptr() < begin + max(1, parameter.nbytes)


def _real(value: Any) -> Any:
    """Return a view as torch makes it; its parameter is held."""
    return value.made() if isinstance(value, PagedView) else value


@traced
def _is_paged(value: Any) -> bool:
    return isinstance(value, PagedParameter | PagedView)


def _parameters(values: Any) -> list[torch.Tensor]:
    """Return the parameters among ``values``, and those of views, once each."""
    found: dict[int, torch.Tensor] = {}
    for value in _leaves(values):
        if _is_paged(value):
            parameter = value.parameter if isinstance(value, PagedView) else value
            found[id(parameter)] = parameter
    return list(found.values())


@traced
def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with each of its leaves changed."""
    if isinstance(value, dict):
        return {key: _map(one, change) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(one, change) for one in value)
    return change(value)


def _shown(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return how errors name the first parameter of a call."""
    for parameter in _parameters((args, kwargs)):
        handle: Any = parameter.__dict__.get("_tiered")
        return "a parameter" if handle is None else f"parameter {handle.name!r}"
    return "a parameter"
