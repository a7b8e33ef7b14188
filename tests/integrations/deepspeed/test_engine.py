"""``zero.initialize``: the engine trains as the same loop in memory does, bit for bit, and has DeepSpeed's names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.integrations.deepspeed.documented import SHAPES
from tests.integrations.deepspeed.training import Net, batch, config_for, engine_of, equal, made, plain, train
from tests.versions import COMPILES, MUON
from tiered import MisuseError, TieredStore, zero
from tiered.integrations.deepspeed.table import QUESTIONS

Made = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[dict[str, Any], Made]] = {
    "AdamW": ({"type": "AdamW", "params": {"lr": 1e-2}}, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0, fused=True)),
    "Adam is AdamW": (
        {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
        lambda p: torch.optim.AdamW(p, 1e-2, (0.8, 0.9), 1e-6, 0.1, fused=True),
    ),
    "Adam of torch": (
        {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    ),
    "Adam with decay in the gradient": (
        {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1, "amsgrad": True}},
        lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, amsgrad=True, fused=True),
    ),
    "SGD": (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, foreach=False),
    ),
    "Adagrad": ({"type": "Adagrad", "params": {"lr": 0.1}}, lambda p: torch.optim.Adagrad(p, 0.1, foreach=False)),
    "RMSprop": ({"type": "RMSprop", "params": {"lr": 1e-3}}, lambda p: torch.optim.RMSprop(p, 1e-3, foreach=False)),
    "Adafactor": ({"type": "Adafactor", "params": {"lr": 1e-2}}, lambda p: torch.optim.Adafactor(p, 1e-2, foreach=False)),
    "Adadelta": ({"type": "Adadelta", "params": {"lr": 0.5}}, lambda p: torch.optim.Adadelta(p, 0.5, foreach=False)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_the_same_loop_in_memory(tmp_path: Path, name: str) -> None:
    maker, of = OPTIMIZERS[name]
    reference = made()
    engine = engine_of(tmp_path, copy.deepcopy(reference), optimizer=maker)
    assert train(engine) == plain(reference, of(reference.parameters()))
    assert equal(engine.module_state_dict(), reference.state_dict())
    assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps) == (4, 8, 32, 0)
    engine.destroy()


@MUON
def test_lion_and_muon_are_those_of_zero(tmp_path: Path) -> None:
    """Of which torch has none, and one that the engine gives matrices to."""
    for number, maker in enumerate(
        (
            {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
            {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 1e-3, "weight_decay": 0.1, "ns_method": "gram"}},
        )
    ):
        seen = []
        for way in "engine", "zero":
            folder = tmp_path / f"{way}{number}"
            if way == "engine":
                engine = engine_of(folder, optimizer=maker)
                seen.append((train(engine), engine.module_state_dict()))
                engine.destroy()
                continue
            with TieredStore.open(folder, dram="1MiB") as store:
                model: Any = zero.page(made(), store)
                lion = maker["type"] == "Lion"
                optimizer: Any = (
                    zero.Lion((p for p in model.parameters() if p.requires_grad), 1e-3, (0.9, 0.999), 0.1)
                    if lion
                    else zero.Muon(model, 1e-2, 0.1, adjust_lr_fn="original", adamw={"lr": 1e-3, "weight_decay": 0.1})
                )
                seen.append((plain(model, optimizer), model.state_dict()))
                store.close()
        assert seen[0][0] == seen[1][0]
        assert equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("kind", ["an optimizer", "a function", "a function of zero's", "groups"])
def test_an_optimizer_of_the_callers(tmp_path: Path, kind: str) -> None:
    reference = made()
    model = copy.deepcopy(reference)

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        vectors = [p for p in of.parameters() if p.dim() <= 1]
        matrices = [p for p in of.parameters() if p.dim() > 1]
        return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 2e-3}]

    theirs = torch.optim.AdamW(groups(reference), 1e-2, weight_decay=0.1, fused=True)
    given: Any = {
        "an optimizer": lambda: torch.optim.AdamW(groups(model), 1e-2, weight_decay=0.1),
        "a function": lambda: lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.1),
        "a function of zero's": lambda: lambda params: zero.AdamW(params, 1e-2, weight_decay=0.1),
        "groups": lambda: None,
    }[kind]()
    more = {"model_parameters": groups(model)} if kind != "an optimizer" else {}
    engine, optimizer, _, _ = zero.initialize(model=model, optimizer=given, config=config_for(tmp_path), **more)
    assert type(optimizer) is zero.AdamW
    assert train(engine) == plain(reference, theirs)
    assert equal(engine.module_state_dict(), reference.state_dict())
    engine.destroy()


def test_an_optimizer_that_has_made_steps_goes_on(tmp_path: Path) -> None:
    reference = made()
    before = torch.optim.SGD(reference.parameters(), 0.1, 0.9, foreach=False)
    plain(reference, before, passes=4)
    model = copy.deepcopy(reference)
    given = torch.optim.SGD(model.parameters(), 0.1, 0.9, foreach=False)
    given.load_state_dict(copy.deepcopy(before.state_dict()))
    engine = engine_of(tmp_path, model, optimizer_=given)
    assert train(engine) == plain(reference, before)
    engine.destroy()


@pytest.mark.parametrize("kind", ["a scheduler", "a function"])
def test_a_scheduler_of_the_callers(tmp_path: Path, kind: str) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    reference = made()
    theirs = torch.optim.AdamW(reference.parameters(), 1e-2, fused=True)
    model = copy.deepcopy(reference)
    ours = torch.optim.AdamW(model.parameters(), 1e-2)
    given = schedule(ours) if kind == "a scheduler" else schedule
    engine, _, _, scheduler = zero.initialize(model=model, optimizer=ours, lr_scheduler=given, config=config_for(tmp_path))
    assert scheduler.optimizer is engine.optimizer
    assert train(engine) == plain(reference, theirs, schedule(theirs))
    engine.destroy()


def test_a_scheduler_alone_brings_its_optimizer(tmp_path: Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    reference = made()
    theirs = torch.optim.AdamW(reference.parameters(), 1e-2, fused=True)
    model = copy.deepcopy(reference)
    config = config_for(tmp_path)
    given = schedule(torch.optim.AdamW(model.parameters(), 1e-2))
    with pytest.raises(MisuseError, match="another optimizer than that of the configuration"):
        zero.initialize(model=copy.deepcopy(reference), lr_scheduler=schedule(theirs), config=config)
    del config["optimizer"]
    with pytest.raises(MisuseError, match="no optimizer that it could be for: give optimizer="):
        zero.initialize(model=copy.deepcopy(reference), lr_scheduler=schedule, config=config)
    engine, optimizer, _, scheduler = zero.initialize(model=model, lr_scheduler=given, config=config)
    assert scheduler is given
    assert scheduler.optimizer is optimizer is engine.optimizer
    assert train(engine) == plain(reference, theirs, schedule(theirs))
    engine.destroy()


def test_a_scheduler_of_the_configuration(tmp_path: Path) -> None:
    params = {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear"}
    reference = made()
    theirs = torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True)
    engine = engine_of(tmp_path, copy.deepcopy(reference), scheduler={"type": "WarmupLR", "params": params})
    seen = train(engine)
    assert seen == plain(reference, theirs, zero.WarmupLR(theirs, **params))
    assert seen[3::4] == pytest.approx([1e-4, *(1e-4 + (1e-2 - 1e-4) * k / 3 for k in (1, 2)), 1e-2], rel=1e-12)
    engine.destroy()


def test_a_step_of_the_callers_own_boundaries(tmp_path: Path) -> None:
    """Without managed accumulation each ``step`` is one; with a boundary that is set, it is where it says."""
    seen = []
    for number, more in enumerate(({"managed_gradient_accumulation": False}, {})):
        engine = engine_of(tmp_path / str(number), **more)
        for first in 0, 2:
            for offset in range(2):
                if not more:
                    engine.set_gradient_accumulation_boundary(offset == 1)
                engine.backward(engine(*batch(first + offset)))
                if offset or not more:
                    engine.step()
        seen.append((engine.module_state_dict(), engine.global_steps, engine.global_samples))
        engine.destroy()
    reference = made()
    plain(reference, torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True), passes=4)
    assert [found[1:] for found in seen] == [(2, 16), (2, 16)]
    assert all(equal(found[0], reference.state_dict()) for found in seen)


def test_no_sync_adds_up_and_refuses_a_step(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    with engine.no_sync():
        engine.backward(engine(*batch(0)))
        with pytest.raises(MisuseError, match="leave the block first"):
            engine.step()
        with pytest.raises(MisuseError, match="leave the block first"), engine.no_sync():
            raise AssertionError
    engine.backward(engine(*batch(1)))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    reference = made()
    plain(reference, torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True), passes=2)
    assert equal(engine.module_state_dict(), reference.state_dict())
    engine.destroy()


def test_zero_grad_forgets(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, gradient_accumulation_steps=1)
    engine.backward(engine(*batch(5)))
    engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    engine.destroy()


def test_a_loss_of_the_callers_own_backward(tmp_path: Path) -> None:
    """``loss.backward()`` of a loss that ``engine.scale`` made, as DeepSpeed takes it."""
    seen = []
    for number, own in enumerate((True, False)):
        engine = engine_of(tmp_path / str(number))
        for at in range(4):
            loss = engine(*batch(at))
            if own:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        seen.append(engine.module_state_dict())
        engine.destroy()
    assert equal(*seen)


def test_what_it_is_called(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, gradient_accumulation_steps=2, steps_per_print=7, zero_optimization={"stage": 2})
    assert isinstance(engine, nn.Module)
    assert isinstance(engine.module, Net)
    assert engine.greeting() == "of the model"
    with pytest.raises(AttributeError, match=r"engine that zero\.initialize made .* has no 'nothing', and its model, a Net"):
        engine.nothing  # noqa: B018
    for name in ("train_batch", "set_dataloader"):
        with pytest.raises(AttributeError, match=rf"'{name}'.*PipelineEngine.*engine\.backward\(loss\); engine\.step\(\)"):
            getattr(engine, name)
    with pytest.raises(AttributeError, match="did you mean 'zero_offload_optimizer'"):
        engine.zero_offload_optimiser()
    assert not hasattr(engine, "__nothing__")
    engine.empty_partition_cache()
    asked = {name: getattr(engine, name)() for name in QUESTIONS}
    assert asked["zero_optimization_partition_gradients"] is True
    assert asked["zero_optimization_partition_weights"] is False
    assert asked["zero_reduce_bucket_size"] == 500_000_000
    assert asked["zero_offload_optimizer"] is None
    assert asked["zero_use_cpu_optimizer"] is asked["zero_overlap_comm"] is asked["zero_allow_untested_optimizer"] is False
    assert asked["optimizer_name"] == "adamw"
    assert asked["scheduler_name"] is None
    assert set(QUESTIONS) <= set(dir(engine))
    assert engine.train_batch_size() == 8
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 2
    assert engine.get_batch_info() == (8, 4, 2)
    assert (engine.gradient_clipping(), engine.zero_optimization_stage(), engine.zero_optimization()) == (0.5, 2, True)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.dynamic_loss_scale()) == (False, False, False)
    assert engine.steps_per_print() == 7
    assert (engine.get_lr(), engine.get_type(), engine.get_mom()) == ([1e-2], ["AdamW"], [(0.9, 0.999)])
    assert (engine.global_rank, engine.world_size, engine.device.type) == (0, 1, "cpu")
    assert engine.config["train_micro_batch_size_per_gpu"] == 4
    engine.set_train_batch_size(12)
    assert engine.get_batch_info() == (12, 4, 3)
    with pytest.raises(MisuseError, match="no multiple"):
        engine.set_train_batch_size(13)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (15, 5, 3)
    with pytest.raises(MisuseError, match="at least one sample"):
        engine.set_train_micro_batch_size(0)
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5]
    assert engine.eval() is engine
    assert not engine.module.training
    engine.train()
    assert engine.module.training
    assert not engine.was_step_applied()
    train(engine, passes=3)
    assert engine.was_step_applied()
    engine.destroy()
    engine.destroy()


def test_its_states_move_out_of_memory_and_back(tmp_path: Path) -> None:
    reference = made()
    engine = engine_of(tmp_path, copy.deepcopy(reference))
    train(engine, passes=4)
    used = engine.store.statistics().tier("dram").used
    engine.offload_states()
    assert engine.store.statistics().tier("dram").used < used
    engine.reload_states()
    train(engine, 4, 4)
    plain(reference, torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True))
    assert equal(engine.module_state_dict(), reference.state_dict())
    engine.destroy()


@COMPILES
def test_it_compiles_the_model(tmp_path: Path) -> None:
    reference = made()
    engine = engine_of(tmp_path, copy.deepcopy(reference))
    engine.compile(backend="eager")
    assert train(engine) == plain(reference, torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True))
    with pytest.raises(MisuseError, match="DeepCompile"):
        engine.compile(schedule=[(0, [])])
    engine.destroy()


def test_what_is_no_loss(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    for wrong in (torch.ones(2, requires_grad=True), torch.ones(()), 3.0):
        with pytest.raises(MisuseError, match="a loss of one element"):
            engine.backward(wrong)  # type: ignore[arg-type]
    engine.destroy()


def test_an_engine_without_an_optimizer_evaluates(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    del config["optimizer"]
    model = made().eval()
    expected = model(batch(0)[0])
    engine, optimizer, loader, scheduler = zero.initialize(model=copy.deepcopy(model), config=config)
    assert (optimizer, loader, scheduler) == (None, None, None)
    with torch.no_grad():
        assert torch.equal(engine.eval()(batch(0)[0]), expected)
    with pytest.raises(MisuseError, match="no optimizer"):
        engine.step()
    engine.destroy()


# -- data, "auto", other models


def test_training_data_comes_in_batches(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    for drop, sizes in ((False, [4, 4, 2]), (True, [4, 4])):
        engine, _, loader, _ = zero.initialize(
            model=made(), config=config_for(tmp_path, dataloader_drop_last=drop), training_data=data
        )
        assert loader is not None
        assert engine.training_dataloader is loader
        found = list(loader)
        assert [len(x) for x, _ in found] == sizes
        assert all(torch.equal(2 * x, y) for x, y in found)
        engine.destroy()


def test_args_fill_what_is_auto_and_name_the_file(tmp_path: Path) -> None:
    config = {**SHAPES["transformers zero3"], "tiered": {"path": str(tmp_path / "store")}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    numbers: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
    numbers |= {"learning_rate": 1e-3, "warmup_steps": 2, "max_steps": -1, "num_train_epochs": 3, "bf16": False, "fp16": False}
    args = SimpleNamespace(deepspeed_config=str(tmp_path / "ds_config.json"), **numbers)
    data = TensorDataset(torch.arange(10))
    engine, _, _, scheduler = zero.initialize(args, made(), training_data=data)
    assert isinstance(scheduler, zero.WarmupDecayLR)
    assert (scheduler.total_num_steps, scheduler.warmup_num_steps) == (15, 2)
    assert engine.get_batch_info() == (2, 2, 1)
    engine.destroy()
    with pytest.raises(MisuseError, match="given twice"):
        zero.initialize(args, made(), config={})


@pytest.mark.parametrize("name", SHAPES)
def test_configurations_that_people_have_train(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    numbers: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
    numbers |= {"learning_rate": 1e-3, "warmup_steps": 2, "max_steps": 9, "bf16": True, "fp16": False, "weight_decay": 0.1}
    config = {**SHAPES[name], "tiered": {"path": str(tmp_path / "store"), "dram": "1MiB"}}
    engine, *_ = zero.initialize(SimpleNamespace(**numbers), made(), config=config)
    printed = capsys.readouterr().out
    assert "keys honoured" in printed
    assert f"{engine.train_batch_size()} samples a step" in printed
    for number in range(4):
        loss = engine(*batch(number, engine.train_micro_batch_size_per_gpu()))
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 4
    assert torch.isfinite(loss)
    engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_that_was_built_under_init(tmp_path: Path, dtype: str) -> None:
    config = config_for(tmp_path, bf16={"enabled": dtype == "bf16"})
    narrow = torch.bfloat16 if dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    with zero.Init(config_dict_or_path=config):
        model = Net()
    assert torch.get_default_dtype() == torch.float32
    engine, *_ = zero.initialize(model=model, config=config)
    assert engine.module.embed.weight.dtype == narrow
    seen = train(engine)
    if dtype == "fp32":
        reference = made()
        assert seen == plain(reference, torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True))
    engine.destroy()
    with zero.Init(enabled=False):
        assert Net().embed.weight.sum().isfinite()


def test_init_gives_its_store_up_where_building_fails(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    with pytest.raises(TypeError), zero.Init(config=config):
        nn.Linear(2, Net())  # type: ignore[arg-type]
    engine_of(tmp_path).destroy()  # the store is free
    with pytest.raises(MisuseError, match="needs config="):
        zero.Init()
    with pytest.raises(MisuseError, match="module="):
        zero.Init(Net(), config=config)


def test_a_model_that_is_paged_stays_in_its_store(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "own", dram="1MiB") as store:
        model = zero.page(made(), store)
        engine = engine_of(tmp_path, model, optimizer_=zero.AdamW(model.parameters(), 1e-2, weight_decay=0.1))
        assert engine.store is store
        reference = made()
        assert train(engine) == plain(reference, torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True))
        engine.destroy()
        assert len(store) > 0  # it is open
        store.close()
    assert not (tmp_path / "store").exists()


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    engine = engine_of(tmp_path, model, optimizer_=torch.optim.AdamW(model.parameters(), 1e-2))
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
    engine.destroy()


def test_it_computes_on_a_device(tmp_path: Path) -> None:
    """Host memory that stands in for one."""
    reference = made()
    device = {"tiered": {"hbm": "1MiB", "device": "cpu"}}
    for number, zero_ in enumerate(({}, {"stage": 3, "offload_optimizer": {"device": "cpu"}})):
        engine = engine_of(tmp_path / str(number), copy.deepcopy(reference), zero_optimization=zero_, **device)
        theirs = copy.deepcopy(reference)
        expected = plain(theirs, torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.1, fused=True))
        assert train(engine) == expected
        assert [tier.name for tier in engine.store.statistics().tiers] == ["hbm", "dram", "nvme"]
        engine.destroy()


def test_activations_leave_a_device_where_it_is_asked(tmp_path: Path) -> None:
    reference = made()
    for number, hbm in enumerate(("1MiB", None)):
        more: dict[str, Any] = {"tiered": {"hbm": hbm, "device": "cpu"} if hbm else {}}
        engine = engine_of(
            tmp_path / str(number), copy.deepcopy(reference), activation_checkpointing={"cpu_checkpointing": True}, **more
        )
        theirs = copy.deepcopy(reference)
        expected = plain(theirs, torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.1, fused=True))
        assert train(engine) == expected
        assert (zero.statistics(engine.module).activations is not None) is (hbm is not None)
        engine.destroy()


def test_without_nvme_a_step_reads_and_writes_nothing(tmp_path: Path) -> None:
    engine, *_ = zero.initialize(
        model=nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))),
        config={
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            "tiered": {"path": str(tmp_path / "store")},
        },
    )
    for number in range(8):
        engine.backward(engine(torch.ones(2, 128)).square().mean())
        engine.step()
        if number == 3:
            before = engine.store.statistics().links[-1]
    after = engine.store.statistics().links[-1]
    assert after.down.bytes == before.down.bytes
    assert after.up.bytes == before.up.bytes == 0
    engine.destroy()


# -- what is refused


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": None}, "needs model="),
        ({"config": None}, "needs config="),
        ({"mpu": object()}, "model parallelism"),
        ({"mesh_param": (1, 1)}, "model parallelism"),
        ({"config": {"train_batch_size": 1, "wandb": {"enabled": True}}}, "wandb="),
        ({"optimizer": 3}, "optimizer= is an optimizer of torch's"),
        ({"optimizer": lambda params: 3}, "optimizer= is an optimizer of torch's"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)}, "not the model's"),
        ({"model_parameters": nn.Linear(1, 1).parameters()}, "not the model's"),
        ({"lr_scheduler": 3}, "lr_scheduler= is a scheduler"),
        ({"lr_scheduler": lambda optimizer: SimpleNamespace(step=print)}, "which has no state_dict"),
        (
            {"lr_scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), 1)},
            "for another optimizer",
        ),
        ({"config": {"optimizer": {"type": "Nadamax"}}}, "'Nadamax' is no optimizer"),
        ({"config": {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}}, "optimizer.params of AdamW: .*momentum"),
        ({"config": {"optimizer": {"type": "LBFGS"}}}, "LBFGS"),
        ({"config": {"scheduler": {"type": "WarmupLR"}, "optimizer": None}}, "no optimizer that it could be for"),
        ({"config": {"scheduler": {"type": "WarmupDecayLR"}}}, "total_num_steps"),
        ({"config": {"scheduler": {"type": "WarmupLR", "params": {"cycle_min_lr": 1}}}}, "WarmupLR has no 'cycle_min_lr'"),
        ({"config": {"tensorboard": {"enabled": True}}}, "pip install tensorboard"),
        ({"config": {"fp16": {"enabled": True, "hysteresis": 0}}}, "at least 1"),
        ({"config": {"gradient_clipping": -1}}, "gradient_clipping is -1"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if "tensorboard" in says and _has_tensorboard():
        pytest.skip("tensorboard is installed")
    config = given.get("config", {})
    whole = None if config is None else config_for(tmp_path, **config) if "train_batch_size" not in config else config
    with pytest.raises(MisuseError, match=says):
        zero.initialize(**{"model": made(), **given, "config": whole})
    assert not list((tmp_path / "here").iterdir())
    engine_of(tmp_path).destroy()  # the store is closed, where it was opened at all


def _has_tensorboard() -> bool:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True
