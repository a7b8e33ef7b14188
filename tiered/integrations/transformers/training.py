"""Train paged models with Hugging Face's ``Trainer``.

An unmodified ``Trainer`` trains a paged model with ``zero.AdamW`` bit for bit as it trains one in memory with
``optim="adamw_torch_fused"``. What this file adds saves memory and time:

- ``TieredTrainer`` commits the store where ``Trainer`` writes a checkpoint, which would copy the state. A commit has all that
  the next step depends on, and the trainer's state in ``extra``. The folder ``checkpoint-N`` names the generation; when asked,
  it also has what ``Trainer`` writes. ``CommitCheckpoints`` does so for other classes that derive from ``Trainer``.
- ``TieredCallback`` commits every so many steps of any ``Trainer``, and writes a report of it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args
from uuid import uuid4

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from tiered import zero
from tiered.errors import MisuseError, expect_type, one_of, shown, whole_number
from tiered.format.foreign.documents import json_of
from tiered.integrations.kept import saved_by
from tiered.integrations.saves import MARK, marks_of
from tiered.reporting.page import page, refuse_foreign, write_page
from tiered.reporting.record import RunRecord
from tiered.store import TieredStore
from tiered.types import VERSION, Owner
from tiered.zero.checkpoint.checkpoint import Training, extra_of
from tiered.zero.checkpoint.exports import sync_all
from tiered.zero.checkpoint.loaders import of_random, random_states
from tiered.zero.checkpoint.safetensors import NOTHING_CHANGED, export_with
from tiered.zero.checkpoint.torch_writer import mapped, save_optimizer
from tiered.zero.paging.pager import Pager, StateListing, pager_of
from tiered.zero.rules.known import OPTIMIZERS

__all__ = ["CommitCheckpoints", "TieredCallback", "TieredTrainer"]

# -- commits -------------------------------------------------------------------------------------------------------------------

OURS, STATE = "tiered.json", "trainer_state.json"
"""Files of a checkpoint's folder: which generation it is, and Trainer's state, which is written once the others are there."""
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
WITH_VALUES = (".safetensors", ".pt", ".pth", ".bin")
"""Ends of the names of Trainer's files that have values of a training."""
Checkpoints = Literal["commits", "model", "whole"]
"""What a checkpoint's folder has beside the number of a generation: nothing, the model, or all that Trainer writes."""
OF_TORCH = ("sgd", "adagrad", "rmsprop")
"""Of Trainer's ``optim``: classes of torch's of which ``tiered.zero`` has one of the same name."""
ADAM_LIKE: dict[str, type[zero.Optimizer]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"), zero.AdamW),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), zero.AdamW8bit),
    "adamw_torch_4bit": zero.AdamW4bit,
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), zero.Lion),
}
"""Of Trainer's ``optim``: the optimizer that has the same algorithm and takes Trainer's Adam arguments. "Paged" ones of Trainer
keep their states in host memory, as a store does."""


def _commit(model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, state: str, step: int, mark: str = "") -> int:
    """Commit a training with the trainer's ``state``, which is JSON. Returns the generation. ``mark``: of the checkpoint's
    folder, where there is one.

    Updates that are pending are applied before, so that evaluation and exports afterwards change nothing: then the commit that
    ends the store's ``with`` block is one to continue from, too.
    """
    ours = _ours(optimizer)
    ours.flush()
    return zero.commit(
        model,
        ours,
        scheduler=scheduler,
        scaler=scaler,
        extra=_extra(state, step),
        meta={"step": step, MARK: mark} if mark else {"step": step},
    )


def _extra(state: str, step: int) -> dict[str, Any]:
    return {"transformers": {"state": state, "step": step}}


def _written(state: Any) -> str:
    """Return a trainer's state as the JSON that Trainer writes to a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, STATE)
        state.save_to_json(file)
        return Path(file).read_text()


def _ours(optimizer: Any) -> zero.Optimizer:
    """Return the optimizer that Accelerate has wrapped."""
    while not isinstance(optimizer, zero.Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, zero.Optimizer):
        name = type(optimizer).__name__
        raise MisuseError(f"{name}: a commit has the state of an optimizer of tiered.zero, so train with one, as zero.AdamW")
    return optimizer


def _pager(model: nn.Module) -> Pager:
    """Return the pager of a model. Raises MisuseError where not all of its parameters are paged, by one call of zero.page."""
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "_tiered"):
            if ".ref." in name:  # of trl: a copy of the adapter, which on resuming would be one of the trained adapter
                raise MisuseError(
                    f"parameter {name!r} is of a reference adapter that DPOTrainer has added to a paged model: page the base "
                    "model only, and give peft_config= to a DPOTrainer without commits"
                )
            raise MisuseError(
                f"parameter {name!r} is not paged, so the trainer's optimizer would not have it: call zero.page on the whole "
                "model, after peft.get_peft_model, resize_token_embeddings and the like"
            )
    return pager_of(model)


class PlannedStep(Protocol):
    """What a plan predicted: a ``tiered.Plan``."""

    def of_step(self) -> dict[str, Any] | None:
        """Return the predictions of one step, by name; None where the model does not fit."""


class TieredCallback(TrainerCallback):
    """Commit every ``steps`` steps of any ``Trainer``. ``TieredTrainer.train(resume_from_checkpoint=True)`` goes on from there.

    A commit writes only what changed since the last, and has the trainer's state. Give ``save_strategy="no"`` where ordinary
    checkpoints, which copy the state, are not wanted. ``steps`` None: no commits.

    ``report``: an HTML file that shows the training when it has ended: losses that Trainer logs, memory, drive, waiting, and
    the timeline of some steps; ``plan``: a ``tiered.Plan`` to set beside what was measured.
    """

    def __init__(
        self, steps: int | None = None, *, report: str | os.PathLike[str] | None = None, plan: PlannedStep | None = None
    ) -> None:
        if steps is not None:
            whole_number("steps is how many steps lie between two commits", steps)
        if steps is None and report is None:
            raise MisuseError("TieredCallback does nothing without steps=, to commit, or report=, to write a page")
        if plan is not None and report is None:
            raise MisuseError("plan= is for the page of report=: give both")
        if report is not None:
            refuse_foreign(report)
        self.steps, self._report, self._plan = steps, report, plan
        self._record: RunRecord | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        _pager(given["model"])
        _ours(given["optimizer"])
        if args.fp16 and self.steps is not None:
            raise MisuseError("fp16 has a loss scale, which a callback does not see: use TieredTrainer, or bf16")
        if self._report is not None:
            model = given["model"]
            store = _pager(model).store
            self._record = RunRecord(store, lambda: zero.statistics(model).update_seconds, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._record is not None and not self._record.begun:
            self._record.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if self._record is not None and logs is not None and "loss" in logs:
            self._record.lost(state.global_step, float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        record, self._record = self._record, None
        if record is None or self._report is None:
            return
        record.close()
        pager = _pager(given["model"])
        found = zero.statistics(given["model"]).plan
        parameters = sum(parameter.numel() for parameter in given["model"].parameters())
        run = record.as_json() | {
            "tiered": VERSION,
            "model": f"{type(given['model']).__name__} of {parameters:,} parameters",
            "peak_rss_bytes": psutil.Process().memory_info().rss,
            "plan": None if found is None else asdict(found),
            "predicted": None if self._plan is None else self._plan.of_step(),
            "arguments": {name: value for name, value in args.to_dict().items() if isinstance(value, str | int | float)},
            "statistics": str(pager.store.statistics()).splitlines(),
        }  # fmt: skip
        if record.steps:
            write_page(self._report, page(run))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._record is not None:
            self._record.stepped(state.global_step)
        if self.steps is not None and state.global_step % self.steps == 0:
            _commit(given["model"], given["optimizer"], given["lr_scheduler"], None, _written(state), state.global_step)


class CommitCheckpoints:
    """Mixin that makes the checkpoints of a ``Trainer`` commits: ``class Mine(CommitCheckpoints, SFTTrainer): pass``.

    - The model is paged as a whole (``zero.page``, after ``peft.get_peft_model``). The optimizer is that of ``tiered.zero``
      which ``TrainingArguments(optim=)`` names, with its values, unless another ``zero.Optimizer`` is given.
    - ``checkpoint-N`` in the output folder has Trainer's state and the number of a generation of the store. As many stay as
      ``save_total_limit`` says; without it, as many as the store was opened with (``keep=``). The best one stays, too. Commits
      that others make in the store stay as long as they ask for.
    - Such a folder is of use only beside its store. With ``checkpoints="whole"`` it has, beside the commit, the files that
      ``Trainer`` writes: it can be copied alone, and ``Trainer`` resumes from it in memory, as this class does in a store that
      does not have the commit. With ``checkpoints="model"`` it has the model without the optimizer, which nothing resumes from.
      Weights are written a unit at a time, states of the optimizer a parameter at a time. A folder with files stays when its
      generation is dropped, until ``save_total_limit`` ends it. ``trainer_state.json`` is the last of the files: a folder
      without it is half written.
    - ``train(resume_from_checkpoint=True)`` goes on from the newest commit, and a folder from its generation, bit for bit.
      Page the model with ``existing="resume"`` in a new process. Ordinary checkpoints can be resumed from, too.
    - ``load_best_model_at_end`` goes back to the best commit, with optimizer and scheduler.
    - ``save_model`` writes safetensors files with ``zero.export``, of an adapter only its own parameters.
      ``save_only_model=True`` does so in each checkpoint, in place of commits.

    Raises MisuseError for a model that is not paged as a whole, for options that would convert it, for several processes, and
    where what is resumed from is not whole, or only names a commit that the store does not have.
    """

    def __init__(self, *given: Any, checkpoints: Checkpoints = "commits", **options: Any) -> None:
        model = options.get("model", given[0] if given else None)
        expect_type(model, nn.Module | None, "the model of a trainer is a torch.nn.Module")
        super().__init__(*given, **options)
        self._begin(checkpoints)

    @classmethod
    def adopt(cls, trainer: Any, *, checkpoints: Checkpoints = "commits") -> None:
        """Make the checkpoints of a trainer commits that another program has made, of whatever class."""
        expect_type(trainer, Trainer, "what is adopted is a transformers.Trainer")
        kind = type(trainer)
        trainer.__class__ = type(kind.__name__, (cls, kind), {})
        trainer._begin(checkpoints)

    def _begin(self, checkpoints: Checkpoints) -> None:
        """Refuse what cannot be."""
        this: Any = self
        one_of("checkpoints", checkpoints, get_args(Checkpoints))
        if this.args.save_only_model and checkpoints != "commits":
            raise MisuseError("save_only_model=True has the model in place of commits: leave it out, or checkpoints=")
        self._checkpoints = checkpoints
        self._random: dict[str, Any] | None = None
        _pager(this.model)
        if this.args.world_size > 1:
            raise MisuseError("checkpoints of several processes are not commits yet: use Trainer, and TieredCallback on each")
        if this.args.fp16_full_eval or this.args.bf16_full_eval:
            raise MisuseError("fp16_full_eval and bf16_full_eval convert the model, which is paged: use bf16=True for autocast")

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move nothing: a paged model computes where the store's top tier is."""
        there = _pager(model).store.device
        if device.type != there.type:
            raise MisuseError(
                f"Trainer computes on {device}, and the store's top tier is on {there}: open the store with hbm=, or give "
                "TrainingArguments(use_cpu=True)"
            )

    # -- the optimizer -----------------------------------------------------------------------------------------------------

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[type, dict[str, Any]]:
        """Return the optimizer of ``tiered.zero`` for a trainer that was given none; groups and arguments are Trainer's."""
        name = getattr(args.optim, "value", args.optim)
        if name in ADAM_LIKE:
            kind = ADAM_LIKE[name]
            given = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
            return kind, given if kind is zero.Lion else {**given, "eps": args.adam_epsilon}
        if name in OF_TORCH:
            kind, given = Trainer.get_optimizer_cls_and_kwargs(args, model)
            kernel = {"fused": False} if OPTIMIZERS[kind.__name__].takes_fused else {}  # as Trainer makes torch's
            return getattr(zero, kind.__name__), {**given, **kernel}
        others = ", ".join(map(repr, (*OF_TORCH, "adamw_8bit", "adamw_torch_4bit", "lion_32bit")))
        raise MisuseError(
            f"optim={name}: what updates paged parameters is an optimizer of tiered.zero: give optim='adamw_torch_fused' (or "
            f"{others}), or make one and give it to Trainer (optimizers=)"
        )

    # -- saving ------------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model to ``output_dir`` as safetensors files, with one unit in memory at a time."""
        this: Any = self
        folder = this.args.output_dir if output_dir is None else output_dir
        if _internal_call and not this.args.save_only_model and self._checkpoints == "commits":
            os.makedirs(folder, exist_ok=True)  # of a checkpoint, which is a commit
            return
        super().save_model(folder, _internal_call)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """Called by ``save_model``."""
        this: Any = self
        folder = this.args.output_dir if output_dir is None else output_dir
        model = this.model
        if hasattr(model, "peft_type"):
            super()._save(folder, _Values(model) if state_dict is None else state_dict)  # type: ignore[misc]
            return
        os.makedirs(folder, exist_ok=True)
        processing = this.processing_class or getattr(this.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        beside: dict[str, bytes] = {}
        if isinstance(model, PreTrainedModel):
            model.config.architectures, model.config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
            beside = saved_by(model.config, model.generation_config if model.can_generate() else None)
        export_with(model, folder, NOTHING_CHANGED, beside=beside, existing="overwrite")
        torch.save(this.args, os.path.join(folder, "training_args.bin"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        this: Any = self
        run, store = Path(this._get_output_dir(trial=trial)), pager_of(this.model).store
        before, folder = _generations(run, store), run / f"checkpoint-{this.state.global_step}"
        _remove(folder)  # of an earlier training: its files are not those of this one
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]  # the folder, with Trainer's state; drops older ones
        except BaseException:
            if not (folder / STATE).exists():
                _remove(folder)
            raise
        if this.args.save_only_model:
            return
        best = this.state.best_model_checkpoint
        there = {older: number for older, number in _generations(run, store).items() if older != folder}
        if this.args.save_total_limit:
            wanted = set(there.values())
            given_up = set(before.values()) - wanted
        else:
            wanted, given_up = {number for older, number in there.items() if best is not None and older == Path(best)}, set()
        owner = Owner("trainer", str(run.absolute()))
        store.retain(owner=owner, also=wanted, drop=given_up)
        optimizer, scheduler, scaler, mark = this.optimizer, this.lr_scheduler, this.accelerator.scaler, uuid4().hex
        number = _commit(this.model, optimizer, scheduler, scaler, (folder / STATE).read_text(), this.state.global_step, mark)
        _write(folder, store, number, mark)
        if this.args.save_total_limit or best == str(folder):
            store.retain(owner=owner, also=[*wanted, number])  # whoever commits next
        for older, generation in there.items():
            if generation not in store.generations and not _files(older):
                _remove(older)

    # What the commit has; in files only when asked.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        this: Any = self
        if self._checkpoints == "whole":
            save_optimizer(_ours(this.optimizer), os.path.join(output_dir, OPTIMIZER))
            torch.save(this.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _save_scaler(self, output_dir: str) -> None:
        if self._checkpoints == "whole":
            super()._save_scaler(output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        """Called before Trainer's state is written."""
        if self._checkpoints == "whole":
            super()._save_rng_state(output_dir)  # type: ignore[misc]
        sync_all(Path(output_dir))

    # -- loading -----------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **options: Any) -> Any:
        """Train, as in Trainer; ``resume_from_checkpoint=True`` goes on from the newest commit."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest()
        this: Any = self
        pager = _pager(this.model)
        if not any(parameter.requires_grad for parameter in this.model.parameters()):
            for unit in pager.units:
                unit.plan.refuse_writing()
            raise MisuseError("no parameter of this model needs a gradient, so nothing would be trained: requires_grad_(True)")
        self._leave_extra(pager)
        try:
            return super().train(resume_from_checkpoint, *given, **options)  # type: ignore[misc]
        finally:
            if this.optimizer is not None and (pager.given is None or not pager.given[2]):
                # What the commit at the end of the store's block has, where no checkpoint was saved.
                ours, extra = _ours(this.optimizer), None
                with suppress(TypeError):  # a callback has logged what JSON does not have
                    extra = _extra(_written(this.state), this.state.global_step)
                steps = dict(ours.steps)
                training = Training(
                    ours, this.lr_scheduler, this.accelerator.scaler, extra=lambda: extra if ours.steps == steps else None
                )
                pager.given = this.model, training, False

    @staticmethod
    def _leave_extra(pager: Pager) -> None:
        """Have the end of the store's block commit what is trained from here on, though the last commit has an ``extra``: that
        of an end before, and of no checkpoint, whose meta says which one it is."""
        if pager.given is not None and not pager.store.meta:
            pager.given = *pager.given[:2], False

    def _newest(self) -> str | bool:
        """Return the folder of the newest commit, which is written anew from what the commit has. True: there is none."""
        this: Any = self
        pager, run = pager_of(this.model), Path(this.args.output_dir)
        if f"{pager.name}/checkpoint" in pager.store:  # nothing has changed since
            found = (extra_of(pager.store, pager.name) or {}).get("transformers")
            if found is None:
                raise MisuseError(
                    f"the last commit of {pager.store} has no state of a Trainer: zero.commit made it, or store.commit. For "
                    "new steps with its optimizer: zero.resume(model, trainer.create_optimizer()), with what else the commit "
                    "has, and then trainer.train()"
                )
            folder, number = run / f"checkpoint-{found['step']}", pager.store.generation
            if not (folder / STATE).exists():
                _remove(folder)  # half written
            elif _files(folder) and (folder / STATE).read_text() != found["state"]:
                raise MisuseError(
                    f"{folder} is a checkpoint of another training than the last commit of {pager.store}: name another "
                    "output_dir, or the folder of a checkpoint to resume from"
                )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / STATE).write_text(found["state"])
            _write(folder, pager.store, number, str(pager.store.meta.get(MARK, "")))
            return str(folder)
        there = {number: folder for folder, number in _generations(run, pager.store).items()}
        if not there:  # the newest that is not half written
            whole = {path.parent.name.removeprefix("checkpoint-"): path.parent for path in run.glob(f"checkpoint-*/{STATE}")}
            there = {int(step): folder for step, folder in whole.items() if step.isdecimal()}
        return str(there[max(there)]) if there else True

    def _commit_of(self, checkpoint: str | None) -> int | None:
        """Return which generation of the model's store a checkpoint's folder is. None: its files are to be read, which are
        whole. Raises MisuseError where it can be neither."""
        this: Any = self
        named = None if checkpoint is None else _named(checkpoint)
        if checkpoint is None or named is None:
            return None
        store = pager_of(this.model).store
        kept = marks_of(store)
        if kept.get(named.generation) == named.mark:
            return named.generation
        lacking = [name for name, nbytes in named.files.items() if _size(Path(checkpoint, name)) != nbytes]
        if lacking:
            raise MisuseError(f"{checkpoint} is not whole: {', '.join(lacking)} is not there as it was written: copy it again")
        if named.files:
            return None
        why = (
            f"generation {named.generation} is not there any more: of {store}, {list(kept)} are"
            if named.generation not in kept
            else f"generation {named.generation} of {store} is of another training than this checkpoint"
        )
        raise MisuseError(
            f"{why}. {checkpoint} only names that commit, of the store {named.store}: copy and open that store, too, or write "
            "checkpoints that can be copied alone, with checkpoints='whole' for the trainer"
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *given: Any, **options: Any) -> None:
        if self._commit_of(resume_from_checkpoint) is not None:
            return
        folder = Path(resume_from_checkpoint)
        lacking = [name for name in (STATE, OPTIMIZER, SCHEDULER) if not (folder / name).exists()]
        if lacking and _files(folder):  # Trainer would go on with new states of the optimizer
            raise MisuseError(
                f"{folder} has no {lacking[0]}, so training cannot go on from it: it is half written, or has only the model "
                "(checkpoints='model', save_only_model=True): begin a training with its model, or resume from one that was "
                "written with checkpoints='whole'"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, *given, **options)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        this: Any = self
        number = self._commit_of(checkpoint)
        if number is not None:
            self._random = self._go_back(number)
        elif checkpoint is not None:
            _ours(this.optimizer).load_state_dict(mapped(os.path.join(checkpoint, OPTIMIZER)))
            this.lr_scheduler.load_state_dict(mapped(os.path.join(checkpoint, SCHEDULER)))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._commit_of(checkpoint) is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called once the data of the steps that are done was skipped, which draws random numbers."""
        if self._commit_of(checkpoint) is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif self._random is not None:
            of_random(self._random).load()

    def _load_best_model(self) -> None:
        this: Any = self
        number = self._commit_of(this.state.best_model_checkpoint)
        if number is None:
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._go_back(number)

    def _go_back(self, number: int) -> dict[str, Any]:
        """Restore a generation, but for the random generators, whose states are returned."""
        this: Any = self
        before = random_states()
        zero.rollback(
            this.model, _ours(this.optimizer), scheduler=this.lr_scheduler, scaler=this.accelerator.scaler, generation=number
        )
        there = random_states()
        of_random(before).load()
        self._leave_extra(pager_of(this.model))
        return there


class TieredTrainer(CommitCheckpoints, Trainer):
    """``transformers.Trainer`` for a model that went through ``zero.page``, whose checkpoints are commits: see
    ``CommitCheckpoints``."""


@dataclass(frozen=True)
class _Named:
    """The commit that a checkpoint's folder names, and the bytes of its files with values, by name."""

    store: str
    generation: int
    mark: str
    files: dict[str, int]


def _write(folder: Path, store: TieredStore, number: int, mark: str) -> None:
    """Write which commit a checkpoint's folder is, and which files it has."""
    part = folder / f"{OURS}.tmp"
    part.write_text(json.dumps(asdict(_Named(store.folder, number, mark, _files(folder)))))
    part.replace(folder / OURS)


def _named(folder: str | os.PathLike[str]) -> _Named | None:
    """Return which commit a checkpoint's folder names; the mark is empty in those of older versions. None where it is an
    ordinary one."""
    path = Path(folder, OURS)
    if not path.exists():
        return None
    found = json_of(path)
    files = found.get("files", {}) if isinstance(found, dict) else None
    if not isinstance(found, dict) or type(found.get("generation")) is not int or not isinstance(files, dict):
        raise MisuseError(f"{shown(str(path), 1000)} is damaged: it does not say which commit it is")
    return _Named(str(found.get("store")), found["generation"], str(found.get("mark", "")), files)


def _files(folder: Path) -> dict[str, int]:
    """Return the bytes of the files in a checkpoint's folder that have values, by name."""
    there = sorted(path for path in folder.rglob("*") if path.suffix in WITH_VALUES and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.stat().st_size for path in there}


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _remove(folder: Path) -> None:
    """Delete a checkpoint's folder: first what makes it one, so that a part of it is none."""
    for name in (STATE, OURS):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _generations(run: Path, store: TieredStore) -> dict[Path, int]:
    """Return the checkpoints in the output folder of a training that are commits of ``store``, and their generations. Those of
    another store, and of another training in this one, are left out: they may have the same numbers."""
    named = {folder: _named(folder) for folder in run.glob("checkpoint-*")}
    kept = marks_of(store)
    return {
        folder: found.generation
        for folder, found in named.items()
        if found is not None and kept.get(found.generation) == found.mark
    }


class _Values(Mapping[str, Any]):
    """Values of the ``state_dict`` of a ``PeftModel``, each copied when it is asked for. peft goes over all of them, and keeps
    those of its adapters: the others have no values here, or the whole base would be in memory."""

    def __init__(self, model: Any) -> None:
        self._listed: Mapping[str, Any] = model.state_dict(destination=StateListing(), keep_vars=True)
        self._empty = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value
            for name, value in self._listed.items()
        }
        self._kept = self._of_adapters(model)

    def _of_adapters(self, model: Any) -> set[str]:
        """Return the names whose values peft keeps, as it says itself: it is shown tensors without values."""
        from peft import get_peft_model_state_dict

        names, kept = {id(value): name for name, value in self._empty.items()}, set[str]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says them again when it saves
            found = [
                value
                for adapter in model.peft_config
                for value in get_peft_model_state_dict(model, state_dict=self._empty, adapter_name=adapter).values()
            ]
        kept |= {names[id(value)] for value in found if id(value) in names}
        if any(id(value) not in names for value in found):  # it computes with values, as for AdaLoRA
            prefix = getattr(model.base_model, "prefix", "lora_")
            kept |= {name for name, value in self._listed.items() if getattr(value, "requires_grad", True) or prefix in name}
        return kept

    def __getitem__(self, name: str) -> Any:
        if name not in self._kept:
            return self._empty[name]
        value = self._listed[name]
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)
