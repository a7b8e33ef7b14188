"""Rows that read or change gradients between backward and step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import utils

from bench.compatible.side import Dense, Side, Toy, row
from tiered import zero

GROUP = "gradients"

Deed = Callable[[Any, Any], object]


def between(name: str) -> Callable[[Deed], Deed]:
    """Register what is done with a model and its optimizer between backward and step; what it returns is shown."""

    def register(deed: Deed) -> Deed:
        def function(side: Side) -> None:
            model, optimizer = side.toy()
            side.train(model, optimizer, 3, between=lambda: side.show("result", deed(model, optimizer)))

        row(GROUP, name)(function)
        return deed

    return register


# -- clipping --------------------------------------------------------------------------------------------------------------

for _norm in (0.5, 1.0, 2.0, 3.0, math.inf, -math.inf, -1.0, 0.0):
    for _foreach in (None, True, False):
        between(f"clip_grad_norm_, norm_type={_norm:g}, foreach={_foreach}")(
            lambda model, optimizer, norm=_norm, foreach=_foreach: utils.clip_grad_norm_(
                model.parameters(), 0.1, norm_type=norm, foreach=foreach
            )
        )
between("clip_grad_norm_, error_if_nonfinite=True")(
    lambda model, optimizer: utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
)
between("clip_grad_norm_ of a large norm (nothing is clipped)")(
    lambda model, optimizer: utils.clip_grad_norm_(model.parameters(), 1e6)
)
between("clip_grad_norm_ of one module")(lambda model, optimizer: utils.clip_grad_norm_(model.body[2].parameters(), 0.01))
between("clip_grad_norm_ of one parameter")(lambda model, optimizer: utils.clip_grad_norm_(model.head.weight, 0.01))
between("clip_grad_norm_ for each module in turn")(
    lambda model, optimizer: [utils.clip_grad_norm_(block.parameters(), 0.01) for block in model.body]
)
between("clip_grad_norm_ twice")(
    lambda model, optimizer: [
        utils.clip_grad_norm_(model.parameters(), 0.5),
        utils.clip_grad_norm_(model.parameters(), 0.1),
        utils.clip_grad_norm_(model.parameters(), 0.1),
    ]
)
between("clip_grad_value_")(lambda model, optimizer: utils.clip_grad_value_(model.parameters(), 1e-3))
between("clip_grad_value_, foreach=True")(
    lambda model, optimizer: utils.clip_grad_value_(model.parameters(), 1e-3, foreach=True)
)
between("clip_grad_value_, foreach=False")(
    lambda model, optimizer: utils.clip_grad_value_(model.parameters(), 1e-3, foreach=False)
)
between("get_total_norm of the gradients")(lambda model, optimizer: utils.get_total_norm([p.grad for p in model.parameters()]))
for _norm in (1.0, 2.0, math.inf):
    for _foreach in (None, True, False):
        between(f"get_total_norm, norm_type={_norm:g}, foreach={_foreach}")(
            lambda model, optimizer, norm=_norm, foreach=_foreach: utils.get_total_norm(
                [p.grad for p in model.parameters()], norm_type=norm, foreach=foreach
            )
        )
for _foreach in (None, True, False):
    between(f"clip_grads_with_norm_, foreach={_foreach}")(
        lambda model, optimizer, foreach=_foreach: utils.clip_grads_with_norm_(
            model.parameters(), 0.1, utils.get_total_norm([p.grad for p in model.parameters()]), foreach=foreach
        )
    )


@between("get_total_norm and clip_grads_with_norm_")
def _(model: Any, optimizer: Any) -> object:
    norm = utils.get_total_norm([p.grad for p in model.parameters()])
    utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return norm


@between("clipping by hand, p.grad.mul_(factor)")
def _(model: Any, optimizer: Any) -> object:
    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(torch.clamp(0.1 / (total + 1e-6), max=1.0))
    return total


@between("clipping by hand, p.grad.data.clamp_(-c, c)")
def _(model: Any, optimizer: Any) -> object:
    for p in model.parameters():
        p.grad.data.clamp_(-1e-3, 1e-3)
    return None


@between("adaptive gradient clipping (norms of units of p and p.grad)")
def _(model: Any, optimizer: Any) -> object:
    for p in model.parameters():
        if p.ndim > 1:
            most = p.detach().norm(dim=1, keepdim=True).clamp_(min=1e-3) * 0.01
            norm = p.grad.detach().norm(dim=1, keepdim=True)
            p.grad.detach().copy_(torch.where(norm > most, p.grad * (most / norm.clamp(min=1e-6)), p.grad))
    return None


@row(GROUP, "optimizer.clip_grad_norm_ of tiered beside torch's")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def clip() -> None:
        if side.paged:
            side.show("norm", optimizer.clip_grad_norm_(0.1))
        else:
            side.show("norm", utils.clip_grad_norm_(model.parameters(), 0.1))

    side.train(model, optimizer, 3, between=clip)


# -- reading ---------------------------------------------------------------------------------------------------------------

between("p.grad.norm()")(lambda model, optimizer: [p.grad.norm() for p in model.parameters()])
between("p.grad.data.norm(2).item()")(lambda model, optimizer: [p.grad.data.norm(2).item() for p in model.parameters()])
between("p.grad.detach().clone()")(lambda model, optimizer: [p.grad.detach().clone() for p in model.parameters()])
between("p.grad.abs().mean(), max(), min(), std()")(
    lambda model, optimizer: [
        [p.grad.abs().mean(), p.grad.max(), p.grad.min(), p.grad.std()] for p in model.parameters() if p.ndim > 1
    ]
)
between("torch.histc(p.grad)")(lambda model, optimizer: [torch.histc(p.grad, bins=10) for p in model.parameters()])
between("p.grad.numpy()")(lambda model, optimizer: [p.grad.numpy() for p in model.parameters()])
between("p.grad.tolist()")(lambda model, optimizer: model.head.bias.grad.tolist())
between("repr(p.grad)")(lambda model, optimizer: repr(model.head.bias.grad))
between("p.grad[0], p.grad[0, 1].item()")(
    lambda model, optimizer: [model.head.weight.grad[0], model.head.weight.grad[0, 1].item()]
)
between("p.grad.shape, dtype, device, numel, stride, is_sparse")(
    lambda model, optimizer: [
        [g.shape, g.dtype, g.device, g.numel(), g.stride(), g.is_sparse, g.requires_grad, g.sum()]
        for g in (p.grad for p in model.parameters())
    ]
)
between("p.grad is not None")(
    lambda model, optimizer: [[p.grad is not None for p in model.parameters()], model.head.bias.grad.sum()]
)
between("torch.isfinite(p.grad).all()")(
    lambda model, optimizer: (
        [[torch.isfinite(p.grad).all(), p.grad.isnan().any()] for p in model.parameters()] + [model.head.bias.grad.sum()]
    )
)
between("torch.cat of all gradients")(lambda model, optimizer: torch.cat([p.grad.flatten() for p in model.parameters()]))
between("torch._foreach_norm of gradients")(lambda model, optimizer: torch._foreach_norm([p.grad for p in model.parameters()]))
between("torch.dot of gradient and parameter")(
    lambda model, optimizer: [torch.dot(p.grad.flatten(), p.detach().flatten()) for p in model.parameters()]
)
between("p.grad.float(), p.grad.to(float64), p.grad.cpu()")(
    lambda model, optimizer: [[g.float(), g.to(torch.float64), g.cpu()] for g in [model.head.weight.grad]]
)
between("torch.nn.utils.parameters_to_vector of gradients")(
    lambda model, optimizer: utils.parameters_to_vector([p.grad for p in model.parameters()])
)
between("torch.save of gradients")(lambda model, optimizer: _saved([p.grad for p in model.parameters()]))
between("p.grad.sum(), (p.grad ** 2).sum(), p.grad @ p.grad.t()")(
    lambda model, optimizer: [[g.sum(), (g**2).sum(), g @ g.t()] for g in (p.grad for p in model.parameters()) if g.ndim > 1]
)
between("optimizer.param_groups[0]['params'] gradients")(
    lambda model, optimizer: [p.grad.norm() for p in optimizer.param_groups[0]["params"]]
)


def _saved(gradients: list[torch.Tensor]) -> object:
    import io

    file = io.BytesIO()
    torch.save(gradients, file)
    file.seek(0)
    return torch.load(file)


# -- writing ---------------------------------------------------------------------------------------------------------------


@between("p.grad.mul_(0.5): scaling by hand")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.mul_(0.5)


@between("p.grad *= 0.5, p.grad /= 3")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad *= 0.5
        p.grad /= 3


@between("p.grad.data.div_(2)")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.data.div_(2)


@between("gradient noise, p.grad.add_(noise)")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)


@between("p.grad = p.grad + noise")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad + 1e-3 * torch.randn_like(p)


@between("p.grad = torch.zeros_like(p)")
def _(model: Any, optimizer: Any) -> None:
    model.head.weight.grad = torch.zeros_like(model.head.weight)


@between("p.grad = x (gradients from elsewhere)")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = torch.full(p.shape, 1e-3)


@between("p.grad = None for one parameter")
def _(model: Any, optimizer: Any) -> None:
    model.body[2].fc1.weight.grad = None


@between("p.grad.zero_() for one parameter")
def _(model: Any, optimizer: Any) -> None:
    model.body[2].fc1.weight.grad.zero_()


@between("p.grad.copy_(x)")
def _(model: Any, optimizer: Any) -> None:
    model.body[2].fc1.weight.grad.copy_(torch.full((192, 96), 1e-3))


@between("p.grad[0] = 0, p.grad[:, 1:3] *= 2, p.grad[mask] = 0")
def _(model: Any, optimizer: Any) -> None:
    columns = torch.ones(3, 4)
    columns[:, 1:3] *= 2
    if columns.tolist() != [[1.0, 2.0, 2.0, 1.0]] * 3:
        raise ValueError("this device itself multiplies columns in place wrongly")
    grad = model.body[2].fc1.weight.grad
    grad[0] = 0
    grad[:, 1:3] *= 2
    grad[grad.abs() < 1e-5] = 0


@between("gradient centralisation, g.sub_(g.mean(1))")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        if p.ndim > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


@between("torch.nan_to_num_(p.grad)")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)


@between("L2 by hand, p.grad.add_(p, alpha=decay)")
def _(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.grad.add_(p, alpha=1e-2)


@between("sign of the gradient, p.grad.sign_()")
def _(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad.sign_()


@between("torch._foreach_mul_ of gradients")
def _(model: Any, optimizer: Any) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)


@between("gradients projected (PCGrad), with a second loss")
def _(model: Any, optimizer: Any) -> None:
    first = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    model.loss(99).backward()
    for p, other in zip(model.parameters(), first, strict=True):
        dot = (p.grad * other).sum()
        if dot < 0:
            p.grad.sub_(dot / other.square().sum() * other)
        p.grad.add_(other)


# -- loops -----------------------------------------------------------------------------------------------------------------


@row(GROUP, "accumulation over four batches")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for step in range(3):
        for number in range(4):
            loss = model.loss(4 * step + number) / 4
            loss.backward()
            side.show("loss", loss)
        optimizer.step()
        optimizer.zero_grad()
    side.show_model(model)


@row(GROUP, "accumulation over three batches, then clip_grad_norm_")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for step in range(3):
        for number in range(3):
            (model.loss(3 * step + number) / 3).backward()
        side.show("norm", utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    side.show_model(model)


@row(GROUP, "clip_grad_norm_ between the batches of an accumulation")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for step in range(2):
        for number in range(3):
            model.loss(3 * step + number).backward()
            side.show("norm", utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    side.show_model(model)


@row(GROUP, "zero_grad(set_to_none=False)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):
        optimizer.zero_grad(set_to_none=False)
        side.show("gradients", [None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.loss(number).backward()
        optimizer.step()
    side.show_model(model)


@row(GROUP, "zero_grad(set_to_none=False), then a step without backward")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    side.train(model, optimizer, first=2)


@row(GROUP, "model.zero_grad()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):
        model.zero_grad()
        model.loss(number).backward()
        optimizer.step()
    side.show_model(model)


@row(GROUP, "model.zero_grad(set_to_none=False)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):
        model.zero_grad(set_to_none=False)
        model.loss(number).backward()
        optimizer.step()
    side.show_model(model)


@row(GROUP, "p.grad = None for every parameter in place of zero_grad")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):
        for p in model.parameters():
            p.grad = None
        model.loss(number).backward()
        optimizer.step()
    side.show_model(model)


@row(GROUP, "gradients after step() and after zero_grad()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    model.loss(0).backward()
    optimizer.step()
    side.show("after step", [p.grad.norm() for p in model.parameters()])
    optimizer.zero_grad()
    side.show("after zero_grad", [p.grad for p in model.parameters()])
    side.train(model, optimizer, first=1)


@row(GROUP, "step() twice with the same gradients")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    model.loss(0).backward()
    optimizer.step()
    optimizer.step()
    side.show_model(model)
    side.train(model, optimizer, first=1)


@row(GROUP, "freezing and unfreezing between steps")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(4):
        model.body[number].requires_grad_(False)
        if number:
            model.body[number - 1].requires_grad_(True)
        side.train(model, optimizer, 1, first=number)


@row(GROUP, "gradual unfreezing, all frozen but the head at first")
def _(side: Side) -> None:
    model = side.page(Toy().requires_grad_(False))
    model.head.requires_grad_(True)
    optimizer = side.adamw(model.parameters())
    for number in range(3):
        side.train(model, optimizer, 1, first=number)
        model.body[5 - number].requires_grad_(True)


@row(GROUP, "frozen before paging, optimizer over the others")
def _(side: Side) -> None:
    model = Toy()
    model.body[0].requires_grad_(False)
    model.embed.requires_grad_(False)
    side.page(model)
    side.train(model, side.adamw([p for p in model.parameters() if p.requires_grad]), 3)


@row(GROUP, "a step is skipped when the norm is large")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(4):
        optimizer.zero_grad()
        loss = model.loss(number) * (100 if number == 1 else 1)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        side.show("norm", norm)
        if norm < 20:
            optimizer.step()
    side.show_model(model)


@row(GROUP, "a step is skipped by zero_grad")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(4):
        model.loss(number).backward()
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()
    side.show_model(model)


@row(GROUP, "a step is skipped where a gradient is infinite")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(4):
        optimizer.zero_grad()
        (model.loss(number) * (math.inf if number == 1 else 1)).backward()
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
        side.show("finite", finite)
        if finite:
            optimizer.step()
    side.show_model(model)


@row(GROUP, "some parameters get no gradient (an unused branch)")
def _(side: Side) -> None:
    class Branches(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.turn = getattr(self, "turn", 0) + 1
            x = self.embed(x)
            for index, block in enumerate(self.body):
                if (index + self.turn) % 3:
                    x = block(x)
            return self.head(self.norm(x))

    model = side.page(Branches())
    optimizer = side.adamw(model.parameters())
    given = [lambda: side.show("given", [p.grad is None for p in model.parameters()])]
    side.train(model, optimizer, 4, between=given[0])


@row(GROUP, "two losses, two backwards, one step")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):
        optimizer.zero_grad()
        model.loss(number).backward()
        model.loss(number + 100).backward()
        optimizer.step()
    side.show_model(model)


@row(GROUP, "GAN: two models, two optimizers, detach")
def _(side: Side) -> None:
    maker, critic = side.page(Dense(last=lambda width: torch.nn.Linear(width, 32))), side.page(Dense(), name="critic")
    makers, critics = side.adamw(maker.parameters()), side.adamw(critic.parameters())
    for number in range(3):
        noise, real = (torch.randn(8, 32) for _ in range(2))
        critics.zero_grad()
        loss = critic(maker(noise).detach()).mean() - critic(real).mean()
        loss.backward()
        critics.step()
        makers.zero_grad()
        other = -critic(maker(noise)).mean()
        other.backward()
        makers.step()
        side.show(f"losses {number}", [loss, other])
    side.show_model(maker)
    side.show_model(critic)


# -- loss scaling ----------------------------------------------------------------------------------------------------------


def _scaled(side: Side, scaler: Any, *, clip: bool, strike: bool) -> None:
    model, optimizer = side.toy()
    for number in range(4):
        optimizer.zero_grad()
        loss = model.loss(number) * (math.inf if strike and number == 1 else 1)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            norm = utils.clip_grad_norm_(model.parameters(), 0.1)
            if not (strike and number == 1):
                side.show("norm", norm)
        scaler.step(optimizer)
        scaler.update()
        side.show("scale", scaler.get_scale())
    side.show_model(model)


for _clip in (False, True):
    for _strike in (False, True):
        _how = ("unscale_ and clip_grad_norm_" if _clip else "without unscale_") + (", an infinite step" if _strike else "")

        @row(GROUP, f"torch.amp.GradScaler('cpu'), {_how}")
        def _(side: Side, clip: bool = _clip, strike: bool = _strike) -> None:
            _scaled(side, torch.amp.GradScaler("cpu", init_scale=1024.0), clip=clip, strike=strike)

        @row(GROUP, f"tiered.zero.GradScaler, {_how}")
        def _(side: Side, clip: bool = _clip, strike: bool = _strike) -> None:
            kind = zero.GradScaler if side.paged else torch.amp.GradScaler
            _scaled(side, kind("cpu", init_scale=1024.0), clip=clip, strike=strike)


@row(GROUP, "a static loss scale by hand, unscaled before step")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def unscale() -> None:
        for p in model.parameters():
            p.grad.div_(256)

    side.train(model, optimizer, 3, backward=lambda loss: (loss * 256).backward(), between=unscale)


@row(GROUP, "GradScaler with fp16 autocast")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model.loss(number)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        side.show("loss", loss)
    side.show_model(model)
