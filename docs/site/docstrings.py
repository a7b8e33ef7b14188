"""Prepares the docstrings for the site: a block after ``::`` is code there, too; private bases are left out, and the members of
named tuples and enumerations are listed."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe


class Prose(griffe.Extension):
    """Turn ``text::`` before an indented block into ``text:``, and the block into a fence."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"::\n\n((?:(?:    .*)?\n)*(?:    .*))", _fenced, obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        bases = [str(base) for base in cls.bases]
        if cls.docstring and {"NamedTuple", "_Name"} & set(bases):
            members = [one for one in cls.attributes.values() if not one.name.startswith("_")]
            cls.docstring.value += "\n\n" + "\n".join(f"- `{_declared(one)}`" for one in members)
        cls.bases = [base for base, name in zip(cls.bases, bases, strict=True) if not re.search(r"\b_[A-Za-z]", name)]


def _declared(attribute: griffe.Attribute) -> str:
    """Return what declares an attribute, as in docs/reference.md: ``tier: str | None = None``."""
    kind = f": {attribute.annotation}" if attribute.annotation is not None else ""
    value = f" = {attribute.value}" if attribute.value is not None else ""
    return attribute.name + kind + value


def _fenced(found: re.Match[str]) -> str:
    return ":\n\n```text\n" + inspect.cleandoc(found[1]).strip("\n") + "\n```\n"
