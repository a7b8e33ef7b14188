"""Where the values of a stored tensor are, what a function of torch may ask there, and how units are held for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol

import torch

from tiered.errors import MisuseError
from tiered.types import Access
from tiered.zero.paging.tensors.functions import OTHER, Function

__all__ = [
    "UNITS_HELD",
    "Call",
    "ParameterOwner",
    "Source",
    "hold",
    "is_too_much",
    "parameter_owner",
    "shares",
    "without_us",
]

without_us: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""Calls a function of torch with no ``__torch_function__`` in force. It is of C: no exception leaves that state behind."""

UNITS_HELD = 2
"""Units of the largest size that a function may hold at a time; there is room for eight."""


class Call(NamedTuple):
    """Call of a function of torch, whose name is ``name_of(func)``."""

    name: str
    func: Function
    types: tuple[type, ...]
    args: Sequence[Any]
    kwargs: dict[str, Any]

    def as_it_is(self) -> Any:
        """Have torch answer without asking classes."""
        return without_us(self.func, self.types, self.args, self.kwargs)


class ParameterOwner(Protocol):
    """What a paged model gives to its parameters (``parameter._tiered`` has a method ``owner`` that returns it)."""

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

    def show(self, parameter: torch.Tensor) -> None:
        """Give the parameter its memory, where its unit is held."""
        ...

    def version(self, parameter: torch.Tensor) -> int:
        """Return a number that changes when the values of ``parameter`` do."""
        ...

    def recomputes(self) -> bool:
        """Return whether a part of forward is being computed again within backward."""
        ...

    def refuse_training(self, parameter: torch.Tensor) -> None:
        """Raise MisuseError where ``parameter`` is for reading only."""
        ...

    def give(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Have the parameter be of the shape and the type of ``values``, and have these."""
        ...


class Source:
    """Where the values of a ``StoredTensor`` are. Two of the same class and parameter are equal.

    ``shown``: how errors name it, ``device``: where its values compute, ``version``: a number that changes when the values do.
    ``mend``: what to do instead of what is refused, ``another``: instead of giving it ``.data`` of another shape.
    ``lost_history``: why nothing leads gradients through a tensor that is ``of_graph``, and what to do instead.
    """

    mend = "use a copy (.clone())"
    another = "page a model that has them"
    lost_history = (
        "a tensor that needs a gradient was written to this view, and what uses it would lead no gradient there: write within "
        "torch.no_grad(), or to a copy (.clone())"
    )
    leads = False
    """Whether a view is a tensor of its own to autograd, which leads gradients to the parameter."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.parameter is self.parameter

    def __hash__(self) -> int:
        return id(self.parameter)

    allowed: frozenset[str] = frozenset()
    """Functions of ``REFUSED`` that it answers."""

    @property
    def shown(self) -> str:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def views(self) -> MutableMapping[int, Any] | None:
        """Return the views that there are of it, by number; None where nobody asks."""
        return None

    def divided_into(self) -> Sequence[Source]:
        """Return the sources of the parts that it is divided into, which have views of their own."""
        return ()

    @property
    def version(self) -> int:
        return 0  # where nothing that a graph keeps depends on it

    def like(self) -> torch.Tensor:
        """Return a tensor on the meta device with the size, strides and type of the values, which needs a gradient where they
        do."""
        raise NotImplementedError

    @property
    def held(self) -> torch.Tensor | None:
        """Return the parameter whose unit has to be held while the values are used; None where they are copied."""
        return None

    def whole(self) -> torch.Tensor:
        """Return the values: a copy, or the parameter, which is held."""
        raise NotImplementedError

    def write(self, whole: torch.Tensor) -> None:
        """Bring a copy that was written to to the store."""

    @classmethod
    def prepare(cls, sources: Sequence[Any]) -> None:
        """Make ``sources``, all of this class, ready to be read or written to by one function."""

    def refuse(self, call: Call) -> None:
        """Raise MisuseError where nothing can compute with the values any more."""

    def refuse_in_place(self, value: Any, call: Call) -> None:
        """Raise RuntimeError where torch would refuse that ``call`` writes to ``value``."""

    def itself(self, value: Any, call: Call) -> Any:
        """Answer a function of ``AS_IT_IS`` whose first argument is ``value``."""
        if call.name == "untyped_storage":
            raise MisuseError(f"{self.shown} has no storage, as its values are in the store: use that of a copy (.clone())")
        return call.as_it_is()

    def answer(self, value: Any, call: Call) -> Any:
        """Return what ``call``, of which ``value`` is an argument, returns where that needs not all values; else
        NotImplemented."""
        return NotImplemented

    def refuse_data(self, value: Any, data: Any) -> None:
        """Raise MisuseError where ``data`` cannot be assigned to ``.data`` of ``value``, whatever its shape."""

    def edges(self) -> list[Any]:
        """Return what ``torch.autograd.grad`` takes in place of the parameter: one for each part of its gradient."""
        raise MisuseError(f"{self.shown} leads no gradients: {self.mend}")

    def joined(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the gradient of the parameter, whose ``edges`` have ``parts``, not all of them None."""
        raise NotImplementedError

    def collected(self, value: Any) -> torch.Tensor:
        """Return a copy of ``value``, because it was assigned to a parameter's ``grad``, which shows another one."""
        found: torch.Tensor = value.values()
        return found

    def printed(self, value: Any) -> str | None:
        """Return how ``value`` prints, where that is not how its values do."""
        return None


def parameter_owner(parameter: torch.Tensor) -> ParameterOwner:
    """Return the model of a parameter. Raises MisuseError for another tensor that was given its class or attributes, and where
    the model is gone."""
    handle: Any = parameter.__dict__.get("_tiered")
    if handle is None or not handle.is_of(parameter):
        raise MisuseError(OTHER)
    found: ParameterOwner | None = handle.owner()
    if found is None:
        raise MisuseError(f"the model of parameter {handle.name!r} is gone: keep it as long as its parameters are used")
    return found


def is_too_much(parameters: Sequence[torch.Tensor]) -> bool:
    owners = {id(owner): owner for owner in map(parameter_owner, parameters)}
    return len(parameters) > 1 and any(
        owner.nbytes([p for p in parameters if parameter_owner(p) is owner]) > owner.room for owner in owners.values()
    )


def hold(
    stack: ExitStack, parameters: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], bool]:
    """Hold ``parameters`` until ``stack`` ends, those that are ``written`` to for writing. Return what tells whether a tensor
    shows their memory."""
    shows = []
    for access in (Access.WRITE, Access.READ):
        mine = [p for p in parameters if any(p is other for other in written) is (access is Access.WRITE)]
        owners = {id(owner): owner for owner in map(parameter_owner, mine)}
        for owner in owners.values():
            shows.append(stack.enter_context(owner.accessing([p for p in mine if parameter_owner(p) is owner], access)))
    return lambda tensor: any(show(tensor) for show in shows)


def shares(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` begins within the memory of ``parameter``, which is held."""
    begin = parameter.data_ptr()
    return begin <= tensor.data_ptr() < begin + max(1, parameter.nbytes)
