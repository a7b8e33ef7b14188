"""The first call that a person makes, with a value of another type: whatever is public says what is right, in one line."""

from __future__ import annotations

import enum
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tiered import TieredError

__all__ = ["WRONG", "refused_in_one_line"]

VALUES = {"Span", "Timeline", "ExpertStatistics", "Moved", "CommitCheckpoints"}
"""What calls return, and a mixin: nobody makes one."""
THEIRS: dict[str, tuple[type[Exception], str]] = {
    "an optimizer of no parameters": (ValueError, "optimizer got an empty parameter list"),
    "a trainer without a model": (RuntimeError, "`Trainer` requires either a `model` or `model_init`"),
    "a missing argument": (TypeError, "required positional argument"),
}
"""What torch, transformers or Python itself says, which callers know, and may catch."""
OVERRIDDEN = {"CommitCheckpoints.get_optimizer_cls_and_kwargs", "TieredTrainer.get_optimizer_cls_and_kwargs"}
"""Methods that transformers calls."""
WRONG: dict[str, Any] = {
    "None": None, "a number": 3, "a text": "x", "bytes": b"x", "an object": object(), "a list": [], "a surrogate": "\ud800",
    "a tensor": torch.tensor(1.0), "a path with a NUL": Path("a\0b"), "a long name": "x" * 300,
}  # fmt: skip


def callables(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """All public functions, constructors, and class methods of a module."""
    found = importlib.import_module(module)
    for name in found.__all__:
        value = getattr(found, name)
        if inspect.isclass(value):
            abstract = getattr(value, "_is_protocol", False) or inspect.isabstract(value)
            if issubclass(value, BaseException | enum.Enum) or abstract or name in VALUES:
                continue
            of_class = {key for key, one in vars(value).items() if isinstance(one, classmethod | staticmethod)}
            for method in sorted(of_class):
                if not method.startswith("_") and f"{name}.{method}" not in OVERRIDDEN:
                    yield f"{module}.{name}.{method}", getattr(value, method)
        if callable(value):
            yield f"{module}.{name}", value


def called(function: Callable[..., Any], wrong: Any) -> None:
    """Give the function the value for each argument that it must be given, and enter what it returns."""
    parameters = inspect.signature(function).parameters.values()
    needed = [one for one in parameters if one.default is one.empty]
    places = [one for one in needed if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not any(one.kind is not one.VAR_KEYWORD for one in parameters):
        return
    result = function(*[wrong] * max(1, len(places)), **{one.name: wrong for one in needed if one.kind is one.KEYWORD_ONLY})
    if hasattr(result, "__exit__"):
        with result:
            pass
    if hasattr(result, "close"):
        result.close()


def refused_in_one_line(module: str) -> int:
    """Make the first calls of a module with each wrong value; return how many were refused. The others are right for that call.

    Makes files in the current folder. Fails for errors that are not of this project, and for those that are no line.
    """
    problems, refused = [], 0
    for name, function in callables(module):
        for what, wrong in WRONG.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    called(function, wrong)
            except TieredError as error:
                refused += 1
                if not str(error).isprintable() or not str(error):
                    problems.append(f"{name} of {what}: {str(error)!r}")
            except Exception as error:
                if not any(isinstance(error, kind) and says in str(error) for kind, says in THEIRS.values()):
                    problems.append(f"{name} of {what}: {error!r:.200}")
    assert not problems, "\n".join(problems)
    print(f"{module}: {refused} calls were refused")
    return refused
