"""A model's forward and backward without memory: on the meta device, with what paging would see of it written down.

torch runs the operations, autograd included, on tensors that have shapes and no values. Hooks as those of ``zero.paging.pager``
write down when modules run, which parameters autograd saves and asks for, and when gradients arrive; a dispatch mode counts
floating point operations and the bytes of operands, and follows the memory of all tensors that are alive. Takes milliseconds
for a layer, whatever its size.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from tiered.errors import MisuseError
from tiered.planning.waiting import DrySplitter, NotingStore, Waiting, saved_tensors
from tiered.store.activations import Hooks, Left, SavedTensors, hooks_active, pop_hooks, push_hooks
from tiered.zero.paging.saved_tensors import SavedActivation, of_checkpoint
from tiered.zero.paging.units import is_called

__all__ = ["Cost", "Described", "DryRun", "Happening", "Kind", "OperationKind", "dry_run", "on_meta"]

Loss = Callable[[Any, Any], torch.Tensor]


class Kind(Enum):
    """What happened. ENTER, EXIT and AGAIN are of modules, the next five of parameters, COST is of operations between two
    others, and those after BACKWARD are of activations in a store."""

    ENTER = auto()
    EXIT = auto()
    AGAIN = auto()
    """Backward begins to compute a module again, which EXIT ends."""
    READ = auto()
    """A parameter was read by its name from a module."""
    SAVED = auto()
    """Autograd saved memory of a parameter for backward."""
    WANTED = auto()
    """Backward asks for what was saved."""
    FREED = auto()
    """Nothing saved refers to it any more."""
    ARRIVES = auto()
    """Autograd is about to accumulate a gradient."""
    COST = auto()
    BACKWARD = auto()
    """The backward pass begins, or ends."""
    MADE = auto()
    """An activation, or a piece of one, is put into the store."""
    ASKED = auto()
    """It is copied out of the store."""
    ENDED = auto()
    """Nobody needs it any more."""
    AHEAD = auto()
    """The store is told that some are needed soon."""


@dataclass(frozen=True)
class OperationKind:
    """An operation of torch on tensors of given shapes: all that are equal take the same time.

    ``signature`` says what is equal; ``call`` has what is called and its arguments, on the meta device. ``flops``: floating
    point operations, ``nbytes``: bytes of operands and results.
    """

    signature: str
    flops: float = field(compare=False)
    nbytes: float = field(compare=False)
    call: tuple[Any, Any, Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Cost:
    """Operations that follow one another. ``backward``: they are of a backward pass."""

    operations: tuple[OperationKind, ...]
    backward: bool = False

    @property
    def flops(self) -> float:
        return sum(one.flops for one in self.operations)

    @property
    def nbytes(self) -> float:
        return sum(one.nbytes for one in self.operations)


@dataclass(frozen=True)
class Happening:
    """One event: of a module (its name), of a parameter (its number in ``model.parameters()``), a cost, or of activations in a
    store (their keys, and bytes)."""

    kind: Kind
    module: str = ""
    parameter: int = -1
    cost: Cost | None = None
    keys: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass
class DryRun:
    """What a forward and a backward pass did. ``saved``: bytes that are alive when backward begins; ``peak``: at most at any
    time; both of tensors that the passes made, without parameters and with one gradient at a time."""

    events: list[Happening] = field(default_factory=list)
    saved: int = 0
    peak: int = 0
    flops: float = 0.0
    inputs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """By module name, what its forward was given: positional and keyword arguments, on the meta device."""


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on the meta device; parameters and buffers that are shared stay so. Raises MisuseError for a
    model that is paged."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "_tiered"):
            raise MisuseError(f"parameter {name!r} is paged already: plan before zero.page")
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter.detach(), device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    return copy.deepcopy(model, memo)


def dry_run(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss, target: Any = None, *,
    waiting: Waiting | None = None,
) -> DryRun:
    """Run forward and backward of ``model``, which is on the meta device, with these arguments; ``loss(output, target)``.

    ``waiting``: how activations wait for backward; None: in memory.

    Raises MisuseError where the model cannot run without values, with the reason, and where it cannot be split.
    """
    recorder = _Recorder(model, waiting)
    try:
        with _whole_sequences(), recorder.recording():
            value = loss(model(*args, **kwargs), target)
            recorder.backward_begins()
            _backward(value)
            del value
        recorder.finished()
    except (RuntimeError, NotImplementedError) as error:
        raise MisuseError(
            f"{type(model).__name__} cannot run on the meta device, without values: {str(error).splitlines()[0]}; give the "
            "plan numbers (tiered.Numbers), or a model whose forward does not depend on values"
        ) from error
    finally:
        recorder.close()
        for parameter in model.parameters():
            parameter.grad = None
    return recorder.found


@contextmanager
def _whole_sequences() -> Iterator[None]:
    """Have transformers take each row of a batch for one sequence. It looks for several in a row by the values of positions,
    which there are none of on the meta device; a row of one sequence has no mask for that."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    found = getattr(masks, "find_packed_sequence_indices", None)
    if found is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda positions: None if positions.is_meta else found(positions)
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = found


def _backward(value: torch.Tensor) -> None:
    """Run backward by autograd's engine itself: ``torch.autograd.backward`` takes function modes out of force, and what is
    computed again within backward needs them."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((value,), (torch.ones_like(value),), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Saved:
    """What autograd keeps instead of a tensor that shows memory of a parameter."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Watched(dict[str, Any]):
    """Parameters of a module, in a dict that tells when one is read by name."""

    def __init__(self, parameters: Mapping[str, Any], tell: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._tell = tell

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._tell(parameter)
        return parameter


class _Recorder:
    """Writes down what happens. It is also what ``waiting`` notes to, and the paged model of which modules are split."""

    def __init__(self, model: nn.Module, waiting: Waiting | None) -> None:
        self.found = DryRun()
        self._model, self._waiting = model, waiting
        self._store = None if waiting is None else NotingStore(waiting.pool, self)
        self._saved: SavedTensors | None = None
        self._splitter: DrySplitter | None = None
        self._waits: dict[str, None] = {}
        """Keys of activations that are in the store."""
        self._over: list[tuple[str, _OverCheckpoint]] = []
        self._number = {parameter: number for number, parameter in enumerate(model.parameters())}
        self._memory = {p.untyped_storage()._cdata: number for p, number in self._number.items()}
        self._names = {module: name for name, module in model.named_modules()}
        self._operations: list[OperationKind] = []
        self._within: list[str] = [""]
        self._backward = False
        self._nodes: list[Any] = []
        self._given: set[int] = set()

    # -- what happens ------------------------------------------------------------------------------------------------------

    def note(
        self, kind: Kind, module: str = "", parameter: int = -1, keys: Sequence[str] = (), nbytes: int = 0
    ) -> None:
        self._end_cost()
        self.found.events.append(Happening(kind, module, parameter, keys=tuple(keys), nbytes=nbytes))

    def _end_cost(self) -> None:
        if self._operations:
            cost = Cost(tuple(self._operations), self._backward)
            self.found.events.append(Happening(Kind.COST, cost=cost))
            self.found.flops += cost.flops
            self._operations = []

    def backward_begins(self) -> None:
        self.note(Kind.BACKWARD)
        self._backward = True
        self._live.sweep()
        self.found.saved = self._live.nbytes

    def finished(self) -> None:
        if self._saved is not None:
            self._saved.sweep()
        if self._splitter is not None:
            self._splitter.activations.sweep()
        self.note(Kind.BACKWARD)
        for key in list(self._waits):  # what only a collection of garbage would end
            self.ended([key])
        self.found.peak = self._live.peak

    def close(self) -> None:
        """Let go of the store in which activations wait."""
        self._saved = self._splitter = None
        if self._store is not None:
            self._store.close()

    def made(self, key: str, nbytes: int) -> None:
        self._waits[key] = None
        self.note(Kind.MADE, keys=[key], nbytes=nbytes)

    def asked(self, key: str) -> None:
        self.note(Kind.ASKED, keys=[key])

    def ended(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self._waits:
                del self._waits[key]
                self.note(Kind.ENDED, keys=[key])

    def ahead(self, keys: Sequence[str]) -> None:
        self.note(Kind.AHEAD, keys=keys)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._live = _Live(self._operations_of, self._memory)
        waiting, store = self._waiting, self._store
        with ExitStack() as stack:
            if waiting is not None and store is not None and waiting.way == "store":
                self._saved = saved_tensors(store, waiting.pool)
            elif waiting is not None and store is not None:
                self._splitter = DrySplitter(self._model, store, waiting, self)
                stack.callback(self._splitter.end)
            for module in self._model.modules():
                if module._parameters:
                    stack.callback(setattr, module, "_parameters", module._parameters)
                    module._parameters = _Watched(module._parameters, self._read)
                if is_called(module):
                    stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._exit, always_call=True).remove)
            for parameter, number in self._number.items():
                if parameter.requires_grad:
                    node = get_gradient_edge(parameter).node
                    self._nodes.append(node)
                    stack.callback(node.register_prehook(lambda grads, number=number: self._arrives(number)).remove)
                    taken: Any = parameter.register_post_accumulate_grad_hook(_taken)  # type: ignore[no-untyped-call]
                    stack.callback(taken.remove)
            stack.enter_context(_Attention())
            stack.enter_context(self._live)
            stack.enter_context(saved_tensors_hooks(self.pack, self.unpack))
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        self.note(Kind.ENTER, name)
        self._within.append(name)
        if module._parameters and of_checkpoint(below := hooks_active()):
            assert below is not None
            over = _OverCheckpoint(self, below)
            push_hooks(over.pack, over.unpack)
            self._over.append((name, over))
        if name not in self.found.inputs:
            with torch._C._DisableTorchDispatch():
                self.found.inputs[name] = tree_map(_shape_of, args), tree_map(_shape_of, kwargs)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names[module]
        self.note(Kind.EXIT, name)
        if self._within[-1] == name:
            self._within.pop()
        if self._over and self._over[-1][0] == name:
            pop_hooks()
            self._over.pop()
        if len(self._within) == 1 and not self._backward and self._saved is not None:
            with torch._C._DisableTorchDispatch():
                self._saved.look_again()

    def _read(self, parameter: nn.Parameter) -> None:
        number = self._number.get(parameter)
        if number is not None and len(self._within) > 1:
            self.note(Kind.READ, parameter=number)

    def reference(self, tensor: torch.Tensor) -> _Saved | None:
        """Return what to remember instead of a tensor that shows memory of a parameter; None for any other."""
        number = self._memory.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if number is None:
            return None
        self.note(Kind.SAVED, self._within[-1], number)
        saved = _Saved(tensor)
        weakref.finalize(saved, self._freed, number).atexit = False
        return saved

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd keeps instead of a tensor."""
        saved = self.reference(tensor)
        if saved is not None:
            return saved
        if len(self._within) > 1:  # in a forward, where the hooks of a paged model are in force
            if self._saved is not None:
                self._live.watch(tensor)
                with torch._C._DisableTorchDispatch():
                    return self._saved.pack(tensor)
            if self._splitter is not None:
                packed = self._splitter.pack(tensor)
                return Left(tensor) if packed is tensor else packed
        return tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor of ``pack``."""
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, Left):
            return packed.tensor()
        if isinstance(packed, _Saved):
            number = self._memory[packed.tensor.untyped_storage()._cdata]
            self.note(Kind.WANTED, parameter=number)
            return packed.tensor
        with torch._C._DisableTorchDispatch():
            if isinstance(packed, SavedActivation):
                tensor = packed.restore()
            else:
                assert self._saved is not None
                tensor = self._saved.unpack(packed)
        self._live.lives(tensor.untyped_storage())
        return tensor

    def versions(self, module: nn.Module) -> tuple[int, ...]:
        """Return nothing: no parameter changes in a dry run."""
        return ()

    @contextmanager
    def recomputing(self, module: nn.Module, versions: tuple[int, ...]) -> Iterator[Callable[[Any], torch.Tensor]]:
        """Note that a split module is computed again."""
        name = self._names[module]
        self.note(Kind.AGAIN, name)
        self._within.append(name)
        try:
            yield self.unpack
        finally:
            self.note(Kind.EXIT, name)
            if self._within[-1] == name:
                self._within.pop()

    def _freed(self, number: int) -> None:
        self.note(Kind.FREED, parameter=number)

    def _arrives(self, number: int) -> None:
        self.note(Kind.ARRIVES, parameter=number)

    def _operations_of(self, operation: OperationKind) -> None:
        self._operations.append(operation)


class _OverCheckpoint:
    """Hooks over those of torch.utils.checkpoint, which get all tensors but parameters, as those of ``zero.paging``."""

    def __init__(self, recorder: _Recorder, below: Hooks) -> None:
        self._recorder, self._below = recorder, below

    def pack(self, tensor: torch.Tensor) -> Any:
        saved = self._recorder.reference(tensor)
        return self._below[0](tensor) if saved is None else saved

    def unpack(self, packed: Any) -> torch.Tensor:
        return self._recorder.unpack(packed) if isinstance(packed, _Saved) else self._below[1](packed)


def _taken(parameter: torch.Tensor) -> None:
    """Let go of a gradient as soon as it has arrived, as paging does."""
    parameter.grad = None


def _shape_of(value: Any) -> Any:
    return torch.empty_like(value, device="meta", requires_grad=False) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Described:
    """Shape, strides and element type of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Described:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and follows the memory of all tensors that they make."""

    def __init__(self, tell: Callable[[OperationKind], None], known: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell, self._known = tell, known
        self.nbytes = self.peak = 0
        self._seen: dict[int, int] = {}
        self._watched: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        formula = flop_registry.get(func._overloadpacket)
        flops = float(formula(*args, **(kwargs or {}), out_val=result)) if formula is not None else _attention(func, args)
        shown = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in shown]
        changed = func._schema.is_mutable
        if fresh or flops or changed:  # what gives views of what it was given takes no time
            nbytes = sum(tensor.numel() * tensor.itemsize for tensor in (*given, *(made[:1] if changed else fresh)))
            self._tell(OperationKind(_signature(func, args, kwargs), flops, nbytes, (func, *_described((args, kwargs or {})))))
        for tensor in fresh:
            self.lives(tensor.untyped_storage())
        return result

    def lives(self, storage: torch.UntypedStorage) -> None:
        """Count the memory of a tensor from now until it is freed."""
        name = storage._cdata
        if name in self._seen or name in self._known:
            return
        nbytes = self._seen[name] = storage.nbytes()
        self.nbytes += nbytes
        if self.nbytes > self.peak:
            self.sweep()
            self.peak = max(self.peak, self.nbytes)
        weakref.finalize(storage, self._dies, name).atexit = False

    def watch(self, tensor: torch.Tensor) -> None:
        """Look whether the memory of ``tensor`` was freed that will have weak references, as saved activations have: in torch
        2.6 these keep the storage as an object, although not its memory."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._watched.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def sweep(self) -> None:
        """Count without the memory that was freed."""
        for name in [name for name, storage in self._watched.items() if storage.expired()]:  # type: ignore[no-untyped-call]
            self._dies(name)
            del self._watched[name]  # now another storage may have this address

    def _dies(self, name: int) -> None:
        self.nbytes -= self._seen.pop(name, 0)


def _described(value: Any) -> Any:
    """Return arguments with a description in the place of each tensor, which keeps no memory alive."""
    return tree_map(lambda leaf: Described.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _signature(func: Any, args: Any, kwargs: Any) -> str:
    return f"{func}{_described((args, kwargs or {}))}"


def _attention(func: Any, args: Any) -> float:
    """Return the operations of an attention on the CPU, which torch's registry does not have."""
    name = func._overloadpacket.__name__
    if "flash_attention_for_cpu" not in name:
        return 0.0
    backward = name.endswith("backward")
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    once = 4.0 * float(query.numel()) * float(key.shape[-2])
    return 2.5 * once if backward else once


class _Attention(TorchFunctionMode):
    """Has ``scaled_dot_product_attention`` be what it is on a CPU or a GPU, which keep no matrix of scores, where it can."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _fused(func, *args, **kwargs)
        return func(*args, **kwargs)


def _fused(func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
           scale: float | None = None, enable_gqa: bool = False) -> Any:
    plain = dropout_p == 0.0 and query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if not plain or (attn_mask is not None and attn_mask.requires_grad):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
