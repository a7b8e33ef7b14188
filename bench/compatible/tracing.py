"""Rows that trace, compile or transform a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from bench.compatible.side import Block, Dense, Side, Toy, drawn, row, tokens
from tiered import MisuseError

GROUP = "tracing"


class Calm(Toy):
    """A ``Toy`` without dropout: kernels of inductor draw other numbers than torch's, in memory, too. A block is a unit."""

    def __init__(self) -> None:
        super().__init__(width=64)
        for block in self.body:
            block.dropout = nn.Identity()


def _cached(side: Side) -> None:
    """Keep what inductor makes in the row's folder, and compile in this process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(side.folder / "inductor")
    torch._inductor.config.compile_threads = 1


def rounded(loss: torch.Tensor) -> float:
    """Return a loss to four decimals: inductor fuses what it has in one graph, and a paged model is compiled in pieces, one for
    each unit, so that the last bits differ."""
    return round(loss.item(), 4)


def compiled(name: str, how: Callable[[Any], Any], slow: float = 3, *, pieces: bool = False) -> None:
    """Register a way to compile a model; ``how`` returns what is called in its place. ``pieces``: in memory it is compiled in
    one piece, by inductor, and losses are compared when rounded."""

    @row(GROUP, f"{name}, losses to 4 decimals" if pieces else name, slow=slow)
    def _(side: Side) -> None:
        if "inductor" in name:
            _cached(side)
        model = side.page(Calm())
        optimizer = side.adamw(model.parameters())
        called = how(model)

        def loss(model: Any, number: int) -> torch.Tensor:
            batch = tokens(number, 4, 12)
            return nn.functional.cross_entropy(called(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        if not pieces:
            side.train(model, optimizer, 3, loss=loss)
        for number in range(3 if pieces else 0):
            optimizer.zero_grad()
            found = loss(model, number)
            found.backward()
            optimizer.step()
            side.show(f"loss {number}", rounded(found))


def _each_block(model: Any, **options: Any) -> Any:
    for block in model.body:
        block.compile(**options)
    return model


def _replaced(model: Any, **options: Any) -> Any:
    for index in range(len(model.body)):
        model.body[index] = torch.compile(model.body[index], **options)
    return model


def _whole(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


for _backend in ("eager", "aot_eager", "inductor"):
    _slow = 6 if _backend == "inductor" else 3
    compiled(
        f"torch.compile(model, backend={_backend!r})",
        lambda model, backend=_backend: torch.compile(model, backend=backend),
        _slow,
        pieces=_backend == "inductor",
    )
    compiled(
        f"model.compile(backend={_backend!r})",
        lambda model, backend=_backend: _whole(model, backend=backend),
        _slow,
        pieces=_backend == "inductor",
    )
    compiled(
        f"block.compile(backend={_backend!r}) for each block",
        lambda model, backend=_backend: _each_block(model, backend=backend),
        _slow,
    )
    compiled(
        f"blocks[i] = torch.compile(blocks[i], backend={_backend!r})",
        lambda model, backend=_backend: _replaced(model, backend=backend),
        _slow,
    )
compiled(
    "block.compile(fullgraph=True, backend='aot_eager') for each block",
    lambda model: _each_block(model, fullgraph=True, backend="aot_eager"),
)
compiled(
    "torch.compile(model, mode='reduce-overhead')", lambda model: torch.compile(model, mode="reduce-overhead"), 6, pieces=True
)


@row(GROUP, "torch.compile(model, fullgraph=True): torch's error, with a line of the reason", slow=3)
def _(side: Side) -> None:
    model = side.page(Calm())
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    try:
        side.show("output", called(tokens(0, 4, 8)))
    except torch._dynamo.exc.Unsupported as error:  # dynamo makes an error of its own of everything that stops it
        if "leave out fullgraph=True" not in str(error):
            raise
        raise MisuseError(str(error)) from error


@row(GROUP, "evaluation with blocks that are compiled by inductor: no_grad, inference_mode", slow=6)
def _(side: Side) -> None:
    _cached(side)
    model = _each_block(side.page(Calm().eval()))
    with torch.no_grad():
        side.show("no_grad", model(tokens(0, 4, 8)))
    with torch.inference_mode():
        side.show("inference_mode", model(tokens(0, 4, 8)).clone())


@row(GROUP, "a compiled train step, backend='aot_eager'", slow=4)
def _(side: Side) -> None:
    model = side.page(Calm())
    optimizer = side.adamw(model.parameters())

    @torch.compile(backend="aot_eager")
    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    for number in range(3):
        side.show(f"loss {number}", step(tokens(number, 4, 12)).detach())
    side.show_model(model)


@row(GROUP, "a compiled loss function that calls the model, backend='aot_eager'", slow=3)
def _(side: Side) -> None:
    model = side.page(Calm())
    optimizer = side.adamw(model.parameters())

    @torch.compile(backend="aot_eager")
    def loss(batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    side.train(model, optimizer, 3, loss=lambda model, number: loss(tokens(number, 4, 12)))


@row(GROUP, "checkpointed blocks that are compiled, backend='aot_eager'", slow=3)
def _(side: Side) -> None:
    model = _each_block(side.page(Calm()), backend="aot_eager")
    optimizer = side.adamw(model.parameters())

    def loss(model: Any, number: int) -> torch.Tensor:
        x = model.embed(tokens(number, 4, 8))
        for block in model.body:
            x = checkpoint(block, x, use_reentrant=False)
        return model.head(model.norm(x)).square().mean()

    side.train(model, optimizer, 3, loss=loss)


@row(GROUP, "a compiled function that reads parameters that are out, backend='aot_eager'", slow=3)
def _(side: Side) -> None:
    model = side.page(Calm())
    optimizer = side.adamw(model.parameters())

    @torch.compile(backend="aot_eager")
    def penalty(x: torch.Tensor) -> torch.Tensor:
        y = x @ model.head.weight.t()
        return y.sin().mean() + sum(parameter.square().sum() for parameter in model.parameters())

    side.train(model, optimizer, 3, loss=lambda model, number: penalty(drawn(number, 3, 64)))


@row(GROUP, "a compiled block that reads a parameter of another, backend='aot_eager'", slow=3)
def _(side: Side) -> None:
    model = side.page(Calm())
    optimizer = side.adamw(model.parameters())

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (model.body[0](x) * model.body[1].norm.weight + x @ model.head.weight.t()).sin().square().mean()

    side.train(model, optimizer, 3, loss=lambda model, number: loss(drawn(number, 3, 64)))


@row(GROUP, "a compiled gradient norm and EMA over all parameters, backend='aot_eager'", slow=3)
def _(side: Side) -> None:
    model = side.page(Calm())
    optimizer = side.adamw(model.parameters())
    ema = [p.detach().clone() for p in model.parameters()]

    @torch.compile(backend="aot_eager")
    def norm() -> torch.Tensor:
        with torch.no_grad():
            for one, parameter in zip(ema, model.parameters(), strict=True):
                one.lerp_(parameter, 0.1)
        return sum(parameter.grad.square().sum() for parameter in model.parameters())

    side.train(model, optimizer, backward=lambda loss: (loss.backward(), side.show("norm", norm())))
    side.show("ema", ema)


compiled(
    "torch.compile(model, backend='aot_eager', dynamic=True)",
    lambda model: torch.compile(model, backend="aot_eager", dynamic=True),
)


@row(GROUP, "torch.compile before paging, backend='eager'", slow=3)
def _(side: Side) -> None:
    model = Calm()
    called = torch.compile(model, backend="eager")
    side.page(model)
    optimizer = side.adamw(model.parameters())
    side.train(model, optimizer, 3, loss=lambda model, number: called(tokens(number, 4, 8)).square().mean())


@row(GROUP, "dynamic shapes, backend='eager', three lengths", slow=3)
def _(side: Side) -> None:
    model = side.page(Calm())
    called = torch.compile(model, backend="eager", dynamic=True)
    optimizer = side.adamw(model.parameters())
    side.train(model, optimizer, 3, loss=lambda model, number: called(tokens(number, 4, 8 + number)).square().mean())


@row(GROUP, "dynamic shapes, blocks with backend='inductor', three lengths", slow=6)
def _(side: Side) -> None:
    _cached(side)
    model = _each_block(side.page(Calm()), dynamic=True)
    optimizer = side.adamw(model.parameters())
    side.train(model, optimizer, 3, loss=lambda model, number: model(tokens(number, 4, 8 + number)).square().mean())


@row(GROUP, "a compiled function of parameters (EMA)", slow=3)
def _(side: Side) -> None:
    model, optimizer = side.toy()
    ema = [p.detach().clone() for p in model.parameters()]

    @torch.compile(backend="eager")
    def update(ema: Any, parameters: Any) -> None:
        for one, p in zip(ema, parameters, strict=True):
            one.lerp_(p, 0.1)

    side.train(model, optimizer)
    with torch.no_grad():
        update(ema, list(model.parameters()))
    side.show("ema", ema)


@row(GROUP, "a compiled function without the model's parameters beside it", slow=3)
def _(side: Side) -> None:
    model, optimizer = side.toy()
    entropy = torch.compile(lambda x: (x.softmax(-1) * x.log_softmax(-1)).sum(), backend="eager")
    side.train(model, optimizer, 3, loss=lambda model, number: entropy(model(tokens(number, 4, 8))))


@row(GROUP, "compiled autograd")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def backward(loss: torch.Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()

    side.train(model, optimizer, 2, backward=backward)


# -- export ----------------------------------------------------------------------------------------------------------------


@row(GROUP, "torch.export.export", slow=3)
def _(side: Side) -> None:
    model = side.page(Calm().eval())
    program = torch.export.export(model, (tokens(0, 2, 5),))
    side.show("output", program.module()(tokens(1, 2, 5)))


@row(GROUP, "compiled autograd over blocks that are compiled, backend='aot_eager'", slow=4)
def _(side: Side) -> None:
    model = _each_block(side.page(Calm()), backend="aot_eager")
    optimizer = side.adamw(model.parameters())

    def backward(loss: torch.Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()

    side.train(model, optimizer, 2, backward=backward)


@row(GROUP, "torch.jit.trace", slow=2)
def _(side: Side) -> None:
    model = side.page(Calm().eval())
    traced = torch.jit.trace(model, (tokens(0, 2, 5),))
    side.show("output", traced(tokens(1, 2, 5)))


@row(GROUP, "torch.jit.script", slow=2)
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("output", torch.jit.script(model)(drawn(0, 2, 32)))


@row(GROUP, "torch.fx.symbolic_trace", slow=2)
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("output", torch.fx.symbolic_trace(model)(drawn(0, 2, 32)))


@row(GROUP, "make_fx of a forward", slow=2)
def _(side: Side) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = side.page(Dense())
    side.show("output", make_fx(model)(drawn(0, 2, 32))(drawn(1, 2, 32)))


@row(GROUP, "torch.ao.quantization.quantize_dynamic", slow=2)
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("output", torch.ao.quantization.quantize_dynamic(model, {nn.Linear})(drawn(0, 2, 32)))


@row(GROUP, "torch.func.linearize", slow=2)
def _(side: Side) -> None:
    model = side.page(Dense())
    output, tangent = torch.func.linearize(model, drawn(0, 2, 32))
    side.show("both", [output, tangent(drawn(1, 2, 32))])


# -- torch.func ------------------------------------------------------------------------------------------------------------


@row(GROUP, "functional_call with other values")
def _(side: Side) -> None:
    model = side.page(Dense())
    torch.manual_seed(1)
    other = dict(Dense().named_parameters())
    side.show("own", model(drawn(0, 2, 32)))
    side.show("other", functional_call(model, other, (drawn(0, 2, 32),)))
    side.show("own", model(drawn(0, 2, 32)))


@row(GROUP, "functional_call with the model's own parameters")
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("output", functional_call(model, dict(model.named_parameters()), (drawn(0, 2, 32),)))


@row(GROUP, "torch.func.grad by parameters")
def _(side: Side) -> None:
    model = side.page(Dense())
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = grad(lambda values: functional_call(model, values, (drawn(0, 4, 32),)).square().mean())(values)
    side.show("gradients", found)


@row(GROUP, "torch.func.grad by an input")
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("gradient", grad(lambda x: model(x).sum())(drawn(0, 4, 32)))


@row(GROUP, "vmap over a batch of inputs")
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("output", vmap(model)(drawn(0, 4, 32)))


@row(GROUP, "per-sample gradients, vmap(grad)")
def _(side: Side) -> None:
    model = side.page(Dense())
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, values, (x,)).square().sum()

    side.show("gradients", vmap(grad(loss), (None, 0))(values, drawn(0, 3, 32)))


@row(GROUP, "torch.func.stack_module_state of two models")
def _(side: Side) -> None:
    models = [side.page(Dense()), side.page(Dense(), name="second")]
    parameters, _ = torch.func.stack_module_state(models)
    side.show("stacked", parameters)


@row(GROUP, "jvp by an input")
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("both", jvp(model, (drawn(0, 2, 32),), (drawn(1, 2, 32),)))


@row(GROUP, "jacrev by an input")
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("jacobian", jacrev(model)(drawn(0, 32)))


@row(GROUP, "hessian by an input")
def _(side: Side) -> None:
    model = side.page(Dense(depth=2))
    side.show("hessian", hessian(lambda x: model(x).sum())(drawn(0, 32)))


@row(GROUP, "torch.autograd.functional.jacobian by an input")
def _(side: Side) -> None:
    model = side.page(Dense())
    side.show("jacobian", torch.autograd.functional.jacobian(model, drawn(0, 2, 32)))


@row(GROUP, "forward-mode dual numbers through the model")
def _(side: Side) -> None:
    from torch.autograd import forward_ad

    model = side.page(Dense())
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(drawn(0, 2, 32), drawn(1, 2, 32))))
        side.show("both", [found.primal, found.tangent])


@row(GROUP, "torch.autograd.graph.saved_tensors_hooks around a step")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def loss(model: Any, number: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return model.loss(number)

    side.train(model, optimizer, 2, loss=loss)


@row(GROUP, "torch.autograd.graph.save_on_cpu around a step")
def _(side: Side) -> None:
    model, optimizer = side.toy()

    def loss(model: Any, number: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model.loss(number)

    side.train(model, optimizer, 2, loss=loss)


@row(GROUP, "bf16 autocast, cache_enabled=False")
def _(side: Side) -> None:
    model = side.page(nn.Sequential(*(Block(96) for _ in range(6))))
    optimizer = side.adamw(model.parameters())

    def loss(model: Any, number: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return model(drawn(number, 2, 3, 96)).float().square().mean()

    side.train(model, optimizer, 3, loss=loss)


@row(GROUP, "meta tensors: FakeTensorMode around a forward", depends=False)
def _(side: Side) -> None:
    from torch._subclasses import FakeTensorMode

    model = side.page(Dense())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        side.show("shape", model(mode.from_tensor(drawn(0, 2, 32))).shape)
