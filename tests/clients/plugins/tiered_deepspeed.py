"""Shim for DeepSpeed's suite: ``deepspeed.initialize`` and ``deepspeed.zero.Init`` are those of ``tiered.zero``, and so
are the classes of schedules and of Adam. Each model has a store of its own. ``DeepSpeedConfig`` stays DeepSpeed's."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import tempfile
from typing import Any

import deepspeed
import deepspeed.ops.adam
import deepspeed.runtime.lr_schedules
from tiered_outcomes import engaged
from tiered_places import is_paged

from tiered import MisuseError, zero
from tiered.integrations.deepspeed import schedules
from tiered.integrations.deepspeed.config import read as config_of

_made = itertools.count()


def _placed(config: Any) -> Any:
    """Return a configuration that says where the store is: the same for all ranks of a test."""
    try:
        found = config_of(config)
    except MisuseError:
        return config  # zero.initialize says what is wrong with it
    test = hashlib.sha256(os.environ.get("PYTEST_CURRENT_TEST", "").encode()).hexdigest()[:16]
    place = {"path": os.path.join(tempfile.gettempdir(), f"tiered-{test}-{next(_made)}"), "dram": "64MiB"}
    return found if "tiered" in found else {**found, "tiered": place}


class Init(zero.Init):
    """``zero.Init`` with a folder of its own."""

    def __init__(self, *given: Any, **options: Any) -> None:
        name = "config" if options.get("config") is not None else "config_dict_or_path"
        if options.get(name) is not None:
            options[name] = _placed(options[name])
        super().__init__(*given, **options)


def initialize(*given: Any, **options: Any) -> Any:
    """``zero.initialize`` with a store of its own."""
    found = inspect.signature(zero.initialize).bind(*given, **options).arguments
    args = found.get("args")
    for name in ("config", "config_params"):
        if found.get(name) is not None:
            found[name] = _placed(found[name])
            break
    else:
        there = getattr(args, "deepspeed_config", None)
        if there is not None:
            found["config"] = _placed(there)
            args.deepspeed_config = None
    made = zero.initialize(**found)
    if is_paged(made[0].module):
        engaged()
    return made


deepspeed.initialize = initialize
deepspeed.zero.Init = Init
deepspeed.ops.adam.FusedAdam = deepspeed.ops.adam.DeepSpeedCPUAdam = zero.AdamW
for _name in schedules.SCHEDULES:
    setattr(deepspeed.runtime.lr_schedules, _name, getattr(schedules, _name))
