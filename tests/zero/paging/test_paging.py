"""What a user can see of paging beyond the numbers: gradients, errors, lifetimes, budgets."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.quick import quick
from tests.zero.models import Mixed, Tied, parameter_groups
from tiered import CapacityError, Eviction, InterruptedStep, MisuseError, SharedMemoryWarning, TieredStore, WriteError, zero
from tiered.zero.paging.pager import pager_of
from tiered.zero.paging.tensors.stored import StoredTensor
from tiered.zero.paging.units import Limits, divide


def held(store: TieredStore) -> int:
    gc.collect()
    return sum(tier.held for tier in store.statistics().tiers)


def test_released_parameters_keep_shape_and_hold_no_memory(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    for parameter in model.parameters():
        with torch._C.DisableTorchFunctionSubclass():
            assert parameter.untyped_storage().nbytes() <= 8
            assert torch.isnan(parameter).all(), "a read that nobody answers must be loud"
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Tied().parameters())


def test_nothing_is_held_between_passes(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert held(store) == 0
    loss = model.loss(0)
    assert held(store) == 0, "what is saved for backward must not hold a slot"
    loss.backward()
    assert held(store) == 0


def test_gradients_are_in_the_store_and_read_as_in_memory(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = Tied()
    torch.manual_seed(0)
    model = zero.page(Tied(), store)
    optimizer = zero.AdamW(parameter_groups(model))
    reference.loss(0).backward()
    model.loss(0).backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None, name
            assert optimizer.grad(parameter) is None
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.shape == parameter.shape
            assert repr(parameter.grad) == repr(expected.grad)
            assert torch.equal(optimizer.grad(parameter), expected.grad), name
            assert isinstance(parameter.grad, StoredTensor), name
    kept = model.position.grad
    optimizer.zero_grad()
    with pytest.raises(MisuseError, match=r"'position' is gone.*parameter\.grad\.clone\(\)"):
        kept.norm()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not [key for key in store if key.endswith("/grad")], "forgotten gradients take no room"


def test_gradients_that_a_user_assigns_or_clears_count(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    torch.manual_seed(0)
    model = zero.page(nn.Linear(4, 4), store)
    fused = torch.optim.AdamW(reference.parameters(), fused=True)
    optimizer = zero.AdamW(model.parameters())
    for net, adam in ((reference, fused), (model, optimizer)):
        net(torch.ones(1, 4)).sum().backward()
        net.zero_grad()  # not the optimizer's
        net(torch.ones(2, 4)).sum().backward()
        net.bias.grad = torch.full((4,), 3.0)
        net(torch.ones(2, 4)).sum().backward()
        adam.step()
        adam.zero_grad(set_to_none=False)
        adam.step()
        net.weight.grad = torch.ones(4, 4)
        adam.step()
        adam.step()  # the same gradients once more
    assert all(torch.equal(a, b) for a, b in zip(reference.state_dict().values(), model.state_dict().values(), strict=True))


def test_asking_autograd_for_gradients_leaves_the_stored_ones_alone(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(reference)
    zero.page(model, store)
    optimizer = zero.AdamW(model.parameters())
    for net in (reference, model):
        net(torch.ones(1, 4)).sum().backward()
    asked = [torch.autograd.grad(net(torch.ones(2, 4)).square().sum(), list(net.parameters())) for net in (reference, model)]
    assert all(torch.equal(a, b) for a, b in zip(*asked, strict=True))
    for net in (reference, model):
        net(torch.ones(3, 4)).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.grad(ours), theirs.grad)


def test_a_paged_model_says_that_it_cannot_be_pickled(store: TieredStore) -> None:
    model = zero.page(nn.Linear(4, 4), store)
    with pytest.raises(MisuseError, match="state_dict"):
        pickle.dumps(model)


def test_clipping_twice_and_accumulating_onto_clipped(store: TieredStore) -> None:
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    torch.manual_seed(0)
    model = zero.page(nn.Linear(4, 4), store)
    fused = torch.optim.AdamW(reference.parameters(), fused=True)
    optimizer = zero.AdamW(model.parameters())
    norms: list[list[float]] = []
    for net, adam in ((reference, fused), (model, optimizer)):

        def clip(limit: float, order: float, net: nn.Module = net, adam: object = adam) -> float:
            if isinstance(adam, zero.AdamW):
                return adam.clip_grad_norm_(limit, order).item()
            return torch.nn.utils.clip_grad_norm_(net.parameters(), limit, order).item()

        net(torch.ones(1, 4)).sum().backward()
        seen = [clip(0.5, 2.0), clip(0.25, 2.0), clip(0.2, float("inf"))]
        net(torch.ones(3, 4)).sum().backward()
        seen += [clip(0.1, 1.0), clip(1e9, 2.0)]
        adam.step()
        norms.append(seen)
    assert norms[0] == norms[1]
    assert all(torch.equal(a, b) for a, b in zip(reference.state_dict().values(), model.state_dict().values(), strict=True))
    model.weight.grad = torch.full((4, 4), float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_graph_from_before_a_step_cannot_run_after_it(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters())
    model.loss(0).backward()
    late = model.loss(1)
    optimizer.step()
    with pytest.raises(MisuseError, match=r"before step\(\)"):
        late.backward()
    model.loss(2).backward()


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return x * self.weight


class Replacing(Doubling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.detach() * 3
        return x * self.weight


@pytest.mark.parametrize("kind", [Doubling, Replacing])
def test_a_write_in_forward_lands_in_the_store(store: TieredStore, kind: type[nn.Module]) -> None:
    reference, model = kind(), zero.page(kind(), store)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(torch.ones(4)), reference(torch.ones(4)))
        assert torch.equal(model.state_dict()["weight"], reference.state_dict()["weight"])
    gradients = []
    for one in (reference, model):
        x = torch.arange(4.0, requires_grad=True)
        one(x).sum().backward()
        gradients.append((x.grad, one.weight.grad.clone()))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True)), "what was saved after the write is good"
    first = model(torch.ones(4, requires_grad=True)).sum()
    model(torch.ones(4, requires_grad=True)).sum().backward()
    if kind is Doubling:
        with pytest.raises(MisuseError, match="or written to, after this graph was made"):
            first.backward()


@pytest.mark.parametrize("harm", ["data", "assigned"])
def test_a_write_past_torch_functions_raises_and_spoils_nothing(store: TieredStore, harm: str) -> None:
    model = zero.page(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), store)
    expected = model.state_dict()
    weight = model[1].weight
    with torch._C.DisableTorchFunctionSubclass():
        if harm == "data":
            weight.data.as_strided((1,), (1,)).zero_()
        else:
            weight.data = torch.ones(4, 4)
    with pytest.raises(MisuseError, match=r"parameter '1\.weight' was written to"):
        model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_an_exception_in_forward_or_backward_leaves_nothing_held(store: TieredStore) -> None:
    model = Tied()
    zero.page(model, store)
    optimizer = zero.AdamW(model.parameters())

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    handle = model.blocks[1].mlp.register_forward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model.loss(0)
    handle.remove()
    assert held(store) == 0
    handle = model.blocks[1].attention.weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model.loss(0).backward()
    handle.remove()
    optimizer.zero_grad()
    model.loss(0).backward()
    optimizer.step()
    assert held(store) == 0
    store.commit()


def test_a_graph_from_before_paging_raises(store: TieredStore) -> None:
    model = nn.Linear(4, 4, bias=False)
    loss = (model.weight**2).sum()
    zero.page(model, store)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (model.weight**2).sum().backward()


def test_parameters_that_share_memory_are_named(store: TieredStore) -> None:
    """They would be apart in the store. What lies side by side in one memory is none of them."""

    def shared(model: Any) -> None:
        model[1].weight = nn.Parameter(model[0].weight)

    def overlapping(model: Any) -> None:
        memory = torch.ones(6, 4)
        model[0].weight, model[1].weight = nn.Parameter(memory[:4]), nn.Parameter(memory[2:])

    def viewed(model: Any) -> None:
        model.register_buffer("first", model[0].weight.detach()[1])

    def beside(model: Any) -> None:
        memory = torch.ones(8, 4)
        model[0].weight, model[1].weight = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
        model[0].bias = model[1].bias

    for change, names in (
        (shared, "'0.weight'.*'1.weight'"),
        (overlapping, "'0.weight'.*'1.weight'"),
        (viewed, "weight'.*'first'"),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        change(model)
        with pytest.raises(MisuseError, match=f"{names} share memory"):
            zero.page(model, store)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    beside(model)
    zero.page(model, store)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.ones(4).expand(4, 4))
    with pytest.raises(MisuseError, match=r"'0.weight' has several elements in one place .*expanded.*\.contiguous\(\)"):
        zero.page(model, store, name="expanded")


@pytest.mark.parametrize(
    ("lazy", "what"),
    [
        (lambda: nn.LazyConv2d(3, 2), "parameter '1.weight'"),
        (lambda: nn.LazyBatchNorm2d(affine=False), "buffer '1.running_mean'"),
    ],
)
def test_a_lazy_module_is_called_before_it_is_paged(store: TieredStore, lazy: Callable[[], nn.Module], what: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), lazy())
    with pytest.raises(MisuseError, match=f"{what} has no shape yet.*call the model once before zero.page"):
        zero.page(model, store)
    x = torch.ones(2, 3, 4, 4)
    model(x)
    reference = copy.deepcopy(model)
    zero.page(model, store)
    assert torch.equal(model(x), reference(x))


UNSTORED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(3).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex64": lambda: torch.ones(3, dtype=torch.complex64),
}


@pytest.mark.filterwarnings("ignore")  # of torch: sparse CSR, nested and quantized tensors may change
@pytest.mark.parametrize("kind", UNSTORED)
def test_a_parameter_that_a_store_cannot_have_is_named(store: TieredStore, kind: str) -> None:
    """A buffer stays in memory, and may be any; nothing is left behind."""
    model, value = nn.Linear(2, 2), UNSTORED[kind]()
    model.odd = nn.Parameter(value, requires_grad=kind == "complex64")
    with pytest.raises(MisuseError, match=f"parameter 'odd' is .*{kind}"):
        zero.page(model, store)
    assert not list(store)
    del model.odd
    model.register_buffer("odd", value)
    zero.page(model, store)
    assert model(torch.ones(1, 2)).shape == (1, 2)


class Wrapping(torch.Tensor):
    """Has its values in a tensor within it, as those of torchao, and DTensors, have."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the classmethod
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return Wrapping(args[0].inner) if function is torch.ops.aten.detach.default else NotImplemented


class Some(nn.Linear):
    """Gives some of its parameters, as a class for feature extraction may."""

    def parameters(self, recurse: bool = True) -> Any:
        return iter([self.bias])


class Renamed(nn.Linear):
    def named_parameters(self) -> Any:  # type: ignore[override]
        return [("w", self.weight), ("b", self.bias)]


def weighed(make: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        linear = nn.Linear(3, 3)
        linear.weight = nn.Parameter(make(), requires_grad=False)
        return linear

    return made


def inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 3)


def hooked(register: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        linear = nn.Linear(3, 3, device="meta")
        getattr(linear.weight, register)(print)
        return linear

    return made


class Showing(nn.Module):
    """Its attributes show its parameters: as they are, and with what autograd records."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.detached = self.first.weight.detach()[2:, 3:9]
        self.left, self.right = self.first.bias.chunk(2)
        self.turned = self.second.weight.t()
        self.many = [self.first.bias[5:], {"a": self.second.bias.detach()}, (self.first.weight.data.view(-1)[7:70],)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = self.many[0].sum() + self.detached.sum() + (self.left * self.right.sin()).sum()  # type: ignore[attr-defined]
        return self.first(x) @ self.turned + more

    def shown(self) -> list[torch.Tensor]:
        many: Any = self.many
        return [one.detach().clone() for one in (self.detached, self.turned, many[0], many[1]["a"], many[2][0])]


def test_attributes_that_show_parameters_are_views_of_them_afterwards(store: TieredStore) -> None:
    found, models = list[list[torch.Tensor]](), list[Showing]()
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Showing())
    theirs, ours = models
    zero.page(ours, store)
    for model, kind in ((theirs, torch.optim.SGD), (ours, zero.SGD)):
        optimizer: Any = kind(model.parameters(), lr=0.1, **({"fused": True} if kind is torch.optim.SGD else {}))
        seen = model.shown()
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 128).view(2, 64)).square().mean()
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), *model.shown()]
        with torch.no_grad():
            model.detached.fill_(3)
        found.append([*seen, *model.shown(), model.first.weight.detach().clone()])
    assert all(map(torch.equal, *found))


def test_attributes_that_show_parameters_show_those_that_were_committed(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path, dram="1MiB") as store:
        model = zero.page(Showing(), store)
        expected = model.shown()
        zero.commit(model)
    with TieredStore.open(tmp_path, dram="1MiB") as store:
        again = zero.page(Showing(), store, existing="resume")
        assert all(map(torch.equal, again.shown(), expected))


def laid_out(model: Any) -> None:
    flat = torch.arange(20.0)
    model.weight.data, model.bias.data, model.flat = flat[:16].view(4, 4), flat[16:], flat


def between(model: Any) -> None:
    flat = torch.arange(20.0).view(4, 5)
    model.weight.data, model.last = flat[:, :4], flat[:, 4]


def of_another_type(model: Any) -> None:
    model.whole = model.weight.data.view(torch.int32)


@pytest.mark.parametrize("change", [laid_out, between, of_another_type])
def test_attributes_that_cannot_show_a_paged_parameter_are_named(store: TieredStore, change: Callable[[Any], None]) -> None:
    model = nn.Linear(4, 4)
    change(model)
    with pytest.raises(MisuseError, match=r"attribute '\w+' shows memory of parameter 'weight'.*\.clone\(\)"):
        zero.page(model, store)
    assert type(model.weight) is nn.Parameter
    assert len(store) == 0


@pytest.mark.parametrize("what", ["state_dict", "NumPy", "closure"])
def test_what_shows_parameters_outside_of_the_model_is_named(store: TieredStore, what: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    kept: Any = {
        "state_dict": model.state_dict,
        "NumPy": lambda: model[1].weight.detach().numpy(),
        "closure": lambda: partial(torch.add, model[1].weight.data[1:]),
    }[what]()
    with pytest.warns(SharedMemoryWarning, match=r"show memory of .*'1\.weight'.*zero\.page.*\.clone\(\)") as said:
        zero.page(model, store)
    assert len(said) == 1
    assert Path(said[0].filename).name == Path(__file__).name
    del kept


def test_a_view_that_autograd_recorded_before_is_refused_and_nothing_changes(store: TieredStore) -> None:
    model = nn.Linear(4, 4)
    view = model.weight.t()
    with pytest.raises(MisuseError, match=r"a view of parameter 'weight', of shape \(4, 4\), was made before zero\.page"):
        zero.page(model, store)
    assert type(model.weight) is nn.Parameter
    assert len(store) == 0
    view.sum().backward()
    del view
    zero.page(model, store)


def test_a_scripted_module_without_parameters_is_one_as_any_other(store: TieredStore) -> None:
    model = nn.Sequential(torch.jit.script(nn.ReLU()), nn.Linear(4, 4))
    expected = model(torch.linspace(-1, 1, 4))
    assert torch.equal(zero.page(model, store)(torch.linspace(-1, 1, 4)), expected)


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: torch.jit.script(nn.Linear(3, 3)), r"module '1' \(RecursiveScriptModule\) is compiled by torch.jit"),
    "traced": (lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(3)), "module '1' .* is compiled by torch.jit"),
    "own parameters": (lambda: Some(3, 3), r"module '1' \(Some\) has a method parameters\(\) of its own"),
    "own named_parameters": (lambda: Renamed(3, 3), r"module '1' \(Renamed\) has a method named_parameters\(\) of its own"),
    "a wrapper": (weighed(lambda: Wrapping(torch.ones(3, 3))), "'1.weight' is of the class Wrapping"),
    "inference": (inference, r"'1.weight' was made in torch.inference_mode.*torch.no_grad"),
    "a hook on meta": (hooked("register_hook"), "'1.weight' has hooks, and has no memory yet"),
    "a later hook on meta": (hooked("register_post_accumulate_grad_hook"), "'1.weight' has hooks, and has no memory yet"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", KINDS)
def test_what_cannot_be_a_unit_is_named_before_anything_changes(store: TieredStore, name: str) -> None:
    make, message = KINDS[name]
    model = nn.Sequential(nn.Linear(3, 3), make())
    before = [(id(one), type(one)) for one in nn.Module.parameters(model)]
    with pytest.raises(MisuseError, match=message):
        zero.page(model, store)
    assert [(id(one), type(one)) for one in nn.Module.parameters(model)] == before
    assert len(store) == 0
    del model[1]
    zero.page(model, store)


def test_a_unit_is_at_most_a_gib_and_the_budget_says_which_weights_are_divided() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(20)))  # 64 MiB each, 1.25 GiB together
        model = nn.Sequential(nn.Embedding(300_000, 4096), layers)  # 4.6 GiB
    mebibytes = {
        gib: [unit.nbytes >> 20 for unit in divide(model, Limits.of(gib << 30), {}, zero.Policy()).units]
        for gib in (8, 16, 1024)
    }
    assert mebibytes[8] == [64] * 20 + [1024] * 4 + [591]
    assert mebibytes[16] == mebibytes[1024] == [4687] + [64] * 20


def test_methods_of_modules_may_give_the_same_parameters(store: TieredStore) -> None:
    class Same(nn.Linear):
        def named_parameters(self, *given: Any, **options: Any) -> Any:
            return iter(list(super().named_parameters(*given, **options)))

    model = nn.Sequential(Same(3, 3), nn.Linear(3, 3))
    x = torch.ones(2, 3)
    wanted = model(x)
    zero.page(model, store)
    assert torch.equal(model(x), wanted)


class Reading(nn.Module):
    """Asks small layers for their type before it calls them, as peft's do, beside weights of a quarter of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(256, 768, bias=False).requires_grad_(False) for _ in range(6))
        self.back = nn.ModuleList(nn.Linear(768, 256, bias=False).requires_grad_(False) for _ in range(6))
        self.small, self.up = (nn.ModuleList(nn.Linear(*sizes) for _ in range(6)) for sizes in ((768, 8), (8, 256)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide, back, small, up in zip(self.wide, self.back, self.small, self.up, strict=True):
            y = wide(x).tanh()
            x = x + back(y) + up(small(y.to(small.weight.dtype)))
        return x


def test_small_units_that_a_forward_reads_do_not_cut_the_memory_into_pieces(tmp_path: Path) -> None:
    """They lie anywhere, and none of the pieces between several of them may have room for a large one."""
    with TieredStore.open(tmp_path / "store", dram="3520KiB", durability="none") as store:
        model = zero.page(Reading(), store, policy=zero.Policy(quantize="int8"))
        pager, held = pager_of(model), []
        model.up[5].register_forward_hook(lambda *_: held.append([one.plan.name for one in pager.units if one.held]))
        model(torch.ones(4, 256)).square().mean().backward()
        assert [[name for name in names if "small" in name] for names in held] == [["small.5"]]
        store.close()


@pytest.mark.parametrize("policy", [zero.Policy(), zero.Policy(storage=torch.bfloat16), zero.Policy(quantize="int8")], ids=str)
@pytest.mark.parametrize("activations", ["memory", "recompute", "store"])
def test_a_larger_budget_is_never_too_small(tmp_path: Path, policy: zero.Policy, activations: Any) -> None:
    """Around the one from which on the largest weight, of 1 MiB, is whole."""
    for number, dram in enumerate(range(2560 << 10, 5400 << 10, 160 << 10)):
        model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 64), nn.Linear(64, 4096, bias=False))
        with TieredStore.open(tmp_path / str(number), dram=dram, durability="none") as store:
            zero.page(model, store, activations=activations, policy=policy)
            model(torch.arange(3))
            store.close()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_that_is_divided_are_refused(store: TieredStore, register: str) -> None:
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 3))
    whole = getattr(model[1].weight, register)(lambda _: called.append(1))
    divided = getattr(model[0].weight, register)(print)
    called: list[int] = []
    options: dict[str, Any] = {"paging": zero.Paging(largest_unit=16 << 10, slice_weights=True)}
    with pytest.raises(MisuseError, match=r"'0.weight' has hooks, and is divided into slices"):
        zero.page(model, store, **options)
    divided.remove()
    zero.page(model, store, **options)
    assert zero.statistics(model).divided == ()  # of an embedding, which has the bits of memory
    linear = zero.page(nn.Sequential(nn.Linear(64, 4000), nn.Linear(4000, 2)), store, name="linear", **options)
    assert zero.statistics(linear).divided == ("0.weight",)
    model(torch.arange(3)).sum().backward()
    assert called == [1]
    whole.remove()


def test_a_model_takes_the_place_of_one_whose_backward_an_exception_ended(store: TieredStore) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            raise ValueError("on purpose")

    def fail() -> None:
        model = zero.page(nn.Linear(64, 64), store, existing="overwrite")
        model(Failing.apply(model(torch.ones(1, 64)))).sum().backward()

    for _ in range(3):
        with pytest.raises(ValueError, match="on purpose"):
            fail()


@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}, {"activations": "store"}])
def test_hooks_of_modules_may_be_cleared(store: TieredStore, options: dict[str, Any]) -> None:
    """Those of paging are among them; parameters are then held as they are read."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 6))
    model = zero.page(copy.deepcopy(reference), store, paging=zero.Paging(largest_unit=300), **options)
    ours, theirs = zero.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        for module in model.modules() if step == 1 else ():
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
                hooks.clear()
        for one, optimizer in ((model, ours), (reference, theirs)):
            optimizer.zero_grad()
            one(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in model.state_dict().items())
    assert sum(tier.held for tier in store.statistics().tiers) == 0


def sharing() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
    return nn.Sequential(trunk, nn.Linear(16, 2)), nn.Sequential(trunk, nn.Linear(16, 3))


def test_models_that_share_a_trunk_are_paged_together(store: TieredStore) -> None:
    one, other = sharing()
    zero.page(one, store, name="one")
    with pytest.raises(MisuseError, match=r"'0.0.weight' is paged already, as '0.0.weight' of.*nn.ModuleList"):
        zero.page(other, store, name="other")
    models = [nn.ModuleList(sharing()), nn.ModuleList(sharing())]
    zero.page(models[1], store, name="both")
    x = torch.ones(4, 6)
    for model in models:
        optimizer = zero.AdamW(model.parameters()) if model is models[1] else torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            (model[0](x).square().sum() + model[1](x).exp().sum()).backward()
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(*(model.state_dict().values() for model in models), strict=True))


def test_state_dict_has_one_tensor_for_each_tied_weight(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    state = model.state_dict()
    assert state["head.weight"] is state["embedding.weight"]
    before = state["head.weight"].clone()
    model.loss(1).backward()  # type: ignore[operator]
    optimizer.step()
    again = model.state_dict(destination=state)  # with the tensors of before in it
    assert again["head.weight"] is again["embedding.weight"]
    assert not torch.equal(again["head.weight"], before)
    assert model.state_dict()["head.weight"] is not again["head.weight"]


def test_state_dict_loads_into_an_ordinary_model_and_back(store: TieredStore) -> None:
    model = Mixed()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    zero.page(model, store)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    other = Mixed()
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in other.state_dict().items())
    assert torch.equal(model.lstm.state_dict()["weight_hh_l1"], other.lstm.weight_hh_l1)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other.state_dict(), "shared.bias": torch.zeros(7)})
    assert held(store) == 0


def test_state_dict_has_one_tensor_for_a_tied_parameter(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    first = model.state_dict()
    assert first["head.weight"] is first["embedding.weight"]
    assert first["norm.weight"] is not first["norm.bias"]
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    assert torch.equal(model.head.state_dict()["weight"], 2 * first["head.weight"])
    again = model.state_dict(destination=first)  # of now, also where earlier copies lie
    assert again["head.weight"] is again["embedding.weight"]
    assert torch.equal(again["head.weight"], model.embedding.weight)


def test_a_submodule_may_be_called_by_itself(store: TieredStore) -> None:
    reference = Tied()
    block = reference.blocks[0]
    x = torch.randn(1, 4, 32)
    expected = block.mlp(x)
    zero.page(reference, store)
    assert torch.equal(reference.blocks[0].mlp(x), expected)


def test_double_use_and_wrong_use(store: TieredStore) -> None:
    model = zero.page(nn.Linear(4, 4), store, name="one")
    with pytest.raises(MisuseError, match="paged already"):
        zero.page(model, store, name="two")
    with pytest.raises(MisuseError, match=r"already holds a model named 'one' \(1 tensor\)"):
        zero.page(nn.Linear(4, 4), store, name="one")
    with pytest.raises(MisuseError, match=r"this parameter, of shape \(3, 4\), is not paged: call tiered\.zero\.page"):
        zero.AdamW(nn.Linear(4, 3).parameters())
    fresh = nn.Linear(4, 4)
    expected = fresh.weight.detach().clone()
    zero.page(fresh, store, name="one", existing="overwrite")
    assert torch.equal(fresh.state_dict()["weight"], expected)
    with pytest.raises(MisuseError, match="out of range"):
        zero.AdamW(fresh.parameters(), lr=-1)


def test_a_model_that_was_replaced_touches_nothing_of_the_new_one(store: TieredStore) -> None:
    """Neither by what its user still has of it: a loss, an optimizer, values."""
    old: Any = zero.page(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), store)
    optimizer = zero.AdamW(old.parameters(), lr=0.1)
    loss = old(torch.ones(2, 4)).sum()
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = {name: value.clone() for name, value in fresh.state_dict().items()}
    new = zero.page(fresh, store, existing="overwrite")
    for call in (
        loss.backward,
        lambda: old(torch.ones(2, 4)),
        old.state_dict,
        lambda: old[0].weight.data.fill_(7),
        lambda: old.load_state_dict(expected),
        lambda: zero.commit(old, optimizer),
    ):
        with pytest.raises(InterruptedStep, match=r"model 'model' in .* was replaced \(existing='overwrite'\)"):
            call()
    assert all(torch.equal(value, expected[name]) for name, value in new.state_dict().items())
    zero.AdamW(new.parameters(), lr=0.1)
    new(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("existing", ["refuse", "overwrite"])
def test_values_come_back_where_the_disk_is_full(tmp_path: Path, existing: str) -> None:
    """Units that wait in memory for a disk that takes no more leave no room for those that are on it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(80)))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        name = "model" if existing == "overwrite" else "another"
        zero.page(nn.Sequential(*(nn.Linear(128, 128) for _ in range(16))), store)
        before = {key: store.get(key) for key in store}
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limits[1]))
        try:
            with pytest.raises((CapacityError, WriteError)):
                zero.page(model, store, name=name, existing=existing)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        assert before.keys() == set(store)
        assert all(torch.equal(store.get(key), value) for key, value in before.items())
        zero.page(model, store, name=name, existing=existing)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_several_models_share_a_store(store: TieredStore) -> None:
    left, right = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(2, 8)
    expected = right(left(x))
    zero.page(left, store, name="left")
    zero.page(right, store, name="right")
    assert torch.equal(right(left(x)), expected)


@pytest.mark.parametrize("width", [32, 96])
def test_too_small_a_budget_names_the_smallest_which_then_works(tmp_path: Path, width: int) -> None:
    model = Tied(width=width, layers=2)
    with TieredStore.open(tmp_path / "big", dram="64MiB") as probe:
        largest = max(p.numel() * 4 for p in model.parameters())
        assert largest * 3 < probe.statistics().tiers[0].capacity
    wide = nn.Sequential(nn.Conv1d(512, 1024, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 8))  # which is not sliced
    with (
        TieredStore.open(tmp_path / "small", dram="2MiB") as small,
        pytest.raises(CapacityError, match=r"smallest that works is ([0-9,]+) bytes") as caught,
    ):
        zero.page(wide, small)
    assert not torch.isnan(wide[0].weight).any(), "nothing was changed"
    number = int(str(caught.value).split("smallest that works is ")[1].split(" ")[0].replace(",", ""))
    with TieredStore.open(tmp_path / "enough", dram=number, eviction=Eviction(deadline=20)) as enough:
        zero.page(wide, enough)
        optimizer = zero.AdamW(wide.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            wide(torch.randn(4, 512, 1)).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        assert not torch.isnan(wide.state_dict()["0.weight"]).any()


def test_a_model_on_the_meta_device_is_built_in_the_store(store: TieredStore) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        model[2].bias = model[1].bias  # never called with this shape; only tying matters here
    initialised: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        initialised.append(module)
        module.reset_parameters()

    zero.page(model, store, param_init_fn=init)
    state = model.state_dict()
    assert len(initialised) == 3
    assert model[2].bias is model[1].bias
    assert not any(value.is_meta or torch.isnan(value.float()).any() for value in state.values())
    assert torch.equal(state["1.running_var"], torch.ones(16))
    assert state["0.weight"].std() > 0.05


def test_unfreezing_a_parameter_later_trains_it(store: TieredStore) -> None:
    model = nn.Linear(4, 4)
    model.weight.requires_grad_(False)
    zero.page(model, store)
    optimizer = zero.AdamW(model.parameters(), lr=0.1)
    before = model.state_dict()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        model.weight.requires_grad_(True)
    after = model.state_dict()
    assert not torch.equal(before["weight"], after["weight"])
    assert not torch.equal(before["bias"], after["bias"])


def test_statistics_count_units_and_updates(store: TieredStore) -> None:
    model = zero.page(Tied(), store)
    optimizer = zero.AdamW(model.parameters())
    model.loss(0).backward()
    optimizer.step()
    assert zero.statistics(model).updates == 0, "step() only marks"
    model.loss(1)
    done = zero.statistics(model)
    assert done.updates > 0
    assert done.update_seconds > 0
    assert done.largest_unit <= store.statistics().tiers[0].capacity // 8


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"largest_unit": 0}, "largest_unit is a number of bytes, a whole number from 1 on, not 0"),
        ({"slice_weights": True}, "larger than largest_unit=: give that"),
        ({"largest_unit": 4096, "slice_weights": "no"}, "slice_weights is True or False, not 'no'"),
        ({"prefetch": "never"}, "prefetch is 'on' or 'off', not 'never'"),
        ({"update_tier": "nvme"}, "update_tier is 'dram' or 'hbm', not 'nvme'"),
    ],
)
def test_a_way_of_paging_that_cannot_be_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(MisuseError, match=told):
        zero.Paging(**asked)


@pytest.mark.parametrize("stage", [zero.Stage1, zero.Stage2, zero.Stage3])
def test_a_stage_says_what_its_processes_can_be(stage: Callable[..., zero.Stage]) -> None:
    for wrong in (0, -1.0, float("nan"), float("inf"), True, "60s"):
        with pytest.raises(MisuseError, match="seconds a rank waits for the others, a number above 0, not"):
            stage(timeout=wrong)
    with pytest.raises(MisuseError, match=r"group is what .* gives to its processes, not 5"):
        stage(5)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"name": ""}, "name is what the model's keys begin with, a text that is not empty, not ''"),
        ({"name": 5}, "name is what the model's keys begin with"),
        ({"existing": "perhaps"}, "existing is 'refuse', 'overwrite', 'resume' or 'continue', not 'perhaps'"),
        ({"paging": {"prefetch": "off"}}, "paging is a zero.Paging, not a dict"),
        ({"policy": "bfloat16"}, "policy is a zero.Policy, not 'bfloat16'"),
        ({"paging": zero.Paging(largest_unit=4096, slice_weights=True), "existing": "resume"}, "as it was committed"),
        ({"stage": zero.Stage2(timeout=5.0)}, "group of Stage2, are for several processes"),
        ({"timeout": 5.0}, "timeout=, .* are for several processes"),
        ({"timeout": -5.0}, "timeout is how many seconds a rank waits for the others, a number above 0, not -5.0"),
        ({"stage": zero.Stage1}, r"stage is zero.Stage1\(\), zero.Stage2\(\) or zero.Stage3\(\), not a"),
        ({"stage": 2}, r"stage is zero.Stage1\(\), .* not 2"),
        ({"weights": 5}, "weights=, a safetensors file or a folder of them, is a str or a pathlib.Path, not 5"),
        ({"param_init_fn": "zeros"}, "param_init_fn is called with a module, and 'zeros' cannot be"),
    ],
)
def test_arguments_that_cannot_be_leave_the_store_as_it_is(store: TieredStore, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(MisuseError, match=told):
        zero.page(Tied(), store, **asked)
    assert len(store) == 0


def test_units_are_no_larger_than_asked(store: TieredStore, tmp_path: Path) -> None:
    reference = Tied()
    usual = zero.page(copy.deepcopy(reference), store, name="usual", paging=zero.Paging(largest_unit=1 << 40))
    small = zero.page(copy.deepcopy(reference), store, name="small", paging=zero.Paging(largest_unit=1024))
    largest = max(parameter.nbytes for parameter in reference.parameters())
    assert zero.statistics(small).largest_unit <= max(1024, largest)
    assert zero.statistics(small).units > zero.statistics(usual).units
    assert small.loss(0).item() == usual.loss(0).item() == reference.loss(0).item()
    zero.commit(small)
    folder = store.folder
    store.close()
    with TieredStore.open(folder, dram="64MiB") as again:
        resumed = zero.page(Tied(), again, name="small", existing="resume")
        assert zero.statistics(resumed).units == zero.statistics(small).units
        assert resumed.loss(0).item() == reference.loss(0).item()


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoint", "reentrant"])
def test_a_checkpointed_function_that_reads_parameters_itself(store: TieredStore, reentrant: bool) -> None:
    """No module's forward runs when it is computed again, yet its parameters have their values."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(10))
            self.layers[4].weight.requires_grad_(False)

        def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
            x = torch.tanh(x @ self.layers[index].weight + self.layers[index].bias)
            return x @ self.layers[index].weight.detach() @ self.layers[index + 1].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in range(0, 10, 2):
                x = checkpoint(self.part, x, index, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    reference = Direct()
    model = zero.page(copy.deepcopy(reference), store)
    optimizer = zero.AdamW(model.parameters())
    x = torch.randn(3, 96, requires_grad=True)
    for net in (reference, model):
        net(x).square().sum().backward()
    assert held(store) == 0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            assert torch.equal(optimizer.grad(ours), theirs.grad)


@pytest.mark.parametrize("update", quick(["on_fetch", "in_backward"], ["on_fetch"]))
def test_a_checkpointed_block_may_be_larger_than_the_memory(tmp_path: Path, update: str) -> None:
    """What torch.utils.checkpoint keeps of a recomputation is not the block's parameters, which would pin all of the memory."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(*(nn.Linear(128, 128) if i % 2 else nn.LayerNorm(128) for i in range(34))) for _ in range(2)
            )
            self.blocks[0][7].weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    reference = Blocks()
    with TieredStore.open(tmp_path / "s", dram="1MiB", eviction=Eviction(deadline=10.0)) as store:
        model = zero.page(copy.deepcopy(reference), store)
        assert sum(p.nbytes for p in reference.blocks[0].parameters()) > store.statistics().tier("dram").capacity
        sides: list[tuple[nn.Module, torch.optim.Optimizer]] = [
            (reference, torch.optim.AdamW(reference.parameters(), fused=True)),
            (model, zero.AdamW(model.parameters(), update=update)),  # type: ignore[arg-type]
        ]
        for step in range(3):
            x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step)).requires_grad_()
            losses = []
            for net, optimizer in sides:
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert torch.equal(*losses)
        trained = model.state_dict()
        assert all(torch.equal(trained[name], value) for name, value in reference.state_dict().items())
        assert held(store) == 0


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_parameter_that_is_frozen_after_forward_keeps_its_gradient(tmp_path: Path, accumulated: bool) -> None:
    """As in torch, which neither accumulates then nor forgets."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        x = torch.ones(2, 64)
        if accumulated:
            model(x).square().mean().backward()
        loss = model(2 * x).square().mean()
        frozen = next(model.parameters())
        frozen.requires_grad_(False)
        loss.backward()
        assert (frozen.grad is not None) is accumulated
        optimizer.step()
        return model.state_dict()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    plain, paged = make(), make()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True))
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        zero.page(paged, store)
        found = train(paged, zero.AdamW(paged.parameters(), lr=1e-3))
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_unit_of_nothing_but_empty_parameters(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Module())
    model[1].empty = nn.Parameter(torch.zeros(0, 3))
    model[1].forward = lambda x: x.sum() + model[1].empty.sum()
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        zero.page(model, store)
        optimizer = zero.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).backward()
            optimizer.step()
        model.state_dict()
        optimizer.state_dict()
        zero.commit(model, optimizer)


class _Positions(nn.Module):
    """Each large matrix is 0.28 of 1 MiB. The positions stay in use until forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(64, 136) * 0.02)
        layer: dict[str, Any] = {"dim_feedforward": 544, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(136, 4, **layer) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("steps", quick([4, 12], [4]))
def test_a_unit_and_its_gradient_have_room_beside_what_stays_in_use(tmp_path: Path, steps: int) -> None:
    """Leased one after the other, the gradient came to lie where neither side of it had room for the unit."""
    with TieredStore.open(tmp_path / "store", dram="1MiB", durability="none", eviction=Eviction(deadline=30)) as store:
        found = []
        for paged in (True, False):
            torch.manual_seed(0)
            model: Any = _Positions()
            if paged:
                zero.page(model, store)
                optimizer: Any = zero.AdamW(model.parameters(), lr=1e-3)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            for step in range(steps):
                x = torch.randn(2, 64, 136, generator=torch.Generator().manual_seed(step))
                for _ in range(2):
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([value.clone() for value in model.state_dict().values()])
        assert all(map(torch.equal, *found))


class ReadsOthers(nn.Module):
    """Its forward computes with parameters of modules that it does not call."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        for layer in layers[:2] if self.way == "written to" else ():
            layer.bias.data.mul_(0.5)
        weights = [layer.weight for layer in layers] if self.way == "kept" else None
        for number in range(29):
            first, second = (layers[at].weight if weights is None else weights[at] for at in (number, number + 1))
            x = torch.nn.functional.linear(x, first @ second.t(), layers[number].bias).tanh()
        if self.way == "with a penalty":
            asked = [layers[number].weight if weights is None else weights[number] for number in range(29)]
            gradients = torch.autograd.grad(x.square().sum(), asked, create_graph=True)
            x = x + sum(gradient.square().mean() for gradient in gradients)
        return x


@pytest.mark.parametrize(
    ("way", "dram"),
    [("as needed", "2MiB"), *product(["as needed", "kept", "written to"], ["1280KiB"]), ("with a penalty", "1800KiB")],
)
def test_a_forward_may_read_more_parameters_of_other_modules_than_fit(tmp_path: Path, way: str, dram: str) -> None:
    with TieredStore.open(tmp_path, dram=dram, eviction=Eviction(deadline=10)) as store:
        theirs, ours = ReadsOthers(way), ReadsOthers(way)
        zero.page(ours, store)
        fused = torch.optim.AdamW(theirs.parameters(), fused=True)
        optimizer = zero.AdamW(ours.parameters())
        for seed in range(3):
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
            for model, its in ((theirs, fused), (ours, optimizer)):
                model(x).square().mean().backward()
                its.step()
                its.zero_grad()
        assert held(store) == 0
        with torch.no_grad():
            if way != "with a penalty":
                assert torch.equal(theirs(x), ours(x))
        assert held(store) == 0
        assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))


def test_steps_give_no_reference_away_that_they_do_not_have(store: TieredStore) -> None:
    """Torch 2.6 does, to None, where it is asked what compiles: some ten thousand times, and Python ends the process."""
    torch.manual_seed(0)
    model = zero.page(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), store)
    optimizer = zero.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    step()
    before = sys.getrefcount(None)
    for _ in range(20):
        step()
    assert sys.getrefcount(None) > before - 20  # each unit of each forward gave one away
