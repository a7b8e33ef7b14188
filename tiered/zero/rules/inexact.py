"""Rules with states in fewer bytes. Each is the same algorithm in memory, bit for bit, and none is that of torch's class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from tiered.packing.moments import MOMENTS_4, MOMENTS_8, MomentsCode
from tiered.types import TensorSpec
from tiered.zero.rules.exact import MuonRule, adamw_step
from tiered.zero.rules.rule import State

__all__ = [
    *("AdamW4bitRoundedRule", "AdamW4bitRule", "AdamW8bitRoundedRule", "AdamW8bitRule", "AdamWBFloat16RoundedRule"),
    *("AdamWBFloat16Rule", "MuonBFloat16Rule"),
]

PART = 1 << 19
"""Elements of which an update widens the moments at once. A part takes two moments of 2 MiB in fp32, whatever the size of the
parameter."""

def _parts(param: torch.Tensor) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the parts of ``param``, flat, each with a buffer for its moments, which have the type of ``param``."""
    count = param.numel()
    wide = torch.empty(2 * min(count, PART), dtype=param.dtype, device=param.device)
    for begin in range(0, count, PART):
        size = min(PART, count - begin)
        yield slice(begin, begin + size), (wide[:size], wide[wide.numel() - size :])


@dataclass(frozen=True)
class AdamWBFloat16Rule:
    """AdamW whose moments are bfloat16 in the store. Inexact: a step widens them, is that of ``AdamWRule``, and rounds them to
    even. A second moment does not change where a step moves it by less than 1/512 of itself, as with ``betas[1]`` above 0.998
    a gradient does that is smaller than those before."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    fused: ClassVar[bool] = True
    torch_names: ClassVar[Mapping[str, str]] = {"m16": "exp_avg", "v16": "exp_avg_sq"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return dict.fromkeys(("m16", "v16"), TensorSpec("bfloat16", param.shape, 2))

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        kept = state["m16"], state["v16"]
        for part, wide in _parts(param):
            for moment, narrow in zip(wide, kept, strict=True):
                moment.copy_(narrow[part])
            adamw_step(self, param[part], grad[part], *wide, step)
            for moment, narrow in zip(wide, kept, strict=True):
                narrow[part].copy_(moment)


class _Encoded:
    """Update of AdamW whose moments are codes in the store: a step decodes them, is that of ``AdamWRule``, and encodes them."""

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    fused: ClassVar[bool] = True
    code: ClassVar[MomentsCode]
    state: ClassVar[str]
    """The name of the one state: the records of both moments."""
    decoded: ClassVar[tuple[str, str]] = ("exp_avg", "exp_avg_sq")
    """What torch calls the moments."""

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {self.state: TensorSpec("uint8", (self.code.record_bytes,), 1)}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        for part, wide in _parts(param):
            records = self.code.records(state[self.state], part)
            narrow = wide if param.dtype is torch.float32 else tuple(moment.float() for moment in wide)
            if step > 1:
                self.code.decode(records, narrow)
            for moment, decoded in zip(wide, narrow, strict=True):
                if step == 1:
                    moment.zero_()
                elif moment is not decoded:
                    moment.copy_(decoded)
            adamw_step(self, param[part], grad[part], *wide, step)
            self.code.encode([moment.float() for moment in wide], records)

    def encoded(self, moments: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the state of both moments of a whole parameter, each any float of shape (n,) in memory order."""
        count = moments[0].numel()
        records = torch.empty((self.code.first.blocks(count), self.code.record_bytes), dtype=torch.uint8, device="cpu")
        self.code.encode([moment.to("cpu", torch.float32).contiguous() for moment in moments], records)
        return records.flatten()

    def decode(self, state: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both moments, float32 of shape (count,), of a whole parameter's state (flat)."""
        found = torch.empty(count, dtype=torch.float32, device="cpu"), torch.empty(count, dtype=torch.float32, device="cpu")
        self.code.decode(self.code.records(state, slice(0, count)), found)
        return found


@dataclass(frozen=True)
class AdamW8bitRule(_Encoded):
    """AdamW with moments in 8 bits, in blocks of 256 (Dettmers and others, 2022, https://arxiv.org/abs/2110.02861). Inexact."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    granularity: ClassVar[int] = MOMENTS_8.block
    code: ClassVar[MomentsCode] = MOMENTS_8
    state: ClassVar[str] = "moments8"


@dataclass(frozen=True)
class AdamW4bitRule(_Encoded):
    """AdamW with moments in 4 bits, in blocks of 128 (after Li and others, 2023, https://arxiv.org/abs/2309.01507). Inexact."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    granularity: ClassVar[int] = MOMENTS_4.block
    code: ClassVar[MomentsCode] = MOMENTS_4
    state: ClassVar[str] = "moments4"


@dataclass(frozen=True)
class AdamWBFloat16RoundedRule(AdamWBFloat16Rule):
    """``AdamWBFloat16Rule`` for bf16 parameters without masters, which are rounded by chance (Zamirai and others, 2020,
    https://arxiv.org/abs/2010.06192). Inexact. ``seed``, the step, and a parameter's name and elements decide."""

    seed: int = 0

    rounds: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("seed",)


@dataclass(frozen=True)
class AdamW8bitRoundedRule(AdamW8bitRule):
    """``AdamW8bitRule`` for bf16 parameters without masters, as ``AdamWBFloat16RoundedRule``."""

    seed: int = 0

    rounds: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("seed",)


@dataclass(frozen=True)
class AdamW4bitRoundedRule(AdamW4bitRule):
    """``AdamW4bitRule`` for bf16 parameters without masters, as ``AdamWBFloat16RoundedRule``."""

    seed: int = 0

    rounds: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("seed",)


@dataclass(frozen=True)
class MuonBFloat16Rule(MuonRule):
    """Muon whose momentum is bfloat16 in the store. Inexact: a step widens it, is that of ``MuonRule``, and rounds it to
    even."""

    workspace: ClassVar[int] = 32
    """Bytes as of ``MuonRule``, and the momentum in fp32."""
    torch_names: ClassVar[Mapping[str, str]] = {"momentum16": "momentum_buffer"}

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        return {"momentum16": TensorSpec("bfloat16", param.shape, 2)}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        momentum = state["momentum16"].to(param.dtype)
        super().update(param, grad, {"momentum_buffer": momentum}, step)
        state["momentum16"].copy_(momentum)
