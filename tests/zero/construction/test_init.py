"""A model that is built under ``zero.init`` is bit for bit the one that is built in memory, and never whole in memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero.builders import BUILDERS, NAMES, Pretrained
from tests.zero.models import Mixed, Tied
from tiered import CapacityError, Eviction, MisuseError, Owner, TieredStore, zero
from tiered.zero.construction.staging import PREFIX

TINY = 2048
"""Bytes: a window far smaller than every model here."""


def waiting(store: TieredStore) -> list[str]:
    return [key for key in store if key.startswith(PREFIX)]


def both(
    store: TieredStore, build: Callable[[], Any], window: int | None = TINY
) -> tuple[Any, Any, zero.ConstructionStatistics]:
    torch.manual_seed(5)
    expected = build()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with zero.init(store, window=window) as construction:
        model = build()
    assert torch.equal(torch.get_rng_state(), after)
    return expected, model, construction.statistics()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].dtype is value.dtype, name
        assert ours[name].stride() == value.stride(), name


# -- the same values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [TINY, None])
@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_the_same_bits_as_in_memory(store: TieredStore, build: Callable[[], nn.Module], window: int | None) -> None:
    expected, model, statistics = both(store, build, window)
    assert [p.shape for p in model.parameters()] == [p.shape for p in expected.parameters()]
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() <= 8
        assert torch.isnan(parameter).all(), "a stale read must be loud"
    assert len(waiting(store)) == len(list(model.parameters())), "replaced parameters leave nothing behind"
    if window == TINY:
        assert statistics.fetched > 0, "the window was too large to test anything"
    zero.page(model, store)
    assert waiting(store) == []
    assert_same(model, expected)


@pytest.mark.parametrize("build", [Tied, Mixed, Pretrained])
def test_trained_like_one_that_was_built_in_memory(store: TieredStore, build: Callable[[], Any]) -> None:
    expected, model, _ = both(store, build)
    zero.page(expected, store, name="expected")
    zero.page(model, store)
    optimizers = [zero.AdamW(net.parameters(), lr=1e-2) for net in (expected, model)]
    for step in range(2):
        losses = []
        for net, optimizer in zip((expected, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = net.loss(step)
            loss.backward()
            losses.append((loss.item(), optimizer.clip_grad_norm_(0.5).item()))
            optimizer.step()
        assert losses[0] == losses[1]
    assert_same(model, expected)


def test_a_model_that_is_built_in_inference_mode_can_be_trained(store: TieredStore) -> None:
    x = torch.ones(2, 6)
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64))
    torch.manual_seed(5)
    with torch.inference_mode():
        with zero.init(store, window=TINY):
            model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64))
            model[0].weight.mul_(1)
            assert not torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()
        zero.page(model, store)
        assert torch.equal(model(x), expected(x))
    assert torch.is_grad_enabled()
    ours, theirs = zero.AdamW(model.parameters()), torch.optim.AdamW(expected.parameters(), fused=True)
    for one, optimizer in ((model, ours), (expected, theirs)):
        one(x).square().sum().backward()
        optimizer.step()
    assert_same(model, expected)


def test_a_second_block_serves_what_the_first_one_built(store: TieredStore) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    expected.apply(lambda module: [nn.init.normal_(p) for p in module.parameters(recurse=False)])
    torch.manual_seed(0)
    with zero.init(store):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with zero.init(store, window=TINY):
        model.apply(lambda module: [nn.init.normal_(p) for p in module.parameters(recurse=False)])

    def fail() -> None:
        with zero.init(store, window=TINY):
            model[0].weight.sum()
            model.append(nn.Linear(32, 32))
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fail()
    del model[2]
    zero.page(model, store)
    assert_same(model, expected)


def test_meta_parameters_are_left_to_page(store: TieredStore) -> None:
    with zero.init(store, window=TINY):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            again = nn.Linear(32, 32, device="cpu")
            nn.init.ones_(again.weight)
        model.append(again)
        kept = nn.Linear(32, 32)
        model[0].bias = kept.bias  # real, in a module that page initialises
    assert [p.is_meta for p in model.parameters()] == [True, False, True, True, False, False]
    zero.page(model, store)
    state = model.state_dict()
    assert not any(torch.isnan(value).any() for value in state.values())
    assert torch.equal(state["2.weight"], torch.ones(32, 32))
    assert state["1.weight"].std() > 0.05


# -- aliases -----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*something else uses their memory", "ignore::tiered.SharedMemoryWarning")
def test_what_is_written_through_an_alias_is_not_lost(store: TieredStore) -> None:
    with zero.init(store, window=TINY):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
        aliases = [model[0].weight.data, model[1].weight.detach().numpy(), model[2].weight.untyped_storage()]
        row = model[3].weight.data[3]
        for layer in model[4:]:
            nn.init.zeros_(layer.weight)
        aliases[0].fill_(1)
        aliases[1][:] = 2
        aliases[2].fill_(0)
        row.fill_(4)
    assert not torch.isnan(model[0].weight).any(), "it cannot be released"
    assert torch.isnan(model[4].weight).all()
    aliases[0].fill_(5)
    zero.page(model, store)
    state = model.state_dict()
    assert torch.equal(state["0.weight"], torch.full((32, 32), 5.0))
    assert torch.equal(state["1.weight"], torch.full((32, 32), 2.0))
    assert torch.equal(state["2.weight"], torch.zeros(32, 32))
    assert torch.equal(state["3.weight"][3], torch.full((32,), 4.0))


def test_a_window_full_of_aliases_says_so(store: TieredStore) -> None:
    kept = []

    def build() -> nn.Module:
        with zero.init(store, window=TINY):
            model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
            kept.extend(layer.weight.data for layer in model)
        return model

    with pytest.warns(UserWarning, match=r"something else uses their memory: Linear\.weight"):
        model = build()
    kept.clear()
    with zero.init(store):
        pass
    assert all(torch.isnan(parameter).all() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*something else uses their memory")
def test_a_parameter_made_of_a_released_one_shares_its_memory_as_in_torch_and_is_not_paged(store: TieredStore) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
        other = nn.Parameter(model[0].weight)  # torch makes this without a torch function
        nn.init.uniform_(model[0].weight)
        model[5].weight = other
        with torch.no_grad():
            other[0] = 7
            model[0].weight[1] = 8
        return model

    expected, model, _ = both(store, build)
    with pytest.raises(MisuseError, match=r"parameter '0.weight' and parameter '5.weight' share memory"):
        zero.page(model, store)
    with torch.no_grad():
        expected[5].weight[2] = model[5].weight[2] = 9
    assert torch.equal(model[0].weight, model[5].weight)
    assert torch.equal(model[0].weight, expected[0].weight)


def test_a_graph_keeps_the_parameters_that_it_saved(store: TieredStore) -> None:
    with zero.init(store, window=TINY):
        layers = [nn.Linear(32, 32) for _ in range(4)]
        loss = sum(layer(torch.ones(1, 32)).sum() for layer in layers)
        for layer in layers:
            layer.bias.data.sum()
    loss.backward()
    assert not any(torch.isnan(p.grad).any() for layer in layers for p in layer.parameters())


# -- nothing is left behind --------------------------------------------------------------------------------------------------


def test_replaced_deleted_and_dead_parameters_leave_nothing(store: TieredStore) -> None:
    with zero.init(store, window=TINY):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        for layer in model:
            layer.weight = nn.Parameter(torch.zeros(32, 32))
        model[0].bias = None
        del model[1].bias
        model[2].weight.data = torch.ones(32, 32)
    assert len(waiting(store)) == 6
    del layer
    del model
    gc.collect()
    with zero.init(store):
        assert waiting(store) == []


def test_an_exception_deletes_what_the_block_built(store: TieredStore) -> None:
    models = []

    def fail() -> None:
        with zero.init(store, window=TINY):
            models.append(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))))
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fail()
    assert waiting(store) == []
    with pytest.raises(MisuseError, match="an exception left"):
        zero.page(models[0], store)


def test_what_an_earlier_process_left_is_swept(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        with zero.init(store):
            model = nn.Linear(8, 8)
        store.put("init/mine", torch.ones(3))
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        assert len(waiting(store)) == 2, "a commit has them"
        with zero.init(store):
            fresh = nn.Linear(4, 4)
        assert len(waiting(store)) == 2
        zero.page(fresh, store)
        assert waiting(store) == []
        assert "init/mine" in store
        with pytest.raises(MisuseError, match="page the model into the store it was built for"):
            zero.page(model, store, name="other")


# -- wrong use ---------------------------------------------------------------------------------------------------------------


def test_page_refused_leaves_the_model_as_it_was(store: TieredStore, tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = Tied()
    torch.manual_seed(3)
    with zero.init(store, window=TINY) as construction:
        model = Tied()
        with pytest.raises(MisuseError, match=r"after its zero\.init block"):
            zero.page(model, store)
        with pytest.raises(MisuseError, match=r"zero\.init inside zero\.init"), zero.init(store):
            pass
    assert construction.statistics().resident == 0
    store.put("taken/x", torch.ones(1), owner=Owner("model", "taken"))
    with pytest.raises(MisuseError, match="already holds"):
        zero.page(model, store, name="taken")
    with pytest.raises(MisuseError, match=r"zero\.init"):
        zero.page(model, store, name="zero.init")
    with (
        TieredStore.open(tmp_path / "other", dram="1MiB") as other,
        pytest.raises(MisuseError, match="the store it was built for"),
    ):
        zero.page(model, other)
    zero.page(model, store)
    assert_same(model, expected)


def test_page_that_fails_midway_gives_everything_back(store: TieredStore) -> None:
    torch.manual_seed(3)
    expected = nn.Sequential(*(nn.Linear(128, 128) for _ in range(5)))
    torch.manual_seed(3)
    with zero.init(store, window=TINY):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    model.append(nn.Linear(128, 128))  # in memory
    with torch.device("meta"):
        model.append(nn.Linear(128, 128))
    calls = []

    def fail_once(module: nn.Module) -> None:
        module.reset_parameters()
        calls.append(module)
        if len(calls) == 1:
            raise ValueError("on purpose")

    before = sorted(store)
    with pytest.raises(ValueError, match="on purpose"):
        zero.page(model, store, param_init_fn=fail_once)
    assert len(store) == len(before)
    assert [p.is_meta for p in model.parameters()] == [False] * 10 + [True] * 2
    assert torch.equal(model[4].weight, expected[4].weight)
    zero.page(model, store, param_init_fn=fail_once)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    assert waiting(store) == []


def test_a_module_that_cannot_initialise_itself_is_refused_before_anything_moves(store: TieredStore) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

    with torch.device("meta"):
        bare = Bare()
    model = nn.Sequential(nn.Linear(4, 4), bare)
    with pytest.raises(MisuseError, match="param_init_fn"):
        zero.page(model, store)
    assert len(store) == 0
    assert not torch.isnan(model[0].weight).any()
    assert bare.weight.is_meta


@pytest.mark.filterwarnings("ignore::tiered.SharedMemoryWarning")  # exceptions keep what the attempts had begun
def test_between_the_block_and_page_values_cannot_be_had(store: TieredStore) -> None:
    expected, model, _ = both(store, Mixed)
    for attempt in (
        model.state_dict,
        lambda: model.load_state_dict(expected.state_dict()),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model.shared.weight),
        lambda: torch.save(model, io.BytesIO()),
        lambda: model.shared(torch.ones(1)),
    ):
        with pytest.raises(MisuseError, match=r"zero\.page\(model, store\)"):
            attempt()
    with zero.init(store):
        assert_same(model, expected)
    zero.page(model, store)
    assert_same(model, expected)
    model.load_state_dict(expected.state_dict())


def test_what_is_built_in_the_block_beside_the_model_says_so_when_it_is_called(store: TieredStore) -> None:
    def build() -> tuple[nn.Module, ...]:
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return model, copy.deepcopy(model), layer, nn.Linear(8, 8)

    torch.manual_seed(0)
    reference, *_ = build()
    torch.manual_seed(0)
    with zero.init(store):
        model, *others = build()
        with torch.no_grad():
            values = others[0](torch.ones(1, 2, 8))
    zero.page(model, store)
    x = torch.ones(1, 2, 8)
    assert torch.equal(model(x), reference(x))
    assert torch.equal(values, reference(x))
    for other in others:
        with pytest.raises(MisuseError, match=r"since the end of its zero\.init block"):
            other(x)
    zero.page(others[0], store, name="copy")
    assert torch.equal(others[0](x), reference(x))


@pytest.mark.parametrize("write", [lambda p: p.data.zero_(), nn.init.ones_], ids=["data", "init"])
def test_what_is_written_after_the_block_is_refused_by_name(store: TieredStore, write: Callable[[Any], Any]) -> None:
    with zero.init(store):
        model = nn.Linear(4, 4)
    write(model.bias)
    with pytest.raises(MisuseError, match=r"Linear\.bias was written to after its zero\.init block"):
        zero.page(model, store)


def test_data_given_after_the_block_counts(store: TieredStore) -> None:
    with zero.init(store):
        model = nn.Linear(4, 4)
    model.bias.data = torch.ones(4)
    zero.page(model, store)
    assert torch.equal(model.state_dict()["bias"], torch.ones(4))


def test_a_parameter_that_can_never_be_paged_is_refused_at_once(store: TieredStore) -> None:
    with pytest.raises(CapacityError, match=r"Linear\.weight .* 3,145,728 bytes is the least"), zero.init(store):
        nn.Linear(512, 512)
    assert waiting(store) == []


def test_other_threads_build_in_memory(store: TieredStore) -> None:
    made: list[nn.Module] = []
    with zero.init(store, window=TINY):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(64, 64)))
        thread.start()
        thread.join()
        nn.Linear(64, 64)
    assert not torch.isnan(made[0].weight).any()


# -- memory ------------------------------------------------------------------------------------------------------------------


def test_building_64_mib_in_a_pool_of_4_keeps_the_window(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="4MiB", eviction=Eviction(deadline=60)) as store:
        with zero.init(store) as construction:
            model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(455)))
        statistics = construction.statistics()
        assert sum(p.numel() * 4 for p in model.parameters()) > 64 << 20
        assert statistics.limit == 512 << 10
        assert statistics.peak <= statistics.limit
        assert statistics.resident == 0
        assert store.statistics().tiers[0].peak <= 4 << 20
        store.close()


def test_what_needs_no_values_fetches_none(store: TieredStore) -> None:
    with zero.init(store, window=TINY) as construction:
        model = nn.Sequential(nn.Sequential(Tied(), nn.Linear(16, 16)))[0][0]
        before = construction.statistics().fetched
        for parameter in model.parameters():
            _ = parameter.shape, parameter.dtype, parameter.device, parameter.numel(), parameter.requires_grad, parameter.grad
            parameter.requires_grad_(True)
            parameter.requires_grad = True
        assert construction.statistics().fetched == before
        model.embedding.weight.data = torch.zeros(64, 32)
        assert construction.statistics().fetched == before, "what is replaced need not be read"


def test_building_without_looking_back_writes_each_parameter_once(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="4MiB", eviction=Eviction(deadline=60)) as store:
        with zero.init(store) as construction:
            model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 2, 128) for _ in range(8)))
        statistics = construction.statistics()
        assert statistics.peak <= statistics.limit
        assert (statistics.fetched, statistics.released) == (0, len(list(model.parameters())))
        store.close()
