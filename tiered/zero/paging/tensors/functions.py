"""What each function of torch is for a tensor whose values are in the store: tables of names, and what arguments have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tiered.zero.paging.tensors.compiling import traced

__all__ = [
    "ASKED",
    "AS_IT_IS",
    "CONVERSIONS",
    "COPIED",
    "GEOMETRY",
    "LIKE",
    "OTHER",
    "REFUSED",
    "RESHAPED",
    "SCALING",
    "SHARED",
    "VIEWS",
    "WRAPPERS",
    "Function",
    "asks_for_gradient",
    "attributes",
    "changed",
    "leaves",
    "name_of",
    "order_of",
    "words",
    "written_by",
]

Function = Callable[..., Any]


def name_of(func: Function) -> str:
    """Return the name of ``func``; of an attribute with ``.__get__``, ``.__set__`` or ``.__delete__``."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        return f"{getattr(owner, '__name__', None) or getattr(getattr(owner, 'fget', None), '__name__', '')}.{name}"
    return name.partition(".")[0]  # add.Tensor of torch.ops


def words(names: str) -> set[str]:
    return set(names.split())


def attributes(names: str, *ways: str) -> set[str]:
    return {f"{name}.__{way}__" for name in names.split() for way in ways or ("get",)}


AS_IT_IS = {
    *attributes("requires_grad grad _grad _backward_hooks _post_accumulate_grad_hooks", "get", "set", "delete"),
    *attributes("shape ndim dtype device layout is_leaf grad_fn _grad_fn retains_grad output_nr name names itemsize nbytes"),
    *attributes("is_cpu is_cuda is_meta is_quantized is_sparse is_sparse_csr is_mkldnn is_mps is_xla is_xpu is_nested is_ipu"),
    *attributes("is_vulkan is_maia is_mtia is_hpu _version grad_dtype _base _cdata"),
    *words("size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed is_inference"),
    *words("is_conj is_neg is_same_size is_shared is_pinned is_tensor __len__ __hash__ requires_grad_ register_hook"),
    *words("register_post_accumulate_grad_hook retain_grad has_names _is_view _is_zerotensor result_type can_cast"),
    *words("data_ptr untyped_storage _has_compatible_shallow_copy_type get_gradient_edge"),
}
"""Functions that take a parameter for what it is, without its values."""

ASKED = {
    *attributes("requires_grad grad _grad _backward_hooks _post_accumulate_grad_hooks", "get", "set", "delete"),
    *attributes("grad_fn _base _version output_nr"),
    *words("requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad get_gradient_edge data_ptr"),
    *words("untyped_storage _has_compatible_shallow_copy_type"),
}
"""Those of ``AS_IT_IS`` that sources are asked about."""

GEOMETRY = {"stride", "is_contiguous", "storage_offset", "dim_order", "_debug_has_internal_overlap"}
"""Functions whose result depends on strides."""

LIKE = {
    *words("zeros_like ones_like empty_like full_like rand_like randn_like randint_like"),
    *words("new_zeros new_ones new_empty new_full new_empty_strided"),
}
"""Functions that make a new tensor of the same type, device or geometry."""

VIEWS = {
    *attributes("data T mT H mH real imag"),
    *words("detach alias view view_as reshape reshape_as t adjoint transpose swapaxes swapdims permute movedim moveaxis"),
    *words("unsqueeze squeeze"),
    *words("narrow select __getitem__ expand expand_as flatten unflatten ravel unbind split split_with_sizes chunk"),
    *words("tensor_split hsplit vsplit dsplit diagonal as_strided unfold view_as_real view_as_complex broadcast_to __iter__"),
    *words("atleast_1d atleast_2d atleast_3d"),
}
"""Functions whose result may be a view of their first argument."""

CONVERSIONS = {"to", "float", "double", "half", "bfloat16", "cpu", "cuda", "type", "contiguous", "type_as"}
"""Functions that return their argument where there is nothing to convert."""

SHARED = "would share the memory of the values with something outside of torch"
RESHAPED = "would change the shape, or the memory, of what is in the store in place"
OTHER = (
    "this tensor has the class, or the attributes, of a paged parameter, and is another one: make it with "
    "torch.nn.Parameter(values), and leave the attribute _tiered out of what is copied from parameter.__dict__"
)
REFUSED = {
    **dict.fromkeys(("__dlpack__", "storage", "_typed_storage", "__cuda_array_interface__.__get__", "share_memory_"), SHARED),
    **dict.fromkeys(("pin_memory", "apply_", "map_", "map2_"), "needs the values in ordinary memory"),
    **dict.fromkeys(words("set_ resize_ resize_as_ detach_ t_ squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_"), RESHAPED),
    **dict.fromkeys(words("as_strided_ _set_data rename_ swap_tensors names.__set__ real.__set__ imag.__set__"), RESHAPED),
}
"""Functions that cannot be right, and why."""

WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel would reduce its gradients a second time",
    "torch.distributed.fsdp._fully_shard": "fully_shard would take its parameters out of the store",
    "torch.distributed.fsdp": "FullyShardedDataParallel would take its parameters out of the store",
}
"""Modules of torch that divide or reduce a model whose paging does that itself, and what they would do. The first that fits."""

COPIED = {"numpy"}
"""Functions whose result, which is no tensor, shares the memory of their argument."""

AUGMENTED = {f"__i{name}__" for name in words("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift")}

SCALING = {
    **dict.fromkeys(words("mul_ multiply_ __imul__ _foreach_mul_"), False),
    **dict.fromkeys(words("div_ divide_ true_divide_ __itruediv__ _foreach_div_"), True),
}
"""Functions that multiply their first argument, or each of its list, in place, and whether they divide."""

FUSED = "_fused_"
"""Beginning of the names of functions that write to all their lists, but to the gradients where they unscale them alone."""


def _writes(name: str) -> bool:
    """Return whether a function of this name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name in AUGMENTED
    return (name.endswith("_") and not name.endswith("__")) or name == "data.__set__"


def written_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments, and lists of them, that a function of this name writes to."""
    targets = [kwargs["out"]] if kwargs.get("out") is not None else []
    if name.startswith(FUSED):
        read = () if kwargs.get("grad_scale") is not None else (args[1] if len(args) > 1 else kwargs.get("grads"),)
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
        targets += [value for value in lists if all(value is not one for one in read)]
    elif _writes(name):
        targets.append(args[0] if args else [kwargs[key] for key in ("self", "input", "tensor") if key in kwargs])
    return targets


def asks_for_gradient(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call of a function of ``AS_IT_IS`` makes a parameter one that can be trained."""
    if name not in ("requires_grad.__set__", "requires_grad_"):
        return False
    return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))


def order_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Return the order of the vector norm of all elements of its first argument that a function returns, or of each of the
    list that ``_foreach_norm`` is given; None for another function, and where it is asked for another type or for parts."""
    names = _NORMS.get(name)
    if names is None or len(args) > len(names):
        return None
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("dtype") is not None or given.get("out") is not None or given.get("keepdim"):
        return None
    tensor: Any = given.get(names[0])
    dim, order = given.get("dim"), given.get(names[1], 2)
    if dim is not None and dim != () and dim != []:
        dims = [dim] if isinstance(dim, int) else list(dim)
        if sorted(one % tensor.dim() for one in dims) != list(range(tensor.dim())):
            return None
    if name in ("norm", "linalg_norm"):
        if order is None or order == "fro":
            order = 2
        elif name == "linalg_norm" and tensor.dim() != 1:
            return None  # of a matrix
    return float(order) if isinstance(order, int | float) else None


_NORMS: dict[str, tuple[str, ...]] = {
    "_foreach_norm": ("self", "ord", "dtype"),
    "linalg_vector_norm": ("input", "ord", "dim", "keepdim"),
    "linalg_norm": ("input", "ord", "dim", "keepdim"),
    "norm": ("input", "p", "dim", "keepdim", "out", "dtype"),
}


@traced
def leaves(value: Any) -> Iterator[Any]:
    """Yield what ``value`` has: itself, or what its lists, tuples and dicts have."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with each of its leaves changed."""
    if isinstance(value, dict):
        return {key: changed(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        made = [changed(one, change) for one in value]
        return made if isinstance(value, list) else type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return change(value)
