"""Parameters that stay in memory, states in the stores of two ranks: the bits of torch's own AdamW under ``fully_shard`` and
DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.versions import FULLY_SHARDS
from tests.zero.harness import equal
from tests.zero.narrow import MasterAdamW
from tests.zero.ranks import on_ranks
from tests.zero.test_resident import LR, STEPS, train
from tiered import MisuseError, Owner, RankError, TieredStore, zero


class Uneven(nn.Module):
    """Sizes that two do not divide, a parameter that only one rank has some of, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 1300)
        self.gain = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(1300, 5)
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(x)) * self.gain)
        return found


class Losses:
    """What ``train`` wants, of a model that its ranks give batches of their own."""

    def __init__(self, model: nn.Module, rank: int, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.rank, self.dtype = model, rank, dtype
        self.parameters = model.parameters

    def loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * seed + self.rank)).to(self.dtype)
        loss: torch.Tensor = self.model(x).float().square().mean()
        return loss


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: found.full_tensor().clone() if hasattr(found, "full_tensor") else found.clone()
            for name, found in model.state_dict().items()}


def held(store: TieredStore) -> int:
    return sum(store.spec(key).nbytes for key in store if "#" in key)


def sharded(rank: int, folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))

    def make(dtype: torch.dtype = torch.float32) -> Any:
        torch.manual_seed(5)
        model = Uneven().to(dtype)
        for layer in (model.first, model.last):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    reference, model = make(), make()
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, fused=True)
    found: dict[str, Any] = {"expected": train(Losses(reference, rank), theirs, 0, STEPS)}
    with TieredStore.open(folder / f"store{rank}", dram="1MiB") as store:
        ours = zero.AdamW(model.parameters(), lr=LR, store=store)
        found["numbers"] = train(Losses(model, rank), ours, 0, 3)
        store.commit()
        ours = zero.AdamW(model.parameters(), lr=LR, store=store, existing="resume")
        found["numbers"] += train(Losses(model, rank), ours, 3, STEPS)
        found["models"] = whole(reference), whole(model)
        left, right = theirs.state_dict()["state"], ours.state_dict()["state"]
        found["wrapped"] = all(isinstance(state["exp_avg"], DTensor) for state in right.values())
        found["states"] = [
            {index: {name: getattr(value, "to_local", lambda value=value: value)() for name, value in state.items()}
             for index, state in states.items()}
            for states in (left, right)
        ]
        found["bytes"] = held(store)
        found["local"] = sum(p.to_local().numel() for p in model.parameters() if p.grad is not None)

        state = get_optimizer_state_dict(model, ours)
        other = make()
        other.load_state_dict(model.state_dict())
        third = zero.AdamW(other.parameters(), lr=1.0, store=store, name="third")
        loose = StateDictOptions(strict=False)  # torch wants states of parameters that were never used, otherwise
        set_optimizer_state_dict(other, third, state, options=loose)
        full = zero.AdamW(make().parameters(), lr=1.0, store=store, name="full")
        gathered = ours.state_dict()
        for kept in gathered["state"].values():
            kept.update({name: kept[name].full_tensor() for name in ("exp_avg", "exp_avg_sq")})
        full.load_state_dict(gathered)
        found["checkpointed"] = all(
            torch.equal(one[name].to_local(), another[name].to_local())
            for states in (third.state_dict()["state"], full.state_dict()["state"])
            for one, another in zip(right.values(), states.values(), strict=True)
            for name in ("exp_avg", "exp_avg_sq")
        )
        found["again"] = train(Losses(model, rank), ours, 6, 8), train(Losses(other, rank), third, 6, 8)

        narrow = make(torch.bfloat16)
        lows = zero.AdamW(narrow.parameters(), lr=LR, store=store, name="narrow")
        found["narrow"] = train(Losses(narrow, rank, torch.bfloat16), lows, 0, STEPS)
        found["master"] = {str(state["master"].to_local().dtype) for state in lows.state_dict()["state"].values()}
        for more in ({"lr": LR * (1 + rank)}, {"lr": LR, "moments": torch.bfloat16 if rank else None}):
            with pytest.raises(RankError, match=r"make this optimizer of DTensors together: .* on rank 0, and "):
                zero.AdamW(make().parameters(), store=store, name=f"differs{len(more)}", **more)
        if rank == 1:  # one more step, in its store alone
            steps = store.get("optimizer/steps")
            store.put("optimizer/steps", steps + (steps > 0), owner=Owner("optimizer", "optimizer"))
        with pytest.raises(MisuseError, match="states of different steps under 'optimizer'"):
            zero.AdamW(model.parameters(), lr=LR, store=store, existing="resume")
        with pytest.raises(MisuseError, match="leave stage= out"):
            zero.AdamW(make().parameters(), lr=LR, store=store, name="divided", stage=zero.Stage1())
        store.close()
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, sharded, tmp_path_factory.mktemp("sharded") / "run")


@FULLY_SHARDS
def test_sharded_parameters_are_those_of_torch_bit_for_bit(shards: list[dict[str, Any]]) -> None:
    for found in shards:
        assert found["numbers"] == found["expected"]
        assert equal(*found["models"])
        theirs, ours = found["states"]
        assert theirs.keys() == ours.keys()
        assert all(equal(theirs[index], ours[index]) for index in theirs)


@FULLY_SHARDS
def test_each_rank_has_the_states_of_its_shard(shards: list[dict[str, Any]]) -> None:
    for found in shards:
        assert 8 * found["local"] <= found["bytes"] <= 8 * (found["local"] + 7 * 16)  # each parameter begins a line of its own
    sizes = [found["bytes"] for found in shards]
    assert max(sizes) < 0.56 * sum(sizes)


@FULLY_SHARDS
def test_distributed_checkpoints_take_and_give_them(shards: list[dict[str, Any]]) -> None:
    for found in shards:
        assert found["wrapped"]
        assert found["checkpointed"]
        one, other = found["again"]
        assert one == other
        assert found["master"] == {"torch.float32"}


def prune(model: nn.Module) -> None:
    """Change some values between two steps."""
    for parameter in model.parameters():
        parameter.data.view(-1)[::3] = 0.0


def replicated(rank: int, folder: Path) -> dict[str, Any]:
    def make(dtype: torch.dtype = torch.float32) -> Any:
        torch.manual_seed(5 + 100 * rank)  # all take over rank 0's
        return DistributedDataParallel(Uneven().to(dtype), find_unused_parameters=True)

    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        reference, model = make(dtype), make(dtype)
        narrow = dtype is torch.bfloat16
        groups = [{"params": list(reference.parameters())}]
        theirs: Any = MasterAdamW(groups, lr=LR) if narrow else torch.optim.AdamW(groups, lr=LR, fused=True)
        clip = None if narrow else 0.1
        numbers = train(Losses(reference, rank, dtype), theirs, 0, 3, clip=clip)
        prune(reference)
        numbers += train(Losses(reference, rank, dtype), theirs, 3, STEPS, clip=clip)
        with TieredStore.open(folder / f"{dtype}{rank}", dram="1MiB") as store:
            options: Any = {"lr": LR, "store": store, "stage": zero.Stage1()}
            ours = zero.AdamW(model.parameters(), **options)
            mine = train(Losses(model, rank, dtype), ours, 0, 3, clip=clip)
            prune(model)
            store.commit()  # which has the values as it finds them
            ours = zero.AdamW(model.parameters(), **options, existing="resume")
            mine += train(Losses(model, rank, dtype), ours, 3, STEPS, clip=clip)
            store.commit()
            if rank == 0:  # as if its last commit were older than the other's
                now = (store.get("optimizer/steps") - 1).clamp(min=0)
                store.put("optimizer/steps", now, owner=Owner("optimizer", "optimizer"))
            with pytest.raises(MisuseError, match="ranks have states of different steps under 'optimizer'"):
                zero.AdamW(model.parameters(), **options, existing="resume")
            store.rollback()
            states = theirs.state_dict()["state"], ours.state_dict()["state"]
            twin = zero.AdamW(make(dtype).parameters(), **options, name="twin")
            twin.load_state_dict(ours.state_dict())
            found[str(dtype)] = {
                "numbers": (numbers, mine),
                "models": (whole(reference), whole(model)),
                "states": states,
                "twin": twin.state_dict()["state"],
                "bytes": sum(store.spec(key).nbytes for key in store if key.startswith("optimizer/") and "#" in key),
                "elements": sum(p.numel() for p in model.parameters() if p.grad is not None),
            }
            store.close()
    return found


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, replicated, tmp_path_factory.mktemp("replicated") / "run")


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_replicas_are_those_of_torch_bit_for_bit(replicas: list[dict[str, Any]], dtype: str) -> None:
    for found in (one[dtype] for one in replicas):
        numbers, mine = found["numbers"]
        assert mine == numbers
        assert equal(*found["models"])
        theirs, ours = found["states"]
        assert theirs.keys() == ours.keys() == found["twin"].keys()
        for index in theirs:
            assert equal(theirs[index], {name: ours[index][name] for name in theirs[index]})


@pytest.mark.parametrize(("dtype", "each"), [("torch.float32", 8), ("torch.bfloat16", 12)])
def test_each_replica_has_the_states_of_half(replicas: list[dict[str, Any]], dtype: str, each: int) -> None:
    for found in (one[dtype] for one in replicas):
        half = found["elements"] / 2
        assert each * (half - 64) <= found["bytes"] <= each * (half + 64)


def one_has_more(rank: int, folder: Path) -> str:
    """Rank 1 ended before it committed what both had added."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with TieredStore.open(folder / f"{rank}", dram="1MiB") as store:
        options: Any = {"lr": LR, "store": store, "stage": zero.Stage1()}
        optimizer = zero.AdamW(model[0].parameters(), **options)
        store.commit()
        optimizer.add_param_group({"params": list(model[1].parameters())})
        if rank == 0:
            store.commit()
        store.rollback()
        with pytest.raises(MisuseError) as raised:
            zero.AdamW(model[0].parameters(), **options, existing="resume")
        store.close()
    return str(raised.value)


def one_begins_anew(rank: int, folder: Path) -> str:
    """Rank 1's drive was replaced."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    with TieredStore.open(folder / f"{rank}", dram="1MiB") as store:
        for name in ("old", "old" if rank == 0 else "new"):
            model: Any = fully_shard(Uneven(), mesh=mesh)
            had = f"{name}/steps" in store
            try:
                optimizer = zero.AdamW(
                    model.parameters(), lr=LR, store=store, name=name, existing="resume" if had else "refuse"
                )
            except MisuseError as error:
                said = str(error)
                break
            train(Losses(model, rank), optimizer, 0, 2)
        store.close()
    return said


@pytest.mark.parametrize(
    ("scenario", "of_all"),
    [
        (one_has_more, "4 parameters, at most at step 0; 2 parameters, at most at step 0"),
        pytest.param(
            one_begins_anew, "7 parameters, at most at step 2; 7 parameters, at most at step 0", marks=FULLY_SHARDS
        ),
    ],
)
def test_stores_that_are_not_of_one_step_are_refused_on_all(tmp_path: Path, scenario: Any, of_all: str) -> None:
    for said in on_ranks(2, scenario, tmp_path / "run", timeout=20.0):
        assert f"of all: {of_all})" in said
