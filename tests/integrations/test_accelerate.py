"""Accelerate's loop over a paged model against the same loop in memory: bit for bit, also after ``save_state`` and
``load_state``, and between the two; and with two processes."""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration  # noqa: E402

from tests.first_calls import WRONG, refused_in_one_line  # noqa: E402
from tests.zero.ranks import on_ranks  # noqa: E402
from tiered import MisuseError, TieredStore, zero  # noqa: E402
from tiered.integrations.accelerate import FILE, export_state, register  # noqa: E402

EPOCHS, BATCHES, SAVED = 2, 7, 9
"""``SAVED``: after how many batches a state is saved, in the second epoch."""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Net(nn.Module):
    """An embedding that is tied to the head, and a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Dropout(dropout), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.head(self.body(self.embed(x)))  # type: ignore[no-any-return]


class Run:
    """What a script has after ``prepare``."""

    def __init__(
        self, store: TieredStore | None = None, seed: int = 0, existing: str = "refuse", registered: bool = True, **more: Any
    ) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        dropout, clip, shuffle = more.pop("dropout", 0.0), more.pop("clip", 0.5), more.pop("shuffle", True)
        self.clip = clip
        sampling = DataLoaderConfiguration(use_seedable_sampler=shuffle, data_seed=11)
        options = {name: value for name, value in more.items() if name != "kind"}
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=sampling, **options)
        torch.manual_seed(seed)
        model = Net(dropout)
        if store is not None:
            zero.page(model, store, existing=existing)
            if registered:
                register(self.accelerator, store)
        kind: Any = more.get("kind") or functools.partial(torch.optim.AdamW if store is None else zero.AdamW, fused=True)
        optimizer = kind(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        data = torch.randint(0, 17, (4 * BATCHES - 1, 5), generator=torch.Generator().manual_seed(3))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, epochs: int = EPOCHS, skip: int = 0, save: str | os.PathLike[str] | None = None) -> list[float]:
        found: list[float] = []
        done = 0
        for epoch in range(epochs):
            loader = self.accelerator.skip_first_batches(self.loader, skip) if skip and not epoch else self.loader
            for x in loader:
                with self.accelerator.accumulate(self.model):
                    loss = F.cross_entropy(self.model(x).flatten(0, 1), x.flatten())
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients and self.clip is not None:
                        found.append(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip).item())
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                found.append(loss.item())
                done += 1
                if done == SAVED and save is not None:
                    self.accelerator.save_state(str(save))
        return found

    def result(self) -> dict[str, Any]:
        """Copies of what a training ends with."""
        state: Any = self.model.state_dict()
        moments = self.optimizer.state_dict()["state"]
        return {
            "model": {name: value.clone() for name, value in state.items()},
            "states": {index: {name: one.clone() for name, one in found.items()} for index, found in moments.items()},
            "lr": self.scheduler.get_last_lr(),
        }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as opened:
        yield opened
        opened.close()


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "as it is"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_loop_is_that_in_memory(store: TieredStore, precision: str, registered: bool) -> None:
    reference = Run(mixed_precision=precision, dropout=0.1)
    torch.manual_seed(1)
    expected = reference.train()
    paged = Run(store, mixed_precision=precision, dropout=0.1, registered=registered)
    torch.manual_seed(1)
    assert paged.train() == expected
    assert len(expected) == EPOCHS * (BATCHES + (BATCHES + 1) // 2)
    assert same(paged.result(), reference.result())


def test_save_state_commits_and_load_state_goes_back(tmp_path: Path) -> None:
    """In the same process, and in one that begins anew with other values."""
    reference = Run()
    expected, folder = reference.train(), tmp_path / "state"
    rest = expected[-(BATCHES - 2 + 3) :]
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        run = Run(store)
        assert run.train(save=folder) == expected
        assert not {"model.safetensors", "optimizer.bin"} & set(os.listdir(folder))
        run.accelerator.load_state(str(folder))
        assert run.train(1, skip=2) == rest
    assert store.generation == 1  # what followed the last save_state was not saved
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        run = Run(store, seed=5, existing="overwrite")
        run.accelerator.load_state(str(folder))
        assert run.train(1, skip=2) == rest
        assert same(run.result(), reference.result())
        store.close()


def test_hooks_for_saving_and_loading_get_all_models(tmp_path: Path) -> None:
    """As without a store: the models, their state dicts, which a hook may take out to save them itself, and the folder."""

    def hooked(store: TieredStore | None, folder: Path) -> tuple[Any, list[Any], Any]:
        run, seen = Run(store), []
        beside = run.accelerator.prepare(torch.nn.Linear(2, 2))

        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            seen.append(("save", len(models), [sorted(one) for one in weights], output_dir == str(folder)))
            assert models == run.accelerator._models
            for model, found in zip(models, weights, strict=True):
                assert isinstance(found, dict)
                assert same({**found}, dict(model.state_dict()))
                assert same(dict(copy.deepcopy(found)), dict(found))
            torch.save(weights[0], folder / "mine.bin")

        def load(models: list[Any], input_dir: str) -> None:
            seen.append(("load", len(models), input_dir == str(folder)))
            if store is not None:  # the commit is there already
                assert same(dict(models[0].state_dict()), torch.load(folder / "mine.bin"))

        run.accelerator.register_save_state_pre_hook(save)
        handle = run.accelerator.register_load_state_pre_hook(load)
        run.accelerator.save_state(str(folder))
        with torch.no_grad():
            for parameter in (*beside.parameters(), *run.model.parameters()):
                parameter.add_(1)
        run.accelerator.load_state(str(folder))
        handle.remove()
        run.accelerator.load_state(str(folder))
        return run, seen, {**run.model.state_dict(), **beside.state_dict()}

    _, expected, values = hooked(None, tmp_path / "memory")
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        run, seen, found = hooked(store, tmp_path / "paged")
        assert seen == expected
        assert same(found, values)
        files = set(os.listdir(tmp_path / "paged"))
        assert ("model.safetensors" in files, "model_1.safetensors" in files) == (True, False)  # that is the one in memory

        def by_itself(models: list[Any], weights: list[Any], output_dir: str) -> None:
            while weights:
                weights.pop()
            models[0].n = 1  # what a hook finds are the models themselves

        run.accelerator.register_save_state_pre_hook(by_itself)
        run.accelerator.save_state(str(tmp_path / "none"))
        assert "model.safetensors" not in os.listdir(tmp_path / "none")
        store.close()


OTHERS = {"sgd": functools.partial(zero.SGD, momentum=0.9), "8bit": zero.AdamW8bit, "lion": zero.Lion}


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_states_of_other_optimizers_are_commits_too(tmp_path: Path, kind: Any) -> None:
    folder = tmp_path / "state"
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        whole = Run(store, kind=kind)
        expected = whole.train(save=folder)[-(BATCHES - 2 + 3) :]
        result = whole.result()
        assert not {"model.safetensors", "optimizer.bin"} & set(os.listdir(folder))
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        run = Run(store, seed=5, existing="overwrite", kind=kind)
        run.accelerator.load_state(str(folder))
        assert run.train(1, skip=2) == expected
        assert same(run.result(), result)
        store.close()


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Any]]:
    """A state that Accelerate saved by itself, and what came after it."""
    folder = tmp_path_factory.mktemp("memory") / "state"
    run = Run()
    return folder, run.train(save=folder)[-(BATCHES - 2 + 3) :], run.result()


def test_a_state_from_memory_loads_into_a_paged_model_and_back(
    store: TieredStore, in_memory: tuple[Path, list[float], dict[str, Any]], tmp_path: Path
) -> None:
    folder, rest, result = in_memory
    run = Run(store, seed=5)
    run.accelerator.load_state(str(folder))
    run.loader.iteration = 1  # which Accelerate does not save
    export_state(run.accelerator, tmp_path / "exported")
    assert run.train(1, skip=2) == rest
    assert same(run.result(), result)
    plain = Run(seed=6)
    plain.accelerator.load_state(str(tmp_path / "exported"))
    plain.loader.iteration = 1
    assert plain.train(1, skip=2) == rest
    assert same(plain.result(), result)


def test_states_are_named_and_kept_as_accelerate_does(store: TieredStore, tmp_path: Path) -> None:
    naming = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(store, project_config=naming)
    results = []
    for _ in range(3):
        run.train(1)
        run.accelerator.save_state()
        results.append(run.result())
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    run.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_1"))
    assert same(run.result(), results[1])
    run.accelerator.load_state()
    assert same(run.result(), results[2])


def test_what_cannot_be_loaded_is_named(store: TieredStore, tmp_path: Path) -> None:
    run, folder = Run(store), tmp_path / "state"
    run.train(1)
    run.accelerator.save_state(str(folder))
    before = run.result()
    written = json.loads((folder / FILE).read_text())
    for damage, complaint in (
        ("{", "is damaged"),
        (json.dumps({**written, "generations": ["1"]}), "generations of a commit"),
        (json.dumps({**written, "mark": None}), "does not say which commit"),
        (json.dumps({**written, "mark": "0" * 32}), r"refers to generation 1 of a store.*it keeps 1\)"),
        (json.dumps({**written, "generations": [7]}), r"refers to generation 7"),
    ):
        (folder / FILE).write_text(damage)
        with pytest.raises(MisuseError, match=complaint):
            run.accelerator.load_state(str(folder))
    (folder / FILE).unlink()
    with pytest.raises(MisuseError, match="did not come to its end"):
        run.accelerator.load_state(str(folder))
    assert same(run.result(), before)


def test_what_does_not_go_together_is_named(store: TieredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        monkeypatch.setattr(Accelerator, "distributed_type", kind)
        with pytest.raises(MisuseError, match=f"set up for {kind.value}"):
            register(accelerator, store)
    monkeypatch.undo()
    run = Run(store)
    register(run.accelerator, store)
    with TieredStore.open(None, dram="1MiB") as another:
        with pytest.raises(MisuseError, match="make one for each store"):
            register(run.accelerator, another)
        with pytest.raises(MisuseError, match="the accelerator is registered for"):
            run.accelerator.prepare(zero.page(Net(), another))
    inside = nn.Sequential(nn.Linear(4, 4))
    inside.append(zero.page(nn.Linear(4, 4), store, name="inside"))
    with pytest.raises(MisuseError, match="paged as part of another module than this Sequential"):
        run.accelerator.prepare(inside)


def test_a_model_in_memory_stays_with_accelerate(store: TieredStore, tmp_path: Path) -> None:
    """Beside one that is paged: a state has the weights of this and the commit of that."""
    run = Run(store)
    beside = nn.Linear(3, 3)
    plain, _ = run.accelerator.prepare(beside, torch.optim.SGD(beside.parameters(), lr=0.1))
    assert type(plain) is nn.Linear
    before = beside.weight.detach().clone(), run.result()
    run.accelerator.save_state(str(tmp_path / "state"))
    run.train(1)
    nn.init.zeros_(beside.weight)
    run.accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(beside.weight, before[0])
    assert same(run.result(), before[1])


def test_two_models_in_one_store(store: TieredStore, tmp_path: Path) -> None:
    run = Run(store)
    other = zero.page(nn.Linear(5, 5), store, name="other")
    model, optimizer = run.accelerator.prepare(other, zero.AdamW(other.parameters(), lr=0.1))

    def step() -> None:
        run.train(1)
        run.accelerator.backward(model(torch.ones(2, 5)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    run.accelerator.save_state(str(tmp_path / "state"))
    before = run.result(), {name: value.clone() for name, value in model.state_dict().items()}
    step()
    after = run.result(), {name: value.clone() for name, value in model.state_dict().items()}
    run.accelerator.load_state(str(tmp_path / "state"))
    assert same(run.result(), before[0])
    assert same({**model.state_dict()}, before[1])
    step()
    assert same(run.result(), after[0])
    assert same({**model.state_dict()}, after[1])
    run.accelerator.prepare(zero.AdamW(other.parameters()))
    with pytest.raises(MisuseError, match="'other' has two optimizers"):
        run.accelerator.save_state(str(tmp_path / "state"))


# Two processes


def expected_of_two() -> tuple[list[list[float]], dict[str, Any]]:
    """In one process, in memory: what two processes do, one after the other, and the mean of their gradients."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = torch.randint(0, 17, (4 * BATCHES - 1, 5), generator=torch.Generator().manual_seed(3))
    batches = list(torch.cat([data, data[:5]]).split(4))  # the last ones are filled up from the beginning
    losses: list[list[float]] = [[], []]
    for step in range(0, len(batches), 4):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            for x in batches[step + rank : step + 4 : 2]:
                loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
                (loss / 2).backward()
                losses[rank].append(loss.item())
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
        for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
        for _ in range(2):  # Accelerate counts the batches of all processes
            scheduler.step()
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def scenario(rank: int, folder: Path) -> dict[str, Any]:
    here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {**here, "OMP_NUM_THREADS": "1"}  # as torchrun and accelerate launch set them
    found: dict[str, Any] = {}
    with zero.open_store(folder / "stores", dram="2MiB") as store:
        run = Run(store, clip=None, shuffle=False)
        found["type"] = type(run.model).__name__, str(run.accelerator.distributed_type), run.accelerator.num_processes
        found["losses"] = run.train(1)
        found["model"] = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.accelerator.save_state(str(folder / "state"))
        run.train(1)
        run.accelerator.load_state(str(folder / "state"))
        found["again"] = {name: value.clone() for name, value in run.model.state_dict().items()}
        found["refused"] = refused(folder / f"{rank}")
        store.close()
    return found


def refused(folder: Path) -> dict[str, str]:
    """The complaints of what would wrap a paged model, each of which is as it was."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    wraps = {
        "prepare": lambda model: Accelerator(cpu=True).prepare(model),
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard": fully_shard,
        "FullyShardedDataParallel": functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
    }
    with TieredStore.open(folder, dram="2MiB", durability="none") as store:
        for name, wrap in wraps.items():
            model = zero.page(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), store, name=name)
            value = model(torch.ones(1, 8))
            try:
                wrap(model)
            except MisuseError as error:
                found[name] = str(error)
            assert torch.equal(model(torch.ones(1, 8)), value)
    return found


def test_two_processes_are_what_one_would_be(tmp_path: Path) -> None:
    losses, model = expected_of_two()
    for rank, found in enumerate(on_ranks(2, scenario, tmp_path / "ranks")):
        assert found["type"] == ("Net", "DistributedType.MULTI_CPU", 2)
        assert found["losses"] == losses[rank]
        for name, value in model.items():
            assert torch.equal(found["model"][name], value), (rank, name)
        assert same(found["again"], found["model"])
        assert found["refused"].keys() == {"prepare", "DistributedDataParallel", "fully_shard", "FullyShardedDataParallel"}
        for name, complaint in found["refused"].items():
            assert complaint.startswith("parameter '0.weight' is paged, and ")
            assert name == "prepare" or name in complaint
            assert "tiered.integrations.accelerate.register before prepare" in complaint


def test_first_calls_with_wrong_types_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused_in_one_line("tiered.integrations.accelerate") >= 1 * len(WRONG)
