"""Rows that write parameters, and train on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from bench.compatible.side import Dense, Side, Toy, drawn, row, tokens

GROUP = "writes"

Write = Callable[[Any, Any], object]


def writes(name: str, *, depends: bool = True) -> Callable[[Write], Write]:
    """Register a write to a model or one of its parameters: before training, and between two steps."""

    def register(write: Write) -> Write:
        def function(side: Side) -> None:
            model, optimizer = side.toy()
            weight = model.body[2].fc1.weight
            write(model, weight)
            side.train(model, optimizer)
            write(model, weight)
            side.show("written", model.state_dict())
            side.train(model, optimizer, first=2)

        row(GROUP, name, depends=depends)(function)
        return write

    return register


# -- torch.nn.init ---------------------------------------------------------------------------------------------------------

writes("init.uniform_")(lambda model, p: init.uniform_(p, -0.1, 0.1))
writes("init.normal_")(lambda model, p: init.normal_(p, 0, 0.02))
writes("init.trunc_normal_")(lambda model, p: init.trunc_normal_(p, 0, 0.02))
writes("init.constant_")(lambda model, p: init.constant_(model.body[2].fc1.bias, 0.01))
writes("init.ones_")(lambda model, p: init.ones_(model.body[2].norm.weight))
writes("init.zeros_")(lambda model, p: init.zeros_(model.head.bias))
writes("init.eye_")(lambda model, p: init.eye_(p))
writes("init.xavier_uniform_")(lambda model, p: init.xavier_uniform_(p))
writes("init.xavier_normal_")(lambda model, p: init.xavier_normal_(p))
writes("init.kaiming_uniform_")(lambda model, p: init.kaiming_uniform_(p))
writes("init.kaiming_normal_")(lambda model, p: init.kaiming_normal_(p, nonlinearity="relu"))
writes("init.orthogonal_")(lambda model, p: init.orthogonal_(p))
writes("init.sparse_")(lambda model, p: init.sparse_(p, 0.5))


@row(GROUP, "init.dirac_")
def _(side: Side) -> None:
    model = nn.Sequential(*(nn.Conv2d(48, 48, 3, padding=1) for _ in range(6)))
    side.page(model)
    optimizer = side.adamw(model.parameters())
    init.dirac_(model[2].weight)
    side.train(model, optimizer, loss=lambda model, number: (model(drawn(number, 2, 48, 5, 5)) - 1).square().mean())


# -- p.data ----------------------------------------------------------------------------------------------------------------


@writes("p.data.mul_(0.9)")
def _(model: Any, p: Any) -> None:
    p.data.mul_(0.9)


@writes("p.data.clamp_(-0.05, 0.05)")
def _(model: Any, p: Any) -> None:
    p.data.clamp_(-0.05, 0.05)


@writes("weight clipping of all parameters (as in WGAN)")
def _(model: Any, p: Any) -> None:
    for q in model.parameters():
        q.data.clamp_(-0.04, 0.04)


@writes("p.data = x")
def _(model: Any, p: Any) -> None:
    p.data = drawn(7, 192, 96) / 20


@writes("p.data = p.data * 0.5")
def _(model: Any, p: Any) -> None:
    p.data = p.data * 0.5


@writes("p.data.copy_(x)")
def _(model: Any, p: Any) -> None:
    p.data.copy_(drawn(7, 192, 96) / 20)


@writes("p.data[1:3].fill_(0.1)")
def _(model: Any, p: Any) -> None:
    p.data[1:3].fill_(0.1)


@writes("p.data[0] = x")
def _(model: Any, p: Any) -> None:
    p.data[0] = drawn(7, 96) / 20


@writes("p.data *= 0.9, p.data += x")
def _(model: Any, p: Any) -> None:
    p.data *= 0.9
    p.data += drawn(7, 192, 96) / 100


@writes("p.data.normal_(0, 0.02) and bias.data.zero_() over modules")
def _(model: Any, p: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            module.bias.data.zero_()


@writes("p.detach().zero_() of a bias")
def _(model: Any, p: Any) -> None:
    model.body[1].fc1.bias.detach().zero_()


@writes("p.detach().numpy()[:] = x")
def _(model: Any, p: Any) -> None:
    p.detach().numpy()[:2] = 0.05


@writes("a view kept in a variable: v = p.data; v.mul_(0.5)")
def _(model: Any, p: Any) -> None:
    view = p.data
    view.mul_(0.5)
    view.add_(0.01)


# -- under no_grad ---------------------------------------------------------------------------------------------------------


@writes("no_grad: p.copy_(x)")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    p.copy_(drawn(7, 192, 96) / 20)


@writes("no_grad: p.add_(x), p.mul_(x), p.sub_(x), p.div_(2)")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    p.add_(drawn(7, 192, 96) / 50).mul_(0.7).sub_(0.001).div_(2)


@writes("no_grad: p += x, p *= 0.9")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    p += 0.01
    p *= 0.9


@writes("no_grad: p[0] = 0")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    p[0] = 0


@writes("no_grad: p[:, 3:5].fill_(0.1), p[mask] = 0")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    p[:, 3:5].fill_(0.1)
    p[p.abs() < 0.02] = 0


@writes("no_grad: p.clamp_, p.zero_, p.fill_, p.masked_fill_")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    p.masked_fill_(p > 0.05, 0.05).clamp_(min=-0.05)
    model.body[0].fc1.bias.zero_()
    model.body[1].fc1.bias.fill_(0.01)


@writes("no_grad: p.normal_(), p.uniform_()")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    p.normal_(0, 0.02)
    model.body[1].fc1.weight.uniform_(-0.05, 0.05)


@writes("no_grad: torch._foreach_mul_(parameters, 0.9)")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.9)


@writes("no_grad: p.lerp_ towards another model (soft update)")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    torch.manual_seed(5)
    for q, other in zip(model.parameters(), Toy().parameters(), strict=True):
        q.lerp_(other, 0.1)


@writes("no_grad: torch.mul(p, 0.5, out=p)")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    torch.mul(p, 0.5, out=p)


@writes("no_grad: weights of one layer copied to another")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    model.body[4].fc1.weight.copy_(p)


@writes("no_grad: rows normalised, embed.weight.div_(norm)")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    model.embed.weight.div_(model.embed.weight.norm(dim=1, keepdim=True))


@writes("no_grad: magnitude pruning, p.mul_(mask)")
@torch.no_grad()
def _(model: Any, p: Any) -> None:
    for block in model.body:
        weight = block.fc1.weight
        weight.mul_((weight.abs() > weight.abs().flatten().kthvalue(4000).values).to(weight.dtype))


@writes("inference_mode: p.copy_(x)")
@torch.inference_mode()
def _(model: Any, p: Any) -> None:
    p.copy_(drawn(7, 192, 96) / 20)


# -- modules ---------------------------------------------------------------------------------------------------------------


@writes("module.reset_parameters()")
def _(model: Any, p: Any) -> None:
    model.body[2].fc1.reset_parameters()


@writes("reset_parameters() of every module", depends=False)
def _(model: Any, p: Any) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@writes("model.apply(initialise)")
def _(model: Any, p: Any) -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            init.zeros_(module.bias)

    model.apply(initialise)


@writes("vector_to_parameters")
def _(model: Any, p: Any) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())


@writes("load_state_dict, strict", depends=False)
def _(model: Any, p: Any) -> None:
    torch.manual_seed(3)
    model.load_state_dict(Toy().state_dict())


@writes("load_state_dict(strict=False) of a part")
def _(model: Any, p: Any) -> None:
    torch.manual_seed(3)
    other = {name: value for name, value in Toy().state_dict().items() if name.startswith("body.2")}
    missing = model.load_state_dict(other, strict=False)
    assert len(missing.missing_keys) == len(list(model.parameters())) - len(other)


@writes("load_state_dict(assign=True)")
def _(model: Any, p: Any) -> None:
    torch.manual_seed(3)
    model.load_state_dict(Toy().state_dict(), assign=True)


@writes("load_state_dict of one submodule")
def _(model: Any, p: Any) -> None:
    torch.manual_seed(3)
    model.body[2].load_state_dict(Toy().body[1].state_dict())


@writes("writes into model.state_dict()['name']")
def _(model: Any, p: Any) -> None:
    model.state_dict()["body.2.fc1.weight"].mul_(0.5)


@writes("writes into all values of state_dict()")
def _(model: Any, p: Any) -> None:
    for value in model.state_dict().values():
        value.mul_(0.9).add_(0.001)


@writes("writes into state_dict() by index, out=, views and torch._foreach_mul_")
def _(model: Any, p: Any) -> None:
    state = model.state_dict()
    state["body.2.fc1.weight"][0] = 0.01
    state["body.2.fc1.weight"].view(-1)[5:9].fill_(0.02)
    state["body.1.fc1.weight"].t()[2] = 0.05
    state["body.1.fc1.weight"][5] *= 0.5
    torch.mul(state["head.weight"], 0.9, out=state["head.weight"])
    torch._foreach_mul_(list(state.values()), 0.95)


@writes("state_dict() changed in place, and loaded")
def _(model: Any, p: Any) -> None:
    state = model.state_dict()
    for value in state.values():
        value.mul_(0.9)
    model.load_state_dict(state)


@writes("a clone of state_dict() changed, and loaded")
def _(model: Any, p: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for value in state.values():
        value.mul_(0.9)
    model.load_state_dict(state)


@writes("state_dict()['name'].numpy()[:] = x")
def _(model: Any, p: Any) -> None:
    model.state_dict()["body.2.fc1.weight"].numpy()[:2] = 0.05


@row(GROUP, "a state_dict() of before a step is written to after it")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    state = model.state_dict()
    side.train(model, optimizer)
    state["head.weight"].mul_(0.5)
    side.train(model, optimizer, first=2)


@row(GROUP, "a new head made from the old one's values, before paging")
def _(side: Side) -> None:
    model = Toy()
    head = nn.Linear(96, 80)
    with torch.no_grad():
        head.weight[:64] = model.head.weight
        head.bias[:64] = model.head.bias
    model.head = head
    side.page(model)
    side.train(model, side.adamw(model.parameters()), 2)


@row(GROUP, "a new head made from the old one's values, and trained beside the model")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    head = nn.Linear(96, 80)
    with torch.no_grad():
        head.weight[:64] = model.head.weight
        head.bias.copy_(torch.cat([model.head.bias, model.head.bias[:16]]))
    other = nn.Parameter(model.head.weight.detach().clone())
    trained = torch.optim.SGD([*head.parameters(), other], 0.1)
    (head(drawn(0, 4, 96)).square().mean() + (drawn(0, 4, 96) @ other.t()).square().mean()).backward()
    trained.step()
    side.show("head", [head.weight, head.bias, other])
    side.train(model, optimizer, first=2)


@row(GROUP, "a parameter made of another's values, nn.Parameter(p.detach().clone())")
def _(side: Side) -> None:
    model = Toy()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    side.page(model)
    side.train(model, side.adamw(model.parameters()), 2)


@writes("writing to a frozen parameter")
def _(model: Any, p: Any) -> None:
    p.requires_grad_(False)
    p.copy_(drawn(7, 192, 96) / 20)
    p[0] = 0


@writes("random masks through p.data for some modules")
def _(model: Any, p: Any) -> None:
    for block in model.body:
        block.fc2.weight.data *= (torch.rand_like(block.fc2.weight) > 0.1).float()


@row(GROUP, "a write between backward and step")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(2):
        optimizer.zero_grad()
        model.loss(number).backward()
        with torch.no_grad():
            model.body[1].fc2.weight.mul_(0.99)
        optimizer.step()
    side.train(model, optimizer, first=2)


class Writing(Dense):
    """Writes to a parameter in its forward."""

    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.scale, self.write = nn.Parameter(torch.ones(32)), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.scale)
        return super().forward(x * self.scale)


def in_forward(name: str) -> Callable[[Callable[[torch.Tensor], object]], object]:
    """Register what a forward writes to a parameter of its own, before it uses it."""

    def register(write: Callable[[torch.Tensor], object]) -> None:
        def function(side: Side) -> None:
            model = side.page(Writing(write))
            side.train(model, side.adamw(model.parameters(), lr=1e-2), 4)

        row(GROUP, name)(function)

    return register


in_forward("in forward: p.data.mul_(0.9)")(lambda p: p.data.mul_(0.9))
in_forward("in forward: p.data[0] = 0.5")(lambda p: p.data.__setitem__(0, 0.5))
in_forward("in forward: p.data = p.data * 0.9")(lambda p: setattr(p, "data", p.data * 0.9))
in_forward("in forward, no_grad: p.clamp_(0, 0.99)")(lambda p: _clamped(p))
in_forward("in forward, once: p.data.copy_(x) (ActNorm)")(lambda p: p.data.copy_(p.data * 0.3) if bool(p[0] > 0.9) else p)


@torch.no_grad()
def _clamped(p: torch.Tensor) -> None:
    p.clamp_(0, 0.99)


def in_hook(name: str) -> Callable[[Callable[[Any, Callable[..., None]], object]], object]:
    """Register a place of a hook that writes to ``model.body[3].fc1.weight`` through ``.data``."""

    def register(place: Callable[[Any, Callable[..., None]], object]) -> None:
        def function(side: Side) -> None:
            model, optimizer = side.toy()

            def shrink(*_: object) -> None:
                model.body[3].fc1.weight.data.mul_(0.9)

            place(model.body[3].fc1, shrink)
            side.train(model, optimizer, 4)

        row(GROUP, name)(function)

    return register


in_hook("in a forward pre-hook: p.data.mul_(0.9)")(lambda module, hook: module.register_forward_pre_hook(hook))
in_hook("in a forward hook: p.data.mul_(0.9)")(lambda module, hook: module.register_forward_hook(hook))
in_hook("in a full backward hook: p.data.mul_(0.9)")(lambda module, hook: module.register_full_backward_hook(hook))
in_hook("in p.register_hook: p.data.mul_(0.9)")(lambda module, hook: module.weight.register_hook(hook))


@row(GROUP, "in p.register_post_accumulate_grad_hook: SGD by hand, p.grad = None (LOMO)")
def _(side: Side) -> None:
    model = side.page(Toy())

    @torch.no_grad()
    def descend(p: torch.Tensor) -> None:
        p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(descend)
    for number in range(3):
        loss = model.loss(number)
        loss.backward()
        side.show("loss", loss.detach())
    side.show_model(model)


@row(GROUP, "weight decay by hand between steps")
def _(side: Side) -> None:
    model, optimizer = side.toy(weight_decay=0.0)
    for number in range(3):
        side.train(model, optimizer, 1, first=number)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - 1e-3)
    side.show_model(model)


@row(GROUP, "SGD by hand, p -= lr * p.grad")
def _(side: Side) -> None:
    model = side.page(Toy())
    for number in range(3):
        loss = model.loss(number)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        side.show("loss", loss)
    side.show_model(model)


@row(GROUP, "weights swapped with their EMA for evaluation, and back")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    ema = [p.detach().clone() for p in model.parameters()]
    side.train(model, optimizer)
    kept = [p.detach().clone() for p in model.parameters()]
    for p, value in zip(model.parameters(), ema, strict=True):
        p.data.copy_(value)
    with torch.no_grad():
        side.show("with EMA", model.loss(9))
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)
    side.train(model, optimizer, first=2)


@row(GROUP, "weights perturbed and restored (evolution, SPSA)")
def _(side: Side) -> None:
    model = side.page(Toy())
    for number in range(2):
        losses = []
        for sign in (1, -2, 1):
            torch.manual_seed(number)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p), alpha=1e-3 * sign)
            losses.append(model.eval().loss(number).detach())
        side.show("losses", losses)
        torch.manual_seed(number)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01 * (losses[0] - losses[1]) * torch.randn_like(p))
    side.show_model(model)


# -- the structure of the model --------------------------------------------------------------------------------------------


@row(GROUP, "tied before paging, head.weight = embed.weight")
def _(side: Side) -> None:
    model = Toy()
    model.head.weight = model.embed.weight
    side.page(model)
    side.train(model, side.adamw(model.parameters()), 3)


@row(GROUP, "tied after paging, head.weight = embed.weight")
def _(side: Side) -> None:
    model = side.page(Toy())
    model.head.weight = model.embed.weight
    side.train(model, side.adamw(model.parameters()), 3)


@row(GROUP, "tied by data after paging, head.weight.data = embed.weight.data")
def _(side: Side) -> None:
    model = side.page(Toy())
    model.head.weight.data = model.embed.weight.data
    side.train(model, side.adamw(model.parameters()), 3)


@row(GROUP, "a module replaced after paging")
def _(side: Side) -> None:
    model = side.page(Toy())
    model.head = nn.Linear(96, 64)
    side.train(model, side.adamw(model.parameters()), 2)


@row(GROUP, "a module added after paging")
def _(side: Side) -> None:
    model = side.page(Toy())
    model.body.append(nn.Linear(96, 96))
    side.train(model, side.adamw(model.parameters()), 2)


@row(GROUP, "a parameter replaced after paging, m.weight = nn.Parameter(x)")
def _(side: Side) -> None:
    model = side.page(Toy())
    model.head.weight = nn.Parameter(drawn(7, 64, 96) / 20)
    side.train(model, side.adamw(model.parameters()), 2)


@row(GROUP, "a module removed after paging")
def _(side: Side) -> None:
    model = side.page(Toy())
    del model.body[5]
    side.train(model, side.adamw(model.parameters()), 2)


def _layers(side: Side, change: Callable[[Any], object], before: bool) -> None:
    model = Dense()
    if before:
        change(model)
    side.page(model)
    if not before:
        change(model)
    side.train(model, side.adamw(model.parameters()), 3)


for _name, _change in {
    "parametrizations.weight_norm": lambda model: nn.utils.parametrizations.weight_norm(model[4]),
    "parametrizations.spectral_norm": lambda model: nn.utils.parametrizations.spectral_norm(model[4]),
    "parametrizations.orthogonal": lambda model: nn.utils.parametrizations.orthogonal(model[4]),
    "utils.spectral_norm (old)": lambda model: nn.utils.spectral_norm(model[4]),
    "utils.weight_norm (old)": lambda model: nn.utils.weight_norm(model[4]),
    "utils.prune.l1_unstructured": lambda model: prune.l1_unstructured(model[4], "weight", 0.5),
}.items():
    for _before in (True, False):

        @row(GROUP, f"{_name} {'before' if _before else 'after'} paging")
        def _(side: Side, change: Any = _change, before: bool = _before) -> None:
            _layers(side, change, before)


@row(GROUP, "model.to(torch.bfloat16) after paging")
def _(side: Side) -> None:
    model = side.page(Toy()).to(torch.bfloat16)
    side.show("logits", model(drawn(0, 2, 5).abs().long()))


@row(GROUP, "model.to('meta') after paging", depends=False)
def _(side: Side) -> None:
    _meta(side, lambda model: model.to("meta"))


@row(GROUP, "model.to_empty(device='meta') after paging", depends=False)
def _(side: Side) -> None:
    _meta(side, lambda model: model.to_empty(device="meta"))


def _meta(side: Side, move: Callable[[Any], object]) -> None:
    model = side.page(Toy())
    move(model)
    side.show("devices", sorted({p.device.type for p in model.parameters()}))


@row(GROUP, "torch.__future__.set_swap_module_params_on_conversion(True), model.to(torch.bfloat16)")
def _(side: Side) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    model = side.page(Toy()).to(torch.bfloat16)
    side.show("logits", model.eval()(tokens(0, 2, 5)))


@row(GROUP, "model.to('cpu'), model.float() after paging")
def _(side: Side) -> None:
    model = side.page(Toy())
    model.to("cpu").float()
    side.train(model, side.adamw(model.parameters()), 2)


@row(GROUP, "buffers written in forward (batch norm)")
def _(side: Side) -> None:
    layers: list[nn.Module] = []
    for _number in range(5):
        layers += [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()]
    model = side.page(nn.Sequential(*layers))
    optimizer = side.adamw(model.parameters())
    side.train(model, optimizer, 3, loss=lambda model, number: (model(drawn(number, 8, 128)) - 1).square().mean())
