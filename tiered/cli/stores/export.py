"""``tiered export``: write the parameters of a model, or all tensors of a store, as safetensors files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_generation, add_model, add_store, command, size

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands
    from tiered.store.at_rest import StoreAtRest

__all__ = ["add_parser"]

DTYPES = ("float32", "bfloat16", "float16")

DESCRIPTION = """\
Write the parameters of a model that was committed with zero.commit, or all tensors of a store without a model, as
safetensors files with an index, which safetensors and transformers can load. Of a model that tiered import put there
its configuration and tokenizer are written beside them. A job may have the store open meanwhile, and goes on: the
commit that is exported is kept until the command ends. No tensor is changed. Pending optimizer updates are applied to
the exported values. The command needs little memory, however large the model is.

--format torch-dcp writes a folder that torch.distributed.checkpoint reads: the model, and the optimizer's states and
param groups. --format deepspeed-universal writes a checkpoint that DeepSpeed loads with {"checkpoint":
{"load_universal": true}}: fp32 parameters, the moments of Adam, counters, the schedule. --out must not exist then.
"""

EXAMPLES = """\
examples:
  tiered export state/ --out model/
  tiered export state/ --out model/ --generation 7 --dtype bfloat16 --shard 2GB
  tiered export state/ --out checkpoint/ --format deepspeed-universal
"""


def add_parser(commands: Commands) -> None:
    """Add ``export`` to the commands."""
    parser = command(commands, "export", "write tensors of a store as safetensors", DESCRIPTION, EXAMPLES)
    add_store(parser, "the store's folder, or the folder that has the stores of all ranks")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="where the files are written; made where absent")
    add_generation(parser, "export this generation (default: the newest)")
    add_model(parser, "the model's name, where the store has several")
    parser.add_argument(
        "--format",
        choices=("safetensors", "torch-dcp", "deepspeed-universal"),
        default="safetensors",
        help="of the files (default: safetensors)",
    )
    parser.add_argument("--average", action="store_true", help="write the average of the weights that zero.EMA has kept")
    parser.add_argument("--dtype", choices=DTYPES, help="type of all floating-point tensors (default: the stored type)")
    parser.add_argument("--shard", metavar="SIZE", type=size, default="5GB", help="largest size of a file (default: 5GB)")
    parser.add_argument(
        "--existing",
        choices=("refuse", "overwrite"),
        default="refuse",
        help="what to do where --out has an earlier export (default: refuse)",
    )
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    import torch

    from tiered.cli.output import Progress
    from tiered.cli.stop import Stopped, StopRequest
    from tiered.errors import shown
    from tiered.store.at_rest import StoreAtRest
    from tiered.types import format_size
    from tiered.zero.checkpoint.safetensors import export_at_rest, export_of_ranks
    from tiered.zero.rank_stores import sets_in

    if parsed.format != "safetensors":
        return _whole(parsed)
    written, beside = 0, list[str]()
    try:
        with StopRequest() as stop, Progress(sys.stderr) as progress:

            def advanced(done: int, total: int) -> None:
                nonlocal written
                stop.check()
                written = done
                progress.working(f"wrote {format_size(done)} of {format_size(total)}", done / total)

            wanted: dict[str, Any] = {
                "model": parsed.model,
                "shard": parsed.shard,
                "dtype": None if parsed.dtype is None else getattr(torch, parsed.dtype),
                "existing": parsed.existing,
                "progress": advanced,
                "values": "average" if parsed.average else "param",
            }
            if sets_in(parsed.folder) and parsed.generation is None and parsed.paths is None:
                names, of = export_of_ranks(parsed.folder, parsed.out, **wanted), "the last commit of all ranks"
            else:
                with StoreAtRest(parsed.folder, paths=parsed.paths, generation=parsed.generation) as store:
                    _refuse_unfinished(store, parsed.model)
                    kept, out = _kept(store, parsed.model, parsed.dtype), Path(parsed.out).expanduser()
                    _refuse_others(out, kept, replaces=parsed.existing == "overwrite")
                    names, beside = export_at_rest(store, out, **wanted, beside=kept), list(kept)
                    of = f"generation {store.manifest.generation}"
    except Stopped as stopped:
        print("tiered: stopped; nothing was left behind", file=sys.stderr)
        return stopped.exit_code
    files = names[0] if len(names) == 1 else f"{len(names)} files"
    others = f", with {', '.join(beside)}" if beside else ""
    print(f"{shown(parsed.out, 1000)}: {files} of {of}, {format_size(written)}{others}")
    return 0


def _refuse_unfinished(store: StoreAtRest, model: str | None) -> None:
    """Raise MisuseError where the import of the model, or of any, was stopped, and not finished since."""
    from tiered.integrations.kept import UNFINISHED, key_of_file, refuse_unfinished

    end = key_of_file("", UNFINISHED)
    for name in [key.removesuffix(end) for key in store if key.endswith(end)]:
        if model in (None, name):
            refuse_unfinished(store, name)


def _kept(store: StoreAtRest, model: str | None, dtype: str | None) -> dict[str, bytes]:
    """Return the contents of the files that were kept of the model, or of the only one, by name: what is written beside its
    weights. The configuration has the element type that these are written in."""
    from tiered.integrations.kept import CONFIG, FILES, kept_file, key_of_file

    end = key_of_file("", CONFIG)
    names = [key.removesuffix(end) for key in store if key.endswith(end) and model in (None, key.removesuffix(end))]
    if len(names) != 1:
        return {}
    found = {file: contents for file in FILES if (contents := kept_file(store, names[0], file)) is not None}
    if dtype is not None:
        found[CONFIG] = json.dumps(_with_dtype(json.loads(found[CONFIG]), dtype), indent=2).encode()
    return found


def _with_dtype(config: Any, dtype: str) -> Any:
    """Return a configuration, or a part of one, with another element type wherever it has one."""
    if not isinstance(config, dict):
        return config
    of_type = {name: dtype for name in ("dtype", "torch_dtype") if isinstance(config.get(name), str)}
    return {name: _with_dtype(value, dtype) for name, value in config.items()} | of_type


def _refuse_others(folder: Path, kept: dict[str, bytes], *, replaces: bool) -> None:
    """Raise MisuseError where ``folder`` has a file of another model's, with which the weights would be read. ``replaces``:
    those are written over that the model has, too."""
    from tiered.errors import MisuseError, shown
    from tiered.integrations.kept import FILES

    for file in FILES if kept else ():
        if not (folder / file).is_file():
            continue
        there = f"{shown(str(folder), 1000)} has"
        if file not in kept:
            raise MisuseError(f"{there} a {file}, and the model has none: name another folder, or remove that file")
        if not replaces and (folder / file).read_bytes() != kept[file]:
            raise MisuseError(f"{there} another {file} than the model: name another folder, or give existing='overwrite'")


def _whole(parsed: argparse.Namespace) -> int:
    """Export parameters and optimizer states in the format of another program."""
    from tiered.cli.output import Progress
    from tiered.cli.stop import Stopped, StopRequest
    from tiered.errors import shown
    from tiered.types import parse_size
    from tiered.zero.checkpoint.exports import export_dcp, export_universal

    if parsed.average:
        parsed.parser.error(f"--average is for safetensors, not for --format {parsed.format}")
    if parsed.dtype is not None or parsed.shard != parse_size("5GB") or parsed.existing != "refuse" or parsed.paths is not None:
        parsed.parser.error(f"--dtype, --shard, --existing and --paths are for safetensors, not for --format {parsed.format}")
    export = export_dcp if parsed.format == "torch-dcp" else export_universal
    try:
        with StopRequest() as stop, Progress(sys.stderr) as progress:

            def advanced(done: int, total: int) -> None:
                stop.check()
                progress.working(f"wrote {done / max(total, 1):.0%}", done / max(total, 1))

            wanted: dict[str, Any] = {"model": parsed.model, "generation": parsed.generation, "progress": advanced}
            names = export(parsed.folder, parsed.out, **wanted)
    except Stopped as stopped:
        print("tiered: stopped; nothing was left behind", file=sys.stderr)
        return stopped.exit_code
    print(f"{shown(parsed.out, 1000)}: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}")
    return 0
