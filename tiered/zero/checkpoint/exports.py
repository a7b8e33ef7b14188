"""Write a checkpoint of a store that is not open in the formats of other programs: torch.distributed.checkpoint, and
DeepSpeed's universal checkpoints. One parameter and the states of its unit are in memory at a time.

The universal format (from https://github.com/deepspeedai/DeepSpeed, ``ds_to_universal.py`` and the ZeRO optimizers):
``TAG/zero/PARAMETER/fp32.pt``, ``exp_avg.pt`` and so on hold ``{"param": tensor}``, ``step.pt`` a number,
``TAG/zero/optimizer_state.pt`` param groups, ``TAG/mp_rank_00_model_states.pt`` (stage 3: ``zero_pp_rank_0_…``) counters,
the scheduler and what the caller added, and ``latest_universal`` the tag.

In torch.distributed.checkpoint's format the keys are those of ``torch.distributed.checkpoint.state_dict``: ``model.NAME``,
``optimizer.state.NAME.STATE``, ``optimizer.param_groups``.
"""

from __future__ import annotations

import inspect
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tiered.errors import CapacityError, MisuseError, TieredError, shown
from tiered.zero.checkpoint.reshard import CheckpointSource, opened
from tiered.zero.checkpoint.safetensors import models_in, refuse_older
from tiered.zero.record import in_memory, states_used
from tiered.zero.rules.exact import AdamRule, AdamWRule
from tiered.zero.rules.known import class_in, name_in

__all__ = ["Exported", "export_dcp", "export_universal", "sync_all"]

VERSION = "0.19.8"
"""The version of DeepSpeed whose universal checkpoints these are."""
Progress = Callable[[int, int], None]


class Exported:
    """The last checkpoint of a model, of one process or of all ranks: what there is of each parameter, under torch's names."""

    def __init__(
        self, path: str | os.PathLike[str], model: str | None, stack: ExitStack, generation: int | None = None
    ) -> None:
        """Open it. Raises MisuseError where there is no such model, ManifestError where it is damaged."""
        stores = opened(path, stack, generation)
        there = models_in(stores[0])
        if model is None and len(there) != 1:
            several = f"several models ({', '.join(there)}): name one"
            has = several if there else "no checkpoint of a model: zero.commit makes one"
            raise MisuseError(f"{stores[0]} has {has}")
        self._source = CheckpointSource(stores, model if model is not None else there[0], average=False)
        if len(stores) == 1:
            refuse_older(stores[0], self._source.name, self._source.units)
        self.record = self._source.records[0]
        units = self.record["units"]
        self._states = {name: kinds for unit in units for name, kinds in states_used(unit).items()}
        optimizer = self.record["optimizer"]
        self.groups: Sequence[Mapping[str, Any]] = [] if optimizer is None else optimizer["groups"]
        steps = {} if optimizer is None else optimizer["steps"]
        self._rules = {name: class_in(group) for group in self.groups for name in group["names"]}
        self.names = self._source.order
        self.steps = {name: steps[part] for name in self.names if steps.get(part := self._source.first_part(name))}
        self.buffers = in_memory(self.record)

    def described(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return the shape of a parameter, and the type that the model has it in."""
        shape, dtype, _ = self._source.described(name)
        return shape, dtype

    def value(self, name: str) -> torch.Tensor:
        """Return a parameter as the model has it."""
        found = self._source.whole(name, "param")
        assert found is not None, "each parameter has values"
        return found.contiguous()

    def master(self, name: str) -> torch.Tensor:
        """Return a parameter in fp32: its master, where it has one."""
        found = self._source.whole(name, "master") if name in self.steps else None
        return (self.value(name) if found is None else found).float().contiguous()

    def states_of(self, name: str) -> dict[str, str]:
        """Return the states of a parameter that was updated: torch's names, and ours."""
        if name not in self.steps or name not in self._rules:
            return {}
        kinds = self._states.get(self._source.first_part(name), {"m": None, "v": None})
        names: dict[str, str] = {}
        rule = self._rules[name]
        for kind in kinds:
            names[getattr(rule, "torch_names", {}).get(kind, kind)] = kind
        return names

    def is_of_adam(self, name: str) -> bool:
        """Return whether a parameter is updated by Adam or AdamW, with moments in fp32."""
        return self._rules.get(name) in (AdamWRule, AdamRule)

    def type_of(self, name: str, kind: str) -> torch.dtype:
        """Return the type of a parameter's state, by our name of it."""
        form = self._states.get(self._source.first_part(name), {}).get(kind)
        if form is not None:
            return form.dtype
        return torch.float64 if self._source.described(name)[2] is torch.float64 else torch.float32

    def refuse_blocks(self, name: str, kind: str) -> None:
        """Raise MisuseError for a state that has not one value for each element."""
        form = self._states.get(self._source.first_part(name), {}).get(kind)
        if form is not None and not form.elementwise:
            raise MisuseError(
                f"{name!r} keeps {kind!r} as {form}, which torch-dcp has no place for: export safetensors, which have the "
                "values, and save what the optimizer's state_dict() returns, or float_state_dict() of one with codes"
            )

    def state(self, name: str, kind: str) -> torch.Tensor:
        """Return a state of a parameter, by our name of it."""
        found = self._source.whole(name, kind)
        if found is None:
            raise MisuseError(f"{name!r} has had {self.steps[name]} steps, and no {kind!r} in the store: the commit is damaged")
        return found.contiguous()

    def settings(self) -> list[dict[str, Any]]:
        """Return the param groups as torch's class has them, with the names of their parameters under "params"."""
        found = []
        for group in self.groups:
            kind = getattr(torch.optim, name_in(group).removesuffix("Rule"), None)
            some = [torch.zeros(1, 1, dtype=torch.float32, device="cpu")]  # Muon takes nothing but matrices
            usual = {} if kind is None else kind(some).defaults
            known = {key: value for key, value in group.items() if key not in ("names", "rule")}
            kernel = {"fused": True} if class_in(group) is AdamWRule else {}  # whose bits its steps are
            found.append({**usual, **known, **kernel, "params": list(group["names"])})
        return found


def export_universal(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    model: str | None = None,
    generation: int | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the last checkpoint of a model as one that DeepSpeed loads with ``"checkpoint": {"load_universal": true}``, with
    any number of ranks, and stages 1 to 3. Returns the files of ``folder``, which must not exist.

    The loss scale of fp16 is not in it; DeepSpeed begins with that of its configuration. DeepSpeed 0.19.8 reads from such a
    checkpoint neither buffers nor parameters that are not trained: they are in the module of the model's file. It wants the
    moments of Adam, of which each parameter must have had as many steps; those of stage 3 all get the settings of the first
    group. Raises MisuseError for an optimizer without these, or without any, and as ``Exported``.
    """
    with ExitStack() as stack:
        found = Exported(path, model, stack, generation)
        trained = [name for group in found.groups for name in group["names"] if name in found.steps]
        for name in trained:
            if not found.is_of_adam(name) or not {"exp_avg", "exp_avg_sq"} <= found.states_of(name).keys():
                raise MisuseError(f"{name!r} was not updated by Adam, whose moments DeepSpeed's universal checkpoints have")
            _refuse_outside(name)
        if not trained or len({found.steps[name] for name in trained}) > 1:
            what = "no parameter was updated" if not trained else "parameters have had different numbers of steps"
            raise MisuseError(f"{what}, which DeepSpeed's universal checkpoints do not have: export as torch-dcp")
        with _made(folder) as there:
            _write_universal(found, trained, there, progress or (lambda done, total: None))
        return sorted(entry.name for entry in Path(folder).iterdir())


def _refuse_outside(name: str) -> None:
    """Raise MisuseError for the name of a parameter that does not name a folder below another one. Names come from checkpoints
    that others wrote."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise MisuseError(
            f"{shown(repr(name), 100)} is no name for a folder, and a universal checkpoint has one for each parameter: export "
            "as torch-dcp"
        )


def _write_universal(found: Exported, trained: Sequence[str], there: Path, progress: Progress) -> None:
    extra: Mapping[str, Any] = found.record["extra"] or {}
    engine = extra.get("engine")
    counters: Mapping[str, Any] = engine if isinstance(engine, dict) else {}
    step = found.steps[trained[0]]
    tag = f"global_step{counters.get('global_steps', step)}"
    total = sum(found.described(name)[0].numel() for name in trained)
    done = 0
    for name in trained:
        inside = there / tag / "zero" / name
        inside.mkdir(parents=True)
        _save({"param": found.master(name)}, inside / "fp32.pt")
        for theirs, kind in found.states_of(name).items():
            _save({"param": found.state(name, kind)}, inside / f"{theirs}.pt")
        _save(step, inside / "step.pt")
        done += found.described(name)[0].numel()
        progress(done, total)
    groups = [{**group, "params": [index]} for index, group in enumerate(found.settings())]
    base = {"state": {0: {"step": step}}, "param_groups": groups}
    common: dict[str, Any] = {"zero_stage": 1, "partition_count": 1, "ds_version": VERSION}
    common |= {"param_groups": groups, "optimizer_state_dict": base}
    _save(common, there / tag / "zero" / "optimizer_state.pt")
    frozen = {name: found.value(name) for name in found.names if name not in trained}
    states = {
        **{str(key): value for key, value in (extra.get("client_state") or {}).items()},
        "module": {**frozen, **found.buffers},
        "buffer_names": list(found.buffers),
        "optimizer": None,
        "param_shapes": [{name: found.described(name)[0] for name in group["names"]} for group in found.groups],
        "frozen_param_shapes": {name: value.shape for name, value in frozen.items()},
        "frozen_param_fragments": frozen,
        "shared_params": {},
        "lr_scheduler": _iteration(found.record["scheduler"], extra),
        "skipped_steps": counters.get("skipped_steps", 0),
        "global_steps": counters.get("global_steps", step),
        "global_samples": counters.get("global_samples", 0),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        _save(states, there / tag / name)
    (there / "latest_universal").write_text(tag)


def _iteration(scheduler: Any, extra: Mapping[str, Any]) -> Any:
    """Return the state that a scheduler of DeepSpeed's loads."""
    if isinstance(scheduler, dict) and isinstance(scheduler.get("last_epoch"), int):
        return {**scheduler, "last_batch_iteration": scheduler["last_epoch"] - 1}
    return extra.get("lr_scheduler") if scheduler is None else scheduler


def export_dcp(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    model: str | None = None,
    generation: int | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the last checkpoint of a model as a folder that ``torch.distributed.checkpoint.load`` reads, with any number of
    ranks: parameters, buffers, and the optimizer's states and param groups, under the keys of
    ``torch.distributed.checkpoint.state_dict``. fp32 masters are states named "master". Returns the files of ``folder``, which
    must not exist. Raises MisuseError, and as ``Exported``.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    save: Any = state_dict_saver.save
    if "no_dist" not in inspect.signature(save).parameters:  # torch 2.6, whose function would have all ranks write one
        save = state_dict_saver._save_state_dict
    with ExitStack() as stack:
        found = Exported(path, model, stack, generation)
        model_part: dict[str, Any] = {}
        states: dict[str, dict[str, Any]] = {}
        made: dict[str, Callable[[], torch.Tensor]] = {}
        for name in found.names:
            shape, dtype = found.described(name)
            model_part[name] = torch.empty(shape, dtype=dtype, device="meta")
            made[f"model.{name}"] = lambda name=name: found.value(name)  # type: ignore[misc]
            for theirs, kind in found.states_of(name).items():
                found.refuse_blocks(name, kind)
                states.setdefault(name, {})[theirs] = torch.empty(shape, dtype=found.type_of(name, kind), device="meta")
                made[f"optimizer.state.{name}.{theirs}"] = lambda name=name, kind=kind: found.state(name, kind)  # type: ignore[misc]
            if name in found.steps:
                states.setdefault(name, {})["step"] = torch.tensor(float(found.steps[name]), dtype=torch.float32, device="cpu")
                if dtype in (torch.bfloat16, torch.float16):
                    states[name]["master"] = torch.empty(shape, dtype=torch.float32, device="meta")
                    made[f"optimizer.state.{name}.master"] = lambda name=name: found.master(name)  # type: ignore[misc]
        described: dict[str, Any] = {"model": {**model_part, **found.buffers}}
        if found.groups:
            described["optimizer"] = {"state": states, "param_groups": found.settings()}
        planner = _planner(made, progress or (lambda done, total: None), _size(described))
        with _made(folder) as there, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is one process
            save(described, storage_writer=FileSystemWriter(there), planner=planner, no_dist=True)
        return sorted(entry.name for entry in Path(folder).iterdir())


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _planner(made: Mapping[str, Callable[[], torch.Tensor]], progress: Progress, total: int) -> Any:
    """Return a planner that reads each tensor when it is written."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Reading(DefaultSavePlanner):
        done = 0

        def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
            make = made.get(write_item.index.fqn)
            found: Any = super().resolve_data(write_item) if make is None else make()
            self.done += _size(found)
            progress(self.done, total)
            return found  # type: ignore[no-any-return]

    return Reading()


# Files


@contextmanager
def _made(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a folder beside ``folder``, which gets that name when all in it is on the disk; after an error nothing stays. Raises
    MisuseError where ``folder`` is there already, CapacityError where there is no room."""
    goal = Path(os.path.expanduser(folder)).absolute()
    if goal.exists() and (not goal.is_dir() or any(goal.iterdir())):
        raise MisuseError(f"{goal} is there already: name another folder")
    part = goal.with_name(f".{goal.name}.tiered-part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        sync_all(part)
        with suppress(FileNotFoundError):
            goal.rmdir()
        part.rename(goal)
        _sync(goal.parent)
    except OSError as error:
        if error.errno in (28, 122, 27):
            raise CapacityError(f"no room in {goal.parent} ({error.strerror}); nothing was left there") from error
        raise TieredError(f"cannot write {error.filename or goal}: {error.strerror}; name another folder") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync_all(folder: Path) -> None:
    """Have all files and folders below ``folder`` on the disk. Raises OSError."""
    for where, _, names in os.walk(folder):
        for name in (*names, "."):
            _sync(Path(where) / name)


def _sync(path: Path) -> None:
    opened_file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened_file)
    finally:
        os.close(opened_file)


def _save(value: Any, path: Path) -> None:
    torch.save(value, path)
