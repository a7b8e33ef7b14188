"""Engines on two ranks: every stage trains as one process that adds up the same gradients; checkpoints of all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.integrations.deepspeed.training import batch, engine_of, equal, made
from tests.zero.ranks import on_ranks
from tiered import RankError, zero

PASSES = 8


def numbers(rank: int, first: int = 0, passes: int = PASSES) -> list[int]:
    return [2 * number + rank for number in range(first, first + passes)]


def engine_for(folder: Path, rank: int, stage: int, **more: Any) -> zero.Engine:
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    return engine_of(folder, made(seed=rank), zero_optimization={"stage": stage}, **sizes, **more)


def train(engine: zero.Engine, chosen: list[int]) -> list[float]:
    seen = []
    for number in chosen:
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return seen


def trained(rank: int, folder: Path) -> dict[int, Any]:
    """Of each stage: losses, norm, parameters, counters; and after a checkpoint in a new engine."""
    found: dict[int, Any] = {}
    for stage in range(4):
        engine = engine_for(folder / str(stage), rank, stage)
        losses = train(engine, numbers(rank, 0, 4))
        tagged = folder / str(stage) / f"saved{rank}"  # each rank sees another folder, as on nodes without a shared one
        for tag in ("kept", "given up", "another", None):
            engine.save_checkpoint(tagged, tag, client_state={"rank": "both"})
            if rank == 0 and tag == "another":
                shutil.rmtree(tagged / "given up")
        generations = len(engine.store.generations)
        losses += train(engine, numbers(rank, 4, 2))
        engine.destroy()
        engine = engine_for(folder / str(stage), rank, stage)
        path, state = engine.load_checkpoint(tagged, "kept")
        assert engine.load_checkpoint(tagged)[0] == str(tagged / "global_step2")
        assert path is not None
        assert state == {"rank": "both"}
        again = train(engine, numbers(rank, 4, 4))
        found[stage] = {
            "losses": losses[:4] + again,
            "as before": losses[4:] == again[:2],
            "norm": engine.get_global_grad_norm(),
            "parameters": engine.module_state_dict(),
            "generations": generations,
            "counters": (engine.global_steps, engine.global_samples, engine.world_size),
        }
        engine.save_16bit_model(folder / str(stage))
        engine.destroy()
    return found


def test_every_stage_is_the_same_training(tmp_path: Path) -> None:
    reference = made(seed=0)
    optimizer = torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True)
    losses: list[list[float]] = [[], []]
    norms = []
    for step in range(PASSES // 2):
        sums = {}
        for rank in range(2):
            for number in numbers(rank, 2 * step, 2):
                loss = reference(*batch(number))
                (loss / 2).backward()
                losses[rank].append(loss.item())
            for name, parameter in reference.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
                    parameter.grad = None
        for name, parameter in reference.named_parameters():
            parameter.grad = sums[name] / 2 if name in sums else None
        norms.append(float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value for name, value in reference.state_dict().items() if name != "seen"}
    for rank, found in enumerate(on_ranks(2, trained, tmp_path)):
        for stage, seen in found.items():
            assert seen["as before"], stage
            assert seen["counters"] == (4, 64, 2)
            assert seen["generations"] == 3
            assert seen["losses"] == pytest.approx(losses[rank], rel=1e-5), stage
            assert seen["norm"] == pytest.approx(norms[-1], rel=1e-4)
            for name, value in expected.items():
                assert torch.allclose(seen["parameters"][name], value, rtol=1e-4, atol=1e-5), (stage, name)
        assert found[0]["losses"] == found[1]["losses"]
        assert equal(found[0]["parameters"], found[1]["parameters"])
        saved = torch.load(tmp_path / "3" / "pytorch_model.bin")
        assert equal(saved, found[3]["parameters"]) or rank == 1


def overflowing(rank: int, folder: Path) -> list[Any]:
    """An overflow on one rank skips the step of all."""
    engine = engine_for(folder, rank, 2, fp16={"enabled": True, "initial_scale_power": 6, "hysteresis": 1})
    seen = []
    for number, chosen in enumerate(numbers(rank)):
        loss = engine(*batch(chosen))
        engine.backward(loss * (float("inf") if number == 3 and rank == 1 else 1.0))
        engine.step()
        seen.append((engine.skipped_steps, engine.loss_scale()))
    parameters = engine.module_state_dict()
    engine.destroy()
    return [seen, parameters["embed.weight"]]


def test_an_overflow_on_one_rank_skips_the_step_of_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, overflowing, tmp_path)
    assert first[0] == second[0] == [(0, 64.0)] * 3 + [(1, 32.0)] * 5
    assert torch.equal(first[1], second[1])


def shared(rank: int, folder: Path) -> dict[str, Any]:
    """What ranks divide, and what they have to agree on."""
    found: dict[str, Any] = {}
    data = TensorDataset(torch.arange(10))
    from tests.integrations.deepspeed.training import config_for

    config = config_for(folder, zero_optimization={"stage": 3})
    other = {**config, "gradient_clipping": 0.25 * (1 + rank)}
    with pytest.raises(RankError, match=r"cannot initialize together: clipping is 0\.25 on rank 0, and 0\.5 on rank 1"):
        zero.initialize(model=made(), config=other)
    engine, _, loader, _ = zero.initialize(model=made(), config=config, training_data=data)
    assert loader is not None
    found["data"] = [value for (values,) in loader for value in values.tolist()]
    found["sizes"] = engine.get_batch_info()
    try:
        engine.save_checkpoint(folder / "saved", tag=f"of{rank}")
    except RankError as error:
        found["tags"] = str(error)
    engine.destroy()
    return found


def test_what_ranks_share(tmp_path: Path) -> None:
    first, second = on_ranks(2, shared, tmp_path)
    assert sorted(first["data"] + second["data"]) == list(range(10))
    assert first["sizes"] == second["sizes"] == (16, 4, 2)
    assert "saves the checkpoint 'of0', and rank 1 'of1': use one tag" in first["tags"]
    assert first["tags"] == second["tags"]
