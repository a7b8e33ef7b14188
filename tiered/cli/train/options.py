"""Options of ``tiered train``, each with its default and with what resuming does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from tiered.types import BackendName, OptimizerName

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_FOLDER",
    "MODEL_HELP",
    "NAME",
    "OPTIMIZERS",
    "UPDATES",
    "Options",
    "Role",
    "StoreOptions",
    "default_of",
    "names_of",
]

DEFAULT_FOLDER = "tiered-store"
NAME = "model"
"""The model's name in the store."""

UPDATES = ("on_fetch", "in_backward")
ACTIVATIONS = ("memory", "recompute", "store", "auto")
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
MODEL_HELP = {
    "layers": "transformer blocks",
    "width": "width of the model, a multiple of --heads",
    "heads": "attention heads",
    "context": "bytes of text that the model sees at once",
    "batch": "texts in a batch",
    "accumulate": "batches per step",
    "micro_batch": "parts into which units divide a batch, so that parameters are read once for all parts",
}
"""``--help`` of the options that ``tiered train`` and ``tiered bench train`` share."""

Role = Literal["model", "session", "changeable"]
"""What a resumed training does with an option. "model": it must be the value of the beginning, else the training would be a
different one. "changeable": it is the recorded value unless the command line has another. "session": it is not recorded."""


def _option(role: Role, default: object = None, *, with_check: object = None) -> dict[str, Any]:
    """Describe a field. The dataclass itself has no defaults, because an absent option must differ from a given one."""
    return {"role": role, "default": {False: default, True: default if with_check is None else with_check}}


@dataclass(frozen=True)
class StoreOptions:
    """How ``tiered train`` opens its store. ``dram`` and ``hbm`` in bytes (``hbm`` None or 0: compute on the CPU)."""

    dram: int = field(metadata=_option("changeable", 256 << 20, with_check=4 << 20))
    hbm: int | None = field(metadata=_option("changeable"))
    device: str = field(metadata=_option("changeable", "cuda"))
    backend: BackendName = field(metadata=_option("changeable", "auto"))
    commit_every: int | None = field(metadata=_option("changeable"))


@dataclass(frozen=True)
class Options(StoreOptions):
    """All options of one training. ``steps`` None: train until ``minutes`` are over. ``folder`` None: DEFAULT_FOLDER, or a
    temporary one with ``--check``.

    The defaults train at least 100 million parameters in about 3 minutes on 2 cores. With ``--check`` they take seconds, and
    the budget is so small that every unit is evicted between its uses.
    """

    text: str | None = field(metadata=_option("changeable"))
    folder: str | None = field(metadata=_option("session"))
    existing: Literal["refuse", "overwrite"] = field(metadata=_option("session", "refuse"))
    update_tier: Literal["dram", "hbm"] = field(metadata=_option("changeable", "dram"))
    prefetch: Literal["on", "off"] = field(metadata=_option("session", "on"))
    layers: int = field(metadata=_option("model", 16, with_check=6))
    width: int = field(metadata=_option("model", 768, with_check=192))
    heads: int = field(metadata=_option("model", 12, with_check=6))
    context: int = field(metadata=_option("model", 128, with_check=64))
    batch: int = field(metadata=_option("model", 4, with_check=2))
    accumulate: int = field(metadata=_option("model", 1, with_check=2))
    micro_batch: int = field(metadata=_option("model", 1))
    optimizer: str = field(metadata=_option("model", "adamw"))
    update: Literal["on_fetch", "in_backward"] = field(metadata=_option("model", "on_fetch"))
    recompute: bool = field(metadata=_option("changeable", False))
    activations: Literal["memory", "recompute", "store", "auto"] = field(metadata=_option("changeable", "memory"))
    activation_memory: int | None = field(metadata=_option("changeable"))
    steps: int | None = field(metadata=_option("changeable", 50, with_check=20))
    minutes: float | None = field(metadata=_option("changeable"))
    lr: float = field(metadata=_option("model", 1e-4))
    warmup: int = field(metadata=_option("model", 5))
    weight_decay: float = field(metadata=_option("model", 0.1))
    clip: float = field(metadata=_option("model", 1.0))
    seed: int = field(metadata=_option("model", 0))
    json: str | None = field(metadata=_option("session"))
    timeline: str | None = field(metadata=_option("session"))
    plot: str | None = field(metadata=_option("session"))
    report: str | None = field(metadata=_option("session"))
    timeline_steps: int = field(metadata=_option("session", 3))
    stage: int = field(metadata=_option("changeable", 3))

    @classmethod
    def of(cls, given: Mapping[str, Any], *, check: bool = False) -> Options:
        """Make options of those that are ``given``; others, and those that are None, have their defaults."""
        chosen = {one.name: given.get(one.name) for one in fields(cls)}
        return cls(**{n: default_of(n, check=check) if value is None else value for n, value in chosen.items()})


def names_of(role: Role) -> tuple[str, ...]:
    """The options with this role."""
    return tuple(one.name for one in fields(Options) if one.metadata["role"] == role)


_DEFAULTS: dict[str, dict[bool, Any]] = {one.name: one.metadata["default"] for one in fields(Options)}


def default_of(name: str, *, check: bool = False) -> Any:
    """The value of the option ``name`` where the command line has none; ``check``: with ``--check``."""
    return _DEFAULTS[name][check]
