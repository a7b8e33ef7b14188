"""What a kept cache says of itself: its tokens, its blocks, and the model that it was computed by. JSON in one tensor.

A record is checked when it is read: by itself, and beside the tensors of its store. Nothing in it can run.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import torch

from tiered.errors import ManifestError, MisuseError
from tiered.integrations.transformers.kv_layer import CachedBlock, CachedTokens, Geometry, PagedLayer
from tiered.store import TieredStore
from tiered.zero.checkpoint.weights import Weights

__all__ = ["CacheRecord", "LayerRecord", "Model", "read", "tensor_of"]

VERSION = 2
MOST = 1 << 30
"""Bytes of a record: of some ten million tokens."""
IRRELEVANT = {"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict", "problem_type"}
"""Fields of a configuration that keys and values do not depend on; so do not those that begin with "_", or end with
"_token_id"."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model keys and values are of: its class, digests of its configuration and of which adapters are in use, and its
    weights, those of adapters too."""

    kind: str
    config: str
    adapters: str
    weights: Weights

    @classmethod
    def noted(cls, model: Any) -> Model:
        """Note what ``model`` is now. Reads the weights that no commit has as they are. Raises MisuseError for a model without
        weights, and for weights on the meta device."""
        if next(model.parameters(), None) is None:
            raise MisuseError(f"a {type(model).__name__} has no weights, and so no keys and values to keep")
        return cls(type(model).__name__, _config(model), _adapters(model), Weights.noted(model))

    def kept(self, model: Any, cache: str) -> Model:
        """Return this with digests of all values, to be kept. Raises MisuseError where ``model`` has changed since, and what
        reading its weights raises. ``cache`` names what was made with it."""
        now, changed = self.weights, ""
        if _adapters(model) != self.adapters:
            changed = "other adapters are active in the model, or with other scales,"
        else:
            now = Weights.whole(model, self.weights)
            other = self.weights.other(now)
            if other is not None:
                changed = f"the weights of the model have changed (first {other!r})"
        if changed:
            raise MisuseError(
                f"{changed} since the cache {cache!r} was made, so its keys and values are another model's: make another cache"
            )
        return Model(self.kind, self.config, self.adapters, now)

    def opened(self, model: Any, what: str) -> Model:
        """Return what is known of ``model`` where it is this one. Raises MisuseError where it is another, and as ``kept``.
        ``what`` names what was made with this one."""
        kind, config, adapters = type(model).__name__, _config(model), _adapters(model)
        differs = ""
        if self.kind != kind:
            differs = "class"
        elif self.config != config:
            differs = "configuration"
        elif self.adapters != adapters:
            differs = "choice of adapters"
        else:
            here = self.weights.opened(model)
            if isinstance(here, Weights):
                return Model(kind, config, adapters, here)
            differs = "weights"
        first = f" (first {here!r})" if differs == "weights" else ""
        raise MisuseError(
            f"{what} was made with a {self.kind} of another {differs} than that of this {kind}{first}: open it with that "
            "model, or make another cache with another name=, or with existing='overwrite'"
        )


def _config(model: Any) -> str:
    """Return a digest of what keys and values depend on in a configuration."""
    fields = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in IRRELEVANT and not name.startswith("_") and not name.endswith("_token_id")
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _adapters(model: Any) -> str:
    """Return a digest of which adapters compute in which modules, and of their scales: what ``peft`` has beside weights."""
    found = {}
    for name, module in model.named_modules():
        active, off = getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None)
        if isinstance(active, list) and isinstance(off, bool):
            scales = getattr(module, "scaling", {})
            found[name] = [] if off else [[one, str(scales.get(one))] for one in active]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


class LayerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer: its window, its geometry (None where it has no tokens), and its blocks."""

    window: int | None
    geometry: tuple[int, int, int, int, str] | None
    blocks: list[tuple[int, int, list[int] | None]]

    @classmethod
    def of(cls, layer: PagedLayer, extent: CachedTokens) -> LayerRecord:
        found = layer.geometry
        geometry = None if found is None else (*found[:4], str(found.dtype).removeprefix("torch."))
        blocks = [(block.serial, block.stored, None if block.rows is None else list(block.rows)) for block in extent.blocks]
        return cls(layer.sliding_window, geometry, blocks)

    def restore(self, layer: PagedLayer, length: int, batch: int, store: TieredStore) -> CachedTokens:
        """Return the extent, and tell ``layer`` what it is like. Raises ValueError where they do not agree with ``store``."""
        if self.window != layer.sliding_window:
            raise ValueError(f"a layer has the window {self.window}, and the model {layer.sliding_window}")
        if self.geometry is not None:
            dtype = getattr(torch, self.geometry[4], None)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or min(self.geometry[:4]) < 1:
                raise ValueError(f"a layer has {self.geometry}")
            layer.geometry = Geometry(*self.geometry[:4], dtype)
            layer.is_initialized = True
        blocks = tuple(
            CachedBlock(serial, stored, None if rows is None else tuple(rows)) for serial, stored, rows in self.blocks
        )
        if blocks and layer.geometry is None:
            raise ValueError("a layer has blocks of unknown geometry")
        for block in blocks:
            count = block.stored if block.rows is None else len(block.rows)
            if block.serial < 0 or count != batch or any(not 0 <= row < block.stored for row in block.rows or ()):
                raise ValueError(f"block {block} is not one of {batch} sequences")
            if layer.key(block) not in store or store.spec(layer.key(block)) != layer.spec(block):
                raise ValueError(f"tensor {layer.key(block)!r} is missing, or of another shape than {layer.spec(block)}")
        return CachedTokens(length, blocks)


class CacheRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kept cache: its model, the tokens of a block, and of each sequence the ids, the mask (None: all ones), and ids that
    come after them and are not computed. ``note``: a text of who made it."""

    version: int
    model: Model
    block: int
    ids: list[list[int]]
    mask: list[list[int]] | None
    rest: list[list[int]]
    layers: list[LayerRecord]
    note: str = ""

    def check(self) -> None:
        """Raise ValueError for what does not agree with itself."""
        lengths = {len(row) for rows in (self.ids, self.mask or ()) for row in rows}
        blocks = -(-max(lengths, default=0) // max(self.block, 1))
        if (
            self.block < 1
            or len(lengths) > 1
            or (self.mask is not None and len(self.mask) != len(self.ids))
            or (self.rest and self.ids and len(self.rest) != len(self.ids))
            or len({len(row) for row in self.rest}) > 1
            or any(len(layer.blocks) != blocks for layer in self.layers)
        ):
            raise ValueError("numbers of tokens do not agree")


def tensor_of(record: CacheRecord) -> torch.Tensor:
    """Encode a record as a tensor of bytes."""
    return torch.frombuffer(bytearray(msgspec.json.encode(record)), dtype=torch.uint8)


def read(store: TieredStore, key: str) -> CacheRecord:
    """Read and check the record ``key``. Raises ManifestError for what ``tensor_of`` cannot have made."""
    spec = store.spec(key)
    if spec.dtype != "uint8" or len(spec.shape) != 1 or spec.nbytes > MOST:
        raise ManifestError(f"{key!r} in {store} is {spec.dtype} of shape {list(spec.shape)}, and no record of a cache")
    try:
        record = msgspec.json.decode(store.get(key).numpy().tobytes(), type=CacheRecord)
        if record.version != VERSION:
            raise ValueError(f"version {record.version} is not {VERSION}")
        record.check()
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise ManifestError(
            f"{key!r} in {store} is damaged, or of another version ({error!s:.200}): make another cache, with "
            "existing='overwrite'"
        ) from error
    return record
