"""``activations="auto"``: the bits of memory whatever is chosen and whenever; what is measured, said, and chosen anew."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.store.saved import nothing_is_left
from tests.zero.harness import clipping, equal, train
from tests.zero.models import Mixed, parameter_groups
from tests.zero.paging.splitting import Language
from tiered import MisuseError, TieredStore, zero
from tiered.tuning import adaptive
from tiered.tuning.program import Way
from tiered.zero.paging.pager import pager_of
from tiered.zero.paging.recompute import module_state

DRAM = "2MiB"
STEPS = 6


def language() -> Language:
    torch.manual_seed(0)
    return Language(64, 3)


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def trained(model: Any, optimizer: torch.optim.Optimizer, clip: Any, between: Callable[[int], object] = int) -> list[float]:
    torch.manual_seed(1)
    return train(model, optimizer, clip, between, steps=STEPS)


def in_memory(make: Callable[[], Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make()
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3, fused=True)
    return trained(model, optimizer, clipping(model)), model.state_dict()


def shuffle(model: nn.Module, seed: int) -> Callable[..., None]:
    """Give each segment another way, drawn anew before each forward."""
    pager, drawn = pager_of(model), random.Random(seed)
    chooser = pager.adaptive
    assert chooser is not None
    barred: set[str] = set()

    def draw(*_: object) -> None:
        barred.update(name for name, seen in chooser._seen.items() if not seen.again)
        for name in chooser._names:
            chooser.ways[name] = drawn.choice([way for way in get_args(Way) if way != "recompute" or name not in barred])
        chooser._rest = chooser._way = drawn.choice(["memory", "store"])

    return draw


@pytest.mark.parametrize("make", [language, mixed])
@pytest.mark.parametrize("seed", quick(range(3), [0]))
def test_bits_are_those_of_memory_whatever_is_chosen(store: TieredStore, make: Callable[[], Any], seed: int) -> None:
    wanted, state = in_memory(make)
    model = make()
    zero.page(model, store, activations=zero.AutoPlan(passes=1))
    optimizer = zero.AdamW(parameter_groups(model), lr=1e-3)
    draw = shuffle(model, seed)
    first = trained(model, optimizer, optimizer.clip_grad_norm_, draw)
    assert first == wanted
    assert equal(model.state_dict(), state)
    nothing_is_left(store)


@pytest.mark.parametrize(
    ("memory", "update"),
    quick(
        [(memory, update) for memory in (None, "1MiB", 0) for update in ("on_fetch", "in_backward")],
        [(None, "on_fetch"), ("1MiB", "in_backward"), (0, "on_fetch")],
    ),
)
def test_bits_are_those_of_memory_with_what_it_chooses(store: TieredStore, memory: str | int | None, update: str) -> None:
    reference, paged = language(), language()
    torch_adamw = torch.optim.AdamW(parameter_groups(reference), lr=1e-3, fused=True)
    torch.manual_seed(1)
    wanted = train(reference, torch_adamw, steps=STEPS, batches=1)
    zero.page(paged, store, activations=zero.AutoPlan(memory=memory))
    optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3, update=update)  # type: ignore[arg-type]
    torch.manual_seed(1)
    assert train(paged, optimizer, steps=STEPS, batches=1) == wanted
    assert equal(paged.state_dict(), reference.state_dict())
    found = zero.statistics(paged).plan
    assert found is not None
    assert found.choices == 1
    assert found.predicted > 0
    if memory is None:
        assert set(found.ways.values()) == {found.rest} == {"memory"}
    elif memory == 0:
        assert found.planned == pager_of(paged).adaptive._saved.keep  # type: ignore[union-attr]  # nothing beside the newest
    nothing_is_left(store)


def paged(store: TieredStore, **options: Any) -> tuple[Language, Callable[[], None], adaptive.AdaptiveActivations]:
    model = language()
    zero.page(model, store, **options)
    optimizer = zero.AdamW(model.parameters(), lr=1e-3)

    def step(batch: int = 8) -> None:
        optimizer.zero_grad()
        model.loss(1, batch=batch).backward()
        optimizer.step()

    chooser = pager_of(model).adaptive
    assert chooser is not None
    return model, step, chooser


def test_less_memory_is_noticed_before_the_next_forward(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adaptive, "free_in_heap", lambda: 0)
    monkeypatch.setattr(adaptive, "headroom", lambda: 1 << 30)
    model, step, chooser = paged(store, activations="auto")
    with caplog.at_level(logging.INFO, "tiered"):
        for _ in range(4):
            step()
        assert set(chooser.ways.values()) == {"memory"}
        monkeypatch.setattr(adaptive, "headroom", lambda: 900 << 20)  # less by an eighth
        step()
        assert chooser.chosen().choices == 1
        monkeypatch.setattr(adaptive, "headroom", lambda: 1 << 20)
        step()
        found = chooser.chosen()
        assert found.choices == 2
        assert "less memory" in found.why
        assert found.planned <= (1 << 19)
        assert "memory" not in found.ways.values() or found.memory > 0
        monkeypatch.setattr(adaptive, "headroom", lambda: 1 << 30)
        step()
        assert "more memory" in chooser.chosen().why
    assert [record.message for record in caplog.records if "less memory" in record.message]
    assert zero.statistics(model).plan == chooser.chosen()


def test_larger_inputs_are_measured_again(store: TieredStore) -> None:
    _, step, chooser = paged(store, activations="auto")
    for _ in range(4):
        step(4)
    assert not chooser.measuring
    step(8)
    assert chooser.measuring
    assert "measuring again" in chooser.chosen().why
    for _ in range(2):
        step(8)
    assert not chooser.measuring
    assert "after a warm-up" in chooser.chosen().why, "also where the same was chosen as before"
    step(4)  # smaller ones fit
    assert not chooser.measuring


def test_another_speed_of_the_processor_is_another_choice(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _, step, chooser = paged(store, activations=zero.AutoPlan(memory="64MiB"))
    for _ in range(3):
        step()
    assert not chooser.measuring
    whys = []
    monkeypatch.setattr(chooser, "_choose", whys.append)
    calm = adaptive._Reading(1.0, 0.0, 0, 0, 0.0, 0.0)
    slow = adaptive._Reading(1.5, 0.0, 0, 0, 0.0, 0.0)
    chooser._lately.clear()
    for reading in [calm] * 8 + [slow] * 2:
        chooser._lately.append(reading)
        chooser._look_at_rates()
    assert whys == []
    chooser._lately.append(slow)
    chooser._look_at_rates()
    assert len(whys) == 1
    assert "the processor takes 1.5 x as long" in whys[0]


@pytest.mark.parametrize(("read", "write", "told"), [(2.0, 1.0, "reading"), (1.0, 2.0, "writing")])
def test_another_rate_of_the_drive_is_another_choice(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch, read: float, write: float, told: str
) -> None:
    """By rates that are given: the drive moves as many bytes in each pass, and from one pass on takes longer for them."""
    _, step, chooser = paged(store, activations=zero.AutoPlan(memory="64MiB"))
    for _ in range(3):
        step()
    seen = []
    choose = chooser._choose

    def chosen(why: str) -> None:
        seen.append(why)
        choose(why)

    monkeypatch.setattr(chooser, "_choose", chosen)

    def passes(number: int, reading: float, writing: float) -> None:
        for _ in range(number):
            chooser._lately.append(adaptive._Reading(1.0, 0.1, 64 << 20, 32 << 20, reading, writing))
            chooser._look_at_rates()

    chooser._lately.clear()
    passes(adaptive.LATELY + 3, 0.1, 0.1)
    passes(adaptive.LATELY, 0.1 * (1 + 0.2 * (read > 1)), 0.1 * (1 + 0.2 * (write > 1)))  # less than a quarter
    assert seen == []
    before = chooser._profile
    passes(adaptive.LATELY, 0.1 * read, 0.1 * write)
    assert len(seen) == 1
    assert "because" in seen[0]
    assert f"{told} takes" in seen[0]
    after = chooser._profile
    assert before is not None
    assert after is not None
    assert (after.read < before.read) is (read > 1)
    assert (after.write < before.write) is (write > 1)


def test_evaluation_and_exceptions_between_change_nothing(store: TieredStore) -> None:
    wanted, _ = in_memory(language)
    model = language()
    zero.page(model, store, activations=zero.AutoPlan(memory="1MiB", passes=1))
    optimizer = zero.AdamW(parameter_groups(model), lr=1e-3)

    def between(step: int) -> None:
        state = torch.get_rng_state()
        with torch.no_grad():
            model.loss(7)
        abandoned = model.loss(3)  # a graph that no backward ends
        with pytest.raises(TypeError):
            model(None)
        del abandoned
        torch.set_rng_state(state)

    assert trained(model, optimizer, optimizer.clip_grad_norm_, between) == wanted
    nothing_is_left(store)


def test_what_changes_a_buffer_that_is_not_kept_is_not_computed_again(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_state, "COPIED", 0)
    model = mixed()
    zero.page(model, store, activations=zero.AutoPlan(memory=0, passes=1))
    optimizer = zero.AdamW(parameter_groups(model), lr=1e-3)
    trained(model, optimizer, optimizer.clip_grad_norm_)
    profile = pager_of(model).adaptive._profile  # type: ignore[union-attr]
    assert profile is not None
    assert any(not segment.again for segment in profile.segments)


def test_a_resumed_model_measures_anew(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "s", dram=DRAM) as store:
        model, step, _ = paged(store, activations="auto")
        for _ in range(4):
            step()
        zero.commit(model, pager_of(model).optimizers())
    with TieredStore.open(tmp_path / "s", dram=DRAM) as store:
        model = language()
        zero.page(model, store, activations="auto", existing="resume")
        assert zero.statistics(model).plan is not None
        assert zero.statistics(model).plan.choices == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activations": "auto", "micro_batch": 2}, "leave one of them out"),
        ({"activations": zero.AutoPlan(), "micro_batch": 2}, "leave one of them out"),
        ({"activations": "disk"}, "where it is no zero.AutoPlan, is .*'store' or 'auto', not 'disk'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(store: TieredStore, options: dict[str, Any], words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        zero.page(language(), store, **options)
    assert len(store) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "much"}, "much"),
        ({"passes": 0}, "a whole number from 1 on"),
        ({"change": "a quarter"}, "change is a share, a number above 0 and below 1, not 'a quarter'"),
        ({"change": 1.0}, "above 0 and below 1, not 1.0"),
        ({"ways": "store"}, "ways are several of"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        zero.AutoPlan(**options)
