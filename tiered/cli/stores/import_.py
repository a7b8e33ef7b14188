"""``tiered import``: put the tensors of safetensors files, a model that can be opened and used, or a checkpoint that DeepSpeed
wrote, into a store."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_model, add_store, command, size
from tiered.cli.spelling import Spelling

if TYPE_CHECKING:
    from tiered import TieredStore
    from tiered.cli.arguments import Commands
    from tiered.cli.output import Progress
    from tiered.cli.stop import StopRequest

__all__ = ["add_parser"]

TOLD = {"model": "a model", "tensors": "tensors, to go by its files", "deepspeed": "a checkpoint of DeepSpeed's"}
KINDS = tuple(TOLD)
"""What SOURCE may be."""

DESCRIPTION = """\
Put a model, a checkpoint of DeepSpeed's, or the tensors of safetensors files into a store, and commit. The store is
made where absent. The files of SOURCE say what it is: a folder with config.json is a model, one with the file latest
or with mp_rank_..._model_states.pt is a checkpoint, all else is tensors; --as says it otherwise. The command needs
--dram of memory, however large the files are; the largest single tensor must fit. A command that is stopped has
committed nothing, but for a model.

A model, the folder of a Hugging Face model, its name on the hub or a .gguf file, is in the store afterwards as one to
use: tiered generate goes on with a prompt, tiered.integrations.transformers.open_model(store) returns it in Python.
The store keeps its configuration and tokenizer, too, so that SOURCE is not needed any more. Weights are read once and
written once, a unit at a time, and what is there is committed every few seconds: when the command is stopped, or
dies, the same command goes on where it was. Until then nothing else uses the model. --verify reads everything again,
from the disk and from SOURCE, and compares.

Of a checkpoint that DeepSpeed wrote (ZeRO stages 1 to 3, any number of ranks, also with the optimizer on NVMe),
SOURCE is the folder that has the file latest, or the folder of one tag. Parameters, fp32 masters, moments, counters
and client state go into the store. engine.load_checkpoint("state/") and zero.page(existing="resume",
source="state/") go on from there. Nothing in a pickle is run; a file that asks for it is refused.

Tensors are a safetensors file, or a folder with several such files and their index; they keep their names.
"""

EXAMPLES = """\
examples:
  tiered import model.safetensors state/
  tiered import llama/ state/
  tiered import meta-llama/Llama-3.2-1B state/       of the Hugging Face hub
  tiered import llama-q4_k_m.gguf state/             weights stay packed as they are
  tiered import llama/ state/ --compute float32      for processors that are slow with bf16
  tiered import llama/ state/ --quantize int8        inexact: a byte for each weight of a matrix
  tiered import llama/ state/ --as tensors --dram 2GiB --existing overwrite
  tiered import checkpoints/ state/ --tag global_step100
"""


EARLIER = Spelling(
    {"--dir": "STORE", "--name": "--model", "--model": "--as model", "--deepspeed": "--as deepspeed"}, otherwise="--as tensors"
)


def add_parser(commands: Commands) -> None:
    """Add ``import`` to the commands."""
    parser = command(commands, "import", "put a model, a checkpoint or tensors into a store", DESCRIPTION, EXAMPLES, EARLIER)
    parser.add_argument(
        "source", metavar="SOURCE", help="a .safetensors or .gguf file, a folder, or org/name of a model on the hub"
    )
    add_store(parser, "the store's folder, made where absent")
    parser.add_argument("--as", dest="kind", choices=KINDS, help="what SOURCE is (default: what its files say)")
    parser.add_argument("--dram", metavar="SIZE", type=size, help="host memory of the store (default: half of what is free)")
    parser.add_argument(
        "--existing",
        choices=("refuse", "overwrite"),
        default="refuse",
        help="what to do with tensors, or a model, of the same name in the store (default: refuse)",
    )
    add_model(parser, "of a model or checkpoint: its name in the store (default: model)")
    parser.add_argument("--tag", metavar="TAG", help="of DeepSpeed: which checkpoint (default: that of the file latest)")
    parser.add_argument(
        "--unit",
        metavar="SIZE",
        type=size,
        help="of a model: bytes that are read together; generate needs memory for three (default: 32MiB; of a model below "
        "1GiB a 32nd of it)",
    )
    parser.add_argument(
        "--compute",
        type=lambda given: {"fp32": "float32"}.get(given, given),
        choices=("float32",),
        help="of a model: compute in float32 with bf16 or fp16 weights, which stay so in the store",
    )
    parser.add_argument(
        "--quantize",
        choices=("int8", "int4", "nf4"),
        help="of a model: INEXACT; keep matrices in 8, 4.5 or 4.1 bits a weight, for reading only; prints the error",
    )
    parser.add_argument(
        "--verify", action="store_true", help="of a model: read the store and SOURCE again, and compare (as long again)"
    )
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.output import Progress
    from tiered.cli.stop import Stopped, StopRequest
    from tiered.errors import MisuseError, TieredError, shown
    from tiered.integrations.hub import is_hub_name

    of_models = parsed.unit, parsed.compute, parsed.quantize, parsed.verify or None
    if not is_hub_name(parsed.source) and not Path(parsed.source).expanduser().exists():
        raise MisuseError(f"{shown(parsed.source, 1000)}: there is no such file or folder")
    kind = parsed.kind or _kind_of(parsed.source, parsed.tag)
    found = f"--as {kind}" if parsed.kind else f"{parsed.source} is {TOLD[kind]}"
    if kind != "model" and any(one is not None for one in of_models):
        parsed.parser.error(f"--unit, --compute, --quantize and --verify are for models: {found}")
    if kind == "tensors" and parsed.model is not None:
        parsed.parser.error(f"--model is for models and checkpoints: {found}")
    if kind != "deepspeed" and parsed.tag is not None:
        parsed.parser.error(f"--tag is for checkpoints of DeepSpeed's: {found}")
    if kind == "tensors" and parsed.kind is None:
        _refuse_half_a_model(Path(parsed.source).expanduser())
    put = {"model": _model, "deepspeed": _checkpoint, "tensors": _tensors}[kind]
    if kind == "model":
        _refuse_without_transformers()
        from tiered.integrations.hub import folder_of

        parsed.source = folder_of(parsed.source, "model")
    new = not os.path.lexists(parsed.folder) and not parsed.paths
    told = left = ""
    try:
        with StopRequest() as stop, Progress(sys.stderr) as progress:
            from tiered import TieredStore

            store = TieredStore.open(parsed.folder, dram=parsed.dram, paths=parsed.paths)
            try:
                told = put(parsed, store, stop, progress)
            finally:
                nothing = store.generation == 0
                store.close()
                if kind == "model" and not told:
                    if new and nothing:
                        shutil.rmtree(parsed.folder, ignore_errors=True)
                    elif not nothing:
                        left = _left(parsed)
    except Stopped as stopped:
        print(f"tiered: stopped; {left or 'nothing was committed'}", file=sys.stderr)
        return stopped.exit_code
    except TieredError:
        if left:
            print(f"tiered: {left}", file=sys.stderr)
        raise
    print(told)
    return 0


def _kind_of(source: str, tag: str | None) -> str:
    """Return what SOURCE is: a ``tag`` is of DeepSpeed's, else its files say it. transformers leaves config.json beside a
    checkpoint of DeepSpeed's, without weights."""
    from tiered.integrations.deepspeed.saved import is_saved
    from tiered.integrations.deepspeed.tags import LATEST
    from tiered.integrations.hub import is_hub_name

    if tag is not None:
        return "deepspeed"
    folder = Path(source).expanduser()
    if is_hub_name(source) or (folder.suffix == ".gguf" and folder.is_file()):
        return "model"
    saved = (folder / LATEST).is_file() or is_saved(folder)
    if (folder / "config.json").is_file() and not (saved and not any(folder.glob("*.safetensors"))):
        return "model"
    return "deepspeed" if saved else "tensors"


def _refuse_half_a_model(source: Path) -> None:
    """Raise MisuseError for a model's folder that lacks the file which says what the model is, and for that file alone."""
    from tiered.errors import MisuseError, shown
    from tiered.integrations.kept import CONFIG, FILES

    if source.name == CONFIG:
        raise MisuseError(f"{shown(str(source), 1000)} is the configuration of a model: name its folder")
    found = next((file.name for file in sorted(source.glob("*.gguf"))), None)
    if found is not None and not any(source.glob("*.safetensors")):
        raise MisuseError(f"{shown(str(source), 1000)} has GGUF files: name one of them, such as {shown(found)!r}")
    others = [file for file in FILES if (source / file).is_file()]
    if others:
        raise MisuseError(
            f"{shown(str(source), 1000)} has {others[0]} and no {CONFIG}, so it is a part of a model: download the whole "
            "folder, or give --as tensors to import its tensors alone, which tiered generate cannot use"
        )


def _left(parsed: argparse.Namespace) -> str:
    """Return what to tell of an import that was stopped, where the same command goes on with it."""
    from tiered import TieredStore
    from tiered.errors import shown
    from tiered.integrations.importing import begun
    from tiered.types import format_size

    with TieredStore.open(parsed.folder, dram="1MiB", paths=parsed.paths, access="read") as store:
        record = begun(store, parsed.model or "model")
    if record is None:
        return ""
    sizes = f"{format_size(record.nbytes)} of {format_size(record.total)}"
    return f"{sizes} are in {shown(parsed.folder, 1000)}: the same command goes on from there"


def _tensors(parsed: argparse.Namespace, store: TieredStore, stop: StopRequest, progress: Progress) -> str:
    """Put the tensors of the files into the store and commit. Returns what to tell."""
    from tiered import import_safetensors
    from tiered.cli.output import counted
    from tiered.errors import shown
    from tiered.types import format_size

    read = 0

    def advanced(done: int, total: int) -> None:
        nonlocal read
        stop.check()
        read = done
        progress.working(f"read {format_size(done)} of {format_size(total)}", done / total)

    tensors = import_safetensors(store, parsed.source, existing=parsed.existing, progress=advanced)
    generation = store.commit()
    return f"{shown(parsed.folder, 1000)}: {counted(tensors, 'tensor')}, {format_size(read)}, in generation {generation}"


def _checkpoint(parsed: argparse.Namespace, store: TieredStore, stop: StopRequest, progress: Progress) -> str:
    """Put a checkpoint of DeepSpeed's into the store and commit. Returns what to tell."""
    from tiered.cli.output import counted
    from tiered.errors import shown
    from tiered.integrations.deepspeed.importing import import_saved
    from tiered.integrations.deepspeed.saved import SavedCheckpoint, tag_of
    from tiered.types import format_size
    from tiered.zero.paging.storage import model_named

    def advanced(done: int, total: int) -> None:
        stop.check()
        progress.working(f"read {done:,} of {total:,} parameters", done / max(total, 1))

    name = parsed.model or "model"
    with SavedCheckpoint(tag_of(parsed.source, parsed.tag)) as saved:
        if parsed.existing == "overwrite":
            store.delete_owned(model_named(name))
        import_saved(saved, store, name, progress=advanced)
        generation = store.commit(meta={**store.meta, "step": saved.counters.global_steps})
        numbers = sum(store.spec(key).nbytes for key in store if key.startswith(f"{name}/param/"))
        step = saved.counters.global_steps
        return (
            f"{shown(parsed.folder, 1000)}: {counted(len(saved.parameters), 'parameter')} of step {step} "
            f"(ZeRO stage {saved.stage}, {counted(saved.ranks, 'rank')}), {format_size(numbers)}, in generation {generation}"
        )


def _refuse_without_transformers() -> None:
    from tiered import MisuseError

    try:
        import tiered.integrations.transformers.pretrained  # noqa: F401
    except ImportError as error:
        raise MisuseError("a model needs transformers: pip install '.[hf]' in a clone of tiered") from error


def _model(parsed: argparse.Namespace, store: TieredStore, stop: StopRequest, progress: Progress) -> str:
    """Put the model of the folder into the store and commit. Returns what to tell."""
    import torch

    from tiered import zero
    from tiered.errors import shown
    from tiered.integrations.kept import opening_of
    from tiered.integrations.transformers import import_model, quietly
    from tiered.types import format_size

    def advanced(what: str, share: float) -> None:
        progress.working(what, share)
        stop.check()

    quietly()
    model: Any = import_model(
        parsed.source,
        store,
        name=parsed.model or "model",
        existing=parsed.existing,
        largest_unit=parsed.unit,
        compute=None if parsed.compute is None else getattr(torch, parsed.compute),
        quantize=parsed.quantize,
        verify=parsed.verify,
        missing="refuse",  # what transformers logs of them is not shown
        progress=advanced,
    )
    stored = sum(store.spec(key).nbytes for key in store if key.startswith(f"{parsed.model or 'model'}/param/"))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    inexact = "" if parsed.quantize is None else f"\n{opening_of(store, parsed.model or 'model')['inexact']}"
    return (
        f"{shown(parsed.folder, 1000)}: {type(model).__name__} of {numbers:,} parameters, {format_size(stored)} in "
        f"{zero.statistics(model).units} units, in generation {store.generation}{inexact}"
    )
