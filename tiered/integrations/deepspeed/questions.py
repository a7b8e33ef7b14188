"""What scripts ask DeepSpeed's engine about its configuration, by method; and what is said of methods that there are not.

The names and defaults are those of DeepSpeed 0.19.8. An answer is what the configuration says, whether it has an effect here or
not (docs/from_deepspeed.md says which).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tiered.integrations.deepspeed.table import AUTO

__all__ = ["QUESTIONS", "answer", "lacking"]

_ZERO = "zero_optimization."
QUESTIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    **{
        f"zero_{name}": ((_ZERO + name,), default)
        for name, default in (
            ("reduce_scatter", True),
            ("reduce_bucket_size", 500_000_000),
            ("allgather_partitions", True),
            ("allgather_bucket_size", 500_000_000),
            ("contiguous_gradients", True),
            ("compute_grad_norm", True),
            ("load_from_fp32_weights", True),
            ("elastic_checkpoint", False),
            ("offload_param", None),
            ("offload_optimizer", None),
            ("sub_group_size", 1_000_000_000),
            ("ignore_unused_parameters", True),
            ("legacy_stage1", False),
            ("round_robin_gradients", False),
            ("parameter_alignment", False),
            ("log_trace_cache_warnings", False),
            ("save_muon_momentum_buffer_in_memory", False),
        )
    },
    **{
        f"zero_{name}": ((f"{_ZERO}stage3_{name}", _ZERO + name), default)
        for name, default in (
            ("prefetch_bucket_size", 50_000_000),
            ("param_persistence_threshold", 100_000),
            ("model_persistence_threshold", sys.maxsize),
            ("max_live_parameters", 1_000_000_000),
            ("max_reuse_distance", 1_000_000_000),
            ("gather_16bit_weights_on_model_save", False),
            ("module_granularity_threshold", 0),
            ("allgather_sequential", False),
        )
    },
    **{
        name: ((_ZERO + name,), default)
        for name, default in (
            ("zero_hpz_partition_size", 1),
            ("zero_quantized_weights", False),
            ("zero_quantized_nontrainable_weights", False),
            ("zero_quantized_gradients", False),
        )
    },
    "zero_multi_rank_bucket_allreduce": ((_ZERO + "use_multi_rank_bucket_allreduce",), True),
    "zero_partial_offload": ((_ZERO + "offload_optimizer.ratio",), 1.0),
    "zero_overlap_comm": ((_ZERO + "overlap_comm",), None),  # DeepSpeed: true in stage 3
    "zero_optimization_partition_gradients": ((_ZERO + "stage",), 0),
    "zero_optimization_partition_weights": ((_ZERO + "stage",), 0),
    "zero_use_cpu_optimizer": ((_ZERO + "offload_optimizer.device",), "none"),
    "zero_cpu_offload": ((_ZERO + "offload_optimizer.device",), "none"),
    "zero_nvme_offload_optimizer": ((_ZERO + "offload_optimizer.device",), "none"),
    "zero_allow_untested_optimizer": (("zero_allow_untested_optimizer",), False),
    "zero_force_ds_cpu_optimizer": (("zero_force_ds_cpu_optimizer",), True),
    "optimizer_name": (("optimizer.type",), None),
    "optimizer_params": (("optimizer.params",), None),
    "scheduler_name": (("scheduler.type",), None),
    "scheduler_params": (("scheduler.params",), None),
    "managed_gradient_accumulation": (("managed_gradient_accumulation",), True),
    "memory_breakdown": (("memory_breakdown",), False),
    "dump_state": (("dump_state",), False),
    "dataloader_drop_last": (("dataloader_drop_last",), False),
    "fp16_auto_cast": (("fp16.auto_cast",), False),
    "gradient_predivide_factor": (("gradient_predivide_factor",), 1.0),
}
"""For each method the keys of which the first that is there is its answer, and the default."""
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


def answer(values: Mapping[str, Any], name: str) -> Any:
    """Return what the configuration ``values`` answers to the method ``name``."""
    paths, found = QUESTIONS[name]
    for path in paths:
        value = _at(values, path)
        if value is not None and value != AUTO:
            found = value
            break
    zero = values.get("zero_optimization")
    stage = int(zero) if isinstance(zero, bool) else int(_at(values, "zero_optimization.stage") or 0)
    return _MADE[name](found, stage) if name in _MADE else found


def _at(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


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
