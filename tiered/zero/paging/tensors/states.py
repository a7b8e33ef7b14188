"""Show the states that are in the store as ``optimizer.state`` of torch shows its own: read when they are asked for.

What is read are copies, on the device of the parameter. A write to them would be lost, and raises MisuseError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from tiered.errors import MisuseError
from tiered.zero.paging.tensors.copies import CopiedValues

__all__ = ["ParameterState", "StateView"]

Names = tuple[str, ...]
Read = Callable[[torch.Tensor, Names], dict[str, torch.Tensor]]


class ParameterState:
    """States of one parameter, by name: step, exp_avg, exp_avg_sq, and ``master`` of one in bf16 or fp16. It is no ``dict``: a
    library that maps over containers of tensors leaves it as it is, and nothing is read."""

    def __init__(self, name: str, names: Names, read: Callable[[Names], dict[str, torch.Tensor]]) -> None:
        self.name, self._names, self._read = name, names, read

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._names:
            raise KeyError(key)
        return CopiedValues.of(self._read((key,))[key], _ReadOnly(self.name, key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def keys(self) -> Names:
        return self._names

    def values(self) -> Iterator[torch.Tensor]:
        return (value for _, value in self.items())

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        found = self._all()
        return ((key, CopiedValues.of(found[key], _ReadOnly(self.name, key))) for key in self._names)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._names else default

    def copy(self) -> dict[str, torch.Tensor]:
        return dict(self.items())

    def __deepcopy__(self, memo: Any) -> dict[str, torch.Tensor]:
        return self._all()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self._all(),)

    def _all(self) -> dict[str, torch.Tensor]:
        return self._read(self._names) if self._names else {}

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _lost(f"optimizer.state of {self.name!r}")

    __setitem__ = __delitem__ = update = setdefault = pop = popitem = clear = _refuse


class StateView(Mapping[torch.Tensor, ParameterState]):
    """States by parameter, of those that have had a step. ``parameters``: all of the optimizer, with their names; ``names``: of
    the states of one that has some; ``read`` returns new copies of some of these."""

    def __init__(
        self,
        parameters: Callable[[], Iterable[tuple[torch.Tensor, str]]],
        names: Callable[[torch.Tensor], Names],
        read: Read,
    ) -> None:
        self._parameters, self._names, self._read = parameters, names, read

    def __getitem__(self, parameter: torch.Tensor) -> ParameterState:
        for known, name in self._parameters():
            if known is parameter:
                return ParameterState(name, self._names(known), partial(self._read, known))
        raise MisuseError("optimizer.state: this parameter is in none of the optimizer's param_groups")

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter, _ in self._parameters() if self._names(parameter))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(one is parameter for one in self)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} parameters"

    def get(self, parameter: Any, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default  # noqa: SIM401  # this is what get is

    def __setitem__(self, parameter: torch.Tensor, states: object) -> None:
        found = self[parameter]
        if not isinstance(states, ParameterState) or states.name != found.name:  # what it gave may be put back
            found._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _lost("optimizer.state")

    __delitem__ = update = setdefault = pop = popitem = clear = _refuse


class _ReadOnly:
    """Origin of a copy of a state."""

    itself = True

    def __init__(self, name: str, key: str) -> None:
        self._name, self._key = name, key

    def before_write(self, values: torch.Tensor) -> None:
        self.refuse_outdated()

    def refuse_outdated(self) -> None:
        raise _lost(f"optimizer.state: {self._key!r} of {self._name!r}")

    def written(self, values: torch.Tensor) -> None:
        self.refuse_outdated()


def _lost(what: str) -> MisuseError:
    return MisuseError(
        f"{what} shows copies of states that are in the store, and a write to them would be lost: change what state_dict() "
        "gives, and give it to load_state_dict(); or make a new optimizer for new states"
    )
