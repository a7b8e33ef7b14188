"""Promise 27: what is kept beside weights opens with these weights only.

A cache of keys and values is kept, and one bit of one weight is changed, of each parameter and buffer in turn: in memory, or in
the store, committed or not. Each time the cache is refused, with the name of that weight. Once the bit is back it opens, and
has the tokens that it had.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quick import quick
from tests.stress.tally import Tally
from tiered import MisuseError, TieredStore, zero

pytest.importorskip("transformers")
from tests.integrations.test_kv_cache import FAMILIES, generated, in_memory, made, prompt
from tiered.integrations.transformers import TieredCache

PROMISE = "27 (what is opened is what was kept)"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram="2MiB") as opened:
        yield opened
        opened.close()


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Change one bit of one element, in place."""
    byte, bit = divmod(bit, 8)
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        one = flat[element : element + 1].clone()
        one.view(torch.uint8)[byte] ^= 1 << bit
        flat[element : element + 1] = one


def kept(model: Any, store: TieredStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep a cache of some tokens. Return them, and what comes after them."""
    cache = TieredCache(model, store, block=8)
    tokens = generated(model, prompt(13), cache, 4)
    cache.commit(tokens)
    cache.close()
    return tokens, generated(model, tokens, in_memory(model), 4)


def goes_on(model: Any, store: TieredStore, tokens: torch.Tensor, then: torch.Tensor) -> None:
    cache = TieredCache.open(model, store)
    assert torch.equal(cache.tokens, tokens)
    assert torch.equal(generated(model, tokens, cache, 4), then)
    cache.close()


def weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize("family", quick(FAMILIES, ["llama", "gpt2", "qwen3 moe"]))
def test_a_cache_of_a_model_in_memory(family: str, store: TieredStore, tally: Tally) -> None:
    tally.what = PROMISE
    model, chance = made(family), random.Random(family)
    tokens, then = kept(model, store)
    for name, weight in weights(model):
        for _ in range(2):
            where = chance.randrange(weight.numel()), chance.randrange(8 * weight.itemsize)
            flip(weight, *where)
            with pytest.raises(MisuseError, match=r"made with .* of another weights") as refused:
                TieredCache.open(model, store)
            assert f"(first {name!r})" in str(refused.value)
            flip(weight, *where)
            tally.count("a bit in memory", 1)
    goes_on(model, store, tokens, then)
    torch.manual_seed(1)
    other = type(model)(model.config).eval()
    with pytest.raises(MisuseError, match="another weights"):
        TieredCache.open(other, store)
    other.load_state_dict(model.state_dict())
    goes_on(other, store, tokens, then)


@pytest.mark.parametrize("family", quick(FAMILIES, ["qwen3"]))
def test_a_cache_of_a_model_in_a_store(family: str, store: TieredStore, tally: Tally) -> None:
    tally.what = PROMISE
    chance, twin = random.Random(family), made(family)
    model = zero.page(made(family), store)
    zero.commit(model)
    tokens, then = kept(model, store)
    goes_on(twin, store, tokens, then)  # with the same weights in memory
    for number, (name, weight) in enumerate(weights(model)):
        where = chance.randrange(weight.numel()), chance.randrange(8 * weight.itemsize)
        with zero.gathered(weight, write=True):
            flip(weight, *where)
        if number % 3 == 0:
            store.commit()
        with pytest.raises(MisuseError, match="another weights") as refused:
            TieredCache.open(model, store)
        assert f"(first {name!r})" in str(refused.value)
        if number % 3 == 1:
            zero.rollback(model)
        else:
            with zero.gathered(weight, write=True):
                flip(weight, *where)
            zero.commit(model)
        tally.count("a bit in a store", 1)
    goes_on(model, store, tokens, then)


def test_weights_that_a_commit_has_are_not_read(tmp_path: Path) -> None:
    """What a commit says of them stands for them: in another process, in one that only reads them, and as long as nothing is
    written to them."""

    def read(one: TieredStore) -> int:
        return sum(link.up.bytes for link in one.statistics().links)

    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        zero.commit(zero.page(made(), store))
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = zero.page(made(), store, existing="resume")
        tokens, then = kept(model, store)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = zero.page(made(), store, existing="resume")
        before, cache = read(store), TieredCache.open(model, store)
        assert read(store) - before < 64 << 10  # its record
        cache.close()
        goes_on(model, store, tokens, then)
        with zero.gathered(model.lm_head.weight, write=True):
            flip(model.lm_head.weight, 7, 0)
        with pytest.raises(MisuseError, match=r"another weights .*\(first 'lm_head.weight'\)"):
            TieredCache.open(model, store)
        store.close()


def test_a_cache_is_of_the_weights_that_it_was_made_with(store: TieredStore) -> None:
    model = made()
    cache = TieredCache(model, store, block=8)
    tokens = generated(model, prompt(13), cache, 4)
    flip(model.lm_head.weight, 5, 3)
    for keep in cache, cache.fork("other"):  # its blocks are copied, and are still of the weights of then
        with pytest.raises(MisuseError, match=r"weights of the model have changed .*'lm_head.weight'.* since the cache"):
            keep.commit()
    flip(model.lm_head.weight, 5, 3)
    cache.commit(tokens)


def test_frequencies_that_follow_the_length_are_no_weights(store: TieredStore) -> None:
    model = made(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, max_position_embeddings=16)
    before = model.model.rotary_emb.inv_freq.clone()
    kept(model, store)
    assert not torch.equal(before, model.model.rotary_emb.inv_freq)
    TieredCache.open(made(rope_parameters=model.config.rope_parameters, max_position_embeddings=16), store)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_are_weights(store: TieredStore) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = made()
        torch.manual_seed(2)
        for name in "a", "b":
            config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
            peft.inject_adapter_in_model(config, model, name)
        chosen(model, "set_adapter", "a")
        return model.eval()

    def chosen(model: Any, how: str, given: Any) -> None:
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                getattr(module, how)(given)

    model = adapted()
    tokens, then = kept(model, store)
    for change, back in (
        (("set_adapter", "b"), ("set_adapter", "a")),
        (("enable_adapters", False), ("enable_adapters", True)),
        (("scale_layer", 0.5), ("unscale_layer", 0.5)),
    ):
        chosen(model, *change)
        with pytest.raises(MisuseError, match="another choice of adapters"):
            TieredCache.open(model, store)
        chosen(model, *back)
    name = "model.layers.1.self_attn.q_proj.lora_B.a.weight"
    flip(model.get_parameter(name), 0, 1)
    with pytest.raises(MisuseError, match=f"another weights .*{name}"):
        TieredCache.open(model, store)
    with pytest.raises(MisuseError, match="another choice of adapters"):
        TieredCache.open(made(), store)
    goes_on(adapted(), store, tokens, then)
