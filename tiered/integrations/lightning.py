"""Train a LightningModule whose parameters and Adam states are in a store (https://lightning.ai/docs/pytorch).

``Trainer(strategy=TieredStrategy("store/", dram="8GiB"))`` is the whole change, beside ``zero.AdamW`` in
``configure_optimizers``. One process and one device; several processes have no Lightning strategy of this project.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeGuard
from uuid import uuid4

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.optimizer import Optimizer

from tiered import zero
from tiered.errors import MisuseError, one_of
from tiered.integrations.saves import SavedCommit, is_paged, restore, save, store_of
from tiered.store import TieredStore
from tiered.zero.checkpoint.checkpoint import load_optimizer, optimizer_record
from tiered.zero.checkpoint.loaders import keeping_random_states

__all__ = ["TieredStrategy"]

KEY = "tiered"
"""Where a checkpoint file says which commit of the store belongs to it."""


class TieredStrategy(SingleDeviceStrategy):
    """Page the parameters of a LightningModule, and commit the store for each checkpoint.

    ``store``: a ``TieredStore``, or the folder of one, which is opened when a run begins, with ``dram`` and ``options`` (other
    arguments of ``TieredStore.open``: ``hbm``, ``keep``, ``paths``). It stays open for further runs of the trainer and for the
    model's parameters, until ``close()``. ``page``: arguments of ``zero.page``, such as ``name``, ``policy`` and ``weights``.

    What ``configure_model`` builds is never whole in memory. Paging follows, before ``configure_optimizers``, which returns
    ``zero.AdamW(self.parameters(), ...)``. A run without ``ckpt_path`` begins with the values that the module has, and
    overwrites the model of that name in the store; a module that was paged by an earlier run goes on as it is.

    ``checkpoints``:

    - "commits": a checkpoint file has all but parameters and optimizer states, and refers to the commit of the store that has
      them. ``ckpt_path=`` goes back to it: one of the ``keep`` last commits of this store (``TieredStrategy(..., keep=5)``).
      ``trainer.save_checkpoint`` makes no copy of them in memory, and ``on_save_checkpoint`` finds an empty ``state_dict``.
    - "whole": a checkpoint file is what Lightning writes without this strategy, for which everything is copied to memory.

    Either way ``ckpt_path=`` loads whole checkpoints, of whatever strategy. Random states stay as they are, as with Lightning.
    """

    strategy_name = "tiered"

    def __init__(
        self,
        store: TieredStore | str | os.PathLike[str],
        *,
        dram: int | str | None = None,
        page: Mapping[str, Any] | None = None,
        checkpoints: Literal["commits", "whole"] = "commits",
        device: torch.device | str = "cpu",
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        one_of("checkpoints", checkpoints, ("commits", "whole"))
        if isinstance(store, TieredStore) and (dram is not None or options):
            raise MisuseError(f"{store} is open, and has its options already: leave dram= and others out, or give its folder")
        refused = {"existing", "stage", "timeout", "source"} & set(page or {})
        if refused:
            raise MisuseError(
                f"page={sorted(refused)} is not for this strategy, which has one process, and goes on from what ckpt_path= says"
            )
        here = store.device if isinstance(store, TieredStore) else torch.device(device) if "hbm" in options else "cpu"
        super().__init__(here, accelerator, checkpoint_io, precision_plugin)
        self._given, self._options = store, {"dram": dram, "device": device, **options}
        self._page, self._checkpoints = dict(page or {}), checkpoints
        self._opened: TieredStore | None = store if isinstance(store, TieredStore) else None

    # -- the store ---------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> TieredStore:
        """Return the store, which is opened by the first use."""
        if self._opened is None:
            assert not isinstance(self._given, TieredStore)
            options = self._options if "hbm" in self._options else {k: v for k, v in self._options.items() if k != "device"}
            self._opened = TieredStore.open(self._given, **options)
        return self._opened

    def close(self) -> None:
        """Close the store, if this strategy opened it. What no checkpoint committed is gone."""
        if self._opened is not None and not isinstance(self._given, TieredStore):
            self._opened.close()
            self._opened = None

    # -- a run of the trainer ----------------------------------------------------------------------------------------------

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Have what ``configure_model`` builds wait in the store."""
        with zero.init(self.store):
            yield

    def setup(self, trainer: Trainer) -> None:
        """Page the module, then make its optimizers."""
        self.accelerator.setup(trainer)
        self.model: Any = self.precision_plugin.convert_module(self._module())
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                _refuse_other(optimizer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move the parameters into the store, where they are not there already."""
        module = self._module()
        if not any(True for _ in module.parameters()):
            raise MisuseError(f"{type(module).__name__} has no parameters: make its layers in __init__ or in configure_model")
        if not is_paged(module):
            zero.page(module, self.store, existing="overwrite", **self._page)
        elif store_of(module) is not self.store:
            raise MisuseError(f"{type(module).__name__} is paged in {store_of(module)}, and this strategy has {self.store}")

    def teardown(self) -> None:
        """End a run. The store stays open, and parameters stay where they are."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True: parameters are loaded into the store, and not into memory first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint file has of the module: nothing where the store has it."""
        return {} if self._checkpoints == "commits" else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return what a checkpoint file has of an optimizer: param groups and step counts where the store has its states."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        if self._checkpoints == "whole" or not _is_ours(inner):
            return super().optimizer_state(optimizer)  # type: ignore[no-any-return]
        return {KEY: optimizer_record(inner)}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Commit the store, then write the file that refers to the commit."""
        if self._checkpoints == "commits":
            mark = uuid4().hex
            saved = SavedCommit(mark, (save([(self._module(), None)], mark),))
            checkpoint = {**checkpoint, KEY: saved.written()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Go back to the commit that the checkpoint refers to, or load what it has."""
        if KEY not in checkpoint:
            super().load_model_state_dict(checkpoint, strict)
            return
        where = "the checkpoint given as ckpt_path"
        with keeping_random_states():
            restore([(self._module(), None)], SavedCommit.of(checkpoint[KEY], where), where)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load param groups and step counts; and states, where the checkpoint has them."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if KEY not in state:
                optimizer.load_state_dict(state)
            elif _is_ours(optimizer):
                load_optimizer(optimizer, state[KEY])
            else:
                name = type(optimizer).__name__
                raise MisuseError(f"the checkpoint is of an optimizer of tiered.zero, and configure_optimizers made a {name}")

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def _is_ours(optimizer: Optimizer) -> TypeGuard[zero.Optimizer]:
    return isinstance(optimizer, zero.Optimizer) and not optimizer.resident


def _refuse_other(optimizer: Optimizer) -> None:
    """Raise MisuseError for an optimizer that cannot update paged parameters, before a run has begun."""
    paged = any(hasattr(parameter, "_tiered") for group in optimizer.param_groups for parameter in group["params"])
    if paged and not _is_ours(optimizer):
        name = type(optimizer).__name__
        same = "tiered.zero.AdamW(self.parameters(), ...), which takes the same arguments"
        raise MisuseError(
            f"configure_optimizers made a {name}, which cannot update parameters that are in a store: "
            f"return {same if name in ('AdamW', 'Adam') else 'tiered.zero.AdamW(self.parameters(), ...)'}"
        )
