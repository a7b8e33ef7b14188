"""Load from a checkpoint the state of an optimizer, a scheduler, a scaler, a position in data, and random generators.

All of them are loaded, or none: each says first whether it can, then all load, and where one fails after all, those before it
go back to what they were.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer as TorchOptimizer

from tiered.errors import ManifestError, MisuseError, TieredError
from tiered.zero.optimizers.optimizer import Optimizer
from tiered.zero.paging.units import Placement
from tiered.zero.rules.known import name_in

__all__ = [
    "Loader",
    "Stateful",
    "keeping_random_states",
    "load_all",
    "of_data",
    "of_generator",
    "of_optimizer",
    "of_random",
    "of_stateful",
    "random_states",
]

SCALING = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class Stateful(Protocol):
    """Scheduler, scaler or data loader: what can return its state, and load it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Loader:
    """How to load one object's state, and how to undo that. Making a loader has changed nothing."""

    what: str
    load: Callable[[], object]
    undo: Callable[[], object]


def load_all(loaders: Sequence[Loader]) -> None:
    """Load everything. Raises MisuseError, with nothing changed, where one of them cannot load what it was given."""
    done: list[Loader] = []
    for loader in loaders:
        done.append(loader)
        try:
            loader.load()
        except BaseException as error:
            for earlier in reversed(done):
                with suppress(Exception):
                    earlier.undo()
            if isinstance(error, TieredError) or not isinstance(error, Exception):
                raise
            raise MisuseError(
                f"{loader.what} cannot take over what was committed of it ({error!r:.200}): make it as it was made then; "
                "what was loaded before it is undone"
            ) from error


# The optimizer


def of_optimizer(
    optimizer: Optimizer,
    here: Sequence[list[str]],
    named: Mapping[str, Placement],
    found: Mapping[str, Any],
    number: int | None = None,
) -> Loader:
    """Make the loader of an optimizer, of several number ``number``.

    ``here``: the names of the parameters by param group; ``named``: all of the model's. Raises MisuseError where the groups are
    other ones, ManifestError where one has what no param group has.
    """
    if list(here) != [group["names"] for group in found["groups"]]:
        which = "the optimizer" if number is None else f"optimizer {number} of those that were given"
        raise MisuseError(
            f"the param groups of {which} have other parameters than those that were committed: give the optimizers that the "
            "commit was made with, several as a list in that order"
        )
    groups, first = [], 0
    for index, (present, group) in enumerate(zip(optimizer.param_groups, found["groups"], strict=True)):
        rule = name_in(group)
        if rule != optimizer.rule_name(index):
            raise MisuseError(
                f"param group {index} was updated by {rule!r:.100} when it was committed, and is by "
                f"{optimizer.rule_name(index)!r}: make the optimizer as it was made then"
            )
        _refuse_settings(present, group, optimizer.settings(index))
        count = len(group["names"])
        settings = {key: value for key, value in group.items() if key not in ("names", "rule")}
        written = {key: value for key, value in present.items() if key not in group}  # by a scheduler that was not committed
        groups.append({**written, **settings, "params": list(range(first, first + count))})
        first += count
    steps = {named[name]: step for name, step in found["steps"].items()}
    before = optimizer.param_groups, optimizer.state, optimizer.steps

    def load() -> None:
        TorchOptimizer.load_state_dict(optimizer, {"state": {}, "param_groups": groups})
        optimizer.adopt()
        optimizer.steps = steps

    def undo() -> None:
        optimizer.param_groups, optimizer.state, optimizer.steps = before
        optimizer.adopt()

    return Loader("optimizer=", load, undo)


def _refuse_settings(present: Mapping[str, Any], group: Mapping[str, Any], settings: Iterable[str]) -> None:
    for key in settings:
        if key not in group:
            raise ManifestError(f"the checkpoint is damaged: a param group has no {key!r}")
    for key, value in group.items():
        if key == "betas":
            fine = isinstance(value, tuple | list) and len(value) == 2 and all(_plain(beta) and 0 <= beta < 1 for beta in value)
        elif key in settings and _plain(present[key]) and type(present[key]) is not bool and key != "lr":
            fine = _plain(value) and math.isfinite(value)
        elif key == "lr":
            fine = _number(value) and math.isfinite(float(value))
        else:
            fine = key not in present or key == "params" or _alike(present[key], value)
        if not fine:
            raise ManifestError(f"the checkpoint is damaged: a param group has {value!r:.100} for {key!r:.100}")


# Schedulers, scalers, data


def of_stateful(given: Stateful, found: Any, what: str) -> Loader:
    """Make the loader of a scheduler or a scaler. Raises ManifestError where ``found`` is not of the kind that torch's have."""
    try:
        before = given.state_dict()
    except Exception as error:
        raise MisuseError(f"{what} cannot say its state ({error!r:.200}), so it could not be given back") from error
    names = set(vars(given)) if isinstance(given, LRScheduler) else None
    if names is not None:
        _refuse_schedule(given, before, found, what)
    elif isinstance(given, torch.amp.GradScaler):
        _refuse_scaling(before, found, what)

    def undo() -> None:
        given.load_state_dict(before)
        for name in set(vars(given)) - names if names is not None else ():  # torch's take over whatever there is
            delattr(given, name)

    return Loader(what, lambda: given.load_state_dict(found), undo)


def of_data(given: Stateful, found: Any) -> Loader:
    """Make the loader of a data loader. It comes after everything else that may fail, so nothing is asked of it first."""
    return Loader("data=", lambda: given.load_state_dict(found), lambda: None)


def _refuse_schedule(given: object, before: Any, found: Any, what: str) -> None:
    lacks = {"last_epoch", "base_lrs"} & set(before)
    if not isinstance(found, dict) or lacks - set(found):
        raise ManifestError(f"the checkpoint has {found!r:.100} for {what}, which is no state of a {type(given).__name__}")
    torchs = type(given).__module__ == LRScheduler.__module__  # what other people's have may become anything
    for name, value in found.items():
        fine = isinstance(name, str) and (name in before or not hasattr(type(given), name))  # else it would hide a method
        if fine and name in before and (torchs or name in ("last_epoch", "base_lrs")):
            fine = _alike(before[name], value) and (name != "base_lrs" or len(value) == len(before[name]))
        if not fine:
            raise ManifestError(
                f"the checkpoint has {value!r:.100} for {name!r:.100} of {what}, which a {type(given).__name__} does not "
                "have: it is damaged, or was of another kind"
            )


def _refuse_scaling(before: Any, found: Any, what: str) -> None:
    if not isinstance(found, dict):
        raise ManifestError(f"the checkpoint has {found!r:.100} for {what}")
    if bool(before) is not bool(found):
        is_, was = ("is", "was not") if before else ("is not", "was")
        raise MisuseError(f"{what} {is_} enabled, and what was committed {was}: make it as it was made then")
    if before.keys() != found.keys():
        raise ManifestError(f"the checkpoint has {sorted(map(str, found))!r:.100} of {what}, and not {sorted(before)}")
    for name in SCALING & found.keys():
        value, whole = found[name], name in ("growth_interval", "_growth_tracker")
        if not _plain(value) or not math.isfinite(value) or value < 0 or (whole and type(value) is not int):
            raise ManifestError(f"the checkpoint has {value!r:.100} for {name!r} of {what}")


def _plain(value: Any) -> bool:
    return type(value) is float or (type(value) is int and value.bit_length() <= 64)


def _number(value: Any) -> bool:
    return _plain(value) or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex())


def _alike(present: Any, found: Any) -> bool:
    """Return whether what was committed may take the place of what is there: a number of a number, a list of a list. None fits
    anything."""
    if present is None:
        return True
    if isinstance(present, bool | str):
        return type(found) is type(present)
    if isinstance(present, torch.Tensor) and present.numel() != 1:
        return isinstance(found, torch.Tensor) and found.shape == present.shape
    if isinstance(present, int | float | torch.Tensor):
        return _number(found) and not math.isnan(float(found))
    if isinstance(present, Mapping):
        return isinstance(found, Mapping) and all(_alike(present[key], found[key]) for key in present.keys() & found.keys())
    if isinstance(present, list | tuple):
        return isinstance(found, list | tuple) and all(map(_alike, present, found))
    return True


# Random generators


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy where it was imported, and torch."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    }


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """Have the random generators go on after a block as if it had not been."""
    before = random_states()
    try:
        yield
    finally:
        load_all([of_random(before)])


def of_random(found: Mapping[str, Any]) -> Loader:
    """Make the loader of what ``random_states`` returned. Raises ManifestError for what these generators do not take: others
    try it first."""
    cuda = (found["cuda"] or [])[: torch.cuda.device_count()] if torch.cuda.is_available() else []
    numpy = sys.modules.get("numpy")
    _try("Python", lambda: random.Random().setstate(found["python"]))
    if found["python"][2] is not None and not _plain(found["python"][2]):
        raise ManifestError(f"the checkpoint has {found['python'][2]!r:.100} for a number of Python's random generator")
    _try("torch", lambda: torch.Generator().set_state(found["torch"]))
    if numpy is not None and found["numpy"] is not None:
        _try("NumPy", lambda: numpy.random.RandomState().set_state(found["numpy"]))
    for index, state in enumerate(cuda):
        _try(f"device {index}", lambda state=state, index=index: torch.Generator(f"cuda:{index}").set_state(state))  # type: ignore[misc]
    before = random_states()

    def put(states: Mapping[str, Any], devices: Sequence[torch.Tensor]) -> None:
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        if numpy is not None and states["numpy"] is not None:
            numpy.random.set_state(states["numpy"])
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return Loader("the random generators", lambda: put(found, cuda), lambda: put(before, before["cuda"] or []))


def of_generator(generator: torch.Generator, found: Any) -> Loader:
    """Make the loader of ``data=`` where it is a generator."""
    if not isinstance(found, torch.Tensor):
        raise MisuseError(f"data= is a torch.Generator, and what was committed was another: it has {found!r:.100}")
    _try("data=", lambda: torch.Generator(generator.device).set_state(found))
    before = generator.get_state()
    return Loader("data=", lambda: generator.set_state(found), lambda: generator.set_state(before))


def _try(whose: str, take: Callable[[], object]) -> None:
    try:
        take()
    except (RuntimeError, TypeError, ValueError, OverflowError, IndexError) as error:
        raise ManifestError(f"the checkpoint has a random state that {whose} does not take: {error!r:.200}") from error
