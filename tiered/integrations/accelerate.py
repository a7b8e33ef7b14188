"""Have Hugging Face Accelerate save and load a paged model as commits of its store (https://hf.co/docs/accelerate).

A loop over ``accelerator.prepare(...)`` needs nothing of this file: a paged model and an optimizer of ``tiered.zero`` go
through as others do. ``register`` is for the three places where Accelerate would do what paging does already: it wraps a model
in DistributedDataParallel, copies optimizer states to a device, and saves copies of everything.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn

from tiered import zero
from tiered.errors import MisuseError, expect_type, path_of
from tiered.format.foreign.documents import json_of
from tiered.integrations.saves import Pair, SavedCommit, is_paged, restore, save, store_of
from tiered.store import TieredStore
from tiered.zero.paging.pager import pager_of, pager_of_parameter

__all__ = ["FILE", "export_state", "register"]

FILE = "tiered.json"
"""The file in a folder of ``save_state`` that says which commit has the model and its optimizer."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
REFUSED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Kinds of training that divide the model themselves."""


def register(accelerator: Accelerator, store: TieredStore) -> None:
    """Have ``accelerator`` know models that are paged into ``store``. Call it before ``prepare``.

    - ``prepare`` leaves such a model unwrapped with several processes, for paging averages the gradients itself, and moves no
      optimizer state.
    - ``accumulate`` and ``no_sync`` add gradients up in the rank's store, as ``zero.no_sync``.
    - ``save_state(folder)`` commits the store, without a copy of the states in memory. The folder has the rest, as Accelerate
      writes it (schedulers, samplers, random states, registered objects), and in ``tiered.json`` which commit belongs to it. So
      the store is needed to load it, and has to keep the commit: ``TieredStore.open(keep=)``.
    - ``load_state(folder)`` goes back to that commit. It also loads a folder that Accelerate saved without this, from a model
      in memory or in a store. ``export_state`` writes such a folder.
    - Hooks of ``register_save_state_pre_hook`` and ``register_load_state_pre_hook`` are called with all models, as without
      this. When the latter are called, paged models are as of the commit already: what a hook loads stays. The state dict of a
      paged model is read when a hook uses it.

    Models and optimizers of ``accelerator`` that are not paged stay as they are. Raises MisuseError where the accelerator
    divides models itself (FSDP, DeepSpeed, Megatron-LM) or is registered for another store.
    """
    expect_type(accelerator, Accelerator, "what is registered is an accelerate.Accelerator")
    expect_type(store, TieredStore, "an accelerator is registered for a TieredStore")
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in REFUSED:
        raise MisuseError(
            f"this accelerator is set up for {kind}, which divides a model itself, and paging does that, too: leave its plugin "
            "out (accelerate config: no FSDP, no DeepSpeed), and give zero.page a stage="
        )
    registered = getattr(accelerator, "_tiered_store", None)
    if registered is not None and registered is not store:
        raise MisuseError(f"this accelerator is registered for {registered}: make one for each store")
    if registered is None:
        accelerator._tiered_store = store
        kind_of_it: type = type(accelerator)
        accelerator.__class__ = _registered(kind_of_it)


def export_state(accelerator: Accelerator, folder: str | os.PathLike[str]) -> None:
    """Write to ``folder`` what ``save_state`` of an accelerator without a store writes, for any accelerator to load.

    The parameters and optimizer states are copied to memory for that, all at once. Several processes call it together.
    """
    expect_type(accelerator, Accelerator, "what exports its state is an accelerate.Accelerator")
    plain: Any = super(_Registered, accelerator) if isinstance(accelerator, _Registered) else accelerator
    plain.save_state(path_of(folder, "the folder of a state"))


def _filled(name: str) -> Callable[..., Any]:
    """Return the method of this name of ``_StateDict``."""

    def method(self: _StateDict, *given: Any, **more: Any) -> Any:
        self.fill()
        return getattr(super(_StateDict, self), name)(*given, **more)

    return method


class _StateDict(dict[str, Any]):
    """What ``model.state_dict()`` returns, which is called when this is used first: it copies all parameters to memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model: nn.Module | None = model
        self._versions: Any = None

    def fill(self) -> None:
        """Read the values, where nobody has."""
        model, self._model = self._model, None
        if model is not None:
            found = model.state_dict()
            super().update(found)
            self._versions = getattr(found, "_metadata", None)

    @property
    def _metadata(self) -> Any:
        """Return the versions of modules, which ``load_state_dict`` looks for."""
        self.fill()
        return self._versions

    def __reduce__(self) -> Any:
        """Called by copy and pickle: an OrderedDict, as other state dicts are, which ``torch.load`` takes."""
        return OrderedDict, (), None, None, iter(self.items())


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__reversed__", "__eq__", "__repr__"),
    *("keys", "values", "items", "get", "copy", "pop", "popitem", "update", "setdefault", "clear"),
):
    setattr(_StateDict, _name, _filled(_name))


class _Registered(Accelerator):
    """An accelerator after ``register``."""

    _tiered_store: TieredStore
    _models: list[Any]
    _optimizers: list[Any]
    _save_model_state_pre_hook: Any
    _load_model_state_pre_hook: Any

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not is_paged(model):
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        store = store_of(model)
        if store is not self._tiered_store:
            raise MisuseError(f"this model is in {store}, and the accelerator is registered for {self._tiered_store}")
        if store.device.type != self.device.type:
            raise MisuseError(
                f"{store} computes on {store.device}, and this accelerator on {self.device}: make it with "
                "Accelerator(cpu=True), or open the store with hbm= and that device="
            )
        # evaluation_mode leaves out nothing but wrappers for training with several processes
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)  # type: ignore[no-any-return]

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, zero.Optimizer):
            device_placement = False  # it would copy all states to the device, and back
        return super().prepare_optimizer(optimizer, device_placement)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with zero.no_sync(model) if is_paged(model) else super().no_sync(model):
            yield

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **more: Any) -> Any:
        pairs = self._paged()
        if not pairs:
            return super().save_state(output_dir, safe_serialization, **more)
        number = torch.tensor(list(uuid4().bytes), dtype=torch.uint8, device=self.device)
        mark = bytes((broadcast(number) if self.num_processes > 1 else number).tolist()).hex()
        writes = self.is_main_process or (self.project_configuration.save_on_each_node and self.is_local_main_process)
        if output_dir is not None and writes:
            Path(output_dir, FILE).unlink(missing_ok=True)  # until the folder is complete it belongs to no commit
        self.wait_for_everyone()
        with self._without(pairs):
            folder = super().save_state(output_dir, safe_serialization, **more)
        generations = tuple(self.gather(torch.tensor([save(pairs, mark)], dtype=torch.int64, device=self.device)).tolist())
        found = {"loaders": [_loader_state(loader) for loader in self._dataloaders]}
        if writes:
            _write(Path(folder, FILE), {**SavedCommit(mark, generations).written(), **found})
        self.wait_for_everyone()
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        pairs = self._paged()
        folder = self._folder(input_dir) if pairs else None
        if folder is None or (not (folder / FILE).exists() and any((folder / name).exists() for name in WEIGHTS)):
            super().load_state(input_dir, load_kwargs, **more)
            return
        if not (folder / FILE).exists():
            raise MisuseError(
                f"{folder} has neither {FILE} nor weights: save_state did not come to its end, or it is another folder"
            )
        found = json_of(folder / FILE)
        restore(pairs, SavedCommit.of(found, str(folder)), str(folder), rank=self.process_index)
        with self._without(pairs):
            super().load_state(input_dir, load_kwargs, **more)
        for loader, state in zip(self._dataloaders, found.get("loaders", ()), strict=False):
            _load_loader(loader, state)

    def _folder(self, given: str | None) -> Path | None:
        """Return the folder that ``load_state`` means, as it finds it; None where it finds none, and says so."""
        if given is not None:
            found = Path(os.path.expanduser(given))
            return found if found.is_dir() else None
        if not self.project_configuration.automatic_checkpoint_naming:
            return None
        numbered = {path: re.findall(r"\d+", path.name) for path in Path(self.project_dir, "checkpoints").glob("*")}
        return max((path for path, found in numbered.items() if found), key=lambda path: int(numbered[path][-1]), default=None)

    def _paged(self) -> list[Pair]:
        """Return the paged models that were prepared, each with its optimizer."""
        optimizers: dict[Any, zero.Optimizer] = {}
        for prepared in self._optimizers:
            if isinstance(prepared.optimizer, zero.Optimizer) and not prepared.optimizer.resident:
                pager = pager_of_parameter(prepared.optimizer.param_groups[0]["params"][0])
                if pager in optimizers:
                    raise MisuseError(
                        f"model {pager.name!r} has two optimizers, and a commit has one: give it one with two param groups"
                    )
                optimizers[pager] = prepared.optimizer
        paged = [model for model in self._models if is_paged(model)]
        return [(model, optimizers.get(pager_of(model))) for model in paged]

    @contextmanager
    def _without(self, pairs: list[Pair]) -> Iterator[None]:
        """Leave the models and optimizers that the store has out of what Accelerate saves and loads, for a block; but give them
        to the hooks for saving and loading."""
        models, optimizers = self._models, self._optimizers
        saving, loading = self._save_model_state_pre_hook, self._load_model_state_pre_hook
        paged = [id(one) for pair in pairs for one in pair]
        others = [model for model in models if id(model) not in paged]
        others_optimizers = [prepared for prepared in optimizers if id(prepared.optimizer) not in paged]

        @contextmanager
        def all_of_it() -> Iterator[None]:
            self._models, self._optimizers = models, optimizers
            try:
                yield
            finally:
                self._models, self._optimizers = others, others_optimizers

        def save(_: Any, weights: list[Any], folder: str) -> None:
            rest = iter(list(weights))
            given = [self._state_of(model) if id(model) in paged else next(rest) for model in models]
            with all_of_it():
                for hook in saving.values():
                    hook(models, given, folder)
            weights[:] = [one for one in given if not isinstance(one, _StateDict)]  # the commit has the others

        def load(left: list[Any], folder: str) -> None:
            given = list(models)
            with all_of_it():
                for hook in loading.values():
                    hook(given, folder)
            left[:] = [one for one in given if id(one) not in paged]

        self._models, self._optimizers = others, others_optimizers
        self._save_model_state_pre_hook = {0: save} if saving else saving
        self._load_model_state_pre_hook = {0: load} if loading else loading
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            self._save_model_state_pre_hook, self._load_model_state_pre_hook = saving, loading

    def _state_of(self, model: nn.Module) -> _StateDict:
        """Return the state dict of a paged model. With several processes all of them read it here, together."""
        state = _StateDict(model)
        if self.num_processes > 1:
            len(state)
        return state


@cache
def _registered(kind: type) -> type:
    """Return the class of registered accelerators that were of class ``kind``."""
    return _Registered if kind is Accelerator else type(kind.__name__, (_Registered, kind), {})


def _loader_state(loader: Any) -> dict[str, Any]:
    """Return how many epochs a prepared data loader has ended, and what draws the order of the next one. Accelerate saves
    neither."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    generator = getattr(sampler, "generator", None) if not hasattr(sampler, "epoch") else None  # which seeds it anew
    drawn = None if generator is None else base64.b64encode(generator.get_state().numpy().tobytes()).decode()
    return {
        "iteration": getattr(loader, "iteration", None),
        "epoch": getattr(sampler, "epoch", None),
        "initial_seed": getattr(sampler, "initial_seed", None),
        "generator": drawn,
    }


def _load_loader(loader: Any, state: dict[str, Any]) -> None:
    """Set what ``_loader_state`` returned, as far as this loader has it."""
    sampler: Any = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    for owner, name in ((loader, "iteration"), (sampler, "epoch"), (sampler, "initial_seed")):
        if state.get(name) is not None and hasattr(owner, name):
            setattr(owner, name, state[name])
    if state.get("generator") is not None and getattr(sampler, "generator", None) is not None:
        drawn = torch.frombuffer(bytearray(base64.b64decode(state["generator"])), dtype=torch.uint8)
        sampler.generator.set_state(drawn)


def _write(path: Path, found: dict[str, Any]) -> None:
    """Write a file that is there as a whole or not at all, also after a power loss."""
    part = path.with_name(path.name + ".tmp")
    with part.open("w") as file:
        json.dump(found, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
