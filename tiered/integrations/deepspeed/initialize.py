"""``zero.initialize`` and ``zero.Init``: open the store that a configuration says, page the model, and make its engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tiered.errors import ManifestError, MisuseError, expect_type
from tiered.integrations.deepspeed import optimizers
from tiered.integrations.deepspeed.config import Config, Place, place_of, summed, told
from tiered.integrations.deepspeed.engine import Engine, several
from tiered.integrations.deepspeed.saved import NARROW
from tiered.integrations.deepspeed.schedules import scheduler_of
from tiered.integrations.deepspeed.tags import BUDGET, budget_of
from tiered.store import TieredStore
from tiered.store.at_rest import listing
from tiered.system import headroom
from tiered.tensors.specs import FLOATS, expect_dtype
from tiered.types import format_size
from tiered.zero.collectives import Ranks, Term
from tiered.zero.construction.construct import init
from tiered.zero.construction.staging import find
from tiered.zero.optimizers.optimizer import Optimizer
from tiered.zero.page import page
from tiered.zero.paging.pager import Paging, pager_of_parameter
from tiered.zero.paging.sharding import Stage, Stage1, Stage2, Stage3, Unsharded
from tiered.zero.rank_stores import folder_of, has_commit, open_store

__all__ = ["Init", "initialize"]

STAGES: tuple[Callable[[], Stage], ...] = (Stage1, Stage1, Stage2, Stage3)
"""By DeepSpeed's number; without sharding (0) the numbers are those of stage 1."""
STATE_BYTES = 12
"""Bytes of states for each parameter, at most: two moments and a master."""
OPTIMIZER = "optimizer= is an optimizer of torch's, or a function that makes one of parameters"
"""What it is, in an error."""
SPARE = 16 << 20
"""Bytes beside the state that a budget for all of it has."""

_waiting: dict[str, TieredStore] = {}
"""Stores that ``Init`` opened, by folder, until ``initialize`` takes them over."""

Optimizers = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
Schedulers = LRScheduler | Callable[[torch.optim.Optimizer], Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Schedulers | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Optimizer | None, DataLoader[Any] | None, Any]:
    """Return an engine, its optimizer, data loader and scheduler, as ``deepspeed.initialize`` does.

    ``config``: DeepSpeed's configuration, a dict or the path of a JSON file (or ``args.deepspeed_config``). Which of its keys
    are not needed is printed, with "dump_state" what becomes of each, and docs/from_deepspeed.md has all of them; ``args``,
    Hugging Face's ``TrainingArguments``, fills values that are "auto". ``model``: in memory, on the meta
    device, built under ``Init`` or ``zero.init``, or paged.
    ``optimizer``: one of torch.optim, with its param groups and states, or a function that makes one of
    ``model_parameters`` (parameters, param groups; default: all that are trained); without it, that of the configuration.
    ``lr_scheduler``: one of torch's for that optimizer, or a function that makes one of an optimizer. Where nothing else names
    an optimizer, it is that of the scheduler.
    ``training_data``: a data set, from which each rank gets a share in batches of ``train_micro_batch_size_per_gpu``.

    The parameters that the model has are those that training begins with, whatever the store has; ``engine.load_checkpoint``
    goes on from a checkpoint. With several processes (torchrun's variables, or a process group that is there) all call it.

    Raises MisuseError for a configuration that is none or asks for what there is not, naming its keys, for ``mpu`` and
    ``mesh_param``, and what ``TieredStore.open``, ``zero.page`` and the optimizers raise.
    """
    if model is None:
        raise MisuseError("zero.initialize needs model=: the module to train")
    if mpu is not None or mesh_param is not None:
        raise MisuseError("mpu= and mesh_param= are for model parallelism, which there is not: leave them out")
    _join(dist_init_required, distributed_port)
    given = _given(args, config if config is not None else config_params)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if several() else (1, 0)
    samples = len(training_data) if training_data is not None and hasattr(training_data, "__len__") else None
    epochs = getattr(args, "num_train_epochs", None)

    def total_steps(passes: int) -> int | None:
        """Return the steps of the whole training, as Trainer counts them."""
        if (getattr(args, "max_steps", None) or 0) > 0 or samples is None or epochs is None:
            return None
        one = getattr(args, "per_device_train_batch_size", 1)
        batches = -(-samples // (one * ranks))
        return int(-(-epochs * max(batches // passes, 1) // 1))

    with (Ranks.of(None) if ranks > 1 else Unsharded()).agreeing("initialize") as agree:
        read = Config.of(given, ranks=ranks, arguments=args, total_steps=total_steps)
        agree(_asked(read))
    if optimizer is None and read.optimizer is None and isinstance(lr_scheduler, LRScheduler):
        optimizer = lr_scheduler.optimizer  # nothing else says one, and the scheduler is of one
    groups = optimizers.groups_of(model, model_parameters)
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizers.groups_of(model, optimizer.param_groups)
    elif optimizer is not None and not callable(optimizer):
        expect_type(optimizer, torch.optim.Optimizer, OPTIMIZER)
    with ExitStack() as stack:
        store, owned = _store_for(model, read)
        if owned:
            stack.callback(store.close)
        if not _is_paged(model):
            _convert(model, read)
            offloaded = read.place.states_offloaded or store.device.type == "cpu"
            page(
                model,
                store,
                name=read.place.name,
                existing="overwrite",
                stage=STAGES[read.stage]() if ranks > 1 else None,
                paging=Paging(update_tier="dram" if offloaded else "hbm"),
                micro_batch=read.place.micro_batch,
                activations="store" if _leaves_device(read, store) else "memory",
            )
        made = _optimizer(optimizer, groups, model, read, split=model_parameters is None)
        scheduler = _scheduler(lr_scheduler, made, optimizer, read)
        loader = _loader(training_data, read, ranks, rank, collate_fn)
        engine = Engine(model, read, store, made, scheduler, loader, owned=owned)
        stack.pop_all()
    if rank == 0:
        print(f"tiered: {summed(read.rows)}\ntiered: {store}, {_budgets(store)}; {_sizes(read, ranks)}", flush=True)
        if read.reports.dump:
            print(f"{told(read.rows)}\n{json.dumps(read.values, indent=2, default=str)}", flush=True)
    return engine, made, loader, scheduler


def _asked(config: Config) -> Iterator[Term]:
    """Yield what all ranks have to be asked alike, beside what ``page`` and the optimizer compare."""
    for name in ("train_batch_size", "micro_batch_size", "accumulation_steps", "dtype", "buffer_dtype", "stage"):
        yield name, str(getattr(config, name))
    for name in ("fp16", "check_overflow", "autocast", "clipping", "compute_norm", "optimizer", "scheduler", "drop_last"):
        yield name, repr(getattr(config, name))


def _given(args: Any, config: Any) -> Any:
    """Return the configuration: an argument, or an attribute of ``args``."""
    found = next((value for name in ("deepspeed_config", "deepspeed") if (value := getattr(args, name, None))), None)
    found = None if found is True else found  # a switch of DeepSpeed's launcher
    if config is not None and found is not None and found != config:
        raise MisuseError("the configuration was given twice: leave config= out, or args.deepspeed_config")
    if config is None and found is None:
        raise MisuseError("zero.initialize needs config=: a dict, or the path of a ds_config.json")
    return config if config is not None else found


def _join(required: bool | None, port: int) -> None:
    """Join the process group that the launcher's variables describe, where there is none yet."""
    if not dist.is_available() or dist.is_initialized() or required is False:
        return
    if required or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if "MASTER_ADDR" not in os.environ:
            os.environ.update(MASTER_ADDR="127.0.0.1", RANK=os.environ.get("RANK", "0"))
            os.environ.setdefault("WORLD_SIZE", "1")
        os.environ.setdefault("MASTER_PORT", str(port))
        dist.init_process_group("gloo")


# The store


def _is_paged(model: nn.Module) -> bool:
    return any(hasattr(parameter, "_tiered") for parameter in model.parameters())


def _store_for(model: nn.Module, config: Config) -> tuple[TieredStore, bool]:
    """Return the store for a model: the one that it is in, or was built for, or the one that the configuration says; and
    whether the engine is to close it."""
    for parameter in model.parameters():
        if hasattr(parameter, "_tiered"):
            return pager_of_parameter(parameter).store, False
        staged = find(parameter)
        if staged is not None:
            store = staged.window.store
            known = next((folder for folder, waiting in _waiting.items() if waiting is store), None)
            if known is not None:
                del _waiting[known]
            return store, known is not None
    return _opened(config.place, _needed(model, config)), True


def _needed(model: nn.Module, config: Config) -> int:
    """Return the bytes of a budget that holds the whole state of a model."""
    narrow = NARROW.get(config.dtype)
    nbytes = 0
    for parameter in model.parameters():
        size = narrow.itemsize if narrow is not None and parameter.is_floating_point() else parameter.element_size()
        wide = 2 if parameter.element_size() > 4 else 1  # the moments of fp64 parameters are fp64
        nbytes += parameter.numel() * (2 * size + wide * STATE_BYTES)
    return nbytes + nbytes // 4 + SPARE


def _opened(place: Place, needed: int | None) -> TieredStore:
    """Open the store that a configuration says. ``needed``: the bytes of the whole state, None where they are not known."""
    folder = Path(place.path).expanduser()
    options: dict[str, Any] = {}
    for name in ("nvme", "backend", "paths"):
        if getattr(place, name) is not None:
            options[name] = getattr(place, name)
    device = place.device or (f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else None)
    if place.hbm != 0 and device is not None and (place.hbm is not None or device.startswith("cuda")):
        options["device"] = device
        options["hbm"] = place.hbm if place.hbm is not None else torch.cuda.mem_get_info(device)[0] // 2
    dram: int | str | None = place.dram
    if dram is None:
        dram = _budget_before(folder)
    if dram is None and not place.spills and needed is not None and needed < headroom():
        dram = needed
    return open_store(folder, dram=dram, **options)


def _budget_before(folder: Path) -> int | None:
    """Return the memory budget of the last checkpoint in a folder, because the model was divided by it; None where there is
    none, or where it would not fit."""
    if several():
        folder = folder_of(folder, dist.get_rank(), dist.get_world_size())
    if not has_commit(folder):
        return None
    try:
        metas = [one.meta for one in listing(folder).generations]
    except (MisuseError, ManifestError):  # what opening it says better
        return None
    found = metas[-1].get(BUDGET) if metas else None
    dram = found.get("dram") if isinstance(found, dict) else None
    return dram if type(dram) is int and 0 < dram < headroom() else None


def _leaves_device(config: Config, store: TieredStore) -> bool:
    """Return whether activations are to leave the device; with ``micro_batch`` inputs of units do so anyway."""
    on_device = any(tier.name == "hbm" for tier in store.statistics().tiers)
    return config.cpu_checkpointing and on_device and config.place.micro_batch == 1


def _budgets(store: TieredStore) -> str:
    return ", ".join(f"{name.upper()} {format_size(nbytes)}" for name, nbytes in budget_of(store).items())


def _sizes(config: Config, ranks: int) -> str:
    passes = f" in {config.accumulation_steps} passes" if config.accumulation_steps > 1 else ""
    of = f" on {ranks} ranks" if ranks > 1 else ""
    return f"{config.train_batch_size} samples a step{passes}{of}, {config.dtype}"


def _convert(model: nn.Module, config: Config) -> None:
    """Convert a model in memory to the types that the configuration says."""
    narrow = NARROW.get(config.dtype)
    staged = next((parameter for parameter in model.parameters() if find(parameter) is not None), None)
    if narrow is not None and staged is not None:
        if any(parameter.is_floating_point() and parameter.dtype != narrow for parameter in model.parameters()):
            raise MisuseError(
                f"{config.dtype} is enabled, and the model was built under zero.init in {staged.dtype}: build it under "
                "zero.Init(config=...), which has its type"
            )
    elif narrow is not None:
        model.to(narrow)
    if config.buffer_dtype is not None:
        wanted = NARROW.get(config.buffer_dtype, torch.float32)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(wanted)


# Optimizer, scheduler, data


def _optimizer(
    given: Optimizers | None, groups: optimizers.Groups, model: nn.Module, config: Config, *, split: bool
) -> Optimizer | None:
    if isinstance(given, torch.optim.Optimizer):
        return optimizers.converted(given, groups, model)
    if given is not None:
        found = optimizers.resolved(groups, model)
        plain = len(found) == 1 and found[0].keys() == {"params"}
        made = given(found[0]["params"] if plain else found)
        expect_type(made, torch.optim.Optimizer, OPTIMIZER)
        return optimizers.converted(made, optimizers.groups_of(model, made.param_groups), model)
    return None if config.optimizer is None else optimizers.made(config.optimizer, groups, model, split=split)


def _scheduler(given: Schedulers | None, optimizer: Optimizer | None, before: Any, config: Config) -> Any:
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise MisuseError(
            "there is a scheduler, and no optimizer that it could be for: give optimizer=, or name one in the configuration"
        )
    if given is None:
        assert config.scheduler is not None
        return scheduler_of(config.scheduler, optimizer)
    if not isinstance(given, LRScheduler):
        if not callable(given):
            raise MisuseError(f"lr_scheduler= is a scheduler of torch's, or a function that makes one, not {given!r:.100}")
        made = given(optimizer)
        lacks = [name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(made, name, None))]
        if lacks:
            raise MisuseError(f"lr_scheduler= made {made!r:.100}, which has no {lacks[0]}: checkpoints need its state")
        return made
    if given.optimizer is not optimizer:
        if given.optimizer is not before:
            other = "optimizer=" if before is not None else "that of the configuration, which is made here"
            raise MisuseError(
                f"lr_scheduler= is for another optimizer than {other}: give a function that makes it of one "
                "(lr_scheduler=lambda optimizer: ...)"
            )
        rates = [group["lr"] for group in optimizer.param_groups]
        LambdaLR(optimizer, lambda step: 1.0)  # has torch see the steps of this optimizer
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        given.optimizer = optimizer
    return given


def _loader(
    data: Dataset[Any] | None, config: Config, ranks: int, rank: int, collate: Callable[[list[Any]], Any] | None
) -> DataLoader[Any] | None:
    """Make the loader of this rank's share of a data set."""
    if data is None:
        return None
    share: DistributedSampler[Any] | None = None if isinstance(data, IterableDataset) else DistributedSampler(data, ranks, rank)
    return DataLoader(data, batch_size=config.micro_batch_size, sampler=share, collate_fn=collate, drop_last=config.drop_last)


class Init:
    """``with zero.Init(config="ds_config.json"): model = Big()``: build a model that is never whole in memory, in the store
    that the configuration says, as ``deepspeed.zero.Init``. ``zero.initialize`` adopts it, with the same configuration.

    It is ``zero.init`` on that store. With bf16 or fp16 (``dtype``, or the configuration's) tensors are made in that type.
    ``enabled=False`` does nothing. DeepSpeed's other arguments are taken and not needed, but ``module``, which is refused:
    ``zero.initialize`` pages a model that exists.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        if module is not None:
            raise MisuseError("zero.Init(module=) converts a model that exists: leave it out, zero.initialize pages the model")
        expect_dtype("dtype", dtype, (*FLOATS, None))
        given = config if config is not None else config_dict_or_path
        if enabled and given is None:
            raise MisuseError("zero.Init needs config=, which says where the store is: the one that zero.initialize gets")
        self._given, self._enabled, self._dtype = given, enabled, dtype
        self._stack, self._folder = ExitStack(), ""

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        _join(None, 29500)
        place, dtype = place_of(self._given)
        self._folder = str(Path(place.path).expanduser().absolute())
        if self._folder not in _waiting:
            _waiting[self._folder] = _opened(place, None)
        made_in = self._dtype or NARROW.get(dtype)
        with ExitStack() as stack:
            stack.push(self._ended)
            if made_in is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(made_in)
            stack.enter_context(init(_waiting[self._folder]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def _ended(self, kind: object, error: object, trace: object) -> None:
        """Close the store where the block ended by an exception."""
        if kind is not None:
            _waiting.pop(self._folder).close()
