"""Tests of clients that pass with everything in memory and not with a store, each with the reason. None is a defect here: each
is something that docs/limits.md and docs/from_deepspeed.md state, or an assertion about the inside of the client.

Rows are of the versions that ``bench/results/clients_*.md`` names; others may have other tests. ``shows`` has to be in the
message of the failure, so that a test that begins to fail otherwise is no longer explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["DIFFERENCES", "Difference", "reason_of"]


@dataclass(frozen=True)
class Difference:
    """Tests of ``suite`` whose id ends like ``tests`` (a pattern), what their failure ``shows``, and why."""

    suite: str
    tests: str
    shows: str
    reason: str

    def explains(self, suite: str, test: str, what: str) -> bool:
        return suite == self.suite and fnmatchcase(test, f"*{self.tests}") and self.shows in what


_OFFLOAD = "accelerate's hooks put new parameters on the meta device in place of those of the store, which need no offloading"
_CASTING = "the hook gives parameters another dtype in place, which raises for those of a store: zero.Policy(storage=)"
_COPIED = "it deep-copies callbacks that lead to the trainer, and a store, like a paged model, cannot be copied"
_COMMITTED = "it reads weights or states out of the file, which refers to a commit of the store; 'whole' files have them"

_TYPES = "gradients of one pass are not added up, so the type for that changes nothing; DeepSpeed has no code for the pair"
_HJSON = "names and texts without quotes are refused by name (docs/from_deepspeed.md); comments and last commas are taken"
_OLD_NAME = "args.deepscale_config, an older name, is not read: args.deepspeed_config is"
_TYPED = "the same call is refused, by a MisuseError that names the mend, and not by another exception"
_NAMED = "a type of warm-up that there is not is refused by name, and does not become another one"
_INSIDE = "it asks for the inside of DeepSpeed's scheduler; engine.get_lr() and engine.get_mom() say what is in force"
_INSIDE_ENGINE = (
    "it calls a private method, which makes the recovery script beside a checkpoint executable: there is no such script"
)
_CONVERTED = "the engine has an optimizer of tiered with the settings of the one that is given, whose states are in the store"
_OTHER_OPTIMIZER = "an optimizer that is neither torch's nor tiered's is refused by name, with the mend"
_PICKLED = "it pickles the model: a paged one is saved by state_dict() (docs/limits.md); copy.deepcopy gives one in memory"
_WRAPPED = "FullyShardedDataParallel around a paged model is refused by name: zero.page(stage=) divides it among ranks"
_ANEW = "the second Trainer is a new process here, which opens the store anew; so the first one's store is closed"

DIFFERENCES = (
    Difference("peft-custom_models", "::test_merge_layers[[]*", "cannot be copied or pickled", _PICKLED),
    Difference("peft-custom_models", "::test_save_load_roundtrip_fsdp_*", "FullyShardedDataParallel would take", _WRAPPED),
    *(
        Difference("transformers-trainer_checkpointing-commits", f"::test_{test}", shows, _COMMITTED)
        for test, shows in (
            *((test, "model.safetensors") for test in ("resume_*_checkpoint", "resume_batch_order", "load_best_*_with_save*")),
            *((test, "False is not true") for test in ("save_*checkpoint*", "load_best_model_*", "resume_from_interrupted_*")),
        )
    ),
    *(
        Difference("transformers-trainer_optimizers", f"::test_{test}", shows, reason)
        for test, shows, reason in (
            ("adafactor_lr_none", "optimization.Adafactor cannot", _OTHER_OPTIMIZER),
            ("custom_optimizer", "StoreClosed", _ANEW),
        )
    ),
    *(
        Difference("deepspeed-lr_schedulers", "*", shows, _TYPED)
        for shows in (
            "MisuseError: warmup_num_steps is",
            "MisuseError: lr_range_test_step_size is",
            "MisuseError: cycle_first_step_size is",
            "numbers, and the optimizer 2 param groups",
        )
    ),
    Difference("deepspeed-lr_schedulers", "::test_warmup_cosine_lr_unknown_*", "warmup_type is 'log' or 'linear', not", _NAMED),
    *(
        Difference("deepspeed-lr_schedulers", "*", f"object has no attribute '{name}'", _INSIDE)
        for name in ("get_mom", "get_lr_ratio", "step_ratio")
    ),
    Difference("deepspeed-zero_optimizer", "::test_chmod_*", "_change_recovery_script_permissions", _INSIDE_ENGINE),
    Difference("deepspeed-ds_config_dict", "::test_hjson", "is no JSON", _HJSON),
    Difference("deepspeed-ds_config_dict", "::TestDeprecatedDeepScaleConfig::test", "zero.initialize needs config=", _OLD_NAME),
    Difference("deepspeed-ds_config_dict", "::TestNoModel::test", "zero.initialize needs model=", _TYPED),
    Difference("deepspeed-ds_initialize", "::TestOptimizerImplementation::test*", "DID NOT RAISE NotImplementedError", _TYPES),
    Difference(
        "deepspeed-ds_initialize", "::TestClientLrScheduler::test*_LRScheduler?", "is for another optimizer than", _TYPED
    ),
    Difference("deepspeed-ds_initialize", "::TestClientOptimizer::test?Optimizer?", "assert Adam", _CONVERTED),
    Difference("deepspeed-ds_initialize", "::TestClientOptimizer::test?Callable?", "assert False", _CONVERTED),
    Difference("accelerate", "::test_*_as_cpu_offload*", "cannot make a paged parameter", _OFFLOAD),
    Difference("accelerate", "::test_layerwise_upcasting_inference_*", "cannot be given .data", _CASTING),
    Difference("lightning", "::test_callbacks_state_fit_ckpt_path", "cannot be copied or pickled", _COPIED),
    *(
        Difference("lightning-commits", f"::test_{tests}", shows, _COMMITTED)
        for tests, shows in (
            ("load_model_from_checkpoint*", "Missing key(s) in state_dict"),
            ("model_saving_loading", "Missing key(s) in state_dict"),
            ("running_test_pretrained_model_cpu", "Missing key(s) in state_dict"),
            ("strict_model_load_*", "Missing key(s) in state_dict"),
            ("trainer_properties_restore_ckpt_path", "assert False"),
        )
    ),
    Difference("lightning-commits", "::test_callbacks_state_fit_ckpt_path", "cannot be copied or pickled", _COPIED),
)


def reason_of(suite: str, test: str, what: str, known: tuple[Difference, ...] = DIFFERENCES) -> str | None:
    """Return why ``test`` fails with ``what``; None where there is no reason."""
    return next((one.reason for one in known if one.explains(suite, test, what)), None)
