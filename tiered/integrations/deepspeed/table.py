"""The table of DeepSpeed's configuration: for each key of version 0.19 whether it is honoured, unneeded or refused, and why.

The keys are those of https://www.deepspeed.ai/docs/config-json/ and of the classes that read it in DeepSpeed 0.19.8. What is
printed at start, ``tiered deepspeed-config`` and docs/from_deepspeed.md come from this table.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tiered.errors import MisuseError

__all__ = ["ALIASES", "AUTO", "KEYS", "SECTION", "Judged", "Key", "Verdict", "find", "judged", "number_of", "said"]

AUTO = "auto"
"""The value that a library fills in (Hugging Face's)."""
SECTION = "tiered"
"""The section of this project. DeepSpeed ignores it."""


class Verdict(str, Enum):
    """What becomes of a key: it has its effect, its value makes no difference here, or training does not begin."""

    HONOURED = "honoured"
    UNNEEDED = "unneeded"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """One key. ``path``: names joined by dots. ``why``: what is done, why nothing needs to be, or why it cannot be.

    ``kind``: "bool", "int", "number", "str", "list", "dict", or several joined by "|"; "any".
    ``allowed``: an honoured key's possible values (none: any); ``otherwise``: why others are refused.
    ``off``: values of a refused key that ask for nothing, beside None. ``switch``: the key in a refused section that has to be
    true for the section to ask for something. ``inner``: the documented keys of a section that is judged as a whole.
    """

    path: str
    verdict: Verdict
    why: str
    kind: str = "any"
    allowed: tuple[Any, ...] = ()
    otherwise: str = ""
    off: tuple[Any, ...] = ()
    switch: str = ""
    inner: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Return whether what is below this key is judged with it."""
        return self.verdict is Verdict.REFUSED or bool(self.inner)


@dataclass(frozen=True, slots=True)
class Judged:
    """A key of a configuration, its value, and what becomes of it."""

    path: str
    value: Any
    verdict: Verdict
    why: str


def _honoured(path: str, kind: str, why: str, *allowed: Any, otherwise: str = "", inner: tuple[str, ...] = ()) -> Key:
    return Key(path, Verdict.HONOURED, why, kind, allowed, otherwise, inner=inner)


def _unneeded(prefix: str, keys: str, kind: str, why: str, inner: tuple[str, ...] = ()) -> tuple[Key, ...]:
    return tuple(Key(prefix + key, Verdict.UNNEEDED, why, kind, inner=inner) for key in keys.split())


def _refused(path: str, why: str, *off: Any, switch: str = "", inner: str = "") -> Key:
    return Key(path, Verdict.REFUSED, why, off=off, switch=switch, inner=tuple(inner.split()))


_ZERO = "zero_optimization."
_STORE = 'the store has one budget in bytes: "tiered": {"dram": "8GiB"}'
_BUCKETS = "units are gathered and reduced one by one; their size follows from the budget"
_PINNED = "with a device the whole pool is pinned when the store opens; without one nothing is copied to pin"
_AIO = "the store chooses block size and queue depth by what it has to move"
_OVERLAP = "always so: reads, writes and reductions go on while the model computes"
_UPDATED = "updates are made in chunks of a few MiB, which are read ahead and written behind"
_DIVIDED = "sums are divided by the number of ranks, once, after they were added up"
_SERVICE = "it sends data to a service: log engine.get_lr() and losses with its own package"
_CHECKPOINT = "the model calls torch.utils.checkpoint in place of deepspeed.checkpointing.checkpoint"
_NO_EXPERTS = "experts are paged (zero.page(experts=)); they are not divided among ranks by kind"

KEYS: tuple[Key, ...] = (
    # -- batch sizes
    _honoured("train_batch_size", "int", "samples of one step, of all ranks and accumulated passes together"),
    _honoured("train_micro_batch_size_per_gpu", "int", "samples of one pass on one rank; the batch size of the data loader"),
    _honoured("gradient_accumulation_steps", "int", "passes for one step; losses are divided by it"),
    _honoured("managed_gradient_accumulation", "bool", "false: each engine.step() is a step"),
    # -- optimizer and scheduler
    _honoured(
        "optimizer.type",
        "str",
        "the class of that name in tiered.zero; other element-wise ones of torch.optim by zero.Elementwise",
    ),
    _honoured("optimizer.params.*", "any", "another argument of that class"),
    _honoured("optimizer.params.lr", "number", "learning rate"),
    _honoured("optimizer.params.betas", "list", "two numbers"),
    _honoured("optimizer.params.eps", "number", "as in torch"),
    _honoured("optimizer.params.weight_decay", "number", "default: 0, as DeepSpeed's optimizers have it"),
    _honoured("optimizer.params.momentum", "number", "of SGD, RMSprop and Muon"),
    _honoured("optimizer.params.dampening", "number", "of SGD"),
    _honoured("optimizer.params.nesterov", "bool", "of SGD"),
    _honoured("optimizer.params.alpha", "number", "of RMSprop"),
    _honoured("optimizer.params.centered", "bool", "of RMSprop"),
    _honoured("optimizer.params.momentum_decay", "number", "of NAdam"),
    _honoured("optimizer.params.lr_decay", "number", "of Adagrad"),
    _honoured("optimizer.params.initial_accumulator_value", "number", "of Adagrad"),
    _honoured("optimizer.params.maximize", "bool", "as in torch"),
    _honoured("optimizer.params.adam_w_mode", "bool", "default true: Adam is AdamW; false: weight decay is in the gradient"),
    _honoured(
        "optimizer.params.amsgrad",
        "bool",
        "of Adam with adam_w_mode false",
        False,
        True,
        otherwise="true or false",
    ),
    _honoured(
        "optimizer.params.bias_correction",
        "bool",
        "always so",
        True,
        otherwise="without it steps are other ones, which no optimizer of tiered.zero makes",
    ),
    _honoured("optimizer.params.muon_lr", "number", "learning rate of the matrices; default: lr"),
    _honoured("optimizer.params.adam_lr", "number", "learning rate of what is no matrix; default: lr"),
    *_unneeded(
        "optimizer.params.",
        "torch_adam",
        "bool",
        "there is one kernel, torch's fused one; true takes torch's default weight decay of AdamW, 0.01",
    ),
    *_unneeded("optimizer.params.", "set_grad_none", "bool", "a gradient is gone after its update"),
    *_unneeded("optimizer.params.", "fp32_optimizer_states", "bool", "states are fp32"),
    *_unneeded("optimizer.params.", "foreach fused", "bool", "pieces are updated one by one, by torch's fused kernel"),
    *_unneeded(
        "optimizer.params.",
        "ns_method",
        "str",
        '"gram" and "standard" make the same matrix in another order; torch\'s is the standard one',
    ),
    _refused("optimizer.params.per_head_muon", "torch's Muon makes whole matrices orthogonal: leave per_head_muon out", False),
    _refused("optimizer.params.max_grad_norm", "DeepSpeed refuses it, too: write gradient_clipping at the top"),
    _refused("optimizer.params.capturable", "a CUDA graph cannot fetch what is updated from the store", False),
    _refused("optimizer.params.differentiable", "a graph of the update would keep all parameters", False),
    *_unneeded("optimizer.", "legacy_fusion", "bool", "it chooses a kernel of DeepSpeed's"),
    _honoured(
        "scheduler.type",
        "str",
        "the scheduler of that name, stepped by each engine.step() that is not skipped",
        "WarmupLR",
        "WarmupDecayLR",
        "WarmupCosineLR",
        "OneCycle",
        "LRRangeTest",
        otherwise="DeepSpeed has no scheduler of this name: give zero.initialize(lr_scheduler=) one of torch's",
    ),
    *(
        _honoured(f"scheduler.params.{name}", kind, f"of {of}")
        for of, names in (
            ("WarmupLR and WarmupDecayLR", "warmup_min_lr:number|list warmup_max_lr:number|list"),
            ("WarmupLR, WarmupDecayLR and WarmupCosineLR", "warmup_num_steps:int warmup_type:str"),
            ("WarmupDecayLR and WarmupCosineLR", "total_num_steps:int"),
            ("WarmupCosineLR", "warmup_min_ratio:number cos_min_ratio:number"),
            (
                "LRRangeTest",
                "lr_range_test_min_lr:number|list lr_range_test_step_size:int lr_range_test_step_rate:number "
                "lr_range_test_staircase:bool",
            ),
            (
                "OneCycle",
                "cycle_min_lr:number|list cycle_max_lr:number|list decay_lr_rate:number cycle_first_step_size:int "
                "cycle_second_step_size:int cycle_first_stair_count:int cycle_second_stair_count:int decay_step_size:int "
                "cycle_momentum:bool cycle_min_mom:number|list cycle_max_mom:number|list decay_mom_rate:number",
            ),
            ("every scheduler: the iteration to begin after", "last_batch_iteration:int"),
        )
        for name, kind in (word.split(":") for word in names.split())
    ),
    # -- communication
    _honoured("communication_data_type", "str", "gradients are sent in the type that they have, and summed in fp32 or fp64"),
    *_unneeded("", "seq_parallel_communication_data_type", "str", "there is no sequence parallelism"),
    _honoured(
        "gradient_allreduce_op",
        "str",
        "gradients are averaged over the ranks",
        "mean",
        otherwise="gradients are averaged over the ranks: multiply the learning rate instead",
    ),
    *_unneeded("", "prescale_gradients", "bool", _DIVIDED),
    *_unneeded("", "gradient_predivide_factor", "number", _DIVIDED),
    *_unneeded("", "disable_allgather", "bool", "deprecated by DeepSpeed; there are no all-gathered partitions"),
    *_unneeded("", "data_parallel_size", "int", "it is the number of ranks of the process group"),
    _refused("sparse_gradients", "gradients of an embedding are dense: make it with sparse=False", False),
    _refused("sequence_parallel_size", "ranks have samples of their own: there is no sequence parallelism", 0, 1),
    _refused("use_data_before_expert_parallelism", _NO_EXPERTS, False),
    # -- 16 bits
    _honoured("fp16.enabled", "bool", "the model is converted to fp16; masters are fp32"),
    _honoured("fp16.auto_cast", "bool", "floating-point inputs of the engine are converted to fp16"),
    _honoured("fp16.loss_scale", "number", "0: dynamic; else the scale"),
    _honoured("fp16.initial_scale_power", "int", "the dynamic scale begins at 2 to this power"),
    _honoured("fp16.loss_scale_window", "int", "steps without overflow until the scale doubles"),
    _honoured("fp16.hysteresis", "int", "overflows until the scale is halved"),
    _honoured("fp16.consecutive_hysteresis", "bool", "a step without overflow refills the hysteresis"),
    _honoured("fp16.min_loss_scale", "number", "an overflow at this scale raises"),
    *_unneeded("fp16.", "fused_mode", "bool", "it chooses a kernel of DeepSpeed's"),
    _refused("fp16.fp16_master_weights_and_grads", "masters are fp32: leave it out", False),
    _honoured("bf16.enabled", "bool", "the model is converted to bf16; masters are fp32, moments too"),
    _honoured(
        "bf16.check_grad_overflow", "bool", "default true: a step with an infinite gradient is skipped; false: it raises"
    ),
    *_unneeded("bf16.", "immediate_grad_update", "bool", "a gradient goes to the store as soon as autograd has it"),
    _refused(
        "bf16.bf16_master_weights_and_grads",
        "masters are fp32, of which bf16 parameters are the upper half: leave it out",
        False,
    ),
    _refused(
        "bf16.bf16_optimizer_states",
        "moments are fp32 here; zero.page and zero.AdamW(moments=torch.bfloat16) have bf16 ones",
        False,
    ),
    _honoured("torch_autocast.enabled", "bool", "the engine's forward runs under torch.autocast"),
    _honoured(
        "torch_autocast.dtype",
        "str",
        "the type that torch.autocast computes in",
        "bfloat16",
        "torch.bfloat16",
        "bf16",
        otherwise='autocast in fp16 needs a loss scale, which is that of "fp16" here: enable fp16, or take bfloat16',
    ),
    *_unneeded("torch_autocast.", "lower_precision_safe_modules", "list", "gradients are sent in the type that they have"),
    _refused(
        "amp", "Apex converts models itself: enable bf16, fp16 or torch_autocast", switch="enabled", inner="enabled opt_level"
    ),
    _honoured("gradient_clipping", "number", "the norm of all gradients together is clipped before each step; 0: not"),
    _honoured("data_types.grad_accum_dtype", "str", "the type in which gradients are added up: that of the parameters"),
    _honoured("data_types.param_dtype", "str", "that of bf16, fp16 or neither"),
    _honoured("data_types.buffer_dtype", "str", "buffers with a floating-point type get this type"),
    # -- ZeRO
    _honoured(
        "zero_optimization.stage",
        "int",
        "what of the model each rank has a share of; 0 is stage 1, whose numbers are the same",
        0,
        1,
        2,
        3,
        otherwise="there are stages 0 to 3",
    ),
    _honoured(
        "zero_optimization.offload_param.device",
        "str",
        "cpu: the store's memory holds all; nvme: what the budget allows",
        "none",
        "cpu",
        "nvme",
        otherwise="there are none, cpu and nvme",
    ),
    _honoured("zero_optimization.offload_param.nvme_path", "str", 'the store is in the folder "tiered" there'),
    *_unneeded(_ZERO + "offload_param.", "pin_memory", "bool", _PINNED),
    *_unneeded(_ZERO + "offload_param.", "buffer_count buffer_size max_in_cpu", "number", _STORE),
    _honoured(
        "zero_optimization.offload_optimizer.device",
        "str",
        "cpu: the store's memory holds all; nvme: what the budget allows. Updates are made in host memory",
        "none",
        "cpu",
        "nvme",
        otherwise="there are none, cpu and nvme",
    ),
    _honoured("zero_optimization.offload_optimizer.nvme_path", "str", 'the store is in the folder "tiered" there'),
    *_unneeded(_ZERO + "offload_optimizer.", "pin_memory", "bool", _PINNED),
    *_unneeded(_ZERO + "offload_optimizer.", "buffer_count buffer_size", "number", _STORE),
    *_unneeded(_ZERO + "offload_optimizer.", "pipeline_read pipeline_write pipeline fast_init", "bool", _UPDATED),
    *_unneeded(_ZERO + "offload_optimizer.", "ratio", "number", "all updates are made in one place: host memory"),
    *_unneeded(_ZERO + "offload_optimizer.", "super_offload convert_grad_on_cpu", "bool", _UPDATED),
    *_unneeded(
        _ZERO + "offload_optimizer.", "cpuadam_cores_perc", "number", "torch.set_num_threads says how many cores compute"
    ),
    _honoured("zero_optimization.cpu_offload", "bool", "deprecated by DeepSpeed: offload_optimizer to cpu"),
    _honoured("zero_optimization.cpu_offload_param", "bool", "deprecated by DeepSpeed: offload_param to cpu"),
    *_unneeded(_ZERO, "cpu_offload_use_pin_memory", "bool", _PINNED),
    *_unneeded(_ZERO, "allgather_bucket_size reduce_bucket_size stage3_prefetch_bucket_size", "number", _BUCKETS),
    *_unneeded(_ZERO, "stage3_max_live_parameters stage3_max_reuse_distance", "number", _STORE),
    *_unneeded(
        _ZERO,
        "stage3_param_persistence_threshold stage3_model_persistence_threshold",
        "number",
        "the plan of a step keeps in memory what the budget allows, small or large",
    ),
    *_unneeded(
        _ZERO, "stage3_partition_stream_chunk_size", "number", "a parameter is never whole on all ranks as it is divided"
    ),
    *_unneeded(_ZERO, "stage3_module_granularity_threshold", "number", "small modules are in one unit with others already"),
    *_unneeded(_ZERO, "sub_group_size", "number", _UPDATED),
    *_unneeded(_ZERO, "overlap_comm", "bool", _OVERLAP),
    *_unneeded(
        _ZERO,
        "allgather_partitions reduce_scatter contiguous_gradients use_multi_rank_bucket_allreduce round_robin_gradients "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential parameter_alignment legacy_stage1",
        "bool",
        "it chooses among ways to lay out or send the same values; zero.Stage1 to Stage3 have one way each",
    ),
    *_unneeded(
        _ZERO,
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        "bool",
        "save_16bit_model always has all weights",
    ),
    *_unneeded(_ZERO, "load_from_fp32_weights", "bool", "a checkpoint has the masters, and they are what is loaded"),
    *_unneeded(_ZERO, "elastic_checkpoint", "bool", "zero.page(source=) takes over a checkpoint of any number of ranks"),
    *_unneeded(_ZERO, "pipeline_loading_checkpoint", "bool", "loading a checkpoint moves no tensor"),
    *_unneeded(_ZERO, "memory_efficient_linear override_module_apply", "bool", "modules stay as they are"),
    *_unneeded(_ZERO, "log_trace_cache_warnings enable_sanity_checks", "bool", "what differs from rank to rank raises, always"),
    *_unneeded(_ZERO, "save_muon_momentum_buffer_in_memory", "bool", _STORE),
    *_unneeded(
        _ZERO,
        "leaf_module",
        "dict",
        "a unit is the largest module that fits an eighth of the budget",
        ("classes", "names", "name_suffixes"),
    ),
    _honoured(
        "zero_optimization.compute_grad_norm",
        "bool",
        "true: get_global_grad_norm() has the norm also where nothing is clipped (default: it has none)",
    ),
    _honoured(
        "zero_optimization.ignore_unused_parameters",
        "bool",
        "parameters without a gradient are left alone, as in torch",
        True,
        otherwise="parameters without a gradient are left alone, as in torch; there is no error that it could ask for",
    ),
    _refused("zero_optimization.mics_shard_size", "shards are of all ranks: leave MiCS out", -1, 0),
    _refused("zero_optimization.mics_hierarchical_params_gather", "shards are of all ranks: leave MiCS out", False),
    _refused("zero_optimization.zero_hpz_partition_size", "there is one partition, of all ranks: leave ZeRO++ out", 0, 1),
    *(
        _refused(_ZERO + name, "parameters and gradients are sent exactly: leave ZeRO++ out", False)
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    _refused("zero_optimization.zeropp_loco_param", "gradients are sent exactly: leave ZeRO++ out", inner="err_beta reset_T"),
    _refused(
        "zero_optimization.zenflow",
        "every gradient updates its parameter in its step: leave ZenFlow out",
        inner="topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds "
        "pt_reserved_cores_perc steps_per_epoch",
    ),
    *_unneeded(
        "", "zero_allow_untested_optimizer", "bool", "an optimizer that cannot update paged parameters is refused by name"
    ),
    *_unneeded("", "zero_force_ds_cpu_optimizer", "bool", "updates are made by torch's kernels"),
    *_unneeded("aio.", "block_size queue_depth thread_count intra_op_parallelism", "int", _AIO),
    *_unneeded("aio.", "single_submit overlap_events", "bool", _AIO),
    _refused("aio.use_gds", "reads go through host memory: there is no GPUDirect Storage link", False),
    # -- what is printed and written
    _honoured("steps_per_print", "int", "steps between two lines on the first rank's stdout; left out: none"),
    _honoured("wall_clock_breakdown", "bool", "milliseconds of forward, backward and step are in those lines"),
    _honoured("memory_breakdown", "bool", "use and peak of each tier are in those lines"),
    _honoured("dump_state", "bool", "the configuration is printed at start"),
    *_unneeded("", "log_level", "str", "there is one kind of line"),
    *_unneeded("", "disable_python_gc", "bool", "leases and slots end by reference counts; the collector has little to do"),
    *_unneeded("timers.", "throughput", "dict", "steps_per_print shows samples per second", ("enabled", "synchronized")),
    *_unneeded("", "vocabulary_size", "int", "DeepSpeed warns by it where it is no multiple of 8"),
    _honoured("flops_profiler.enabled", "bool", "operations are counted by torch.utils.flop_counter in one step"),
    _honoured("flops_profiler.profile_step", "int", "the step in which they are counted, from 1 on"),
    _honoured("flops_profiler.module_depth", "int", "how deep modules are shown; -1: all"),
    _honoured("flops_profiler.top_modules", "int", "how many modules are shown at each depth"),
    _honoured("flops_profiler.detailed", "bool", "false: only the whole model is shown"),
    _honoured("flops_profiler.output_file", "str", "a file in place of stdout"),
    *_unneeded(
        "flops_profiler.", "recompute_fwd_factor", "number", "operations that are computed again are counted as they run"
    ),
    _honoured(
        "tensorboard.enabled", "bool", "events are written through torch.utils.tensorboard; needs the package tensorboard"
    ),
    _honoured("tensorboard.output_path", "str", "the folder above"),
    _honoured("tensorboard.job_name", "str", "the folder's name"),
    _honoured("csv_monitor.enabled", "bool", "a file for each kind of event: step (in samples), value"),
    _honoured("csv_monitor.output_path", "str", "the folder above"),
    _honoured("csv_monitor.job_name", "str", "the folder's name"),
    _refused("wandb", _SERVICE, switch="enabled", inner="enabled group team project"),
    _refused(
        "comet",
        _SERVICE,
        switch="enabled",
        inner="enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
    ),
    _refused(
        "comms_logger",
        "ranks communicate over torch.distributed: torch.profiler shows its calls",
        switch="enabled",
        inner="enabled verbose prof_all debug prof_ops",
    ),
    # -- data
    _honoured("dataloader_drop_last", "bool", "of the loader that is made of training_data="),
    _refused(
        "data_efficiency",
        "sampling by difficulty and token dropping change the data and the model: use a sampler of your own",
        switch="enabled",
        inner="enabled seed data_routing data_sampling",
    ),
    _refused(
        "curriculum_learning",
        "sampling by difficulty changes the data: use a sampler of your own",
        switch="enabled",
        inner="enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    ),
    # -- checkpoints and activations
    *_unneeded("checkpoint.", "tag_validation", "str", "tags that differ from rank to rank always raise"),
    *_unneeded("checkpoint.", "use_node_local_storage", "bool", "each rank's store may be on a drive of its node"),
    *_unneeded(
        "checkpoint.",
        "parallel_write checkpoint_serialization writer",
        "any",
        "each rank writes its own store, and only what changed",
        ("pipeline_stage",),
    ),
    _refused("checkpoint.load_universal", "zero.page(source=) takes over a checkpoint of another number of ranks", False),
    _refused(
        "nebula",
        "it sends data to a service: a commit is durable when save_checkpoint returns",
        switch="enabled",
        inner="enabled persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load "
        "load_path",
    ),
    _refused("datastates_ckpt", "zero.commit_async commits in the background", inner="host_cache_size"),
    *_unneeded(
        "activation_checkpointing.",
        "partition_activations",
        "bool",
        "activations are not divided: there is no model parallelism",
    ),
    *_unneeded(
        "activation_checkpointing.",
        "contiguous_memory_optimization synchronize_checkpoint_boundary",
        "bool",
        _CHECKPOINT,
    ),
    *_unneeded(
        "activation_checkpointing.",
        "number_checkpoints",
        "int",
        _CHECKPOINT,
    ),
    *_unneeded("activation_checkpointing.", "profile", "bool", "torch.profiler shows what is computed again"),
    _honoured(
        "activation_checkpointing.cpu_checkpointing",
        "bool",
        'on a device, zero.page(activations="store"); elsewhere they are in host memory already',
    ),
    # -- other engines
    _refused(
        "autotuning",
        "budgets follow from the model; tiered bench measures the machine",
        switch="enabled",
        inner="enabled results_dir exps_dir overwrite metric start_profile_step end_profile_step fast max_train_batch_size "
        "mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping tuner_num_trials arg_mappings",
    ),
    _refused(
        "elasticity",
        "the number of ranks does not set batch sizes: write the three of them",
        switch="enabled",
        inner="enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_large_batch version "
        "ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
    ),
    _refused(
        "hybrid_engine",
        "it generates with kernels of DeepSpeed's: engine.eval() and model.generate work as they are",
        switch="enabled",
        inner="enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
    ),
    _refused(
        "tensor_parallel",
        "ranks have samples of their own: there is no tensor parallelism",
        switch="autotp_size",
        inner="autotp_size preset_model tp_overlap_comm vocab_parallel_lm_head partition_config",
    ),
    _refused(
        "expert_parallel",
        _NO_EXPERTS,
        switch="enabled",
        inner="enabled autoep_size expert_tensor_parallel_size async_split_plan preset_model use_grouped_mm "
        "disable_triton_grouped_mm moe_layer_pattern router_pattern expert_pattern score_func score_apply combine_impl "
        "route_norm route_scale top_k routed_scaling_factor num_expert_groups num_limited_groups load_balance_coeff "
        "expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern",
    ),
    _refused(
        "pipeline",
        "each rank has all layers: there is no pipeline parallelism",
        {},
        inner="stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
    ),
    _refused(
        "sparse_attention",
        "it needs kernels of DeepSpeed's: use torch's flex_attention in the model",
        {},
        inner="mode block different_layout_per_head num_local_blocks num_global_blocks attention horizontal_global_attention "
        "num_different_global_patterns num_random_blocks local_window_blocks global_block_indices global_block_end_indices "
        "num_sliding_window_blocks",
    ),
    _refused(
        "compression_training",
        "it changes the model: compress it with a library of its own",
        switch="*.enabled",
        inner="layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
        "channel_pruning",
    ),
    _refused(
        "quantize_training",
        "it changes the model: quantise it after training",
        switch="enabled",
        inner="enabled quantize_verbose quantizer_kernel quantize_type quantize_bits quantize_schedule quantize_groups "
        "fp16_mixed_quantize",
    ),
    _refused(
        "weight_quantization",
        "it is for inference: zero.page(policy=) stores weights in fewer bits",
        {},
        inner="enabled quantized_initialization post_init_quant",
    ),
    _refused(
        "progressive_layer_drop",
        "it changes the model: drop layers in its forward",
        switch="enabled",
        inner="enabled theta gamma",
    ),
    _refused(
        "eigenvalue",
        "it is for quantised training, which is refused",
        switch="enabled",
        inner="enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    ),
    _refused(
        "compile",
        "torch.compile(model) works as it is; DeepCompile moves parameters itself",
        switch="deepcompile",
        inner="deepcompile passes autoep_non_moe free_activation free_activation_threshold offload_activation "
        "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
        "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
        "keep_all_input_tensors",
    ),
    _refused("graph_harvesting", "a CUDA graph cannot fetch parameters from the store", False),
    # -- this project's
    _honoured("tiered.path", "str", 'folder of the store; default: "tiered" below nvme_path, else tiered-store'),
    _honoured("tiered.paths", "list", "folders on several drives (one process), as TieredStore.open(paths=)"),
    _honoured(
        "tiered.dram",
        "int|str",
        'memory budget of each rank, as "8GiB"; default: all of the state, or with nvme half of what is free',
    ),
    _honoured("tiered.hbm", "int|str", "budget on the device; default: half of what is free there; 0: compute in host memory"),
    _honoured("tiered.device", "str", "the device; default: cuda where there is one"),
    _honoured("tiered.nvme", "int|str", "most bytes on the disk"),
    _honoured("tiered.backend", "str", "how file I/O is done, as TieredStore.open(backend=)"),
    _honoured("tiered.name", "str", "name of the model in the store; default: model"),
    _honoured("tiered.micro_batch", "int", "zero.page(micro_batch=)"),
)

ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.aio": "aio",
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "partition_stream_chunk_size",
        )
    },
}
"""Other names that DeepSpeed takes for a key."""

_BY_PATH = {key.path: key for key in KEYS}
_SECTIONS = {path[:at] for path in _BY_PATH for at, letter in enumerate(path) if letter == "."}
_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int, float),
    "number": (int, float),
    "str": (str,),
    "list": (list, tuple),
    "dict": (dict,),
}


def find(path: str) -> Key | None:
    """Return the row of a key: its own, or that of the section that is judged as a whole."""
    path = ALIASES.get(path, path)
    for alias in ("bfloat16", "zero_optimization.aio"):
        if path.startswith(f"{alias}."):
            path = ALIASES[alias] + path[len(alias) :]
    if path in _BY_PATH:
        return _BY_PATH[path]
    if path not in _SECTIONS and f"{path.rpartition('.')[0]}.*" in _BY_PATH:
        return _BY_PATH[f"{path.rpartition('.')[0]}.*"]
    while "." in path:
        path = path.rpartition(".")[0]
        if path in _BY_PATH and _BY_PATH[path].whole:
            return _BY_PATH[path]
    return None


def judged(config: Mapping[str, Any]) -> list[Judged]:
    """Return what becomes of each key of a configuration, in its order. Raises MisuseError for a key that there is not, naming
    the nearest one, and for a value of another kind than the key's."""
    return list(_judged(config, ""))


def _judged(config: Mapping[str, Any], above: str) -> Iterator[Judged]:
    for name, value in config.items():
        path = f"{above}{name}"
        key, section = find(path), ALIASES.get(path, path)
        if section == "zero_optimization" and isinstance(value, bool):
            yield Judged(path, value, Verdict.HONOURED, f"deprecated by DeepSpeed: stage {int(value)}")
        elif section in _SECTIONS and not (key is not None and key.verdict is not Verdict.HONOURED):
            if value is None:
                yield Judged(path, value, Verdict.UNNEEDED, "it asks for nothing")
            elif not isinstance(value, Mapping):
                raise MisuseError(f"{path!r} is a section of the configuration, not {value!r:.60}")
            elif value.get("enabled") is False and find(f"{path}.enabled") is not None:
                yield from _disabled(value, f"{path}.")
            else:
                yield from _judged(value, f"{path}.")
        elif key is None:
            raise MisuseError(_unknown(path))
        else:
            yield _row(key, path, value)


def _disabled(section: Mapping[str, Any], above: str) -> Iterator[Judged]:
    """Return what becomes of the keys of a section that is switched off, whatever they are."""
    for name, value in section.items():
        key = find(f"{above}{name}")
        if name == "enabled" and key is not None:
            yield _row(key, f"{above}{name}", value)
        else:
            yield Judged(f"{above}{name}", value, Verdict.UNNEEDED, "its section is disabled")


def _row(key: Key, path: str, value: Any) -> Judged:
    if key.verdict is Verdict.REFUSED:
        if value is None or value in key.off or (key.switch and isinstance(value, Mapping) and not _is_on(key.switch, value)):
            return Judged(path, value, Verdict.UNNEEDED, "it asks for nothing")
        return Judged(path, value, Verdict.REFUSED, key.why)
    if value is None or (value == AUTO and key.kind != "str"):
        why = "filled at start" if value == AUTO and key.verdict is Verdict.HONOURED else key.why
        return Judged(path, value, key.verdict, why)
    if key.kind != "any" and not _is_of(value, key.kind):
        raise MisuseError(f"{path!r} is {_named(key.kind)} in a configuration, not {value!r:.60}")
    if key.allowed and value not in key.allowed:
        return Judged(path, value, Verdict.REFUSED, key.otherwise)
    return Judged(path, value, key.verdict, key.why)


def _is_of(value: Any, kind: str) -> bool:
    """Return whether ``value`` is of one of the kinds. A whole number may be written as 5e8."""
    for one in kind.split("|"):
        if isinstance(value, _KINDS[one]) and (one == "bool") is isinstance(value, bool):
            return one != "int" or (isinstance(value, int | float) and float(value).is_integer())
    return False


def said(text: str, kind: str) -> Any:
    """Return what a text says where a value of this kind is meant: a number, true or false; else the text."""
    kinds = set(kind.split("|"))
    if "str" in kinds:
        return text
    if "bool" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return number_of(text) if kinds & {"int", "number"} else text


def number_of(value: Any) -> Any:
    """Return the number that a text says; anything else as it is."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(value)
            return number if math.isfinite(number) and value.isascii() and "_" not in value else value
    return value


def _is_on(switch: str, section: Mapping[str, Any]) -> bool:
    """Return whether a section asks for something: the switch is true, or a number above 1; ``*.enabled``: any of them."""
    if switch == "*.enabled":
        below = [value for value in section.values() if isinstance(value, Mapping)]
        return bool(section.get("enabled")) or any(_is_on(switch, value) for value in below)
    value = section.get(switch, False)
    return value > 1 if type(value) is int else bool(value) and value != AUTO


def _named(kind: str) -> str:
    names = {"bool": "true or false", "int": "a whole number", "number": "a number", "str": "a text", "list": "a list"}
    return " or ".join(names.get(one, "a section") for one in kind.split("|"))


def _unknown(path: str) -> str:
    """Return the message for a key that there is not."""
    known = [*_BY_PATH, *_SECTIONS, *ALIASES]
    above, _, name = path.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == above}
    found = difflib.get_close_matches(name, beside, n=1)
    near = beside[found[0]] if found else next(iter(difflib.get_close_matches(path, known, n=1, cutoff=0.5)), None)
    if near is None:
        anywhere = {one.rpartition(".")[2]: one for one in known}
        last = difflib.get_close_matches(name, anywhere, n=1)
        near = anywhere[last[0]] if last else None
    meant = f", did you mean {near!r}?" if near else ";"
    return f"DeepSpeed's configuration has no key {path!r}{meant} docs/from_deepspeed.md lists all keys"
