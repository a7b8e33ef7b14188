"""The engine that ``zero.initialize`` returns: DeepSpeed's names for a training loop over a paged model."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tiered.errors import MisuseError, RankError, UncommittedWarning, expect_type, shown
from tiered.integrations.deepspeed import tags
from tiered.integrations.deepspeed.config import Config
from tiered.integrations.deepspeed.importing import load_imported, load_saved
from tiered.integrations.deepspeed.loss_scale import LossScale
from tiered.integrations.deepspeed.monitors import MonitoredStep, Monitors
from tiered.integrations.deepspeed.questions import answer, lacking
from tiered.integrations.deepspeed.saved import SavedCheckpoint, is_saved
from tiered.integrations.deepspeed.table import QUESTIONS
from tiered.store import TieredStore
from tiered.zero.checkpoint import checkpoint
from tiered.zero.checkpoint import safetensors as weights
from tiered.zero.checkpoint.loaders import Stateful
from tiered.zero.collectives import Ranks
from tiered.zero.optimizers.optimizer import Optimizer
from tiered.zero.page import no_sync, offload, onload
from tiered.zero.rank_stores import has_commit, shared_json

__all__ = ["Engine", "several"]

COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


class Loaded(NamedTuple):
    """What ``load_checkpoint`` returns: the folder of the checkpoint, and what the caller had saved with it."""

    load_path: str | None
    client_state: dict[str, Any] | None


class _Saving(msgspec.Struct, forbid_unknown_fields=True):
    """What each rank says before a commit with a tag: the mark of the commit, and those of earlier ones that stay. Those of
    rank 0 hold, because another one may not see the folder of tags."""

    tag: str
    mark: str
    marks: list[str]


class _Loading(msgspec.Struct, forbid_unknown_fields=True):
    """What rank 0 finds of a tag: the commit, or what is wrong, or neither where there is no checkpoint."""

    tag: str = ""
    problem: str = ""
    tagged: tags.Tagged | None = None
    foreign: bool = False


class Engine(nn.Module):
    """A paged model with its optimizer, scheduler and loss scale, as DeepSpeed's engine has them.

    ``loss = engine(batch); engine.backward(loss); engine.step()`` for each pass: a step is made at the end of
    ``gradient_accumulation_steps()`` passes. ``module`` is the model, ``optimizer`` and ``lr_scheduler`` what
    ``zero.initialize`` returned, ``store`` where the state is. What the engine does not have is looked up in the model.

    ``global_steps`` counts steps, skipped ones included, ``skipped_steps`` those that gradients with infinity or NaN left out,
    ``micro_steps`` passes, ``global_samples`` samples of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        store: TieredStore,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        training_dataloader: DataLoader[Any] | None,
        *,
        owned: bool,
    ) -> None:
        super().__init__()
        expect_type(config, Config, "zero.initialize makes an engine; its constructor is given a configuration")
        self.module, self.store = module, store
        self.optimizer, self.lr_scheduler, self.training_dataloader = optimizer, lr_scheduler, training_dataloader
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self._config, self._owned = config, owned
        self._accumulation_steps, self._train_batch_size = config.accumulation_steps, config.train_batch_size
        self._micro_batch_size = config.micro_batch_size
        self._scale = LossScale(config.fp16)
        self._ranks = Ranks.of(None) if several() else None
        self._monitors = Monitors(config.reports, store, module, first=self.global_rank == 0)
        self._boundary: bool | None = None
        self._syncing, self._applied = True, False
        self._norm: float | None = None
        self._losses: list[torch.Tensor] = []
        self._passes = 0

    def __getattr__(self, name: str) -> Any:
        """Return what the engine has, else what the model has, else the answer to a question of DeepSpeed's about its
        configuration."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
        try:
            return getattr(module, name)
        except AttributeError as error:
            if name in QUESTIONS and "_config" in self.__dict__:
                return partial(answer, self._config, name)
            if name.startswith("__"):
                raise
            raise AttributeError(lacking(name, type(module).__name__), name=name, obj=self) from error

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *QUESTIONS]  # type: ignore[no-untyped-call]

    # -- a step ------------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the model. With ``fp16.auto_cast`` floating-point inputs are converted; with ``torch_autocast`` it computes
        under torch.autocast."""
        with ExitStack() as stack:
            stack.enter_context(self._monitors.phase("forward", self.global_steps + 1))
            if self._config.fp16.enabled and self._config.fp16.auto_cast:
                inputs, named = _cast(inputs), _cast(named)
            if self._config.autocast:
                stack.enter_context(torch.autocast(self.store.device.type, dtype=torch.bfloat16))
            return self.module(*inputs, **named)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients of ``loss`` (one element), divided by ``gradient_accumulation_steps()`` unless ``scale_wrt_gas`` is
        false, and return it divided. Gradients are added to those of earlier passes. Raises MisuseError for what is no loss,
        and without an optimizer."""
        self._needed()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:60]
            raise MisuseError(f"engine.backward takes a loss of one element that has a graph, not {what}")
        with self._monitors.phase("backward", self.global_steps + 1):
            self._losses.append(loss.detach())
            divided = self._divided(loss) if scale_wrt_gas else loss
            self._scaled(divided).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self._passes += 1
        return divided

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` as ``backward`` would compute gradients of it: for a ``loss.backward()`` of the caller's own."""
        return self._scaled(self._divided(loss))

    def _divided(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self._accumulation_steps if self._accumulation_steps > 1 else loss

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.float() * self._scale.scale if self._config.fp16.enabled else loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the present pass is the last one of a step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the present pass is the last one of a step, until this is called again."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a pass; at the boundary make a step: unscale, clip, update, forget the gradients, and step the scheduler.

        A step in which a gradient of a bf16 or fp16 parameter is infinite or NaN is skipped. Raises MisuseError within
        ``no_sync``, and for such a gradient of an fp32 parameter; TieredError where fp16 overflows at the smallest scale.
        """
        self._needed()
        if not self._syncing:
            raise MisuseError("engine.step() within engine.no_sync(): leave the block first")
        self._applied = False
        if not self._config.managed or self.is_gradient_accumulation_boundary():
            self._step(lr_kwargs or {})
        self.micro_steps += 1

    def _step(self, lr_kwargs: Mapping[str, Any]) -> None:
        optimizer, config = self._needed(), self._config
        with self._monitors.phase("step", self.global_steps + 1):
            overflow, self._norm = False, None
            if config.check_overflow:
                factor = torch.tensor(1.0 / self._scale.scale, dtype=torch.float32, device="cpu")
                overflow = not all(optimizer.unscale(factor))
            if not overflow:
                if config.clipping > 0 or config.compute_norm:
                    self._norm = float(optimizer.clip_grad_norm_(config.clipping or float("inf")))
                optimizer.step()
            optimizer.zero_grad()
            if overflow:
                self.skipped_steps += 1
            elif self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        self._applied = not overflow
        self._scale.updated(overflow)
        self.global_steps += 1
        passes, self._passes = self._passes, 0
        self.global_samples += self._train_batch_size if config.managed else passes * self._samples_of_a_pass
        scale = self._scale.scale if config.fp16.enabled else None
        losses, self._losses = self._losses, []
        counted = self.global_steps, self.global_samples, self.skipped_steps
        self._monitors.stepped(MonitoredStep(*counted, self.get_lr(), losses, scale))

    @property
    def _samples_of_a_pass(self) -> int:
        """Return the samples of a pass, of all ranks together."""
        return self._train_batch_size // self._accumulation_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        if self.optimizer is None:
            super().zero_grad(set_to_none)
        else:
            self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes in this block add up their gradients on this rank only, as ``zero.no_sync``, with every stage
        (DeepSpeed's refuses stages 2 and 3)."""
        if not self._syncing:
            raise MisuseError("engine.no_sync() within engine.no_sync(): leave the block first")
        self._syncing = False
        try:
            with no_sync(self.module):
                yield
        finally:
            self._syncing = True

    def was_step_applied(self) -> bool:
        """Return whether the last ``step()`` updated the model: it was at a boundary, and not skipped."""
        return self._applied

    def _needed(self) -> Optimizer:
        if self.optimizer is None:
            raise MisuseError(
                "this engine has no optimizer, and cannot train: name one in the configuration, or give optimizer="
            )
        return self.optimizer

    # -- what it is --------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """Return the configuration, with what was filled in."""
        return dict(self._config.values)

    @property
    def device(self) -> torch.device:
        """Return the device that the model computes on."""
        return self.store.device

    @property
    def global_rank(self) -> int:
        """Return the number of this process."""
        return dist.get_rank() if several() else 0

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return dist.get_world_size() if several() else 1

    def train_batch_size(self) -> int:
        """Return the samples of a step, of all ranks together."""
        return self._train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a pass on one rank."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the passes of a step."""
        return self._accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the passes of a step such that it has so many samples. Raises MisuseError where no whole number does."""
        one = self._samples_of_a_pass
        if train_batch_size < 1 or train_batch_size % one:
            raise MisuseError(f"a step has {one} samples a pass, and {train_batch_size} is no multiple of that")
        self._accumulation_steps, self._train_batch_size = train_batch_size // one, train_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say that a pass has so many samples on each rank from now on, with as many passes a step as before."""
        if micro_batch_size < 1:
            raise MisuseError(f"a pass has at least one sample, not {micro_batch_size}")
        self._micro_batch_size = micro_batch_size
        self._train_batch_size = micro_batch_size * self._accumulation_steps * self.world_size

    def gradient_clipping(self) -> float:
        """Return the largest norm of gradients; 0: they are not clipped."""
        return self._config.clipping

    def zero_optimization_stage(self) -> int:
        """Return the stage that the configuration says."""
        return self._config.stage

    def zero_optimization(self) -> bool:
        """Return whether the configuration says a stage above 0."""
        return self._config.stage > 0

    def steps_per_print(self) -> int | None:
        """Return the steps between two lines."""
        return self._config.reports.steps

    def wall_clock_breakdown(self) -> bool:
        """Return whether phases are timed."""
        return self._config.reports.wall_clock

    def fp16_enabled(self) -> bool:
        """Return whether the model is fp16."""
        return self._config.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether the model is bf16."""
        return self._config.dtype == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Return whether overflows change the loss scale."""
        return self._scale.dynamic

    @property
    def cur_scale(self) -> float:
        """Return by what losses are multiplied."""
        return self._scale.scale

    def loss_scale(self) -> float:
        """Return by what losses are multiplied."""
        return self._scale.scale

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_type(self) -> list[str]:
        """Return the class name of the optimizer, for each param group."""
        return [type(self.optimizer).__name__ for _ in self.get_lr()]

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of each param group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all param groups, until the scheduler sets it."""
        for group in self._needed().param_groups:
            group["lr"] = lr

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients in the last step, before clipping; None where it was skipped, or not asked for
        (``gradient_clipping``, ``zero_optimization.compute_grad_norm``)."""
        return self._norm

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples of a step, the samples of a pass on one rank, and the passes of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Commit everything that training needs to go on, bit for bit, as ``tag`` (default: ``global_stepN``); returns True.

        The commit is in the store, and durable when this returns. ``save_dir/tag`` names it, and ``save_dir/latest`` the tag.
        It stays until a save finds that its folder is gone. ``client_state``: JSON values, tuples and tensors, which
        ``load_checkpoint`` returns. Random states and gradients between passes are saved, too, frozen parameters always. All
        ranks call it together, with one tag. Raises MisuseError for a tag that is no name, and as ``zero.commit``.
        """
        if not str(save_dir):
            raise MisuseError("save_dir is empty: name a folder")
        name, folder = (
            str(tag if tag is not None else f"global_step{self.global_steps}"),
            Path(save_dir).expanduser().absolute(),
        )
        tags.refuse_tag(name)
        mine = _Saving(name, uuid4().hex, tags.marks_of(self.store) if self.global_rank == 0 else [])
        first = self._agreed(mine)
        mark = first.mark
        tags.keep(self.store, first.marks)  # this commit drops others
        extra = {
            "engine": {counter: getattr(self, counter) for counter in COUNTERS},
            "sizes": (self._accumulation_steps, self._train_batch_size, self._micro_batch_size, self._passes),
            "loss_scale": self._scale.state_dict(),
            "client_state": dict(client_state or {}),
        }
        meta = {**self.store.meta, "step": self.global_steps, tags.META: {"folder": str(folder), "tag": name, "mark": mark}}
        meta[tags.BUDGET] = tags.budget_of(self.store)
        generation = checkpoint.commit(self.module, self.optimizer, scheduler=self.lr_scheduler, extra=extra, meta=meta)
        tags.keep(self.store, [*first.marks, mark])
        generations = [generation] if self._ranks is None else shared_json(self._ranks, generation, int)
        if self.global_rank == 0:
            tags.write(folder, name, tags.Tagged(mark, tuple(generations), self.store.folder), as_latest=save_latest)
        if self._ranks is not None:
            shared_json(self._ranks, True, bool)  # no rank is ahead of the file
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Loaded:
        """Go back to the commit of a tag (default: the one that ``load_dir/latest`` names), and return its folder and its
        client state; None for both, with a warning, where there is no such checkpoint.

        The model, optimizer, scheduler, loss scale, counters, gradients and random states are as they were. Without
        ``load_optimizer_states``, or with ``load_module_only``, the optimizer begins anew, with the param groups it has;
        without ``load_lr_scheduler_states`` the scheduler stays as it is. No tensor is moved.

        A checkpoint that DeepSpeed wrote (ZeRO stages 1 to 3, any number of ranks), and a store that ``tiered import`` made of
        one (``load_dir`` is its folder), are copied into this store; nothing in their pickles is run. They have no random
        states: those of now stay. What follows is durable once ``save_checkpoint`` has been called.

        Raises MisuseError where the store is not the one that was saved from, where the model or the optimizer is another one,
        for ``custom_load_fn``, and as ``zero.rollback``; TorchFileError for files that are damaged or could run code.
        """
        if custom_load_fn is not None:
            raise MisuseError("custom_load_fn= loads tensors, and a checkpoint here is a commit: leave it out")
        folder = Path(load_dir).expanduser().absolute()
        there = self._found(folder, tag)
        if there.tagged is None and not there.foreign:
            what = folder / shown(there.tag or tags.LATEST, 300)
            warnings.warn(f"there is no checkpoint to load: {what} does not exist", stacklevel=2)
            return Loaded(None, None)
        name = there.tag
        anew = load_module_only or not load_optimizer_states
        groups = [dict(group) for group in self.optimizer.param_groups] if self.optimizer is not None else []
        scheduler: Stateful | None = self.lr_scheduler
        before = scheduler.state_dict() if scheduler is not None else None
        if there.tagged is None:
            extra = self._taken_over(folder / name, anew=anew)
        else:
            generation = self._generation(there.tagged, folder / shown(name, 300))
            extra = checkpoint.rollback(self.module, self.optimizer, scheduler=scheduler, generation=generation)
        if anew and self.optimizer is not None:
            self.optimizer.load_state_dict({"state": {}, "param_groups": _packed(self.optimizer)})
        if (anew or not load_lr_scheduler_states) and scheduler is not None:
            scheduler.load_state_dict(before)
        for group, old in zip(self.optimizer.param_groups, groups, strict=True) if self.optimizer is not None else ():
            if anew:
                group.update({key: value for key, value in old.items() if key != "params"})
            elif not load_lr_scheduler_states:
                group["lr"] = old["lr"]
        if not load_module_only:
            for counter in COUNTERS:
                setattr(self, counter, extra["engine"][counter])
            self._accumulation_steps, self._train_batch_size, self._micro_batch_size, self._passes = extra["sizes"]
            self._scale.load_state_dict(extra["loss_scale"])
        self._losses.clear()
        self._norm, self.loaded_checkpoint_tag = None, name
        return Loaded(str(folder / name), dict(extra["client_state"]))

    def _taken_over(self, folder: Path, *, anew: bool) -> dict[str, Any]:
        """Load a checkpoint that DeepSpeed wrote, or a store that was made of one. Returns what a commit has in ``extra``."""
        optimizer, scheduler = (None, None) if anew else (self.optimizer, self.lr_scheduler)
        sizes = {"passes": self._accumulation_steps, "samples": self._train_batch_size, "micro": self._micro_batch_size}
        if not is_saved(folder):
            return load_imported(folder, self.module, optimizer, scheduler, sizes)
        with SavedCheckpoint(folder) as saved:
            return load_saved(saved, self.module, optimizer, scheduler, sizes)

    def _generation(self, tagged: tags.Tagged, where: Path) -> int:
        """Return the generation of this rank's store that a tag names. Raises MisuseError where it is another store's."""
        if len(tagged.generations) != self.world_size:
            raise MisuseError(
                f"{where} was saved by {len(tagged.generations)} ranks, and there are {self.world_size}: zero.page(source=) "
                "takes over a checkpoint of another number of ranks"
            )
        generation = tagged.generations[self.global_rank]
        said = tags.commit_of(self.store, generation)
        named = said.get(tags.META)
        mine = isinstance(named, Mapping) and named.get("mark") == tagged.mark
        if self._ranks is not None:
            mine = all(shared_json(self._ranks, mine, bool))
        if not mine:
            raise MisuseError(
                f"{where} names generation {generation} of the store in {shown(tagged.store, 300)}, and {self.store} does not "
                "have it: "
                f'open that one ("tiered": {{"path": ...}}), or bring it back'
            )
        budget = said.get(tags.BUDGET)
        if isinstance(budget, Mapping) and dict(budget) != tags.budget_of(self.store):
            raise MisuseError(
                f"{where} was saved with a budget of {dict(budget)}, by which the model is divided, and this store has "
                f'{tags.budget_of(self.store)}: give "tiered" the same'
            )
        return generation

    def _agreed(self, mine: _Saving) -> _Saving:
        """Return what rank 0 says. Raises RankError where another rank saves another tag."""
        if self._ranks is None:
            return mine
        said: list[_Saving] = shared_json(self._ranks, msgspec.to_builtins(mine), _Saving)
        for rank, one in enumerate(said):
            if one.tag != said[0].tag:
                first, other = shown(said[0].tag), shown(one.tag)
                raise RankError(f"rank 0 saves the checkpoint '{first}', and rank {rank} '{other}': use one tag")
        return said[0]

    def _found(self, folder: Path, tag: str | None) -> _Loading:
        """Return what rank 0 finds of a tag. Raises MisuseError on all ranks where that is wrong."""
        mine = _Loading()
        if self.global_rank == 0:
            try:
                mine.tag = (tags.latest(folder) or "") if tag is None else str(tag)
                mine.foreign = is_saved(folder / mine.tag) or (not mine.tag and has_commit(folder))
                mine.tagged = tags.found(folder, mine.tag) if mine.tag and not mine.foreign else None
            except MisuseError as error:
                mine.problem = str(error)
            except OSError as error:
                mine.problem = f"cannot read {error.filename or folder}: {error.strerror}"
        if self._ranks is not None:
            mine = shared_json(self._ranks, msgspec.to_builtins(mine), _Loading)[0]
        if mine.problem:
            raise MisuseError(mine.problem if self.global_rank == 0 else shown(mine.problem, 500))
        return mine

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the parameters and buffers to ``save_dir``, in the types that they have; returns True. All ranks call it.

        A name that ends in ".safetensors" makes safetensors files of them, one unit in memory at a time (``zero.export``). Any
        other is written with ``torch.save``, for which all of them are copied to memory.
        """
        folder = Path(save_dir).expanduser()
        if save_filename.endswith(".safetensors"):
            if exclude_frozen_parameters:
                raise MisuseError("safetensors files have all parameters: leave exclude_frozen_parameters out")
            weights.export(self.module, folder, existing="overwrite")
            return True
        found = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self.global_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(found, folder / save_filename)
        if self._ranks is not None:
            shared_json(self._ranks, True, bool)
        return True

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Do as ``save_16bit_model``."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """Return copies of the model's parameters and buffers, all in memory. All ranks call it."""
        found = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        frozen = {name for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in found.items() if not (exclude_frozen_parameters and name in frozen)}

    def load_module_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load values into the model."""
        self.module.load_state_dict(state_dict, strict=strict)

    # -- the rest ------------------------------------------------------------------------------------------------------------

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **others: Any) -> None:
        """Compile the model in place, as ``module.compile(backend=...)``. Raises MisuseError for DeepCompile's ``schedule``."""
        if others.get("schedule") is not None:
            raise MisuseError("schedule= is for DeepCompile, which moves parameters itself: leave it out")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def empty_partition_cache(self) -> None:
        """Do nothing: parameters are in the store's budget, and a unit is given back after its forward and backward. What is in
        memory is moved to the disk by ``offload_states``."""

    def offload_states(self, include: object = None, device: object = None, **others: object) -> None:
        """Move parameters, gradients and optimizer states out of memory, to the disk: ``zero.offload``. ``include`` and the
        others choose buffers of DeepSpeed's, and are not needed."""
        offload(self.module)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring what ``offload_states`` moved back, as far as it fits: ``zero.onload``. The next step would do so, too."""
        onload(self.module)

    def destroy(self) -> None:
        """Close what the engine opened: its logs and its store. What no checkpoint committed is gone, which the first one
        says. Idempotent."""
        self._monitors.close()
        if self._owned:
            with warnings.catch_warnings(record=True) as dropped:
                warnings.simplefilter("always", UncommittedWarning)
                self.store.close()
            if dropped:
                _tell_dropped()


@functools.cache
def _tell_dropped() -> None:
    """Warn once in a process: a script that destroys many engines knows it from the first."""
    said = "destroy() drops what was trained after the last save_checkpoint, as DeepSpeed does"
    warnings.warn(said, UncommittedWarning, stacklevel=3)


def _packed(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the param groups with numbers in place of parameters, as ``load_state_dict`` takes them."""
    found, first = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        found.append({**group, "params": list(range(first, first + count))})
        first += count
    return found


def several() -> bool:
    """Return whether there are several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _cast(what: Any) -> Any:
    """Return inputs with floating-point tensors in fp16."""
    if isinstance(what, torch.Tensor):
        return what.half() if what.is_floating_point() else what
    if isinstance(what, dict):
        return {key: _cast(value) for key, value in what.items()}
    if isinstance(what, tuple) and hasattr(what, "_fields"):
        return type(what)(*map(_cast, what))
    if isinstance(what, list | tuple):
        return type(what)(map(_cast, what))
    return what
