"""``initialize`` for a script in DeepSpeed's style, in plain torch and in memory: what the examples are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tiered.integrations.deepspeed.schedules import SCHEDULES

__all__ = ["Plain", "initialize"]


class Plain:
    """The calls of an engine that the examples make."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        self.model, self.device = model, torch.device("cpu")
        self.passes = config.get("gradient_accumulation_steps", 1)
        self.batch = config.get("train_micro_batch_size_per_gpu", config.get("train_batch_size"))
        self.clip = config["gradient_clipping"]
        self.global_steps = self.micro_steps = 0
        params = {**config["optimizer"]["params"]}
        self.optimizer = torch.optim.AdamW(model.parameters(), **{**params, "betas": tuple(params["betas"])}, fused=True)
        self.scheduler = SCHEDULES[config["scheduler"]["type"]](self.optimizer, **config["scheduler"]["params"])

    def __call__(self, *inputs: Any) -> Any:
        return self.model(*inputs)

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self.batch)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.passes if self.passes > 1 else loss).backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.passes == 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.global_steps += 1

    def load_checkpoint(self, folder: str) -> None:
        """There is none."""

    def save_checkpoint(self, folder: str) -> None:
        torch.save(self.model.state_dict(), Path(folder).with_suffix(".plain"))


def initialize(*, model: nn.Module, config: str, training_data: Any = None) -> tuple[Plain, Any, Any, Any]:
    read = json.loads(Path(config).read_text())
    engine = Plain(model, read)
    loader = None
    if training_data is not None:
        loader = DataLoader(training_data, batch_size=engine.batch, sampler=DistributedSampler(training_data, 1, 0))
    return engine, engine.optimizer, loader, engine.scheduler
