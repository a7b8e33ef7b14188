"""The loss scale of fp16: how large it is, and what an overflow does to it.

As the section ``fp16`` of DeepSpeed's configuration says it (https://www.deepspeed.ai/docs/config-json/#fp16-training-options):
the scale doubles after so many steps without overflow, and is halved by an overflow once the hysteresis is used up.
"""

from __future__ import annotations

from typing import Any

from tiered.errors import MisuseError, TieredError
from tiered.integrations.deepspeed.config import LossScaling

__all__ = ["LossScale"]

FACTOR = 2.0
"""By what the scale grows and shrinks."""


class LossScale:
    """Scale of losses: ``scale``. ``updated`` after each step says whether it overflowed. 1 and constant where fp16 is off."""

    def __init__(self, settings: LossScaling) -> None:
        self.dynamic = settings.enabled and settings.loss_scale == 0
        fixed = settings.loss_scale if settings.enabled else 1.0
        self.scale = FACTOR**settings.initial_scale_power if self.dynamic else float(fixed)
        self._settings = settings
        self._left = settings.hysteresis
        self._steps = 0
        self._last_overflow = -1

    def updated(self, overflow: bool) -> None:
        """Adjust a dynamic scale to a step. Raises TieredError for an overflow at the smallest scale: training diverged."""
        if not self.dynamic:
            return
        settings = self._settings
        if overflow:
            if self._left > 1:
                self._left -= 1
            elif self.scale <= settings.min_loss_scale:
                raise TieredError(
                    f"gradients overflow at the smallest loss scale, {self.scale:g}: lower the learning rate, clip gradients, "
                    "or train in bf16"
                )
            else:
                self.scale = max(self.scale / FACTOR, settings.min_loss_scale)
            self._last_overflow = self._steps
        else:
            if settings.consecutive_hysteresis:
                self._left = settings.hysteresis
            stable = self._steps - self._last_overflow - 1
            if stable > 0 and stable % settings.loss_scale_window == 0:
                self._left = settings.hysteresis
                self.scale *= FACTOR
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` takes."""
        return {"scale": self.scale, "left": self._left, "steps": self._steps, "last_overflow": self._last_overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises MisuseError for what is none."""
        whole = [state.get(name) for name in ("left", "steps", "last_overflow")]
        scale = state.get("scale")
        if not isinstance(scale, float) or not 0 < scale < float("inf") or not all(type(one) is int for one in whole):
            raise MisuseError(f"the checkpoint has {state!r:.100} for the loss scale: it is damaged")
        if self.dynamic:
            self.scale, (self._left, self._steps, self._last_overflow) = scale, whole  # type: ignore[assignment]
