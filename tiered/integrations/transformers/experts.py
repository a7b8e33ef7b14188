"""Mixtures of experts that generate: fetch the experts that a router chose at the same time, count hits, and speculate.

All of it is around the forward of each module of experts, which is given the router's choices (``CHOICES``). What that
forward computes, and how (``experts_implementation=``), stays as it is: tokens are those of the same function in memory. A
function of one's own in ``transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS`` would be called in the same place, but the
configuration would then name it, and ``generate()`` decides by that name what decoding uses on a device.

Which experts stay in memory is the store's decision (``TieredStore.follow`` with ``others="frequency"``).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from tiered.errors import MisuseError, expect_type
from tiered.zero.paging.pager import Pager, pager_of
from tiered.zero.paging.tensors.compiling import passed, uncompiled

__all__ = ["ExpertStatistics", "RoutedExperts", "around_experts", "expert_statistics", "routed_experts"]

Speculate = Literal["on", "off"]
CHOICES = ("top_k_index", "router_indices")
"""Names of the argument of a module of experts that has the router's choices: a row for each token."""
DECAY = 0.8
"""Weight of a router's choices beside its next ones, in the share of tokens that chose an expert lately."""
LIKELY = 0.5
"""Least share of an expert that is fetched before the router has chosen it."""
FORGOTTEN = 0.001
"""Share of an expert below which it is counted no longer."""
_Model = TypeVar("_Model")


@dataclass(frozen=True)
class ExpertStatistics:
    """Counters since the model was opened. A forward of a layer chooses each expert once, whatever the number of tokens.

    ``hits``: experts that were in memory when the router chose them, ``misses`` the others; ``hit_bytes``, ``missed_bytes``:
    those in the store. ``speculated``: experts that were fetched before the router had chosen; ``speculated_used`` of them
    were used later, and ``speculated_unused`` evicted before that: these are the store's, of all its models.
    """

    hits: int
    misses: int
    hit_bytes: int
    missed_bytes: int
    speculated: int
    speculated_used: int
    speculated_unused: int

    @property
    def hit_share(self) -> float:
        """The share of chosen experts that were in memory; 1 before the first choice."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0


class RoutedExperts:
    """The experts of one model. ``speculate``: whether experts of the next layer are fetched before its router chooses, those
    that at least the share ``likely`` of its last choices had ("off"). ``recorded``: where it is a list, each choice is added
    to it, as layer and experts."""

    def __init__(self, pager: Pager) -> None:
        expect_type(pager, Pager, "routed_experts(model) returns the experts of a model; their constructor is given a pager")
        self._pager = weakref.ref(pager)
        self.speculate: Speculate = "off"
        self.likely = LIKELY
        self.recorded: list[tuple[int, tuple[int, ...]]] | None = None
        self._layers: list[_Layer] = []
        self._hits = self._misses = self._hit_bytes = self._missed_bytes = 0

    @property
    def sizes(self) -> list[list[int]]:
        """Bytes of each expert in the store, by layer."""
        return [list(layer.sizes) for layer in self._layers]

    def statistics(self) -> ExpertStatistics:
        """Return a frozen snapshot. Raises MisuseError where the model is gone, StoreClosed."""
        pager = self._pager()
        if pager is None:
            raise MisuseError("the model of these experts is gone: keep it as long as you ask for its statistics")
        seen = pager.store.statistics()
        return ExpertStatistics(
            *(self._hits, self._misses, self._hit_bytes, self._missed_bytes),
            *(seen.speculated, seen.speculated_used, seen.speculated_unused),
        )

    def add(self, module: nn.Module, alike: Sequence[Sequence[nn.Parameter]]) -> _Layer:
        """Add a layer, whose expert i has the slices ``alike[...][i]``."""
        pager = self._pager()
        assert pager is not None
        units = [pager.units_of([one])[0] for one in alike[0]]
        sizes = [unit.plan.stored_nbytes for unit in units]
        layer = _Layer(len(self._layers), list(alike[0]), [unit.key for unit in units], sizes)
        self._layers.append(layer)
        return layer

    @uncompiled
    def compute(self, layer: _Layer, choices: torch.Tensor, forward: Callable[[], Any]) -> Any:
        """Return what ``forward`` does, while the experts that ``choices`` has are held."""
        pager = self._pager()
        if pager is None:
            return forward()
        chosen = [index for index in torch.unique(choices).tolist() if 0 <= index < len(layer.keys)]
        self._count(pager, layer, chosen)
        with pager.holding([layer.slices[index] for index in chosen]):
            self._look_ahead(pager, layer, chosen)
            return forward()

    def _count(self, pager: Pager, layer: _Layer, chosen: Sequence[int]) -> None:
        if self.recorded is not None:
            self.recorded.append((layer.number, tuple(chosen)))
        present = pager.store.present([layer.keys[index] for index in chosen])
        for index in chosen:
            if layer.keys[index] in present:
                self._hits, self._hit_bytes = self._hits + 1, self._hit_bytes + layer.sizes[index]
            else:
                self._misses, self._missed_bytes = self._misses + 1, self._missed_bytes + layer.sizes[index]

    def _look_ahead(self, pager: Pager, layer: _Layer, chosen: Sequence[int]) -> None:
        """Have the store fetch the likely experts of the layer after this one, while this one computes."""
        if self.speculate == "off":
            return
        layer.chosen(chosen)
        after = self._layers[(layer.number + 1) % len(self._layers)]
        if likely := after.likely(self.likely):
            pager.store.speculate([after.keys[index] for index in likely])


class _Layer:
    """Experts of one layer, and the share of the last choices that had each."""

    def __init__(self, number: int, slices: list[nn.Parameter], keys: list[str], sizes: list[int]) -> None:
        self.number, self.slices, self.keys, self.sizes = number, slices, keys, sizes
        self._shares: dict[int, float] = {}

    def chosen(self, indices: Sequence[int]) -> None:
        """Note the experts of a choice."""
        self._shares = {index: share * DECAY for index, share in self._shares.items() if share > FORGOTTEN}
        for index in indices:
            self._shares[index] = self._shares.get(index, 0.0) + 1 - DECAY

    def likely(self, least: float) -> list[int]:
        """Return the experts that at least so large a share of the last choices had, the largest share first."""
        found = [(share, index) for index, share in self._shares.items() if share >= least]
        return [index for _, index in sorted(found, reverse=True)]


def around_experts(model: _Model) -> _Model:
    """Have the experts of a paged model fetched together where no gradients are recorded. Returns ``model``."""
    assert isinstance(model, nn.Module)
    if next(model.parameters(), None) is None or not pager_of(model).sliced:
        return model
    found = RoutedExperts(pager_of(model))
    for module in model.modules():
        signature = inspect.signature(type(module).forward)
        own = [one for one in module._parameters.values() if one is not None]
        alike = [handle.slices for one in own if (handle := getattr(one, "_tiered", None)) is not None and _of_experts(handle)]
        if alike and signature.parameters.keys() & set(CHOICES):
            pager_of(model).call(module, _around(module, found, found.add(module, alike), signature))
    if found.sizes:
        pager_of(model).store.attached.made(_Routed, _Routed)[model] = found
    return model


def _of_experts(handle: Any) -> bool:
    return hasattr(handle, "slices") and handle.rows is None


def _around(
    module: nn.Module, experts: RoutedExperts, layer: _Layer, signature: inspect.Signature
) -> Callable[..., Any]:
    forward = module.forward

    def held(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = signature.bind(module, *args, **kwargs).arguments
        choices = next((given[name] for name in CHOICES if name in given), None)
        if not isinstance(choices, torch.Tensor):
            return forward(*args, **kwargs)
        return experts.compute(layer, choices, lambda: forward(*args, **kwargs))

    return passed(held)


def routed_experts(model: nn.Module) -> RoutedExperts:
    """Return the experts of a model that ``from_pretrained``, ``import_model`` or ``open_model`` returned. Raises MisuseError
    for another one, and for a model without experts that are read one by one."""
    expect_type(model, nn.Module, "a model with experts is a torch.nn.Module")
    found = _found(model)
    if found is None:
        raise MisuseError("this model has no experts that are read one by one, or open_model did not return it")
    return found


def expert_statistics(model: nn.Module) -> ExpertStatistics | None:
    """Return the counters of a model's experts; None for a model without experts that are read one by one."""
    found = _found(model)
    return None if found is None else found.statistics()


def _found(model: nn.Module) -> RoutedExperts | None:
    if not any(hasattr(parameter, "_tiered") for parameter in model.parameters()):
        return None
    known = pager_of(model).store.attached.find(_Routed)
    return None if known is None else known.get(model)


class _Routed(weakref.WeakKeyDictionary[nn.Module, RoutedExperts]):
    """The experts of models that are paged into a store."""
