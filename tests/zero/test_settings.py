"""What a program sets for all of torch changes no bit: its default dtype and device, autocast, determinism, threads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import fake_device
from tests.quick import quick
from tests.zero.harness import clipping, equal
from tests.zero.test_rules import CASES, CUT, Case, masters_are_torchs, opened, same_states
from tiered import MisuseError, RowwiseAdagrad, SparseAdagrad, SparseAdamW, TieredEmbedding, zero


@contextlib.contextmanager
def for_now(put: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


def dtype_by_default(dtype: torch.dtype) -> Any:
    return for_now(torch.set_default_dtype, dtype, torch.get_default_dtype())


def device_by_default(name: str) -> Any:
    return for_now(torch.set_default_device, name, None)


SETTINGS: dict[str, Callable[[], Any]] = {
    "float64": lambda: dtype_by_default(torch.float64),
    "bfloat16": lambda: dtype_by_default(torch.bfloat16),
    "float16": lambda: dtype_by_default(torch.float16),
    "meta": lambda: device_by_default("meta"),
    "cpu": lambda: device_by_default("cpu"),
    "device": lambda: device_by_default(fake_device.NAME),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),  # else torch casts no weight a second time
    "deterministic": lambda: for_now(torch.use_deterministic_algorithms, True, False),
    "threads": lambda: for_now(torch.set_num_threads, 3, torch.get_num_threads()),
}
"""What a program may set for all of torch, in whatever order it imports and uses this package."""


class Few(nn.Module):
    """A matrix and a vector, of a dtype and on a device that are said."""

    def __init__(self, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        values = torch.linspace(-1, 1, 7 * 5 + 7, dtype=torch.float64, device="cpu").to(dtype)
        self.weight = nn.Parameter(values[:35].view(7, 5).clone())
        self.bias = nn.Parameter(values[35:].clone()) if bias else None

    def loss(self, number: int) -> torch.Tensor:
        x = torch.linspace(-1 - number % 5, 2 + number % 3, 15, dtype=torch.float64, device="cpu").view(3, 5)
        return torch.tanh(nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)).float().square().mean()


def elementwise(kind: Any, **arguments: Any) -> Case:
    def ours(params: Any, lr: float, **where: Any) -> zero.Optimizer:
        return zero.Elementwise(kind, params, lr=lr, where=where)  # type: ignore[arg-type]

    return Case(ours, kind, arguments, {"foreach": False})


UNDER_SETTINGS = {
    **CASES,
    "elementwise": elementwise(torch.optim.Adadelta, lr=0.5),
    "elementwise_rprop": elementwise(torch.optim.Rprop, lr=0.01),
    **({"muon": Case(zero.Muon, torch.optim.Muon, {"lr": 0.01}, {})} if hasattr(torch.optim, "Muon") else {}),
}
OURS_ALONE: dict[str, Callable[..., zero.Optimizer]] = {
    "adamw_bf16_moments": partial(zero.AdamW, lr=1e-3, moments=torch.bfloat16),
    "adamw_8bit": partial(zero.AdamW8bit, lr=1e-3),
    "adamw_4bit": partial(zero.AdamW4bit, lr=1e-3),
    "adamw_masters": partial(zero.AdamW, lr=1e-3),
    "nadam_masters": partial(zero.NAdam, lr=1e-3),
    "by_chance": partial(zero.AdamW, lr=1e-3, moments=torch.bfloat16, rounding="stochastic"),
}
"""What torch has none of: compared with itself without the setting."""
NARROW = ("adamw_masters", "nadam_masters", "by_chance")


def stepped(model: Few, optimizer: torch.optim.Optimizer, numbers: Iterable[int], clip: Any) -> list[torch.Tensor]:
    found = []
    for number in numbers:
        optimizer.zero_grad()
        loss = model.loss(number)
        loss.backward()
        found += [loss.detach(), clip(0.5)]
        optimizer.step()
    return found


def had_steps(optimizer: torch.optim.Optimizer, count: int) -> dict[int, Any]:
    """Return copies of the states of ``optimizer`` as if it had made ``count`` steps."""
    states: dict[int, Any] = copy.deepcopy(optimizer.state_dict()["state"])
    for state in states.values():
        if "step" in state:
            state["step"].fill_(count)
        if "mu_product" in state:
            state["mu_product"].fill_(1.0)
            for number in range(1, count + 1):
                state["mu_product"] *= 0.9 * (1.0 - 0.5 * (0.96 ** (float(number) * 4e-3)))
    return states


def jump(optimizer: torch.optim.Optimizer, states: dict[int, Any]) -> None:
    if isinstance(optimizer, zero.Optimizer):
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    for parameter, state in zip(optimizer.param_groups[0]["params"], states.values(), strict=False):
        optimizer.state[parameter] = state  # load_state_dict rounds mu_product to the parameter's dtype


class Run:
    """Steps before step 257 and after it, or all of them; then a commit at step 2,053, and steps after that."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.parts = (range(first), range(250, 262) if first < 250 else range(0), range(2050, 2053), range(2053, 2056))

    def jumps(self) -> Iterator[tuple[int, range]]:
        """Number and steps of the parts before which states are set to the first step."""
        return ((number, steps) for number, steps in enumerate(self.parts[:3]) if number and steps)


def in_memory(found: Case, run: Run, model: Few) -> tuple[list[Any], list[dict[int, Any]], dict[str, Any]]:
    """Return the numbers of a run in memory, the states that it jumped to, and its last states."""
    optimizer = found.theirs(model.parameters(), **{**found.arguments, **found.extra})
    clip = clipping(model)
    numbers, jumped = stepped(model, optimizer, run.parts[0], clip), []
    for _, steps in run.jumps():
        jumped.append(had_steps(optimizer, steps[0]))
        jump(optimizer, copy.deepcopy(jumped[-1]))
        numbers += stepped(model, optimizer, steps, clip)
    numbers += stepped(model, optimizer, run.parts[3], clip)
    return numbers, jumped, optimizer.state_dict()


def in_a_store(
    path: Path, make: Callable[..., zero.Optimizer], run: Run, paged: bool, new: Callable[[], Few], jumped: Any = None
) -> tuple[list[Any], list[dict[int, Any]], dict[str, Any], dict[str, Any]]:
    """Return the same of a run in a store, its parameters too; it jumps to states of its own if not to ``jumped``."""
    given = jumped
    jumped = []
    with opened(path, CUT) as store:
        model = new()
        if paged:
            zero.page(model, store, name="m")
        optimizer = make(model.parameters(), **({} if paged else {"store": store}))
        clip = optimizer.clip_grad_norm_
        numbers = stepped(model, optimizer, run.parts[0], clip)
        for count, (_, steps) in enumerate(run.jumps()):
            jumped.append(copy.deepcopy(given[count]) if given else had_steps(optimizer, steps[0]))
            jump(optimizer, copy.deepcopy(jumped[-1]))
            numbers += stepped(model, optimizer, steps, clip)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        if paged:
            if isinstance(optimizer, zero.Elementwise):
                optimizer.flush()
            zero.commit(model, optimizer)
        else:
            store.commit()
        store.close()
    with opened(path, CUT) as store:
        model = new()
        if paged:
            model = zero.page(model, store, name="m", existing="resume")
            optimizer = make(model.parameters())
            zero.resume(model, optimizer)
        else:
            model.load_state_dict(kept)
            optimizer = make(model.parameters(), store=store, existing="resume")
        for state in optimizer.state_dict()["state"].values():
            assert state.get("step", 2053) == 2053
        numbers += stepped(model, optimizer, run.parts[3], optimizer.clip_grad_norm_)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        states = optimizer.state_dict()
        store.close()
    return numbers, jumped, states, values


def same_numbers(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other.to(one.device)), number


def setting_of(name: str, patch: pytest.MonkeyPatch) -> Any:
    if name == "device":
        fake_device.installed(patch)
    return SETTINGS[name]()


def is_torchs(kind: str, setting: str, paged: bool, first: int, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    found, run, whole = UNDER_SETTINGS[kind], Run(first), kind != "muon"
    reference = Few(torch.float32, whole)
    under = setting_of(setting, patch)
    with contextlib.nullcontext() if setting in ("meta", "device") else SETTINGS[setting]():  # torch has its scalars there
        numbers, jumped, theirs = in_memory(found, run, reference)
    with under:
        make = partial(found.ours, **found.arguments)
        mine, _, ours, values = in_a_store(tmp_path / "s", make, run, paged, lambda: Few(torch.float32, whole), jumped)
    same_numbers(mine, numbers)
    assert equal(values, reference.state_dict())
    same_states(ours, theirs)
    for index, state in theirs["state"].items():
        for name, value in state.items():
            assert value is None or ours["state"][index][name].dtype == value.dtype, name


def is_itself(kind: str, setting: str, paged: bool, first: int, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    make, run = OURS_ALONE[kind], Run(first)
    dtype = torch.bfloat16 if kind in NARROW else torch.float32
    under = setting_of(setting, patch)
    with under if setting == "autocast" else contextlib.nullcontext():  # which changes what a model computes
        numbers, _, theirs, kept = in_a_store(tmp_path / "plain", make, run, paged, lambda: Few(dtype, True))
    with under:
        mine, _, ours, values = in_a_store(tmp_path / "set", make, run, paged, lambda: Few(dtype, True))
    same_numbers(mine, numbers)
    assert equal(values, kept)
    same_states(ours, theirs)


WAYS = [
    (kind, setting, paged)
    for kind in (*UNDER_SETTINGS, *OURS_ALONE)
    for setting in SETTINGS
    if (kind, setting) != ("nadam_masters", "float64")  # where mu_product is wider, as torch's is: its masters are below
    for paged in (True, False)
]


LASTING = ("float64", "bfloat16", "float16", "meta", "cpu", "device")
"""What is set in runs of 300 steps: other dtypes and devices."""

IN_EVERY_RUN = [
    *[("adamw", "bfloat16", True), ("adam_loop", "float16", False), ("adagrad", "bfloat16", False), ("nadam", "float64", True)],
    *[("radam", "bfloat16", True), ("adafactor", "float16", True), ("elementwise_rprop", "meta", True)],
    *[("elementwise", "float64", False), ("adamw_8bit", "float16", True), ("adamw_masters", "bfloat16", True)],
    *[("nadam", "meta", False), ("lion", "autocast", True), ("adamax", "deterministic", True)],
    ("rmsprop_centered", "threads", True),
]


@pytest.mark.parametrize(
    ("kind", "setting", "paged"), quick(WAYS, [way for way in IN_EVERY_RUN if way[0] in UNDER_SETTINGS])
)
def test_what_is_set_for_all_of_torch_changes_no_bit(
    kind: str, setting: str, paged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across step 257, where bfloat16 has no number for a step, and with a commit at step 2,053."""
    (is_itself if kind in OURS_ALONE else is_torchs)(kind, setting, paged, 3, tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "setting", "paged"), [way for way in WAYS if way[1] in LASTING]
)
def test_what_is_set_for_all_of_torch_changes_no_bit_in_300_steps(
    kind: str, setting: str, paged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (is_itself if kind in OURS_ALONE else is_torchs)(kind, setting, paged, 300, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "setting", "steps"),
    quick(
        [(kind, setting, steps) for kind in CASES for setting in ("float64", "bfloat16", "float16") for steps in (5, 300)],
        [("nadam", "float64", 5)],
    ),
)
def test_masters_are_torchs_under_another_default(kind: str, setting: str, steps: int, tmp_path: Path) -> None:
    """Of torch's class under the same default, which ``mu_product`` of NAdam shows."""
    with SETTINGS[setting]():
        masters_are_torchs(tmp_path, kind, CUT, steps)


ROWS: dict[str, tuple[Callable[..., torch.optim.Optimizer] | None, Callable[..., torch.optim.Optimizer]]] = {
    "adam": (partial(torch.optim.SparseAdam, lr=0.1), partial(SparseAdamW, lr=0.1)),
    "adagrad": (partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01), partial(SparseAdagrad, lr=0.1, lr_decay=0.01)),
    "rowwise": (None, partial(RowwiseAdagrad, lr=0.1, lr_decay=0.01)),
}
VALUES = torch.linspace(-1, 1, 40 * 5, dtype=torch.float32, device="cpu").view(40, 5)


def rows_stepped(module: Any, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    for number in numbers:
        optimizer.zero_grad()
        ids = torch.arange(12, dtype=torch.int64, device="cpu") * (number + 3) % 37
        (module(ids) * VALUES[:12]).square().sum().backward()
        optimizer.step()


def rows_in_a_store(path: Path, make: Callable[..., torch.optim.Optimizer], steps: Iterable[range]) -> torch.Tensor:
    with opened(path, CUT) as store:
        table = store.table("e", 40, 5, torch.float32, block=140)
        table[:] = VALUES
        module = TieredEmbedding(table)
        for part in steps:
            count = store.get("e/steps") if "e/steps" in store else None
            if count is not None:
                store.put("e/steps", torch.stack((count[0] * 0 + part[0], count[1])), owner=table.owner)
            rows_stepped(module, make(module.parameters()), part)
        found = table[:].clone()
        store.close()
    return found


def rows_in_memory(make: Callable[..., torch.optim.Optimizer], steps: Iterable[range]) -> torch.Tensor:
    module = nn.Embedding.from_pretrained(VALUES.clone(), freeze=False, sparse=True)
    optimizer = make(module.parameters())
    for part in steps:
        for state in optimizer.state.values():
            state["step"] = state["step"] * 0 + part[0]
        rows_stepped(module, optimizer, part)
    return module.weight.detach()


LENGTHS = {"short": (range(3), range(250, 262), range(2050, 2055)), "long": (range(300),)}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own optimizers say so once in a process
@pytest.mark.parametrize(
    ("name", "setting", "length"),
    quick(
        [(name, setting, length) for name in ROWS for setting in SETTINGS for length in LENGTHS],
        [("adam", "meta", "short"), ("adagrad", "bfloat16", "short"), ("rowwise", "float16", "short")],
    ),
)
def test_rows_of_tables_are_stepped_as_without(
    name: str, setting: str, length: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (theirs, ours), steps = ROWS[name], LENGTHS[length]
    under = setting_of(setting, monkeypatch)
    right = rows_in_a_store(tmp_path / "plain", ours, steps) if theirs is None else rows_in_memory(theirs, steps)
    with under:
        found = rows_in_a_store(tmp_path / "set", ours, steps)
    assert torch.equal(found, right)


@pytest.mark.parametrize(("saved", "loaded"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_state_of_nadam_is_loaded_under_another_default(saved: torch.dtype, loaded: torch.dtype, tmp_path: Path) -> None:
    """Its ``mu_product`` has the roundings of the default under which it was computed, and is right all the same."""
    with dtype_by_default(saved):
        model = Few(torch.float32, True)
        theirs = torch.optim.NAdam(model.parameters(), lr=1e-3, foreach=False)
        stepped(model, theirs, range(5), clipping(model))
    with dtype_by_default(loaded), opened(tmp_path / "store", CUT) as store:
        ours = zero.NAdam(Few(torch.float32, True).parameters(), lr=1e-3, store=store)
        ours.load_state_dict({"state": theirs.state_dict()["state"], "param_groups": ours.state_dict()["param_groups"]})
        state = ours.state_dict()["state"][0]
        assert state["step"] == 5
        assert state["step"].dtype is state["mu_product"].dtype is loaded
        theirs.state_dict()["state"][0]["mu_product"].mul_(0.5)
        with pytest.raises(MisuseError, match="'mu_product' of this state"):
            ours.load_state_dict({"state": theirs.state_dict()["state"], "param_groups": ours.state_dict()["param_groups"]})
        store.close()
