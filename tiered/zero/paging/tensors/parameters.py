"""Parameters whose values are in the store and that nobody holds: their class, their storage, and what they answer.

While nobody holds its unit, a parameter has the class ``PagedParameter``, a subclass of its own one, and of ``StoredTensor``.
The object stays the same, with its gradient, its hooks and its place in sets and optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tiered.errors import MisuseError
from tiered.zero.paging.tensors.functions import RESHAPED, asks_for_gradient, words
from tiered.zero.paging.tensors.sources import Call, Source, parameter_owner, without_us
from tiered.zero.paging.tensors.stored import Kept, StoredTensor, no_copy, reading

__all__ = ["PagedParameter", "PagedStorage", "Whole", "give", "paged_class", "refuse_replacing", "refuse_sharing", "unpage"]


class PagedParameter(StoredTensor, nn.Parameter):
    """A parameter while its values are in the store and nobody holds them. Use it like any other parameter."""

    held_class: type[nn.Parameter] = nn.Parameter

    def __new__(cls, *args: Any, **kwargs: Any) -> PagedParameter:
        """Refuse to make one: ``type(parameter)(values)`` has no place in a store. ``page`` changes the class of parameters."""
        raise MisuseError(
            "type(parameter)(values) cannot make a paged parameter: write to the one there is (parameter.copy_(values)), or "
            "use torch.nn.Parameter(values); offloading hooks, which do so, are not needed for a model in a store"
        )

    @property
    def source(self) -> Source:
        known = self.__dict__
        if "_source" in known:  # another parameter, that torch.nn.Parameter made of this one
            found: Source = known["_source"]
            return found
        handle: Any = known.get("_tiered")
        return Whole(self) if handle is None else handle.source(self)

    def __deepcopy__(self, memo: Any) -> Any:
        if self.step is None:
            raise no_copy()
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.step is None:
            raise no_copy()
        return super().__reduce_ex__(protocol)


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


for _method in words(
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


class _Between(nn.Parameter):
    """Class of a parameter while it gets memory."""

    memory = torch._C.TensorBase.data  # of C, whatever ``torch.Tensor.data`` is


def give(parameter: nn.Parameter, kind: type[nn.Parameter], values: torch.Tensor) -> None:
    """Make ``parameter`` one of class ``kind``, on the memory of ``values``."""
    changing: Any = parameter
    # One statement of assignments in C: no signal handler comes between them.
    changing.__class__, changing.memory, changing.__class__ = _Between, values, kind


def unpage(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Make a parameter an ordinary one, which has ``values``. Nothing interrupts this between its parts."""
    give(parameter, parameter.held_class if isinstance(parameter, PagedParameter) else type(parameter), values)


class Whole(Source):
    """A parameter that is in one unit. Its values are the parameter itself, while the unit is held."""

    mend = "use a copy (.clone()), or tiered.zero.gathered"
    leads = True

    @property
    def shown(self) -> str:
        handle: Any = self.parameter.__dict__.get("_tiered")
        return "a parameter" if handle is None else f"parameter {handle.name!r}"

    @property
    def device(self) -> torch.device:
        getter: Any = torch.Tensor.device
        found: torch.device = without_us(getter.__get__, (), (self.parameter,), {})
        return found

    @property
    def views(self) -> MutableMapping[int, Any] | None:
        handle: Any = self.parameter.__dict__.get("_tiered")
        return None if handle is None else handle.views

    @property
    def version(self) -> int:
        return parameter_owner(self.parameter).version(self.parameter)

    def like(self) -> torch.Tensor:
        parameter = self.parameter
        stride = parameter_owner(parameter).stride(parameter)
        made = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device="meta")
        return made.requires_grad_() if parameter.requires_grad else made

    @property
    def held(self) -> torch.Tensor:
        return self.parameter  # type: ignore[no-any-return]

    def whole(self) -> torch.Tensor:
        return self.parameter  # type: ignore[no-any-return]

    def itself(self, value: StoredTensor, call: Call) -> Any:
        name, args = call.name, call.args
        if value.step is None:
            if name == "_has_compatible_shallow_copy_type":
                refuse_replacing(self, value, args[1])
            if asks_for_gradient(name, args, call.kwargs):
                parameter_owner(self.parameter).refuse_training(self.parameter)
            if name in ("data_ptr", "untyped_storage"):
                self._show()
            found = call.as_it_is()
            return self._named(found) if name == "untyped_storage" and isinstance(self.parameter, PagedParameter) else found
        if name == "untyped_storage":
            return self.parameter.untyped_storage()
        if name == "data_ptr":  # no memory: what tells whether tensors share theirs
            return self.parameter.data_ptr() + value.geometry.storage_offset() * value.geometry.itemsize
        if name in ("_base.__get__", "_version.__get__") and not value.has_own_gradient():
            with reading(value) as made:
                return without_us(call.func, call.types, (made, *args[1:]), call.kwargs)
        return call.as_it_is()

    def _show(self) -> None:
        """Have the parameter get its memory where its unit is held, as within a hook that lists the parameters of a module."""
        handle: Any = self.parameter.__dict__.get("_tiered")
        owner = None if handle is None or not handle.is_of(self.parameter) else handle.owner()
        if owner is not None:
            owner.show(self.parameter)

    def _named(self, storage: Any) -> Any:
        """Return the storage of the parameter, which nobody holds, as what tells its size, and refuses the rest."""
        kind: type = type(storage)
        if kind is torch.UntypedStorage:
            storage.__class__ = PagedStorage
            storage.tiered = self.parameter.nbytes, self.shown
        return storage

    def refuse_data(self, value: StoredTensor, data: Any) -> None:
        if value.step is not None:
            raise MisuseError(
                f"{self.shown}: data of a view of a parameter in the store would be lost, because the view is made anew at "
                "each use: use the parameter itself, or a copy (.clone())"
            )
        refuse_sharing(self, data)

    def edges(self) -> list[Any]:
        return [without_us(get_gradient_edge, (), (self.parameter,), {})]


def refuse_replacing(source: Source, value: StoredTensor, other: Any) -> None:
    """Raise MisuseError where a module is about to put ``other``, a parameter of another kind of device (meta), in the place of
    ``value``, or to swap them."""
    if isinstance(other, torch.Tensor) and other.device.type != source.device.type:
        raise MisuseError(
            f"{source.shown} is paged and computes on {source.device}, where the store's top tier is: it cannot be moved to "
            f"{other.device}"
        )
    if value.step is None and torch.__future__.get_swap_module_params_on_conversion():
        raise MisuseError(
            f"{source.shown}: swap_tensors {RESHAPED}: convert a model before zero.page, and leave "
            "torch.__future__.set_swap_module_params_on_conversion out after that"
        )


def refuse_sharing(source: Source, data: Any) -> None:
    """Raise MisuseError where ``.data`` of a parameter is about to be that of another one."""
    apart = isinstance(data, StoredTensor) and data.source != source and not isinstance(data.source, Kept)
    if apart and isinstance(data.root, PagedParameter):
        raise MisuseError(
            f"{source.shown} would share its memory with {data.source.shown}, and they are apart in the store: give it a copy "
            "(.clone()), or tie the modules, with one Parameter object, before zero.page"
        )
