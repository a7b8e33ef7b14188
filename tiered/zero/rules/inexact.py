"""Rules with states in fewer bytes. Each is the same algorithm in memory, bit for bit, and none is that of torch's class."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from tiered import TensorSpec
from tiered.packing.moments import MOMENT_4, MOMENT_8, SQUARE_4, SQUARE_8, BlockCode
from tiered.zero.rules.exact import MuonRule, adamw_step
from tiered.zero.rules.rule import State

__all__ = [
    *("AdamW4bitRoundedRule", "AdamW4bitRule", "AdamW8bitRoundedRule", "AdamW8bitRule", "AdamWBFloat16RoundedRule"),
    *("AdamWBFloat16Rule", "MuonBFloat16Rule"),
]

PART = 1 << 19
"""Elements of which an update widens the moments at once. A part takes two moments of 2 MiB in fp32, whatever the size of the
parameter."""


class _Kept(threading.local):
    """The buffer for both moments of a part, which stays: fresh memory takes longer to come than what an update computes in
    it."""

    wide: torch.Tensor | None = None


_KEPT = _Kept()


def _parts(param: torch.Tensor) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the parts of ``param``, flat, each with a buffer for its moments, which have the type of ``param``."""
    count = param.numel()
    if param.dtype is torch.float32 and param.device.type == "cpu":
        wide = _KEPT.wide = torch.empty(2 * PART, device="cpu") if _KEPT.wide is None else _KEPT.wide
    else:
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

    codes: ClassVar[Mapping[str, BlockCode]]
    """By the name of the state, how each moment is encoded."""
    decoded: ClassVar[Mapping[str, str]]
    """By what torch calls a moment, the name of its state."""

    def state_specs(self, param: TensorSpec) -> Mapping[str, TensorSpec]:
        found = {}
        for name, code in self.codes.items():
            found[name] = TensorSpec("uint8", (code.bytes_in_block,), 1)
            found[f"{name}_scale"] = TensorSpec("float32", (1,), 4)
        return found

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: State, step: int) -> None:
        for part, wide in _parts(param):
            kept = [(code, *code.part(state[name], state[f"{name}_scale"], part)) for name, code in self.codes.items()]
            for moment, (code, codes, scales) in zip(wide, kept, strict=True):
                if step == 1:
                    moment.zero_()
                elif moment.dtype is torch.float32:
                    code.decode(codes, scales, moment)
                else:
                    narrow = torch.empty(moment.numel(), device=moment.device)
                    code.decode(codes, scales, narrow)
                    moment.copy_(narrow)
            adamw_step(self, param[part], grad[part], *wide, step)  # type: ignore[arg-type]  # a dataclass with these fields
            for moment, (code, codes, scales) in zip(wide, kept, strict=True):
                code.encode(moment.float(), codes, scales)

    def encoded(self, name: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the states of a whole moment, any float of shape (n,) in memory order, that torch calls ``name``."""
        state = self.decoded[name]
        code, count = self.codes[state], moment.numel()
        codes = torch.empty(code.nbytes(count), dtype=torch.uint8, device="cpu")
        scales = torch.empty(code.blocks(count), device="cpu")
        code.encode(moment.to("cpu", torch.float32).contiguous(), codes, scales)
        return {state: codes, f"{state}_scale": scales}

    def decode(self, name: str, state: State, count: int) -> torch.Tensor:
        """Return the moment that torch calls ``name``, float32 of shape (count,), of a whole parameter's states (flat)."""
        found = torch.empty(count, device="cpu")
        kept = self.decoded[name]
        self.codes[kept].decode(state[kept], state[f"{kept}_scale"], found)
        return found


@dataclass(frozen=True)
class AdamW8bitRule(_Encoded):
    """AdamW with moments in 8 bits, in blocks of 256 (Dettmers and others, 2022, https://arxiv.org/abs/2110.02861). Inexact."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    granularity: ClassVar[int] = MOMENT_8.block
    codes: ClassVar[Mapping[str, BlockCode]] = {"m8": MOMENT_8, "v8": SQUARE_8}
    decoded: ClassVar[Mapping[str, str]] = {"exp_avg": "m8", "exp_avg_sq": "v8"}
    torch_names: ClassVar[Mapping[str, str]] = {
        "m8": "exp_avg_codes", "m8_scale": "exp_avg_scales",
        "v8": "exp_avg_sq_codes", "v8_scale": "exp_avg_sq_scales",
    }


@dataclass(frozen=True)
class AdamW4bitRule(_Encoded):
    """AdamW with moments in 4 bits, in blocks of 128 (after Li and others, 2023, https://arxiv.org/abs/2309.01507). Inexact."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    granularity: ClassVar[int] = MOMENT_4.block
    codes: ClassVar[Mapping[str, BlockCode]] = {"m4": MOMENT_4, "v4": SQUARE_4}
    decoded: ClassVar[Mapping[str, str]] = {"exp_avg": "m4", "exp_avg_sq": "v4"}
    torch_names: ClassVar[Mapping[str, str]] = {
        "m4": "exp_avg_codes", "m4_scale": "exp_avg_scales",
        "v4": "exp_avg_sq_codes", "v4_scale": "exp_avg_sq_scales",
    }


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
