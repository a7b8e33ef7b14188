"""A model of Hugging Face's by its ``config.json`` alone: shapes and modules, on the meta device, without weights.

A ``config.json`` of some bytes can ask for any number of modules, which ``transformers`` would make one by one. So what it says
is looked at before anything is made of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tiered.errors import MisuseError, quoted, shown
from tiered.format.foreign.documents import json_of
from tiered.integrations.packed import is_known, named

__all__ = [
    *("QUANTISED", "config_of", "is_packed", "making"),
    *("method_of", "model_of", "refuse_config", "refuse_document", "with_adapters"),
]

CONFIG, CONFIG_BYTES = "config.json", 16 << 20
"""The file of a configuration, and how many bytes it may have: some have the labels of ten thousands of classes."""
MOST_LAYERS = 10_000
MOST_OTHERS = 100_000
"""Experts, labels, groups and the like."""
MOST_MODULES = 1 << 18
"""Layers times experts."""
LARGEST = 2**31 - 1
"""Rows, columns, positions or tokens."""
QUANTISED = (
    "what is packed otherwise than by bitsandbytes, in 8 bits by fp8 or compressed-tensors, or as mxfp4, cannot be "
    "paged: take the model that is not quantised, and policy=zero.Policy(quantize=) or --quantize to save room"
)

_LAYERS = re.compile(r"layer|block|depth|stage", re.IGNORECASE)
_OTHERS = re.compile(r"expert|label|group|codebook|head", re.IGNORECASE)
_SIZES = re.compile(r"(size|dim|width|length|capacity|window|ids?|freq|step|interval|period|(?<!n_)norm)$", re.IGNORECASE)
"""Ends of names of numbers that count no modules, although a layer or an expert is in the name."""
_EXTENTS = re.compile(r"size|dim|width|height|vocab|embd|embed|positions|channels|features|rank", re.IGNORECASE)


def config_of(folder: str | os.PathLike[str], *, trust_remote_code: bool = False, called: str | None = None) -> Any:
    """Return the configuration in ``folder``. Nothing is downloaded, and no code of the folder is run unless the caller trusts
    it. ``called``: how errors name what it was read from (default: by its path). Raises MisuseError where it cannot be read, is
    of a quantised model, or asks for very many modules."""
    where = shown(os.fspath(Path(folder, CONFIG)), 1000) if called is None else called
    refuse_document(json_of(Path(folder, CONFIG), CONFIG_BYTES), where)
    with making(f"transformers cannot read {where if called is None else f'the configuration in {where}'}"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would make other modules; here the parameters are packed
    return config


def method_of(folder: str | os.PathLike[str]) -> str | None:
    """Return by which method the weights in a folder are packed, as its ``config.json`` says; None where they are not."""
    how = json_of(Path(folder, CONFIG), CONFIG_BYTES).get("quantization_config")
    return quoted(how.get("quant_method")) if isinstance(how, dict) else None


def refuse_config(folder: str | os.PathLike[str]) -> None:
    """Raise MisuseError where the ``config.json`` in ``folder`` cannot be read, is of a quantised model, or asks for more
    layers, experts or labels than a model has, or for a tensor with more rows or columns."""
    refuse_document(json_of(Path(folder, CONFIG), CONFIG_BYTES), shown(os.fspath(Path(folder, CONFIG)), 1000))


def refuse_document(document: Any, where: str) -> None:
    """Raise MisuseError as ``refuse_config`` for what a configuration says. ``where``: in which file."""
    if not isinstance(document, dict):
        raise MisuseError(f"{where} is no configuration of a model, but {quoted(document)}")
    if document.get("quantization_config") is not None and not is_packed(document):
        raise MisuseError(f"{where} has quantization_config of {named(document['quantization_config'])}: {QUANTISED}")
    layers = experts = 1
    for name, value in _numbers(document):
        counts = not _SIZES.search(name)
        limit = MOST_LAYERS if counts and _LAYERS.search(name) else MOST_OTHERS if counts and _OTHERS.search(name) else None
        if limit is None and _EXTENTS.search(name):
            limit = LARGEST
        if limit is not None and value > limit:
            raise MisuseError(f"{where} has {value:,} for {shown(name)!r}; the limit is {limit:,}")
        if limit == MOST_LAYERS:
            if value < 0:
                raise MisuseError(f"{where} has {value:,} for {shown(name)!r}, which counts something")
            layers = max(layers, value)
        elif counts and "expert" in name.lower():
            experts = max(experts, value)
    if layers * experts > MOST_MODULES:
        raise MisuseError(f"{where} asks for {layers:,} layers of {experts:,} experts; the limit is {MOST_MODULES:,} together")


def is_packed(document: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of a model whose weights are packed in a way that is known."""
    return is_known(document.get("quantization_config"))


def _numbers(document: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a configuration by the names under which they stand; of a list its largest, of depths their
    sum."""
    left: list[tuple[str, Any]] = list(document.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items() if name != "label2id" else ()  # whose names are those of labels
        elif isinstance(value, list):
            numbers = [one for one in value if type(one) is int]
            if numbers and not _SIZES.search(name):
                yield name, sum(numbers) if "depth" in name.lower() else max(numbers)
            left += [(name, one) for one in value if isinstance(one, dict | list)]
        elif type(value) is int:
            yield name, value


@contextmanager
def making(what: str) -> Iterator[None]:
    """Within the block, turn what ``transformers`` raises of a configuration, which may be anything, into MisuseError.
    ``what``: what cannot be done."""
    try:
        yield
    except Exception as error:
        others = type(error).__module__.split(".")[0] not in ("builtins", "torch", "transformers", "huggingface_hub")
        if others or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            raise
        said = " ".join(str(error).split())
        raise MisuseError(f"{what}: {shown(said, 300) if said else type(error).__name__}") from error


def model_of(folder: str) -> nn.Module:
    """Return the model that generates text of a folder with a ``config.json``, on the meta device and as for training.

    Raises MisuseError as ``config_of``, and where transformers knows no such model.
    """
    config = config_of(folder)
    config.use_cache = False
    with making(f"transformers makes no model of {shown(folder, 1000)}"), torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Return a model on the meta device with adapters of that rank on all linear layers. Raises ImportError without peft."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        adapted: nn.Module = get_peft_model(model, config)
    return adapted
