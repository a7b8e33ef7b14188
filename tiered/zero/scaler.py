"""Dynamic loss scaling for gradients that are in the store."""

from __future__ import annotations

from typing import Any

import torch

from tiered.zero.optimizer import AdamW

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for ``tiered.zero.AdamW``: ``scale(loss)``, ``unscale_``, ``step``, ``update``, ``state_dict``.

    Whether gradients are finite is found out when they arrive, and they are multiplied when the update is applied, so neither
    parameters nor gradients are read once more. bf16 and fp16 gradients are unscaled, and clipped afterwards, as fp32: what
    loss scaling saved from underflow stays. Scales are powers of two by default; with others the bits are those of torch's
    ``unscale_`` (multiplication by the inverse), not those of the division in its fused kernel.

    Arguments as in torch (https://docs.pytorch.org/docs/stable/amp.html), but ``device`` is "cpu" unless said otherwise. Other
    optimizers, and one whose parameters stay in memory, are treated as torch does. ``unscale_`` and ``step`` raise MisuseError
    for an optimizer with ``update="in_backward"``.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; ``unscale_`` may come next, for gradients that were scaled before."""
        super().load_state_dict(state_dict)
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """What torch calls from ``unscale_``. Sets ``found_inf`` (0-d) to 1 where a gradient is infinite or NaN."""
        if not isinstance(optimizer, AdamW) or optimizer.resident:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        finite = optimizer._unscale(inv_scale)
        if not all(finite):
            found_inf.fill_(1.0)
        return {found_inf.device: found_inf} if finite else {}
