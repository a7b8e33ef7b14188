"""Makes Markdown of the docstrings for the site: a block after ``::`` is code there, too."""

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


def _fenced(found: re.Match[str]) -> str:
    return ":\n\n```text\n" + inspect.cleandoc(found[1]).strip("\n") + "\n```\n"
