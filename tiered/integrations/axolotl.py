"""Train an axolotl configuration with its model in a store (https://docs.axolotl.ai, "custom integrations")::

    plugins:
      - tiered.integrations.axolotl.TieredPlugin
    tiered_store: store/          # a folder on a fast drive
    tiered_dram: 8GiB
    tiered_existing: overwrite    # a model that the store has; "resume" continues from its last commit, "refuse" raises
    tiered_checkpoints: whole     # "commits" (the default), "model", "whole": as of CommitCheckpoints

axolotl makes the model as always, within ``zero.init``: it is never whole in memory, adapters and resized embeddings included.
Then it is paged. Whatever trainer axolotl makes for it gets ``zero.AdamW`` and checkpoints that are commits.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from tiered import zero
from tiered.errors import MisuseError
from tiered.integrations.transformers import CommitCheckpoints, reading_one_at_a_time
from tiered.store import TieredStore

__all__ = ["TieredArgs", "TieredPlugin"]

REFUSED = {
    **dict.fromkeys(("fsdp_config", "fsdp", "deepspeed"), "paging divides the model itself"),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "gptq"), "quantised parameters cannot be paged"),
    "rl": "preference training has a second model, which is not paged so far",
    "torch_compile": "compiling is not tested with the trainers of axolotl",
}
"""Settings that cannot be, and why."""


class TieredArgs(BaseModel):
    """What the plugin reads of a configuration. ``tiered_open`` and ``tiered_page``: other arguments of ``TieredStore.open``,
    such as ``keep``, and of ``zero.page``, such as ``micro_batch``; what is below ``paging`` there is a ``zero.Paging``."""

    tiered_store: str
    tiered_dram: str | int | None = None
    tiered_existing: Literal["refuse", "overwrite", "resume"] = "refuse"
    tiered_checkpoints: Literal["commits", "model", "whole"] = "commits"
    tiered_open: dict[str, Any] | None = None
    tiered_page: dict[str, Any] | None = None


class TieredPlugin(BasePlugin):
    """Opens the store before the model is loaded, and closes it after training."""

    def __init__(self) -> None:
        super().__init__()
        self._store: TieredStore | None = None
        self._loading = ExitStack()

    def get_input_args(self) -> str:
        return f"{__name__}.{TieredArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        for setting, why in REFUSED.items():
            if cfg.get(setting):
                raise MisuseError(f"{setting}: {why}: leave it out of a configuration with {type(self).__name__}")
        self._loading.close()  # of a load that failed
        if self._store is None:
            dram = {} if cfg.tiered_dram is None else {"dram": cfg.tiered_dram}
            self._store = TieredStore.open(cfg.tiered_store, **dram, **(cfg.tiered_open or {}))
        self._loading.enter_context(reading_one_at_a_time())
        self._loading.enter_context(zero.init(self._store))

    def post_model_load(self, cfg: Any, model: Any) -> None:
        assert self._store is not None
        self._loading.close()
        options = dict(cfg.tiered_page or {})
        if "paging" in options:
            options["paging"] = zero.Paging(**options["paging"])
        zero.page(model, self._store, existing=cfg.tiered_existing or "refuse", **options)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        CommitCheckpoints.adopt(trainer, checkpoints=cfg.tiered_checkpoints or "commits")

    def post_train_unload(self, cfg: Any) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None
