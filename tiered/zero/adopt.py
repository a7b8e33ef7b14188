"""Moves a model's parameters into the store, one module at a time, and has them paged from then on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tiered import Access, CapacityError, MisuseError, TensorSpec, TieredStore
from tiered.zero.heap import Trimmer
from tiered.zero.paging import TRIM_SHARE, Pager
from tiered.zero.units import Plan, divide

__all__ = ["page"]

UNIT_SHARE = 8
"""A unit is at most this fraction of the pool, where single parameters allow it."""


def page(
    model: nn.Module,
    store: TieredStore,
    *,
    name: str = "model",
    existing: str = "refuse",
    prefetch: str = "on",
    param_init_fn: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Move ``model``'s parameters into ``store`` and page them around each module's forward and backward. Returns ``model``.

    Make the optimizer afterwards, with ``tiered.zero.AdamW``. Parameters on the meta device are given memory module by module,
    initialised by ``param_init_fn(module)`` (default: the module's ``reset_parameters``), and stored at once, so a model may be
    built that never fits into memory. Buffers stay in memory.

    ``existing``: what to do when the store already holds tensors under ``name``: "refuse" or "overwrite".
    ``prefetch``: "on", or "off" to fetch only on demand (to see what it brings).

    Raises MisuseError (paged before, name taken, wrong device), and CapacityError when the store's DRAM budget is below the
    smallest that works for this model; the message says how much that is. Then nothing was changed.
    """
    if existing not in ("refuse", "overwrite") or prefetch not in ("on", "off"):
        raise MisuseError("existing is 'refuse' or 'overwrite', prefetch is 'on' or 'off'")
    held = [key for key in store if key.startswith(f"{name}/")]
    if held and existing == "refuse":
        raise MisuseError(
            f"the store already holds a model named {name!r} ({len(held)} tensors): give another name=, or existing='overwrite'"
        )
    for qualified, parameter in model.named_parameters():
        if hasattr(parameter, "_tiered"):
            raise MisuseError(f"parameter {qualified!r} is paged already")
        if parameter.device.type not in ("cpu", "meta"):
            raise MisuseError(f"parameter {qualified!r} is on {parameter.device}: move the model to the CPU first")
    pool = store.statistics().tiers[0].capacity
    _refuse_small_pool(model, pool)
    without_memory = _replace_meta(model)
    plan = divide(model, pool // UNIT_SHARE)
    for key in held:
        store.delete(key)
    _store_parameters(model, store, name, plan, pool, without_memory, param_init_fn)
    Pager(model, store, name, plan, pool, prefetch=prefetch == "on")
    return model


def _refuse_small_pool(model: nn.Module, pool: int) -> None:
    """A unit, its gradient, and what the modules around it hold must fit at the same time, wherever they happen to lie."""
    plan = divide(model, pool // UNIT_SHARE)
    sizes = [-(-unit.nbytes // 4096) * 4096 for unit in plan.units]

    def deepest(module: nn.Module, above: frozenset[int]) -> int:
        here = above | frozenset(plan.held.get(module, ()))
        return max([sum(sizes[i] for i in here), *(deepest(child, here) for child in module.children())])

    together = deepest(model, frozenset()) if sizes else 0
    needed = max(3 * max(sizes, default=0), together + max(sizes, default=0), 1 << 20)
    if pool < needed:
        largest = max(plan.units, key=lambda unit: unit.nbytes)
        raise CapacityError(
            f"a DRAM budget of {pool:,} bytes is too small for this model: the smallest that works is {needed:,} bytes "
            f"(its largest unit, {largest.name!r}, has {largest.nbytes:,})"
        )


def _replace_meta(model: nn.Module) -> set[nn.Parameter]:
    """Put parameters without memory in the place of meta ones, which cannot be given any; tied ones stay tied."""
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in fresh:
                empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                fresh[parameter] = nn.Parameter(empty, parameter.requires_grad)
                fresh[parameter].__dict__.update(parameter.__dict__)
            module._parameters[name] = fresh[parameter]
    return set(fresh.values())


def _store_parameters(
    model: nn.Module,
    store: TieredStore,
    name: str,
    plan: Plan,
    pool: int,
    without_memory: set[nn.Parameter],
    init: Callable[[nn.Module], None] | None,
) -> None:
    owner: dict[nn.Parameter, nn.Module] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owner.setdefault(parameter, module)
    trimmer = Trimmer(pool // TRIM_SHARE)
    for unit in plan.units:
        key = f"{name}/param/{unit.name}"
        store.create(key, TensorSpec("uint8", (unit.nbytes,), 1))
        with store.lease(key, access=Access.WRITE) as memory:
            memory.zero_()
            for placement in unit.placements:
                if placement.parameter in without_memory:
                    _materialise(owner[placement.parameter], without_memory, init)
                with torch.no_grad():
                    placement.view(memory).copy_(placement.parameter)
                placement.parameter.data = torch.zeros((), dtype=placement.dtype).expand(placement.shape)
            del memory
        trimmer.passed(unit.nbytes)
    trimmer.trim()


def _materialise(
    module: nn.Module, without_memory: set[nn.Parameter], init: Callable[[nn.Module], None] | None
) -> None:
    """Give the parameters and buffers that are directly on ``module`` memory and their initial values.

    A tied parameter keeps the values that the first module naming it gave it; what later ones write goes to memory that is
    thrown away.
    """
    reset = init if init is not None else getattr(type(module), "reset_parameters", None)
    if reset is None:
        raise MisuseError(
            f"{type(module).__name__} has meta parameters and no reset_parameters(): give page() a param_init_fn"
        )
    stored: dict[nn.Parameter, torch.Tensor] = {}
    for parameter in module._parameters.values():
        if parameter is None or parameter in stored:
            continue
        if parameter in without_memory:
            without_memory.remove(parameter)
        elif parameter.untyped_storage().nbytes() < parameter.numel() * parameter.dtype.itemsize:
            stored[parameter] = parameter.data
        else:
            continue
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    reset(module)
    for parameter, placeholder in stored.items():
        parameter.data = placeholder
