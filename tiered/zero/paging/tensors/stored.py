"""Let a tensor whose values are in the store be used like any other: read, written to, viewed, asked for its shape.

A ``StoredTensor`` has the geometry of its values and no memory. Each function of torch that is given one calls
``__torch_function__`` instead (https://docs.pytorch.org/docs/stable/notes/extending.html), where there are these answers:

- What needs no values (shape, dtype, gradient, hooks) is answered by the tensor as it is, and what depends on strides by a
  tensor of the same geometry on the meta device.
- A view (``detach``, ``.data``, ``t``, an index) is a ``StoredTensor``, too: it has the function that makes it, which is called
  again whenever the view is used. So a view never shows old values, and a write to it lands in the store.
- What cannot be right (another type, memory that would be shared) raises MisuseError.
- What the ``Source`` of the values knows how to do without all of them (a norm that is known, one expert of many) it does.
- Everything else computes with the values. Those of a parameter are the parameter itself, while its unit is held: autograd
  records it, and what autograd saves is packed as it is within forward. Those of other sources are copies, and what is written
  to a copy is brought to the store before the function returns.

A function that is given parameters of more units than ``UNITS_HELD`` of the largest size is given copies, made one after the
other, so that a list of all parameters needs no more of the pool than one of them. Functions of lists (``torch._foreach_...``)
run on one element after the other.

To autograd a view is a tensor of its own: uses of it add their gradients up there, as torch does, and the sum goes to the
parameter. A view that was detached and needs a gradient (``torch.nn.Parameter(parameter.T)``) has its own ``.grad``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import GradientEdge
from torch.overrides import enable_reentrant_dispatch

from tiered.errors import MisuseError
from tiered.zero.paging.saved_tensors import in_backward, in_forward_mode
from tiered.zero.paging.tensors.compiling import break_graph, traced
from tiered.zero.paging.tensors.functions import (
    AS_IT_IS,
    ASKED,
    CONVERSIONS,
    COPIED,
    GEOMETRY,
    LIKE,
    REFUSED,
    RESHAPED,
    VIEWS,
    WRAPPERS,
    Function,
    changed,
    leaves,
    name_of,
    written_by,
)
from tiered.zero.paging.tensors.sources import (
    Call,
    ParameterOwner,
    Source,
    hold,
    is_too_much,
    parameter_owner,
    shares,
    without_us,
)

__all__ = [
    "Kept",
    "Step",
    "StoredTensor",
    "compute",
    "copied",
    "geometry_of",
    "is_without_memory",
    "no_copy",
    "reading",
    "refuse_in_transform",
    "shown",
]

PATCHES = f"{__package__}.patches"


class Step(NamedTuple):
    """Function that makes a view, its arguments, ``base`` among them, of which it is a view, and which of its results is meant
    (None: there is one). ``recording``: whether autograd was recording."""

    base: Any
    func: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    which: int | None
    recording: bool

    def __call__(self, source: Source, whole: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
        """Make the view of ``whole``, the values of ``source``; of ``base``, where that is given, in place of its own."""

        def real(value: Any) -> Any:
            if base is not None and value is self.base:
                return base
            if isinstance(source, Kept) and value is source.parameter:
                return whole
            return value.made(whole) if isinstance(value, StoredTensor) and value.source == source else value

        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(self.recording)
            made = self.func(*changed(self.args, real), **changed(self.kwargs, real))
        finally:
            torch._C._set_grad_enabled(before)
        return made if self.which is None else made[self.which]  # type: ignore[no-any-return]


class StoredTensor(torch.Tensor):
    """Tensor whose values are in the store: a parameter that nobody holds, a gradient, or a view of one."""

    _source: Source
    step: Step | None = None
    """What makes it; None for all the values of its source."""
    geometry: torch.Tensor
    """On the meta device, with the same size and strides, and the same place in the whole."""
    history: Any = None
    """What leads gradients from it to what it is a view of, where something does; else None."""
    version: int
    """Of the values, when ``history`` was made."""
    of_graph = False
    """Whether something that needs a gradient was written to it: its values are right, and its history is lost."""

    @staticmethod
    def of(
        source: Source, geometry: torch.Tensor, step: Step | None = None, kind: type[StoredTensor] | None = None
    ) -> StoredTensor:
        """Return a tensor of the values of ``source``, or the view of them that ``step`` makes."""

        above = None if step is None else step.base
        lost = isinstance(above, StoredTensor) and above.of_graph and step is not None and not _detaches(step)

        def made() -> StoredTensor:
            empty: StoredTensor = torch.Tensor._make_wrapper_subclass(
                kind or StoredTensor,
                geometry.size(),
                strides=geometry.stride(),
                storage_offset=geometry.storage_offset(),
                dtype=geometry.dtype,
                device=source.device,
            )
            empty._source, empty.geometry, empty.step, empty.history = source, geometry, step, None
            if lost:
                empty.of_graph = True
            return empty

        if step is None or not geometry.requires_grad or not (source.leads or _is_own(step.base)):
            view = made()
            views = source.views
            if step is not None and views is not None:
                views[id(view)] = view
            return view
        leading: StoredTensor = _Leading.apply(step.base, source, step, made)  # type: ignore[no-untyped-call]
        leading.history, leading.version = _history(leading), source.version
        if source.views is not None:
            source.views[id(leading)] = leading
        return leading

    @property
    def source(self) -> Source:
        return self._source

    @property
    def path(self) -> tuple[Step, ...]:
        """What makes this of all the values, the first one first."""
        steps: list[Step] = []
        value: Any = self
        while isinstance(value, StoredTensor) and value.step is not None:
            steps.append(value.step)
            value = value.step.base
        return tuple(reversed(steps))

    @property
    def root(self) -> Any:
        """The tensor of all the values, of which this is a view; itself, where this is it."""
        if self.step is None:
            return self
        path = self.path
        return path[0].base if path else self

    def is_all(self) -> bool:
        """Return whether this has all the values as they are: it is no view, or a detached one."""
        return self.step is None or all(name_of(step.func) in ("detach", "alias", "data.__get__") for step in self.path)

    def made(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this of ``whole``, the values of its source."""
        made = whole
        for step in self.path:  # one after the other: a chain of views may be long
            made = step(self.source, whole, made)
        return made

    def values(self) -> torch.Tensor:
        """Return a copy of the values in ordinary memory."""
        with torch.no_grad(), reading(self) as values:
            return values.clone() if self.source.held is not None else values

    def _ordinary(self) -> torch.Tensor:
        """Return an ordinary tensor, or a parameter, of the values that it shows now."""
        values, needs = self.values(), bool(self.requires_grad)
        return nn.Parameter(values, needs) if isinstance(self, nn.Parameter) else values.requires_grad_(needs)

    def is_detached(self) -> bool:
        """Return whether it is a view of something that was detached, or of ``.data``."""
        return any(map(_detaches, self.path))

    def has_own_gradient(self) -> bool:
        """Return whether it has a gradient of its own, not the parameter's: a view that was detached, or a gradient."""
        is_parameter = self.step is None and isinstance(self, nn.Parameter)
        return not is_parameter and self.history is None and _needs_gradient(self)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(Call(name_of(func), func, tuple(types), args, dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the classmethod
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        stored = [value for value in leaves((args, kwargs)) if isinstance(value, StoredTensor)]
        if any(value.source.held is not None for value in stored):
            raise MisuseError(f"{func} cannot compute with a tensor that is in the store: give it a copy (.clone())")
        with enable_reentrant_dispatch():  # autograd, which adds to a gradient, asks here
            return _compute(Call(name_of(func), func, (cls,), args, kwargs), stored)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the parameter if it is given itself, as torch.nn.utils.parametrize does. torch asks no class about it."""
        if source is self and not args and not kwargs:
            return self
        raise MisuseError(f"{self.source.shown}: set_ {RESHAPED}; {self.source.mend}")

    def as_subclass(self, cls: Any) -> Any:
        """Return a view of the class ``torch.Tensor``. torch asks no class about it, and takes memory that is not there."""
        if cls is torch.Tensor:
            return self.view_as(self)
        raise MisuseError(f"{self.source.shown} has no memory that a {cls.__name__} could show; {self.source.mend}")

    def _use_count(self) -> int:
        """Refuse ``torch.utils.swap_tensors``, which asks this before it changes anything. torch asks no class about it."""
        raise MisuseError(f"{self.source.shown}: swap_tensors {RESHAPED}; write to it instead: parameter.copy_(values)")

    def __deepcopy__(self, memo: Any) -> Any:
        if self.history is not None:  # which torch refuses, too
            raise no_copy()
        if id(self) not in memo:
            memo[id(self)] = self._ordinary()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values that it shows now, as an ordinary tensor."""
        made: Any = self._ordinary()
        return made.__reduce_ex__(protocol)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a copy for NumPy, whatever it asks for: an array on the store's memory would outlive it."""
        found: Any = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        found = self.source.printed(self)
        if found is not None:
            return found
        with reading(self) as values:
            return repr(values)


def no_copy() -> MisuseError:
    return MisuseError(
        "parameters of a paged model cannot be copied or pickled: save model.state_dict(), or take parameter.detach().clone(); "
        "copy.deepcopy(model) is a model in memory"
    )


@traced
def is_without_memory(value: Any) -> bool:
    """Return whether ``value`` is a tensor whose values are in the store, and which has no memory."""
    return isinstance(value, StoredTensor)


def _history(view: torch.Tensor) -> Any:
    getter: Any = torch.Tensor.grad_fn
    return without_us(getter.__get__, (), (view,), {})


def _is_own(value: Any) -> bool:
    """Return whether ``value`` is a stored tensor that is one of its own to autograd."""
    return isinstance(value, StoredTensor) and (value.history is not None or value.has_own_gradient())


def _needs_gradient(value: torch.Tensor) -> bool:
    getter: Any = torch.Tensor.requires_grad
    found: bool = without_us(getter.__get__, (), (value,), {})
    return found


# -- gradients of views --------------------------------------------------------------------------------------------------------


class Kept(Source):
    """Values that a parameter had before its ``.data`` was assigned, for the views that were made of them: torch leaves these
    the memory of before."""

    def __init__(self, source: Source, values: torch.Tensor) -> None:
        super().__init__(source.parameter)
        self._values, self._like, self._shown = values, source.like().detach(), source.shown

    lost_history = (
        "this view was made before .data of its parameter, which is divided into slices, was assigned, and leads no gradient "
        "to it any more: make the view anew"
    )

    @property
    def shown(self) -> str:
        return self._shown

    @property
    def device(self) -> torch.device:
        return self._values.device

    def like(self) -> torch.Tensor:
        return self._like

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def whole(self) -> torch.Tensor:
        return self._values  # what is written to a view of them is in it


def keep(source: Source) -> None:
    """Have the views of ``source`` that there are show its values of now from here on, because it gets others."""
    for part in source.divided_into():
        keep(part)
    views = [] if source.views is None else list(source.views.values())
    if views:
        with torch.no_grad(), _inside(source) as values:
            whole = torch.empty_strided(values.size(), source.like().stride(), dtype=values.dtype, device=source.device)
            kept = Kept(source, whole.copy_(values))
        for view in views:
            if not source.leads and view.requires_grad:  # its gradient went through all the values
                view.of_graph = True
            view._source = kept
        views.clear()
        source.views.clear()  # type: ignore[union-attr]


class _Leading(torch.autograd.Function):
    """Leads gradients of a view, when all uses of it have added theirs, to what it is a view of."""

    @staticmethod
    def forward(ctx: Any, base: torch.Tensor, source: Source, step: Step, made: Callable[[], StoredTensor]) -> StoredTensor:
        ctx.source, ctx.step = source, step
        ctx.set_materialize_grads(False)
        return made()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:  # it is undefined, and stays so
            return None, None, None, None
        source, step, recorded = ctx.source, ctx.step, torch.is_grad_enabled()
        with ExitStack() as stack, torch.enable_grad():
            if name_of(step.func) in VIEWS:  # whose backward depends on geometry alone
                like = source.like()
                whole = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=source.device)
            else:
                if source.held is not None:
                    hold(stack, [source.held], [])
                whole = source.whole()
            base = (step.base.made(whole) if isinstance(step.base, StoredTensor) else whole).detach().requires_grad_()
            made = step(source, whole, base)
            return torch.autograd.grad(made, base, gradient, create_graph=recorded)[0], None, None, None


class _Use(torch.autograd.Function):
    """Leads gradients of the values that a function computes with to the view that they are of."""

    @staticmethod
    def forward(ctx: Any, view: StoredTensor, values: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return gradient, None


# -- answers -------------------------------------------------------------------------------------------------------------------


def _call(call: Call) -> Any:
    name, func, _, args, kwargs = call
    first = args[0] if args else None
    _refuse_caller(call)
    if name in AS_IT_IS:
        return first.source.itself(first, call) if name in ASKED and isinstance(first, StoredTensor) else call.as_it_is()
    stored = [value for value in leaves((args, kwargs)) if isinstance(value, StoredTensor)]
    for value in stored:
        value.source.refuse(call)
    if name in REFUSED and name not in stored[0].source.allowed:
        raise MisuseError(f"{shown(stored)}: {name} {REFUSED[name]}; {stored[0].source.mend}")
    for value in stored:
        _refuse_lost(value)
    if torch.is_grad_enabled():
        found = _without_history(call, stored)
        if found is not NotImplemented:
            return found
    if torch._C._are_functorch_transforms_active():
        return _transformed(call, stored)
    if name in GEOMETRY:
        return func(*changed(args, geometry_of), **changed(kwargs, geometry_of))
    if name in LIKE and "out" not in kwargs:
        of = first if args else kwargs.get("input")

        def given(value: Any) -> Any:
            return value.clone() if value is not of and isinstance(value, StoredTensor) else geometry_of(value)

        return func(*changed(args, given), **{"device": stored[0].source.device, **changed(kwargs, given)})
    if func is torch.autograd.grad:
        return _gradients(call, stored)
    if name == "backward" and any(map(_is_own, leaves(kwargs.get("inputs")))):
        return func(*args, **{**kwargs, "inputs": [_retained(one) for one in leaves(kwargs["inputs"])]})
    for value in {type(value.source): value for value in reversed(stored)}.values():
        found = value.source.answer(value, call)
        if found is not NotImplemented:
            return found
    if name == "__iter__":
        return iter(args[0].unbind(0))
    if name in VIEWS:
        found = _view(call)
        if found is not NotImplemented:
            return found
    if name in CONVERSIONS and _converts_nothing(call):
        return first
    if name == "data.__set__":
        return _set_data(args[0], args[1])
    if any(map(is_without_memory, leaves(kwargs.get("out")))):
        return _into(call)
    if name.startswith("_foreach_"):
        return _for_each(call)
    return _compute(call, stored)


def _refuse_caller(call: Call) -> None:
    """Raise MisuseError where the module that calls a function of a tensor would take it for one with memory, or is one that
    wraps models. They have no hook that would tell, and ask each parameter for something before they change anything of it."""
    caller = sys._getframe(2).f_back  # of the function, of which C has no frame
    if caller is not None and caller.f_globals.get("__name__") == PATCHES:
        caller = caller.f_back
    module: str = "" if caller is None else caller.f_globals.get("__name__", "")
    if module.startswith("torch."):
        break_graph(module)
        for wrapper, why in WRAPPERS.items():
            if module.startswith(wrapper):
                raise MisuseError(
                    f"{shown(call.args)} is paged, and {why}: leave the wrapper out, for several processes page their model "
                    "together (zero.page, with stage=); with accelerate call tiered.integrations.accelerate.register before "
                    "prepare"
                )
    elif call.name == "data_ptr" and module.startswith("safetensors"):  # which would read from there
        raise MisuseError(
            f"{shown(call.args)} has no memory that {module} could read: give it model.state_dict(), or a copy (.clone()), "
            "or use tiered.zero.export"
        )


def _refuse_lost(view: StoredTensor) -> None:
    """Raise MisuseError where ``view`` is not only a view of its parameter any more."""
    if view.step is None or not view.source.leads:
        return
    if _history(view) is not view.history:
        raise MisuseError(
            f"{view.source.shown}: a custom autograd function returned the parameter, or a view of it, and its backward would "
            "be lost: have it return a copy (.clone())"
        )
    if view.history is not None and in_backward() and view.version != view.source.version:
        raise MisuseError(
            f"{view.source.shown} was updated, or written to, after this view was made, and backward may need the values of "
            "before: make the view anew, or call backward before step() and before other writes"
        )


def _without_history(call: Call, stored: Sequence[StoredTensor]) -> Any:
    """Return what a function returns where a tensor among ``stored`` has lost its history, and the function needs none: it
    writes to that, detaches it, is a view, or gives nothing that has a gradient; NotImplemented where none has lost it. Raises
    MisuseError where gradients would be led through it."""
    written = [id(one) for one in leaves(written_by(call.name, call.args, call.kwargs))]
    lost = [value for value in stored if value.of_graph and id(value) not in written]
    if not lost or call.name in ("detach", "data.__get__", "data.__set__"):
        return NotImplemented
    if call.name in VIEWS:
        return _view(call)
    with torch.no_grad():
        found = _call(call)
    if any(isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()) for one in leaves(found)):
        raise MisuseError(f"{lost[0].source.shown}: {lost[0].source.lost_history}")
    return found


def _into(call: Call) -> Any:
    """Call a function whose ``out=`` has tensors that are stored: it writes to others, which are copied to these then.

    torch gives an ``out=`` of another shape the shape of the result, whatever memory it is on. Raises MisuseError instead, with
    nothing written.
    """
    out = call.kwargs["out"]

    def apart(value: Any) -> Any:
        if not is_without_memory(value):
            return value
        differentiated = value.requires_grad and torch.is_grad_enabled()  # which torch refuses
        return torch.empty(0, dtype=value.dtype, device=value.device, requires_grad=differentiated)

    places = changed(out, apart)
    found = call.func(*call.args, **{**call.kwargs, "out": places})
    pairs = [(target, made) for target, made in zip(leaves(out), leaves(places), strict=True) if made is not target]
    for target, made in pairs:
        if target.shape != made.shape:
            raise MisuseError(
                f"{target.source.shown} has shape {tuple(target.shape)}, and out= would give it {tuple(made.shape)}: give out= "
                "a tensor of that shape"
            )
    with torch.no_grad():
        for target, made in pairs:
            target.copy_(made)
    given = {id(made): target for target, made in pairs}
    if isinstance(found, torch.Tensor):
        return given.get(id(found), found)
    return type(found)([given.get(id(value), value) for value in found])  # a tuple of torch.return_types, or of out= itself


def _transformed(call: Call, stored: Sequence[StoredTensor]) -> Any:
    """Call a function within a transform of torch.func with copies, which are made outside of the transform."""
    if any(map(is_without_memory, leaves(written_by(call.name, call.args, call.kwargs)))):
        refuse_in_transform(stored)
    given = copied((tuple(call.args), call.kwargs))
    return call.func(*given[0], **given[1])


def refuse_in_transform(stored: Sequence[StoredTensor]) -> NoReturn:
    """Raise MisuseError because a function that torch.func transforms writes to one of ``stored``."""
    raise MisuseError(
        f"{shown(stored)} cannot be written to within torch.func.grad, vmap, jvp and the like: have the function return the "
        "values, and write them after it"
    )


def copied(values: Any) -> Any:
    """Return ``values`` with copies of what is stored, made outside of the transform that this is called in."""
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    with temporarily_clear_interpreter_stack():
        torch._C._autograd._saved_tensors_hooks_enable()
        try:
            return changed(values, lambda value: value.clone() if is_without_memory(value) else value)
        finally:
            if disabled is not None:
                torch._C._autograd._saved_tensors_hooks_disable(disabled)


def _gradients(call: Call, stored: Sequence[StoredTensor]) -> Any:
    """Call ``torch.autograd.grad`` with what identifies the parameters instead of them, so that functions within the backward
    pass (hooks, recomputations) still come here."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    inputs = given.pop("inputs")
    sources = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if any(map(is_without_memory, leaves(given))) or any(is_without_memory(one) and not _is_input(one) for one in sources):
        raise MisuseError(
            f"{shown(stored)}: torch.autograd.grad takes parameters as inputs, no detached views of them, and no outputs "
            "that are parameters: give it the parameters, and copies (.clone()) as outputs"
        )
    zeros, allowed = given.pop("materialize_grads", False), given.pop("allow_unused", None)
    parts = [one.source.edges() if is_without_memory(one) and one.step is None else [_edge(one)] for one in sources]
    whole = [len(mine) == 1 for mine in parts]
    given["allow_unused"] = True if zeros or not all(whole) else allowed
    found = iter(torch.autograd.grad(inputs=[edge for mine in parts for edge in mine], **given))
    made: list[torch.Tensor | None] = []
    for one, mine in zip(sources, parts, strict=True):
        gradients = [next(found) for _ in mine]
        if any(gradient is not None for gradient in gradients):
            made.append(gradients[0] if len(mine) == 1 else one.source.joined(gradients))
        elif zeros:
            made.append(torch.zeros_like(one))
        elif allowed or all(whole):
            made.append(None)
        else:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this "
                "is the desired behavior."
            )
    return tuple(made)


def _is_input(value: StoredTensor) -> bool:
    """Return whether gradients arrive at ``value``: a parameter, or a view that is a tensor of its own to autograd."""
    return value.step is None or _needs_gradient(value)


def _edge(value: Any) -> Any:
    """Return where gradients of a view arrive; anything else as it is."""
    if not is_without_memory(value):
        return value
    with torch.enable_grad():
        used = _Use.apply(value, value.geometry.detach())  # type: ignore[no-untyped-call]
    return GradientEdge(*used.grad_fn.next_functions[0])


def _retained(value: Any) -> Any:
    """Return where gradients of a view that is one of its own arrive, which it shows afterwards; anything else as it is."""
    if not _is_own(value):
        return value
    if value.history is not None:
        value.retain_grad()
    return _edge(value)


def geometry_of(value: Any) -> Any:
    """Return a tensor on the meta device with the size, strides and type of ``value``, where that is stored."""
    if not isinstance(value, StoredTensor):
        return value
    like = value.source.like() if value.step is None else value.geometry
    return like.detach().requires_grad_() if value.has_own_gradient() else like


def _view(call: Call) -> Any:
    """Return what a function returns where that is a view, in whole or in its parts; NotImplemented where it is none."""
    name, func, _, args, kwargs = call
    source: Any = args[0] if args else kwargs.get("input", kwargs.get("self"))
    rest = changed(tuple(args[1:]), geometry_of), changed(kwargs, geometry_of)
    if name in ("view_as", "reshape_as", "expand_as") and isinstance(source, torch.Tensor) and not is_without_memory(source):
        return func(source, *rest[0], **rest[1])  # other.view_as(parameter)
    if not args or not is_without_memory(source):
        return NotImplemented
    geometry = geometry_of(source)
    try:
        found = func(geometry, *rest[0], **rest[1])
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return NotImplemented  # the real one says why, or can
    memory = geometry.untyped_storage()._cdata
    kept: Any = changed(tuple(args), _as_now), changed(kwargs, _as_now)
    kind: Any = type(source) if name == "detach" and isinstance(source, nn.Parameter) and _makes_parameter() else None

    def viewed(view: Any, which: int | None) -> Any:
        if not isinstance(view, torch.Tensor) or view.untyped_storage()._cdata != memory:
            return NotImplemented
        # A view of one that was frozen records nothing, whatever that is later; of one that was detached it may: a write of
        # something that needs a gradient is then as torch has it.
        recording = torch.is_grad_enabled() and (view.requires_grad or _detaches(call) or source.is_detached())
        step = Step(source, func, kept[0], kept[1], which, recording)
        return source if view is geometry else StoredTensor.of(source.source, view, step, kind)

    if isinstance(found, tuple | list):
        views = [viewed(view, which) for which, view in enumerate(found)]
        return NotImplemented if any(view is NotImplemented for view in views) else type(found)(views)
    return viewed(found, None)


def _detaches(call: Call | Step) -> bool:
    """Return whether what a function returns is apart from the graph of what it is given."""
    return name_of(call.func).startswith(("detach", "data."))


def _as_now(value: Any) -> Any:
    """Return an index as it is now: whoever gave it may write to it. Of other tensors a view takes the shape alone."""
    is_index = isinstance(value, torch.Tensor) and not is_without_memory(value) and not value.is_floating_point()
    return value.clone() if is_index else value


_MAKES = nn.Parameter.__new__.__code__


def _makes_parameter() -> bool:
    """Return whether ``torch.nn.Parameter(...)`` asks for this view, of which it makes another parameter on the same values. It
    takes one of the class of what it was given."""
    frame: Any = sys._getframe(3)
    for _ in range(4):
        if frame is None or frame.f_code is _MAKES:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is _MAKES


def _converts_nothing(call: Call) -> bool:
    """Return whether a conversion of the first argument returns it."""
    name, kwargs = call.name, call.kwargs
    if not call.args or not is_without_memory(call.args[0]):
        return False
    source, rest = call.args[0], tuple(call.args[1:])
    if kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format:
        return False
    if name == "contiguous":
        return not rest and bool(geometry_of(source).is_contiguous())
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


def _set_data(target: StoredTensor, value: Any) -> None:
    """Write ``value`` to what its ``.data`` is assigned to. The values are copied, so that ``value`` and the target do not
    share memory afterwards."""
    if value is target:  # as Module.to() assigns it
        return
    source = target.source
    source.refuse_data(target, value)
    if isinstance(value, torch.Tensor) and value.device.type != target.device.type:
        raise MisuseError(
            f"{source.shown} computes on {target.device}, where the store's top tier is, and cannot be moved to "
            f"{value.device}: page the model into a store with hbm= and that device="
        )
    if isinstance(value, torch.Tensor) and (value.shape, value.dtype) != (target.shape, target.dtype):
        owner = None if target.step is not None else _owner_of(target)
        if owner is not None:
            values = value.values() if isinstance(value, StoredTensor) else value
            keep(source)
            owner.give(target, values)
            return
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (target.shape, target.dtype):
        what = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise MisuseError(
            f"{source.shown} has shape {tuple(target.shape)} of {target.dtype} in the store and cannot be given .data of "
            f"{what}: {source.another}"
        )
    if target.step is None and {_memory_format(value), _memory_format(target)} == {"contiguous_format", "channels_last"}:
        raise MisuseError(
            f"{source.shown} is in {_memory_format(target)} in the store and cannot be given .data in {_memory_format(value)}: "
            "change the memory format of a model before zero.page, or write the values alone (parameter.data.copy_(values))"
        )
    if isinstance(value, StoredTensor) and value.source == source:
        own, other = geometry_of(target), geometry_of(value)
        if (own.shape, own.stride(), own.storage_offset()) == (other.shape, other.stride(), other.storage_offset()):
            return  # the same elements: written to already
        value = value.clone()  # a view may have another order
    if target.step is None:
        keep(source)
    with torch.no_grad():
        target.detach().copy_(value)


def _owner_of(parameter: StoredTensor) -> ParameterOwner | None:
    """Return the paged model that ``parameter`` is one of; None for another tensor, and where the model is gone."""
    handle: Any = parameter.__dict__.get("_tiered") if isinstance(parameter, nn.Parameter) else None
    found: ParameterOwner | None = None if handle is None else handle.owner()
    return found


def _memory_format(tensor: torch.Tensor) -> str:
    """Return which memory format a tensor of images or volumes has; "" for others, and where it has both or none."""
    geometry = geometry_of(tensor) if isinstance(tensor, StoredTensor) else tensor
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(geometry.dim())
    if last is None or geometry.is_contiguous() == geometry.is_contiguous(memory_format=last):
        return ""
    return "contiguous_format" if geometry.is_contiguous() else "channels_last"


def _for_each(call: Call) -> Any:
    """Call a function of lists for one element of them after the other."""
    _, func, _, args, kwargs = call
    length = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, list | tuple))
    if length == 1:
        return _compute(call, [value for value in leaves((args, kwargs)) if isinstance(value, StoredTensor)])
    results: list[Any] = []
    nothing = True
    for index in range(length):

        def one(value: Any, index: int = index) -> Any:
            if isinstance(value, list | tuple):
                return [value[index]] if len(value) == length else value
            scalars = isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == length  # one for each element
            return value[index : index + 1] if scalars else value

        found = func(*map(one, args), **{key: one(value) for key, value in kwargs.items()})
        if found is not None:
            nothing = False
            results.extend(found)
    return None if nothing else results


class _Values:
    """Values of what one function computes with: of each source once, however many views of it there are."""

    def __init__(self, written: Sequence[StoredTensor]) -> None:
        self._written, self._targets = {id(value) for value in written}, {value.source for value in written}
        self._wholes: dict[Source, torch.Tensor] = {}
        self._made: dict[int, tuple[torch.Tensor, StoredTensor, int]] = {}

    def of(self, value: StoredTensor) -> torch.Tensor:
        source = value.source
        whole = self._wholes.get(source)
        if whole is None:
            if torch.is_inference_mode_enabled() and source.held is None:
                with torch.inference_mode(False), torch.no_grad():  # a copy whose version tells whether it was written to
                    whole = source.whole()
            else:
                whole = source.whole()
            self._wholes[source] = whole
        made = value.made(whole)
        if _is_own(value) and torch.is_grad_enabled() and id(value) not in self._written and not in_forward_mode():
            made = _Use.apply(value, made.detach())  # type: ignore[no-untyped-call]
        self._made[id(made)] = made, value, made._version
        return made

    def became_part_of_a_graph(self, value: StoredTensor) -> bool:
        """Return whether a write that recorded itself made ``value``, which needs no gradient, one that does."""
        made = next((made for made, of, _ in self._made.values() if of is value), None)
        return made is not None and made.requires_grad and not value.requires_grad

    def restored(self, result: Any) -> Any:
        """Return what ``result`` is the value of, if it is one's."""
        found = self._made.get(id(result))
        return result if found is None else found[1]

    def write_back(self) -> None:
        """Bring copies that were written to to the store, also where the name of the function did not tell that it writes."""
        changed = {value.source for made, value, version in self._made.values() if made._version != version}
        for source, whole in self._wholes.items():
            if source.held is None and (source in changed or source in self._targets):
                source.write(whole)


def compute(func: Function, args: Sequence[Any]) -> Any:
    """Call a function with the values of what is stored among its arguments, whatever its sources would answer."""
    stored = [value for value in leaves(tuple(args)) if isinstance(value, StoredTensor)]
    if not stored:
        return func(*args)
    return _compute(Call(name_of(func), func, (StoredTensor,), args, {}), stored)


def _compute(call: Call, stored: Sequence[StoredTensor]) -> Any:
    """Call a function with the values of what is stored."""
    name, func, _, args, kwargs = call
    targets = [value for value in leaves(written_by(name, args, kwargs)) if isinstance(value, StoredTensor)]
    used = _parameters(stored)
    if not targets and is_too_much(used):
        copies: dict[int, torch.Tensor] = {}

        def copy(value: Any) -> Any:
            if not is_without_memory(value):
                return value
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            return copies[id(value)]

        return func(*changed(args, copy), **changed(kwargs, copy))
    for value in targets:
        if value.has_own_gradient() and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")  # as torch says it
        if _records_nothing(value) and any(
            isinstance(one, torch.Tensor) and _needs_gradient(one) for one in leaves((args, kwargs))
        ):
            raise MisuseError(
                f"what needs a gradient cannot be written to a view of {value.source.shown}, which is frozen (or the view was "
                "made under torch.no_grad()): write under torch.no_grad(), or write to the whole parameter"
            )
        value.source.refuse_in_place(value, call)
    sources = {id(value): value.source for value in stored}  # a parameter is not stored any more while it is held
    for kind in {type(source) for source in sources.values()}:
        kind.prepare([source for source in sources.values() if type(source) is kind])
    with ExitStack() as stack:
        values, written = _Values(targets), _parameters(targets)
        shows = hold(stack, used, written)
        recomputed = any(parameter_owner(parameter).recomputes() for parameter in used)

        def real(value: Any) -> Any:
            if isinstance(value, StoredTensor):
                return values.of(value)
            if recomputed and isinstance(value, nn.Parameter) and not value.requires_grad and "_tiered" in value.__dict__:
                return value.detach()  # what a recomputation keeps must not be the parameter itself
            return value

        given = changed(args, real), changed(kwargs, real)
        result = func(*given[0], **given[1])
        values.write_back()
        for value in targets:
            if not isinstance(value, StoredTensor):  # a parameter, whose history torch keeps
                continue
            value.of_graph = value.of_graph or values.became_part_of_a_graph(value)
        if name in COPIED:
            result = result.copy("K")
            result.flags.writeable = False
            return result

        def restored(value: Any, which: int | None = None) -> Any:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or type(value) is nn.Parameter:
                return value
            found = values.restored(value)
            if found is not value or is_without_memory(value) or any(value is one for one in used) or not shows(value):
                return found
            parameter = next((one for one in used if shares(one, value)), used[0])
            mine = [one for one in stored if sources[id(one)].held is parameter]
            base = next((one for one in mine if one.requires_grad), mine[0])
            geometry = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            step = Step(base, func, tuple(args), kwargs, which, torch.is_grad_enabled())
            return StoredTensor.of(sources[id(base)], geometry.requires_grad_() if value.requires_grad else geometry, step)

        if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
            found = [restored(value, which) for which, value in enumerate(result)]
            return result if all(a is b for a, b in zip(found, result, strict=True)) else type(result)(found)
        return restored(result)


def _records_nothing(value: Any) -> bool:
    """Return whether a write to ``value`` that autograd should record would not be."""
    step = value.step if isinstance(value, StoredTensor) else None
    return step is not None and not step.recording and torch.is_grad_enabled() and not value.requires_grad


def _parameters(stored: Iterable[StoredTensor]) -> list[torch.Tensor]:
    """Return the parameters whose units have to be held for the values of ``stored``, once each."""
    held = [value.source.held for value in stored]
    return list({id(parameter): parameter for parameter in held if parameter is not None}.values())


@contextmanager
def reading(value: StoredTensor) -> Iterator[torch.Tensor]:
    """Give the values, while they may be read."""
    source, step = value.source, value.step  # a parameter is not stored any more while it is held
    with _inside(source) as whole:
        yield whole if step is None else step(source, whole)


@contextmanager
def _inside(source: Source) -> Iterator[torch.Tensor]:
    """Give all the values of ``source``, while they may be read."""
    source.prepare([source])
    with ExitStack() as stack:
        if source.held is not None:
            hold(stack, [source.held], [])
        yield source.whole()


def shown(values: Any) -> str:
    """Return how errors name the first stored tensor among ``values``."""
    found = next((value for value in leaves(values) if is_without_memory(value)), None)
    return "a parameter" if found is None else found.source.shown
