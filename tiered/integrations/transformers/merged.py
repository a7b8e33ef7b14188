"""Export a paged model with its peft adapters merged into the weights that they are for, a module at a time.

peft merges: a module with an adapter is copied to memory, where its weights are unpacked if they are packed in the store, and
peft's own methods merge the copy. What is written is what ``merge_and_unload`` of the model in memory has.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from tiered.errors import MisuseError, expect_type
from tiered.integrations.kept import saved_by
from tiered.zero.checkpoint.safetensors import Changes, Progress, Replaced, export_with
from tiered.zero.paging.pager import pager_of

__all__ = ["export_merged"]

PREFIX = "base_model.model."
"""How the names in a ``PeftModel`` begin."""
ADAPTED = (BaseTunerLayer, AuxiliaryTrainingWrapper)


def export_merged(
    model: PeftModel,
    folder: str | os.PathLike[str],
    *,
    shard: int | str = "5GB",
    dtype: torch.dtype | None = None,
    existing: Literal["refuse", "overwrite"] = "refuse",
    progress: Progress | None = None,
) -> list[str]:
    """Write a paged ``PeftModel`` with its active adapters merged to ``folder``: safetensors files and configuration of a model
    that ``from_pretrained`` of transformers loads without peft.

    Values are those of ``model.merge_and_unload()`` in memory, of weights that are packed in the store (``quantize=``) those
    that the model computes with; the model itself stays as it is. One module with its adapter is in memory at a time, beside
    one unit. ``dtype``: of all floating point tensors, to which merged values are rounded once (default: as they are in the
    model).
    ``shard``, ``existing``, ``progress`` as in ``zero.export``. Returns the names of the files; the tokenizer is not among
    them.

    Raises MisuseError for a model without adapters, for adapters that peft does not merge, for a tied weight that adapters
    change in one module and not, or otherwise, in the other, for several ranks, and as ``zero.export``.
    """
    expect_type(model, PeftModel, "what is merged is a peft.PeftModel")
    pager = pager_of(model)
    if pager.partition.shares > 1:
        raise MisuseError("adapters are merged by one process: resume the model in one (docs/many-ranks.md), and export there")
    adapted = dict(_adapted(model))
    if not adapted:
        raise MisuseError(f"this {type(model).__name__} has no module with an adapter: use zero.export")
    _refuse_tied(model, adapted)
    _refuse_unmergeable(adapted.values())
    written: set[int] = set()
    changed = {name: Replaced(_described(module, written), partial(_merged, module)) for name, module in adapted.items()}
    changes, beside = Changes(changed, PREFIX), _configuration(model.get_base_model(), dtype)
    return export_with(
        model, folder, changes, beside=beside, shard=shard, dtype=dtype, existing=existing, progress=progress
    )


def _adapted(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with an adapter by their names, each without those within it."""
    for part, child in module.named_children():
        path = f"{name}.{part}" if name else part
        if isinstance(child, ADAPTED):
            yield path, child
        else:
            yield from _adapted(child, path)


def _refuse_tied(model: nn.Module, adapted: Mapping[str, nn.Module]) -> None:
    of: dict[int, tuple[str, object]] = {}
    for module, parameter, becomes in _weights(model, adapted):
        first, same = of.setdefault(id(parameter), (module, becomes))
        if same != becomes:
            raise MisuseError(
                f"{first.removeprefix(PREFIX)!r} and {module.removeprefix(PREFIX)!r} share a weight, and adapters change it "
                "for one of them alone, or for each in its own way: merged into the weight they would change both. Leave the "
                "module out of target_modules and modules_to_save, or untie the weights before the adapter is made "
                "(tie_word_embeddings=False)"
            )


def _weights(model: nn.Module, adapted: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter, object]]:
    """Yield the weights of the model without its adapters: the module, the weight, and what becomes of it as adapters are
    merged, which is equal where it has the same values. Weights that adapters have for themselves are in none."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(PREFIX) and not any(name.startswith(f"{one}.") for one in adapted):
            yield name.rpartition(".")[0], parameter, id(parameter)
    for name, module in adapted.items():
        left = dict(_left(module).named_parameters(remove_duplicate=False))
        becomes: object = name
        if isinstance(module, TrainableTokensWrapper):  # which may lead to the rows of another one
            becomes = id(module.token_adapter.trainable_tokens_delta)
        inside = (isinstance(one, ADAPTED) for one in _left(module).modules())
        stays = isinstance(module, ModulesToSaveWrapper) and not any(inside)
        original: nn.Module = module
        while isinstance(original, ADAPTED):
            original = _original(original)
        for place, parameter in chain(original.named_parameters(remove_duplicate=False), left.items()):
            yield name, parameter, id(left.get(place)) if stays else becomes


def _refuse_unmergeable(modules: Iterable[nn.Module]) -> None:
    """Have peft merge one module of each type, the smallest, before anything is written."""
    smallest: dict[type[nn.Module], nn.Module] = {}
    for module in sorted(modules, key=_elements):
        if isinstance(module, BaseTunerLayer):
            smallest.setdefault(type(module), module)
    for module in smallest.values():
        _merged(module)


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _described(module: nn.Module, written: set[int]) -> dict[str, torch.Tensor]:
    """Return what takes the place of a module with an adapter, without values, and without weights that another module has,
    too, and that are ``written`` there. Adds the others to these."""
    found = {}
    for name, value in _left(module).state_dict(keep_vars=True).items():
        if id(value) not in written:
            written.add(id(value))
            found[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return found


def _left(module: Any) -> nn.Module:
    """Return the module that takes the place of one with an adapter, whose values are not merged yet."""
    while isinstance(module, ADAPTED):
        if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
            module = module.modules_to_save[module.active_adapters[0]]
        else:
            module = _original(module)
    found: nn.Module = module
    return found


def _original(module: Any) -> nn.Module:
    found: nn.Module = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module.base_layer
    return found


@torch.no_grad()
def _merged(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors of what takes the place of a module with an adapter. Raises MisuseError where peft cannot merge."""
    try:
        return _without_adapters(copy.deepcopy(module)).state_dict()
    except NotImplementedError as error:
        said = f" ({error})" if str(error) else ""
        raise MisuseError(
            f"peft does not merge adapters of type {type(module).__module__}.{type(module).__qualname__}{said}: keep the "
            "adapter beside the model (model.save_pretrained(folder)), and load it where the model is used"
        ) from error


def _without_adapters(module: Any) -> nn.Module:
    """Merge the adapters of a module in memory, and return what is left, as peft's ``merge_and_unload`` does."""
    if hasattr(module, "unload_and_optionally_merge_module"):
        found: nn.Module = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return found
    module.merge(safe_merge=False, adapter_names=None)
    left: nn.Module = module.get_base_layer()
    return left


def _configuration(model: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Return the files that transformers wants beside the weights, by name, as far as the model has it; nothing of it says that
    weights are packed, which these are not."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "save_pretrained"):
        return {}
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if dtype is not None:
        config.dtype = dtype
    config.architectures = [type(model).__name__]
    return saved_by(config, getattr(model, "generation_config", None))
