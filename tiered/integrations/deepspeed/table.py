"""What becomes of each key of DeepSpeed's configuration, of version 0.19: whether it is honoured, unneeded or refused, and why.

``keys.json`` says it. Its keys are those of https://www.deepspeed.ai/docs/config-json/ and of the classes that read it in
DeepSpeed 0.19.8. What is printed at start, ``tiered deepspeed-config`` and docs/from_deepspeed.md come from it.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from typing import Any

import msgspec

from tiered.errors import MisuseError

__all__ = [
    "ALIASES",
    "AUTO",
    "FILLED",
    "GROUPS",
    "KEYS",
    "NEEDED",
    "QUESTIONS",
    "SECTION",
    "Judged",
    "Key",
    "Verdict",
    "canonical",
    "find",
    "judged",
    "number_of",
    "said",
    "value_at",
]

AUTO = "auto"
"""The value that a library fills in (Hugging Face's)."""
SECTION = "tiered"
"""The section of this project. DeepSpeed ignores it."""


class Verdict(str, Enum):
    """What becomes of a key: it has its effect, its value makes no difference here, or training does not begin."""

    HONOURED = "honoured"
    UNNEEDED = "unneeded"
    REFUSED = "refused"


class _Ruling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of keys. ``why``: what is done, why nothing needs to be, or why it cannot be.

    Of an honoured key: ``allowed``, its possible values (none: any), with ``otherwise``, why others are refused; ``but``, the
    values that are refused by reason, in lower case.
    ``off``: values of a refused key that ask for nothing, beside None. ``switch``: the key in a refused section that has to be
    true for the section to ask for something. ``inner``: the documented keys of a section that is judged as a whole.
    """

    verdict: Verdict
    why: str
    allowed: tuple[Any, ...] = ()
    otherwise: str = ""
    but: dict[str, tuple[str, ...]] = {}
    off: tuple[Any, ...] = ()
    switch: str = ""
    inner: tuple[str, ...] = ()


class _Row(_Ruling, frozen=True, kw_only=True):
    """Several keys with one ruling, as the file has them: their kinds by their paths."""

    keys: dict[str, str]


class Key(_Ruling, frozen=True, kw_only=True):
    """One key. ``path``: names joined by dots; "*": any other name. ``kind``: "bool", "int", "number", "str", "list", "dict",
    or several joined by "|"; "any"."""

    path: str
    kind: str

    @property
    def whole(self) -> bool:
        """Return whether what is below this key is judged with it."""
        return self.verdict is Verdict.REFUSED or bool(self.inner)


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[str, list[_Row]]
    aliases: dict[str, str]
    filled: dict[str, str]
    needed: tuple[str, ...]
    questions: dict[str, tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Judged:
    """A key of a configuration, its value, and what becomes of it."""

    path: str
    value: Any
    verdict: Verdict
    why: str


def _keys(row: _Row) -> Iterator[Key]:
    ruling = {name: getattr(row, name) for name in _Ruling.__struct_fields__}
    return (Key(path=path, kind=kind, **ruling) for path, kind in row.keys.items())


_TABLE = msgspec.json.decode(files(__package__).joinpath("keys.json").read_bytes(), type=_Table)
GROUPS: Mapping[str, list[Key]] = {title: [key for row in rows for key in _keys(row)] for title, rows in _TABLE.keys.items()}
"""The keys, as docs/from_deepspeed.md groups them."""
KEYS: tuple[Key, ...] = tuple(key for keys in GROUPS.values() for key in keys)
ALIASES = _TABLE.aliases
"""Other names that DeepSpeed takes for a key."""
FILLED = _TABLE.filled
"""The attributes of Hugging Face's ``TrainingArguments`` that their Trainer fills keys with that are "auto"."""
NEEDED = _TABLE.needed
"""Keys whose default is not what Hugging Face would fill in."""
QUESTIONS = _TABLE.questions
"""For each method of DeepSpeed's engine that asks for a key: the key, and DeepSpeed's default."""

_BY_PATH = {key.path: key for key in KEYS}
_SECTIONS = {path[:at] for path in _BY_PATH for at, letter in enumerate(path) if letter == "."}
_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int, float),
    "number": (int, float),
    "str": (str,),
    "list": (list, tuple),
    "dict": (dict,),
}


def value_at(values: Mapping[str, Any], path: str, otherwise: Any = None) -> Any:
    """Return the value of a key in a configuration, or ``otherwise``."""
    found: Any = values
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return otherwise
        found = found[name]
    return found


def canonical(path: str) -> str:
    """Return the name of a key that the table has, of one that may be an alias, or in a section that is."""
    for alias, name in ALIASES.items():
        if path == alias or path.startswith(f"{alias}."):
            return name + path[len(alias) :]
    return path


def find(path: str) -> Key | None:
    """Return the row of a key: its own, or that of the section that is judged as a whole."""
    path = canonical(path)
    if path in _BY_PATH:
        return _BY_PATH[path]
    if path not in _SECTIONS and f"{path.rpartition('.')[0]}.*" in _BY_PATH:
        return _BY_PATH[f"{path.rpartition('.')[0]}.*"]
    while "." in path:
        path = path.rpartition(".")[0]
        if path in _BY_PATH and _BY_PATH[path].whole:
            return _BY_PATH[path]
    return None


def judged(config: Mapping[str, Any]) -> list[Judged]:
    """Return what becomes of each key of a configuration, in its order. Raises MisuseError for a key that there is not, naming
    the nearest one, and for a value of another kind than the key's."""
    return list(_judged(config, ""))


def _judged(config: Mapping[str, Any], above: str) -> Iterator[Judged]:
    for name, value in config.items():
        path = f"{above}{name}"
        key, section = find(path), canonical(path)
        if section == "zero_optimization" and isinstance(value, bool):
            yield Judged(path, value, Verdict.HONOURED, f"deprecated by DeepSpeed: stage {int(value)}")
        elif section in _SECTIONS and not (key is not None and key.verdict is not Verdict.HONOURED):
            if value is None:
                yield Judged(path, value, Verdict.UNNEEDED, "it asks for nothing")
            elif not isinstance(value, Mapping):
                raise MisuseError(f"{path!r} is a section of the configuration, not {value!r:.60}")
            elif value.get("enabled") is False and find(f"{path}.enabled") is not None:
                yield from _disabled(value, f"{path}.")
            else:
                yield from _judged(value, f"{path}.")
        elif key is None:
            raise MisuseError(_unknown(path))
        else:
            yield _row(key, path, value)


def _disabled(section: Mapping[str, Any], above: str) -> Iterator[Judged]:
    """Return what becomes of the keys of a section that is switched off, whatever they are."""
    for name, value in section.items():
        key = find(f"{above}{name}")
        if name == "enabled" and key is not None:
            yield _row(key, f"{above}{name}", value)
        else:
            yield Judged(f"{above}{name}", value, Verdict.UNNEEDED, "its section is disabled")


def _row(key: Key, path: str, value: Any) -> Judged:
    if key.verdict is Verdict.REFUSED:
        if value is None or value in key.off or (key.switch and isinstance(value, Mapping) and not _is_on(key.switch, value)):
            return Judged(path, value, Verdict.UNNEEDED, "it asks for nothing")
        return Judged(path, value, Verdict.REFUSED, key.why)
    if value is None or (value == AUTO and key.kind != "str"):
        why = "filled at start" if value == AUTO and key.verdict is Verdict.HONOURED else key.why
        return Judged(path, value, key.verdict, why)
    if key.kind != "any" and not _is_of(value, key.kind):
        raise MisuseError(f"{path!r} is {_named(key.kind)} in a configuration, not {value!r:.60}")
    if key.allowed and value not in key.allowed:
        return Judged(path, value, Verdict.REFUSED, key.otherwise)
    for reason, values in key.but.items():
        if value.lower() in values:
            return Judged(path, value, Verdict.REFUSED, reason)
    return Judged(path, value, key.verdict, key.why)


def _is_of(value: Any, kind: str) -> bool:
    """Return whether ``value`` is of one of the kinds. A whole number may be written as 5e8."""
    for one in kind.split("|"):
        if isinstance(value, _KINDS[one]) and (one == "bool") is isinstance(value, bool):
            return one != "int" or (isinstance(value, int | float) and float(value).is_integer())
    return False


def said(text: str, kind: str) -> Any:
    """Return what a text says where a value of this kind is meant: a number, true or false; else the text."""
    kinds = set(kind.split("|"))
    if "str" in kinds:
        return text
    if "bool" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return number_of(text) if kinds & {"int", "number"} else text


def number_of(value: Any) -> Any:
    """Return the number that a text says; anything else as it is."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(value)
            return number if math.isfinite(number) and value.isascii() and "_" not in value else value
    return value


def _is_on(switch: str, section: Mapping[str, Any]) -> bool:
    """Return whether a section asks for something: the switch is true, or a number above 1; ``*.enabled``: any of them."""
    if switch == "*.enabled":
        below = [value for value in section.values() if isinstance(value, Mapping)]
        return bool(section.get("enabled")) or any(_is_on(switch, value) for value in below)
    value = section.get(switch, False)
    return value > 1 if type(value) is int else bool(value) and value != AUTO


def _named(kind: str) -> str:
    names = {"bool": "true or false", "int": "a whole number", "number": "a number", "str": "a text", "list": "a list"}
    return " or ".join(names.get(one, "a section") for one in kind.split("|"))


def _unknown(path: str) -> str:
    """Return the message for a key that there is not."""
    known = [*_BY_PATH, *_SECTIONS, *ALIASES]
    above, _, name = path.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == above}
    found = difflib.get_close_matches(name, beside, n=1)
    near = beside[found[0]] if found else next(iter(difflib.get_close_matches(path, known, n=1, cutoff=0.5)), None)
    if near is None:
        anywhere = {one.rpartition(".")[2]: one for one in known}
        last = difflib.get_close_matches(name, anywhere, n=1)
        near = anywhere[last[0]] if last else None
    meant = f", did you mean {near!r}?" if near else ";"
    return f"DeepSpeed's configuration has no key {path!r}{meant} docs/from_deepspeed.md lists all keys"
