"""Read pretrained models into a store, and open models that are in one.

- ``from_pretrained`` reads weights into a store. ``transformers`` itself loads them, so its conversions (renamed keys, fused
  experts, a base model's weights in one with a head) are its own; but the files give it tensors whose values are read when
  ``zero.page`` fills the units (``zero/construction/deferred.py``). What it initialises waits in the store, within
  ``zero.init``.
  Of a GGUF file it is given these tensors (``gguf.py``).
- ``import_model`` does so once and for all: ``open_model`` then opens the model without the folder that it came from.

``Trainer`` is not imported here: with what it brings, that takes seconds, which a program that generates would wait for.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, modeling_utils
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from tiered import zero
from tiered.errors import ManifestError, MisuseError, expect_type, one_of, path_of, quoted, shown
from tiered.format.foreign.documents import json_of
from tiered.format.safetensors import INDEX, SINGLE, WeightFiles
from tiered.integrations.hub import folder_of
from tiered.integrations.importing import Import, ImportRecord, ImportSource, Told, begun, files_in, unit_of
from tiered.integrations.kept import CONFIG, TOKENIZER, UNFINISHED, files_of, keep, kept_folder, only_model, opening_of
from tiered.integrations.packed import united, weight_of
from tiered.integrations.transformers.experts import around_experts
from tiered.integrations.transformers.gguf import ENDING, GgufModel
from tiered.integrations.transformers.shapes import CONFIG_BYTES, QUANTISED, config_of, is_packed, making, refuse_config
from tiered.packing.form import Loss
from tiered.packing.quantised import QUANTIZE, Quantize
from tiered.store import TieredStore
from tiered.tensors.specs import FLOATS, expect_dtype
from tiered.types import Access
from tiered.zero.construction.deferred import CODES, Deferred, Files
from tiered.zero.page import page_filling, start
from tiered.zero.paging.pager import pager_of
from tiered.zero.paging.storage import model_named

__all__ = ["from_pretrained", "import_model", "open_model", "open_tokenizer", "quietly", "reading_one_at_a_time"]

# -- reading pretrained models -------------------------------------------------------------------------------------------------

Missing = Literal["initialise", "refuse"]
PAGING = {"micro_batch", "activations", "policy", "source", "stage", "timeout", "paging"}
PAGING |= {"largest_unit", "slice_weights"}
"""Arguments of ``from_pretrained`` that are ``zero.page``'s."""

PREPARES = "a function that is given the model and returns what is paged (lambda model: peft.get_peft_model(model, config))"
ELSEWHERE = "the store decides where parameters are: leave it out"
REFUSED = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "distributed_config"), ELSEWHERE),
    "quantization_config": "weights are packed as they come to the store: give policy=zero.Policy(quantize='nf4'), or 'int8'",
    "state_dict": "the weights are read from the folder: leave it out, or call zero.page on a model that you made of it",
    "output_loading_info": "it would return two things: leave it out; what is missing is logged",
}
"""Arguments of transformers' ``from_pretrained`` that have no meaning here, and why."""
OWN_TYPE = "parameters are stored in the type of the checkpoint: leave it out; compute=torch.float32 computes in fp32 with them"
AT_IMPORT = {
    **dict.fromkeys(("dtype", "torch_dtype"), OWN_TYPE),
    "policy": "give quantize='int8', 'int4' or 'nf4', or compute=torch.float32, which are kept with the model",
}
"""Arguments of ``from_pretrained`` that ``import_model`` does not have, and why."""
OPENED = {
    **dict.fromkeys(("dtype", "torch_dtype", "policy"), "the import has said it, and the store keeps it: leave it out"),
    "existing": "the model that is in the store is opened: leave it out",
}
"""Those that ``open_model`` does not have."""


def from_pretrained(
    cls: Any,
    folder: str | os.PathLike[str],
    store: TieredStore,
    *,
    dtype: torch.dtype | str = "auto",
    name: str = "model",
    existing: str = "refuse",
    prepare: Callable[[Any], Any] | None = None,
    gguf_file: str | None = None,
    **options: Any,
) -> Any:
    """Return the model in ``folder`` with its parameters in ``store``: ``cls.from_pretrained``, then ``zero.page``.

    ``cls``: ``AutoModelForCausalLM`` and the like, or a model's class. ``folder``: a local folder with ``config.json`` and
    safetensors files, with or without an index, or the name of a model on the Hugging Face hub, ``"org/name"``; or the path of
    a GGUF file. Values are
    read once, from the files to their places in the store's units, expert by expert where a parameter has several, and
    nothing is initialised first but what the files lack (a new head, which ``transformers`` logs). At most an eighth of the
    store's DRAM budget is in memory beside it; or one parameter with what it is made of, where ``transformers`` converts it by
    more than casts, transpositions, concatenations and stacks.

    ``prepare``: called with the model before it is paged; returns what is paged: ``lambda model: peft.get_peft_model(model,
    config)``. The place to resize embeddings, too.
    ``gguf_file``: the name of a GGUF file in the folder, or the hub's, from which configuration and weights come. Matrices of
    the types Q8_0, Q4_K, Q5_K and Q6_K stay packed in the store, where they are used as they lie in the file; needs the
    library ``gguf``. With ``dtype="auto"`` the model is in float32, or in the type of its matrices where that has 16 bits.
    ``dtype``: torch.float32, bfloat16, float16 or float64, or its name; or "auto", the checkpoint's. ``config``,
    ``attn_implementation`` and other ``options``: as in ``cls.from_pretrained``. ``name``, ``existing``,
    ``micro_batch``, ``policy``, ``paging`` and the rest: as in ``zero.page``. With ``existing="resume"``, or
    "continue" where the store has a checkpoint, the values come from the last commit in the store, and only the configuration
    is read from the folder.

    Raises MisuseError (no such folder, no safetensors files, an adapter, a quantised model, an option that cannot be),
    GgufError, what ``cls.from_pretrained`` raises, and what ``zero.init`` and ``zero.page`` raise.
    """
    begins = start(store, name, options.get("source")) if existing == "continue" else existing
    path = _checked(folder, store, "config" if begins == "resume" else "model", gguf_file)
    with _read(cls, path, _gguf_in(path), store, dtype, begins, prepare, options) as (model, paging):
        return around_experts(zero.page(model, store, name=name, existing=existing, **paging))


def _checked(
    folder: str | os.PathLike[str], store: TieredStore, needed: Literal["config", "model"], gguf_file: str | None
) -> Path:
    """Return the path of a model's folder, or of its GGUF file. Raises MisuseError for arguments of other types, and as
    ``hub.folder_of``."""
    expect_type(store, TieredStore, "a model is read into a TieredStore")
    path_of(folder, "the folder of a model")
    path = folder_of(folder, needed, gguf_file)
    if gguf_file is None:
        if path.is_file() and path.suffix != ENDING:
            raise MisuseError(f"{path} is a file: name a model's folder, or a file that ends with {ENDING}")
        return path
    if not (path / gguf_file).is_file():
        raise MisuseError(f"{path} has no file {shown(gguf_file)!r}")
    return path / gguf_file


def _refuse(options: Mapping[str, Any], why: Mapping[str, str]) -> None:
    """Raise MisuseError for the first option that is given of those in ``why``, which says why."""
    for option in why:
        if options.get(option) is not None:
            raise MisuseError(f"{option}=: {why[option]}")


def _element_type(dtype: Any, earlier: Any) -> Any:
    """Return the type that a model is wanted in: torch's, "auto", or a mapping for a model of several; ``earlier``: by the name
    that the argument had before. Raises MisuseError for what is no type of a model's parameters."""
    wanted = earlier if earlier is not None and dtype == "auto" else dtype
    if isinstance(wanted, dict):
        return wanted
    found = vars(torch).get(wanted.removeprefix("torch.")) if isinstance(wanted, str) else wanted
    found = found if isinstance(found, torch.dtype) else wanted
    expect_dtype("dtype", found, (*FLOATS, "auto", None))
    return torch.get_default_dtype() if found is None else found


def _gguf_in(path: Path) -> GgufModel | None:
    """Return the model of a GGUF file; None for a folder of other files. Raises MisuseError and GgufError."""
    return GgufModel(path) if path.is_file() else None


@contextmanager
def _read(
    cls: Any,
    path: Path,
    gguf: GgufModel | None,
    store: TieredStore,
    dtype: torch.dtype | str,
    existing: str,
    prepare: Callable[[Any], Any] | None,
    options: dict[str, Any],
    missing: Missing = "initialise",
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Give the model in ``path`` as it is to be paged within the block, and those of ``options`` that are ``zero.page``'s."""
    _refuse(options, REFUSED)
    dtype = _element_type(dtype, options.pop("torch_dtype", None))
    if prepare is not None and not callable(prepare):
        raise MisuseError(f"prepare= is {PREPARES}, and {quoted(prepare)} is none")
    paging = {option: options.pop(option) for option in PAGING & options.keys()}
    config = options.pop("config", None)
    packed = _packs(path, gguf)
    if packed and existing != "resume":
        _refuse_packing(path, getattr(paging.get("policy"), "quantize", None))
    if config is None and (existing == "resume" or packed or gguf is not None):
        config = _config(path, gguf, options)
    if gguf is not None and dtype == "auto":
        dtype = gguf.dtype
    if getattr(config, "quantization_config", None) is not None:
        raise MisuseError(f"{path}: {QUANTISED}")
    if existing == "resume":
        model = _without_values(cls, path, config, dtype, options)
        if prepare is not None:
            with torch.device("meta"):
                model = _prepared(prepare, model)
        yield model, paging
        return
    if gguf is None:
        _refuse_pickled(path, options)

    preparing: list[bool] = []
    weights: Mapping[str, Deferred] | None = None
    kind, place = cls, None if gguf is not None else path

    def load(at_once: bool = False) -> Any:
        preparing.clear()
        with reading_one_at_a_time(), zero.init(store):
            given = {"config": config, "dtype": dtype, "local_files_only": True, **options}
            if gguf is not None and weights is not None:
                given["state_dict"] = {name: _DeferredSlice(one, at_once) for name, one in weights.items()}
            if missing == "refuse":
                given |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
                with making(f"transformers cannot make the model in {shown(str(path), 1000)}"):
                    model, found = kind.from_pretrained(place, **given)
                _refuse_missing(path, found)
                _warn_of_more(path, found)
            else:
                model = kind.from_pretrained(place, **given)
            if getattr(model, "hf_quantizer", None) is not None:
                raise MisuseError(f"{path}: {QUANTISED}")
            files.at_once = True
            if prepare is None:
                return model
            preparing.append(True)
            return _prepared(prepare, model)

    with Files() as files:
        drawn = torch.get_rng_state()
        try:
            if gguf is not None:
                without = _without_values(cls, path, copy.deepcopy(config), dtype, options)
                kind, weights = type(without), gguf.weights(files, without)
            elif packed:
                how = json_of(path / CONFIG, CONFIG_BYTES)["quantization_config"]
                weights = united(files.open(path), how, shown(str(path), 1000))
                if all(one.form is None for one in weights.values()):
                    raise MisuseError(f"{path} has no weight that is packed, and its {CONFIG} says that they are")
                for last in _transposed(cls, path, config, dtype, options):
                    for name in [name for name in weights if f".{name}".endswith(f".{last}")]:
                        if weights[name].form is not None:
                            weights[name] = weights[name].t()  # type: ignore[assignment]
            with _deferring(files, weights):
                model = load()
        except Exception:
            if not files.refused:
                raise
            model = None
        if model is None:  # a conversion, or ``prepare``, writes to tensors of the files
            torch.set_rng_state(drawn)
            if weights is not None:
                try:
                    with _deferring(files, weights, at_once=True):
                        model = load(at_once=True)
                except MisuseError:
                    if not preparing:
                        raise
                    raise MisuseError(
                        f"prepare= writes to packed weights of {path} ({files.refused}): leave out what casts or freezes them "
                        "(prepare_model_for_kbit_training), as they are frozen anyway; dtype=torch.float32 computes in it"
                    ) from None
            else:
                model = load()
        yield model, paging


def _packs(path: Path, gguf: GgufModel | None) -> bool:
    """Return whether files have packed weights. Raises MisuseError for a folder without a configuration that can be read."""
    if gguf is not None:
        return gguf.packed
    _refuse_folder(path)
    refuse_config(path)
    return is_packed(json_of(path / CONFIG, CONFIG_BYTES))


def _config(path: Path, gguf: GgufModel | None, options: Mapping[str, Any]) -> Any:
    """Return the configuration in the files."""
    return config_of(path, trust_remote_code=bool(options.get("trust_remote_code"))) if gguf is None else gguf.config()


def _configured(path: Path) -> str:
    """Return what errors call the place that has the configuration of the model in ``path``."""
    return "header" if path.suffix == ENDING else CONFIG


def _refuse_missing(path: Path, found: dict[str, Any]) -> None:
    """Raise MisuseError where ``found``, what ``transformers`` says of the files, is not all weights of the model."""
    mend = "get the files again; in Python, import_model(..., missing='initialise') initialises what they lack"
    for name, given, wanted in sorted(found["mismatched_keys"]):
        raise MisuseError(
            f"weight {name!r} in {path} is of shape {list(given)}, and {list(wanted)} by its {_configured(path)}: {mend}"
        )
    if lacking := sorted(found["missing_keys"]):
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        raise MisuseError(f"the files in {path} lack {lacking[0]!r}{more}, which the model has: {mend}")


def _warn_of_more(path: Path, found: dict[str, Any]) -> None:
    """Warn where ``found``, what ``transformers`` says of the files, has weights that the model does not."""
    more = sorted(found["unexpected_keys"])
    if more:
        which = f"{more[0]!r}" + (f" and {len(more) - 1} more" if more[1:] else "")
        warnings.warn(
            f"the files in {path} have weights that the model of their {_configured(path)} does not, and that are left out: "
            f"{which}",
            stacklevel=2,
        )


def _refuse_packing(path: Path, quantize: Quantize | None) -> None:
    if quantize is not None:
        raise MisuseError(f"{path} has weights that are packed already: leave quantize out")


def _transposed(cls: Any, path: Path, config: Any, dtype: torch.dtype | str, options: dict[str, Any]) -> set[str]:
    """Return the names of weights of ``Conv1D`` layers, which are packed as those of linear layers are: the other way round."""
    model = _without_values(cls, path, copy.deepcopy(config), dtype, options)
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}


@contextmanager
def _deferring(files: Files, weights: Mapping[str, Deferred] | None, *, at_once: bool = False) -> Iterator[None]:
    """Have ``transformers``, in this thread, find deferred tensors in safetensors files. ``weights``: by name, where they are
    packed, in parts that may be in several files. ``at_once``: those that are not are read when they are asked for."""
    original = modeling_utils.safe_open
    deferring.set(files)

    def opened(path: Any, *given: Any, **options: Any) -> Any:
        mine = deferring.get()
        if mine is None:
            return original(path, *given, **options)
        tensors = mine.open(path)
        if weights is not None:
            tensors = {one: weights[one] for name in tensors for one in (name, weight_of(name)) if one in weights}
        return _DeferredFile(tensors, at_once)

    modeling_utils.safe_open = opened
    try:
        yield
    finally:
        deferring.set(None)
        modeling_utils.safe_open = original


deferring: ContextVar[Files | None] = ContextVar("deferring", default=None)
"""The files of the block that this thread reads a model in. ``transformers`` has one ``safe_open`` for all threads."""


class _DeferredFile:
    """What ``safe_open`` returns, as far as ``transformers`` uses it."""

    def __init__(self, tensors: dict[str, Deferred], at_once: bool) -> None:
        self._tensors, self._at_once = tensors, at_once

    def __enter__(self) -> _DeferredFile:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _DeferredSlice:
        return _DeferredSlice(self._tensors[name], self._at_once)

    def get_tensor(self, name: str) -> torch.Tensor:
        found = self._tensors[name]
        return found.whole() if self._at_once and found.form is None else found


class _DeferredSlice:
    """What ``get_slice`` returns."""

    def __init__(self, tensor: Deferred, at_once: bool) -> None:
        self._tensor, self._at_once = tensor, at_once

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: Any = self._tensor[index]
        return found.whole() if self._at_once and self._tensor.form is None else found  # type: ignore[no-any-return]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return CODES[str(self._tensor.dtype).removeprefix("torch.")]


def _prepared(prepare: Callable[[Any], Any], model: Any) -> Any:
    """Return what ``prepare`` makes of a model. Raises MisuseError where it is none."""
    found = prepare(model)
    if not isinstance(found, nn.Module):
        raise MisuseError(f"prepare= is {PREPARES}, and this one returned {quoted(found)}")
    return found


def _refuse_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise MisuseError(
                f"{path} has an adapter: give the folder of its base model, and prepare=lambda model: "
                "peft.PeftModel.from_pretrained(model, ...)"
            )
        for file in sorted(path.glob(f"*{ENDING}")):
            raise MisuseError(f"{path} has GGUF files and no config.json: name one of them, {file}, or gguf_file={file.name!r}")
        raise MisuseError(
            f"{path} is no folder with a config.json: give a local folder, or a name on the Hugging Face hub, \"org/name\""
        )


def _refuse_damaged(path: Path, options: dict[str, Any]) -> None:
    """Raise SafetensorsError for safetensors files that are damaged or missing, and an index that is none. ``transformers``
    looks at them one by one, and raises errors of its own."""
    if "variant" not in options and ((path / SINGLE).exists() or (path / INDEX).exists()):
        WeightFiles(path).close()


def _refuse_pickled(path: Path, options: dict[str, Any]) -> None:
    """Raise MisuseError where ``transformers`` would not read safetensors files: it looks for these two names only."""
    variant = f".{options['variant']}" if options.get("variant") else ""
    folder = path / str(options.get("subfolder") or "")
    names = [f"model{variant}.safetensors", f"model.safetensors.index{variant}.json"]
    if any((folder / name).exists() for name in names):
        return
    other = next((file.name for file in sorted(folder.glob("*.safetensors"))), None)
    beside = "" if other is None else f" ({shown(other)!r} is another file)"
    raise MisuseError(
        f"{folder} has neither {names[0]} nor {names[1]}{beside}, and other files are read as a whole: write some with "
        "AutoModel.from_pretrained(...).save_pretrained(...) on a machine with enough memory"
    )


def _without_values(cls: Any, path: Path, config: Any, dtype: torch.dtype | str, options: dict[str, Any]) -> Any:
    """Return the model on the meta device, as ``cls.from_pretrained`` would configure it."""
    known = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None) or getattr(config, "dtype", None)
    make = getattr(cls, "from_config", None) or cls._from_config
    with torch.device("meta"):
        model = make(config, **({} if known is None else {"dtype": known}), **options).eval()
    if (path / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


@contextmanager
def reading_one_at_a_time() -> Iterator[None]:
    """Have ``transformers`` read a tensor when it needs it. Otherwise threads read all of them ahead, into memory."""
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


# -- models that need no folder ------------------------------------------------------------------------------------------------


def import_model(
    folder: str | os.PathLike[str],
    store: TieredStore,
    *,
    cls: Any = AutoModelForCausalLM,
    name: str = "model",
    existing: str = "refuse",
    compute: torch.dtype | None = None,
    quantize: Quantize | None = None,
    largest_unit: int | None = None,
    verify: bool = False,
    missing: Missing = "refuse",
    progress: Told | None = None,
    gguf_file: str | None = None,
    **options: Any,
) -> Any:
    """Put the model in ``folder``, or of that name on the hub, into ``store`` with all that ``open_model`` needs, commit, and
    return the model, paged.

    Parameters are stored in the type that the checkpoint has. ``compute=torch.float32`` keeps bf16 and fp16 so on the disk and
    has modules compute in fp32 with the same values (``zero.Policy``), which is faster on processors without bf16.
    ``quantize="int8"``, ``"int4"`` or ``"nf4"`` is inexact: matrices have 8, 4.5 or 4.1 bits an element in the store, and the
    model is for reading only (``zero.Policy``). ``opening.json`` in the store says so, with the relative error.
    ``largest_unit``: bytes that are read and evicted together, as in ``zero.page``; who opens the model needs memory for three
    (None: 32 MiB, of a model below 1 GiB a 32nd of it). Larger weights of embeddings and linear layers are divided into slices
    of rows.
    ``existing``: "refuse" a store that has a model of that ``name``, or "overwrite" it, which stays until the new one is
    committed. ``progress`` is called with what is done now and the share of that which is done; it may raise, to stop.
    ``verify``: read everything from the disk again, and from the files, and compare, before the model is committed.
    ``missing``: "refuse" weights that the files lack, and those of another shape, with MisuseError; or "initialise" them (a new
    head), which ``transformers`` logs.
    ``gguf_file``: as in ``from_pretrained``. The store keeps the tokenizer that ``transformers`` makes of the file's.
    ``options``: as in ``from_pretrained``, without ``dtype`` and ``policy``.

    All changes in the store are committed every few seconds. An import that ends early (an exception, SIGKILL, power loss) goes
    on where it was when it is called again with the same folder and options; until then ``open_model`` refuses the model. With
    other files or options MisuseError names the first that differs, unless ``existing`` is "overwrite", which begins anew.
    An import over a model that is finished, or in one of several processes, begins anew in any case.

    Raises MisuseError as ``from_pretrained``, for files that change meanwhile, and for a model that has some parameters in fp32
    beside others in 16 bits where ``compute`` would round them; with ``quantize`` where there is nothing to quantise, or NaN or
    infinity; SafetensorsError and GgufError for files that are damaged or cut short; TieredError where ``verify`` finds other
    values; what ``zero.commit`` raises.
    """
    path = _checked(folder, store, "model", gguf_file)
    one_of("existing", existing, ("refuse", "overwrite"))
    one_of("missing", missing, get_args(Missing))
    expect_dtype("compute", compute, (torch.float32, None))
    _refuse(options, AT_IMPORT)
    gguf = _gguf_in(path)
    if gguf is None:
        _refuse_folder(path)
        _refuse_pickled(path, options)
        _refuse_damaged(path, options)
    config = options.get("config") or _config(path, gguf, options)
    _refuse_kind(path, cls, config)
    if _packs(path, gguf):
        _refuse_packing(path, quantize)
    files = files_of(path) if gguf is None else gguf.tokenizer_files()
    stored = _dtype_of(path, config) if gguf is None else gguf.dtype
    dtype = stored if compute is None else compute
    policy = zero.Policy(storage=None if dtype is stored else stored, quantize=quantize)
    source = _source(path, cls, dtype, policy, largest_unit, options)
    held = bool(store.owned(model_named(name)))
    goes_on = _goes_on(store, name, source, existing)
    if held and goes_on is None and existing == "refuse":
        raise MisuseError(f"{store} already has a model named {name!r}: give another name=, or existing='overwrite'")
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    finished = held and f"{name}/files/{UNFINISHED}" not in store
    filling = Import(
        *(store, name, source),
        goes_on=goes_on,
        over="finished" if finished else "nothing",
        commits=not finished and not several,
        verify=verify,
        told=progress,
    )
    kinds = set() if dtype is stored else _kinds(path) if gguf is None else gguf.kinds
    prepare = None if dtype is stored else lambda model: _refuse_rounding(model, kinds, stored)
    try:
        with (
            nullcontext() if progress is None else _telling(progress),
            _read(cls, path, gguf, store, dtype, existing, prepare, options, missing) as (model, paging),
        ):
            largest = unit_of(model) if largest_unit is None else largest_unit
            largest = largest if goes_on is None else min(largest, goes_on.unit)
            units = replace(paging.get("paging", zero.Paging()), largest_unit=largest, slice_weights=True)
            paging |= {"name": name, "policy": policy, "paging": units}
            around_experts(page_filling(model, store, filling, **paging))
        files[CONFIG] = model.config.to_json_string().encode()  # options may have changed it
        opening = {"class": type(model).__name__, "stored": _named(stored), "compute": _named(dtype)}
        if quantize is not None:
            opening |= _inexact(model, quantize)
        elif packed := sum(one.packing is not None for one in pager_of(model).placements):
            opening["inexact"] = f"inexact: {packed} parameters and slices are packed as in the files"
        if progress is not None:
            progress("committing", 0.0)
        filling.complete(path)
        keep(store, name, files, opening)
        zero.commit(model)
        filling.committed()
    except BaseException as error:
        filling.stop(error)
        raise
    return model


def _goes_on(store: TieredStore, name: str, source: ImportSource, existing: str) -> ImportRecord | None:
    """Return the record of an import that was stopped, if this one goes on with it. Raises MisuseError where it cannot, and
    ``existing`` does not say to begin anew."""
    try:
        record = begun(store, name)
        if record is not None:
            source.refuse_other(record.source, f"the import of model {name!r} into {store}")
    except (MisuseError, ManifestError):
        if existing == "refuse":
            raise
        return None
    return record


def _source(
    path: Path, cls: Any, dtype: torch.dtype, policy: zero.Policy, largest_unit: int | None, options: dict[str, Any]
) -> ImportSource:
    """Return what the values and the units of a model that is imported depend on."""
    given = {key: value.to_json_string() if key == "config" else repr(value) for key, value in options.items()}
    given |= {"cls": cls.__name__, "dtype": _named(dtype), "policy": repr(policy), "largest_unit": str(largest_unit)}
    return ImportSource(files_in(path), given | {"transformers": transformers.__version__})


def open_model(store: TieredStore, *, name: str | None = None, cls: Any = None, **options: Any) -> Any:
    """Return the model that ``import_model`` (or ``tiered import``) left in ``store``, ready for ``generate()``.

    It is made on the meta device from the configuration in the store: nothing is initialised, and weights are read when they
    are used. ``access="read"`` is enough to open the store, and any number of processes may read it at once.
    ``name``: of the model, where there are several. ``cls``: another class than that of the import, such as a model's of
    your own. ``options``: as in ``from_pretrained``, such as ``attn_implementation`` or ``paging``.

    Raises MisuseError where there is no such model, its class is not one of ``transformers``, or a store for reading has
    updates of a training that are not applied; and as ``zero.page``.
    """
    _refuse(options, OPENED)
    name = only_model(store) if name is None else name
    opening = opening_of(store, name)
    kind = cls if cls is not None else getattr(transformers, opening.get("class", ""), None)
    if kind is None:
        raise MisuseError(f"transformers has no class {opening.get('class')!r}, of which model {name!r} is: give it as cls=")
    stored, dtype = (getattr(torch, opening.get(key, ""), None) for key in ("stored", "compute"))
    if not isinstance(stored, torch.dtype) or not isinstance(dtype, torch.dtype):
        raise ManifestError(f"what {store} keeps of model {name!r} is damaged: it does not name two types of elements")
    quantize: Any = opening.get("quantize")
    if quantize not in (None, *QUANTIZE):
        raise ManifestError(f"model {name!r} in {store} is quantised as {quantize!r}, which this release does not know")
    if stored is not dtype or quantize is not None:
        options["policy"] = zero.Policy(storage=None if stored is dtype else stored, quantize=quantize)
    with kept_folder(store, name) as folder:
        model = from_pretrained(kind, folder, store, name=name, existing="resume", dtype=dtype, **options)
    if store.access is Access.READ and any(unit.pending is not None for unit in pager_of(model).units):
        raise MisuseError(
            f"model {name!r} was committed in a training with updates that are not applied yet, which a store that is open for "
            "reading cannot do: open it for writing, optimizer.flush() before zero.commit"
        )
    model.config._name_or_path = model.name_or_path = store.folder or ""  # the folder is gone; peft writes it to an adapter
    return model


def open_tokenizer(store: TieredStore, *, name: str | None = None) -> Any:
    """Return the tokenizer that ``import_model`` left in ``store``. Raises MisuseError where there is none."""
    name = only_model(store) if name is None else name
    with kept_folder(store, name) as folder:
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # tokenizers raises nothing more special
            if (folder / TOKENIZER).is_file():
                why = shown(str(error), 300)
                raise MisuseError(f"the tokenizer that {store} keeps of model {name!r} cannot be read: {why}") from error
            if not isinstance(error, OSError | ValueError):
                raise
            raise MisuseError(f"{store} keeps no tokenizer of model {name!r}: the folder of its import had none") from error


def quietly() -> None:
    """Let ``transformers`` log errors only, for a program that tells the rest itself."""
    logging.set_verbosity_error()


def _inexact(model: Any, quantize: Quantize) -> dict[str, str]:
    """Return what ``opening.json`` says of a model that was quantised: how, and the relative errors. Raises MisuseError where
    nothing was."""
    placements = [placement for unit in pager_of(model).units for placement in unit.plan.placements]
    losses = {placement.name: placement.loss for placement in placements if placement.loss is not None}
    if not losses:
        raise MisuseError(f"no parameter of this model is large enough to be quantised as {quantize}: leave quantize out")
    largest = max(losses, key=lambda name: losses[name].relative)
    together = sum(losses.values(), Loss()).relative
    told = (
        f"inexact: {len(losses)} of {len(placements)} parameters and slices are {quantize}; relative error {together:.2%} of "
        f"all together, {losses[largest].relative:.2%} at most ({largest})"
    )
    return {"quantize": quantize, "inexact": told}


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(path: Path, config: Any) -> torch.dtype:
    """Return the type that ``dtype="auto"`` means: the configuration's, or that of the first floating tensor in the files."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                found = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
                dtype = found.get(opened.get_slice(key).get_dtype())
                if dtype is not None:
                    return dtype
    raise MisuseError(f"{path} has no weights of 16, 32 or 64 bits")


def _refuse_kind(path: Path, cls: Any, config: Any) -> None:
    """Raise MisuseError where ``cls``, one of the Auto classes, makes no models of this configuration."""
    makes = getattr(cls, "_model_mapping", None)
    if makes is not None and type(config) not in makes and not hasattr(config, "auto_map"):
        raise MisuseError(
            f"{path} has a model of the type {config.model_type!r}, which {cls.__name__} does not make: it is another kind of "
            "model. In Python, import_model(..., cls=) takes its class, such as transformers.AutoModelForSeq2SeqLM"
        )


def _refuse_rounding(model: Any, kinds: set[str], stored: torch.dtype) -> Any:
    """Raise MisuseError for a model some of whose parameters transformers keeps in fp32, where the files have fp32 among
    ``kinds``: a policy would round them."""
    code = CODES[_named(stored)]
    if all(kind in (code, "BOOL") or not kind.startswith(("F", "BF")) for kind in kinds):
        return model
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if stored is torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for parameter, _ in model.named_parameters():
        if any(pattern in parameter for pattern in patterns):
            raise MisuseError(
                f"{parameter!r} stays in float32 beside weights in {_named(stored)}, which is what compute=float32 (--compute) "
                "keeps on the disk, and would round it: leave it out"
            )
    return model


def _kinds(path: Path) -> set[str]:
    """Return the types of all tensors in the files, as safetensors names them."""
    found: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
    return found


@contextmanager
def _telling(progress: Told) -> Iterator[None]:
    """Call ``progress`` as ``transformers`` goes through the weights, in place of showing its own bar."""

    class Bar:
        def __init__(self, items: Any = ()) -> None:
            self.items = items

        def __iter__(self) -> Iterator[Any]:
            for item in self.items:
                yield item
                self.update()

        def update(self, count: int = 1) -> None:
            progress("reading the headers", 0.0)

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **options: None

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

    before = logging.set_tqdm_hook(lambda make, given, options: Bar(given[0] if given else ()))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
