"""``tiered ls``: generations, tensors and models of a store that need not be open."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_json, command, count

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands
    from tiered.store.at_rest import Listing

__all__ = ["add_parser"]

DESCRIPTION = """\
List what the commits in a store's folder hold: generations with their meta, the tensors of one of them, models
with a checkpoint, sums. Nothing is changed; it works while a job has the store open, and after one died. The
exit code is 1 when a manifest is damaged. Names and meta are shown with control characters escaped, and long ones
without their middle; --json has all of them.
"""

LINE = 1000
"""Characters of a path or an error."""

EXAMPLES = """\
examples:
  tiered ls state/
  tiered ls state/ --generation 7 --json
"""


def add_parser(commands: Commands) -> None:
    """Add ``ls`` to the commands."""
    parser = command(commands, "ls", "list what is in a store", DESCRIPTION, EXAMPLES)
    parser.add_argument("folder", metavar="FOLDER", help="the store's own")
    parser.add_argument("--paths", metavar="PATH", nargs="+", help="folders of its data files, where it has several drives")
    parser.add_argument("--generation", metavar="N", type=count, help="the tensors of this one (default: the newest)")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.output import refuse_unwritable, write_report
    from tiered.store.at_rest import listing

    refuse_unwritable(parsed.json)
    found = listing(parsed.folder, parsed.generation)
    meta = next(one.meta for one in found.generations if one.number == found.number)
    models, note = _models(found, meta, parsed.paths)
    if parsed.json != "-":
        print(_described(found, models, note))
    write_report(parsed.json, _as_json(found, models, note))
    return 1 if any(one.problem for one in found.generations) else 0


def _models(found: Listing, meta: Mapping[str, object], paths: list[str] | None) -> tuple[list[dict[str, Any]], str | None]:
    """Those with a checkpoint; and why their parameters could not be counted, which takes a look into the data files."""
    names = sorted(one.key.removesuffix("/checkpoint") for one in found.tensors if one.key.endswith("/checkpoint"))
    if not names:
        return [], None
    from tiered.errors import TieredError
    from tiered.store.at_rest import StoreAtRest
    from tiered.zero.checkpoint.safetensors import parameters_of

    counted: dict[str, int | None] = dict.fromkeys(names)
    note = None
    try:
        with StoreAtRest(found.folder, paths=paths, generation=found.number) as store:
            for name in names:
                counted[name] = parameters_of(store, name)
    except TieredError as error:
        note = str(error)
    return [
        {
            "name": name,
            "parameters": counted[name],
            "units": len({key for key in _keys(found, f"{name}/param/") if _is_unit(key)}),
            "bytes": sum(one.spec.nbytes for one in found.tensors if one.key.startswith(f"{name}/")),
            "step": meta.get("step"),
        }
        for name in names
    ], note


def _keys(found: Listing, prefix: str) -> list[str]:
    return [one.key.removeprefix(prefix) for one in found.tensors if one.key.startswith(prefix)]


def _is_unit(key: str) -> bool:
    """Not one of its gradients or states, whose names go on after a slash."""
    return "/" not in key


def _described(found: Listing, models: list[dict[str, Any]], note: str | None) -> str:
    from tiered.cli.output import table
    from tiered.errors import shown
    from tiered.types import format_size

    lines = []
    rows = [("generation", "tensors", "size", "meta")]
    for one in found.generations:
        told = one.problem or (json.dumps(one.meta) if one.meta else "")
        numbers = ("?", "?") if one.problem else (f"{one.tensors:,}", format_size(one.nbytes))
        rows.append((str(one.number), *numbers, shown(told)))
    lines += [_aligned(row) for row in _padded(rows)]
    if found.tensors:
        lines += ["", f"generation {found.number}:"]
        tensors = [("tensor", "type", "shape", "size", "written in")]
        for each in found.tensors:
            spec = each.spec
            tensors.append((each.key, spec.dtype, str(list(spec.shape)), format_size(spec.nbytes), str(each.written)))
        lines.append(table(tensors, left=3))
    if models:
        lines.append("")
    for model in models:
        has = "" if model["parameters"] is None else f"{model['parameters']:,} parameters in "
        step = "" if model["step"] is None else f", step {shown(str(model['step']))}"
        size = format_size(model["bytes"])
        lines.append(f"model '{shown(model['name'])}': {has}{model['units']} units, {size} with what training needs{step}")
    if note:
        lines.append(f"parameters were not counted: {shown(note, LINE)}")
    total, where = sum(one.spec.nbytes for one in found.tensors), shown(found.folder, LINE)
    lines += ["", f"{where}: {len(found.tensors):,} tensors in generation {found.number}, {format_size(total)}; "
              f"{format_size(found.nbytes)} in all {len(found.generations)} generations"]  # fmt: skip
    return "\n".join(lines)


def _padded(rows: list[tuple[str, str, str, str]]) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[cell.rjust(width) for cell, width in zip(row[:3], widths[:3], strict=True)] + [row[3]] for row in rows]


def _aligned(cells: list[str]) -> str:
    return "  ".join(cells).rstrip()


def _as_json(found: Listing, models: list[dict[str, Any]], note: str | None) -> dict[str, Any]:
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
        "note": note,
        "bytes": sum(one.spec.nbytes for one in found.tensors),
        "bytes_in_all_generations": found.nbytes,
    }
