"""Answer what scripts ask DeepSpeed's engine about its configuration, and say what to do of methods that there are not.

``QUESTIONS``, of ``keys.json``, has the methods and defaults of DeepSpeed 0.19.8. An answer is what the configuration says,
whether it has an effect here or not (docs/from_deepspeed.md says which).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from tiered.integrations.deepspeed.config import Config
from tiered.integrations.deepspeed.table import ALIASES, AUTO, QUESTIONS, value_at

__all__ = ["answer", "lacking"]

_MADE: dict[str, Callable[[Any, int], Any]] = {
    "zero_overlap_comm": lambda value, stage: stage == 3 if value is None else value,
    "zero_optimization_partition_gradients": lambda value, stage: stage >= 2,
    "zero_optimization_partition_weights": lambda value, stage: stage >= 3,
    "zero_use_cpu_optimizer": lambda value, stage: value in ("cpu", "nvme"),
    "zero_cpu_offload": lambda value, stage: value == "cpu",
    "zero_nvme_offload_optimizer": lambda value, stage: value == "nvme",
    "optimizer_name": lambda value, stage: None if value is None else value.lower(),
}
_PIPELINE = {"train_batch", "eval_batch", "inference_batch", "set_dataloader", "set_batch_fn", "set_dataiterator"}


def answer(config: Config, name: str) -> Any:
    """Return what a configuration answers to the method ``name``."""
    key, default = QUESTIONS[name]
    names = [key, *(alias for alias, meant in ALIASES.items() if meant == key)]
    said = [value for path in names if (value := value_at(config.values, path)) is not None and value != AUTO]
    found = said[0] if said else default
    return _MADE[name](found, config.stage) if name in _MADE else found


def lacking(name: str, model: str) -> str:
    """Return what to say of an attribute that neither the engine nor its model, of class ``model``, has."""
    what = f"the engine that zero.initialize made (DeepSpeedEngine here) has no {name!r}, and its model, a {model}, neither"
    if name in _PIPELINE:
        return (
            f"{what}: in DeepSpeed that is a method of PipelineEngine, and there are no pipelines here; write the loop: "
            "for batch in loader: loss = engine(batch); engine.backward(loss); engine.step()"
        )
    near = difflib.get_close_matches(name, QUESTIONS, n=1, cutoff=0.85)
    return f"{what}{f'; did you mean {near[0]!r}?' if near else ''}: docs/from_deepspeed.md lists what it has"
