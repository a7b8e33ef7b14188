"""``tiered ls``: list the models, generations and tensors of a store, also while a job has it open."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_generation, add_json, add_store, command

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands
    from tiered.store.at_rest import StoreListing

__all__ = ["add_parser"]

DESCRIPTION = """\
List what the commits in a store hold: the models that have a checkpoint, the conversations that tiered generate has
kept, the generations with their meta, and the tensors of one generation. The tensors that a model or a conversation
consists of are listed with --all, or where PATTERN matches.
Nothing is changed. The command works while a job has the store open, and after one died. In a folder that cannot be
written to, parameters are only counted while no process has the store open for writing.

The exit code is 1 where a manifest is damaged. Control characters in names and meta are escaped, and long names
are shortened in the middle; --json has all of them.
"""

LINE = 1000
"""Most characters of a path or an error."""

EXAMPLES = """\
examples:
  tiered ls state/
  tiered ls state/ --all
  tiered ls state/ 'layer*'             tensors whose names begin with layer; * also matches /
  tiered ls state/ --generation 7 --json
"""


def add_parser(commands: Commands) -> None:
    """Add ``ls`` to the commands."""
    parser = command(commands, "ls", "list the models and tensors of a store", DESCRIPTION, EXAMPLES)
    add_store(parser)
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="list only tensors whose names match (*, ? and [...])")
    parser.add_argument("--all", action="store_true", help="list the tensors that models consist of, too")
    add_generation(parser, "list this generation (default: the newest)")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.output import refuse_unwritable, write_report
    from tiered.errors import meant
    from tiered.store.at_rest import listing

    near = ""
    refuse_unwritable(parsed.json)
    found = listing(parsed.folder, parsed.generation)
    meta = next(one.meta for one in found.generations if one.number == found.number)
    models, note = _models(found, meta, parsed.paths)
    chats, unfinished = _conversations(found), _unfinished(found)
    if parsed.pattern is not None:
        keys = [one.key for one in found.tensors]
        found = replace(found, tensors=tuple(one for one in found.tensors if fnmatchcase(one.key, parsed.pattern)))
        models, note, chats, unfinished = [], None, [], []
        near = "" if found.tensors else meant(parsed.pattern, keys)
    if parsed.json != "-":
        print(_described(found, models, chats, unfinished, note, parsed.pattern, pieces=parsed.all) + near)
    write_report(parsed.json, _as_json(found, models, chats, unfinished, note))
    return 1 if any(one.problem for one in found.generations) else 0


def _models(
    found: StoreListing, meta: Mapping[str, object], paths: list[str] | None
) -> tuple[list[dict[str, Any]], str | None]:
    """List the models that have a checkpoint, and say why their parameters could not be counted (None where they were).

    Counting reads the data files, for which the generation is pinned."""
    names = sorted(one.key.removesuffix("/checkpoint") for one in found.tensors if one.key.endswith("/checkpoint"))
    if not names:
        return [], None
    from tiered.errors import TieredError
    from tiered.store.at_rest import StoreAtRest
    from tiered.zero.checkpoint.safetensors import parameters_of

    counted: dict[str, tuple[int | None, object]] = dict.fromkeys(names, (None, None))
    note = None
    try:
        with StoreAtRest(found.folder, paths=paths, generation=found.number) as store:
            for name in names:
                counted[name] = parameters_of(store, name)
    except TieredError as error:
        note = str(error)
    models = []
    for name in names:
        numbers, steps = counted[name]
        models.append(_model(found, name) | {"parameters": numbers, "step": meta.get("step", steps)})
    return models, note


def _model(found: StoreListing, name: str) -> dict[str, Any]:
    """Sum up the tensors of one model. Below ``name/param/`` each unit has its parameters under its own name, and its gradient
    and optimizer states under names that continue after a slash."""
    prefix = f"{name}/param/"
    pieces = {one.key.removeprefix(prefix): one.spec.nbytes for one in found.tensors if one.key.startswith(prefix)}
    return {
        "name": name,
        "parameters": None,
        "units": sum("/" not in piece for piece in pieces),
        "bytes": sum(one.spec.nbytes for one in found.tensors if one.key.startswith(f"{name}/")),
        "average_bytes": sum(nbytes for piece, nbytes in pieces.items() if piece.endswith("/average")),
        "state_bytes": sum(nbytes for piece, nbytes in pieces.items() if "#" in piece.rpartition("/")[2] and "/" in piece),
        "step": None,
    }


def _conversations(found: StoreListing) -> list[dict[str, Any]]:
    """Sum up the tensors of each kept cache of keys and values: a conversation, with what the model has computed of it."""
    from tiered.integrations.kept import OF_CACHE, kept_caches

    sizes = {one.key: one.spec.nbytes for one in found.tensors}
    return [
        {"name": name, "bytes": sum(size for key, size in sizes.items() if key.startswith(name + OF_CACHE))}
        for name in kept_caches(sizes)
    ]


def _unfinished(found: StoreListing) -> list[str]:
    """Return the names of models whose import is not finished."""
    from tiered.integrations.kept import UNFINISHED, key_of_file

    mark = key_of_file("", UNFINISHED)
    return sorted(one.key.removesuffix(mark) for one in found.tensors if one.key.endswith(mark))


def _described(
    found: StoreListing,
    models: list[dict[str, Any]],
    chats: list[dict[str, Any]],
    unfinished: list[str],
    note: str | None,
    pattern: str | None,
    *,
    pieces: bool,
) -> str:
    from tiered.cli.output import counted, table
    from tiered.errors import shown
    from tiered.integrations.kept import OF_CACHE
    from tiered.types import format_size

    lines = []
    if models:
        averages = any(model["average_bytes"] for model in models)
        rows = [("model", "parameters", "units", "states", *(["average"] if averages else []), "size", "step")]
        for model in models:
            count = "?" if model["parameters"] is None else f"{model['parameters']:,}"
            step = "" if model["step"] is None else str(model["step"])
            sizes = [format_size(model[of]) for of in ("state_bytes", *(["average_bytes"] if averages else []), "bytes")]
            rows.append((model["name"], count, str(model["units"]), *sizes, step))
        lines += [table(rows), *([f"parameters were not counted: {shown(note, LINE)}"] if note else []), ""]
    for name in unfinished:
        lines += [f"the import of model {name!r} is not finished: the same tiered import goes on with it", ""]
    if chats:
        kept = [("conversation", "size"), *((chat["name"], format_size(chat["bytes"])) for chat in chats)]
        lines += [table(kept), ""]
    generations = [("generation", "tensors", "size", "meta")]
    for one in found.generations:
        told = one.problem or (json.dumps(one.meta) if one.meta else "")
        numbers = ("?", "?") if one.problem else (f"{one.tensors:,}", format_size(one.nbytes))
        generations.append((str(one.number), *numbers, told))
    if pattern is None:
        lines += [table(generations, "rrrl"), ""]
    of_models = [*(model["name"] for model in models), *unfinished]
    parts = (*(f"{name}/" for name in of_models), *(chat["name"] + OF_CACHE for chat in chats))
    listed = [one for one in found.tensors if pieces or not one.key.startswith(parts)]
    if listed:
        lines.append(f"generation {found.number}:")
        tensors = [("tensor", "type", "shape", "size", "written in")]
        for each in listed:
            spec = each.spec
            tensors.append((each.key, spec.dtype, str(list(spec.shape)), format_size(spec.nbytes), str(each.written)))
        lines += [table(tensors, "lllr"), ""]
    total, where = sum(one.spec.nbytes for one in found.tensors), shown(found.folder, LINE)
    hidden = len(found.tensors) - len(listed)
    told = f" ({hidden:,} of models{' and conversations' if chats else ''}, listed with --all)" if hidden else ""
    matching = "" if pattern is None else f" matching {shown(pattern)!r}"
    number = f"{counted(len(found.tensors), 'tensor')}{matching} in generation {found.number}{told}"
    lines.append(f"{where}: {number}, {format_size(total)}; {format_size(found.nbytes)} in {_all(len(found.generations))}")
    return "\n".join(lines)


def _all(generations: int) -> str:
    return "its only generation" if generations == 1 else f"all {generations} generations"


def _as_json(
    found: StoreListing, models: list[dict[str, Any]], chats: list[dict[str, Any]], unfinished: list[str], note: str | None
) -> dict[str, Any]:
    return {
        "folder": found.folder,
        "generations": [
            {"number": one.number, "meta": one.meta, "tensors": one.tensors, "bytes": one.nbytes, "problem": one.problem}
            for one in found.generations
        ],
        "generation": found.number,
        "tensors": [
            {
                "name": one.key,
                "dtype": one.spec.dtype,
                "shape": list(one.spec.shape),
                "bytes": one.spec.nbytes,
                "written": one.written,
            }
            for one in found.tensors
        ],
        "models": models,
        "conversations": chats,
        "unfinished_imports": unfinished,
        "note": note,
        "bytes": sum(one.spec.nbytes for one in found.tensors),
        "bytes_in_all_generations": found.nbytes,
    }
