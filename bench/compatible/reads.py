"""Rows that read parameters outside the forward of their module."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bench.compatible.side import Dense, Side, Toy, drawn, row, tokens

GROUP = "reads"

Read = Callable[[Any, Any], object]


def reads(name: str, *, depends: bool = True) -> Callable[[Read], Read]:
    """Register a read of a model and one of its parameters: before training, after a step, and between backward and step."""

    def register(read: Read) -> Read:
        def function(side: Side) -> None:
            model, optimizer = side.toy()
            weight = model.body[2].fc1.weight
            side.show("before training", read(model, weight))
            side.train(model, optimizer, 1)
            side.show("after a step", read(model, weight))
            side.train(model, optimizer, 1, first=1, between=lambda: side.show("before a step", read(model, weight)))

        row(GROUP, name, depends=depends)(function)
        return read

    return register


def penalised(name: str) -> Callable[[Callable[[Any], torch.Tensor]], object]:
    """Register a term that is added to the loss."""

    def register(term: Callable[[Any], torch.Tensor]) -> None:
        def function(side: Side) -> None:
            model, optimizer = side.toy()
            side.train(model, optimizer, 3, loss=lambda model, number: model.loss(number) + term(model))

        row(GROUP, name)(function)

    return register


# -- terms of a loss -------------------------------------------------------------------------------------------------------

penalised("L1 penalty over model.parameters()")(lambda model: 1e-4 * sum(p.abs().sum() for p in model.parameters()))
penalised("L2 penalty over model.parameters()")(lambda model: 1e-4 * sum(p.square().sum() for p in model.parameters()))
penalised("L2 penalty, p.norm(2) stacked")(lambda model: 1e-3 * torch.stack([p.norm(2) for p in model.parameters()]).sum())
penalised("penalty on one weight")(lambda model: 1e-3 * model.body[2].fc1.weight.pow(2).sum())
penalised("penalty on the head's bias")(lambda model: 1e-2 * model.head.bias.abs().sum())
penalised("orthogonality penalty, W @ W.T - 1")(
    lambda model: 1e-4 * (model.body[1].fc2.weight @ model.body[1].fc2.weight.t() - torch.eye(96)).square().sum()
)
penalised("penalty on differences between layers")(
    lambda model: 1e-3 * sum((a.fc1.weight - b.fc1.weight).square().sum() for a, b in pairwise(model.body))
)
penalised("a detached penalty (only a number)")(lambda model: 1e-3 * sum(p.detach().abs().sum() for p in model.parameters()))


@row(GROUP, "distance to the initial weights (L2-SP)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    initial = [p.detach().clone() for p in model.parameters()]

    def loss(model: Any, number: int) -> torch.Tensor:
        pairs = zip(model.parameters(), initial, strict=True)
        return model.loss(number) + 1e-2 * sum((p - q).square().sum() for p, q in pairs)

    side.train(model, optimizer, 3, loss=loss)


@row(GROUP, "elastic weight consolidation (Fisher from gradients)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    model.loss(0).backward()
    fisher = {name: p.grad.detach().clone().pow(2) for name, p in model.named_parameters()}
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(model: Any, number: int) -> torch.Tensor:
        term = sum((fisher[name] * (p - initial[name]).pow(2)).sum() for name, p in model.named_parameters())
        return model.loss(number) + 10 * term

    side.train(model, optimizer, 3, loss=loss)


# -- parameters used away from their module --------------------------------------------------------------------------------


@row(GROUP, "model.head.weight used outside its module")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def loss(model: Any, number: int) -> torch.Tensor:
        batch = tokens(number, 4, 12)
        hidden = model.embed(batch)
        for block in model.body:
            hidden = block(hidden)
        return functional.cross_entropy((hidden @ model.head.weight.t()).flatten(0, 1), batch.flatten())

    side.train(model, optimizer, 3, loss=loss)


@row(GROUP, "functional.linear with another module's weight (tied by hand)")
def _(side: Side) -> None:
    class Tied(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.body:
                x = block(x)
            return functional.linear(self.norm(x), self.embed.weight)

    model = Tied()
    del model.head
    side.page(model)
    side.train(model, side.adamw(model.parameters()), 3)


class Summed(Toy):
    """Uses its own parameters through ``self.parameters()`` inside forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 1e-3 * sum(p.abs().mean() for p in self.parameters()))


@row(GROUP, "self.parameters() inside forward")
def _(side: Side) -> None:
    model = side.page(Summed())
    side.train(model, side.adamw(model.parameters()), 3)


@row(GROUP, "weights in a plain list inside forward")
def _(side: Side) -> None:
    class Listed(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [block.fc1.weight for block in self.body]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1e-2 * sum(weight.mean() for weight in self.weights)

    model = side.page(Listed())
    side.train(model, side.adamw(model.parameters()), 3)


@row(GROUP, "a module that returns its parameter")
def _(side: Side) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(96))

        def forward(self) -> torch.Tensor:
            return self.value

    class Scaled(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Returns()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale()
            x = self.embed(x)
            for block in self.body:
                x = block(x * scale)
            return self.head(self.norm(x) * scale)

    model = side.page(Scaled())
    side.train(model, side.adamw(model.parameters()), 3)


@row(GROUP, "a loss module that holds the model's parameters")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    class Penalty(nn.Module):
        def __init__(self, parameters: Any) -> None:
            super().__init__()
            self.watched = nn.ParameterList(parameters)

        def forward(self) -> torch.Tensor:
            return 1e-3 * sum(p.square().sum() for p in self.watched)

    penalty = Penalty(model.parameters())
    side.train(model, optimizer, 3, loss=lambda model, number: model.loss(number) + penalty())


@row(GROUP, "ParameterList and ParameterDict used in forward")
def _(side: Side) -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(drawn(i, 128, 128) / 12) for i in range(6))
            self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(128)), "shift": nn.Parameter(torch.zeros(128))})

        def loss(self, number: int) -> torch.Tensor:
            return self(drawn(number, 8, 128)).square().mean()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight) * self.named["scale"] + self.named["shift"]
            return x

    model = side.page(Lists())
    side.train(model, side.adamw(model.parameters()), 3)


@row(GROUP, "a submodule called on its own, outside the model")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.show("block", model.body[3](drawn(0, 2, 3, 96)))
    side.train(model, optimizer, 2)
    side.show("block", model.body[3].fc1(drawn(0, 2, 3, 96)))


@row(GROUP, "a method of the model other than forward")
def _(side: Side) -> None:
    class Methods(Toy):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(self.embed.weight[x], self.head.weight, self.head.bias)

    model = side.page(Methods())
    optimizer = side.adamw(model.parameters())
    side.show("logits", model.logits(tokens(0, 3, 5)))
    side.train(model, optimizer, 2, loss=lambda model, number: model.logits(tokens(number, 3, 5)).square().mean())


@row(GROUP, "forward called directly (model.forward(x))")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def loss(model: Any, number: int) -> torch.Tensor:
        return model.forward(tokens(number, 4, 8)).square().mean()

    side.train(model, optimizer, 2, loss=loss)


@row(GROUP, "forward hooks that read the module's weight")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for block in model.body:
        block.fc1.register_forward_hook(lambda module, inputs, output: side.show("hook", module.weight.mean()))
        block.fc2.register_forward_pre_hook(lambda module, inputs: side.show("pre-hook", module.weight.std()))
    side.train(model, optimizer, 2)


@row(GROUP, "full backward hooks")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for block in model.body:
        block.fc1.register_full_backward_hook(lambda module, grads, outputs: side.show("hook", [grads[0], outputs[0]]))
    side.train(model, optimizer, 2)


# -- values ----------------------------------------------------------------------------------------------------------------

reads("p.detach().numpy()")(lambda model, p: p.detach().numpy())
reads("numpy.asarray of a parameter's detach()")(lambda model, p: __import__("numpy").asarray(p.detach()))
reads("p.tolist()")(lambda model, p: p.tolist())
reads("p[0, 0].item()")(lambda model, p: p[0, 0].item())
reads("float(p.mean()), f'{p.mean():.4f}'")(lambda model, p: [float(p.mean()), f"{p.mean():.4f}"])
reads("repr(p): printing a parameter")(lambda model, p: repr(p))
reads("print(p.data)")(lambda model, p: str(p.data))
reads("repr(model)", depends=False)(lambda model, p: repr(model))
reads("parameters_to_vector")(lambda model, p: parameters_to_vector(model.parameters()))
reads("torch.equal(p, q)")(lambda model, p: [torch.equal(p, p.clone()), torch.equal(p, model.body[3].fc1.weight), p.sum()])
reads("torch.allclose(p, q)")(
    lambda model, p: [torch.allclose(p, p.clone()), torch.allclose(p, model.body[3].fc1.weight), p.sum()]
)
reads("torch.histc(p)")(lambda model, p: torch.histc(p.detach(), bins=20, min=-0.1, max=0.1))
reads("torch.histogram(p.detach())")(lambda model, p: torch.histogram(p.detach(), bins=8).hist)
reads("p.norm()")(lambda model, p: p.norm())
reads("torch.linalg.vector_norm(p)")(lambda model, p: torch.linalg.vector_norm(p))
reads("torch.linalg.svdvals(p)")(lambda model, p: torch.linalg.svdvals(p.detach()))
reads("torch.tensor(p), torch.tensor([p[0, 0], p[1, 1]])")(
    lambda model, p: [torch.tensor(p), torch.tensor([p[0, 0], p[1, 1]]), torch.tensor(p.detach())]
)
reads("torch.as_tensor(p, dtype=torch.float64), torch.asarray(p, copy=True)")(
    lambda model, p: [torch.as_tensor(p, dtype=torch.float64), torch.asarray(p, copy=True).detach()]
)
reads("x.new_tensor(p)")(lambda model, p: torch.zeros(1).new_tensor(p))
reads("a function of torch.jit.script")(lambda model, p: _scripted()(p).detach())
@functools.cache
def _scripted() -> Callable[[torch.Tensor], torch.Tensor]:
    def function(weight: torch.Tensor) -> torch.Tensor:
        return (weight * weight).sum()

    return torch.jit.script(function)


reads("p.data")(lambda model, p: p.data)
reads("p.detach()")(lambda model, p: p.detach())
reads("p.detach().clone()")(lambda model, p: p.detach().clone())
reads("p.clone()")(lambda model, p: p.clone())
reads("p[0]")(lambda model, p: p[0])
reads("p[1:5, ::2]")(lambda model, p: p[1:5, ::2])
reads("p[mask], p[index tensor]")(lambda model, p: [p[p.detach() > 0.05], p[torch.tensor([3, 1])]])
reads("for r in p (iteration)")(lambda model, p: [r.sum() for r in p])
reads("p.t(), p.T, p.mT")(lambda model, p: [p.t(), p.T, p.mT])
reads("p.view(-1), p.reshape, p.flatten()")(lambda model, p: [p.view(-1), p.reshape(2, -1), p.flatten()])
reads("p.chunk, p.split, p.unbind")(lambda model, p: [*p.chunk(3), *p.split(50), *p.unbind()[:2]])
reads("torch.cat of parameters")(lambda model, p: torch.cat([q.flatten() for q in model.parameters()]))
reads("torch.stack of parameters")(lambda model, p: torch.stack([block.fc1.weight for block in model.body]))
reads("torch.einsum with a parameter")(lambda model, p: torch.einsum("ij,kj->ik", p, p))
reads("x @ p, functional.linear(x, p)")(lambda model, p: [drawn(0, 4, 192) @ p, functional.linear(drawn(0, 4, 96), p)])
reads("p.float()")(lambda model, p: p.float())
reads("p.to(torch.float64)")(lambda model, p: p.to(torch.float64))
reads("p.bfloat16(), p.half()")(lambda model, p: [p.bfloat16(), p.half()])
reads("p.cpu()")(lambda model, p: p.cpu())
reads("p == q, p > 0, (p != 0).sum()")(lambda model, p: [p == model.body[3].fc1.weight, p > 0, (p != 0).sum(), p.sum()])
reads("p.sum(), p.mean(), p.std(), p.min(), p.max()")(lambda model, p: [p.sum(), p.mean(), p.std(), p.min(), p.max()])
reads("p.abs().topk(5), torch.sort(p)")(lambda model, p: [*p.abs().flatten().topk(5), torch.sort(p[0]).values])
reads("torch.isfinite(p).all(), torch.isnan(p).any()")(
    lambda model, p: [[torch.isfinite(q).all(), torch.isnan(q).any()] for q in model.parameters()] + [p.mean()]
)
reads("-p, p + 1, 2 * p, p / 3, p ** 2")(lambda model, p: [-p, p + 1, 2 * p, p / 3, p**2])
reads("torch._foreach_norm over parameters")(lambda model, p: torch._foreach_norm([q.detach() for q in model.parameters()]))
reads("quantiles of all parameters")(
    lambda model, p: [q.detach().flatten().float().quantile(torch.tensor([0.1, 0.9])) for q in model.parameters()]
)
reads("torch.zeros_like(p), ones_like, empty_like", depends=False)(
    lambda model, p: [torch.zeros_like(p), torch.ones_like(p), torch.empty_like(p).shape]
)
reads("p.new_zeros, torch.full_like(p)", depends=False)(lambda model, p: [p.new_zeros(3), torch.full_like(p, 2.0)])
reads("torch.rand_like(p), randn_like(p)", depends=False)(lambda model, p: [torch.rand_like(p), torch.randn_like(p)])
reads("p.numel, shape, stride, is_contiguous, dtype, device, layout", depends=False)(
    lambda model, p: [
        [q.numel(), q.shape, q.size(0), q.dim(), q.ndim, q.stride(), q.is_contiguous(), q.dtype, q.device, q.layout]
        for q in model.parameters()
    ]
)
reads("p.requires_grad, is_leaf, grad_fn, isinstance", depends=False)(
    lambda model, p: [p.requires_grad, p.is_leaf, str(p.grad_fn), isinstance(p, nn.Parameter), len(p)]
)
reads("p.nbytes, element_size, storage size, storage_offset", depends=False)(
    lambda model, p: [p.nbytes, p.element_size(), p.untyped_storage().nbytes(), len(p.untyped_storage()), p.storage_offset()]
)
reads("p.data_ptr(), storages: which tensors share memory", depends=False)(
    lambda model, p: [
        p.data_ptr() == p.data.data_ptr() == p.detach().t().data_ptr(),
        p[1].data_ptr() - p.data_ptr(),
        len({q.data_ptr() for q in model.parameters()}),
        len({q.untyped_storage().data_ptr() for q in model.parameters()}),
        p.untyped_storage().data_ptr() == p.data.untyped_storage().data_ptr(),
    ]
)
reads("bytes of the storage of p.detach().clone()")(lambda model, p: p.detach().clone().untyped_storage().tolist()[:64])
reads("p.untyped_storage().tolist()")(lambda model, p: p.untyped_storage().tolist()[:64])
reads("sets and dicts keyed by parameters", depends=False)(
    lambda model, p: [len(set(model.parameters())), {q: name for name, q in model.named_parameters()}[p], p in {p: 1}]
)
reads("sum(p.numel() for p in model.parameters())", depends=False)(
    lambda model, p: [sum(q.numel() for q in model.parameters()), [name for name, _ in model.named_parameters()]]
)
reads("model.state_dict()")(lambda model, p: model.state_dict())
reads("model.state_dict(): values computed with, viewed, as NumPy's")(
    lambda model, p: [
        [2 * value, value.flatten()[:3], value.numpy(), value.t() @ value if value.ndim == 2 else value.sum()]
        for value in list(model.state_dict().values())[:6]
    ]
)
reads("model.state_dict(): repr, type, requires_grad, nbytes")(
    lambda model, p: [
        [
            repr(value.cpu()),
            isinstance(value, torch.Tensor),
            value.requires_grad,
            value.is_leaf,
            value.untyped_storage().nbytes(),
        ]
        for value in list(model.state_dict().values())[:6]
    ]
)
reads("model.state_dict(keep_vars=True): parameters with their gradients")(
    lambda model, p: [
        [value is q, value.requires_grad, value, value.grad]
        for value, q in zip(model.state_dict(keep_vars=True).values(), model.parameters(), strict=True)
    ]
)
reads("functional_call with state_dict()")(
    lambda model, p: torch.func.functional_call(model.eval(), model.state_dict(), (tokens(0, 2, 5),)) if model.eval() else None
)
reads("model.get_parameter(name)")(lambda model, p: model.get_parameter("body.2.fc1.weight").sum())
reads("next(model.parameters()).device and .dtype", depends=False)(
    lambda model, p: [next(model.parameters()).device, next(model.parameters()).dtype]
)


@row(GROUP, "p is read while it is used in forward (hook on another module)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    model.body[4].register_forward_hook(lambda *_: side.show("another", model.body[0].fc1.weight.detach().sum()))
    side.train(model, optimizer, 2)


# -- autograd --------------------------------------------------------------------------------------------------------------


@row(GROUP, "p.sum().backward()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    weight = model.body[2].fc1.weight
    (weight * weight).sum().backward()
    side.show("grad", weight.grad.clone())
    optimizer.step()
    side.train(model, optimizer)


@row(GROUP, "torch.autograd.grad(loss, params)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    found = torch.autograd.grad(model.loss(0), list(model.parameters()))
    side.show("gradients", found)
    side.train(model, optimizer)


@row(GROUP, "torch.autograd.grad of one parameter")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.show("gradient", torch.autograd.grad(model.loss(0), [model.body[2].fc1.weight]))
    side.train(model, optimizer)


@row(GROUP, "torch.autograd.grad by an input")
def _(side: Side) -> None:
    model = side.page(Dense())
    optimizer = side.adamw(model.parameters())
    x = drawn(0, 4, 32).requires_grad_()
    side.show("gradient", torch.autograd.grad(model(x).sum(), [x]))
    side.train(model, optimizer)


@row(GROUP, "backward(inputs=some parameters)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    chosen = [*model.body[1].parameters(), model.head.weight]
    side.train(model, optimizer, backward=lambda loss: loss.backward(inputs=chosen))


@row(GROUP, "gradient penalty by inputs (double backward)")
def _(side: Side) -> None:
    model = side.page(Dense())

    def loss(model: Any, number: int) -> torch.Tensor:
        x = drawn(number, 8, 32).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (slope.norm(2, dim=1) - 1).square().mean()

    side.train(model, side.adamw(model.parameters()), 3, loss=loss)


@row(GROUP, "gradient penalty by parameters (double backward)")
def _(side: Side) -> None:
    model = side.page(Dense())

    def loss(model: Any, number: int) -> torch.Tensor:
        found = model.loss(number)
        slopes = torch.autograd.grad(found, list(model.parameters()), create_graph=True)
        return found + 0.1 * sum(slope.square().sum() for slope in slopes)

    side.train(model, side.adamw(model.parameters()), 3, loss=loss)


@row(GROUP, "sharpness-aware minimisation (SAM): ascend, backward, descend")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(3):
        optimizer.zero_grad()
        model.loss(number).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm(2) for p in model.parameters()]).norm(2)
            moves = [p.grad * (0.05 / norm) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = model.loss(number)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        side.show("loss", loss)
    side.show_model(model)


@row(GROUP, "p.register_hook that reads gradients")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    model.body[2].fc1.weight.register_hook(lambda grad: side.show("gradient", grad))
    side.train(model, optimizer)


@row(GROUP, "p.register_hook that changes gradients")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    side.train(model, optimizer, 3)


@row(GROUP, "p.register_post_accumulate_grad_hook")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: side.show("norm", p.grad.norm()))
    side.train(model, optimizer)


@row(GROUP, "p.register_post_accumulate_grad_hook, accumulation over two batches")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: side.show("norm", p.grad.norm()))
    for step in range(2):
        optimizer.zero_grad()
        model.loss(2 * step).backward()
        model.loss(2 * step + 1).backward()
        optimizer.step()
    side.show_model(model)


@row(GROUP, "one optimizer for each parameter, in p.register_post_accumulate_grad_hook")
def _(side: Side) -> None:
    model = side.page(Toy())
    optimizers = {p: side.adamw([p], lr=1e-3) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss = model.loss(number)
        loss.backward()
        side.show("loss", loss.detach())
    side.show_model(model)


@row(GROUP, "torch.utils.checkpoint around blocks, selective (context_fn=)")
def _(side: Side) -> None:
    def choose(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.body:
                contexts = functools.partial(create_selective_checkpoint_contexts, choose)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return self.head(self.norm(x))

    model = side.page(Selective())
    side.train(model, side.adamw(model.parameters(), lr=1e-3), 3)


@row(GROUP, "retain_graph=True and a second backward")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    loss = model.loss(0)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    side.train(model, optimizer, first=1)


@row(GROUP, "torch.utils.checkpoint around blocks, non-reentrant")
def _(side: Side) -> None:
    _checkpointed(side, False)


@row(GROUP, "torch.utils.checkpoint around blocks, reentrant")
def _(side: Side) -> None:
    _checkpointed(side, True)


def _checkpointed(side: Side, reentrant: bool) -> None:
    class Checkpointed(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.body:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.norm(x))

    model = side.page(Checkpointed())
    side.train(model, side.adamw(model.parameters()), 3)


@row(GROUP, "model.eval(), torch.no_grad(), torch.inference_mode()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    for number in range(2):
        side.train(model, optimizer, 1, first=number)
        model.eval()
        with torch.no_grad():
            side.show("no_grad", model(tokens(9, 2, 5)))
        with torch.inference_mode():
            side.show("inference_mode", model(tokens(9, 2, 5)))
        model.train()


@row(GROUP, "type(p) is nn.Parameter", depends=False, limit="`type(p)` is `PagedParameter` outside of forward")
def _(side: Side) -> None:
    model = side.page(Toy())
    side.show("classes", [type(p) is nn.Parameter for p in model.parameters()])


@row(GROUP, "type(value) is torch.Tensor of state_dict()", depends=False, limit="`type(value)` is `CopiedValues`")
def _(side: Side) -> None:
    model = side.page(Toy())
    side.show("classes", [type(value) is torch.Tensor for value in model.state_dict().values()])


# -- averages and copies ---------------------------------------------------------------------------------------------------


@row(GROUP, "EMA over named_parameters, lerp_")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(3):
        side.train(model, optimizer, 1, first=number)
        with torch.no_grad():
            for name, p in model.named_parameters():
                ema[name].lerp_(p, 0.1)
    side.show("ema", ema)


@row(GROUP, "EMA over named_parameters, mul_ and add_ on p.data")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    ema = {name: p.data.clone() for name, p in model.named_parameters()}
    for number in range(3):
        side.train(model, optimizer, 1, first=number)
        for name, p in model.named_parameters():
            ema[name].mul_(0.9).add_(p.data, alpha=0.1)
    side.show("ema", ema)


@row(GROUP, "EMA by torch._foreach_lerp_")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    ema = [p.detach().clone() for p in model.parameters()]
    for number in range(3):
        side.train(model, optimizer, 1, first=number)
        torch._foreach_lerp_(ema, [p.detach() for p in model.parameters()], 0.1)
    side.show("ema", ema)


@row(GROUP, "torch.optim.swa_utils.AveragedModel")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for number in range(3):
        side.train(model, optimizer, 1, first=number)
        averaged.update_parameters(model)
    side.show("average", averaged.module(tokens(0, 2, 5)))


@row(GROUP, "an EMA model of its own, filled from parameters()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    other = Toy().eval()
    for number in range(3):
        side.train(model, optimizer, 1, first=number)
        with torch.no_grad():
            for q, p in zip(other.parameters(), model.parameters(), strict=True):
                q.lerp_(p, 0.5)
    side.show("ema", other.state_dict())
    side.show("logits", other(tokens(0, 2, 5)))


@row(GROUP, "values copied into another model, q.copy_(p)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    other = Toy()
    with torch.no_grad():
        for q, p in zip(other.parameters(), model.parameters(), strict=True):
            q.copy_(p)
    side.show("other", other.state_dict())


@row(GROUP, "values copied into another model, q.data = p.data.clone()")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    other = Toy()
    for q, p in zip(other.parameters(), model.parameters(), strict=True):
        q.data = p.data.clone()
    side.show("other", other.state_dict())


@row(GROUP, "other.load_state_dict(model.state_dict())")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    other = Toy()
    other.load_state_dict(model.state_dict())
    side.show("other", other.state_dict())
    side.train(model, optimizer, first=2)


@row(GROUP, "a frozen teacher in memory, distillation")
def _(side: Side) -> None:
    teacher = Toy(48, 2).requires_grad_(False).eval()
    model, optimizer = side.toy()

    def loss(model: Any, number: int) -> torch.Tensor:
        batch = tokens(number, 4, 8)
        target = teacher(batch).softmax(-1)
        return functional.kl_div(model(batch).log_softmax(-1), target, reduction="batchmean")

    side.train(model, optimizer, 3, loss=loss)


@row(GROUP, "two paged models, one loss")
def _(side: Side) -> None:
    first, second = side.page(Toy()), side.page(Toy(48, 3), name="second")
    optimizer = side.adamw([*first.parameters()])
    other = side.adamw([*second.parameters()])
    for number in range(3):
        batch = tokens(number, 4, 8)
        loss = (first(batch) - second(batch)).square().mean()
        loss.backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        side.show("loss", loss)
    side.show_model(first)
    side.show_model(second)


@row(GROUP, "state_dict() before and after a step")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    before = model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    side.train(model, optimizer, 1)
    side.show("before", before)
    side.show("after", model.state_dict())


@row(GROUP, "torch.save(model.state_dict()) and torch.load")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    side.show("loaded", torch.load(file))


@row(GROUP, "torch.save of a dict with model and optimizer state, and back")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    path = side.folder / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    side.train(model, optimizer, first=2)
    loaded = torch.load(path)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    side.train(model, optimizer, first=2)


@row(GROUP, "safetensors: save_model, and save_file of state_dict()", needs=("safetensors",))
def _(side: Side) -> None:
    from safetensors.torch import load_file, save_file, save_model

    model, optimizer = side.toy()
    side.train(model, optimizer)
    save_model(model, str(side.folder / "model.safetensors"))
    side.show("model", load_file(side.folder / "model.safetensors"))
    save_file(model.state_dict(), side.folder / "state.safetensors")
    side.show("state", load_file(side.folder / "state.safetensors"))


@row(GROUP, "safetensors: save_file of named_parameters()", needs=("safetensors",))
def _(side: Side) -> None:
    from safetensors.torch import load_file, save_file

    model, optimizer = side.toy()
    side.train(model, optimizer)
    save_file(dict(model.named_parameters()), side.folder / "model.safetensors")
    side.show("model", load_file(side.folder / "model.safetensors"))


@row(GROUP, "torch.distributed.checkpoint of state_dict(), and back")
def _(side: Side) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = side.toy()
    side.train(model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=side.folder / "checkpoint", no_dist=True)
    side.train(model, optimizer, first=2)
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=side.folder / "checkpoint", no_dist=True)
    model.load_state_dict(state["model"])
    side.show_model(model)


@row(GROUP, "torch.distributed.checkpoint.state_dict: get_ and set_model_state_dict, get_ and set_optimizer_state_dict")
def _(side: Side) -> None:
    from torch.distributed.checkpoint import state_dict as states

    model, optimizer = side.toy()
    side.train(model, optimizer)
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = states.get_model_state_dict(model, options=whole)
    kept = copy.deepcopy(states.get_optimizer_state_dict(model, optimizer))
    side.show("values", values)
    side.show("states", kept["state"])
    values = {name: value.clone() for name, value in values.items()}
    side.train(model, optimizer, first=2)
    states.set_model_state_dict(model, values)
    states.set_optimizer_state_dict(model, optimizer, kept)
    side.train(model, optimizer, first=2)


@row(GROUP, "torch.save(list(model.parameters()))")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    side.show("loaded", torch.load(file))


@row(GROUP, "copy.deepcopy(model)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    side.show("copy", copy.deepcopy(model)(tokens(0, 2, 5)))


@row(GROUP, "copy.deepcopy(model.state_dict())")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    best = copy.deepcopy(model.state_dict())
    side.train(model, optimizer, first=2)
    side.show("best", best)
    model.load_state_dict(best)
    side.train(model, optimizer, first=4)


@row(GROUP, "copy.deepcopy(p)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    side.show("copy", copy.deepcopy(model.head.weight))


@row(GROUP, "pickle.dumps(model)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    side.show("copy", pickle.loads(pickle.dumps(model)).state_dict())


@row(GROUP, "torch.save(model)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    side.train(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    side.show("copy", torch.load(file, weights_only=False).state_dict())


# -- wrappers --------------------------------------------------------------------------------------------------------------


def _process_group(side: Side) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{side.folder}/rendezvous", rank=0, world_size=1)


@row(GROUP, "fully_shard around a paged model")
def _(side: Side) -> None:
    from torch.distributed.fsdp import fully_shard

    _process_group(side)
    model = side.page(Toy())
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    side.show("loss", model.loss(0))


@row(GROUP, "DistributedDataParallel around a paged model")
def _(side: Side) -> None:
    _process_group(side)
    model = side.page(Toy())
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = side.adamw(model.parameters())
    for number in range(2):
        optimizer.zero_grad()
        wrapped(tokens(number, 4, 8)).square().mean().backward()
        optimizer.step()
    side.show_model(model)


@row(GROUP, "DataParallel around a paged model")
def _(side: Side) -> None:
    model = side.page(Toy())
    wrapped = nn.DataParallel(model)
    optimizer = side.adamw(model.parameters())
    for number in range(2):
        optimizer.zero_grad()
        wrapped(tokens(number, 4, 8)).square().mean().backward()
        optimizer.step()
    side.show_model(model)


@row(GROUP, "torch.autocast(bfloat16) around forward")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def loss(model: Any, number: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.loss(number)

    side.train(model, optimizer, 3, loss=loss)


@row(GROUP, "a bf16 model")
def _(side: Side) -> None:
    model = side.page(Toy().bfloat16())
    side.show("logits", model(tokens(0, 2, 5)))
    side.show("weight", model.head.weight)


@row(GROUP, "an fp64 model")
def _(side: Side) -> None:
    model = side.page(Toy().double())
    optimizer = side.adamw(model.parameters())
    side.train(model, optimizer, 3)


@row(GROUP, "torch.utils.flop_counter around forward and backward", depends=False)
def _(side: Side) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, _ = side.toy()
    with FlopCounterMode(display=False) as counter:
        model.loss(0).backward()
    side.show("flops", counter.get_total_flops())


@row(GROUP, "a TorchFunctionMode and a TorchDispatchMode around a step")
def _(side: Side) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, optimizer = side.toy()
    with Functions(), Dispatches():
        side.train(model, optimizer)


@row(GROUP, "torch.autograd.set_detect_anomaly(True)")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    with torch.autograd.set_detect_anomaly(True):
        side.train(model, optimizer)


@row(GROUP, "torch.profiler around a step")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        side.train(model, optimizer, 1)


@row(GROUP, "train on a thread other than the one that paged")
def _(side: Side) -> None:
    import threading

    model, optimizer = side.toy()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            side.train(model, optimizer)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@row(GROUP, "DataLoader with a worker process, beside a paged model")
def _(side: Side) -> None:
    model, optimizer = side.toy()
    loader = torch.utils.data.DataLoader(tokens(0, 12, 8), batch_size=4, num_workers=1)
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        side.show("loss", loss)
    side.show_model(model)
