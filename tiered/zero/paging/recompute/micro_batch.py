"""Split the batch inside units: parameters are read twice a step however large the batch is, and the inside of a unit is that
of one part.

The forward of a *split module* is called with the whole batch and runs on one part of it after the other, each checkpointed by
``torch.utils.checkpoint`` (Chen et al., 2016, https://arxiv.org/abs/1604.06174), with what the part was given kept in the
store. Autograd sees what it would see in memory: the parts of a tensor, a checkpoint for each, and their concatenation. So the
gradients are those of that, bit for bit: the sum over the parts in the order in which backward reaches them, the last part
first; each parameter's gradient arrives once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from tiered.errors import MisuseError
from tiered.store import TieredStore
from tiered.zero.paging.recompute.module_state import ModuleState, changed, uncopied
from tiered.zero.paging.recompute.nested import Structure, flatten, paths, rebuild
from tiered.zero.paging.saved_tensors import (
    SMALL,
    ActivationStore,
    ParameterReferences,
    SavedActivation,
    in_backward,
    memory_of,
    unexpanded,
)
from tiered.zero.paging.tensors.compiling import unentered
from tiered.zero.paging.units import SAVED_SHARE, ModelPlan, is_called

__all__ = ["Splitter", "Ways", "refuse_batch_dependent", "split_modules"]

LARGEST_PART = 4 << 20
"""What is kept goes into the store in pieces of at most so many bytes, and at most ``1 / SAVED_SHARE`` of the pool."""
LARGEST_LAYER = 2
"""A layer that repeats is computed again as a whole where its parameters are at most so many times the largest unit, a
quarter of the pool: they are in memory still when its backward asks for them."""

Forward = Callable[..., Any]
_ATTENDING = (
    *(nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Of torch's own, those that tell by ``batch_first`` where they have the batch."""


def split_modules(model: nn.Module, plan: ModelPlan, parts: int = 1) -> dict[nn.Module, str]:
    """Return by module the names of the outermost modules that hold all parameters below them while they run; ``model`` itself
    only when there is nothing else to split. Where the batch stays in one part, and one process has the model, layers that
    repeat are taken whole, up to ``LARGEST_LAYER``: what they compute between their units is kept nowhere then.

    Further out, parameters would be read once for each part; further in, more would be kept than needs to be.
    """
    home = {placement.parameter: index for index, unit in enumerate(plan.units) for placement in unit.placements}
    alone = all(unit.shares == 1 for unit in plan.units)
    most = plan.limits.unit * LARGEST_LAYER if parts == 1 and alone else 0
    found: dict[nn.Module, str] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str, repeats: bool) -> None:
        if module in seen:
            return
        seen.add(module)
        needed = {home.get(parameter, -1) for parameter in module.parameters()}  # -1: sliced, held by no module
        if module is not model and is_called(module) and needed:
            held = needed <= set(plan.held.get(module, ()))
            if held or (repeats and -1 not in needed and sum(plan.units[index].nbytes for index in needed) <= most):
                found[module] = name
                return
        kinds = Counter(map(type, module.children())) if isinstance(module, nn.ModuleList | nn.Sequential) else Counter[type]()
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}".lstrip("."), kinds[type(child)] > 1)

    visit(model, "", False)
    if not found and model in plan.held:
        found[model] = type(model).__name__
    return found


def _tensors_in(value: Any, depth: int = 4) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors that an object refers to, a cache of keys and values, say, with their versions; none for a tensor and
    for modules."""
    if isinstance(value, torch.Tensor | nn.Module | type) or not depth:
        return []
    within = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else None
    if within is None:
        within = getattr(value, "__dict__", {}).values()
    found: list[tuple[torch.Tensor, int]] = []
    for one in within:
        if isinstance(one, torch.Tensor):
            found.append((one, -1 if one.is_inference() else one._version))
        else:
            found += _tensors_in(one, depth - 1)
    return found


def refuse_batch_dependent(module: nn.Module, name: str) -> None:
    """Raise MisuseError where ``module`` or one within it computes across the batch as it is now, or where the batch is not in
    the first dimension of what ``module`` is given."""
    attentions = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)] if isinstance(module, _ATTENDING) else []
    if isinstance(module, nn.RNNBase) or any(not attention.batch_first for attention in attentions):
        raise MisuseError(
            f"micro_batch: {name!r} ({type(module).__name__}) has the batch in the second dimension of what it takes or gives: "
            "use batch_first=True, or a module around it that has it in the first"
        )
    for inner, child in module.named_modules(prefix=name):
        statistics = isinstance(child, _NormBase) and (
            (child.training and child.track_running_stats)
            or (isinstance(child, nn.modules.batchnorm._BatchNorm) and (child.training or child.running_mean is None))
        )
        if statistics or getattr(child, "batch_dependent", False):
            raise MisuseError(
                f"micro_batch: {inner!r} ({type(child).__name__}) computes across the batch, which cannot be split: use "
                "micro_batch=1, a norm of single samples, or eval() where it then uses the statistics that it has"
            )


class Ways(Protocol):
    """Decides for each call of a split module where its activations wait, where not all are computed again."""

    def running(self, name: str, given: int) -> AbstractContextManager[str]:
        """Have a block of code be the forward of the module ``name``, which is given so many bytes; give "recompute" where its
        inside is to be computed again."""
        ...

    def refuse_again(self, name: str) -> None:
        """Note that a module cannot be computed again."""
        ...


class Splitter:
    """Split modules of one paged model; ``split`` has their names. ``ways``: who decides which of them are computed again,
    where not all are."""

    def __init__(
        self,
        model: nn.Module,
        store: TieredStore,
        name: str,
        plan: ModelPlan,
        pool: int,
        parts: int,
        references: ParameterReferences,
        ways: Ways | None = None,
    ) -> None:
        modules = split_modules(model, plan, parts)
        self._ways = ways
        self.references, self.parts, self.split = references, parts, tuple(modules.values())
        self._model = model
        piece = min(LARGEST_PART, pool // SAVED_SHARE) // 4096 * 4096
        draws = "cpu" if store.device.type == "meta" else store.device  # which has no generator
        self.anywhere = torch.empty(0, dtype=torch.float32, device=draws)
        """Of an argument like this checkpoint learns on which device random numbers are drawn, and draws the same again."""
        self.activations = ActivationStore(store, name, max(4096, piece))
        self.computed_again = 0
        """Calls of split modules of which backward computes the inside again."""
        self._batch: int | None = None  # of the forward of the model that is running
        self._before: int | None = None  # of the one before
        self._inside = False
        self._last = ""
        """Name of the split module that ran last in forward."""
        self._restoring: ModuleState | None = None
        """What modules are as in a forward that is being computed again."""
        if parts == 1 and ways is None:  # also what is within a layer, for a layer that is not called, or is given no tensor
            inner = {module: name for module, name in split_modules(model, plan, 2).items() if module is not model}
            modules = inner | modules
        for module, name in modules.items():
            self._wrap(module, functools.partial(self._run, module, name))
        if is_called(model):
            self._wrap(model, self._run_model)

    def _wrap(self, module: nn.Module, run: Callable[[Forward, Any, Any], Any]) -> None:
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(original, args, kwargs)

        module.forward = unentered(forward)  # of this one object

    # -- the batch ---------------------------------------------------------------------------------------------------------

    @unentered
    def _run_model(self, original: Forward, args: Any, kwargs: Any) -> Any:
        """Run the model's forward. The leading size of the first tensor that it is given is the batch."""
        if self.parts == 1:
            return self._run_undivided(original, args, kwargs)
        if self._batch is not None:
            return original(*args, **kwargs)
        leaves, _ = flatten((args, kwargs))
        batch = _leading(leaves)
        if batch is None:
            raise MisuseError(
                f"micro_batch: {type(self._model).__name__} was called without a tensor whose first dimension is the batch"
            )
        self._batch = self._before = batch
        try:
            return original(*args, **kwargs)
        finally:
            self._batch = None

    def _run_undivided(self, original: Forward, args: Any, kwargs: Any) -> Any:
        """Run the model's forward where modules compute the whole batch at once."""
        before, result = self.computed_again, original(*args, **kwargs)
        if self._ways is not None or self.computed_again != before:
            return result
        if torch.is_grad_enabled() and not in_backward() and not self._inside:
            leaves, _ = flatten(result)
            if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
                raise MisuseError(
                    f"activations='recompute': nothing of {type(self._model).__name__} is computed again, because no module "
                    f"of {', '.join(self.split[:3])} is given a tensor: use activations='store' or 'memory'"
                )
        return result

    def _batch_of(self, leaves: Sequence[Any]) -> int | None:
        """Return the batch of the model; of a module that is called by itself, its own. A recomputation finds what the forward
        found."""
        if self._batch is None and self._before is not None and in_backward():
            return self._before
        return self._batch if self._batch is not None else _leading(leaves)

    # -- forward -----------------------------------------------------------------------------------------------------------

    def _run(self, module: nn.Module, name: str, original: Forward, args: Any, kwargs: Any) -> Any:
        """Run ``module``'s forward, part by part where it is given tensors whose leading size is the batch."""
        if self._inside:
            return original(*args, **kwargs)
        leaves, structure = flatten((args, kwargs))
        if self.parts == 1:
            return self._run_again(module, name, original, leaves, structure)
        if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in leaves) or _packed(structure):
            raise MisuseError(f"micro_batch: {name!r} is given a packed or nested batch, which cannot be split")
        batch = self._batch_of(leaves)
        split = [i for i, leaf in enumerate(leaves) if batch is not None and self._is_batch(leaf, batch)]
        if not split or batch is None:
            return original(*args, **kwargs)
        parts = max(1, min(self.parts, batch))
        trains = _trains(module, leaves)
        if parts == 1 and not trains:
            return original(*args, **kwargs)
        refuse_batch_dependent(module, name)
        if parts > 1 and len(split) > 1 and batch in leaves[split[0]].shape[1:]:
            places = list(paths(structure))
            shapes = " and ".join(f"{places[i]} {tuple(leaves[i].shape)}" for i in split)
            raise MisuseError(
                f"micro_batch: {name!r} is given (args, kwargs) with {shapes}: the batch of {batch} has the size of another "
                "dimension, so it is not clear which of them are to be split; use a batch of another size"
            )
        sizes = [batch // parts + (part < batch % parts) for part in range(parts)]
        call = _Call(self, module, original, structure, leaves, split, sizes)
        held = [_tensors_in(leaf) for leaf in leaves] if parts > 1 else []
        outputs = call.checkpointed(name) if trains else call.plain()
        self._refuse_changed(name, call.changed)
        for leaf, then in zip(leaves, held, strict=False):
            now = _tensors_in(leaf)
            same = [one is other and version == before for (one, version), (other, before) in zip(now, then, strict=False)]
            if len(now) != len(then) or not all(same):
                raise MisuseError(
                    f"micro_batch: {name!r} puts tensors into the {type(leaf).__name__} that it is given, as each part would: "
                    "call the model without it (of a model of transformers: use_cache=False)"
                )
        return outputs[0] if parts == 1 else _merge(outputs, sizes, name)

    def _run_again(
        self, module: nn.Module, name: str, original: Forward, leaves: list[Any], structure: Structure | None
    ) -> Any:
        """Run ``module``'s forward, of which backward computes the inside again; what it is given is in the store meanwhile."""
        given = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and self._is_given(leaf)]
        if self._ways is not None and torch.is_grad_enabled() and not in_backward():
            return self._run_one_way(self._ways, module, name, original, leaves, structure, given)
        if not given or not _trains(module, leaves):
            return _compute(original, structure, leaves)
        return self._run_checkpointed(module, name, original, leaves, structure, given)

    def _run_one_way(
        self,
        ways: Ways,
        module: nn.Module,
        name: str,
        original: Forward,
        leaves: list[Any],
        structure: Structure | None,
        given: list[int],
    ) -> Any:
        """Run ``module``'s forward, of which ``ways`` decides whether backward computes the inside again."""
        with ways.running(name, sum(unexpanded(leaves[i]).nbytes for i in given)) as way:
            if way == "recompute" and given and _trains(module, leaves):
                return self._run_checkpointed(module, name, original, leaves, structure, given)
            buffers = uncopied(module)
            output = _compute(original, structure, leaves)
            if not given or changed(buffers):
                ways.refuse_again(name)
            return output

    def _run_checkpointed(
        self,
        module: nn.Module,
        name: str,
        original: Forward,
        leaves: list[Any],
        structure: Structure | None,
        given: list[int],
    ) -> Any:
        call = _Call(self, module, original, structure, leaves, given, [1])
        (output,) = call.checkpointed(name)
        self._refuse_changed(name, call.unrestorable)
        self.computed_again += 1
        return output

    def _refuse_changed(self, name: str, inner: str | None) -> None:
        """Raise MisuseError where forward has changed the buffer ``inner`` of a module."""
        if inner is not None and self.parts > 1:
            raise MisuseError(
                f"micro_batch: {name!r} changes its buffer {inner!r} in forward, and would with every part: use micro_batch=1"
            )
        if inner is not None:
            option, mend = "activations='recompute'", "activations='store' or 'memory'"
            if self._ways is not None:
                option, mend = "activations='auto'", "AutoPlan(ways=('memory', 'store'))"
            raise MisuseError(
                f"{option}: {name!r} changes its buffer {inner!r} in forward, too large a one to be kept as it was, and would "
                f"change again as forward is computed anew in backward: use {mend}"
            )

    def _is_batch(self, leaf: Any, batch: int) -> bool:
        """Return whether ``leaf`` has the batch. Parameters, buffers and views of them are shared, whatever their size, unless
        they were expanded to the batch."""
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.size(0) != batch:
            return False
        if leaf.layout is not torch.strided or leaf.stride(0) == 0:
            return leaf.layout is torch.strided
        return self._is_given(leaf)

    def _is_given(self, leaf: torch.Tensor) -> bool:
        """Return whether ``leaf`` is neither a parameter, nor a buffer, nor a view of one."""
        if leaf.layout is not torch.strided or isinstance(leaf, nn.Parameter) or leaf.is_nested:
            return False
        return self.references.reference(leaf) is None and not self._is_buffer(leaf)

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad:
            return False
        memory = memory_of(tensor)
        return any(memory == memory_of(buffer) for buffer in self._model.buffers() if buffer.layout is torch.strided)

    def begin(self, name: str) -> None:
        """Have what autograd saves between this split module and the next one lie under ``name`` in the store: named alike in
        layers that are alike."""
        self._last = name

    def undivided(self, compute: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
        """Compute a part, within which nothing is split."""
        before, self._inside = self._inside, True
        try:
            return compute(leaves)
        finally:
            self._inside = before

    @contextmanager
    def restored(self, state: ModuleState) -> Iterator[None]:
        """Have modules be as in ``state`` for a block of code; where an exception strikes, ``reset`` ends it."""
        self._restoring = state
        with state.restored():
            yield
        self._restoring = None

    def reset(self) -> None:
        """Forget what an interruption left, because nothing runs."""
        self._inside, self._batch = False, None
        if self._restoring is not None:
            self._restoring.put_back()
            self._restoring = None

    # -- what autograd saves between split modules -------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedActivation:
        """Keep in the store what is large and would be in memory for the sake of backward alone."""
        if (
            tensor.layout is not torch.strided
            or unexpanded(tensor).nbytes < SMALL
            or (tensor.is_leaf and tensor.requires_grad)
            or self._is_buffer(tensor)
        ):
            return tensor
        kept = self.activations.keep(f"{self._last}+", tensor, [tensor.size(0) if tensor.dim() else 1])
        return tensor if kept is None else kept[0]


class _Call:
    """One call of a split module, with the whole batch in ``leaves``; those numbered ``split`` have it."""

    def __init__(
        self,
        splitter: Splitter,
        module: nn.Module,
        original: Forward,
        structure: Structure | None,
        leaves: list[Any],
        split: list[int],
        sizes: list[int],
    ) -> None:
        self._splitter, self._module, self._leaves, self._sizes = splitter, module, leaves, sizes
        self._compute = functools.partial(_compute, original, structure)
        self._pieces = {i: torch.split(leaves[i], sizes) if len(sizes) > 1 else (leaves[i],) for i in split}
        self.changed: str | None = None
        """Name of a buffer that forward has changed, if there is one."""
        self.unrestorable: str | None = None
        """Of one that cannot be restored."""

    def plain(self) -> list[Any]:
        """Return each part's output, where nothing will be needed for a backward."""
        return [self.forward(self._given(part))[0] for part in range(len(self._sizes))]

    def forward(self, given: list[Any]) -> tuple[Any, ModuleState]:
        """Return the output of a part, and what its modules were like before."""
        state = ModuleState(self._module, self._splitter.references)
        output = self._splitter.undivided(self._compute, given)
        unrestorable = state.settle()
        self.unrestorable = self.unrestorable or unrestorable
        self.changed = self.changed or unrestorable or state.changed
        return output, state

    def checkpointed(self, name: str) -> list[Any]:
        """Return each part's output, and keep what each part is given in the store; the inside of the module will be computed
        again."""
        self._splitter.begin(name)
        kept = {i: self._splitter.activations.keep(f"{name}.{i}", self._leaves[i], self._sizes) for i in self._pieces}
        outputs = []
        for part in range(len(self._sizes)):
            given = self._given(part)
            again: list[Any] = []
            same: dict[int, Any] = {}  # attention takes another path where query, key and value are one tensor
            for i, leaf in enumerate(given):
                found = kept.get(i)
                if id(leaf) in same:
                    again.append(same[id(leaf)])
                elif not isinstance(leaf, torch.Tensor):
                    again.append(leaf)
                elif found is not None:
                    again.append(_Again(found[part], leaf.requires_grad))
                else:
                    reference = self._splitter.references.reference(leaf)
                    again.append(_Again(leaf.detach() if reference is None else reference, leaf.requires_grad))
                if isinstance(leaf, torch.Tensor):
                    same[id(leaf)] = again[-1]
            run = _Part(self, self._splitter, self._module, self._compute, given, again)
            outputs.append(checkpoint(run, self._splitter.anywhere, use_reentrant=False))
        return outputs

    def _given(self, part: int) -> list[Any]:
        return [self._pieces[i][part] if i in self._pieces else leaf for i, leaf in enumerate(self._leaves)]


def _compute(original: Forward, structure: Structure | None, leaves: list[Any]) -> Any:
    args, kwargs = rebuild(structure, iter(leaves))
    return original(*args, **kwargs)


class _Again:
    """Stand-in for a tensor argument. The recomputation rebuilds the argument from ``source``: a saved activation, a reference
    to a paged parameter, or a detached tensor that all micro-batches share."""

    __slots__ = ("requires_grad", "source")

    def __init__(self, source: object, requires_grad: bool) -> None:
        self.source, self.requires_grad = source, requires_grad


class _Part:
    """Forward of one part. The first call has the tensors themselves and lets go of them; later calls restore what was kept."""

    def __init__(
        self,
        call: _Call,
        splitter: Splitter,
        module: nn.Module,
        compute: Callable[[list[Any]], Any],
        given: list[Any],
        again: list[Any],
    ) -> None:
        self._splitter, self._module, self._compute, self._again = splitter, module, compute, again
        self._first: tuple[_Call, list[Any]] | None = (call, given)
        self._state: ModuleState | None = None
        """What the first call found in modules."""
        self._versions = splitter.references.versions(module)

    def __call__(self, anywhere: torch.Tensor) -> Any:
        first, self._first = self._first, None
        if first is not None:
            output, self._state = first[0].forward(first[1])
            return output
        state = self._state
        assert state is not None, "torch.utils.checkpoint computes nothing again whose first call has raised"
        self._splitter.activations.sweep()
        with self._splitter.references.recomputing(self._module, self._versions) as unpack, self._splitter.restored(state):
            restored: dict[_Again, torch.Tensor] = {}
            for leaf in self._again:
                if isinstance(leaf, _Again) and leaf not in restored:
                    restored[leaf] = unpack(leaf.source).detach().requires_grad_(leaf.requires_grad)
            leaves = [restored[leaf] if isinstance(leaf, _Again) else leaf for leaf in self._again]
            return self._splitter.undivided(self._compute, leaves)


def _trains(module: nn.Module, leaves: Sequence[Any]) -> bool:
    """Return whether backward will need the inside of ``module``."""
    return torch.is_grad_enabled() and (
        any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        or any(parameter.requires_grad for parameter in module.parameters())
    )


def _merge(outputs: list[Any], sizes: list[int], name: str) -> Any:
    """Return the outputs of all parts as one: tensors with the leading sizes of the parts are concatenated, all else is equal.
    """
    flat = [flatten(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise MisuseError(f"micro_batch: the outputs of {name!r} for the parts of a batch have different structures")
    merged = []
    for place, same in zip(paths(structure), zip(*(leaves for leaves, _ in flat), strict=True), strict=True):
        first = same[0]
        if all(leaf is first for leaf in same):
            merged.append(first)
        elif all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (size,) for leaf, size in zip(same, sizes, strict=True)):
            merged.append(torch.cat(same))
        elif all(_equal(leaf, first) for leaf in same):
            merged.append(first)
        else:
            what = f"of shape {tuple(first.shape)}" if isinstance(first, torch.Tensor) else f"a {type(first).__name__}"
            raise MisuseError(
                f"micro_batch: output{place} of {name!r} ({what}) differs between the parts of a batch, and its leading size "
                "is not the batch's: it cannot be put together; return it by sample, or compute it further out"
            )
    return rebuild(structure, iter(merged))


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.dtype is right.dtype
        return tensors and torch.equal(left.detach(), right.detach())
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):  # an array of some other library
        return False


def _leading(leaves: Sequence[Any]) -> int | None:
    """Return the leading size of the first tensor; None when there is none, or it has no dimension."""
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    return None if first is None or first.is_nested or first.dim() == 0 else first.size(0)


def _packed(structure: Structure | None) -> bool:
    return structure is not None and (structure.kind is PackedSequence or any(_packed(child) for child in structure.inside))
