"""``TieredCache``: keys and values in a store. Tokens and logits are bit for bit those of ``DynamicCache``, a kept cache goes
on as if nothing had stopped, and what cannot be right raises."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache  # noqa: E402

from tests import programs  # noqa: E402
from tests.filesystems import fill, root, small_ext4  # noqa: E402
from tests.quick import quick  # noqa: E402
from tests.stress.strikes import lines_of, struck_at  # noqa: E402
from tests.versions import COMPILES  # noqa: E402
from tiered import CapacityError, ManifestError, MisuseError, Owner, TieredStore, WriteError, zero  # noqa: E402
from tiered.errors import InterruptedStore  # noqa: E402
from tiered.integrations.transformers import TieredCache, import_model, open_model  # noqa: E402
from tiered.integrations.transformers.kv_model import ARGUMENT  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
WIDE = SIZES | {"num_key_value_heads": 4, "head_dim": 64}
"""6 KiB of keys and values a token: 170 tokens fill the smallest pool."""
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16}
GEMMA = Gemma3TextConfig(**SIZES, head_dim=16, **LAYERS)
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, initializer_range=0.3)),
    "gemma3": (Gemma3ForCausalLM, GEMMA),
    "qwen3 moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
}
POOL = "1MiB"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram=POOL) as opened:
        yield opened
        opened.close()  # what was not committed is not kept


def made(family: str = "llama", **changes: Any) -> Any:
    cls, config = FAMILIES[family]
    config = copy.deepcopy(config)
    config.update(changes)
    torch.manual_seed(0)
    return cls(config).eval()


def wide() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**WIDE)).eval()


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(10, 300, (batch, length), generator=torch.Generator().manual_seed(seed))


def past(cache: Any) -> dict[str, Any]:
    """Return the argument that gives a forward its cache, by the name of the installed version."""
    return {ARGUMENT: cache}


def generated(model: Any, ids: torch.Tensor, cache: Cache, tokens: int = 12, **options: Any) -> Any:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False} | options
    options |= {"max_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, **past(cache), **options)


def stepped(model: Any, cache: TieredCache, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **past(cache)).logits
    return logits


def in_memory(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


# -- the same tokens -----------------------------------------------------------------------------------------------------------

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "in chunks": {"prefill_chunk_size": 5},
}


PAIRS = [("llama", "greedy"), ("llama", "assisted"), ("qwen3", "drawn"), ("gpt2", "beams"), ("gemma3", "in chunks")]
PAIRS += [("gemma3", "beams"), ("qwen3 moe", "greedy")]


@pytest.mark.parametrize(("family", "strategy"), quick(product(FAMILIES, STRATEGIES), PAIRS))
def test_tokens_and_logits_are_those_of_a_cache_in_memory(family: str, strategy: str, store: TieredStore) -> None:
    model = made(family)
    ids = prompt(13, batch=1 if strategy == "assisted" else 2)
    mask = torch.ones_like(ids)
    if strategy != "assisted":
        mask[0, :4] = 0  # padding at the left
    options = STRATEGIES[strategy] | {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for cache in in_memory(model), TieredCache(model, store, block=8):
        torch.manual_seed(1)
        found.append(generated(model, ids, cache, 24, **options))
    reference, ours = found
    assert torch.equal(ours.sequences, reference.sequences)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours.logits, reference.logits, strict=True))
    if strategy != "beams":
        assert torch.equal(getattr(ours, ARGUMENT).ids, ours.sequences[:, :-1])


def test_a_model_that_assists(store: TieredStore) -> None:
    """Its own cache is in memory; that of the model in the store is cropped."""
    model, small = made(), made(num_hidden_layers=1)
    ids = prompt(9)
    expected = generated(model, ids, in_memory(model), 20)
    cache = TieredCache(model, store, block=4)
    assert torch.equal(generated(model, ids, cache, 20, assistant_model=small), expected)
    assert torch.equal(cache.ids, expected[:, :-1])


def test_assisted_decoding_goes_on_from_a_cache(store: TieredStore) -> None:
    model, ids = made(), prompt(20)
    expected = generated(model, ids, in_memory(model), 25)
    cache = TieredCache(model, store, block=8)
    tokens = generated(model, ids, cache, 6)
    tokens = generated(model, tokens, cache, 9, prompt_lookup_num_tokens=3)
    assert torch.equal(generated(model, tokens, cache, 10), expected)


def test_copies_are_not_written_to_while_something_refers_to_them(store: TieredStore) -> None:
    """The memory of a copy is used for the next layer's as soon as the last view of it is gone, and not before."""
    model = wide()
    cache = TieredCache(model, store, block=16)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(3):
        cache.begin(model, {"input_ids": prompt(300)})
        given = [torch.randn(1, 4, 300, 64) for _ in range(6)]
        for layer in range(3):
            keys, values = cache.update(given[2 * layer], given[2 * layer + 1], layer)
            held += [(keys[0, 1:], keys[0, 1:].clone()), (values, values.clone())]
        cache.end(object())
        assert all(torch.equal(*one) for one in held)
    assert torch.equal(held[-1][0][:, :, -300:], given[-1])
    del keys, values
    addresses = set()
    held.clear()
    for layer in range(3):
        cache.begin(model, {"input_ids": prompt(1)})
        addresses |= {one.data_ptr() for one in cache.update(torch.ones(1, 4, 1, 64), torch.ones(1, 4, 1, 64), layer)}
    assert len(addresses) == 2


@COMPILES
@pytest.mark.soak
def test_a_compiled_model(store: TieredStore) -> None:
    """The cache breaks the graph in each layer, and has the tokens of the forward."""
    model, ids = made(num_hidden_layers=2), prompt(20)
    compiled = torch.compile(model, backend="eager")
    cache, reference = TieredCache(model, store, block=8), in_memory(model)
    with torch.no_grad():
        for begin, end in (0, 11), (11, 12), (12, 20):
            found = compiled(ids[:, begin:end], **past(cache)).logits
            assert torch.equal(found, model(ids[:, begin:end], **past(reference)).logits)
            assert torch.equal(cache.ids, ids[:, :end])


@pytest.mark.parametrize(("length", "tokens"), quick([(450, 16), (700, 40)], [(450, 16)]))
@pytest.mark.parametrize("family", ["wide llama", "gemma3"])
def test_a_context_larger_than_the_pool(family: str, length: int, tokens: int, store: TieredStore) -> None:
    """Each token reads what the pool does not hold; blocks are written once, besides those that leave before they are full."""
    model = wide() if family == "wide llama" else made("gemma3", num_key_value_heads=4, head_dim=64, sliding_window=100)
    ids = prompt(length)
    expected = generated(model, ids, in_memory(model), tokens)
    cache = TieredCache(model, store, block=16)
    assert torch.equal(generated(model, ids, cache, tokens), expected)
    context = (length + tokens - 1) * 3 * 2 * 4 * 64 * 4
    assert context > 5 << 19
    statistics = store.statistics()
    written = sum(link.down.bytes for link in statistics.links)
    read = sum(link.up.bytes for link in statistics.links)
    if family == "wide llama":
        assert 0.9 * (context - (1 << 20)) * (tokens - 1) < read < 1.1 * context * (tokens - 1)
    assert context - (1 << 20) < written < 1.6 * context
    assert torch.equal(cache.ids, expected[:, :-1])


def test_on_three_tiers(tmp_path: Path) -> None:
    model = wide()
    ids = prompt(300)
    with TieredStore.open(tmp_path / "store", hbm="1MiB", device="cpu", dram="1MiB") as store:
        cache = TieredCache(model, store, block=16)
        assert torch.equal(generated(model, ids, cache), generated(model, ids, in_memory(model)))
        cache.commit()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        cache = TieredCache.open(model, store)
        assert cache.get_seq_length() == 311
        store.close()


@pytest.mark.parametrize("stores", ["one", "two"])
def test_a_model_that_is_paged(stores: str, tmp_path: Path) -> None:
    """Weights and cache in one store, or weights in one that is open for reading."""
    model, ids = wide(), prompt(200)
    model.save_pretrained(tmp_path / "model")
    expected = generated(model, ids, in_memory(model), 16)
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        import_model(tmp_path / "model", store)
    for tokens in 8, 8:  # the second time in what would be another process
        weights = TieredStore.open(tmp_path / "store", dram="2MiB", access="write" if stores == "one" else "read")
        store = weights if stores == "one" else TieredStore.open(tmp_path / "kept", dram=POOL)
        opened = open_model(weights)
        kept = "chat" in TieredCache.kept(store)
        cache = TieredCache.open(opened, store) if kept else TieredCache(opened, store, block=16)
        assert cache.reuse(ids) == (207 if kept else 0)
        ids = generated(opened, ids, cache, tokens)
        cache.commit()
        weights.close()
        store.close()
    assert torch.equal(ids, expected)


# -- kept ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", quick(FAMILIES, ["gpt2", "gemma3"]))
def test_it_goes_on_after_a_restart(family: str, tmp_path: Path) -> None:
    ids = prompt(21)
    expected = generated(made(family), ids, in_memory(made(family)), 33)
    for length in 21, 32, 43:
        model = made(family)
        with TieredStore.open(tmp_path / "store", dram=POOL) as store:
            cache = TieredCache(model, store, block=8) if length == 21 else TieredCache.open(model, store)
            if length > 21:
                assert torch.equal(cache.tokens, ids)
                assert torch.equal(cache.ids, ids[:, :-1])
            assert cache.reuse(ids) == (0 if length == 21 else length - 1)
            ids = generated(model, ids, cache, 11)
            assert torch.equal(cache.tokens, ids[:, :-1])
            with pytest.raises(MisuseError, match=r"commit\(input_ids\) takes all tokens"):
                cache.commit(ids[:, 1:])
            assert cache.commit(ids) == store.generation
            store.close()
    assert torch.equal(ids, expected)


def test_a_cache_is_forgotten_once_it_is_closed(tmp_path: Path) -> None:
    model, ids = made(), prompt(13)
    with TieredStore.open(tmp_path / "store", dram=POOL) as store:
        cache = TieredCache(model, store, name="one")
        cache.commit(generated(model, ids, cache))
        with pytest.raises(MisuseError, match=r"the cache 'one' in .* is open: close\(\) it first"):
            TieredCache.forget(store, "one")
        cache.close()
        TieredCache.forget(store, "one")
        assert (TieredCache.kept(store), list(store)) == ([], [])
        with pytest.raises(MisuseError, match=r"keeps no conversation named 'one' \(there are: none\)"):
            TieredCache.forget(store, "one")
        store.rollback()  # nothing was committed
        assert TieredCache.kept(store) == ["one"]
    with (
        TieredStore.open(tmp_path / "store", dram=POOL, access="read") as reader,
        pytest.raises(MisuseError, match="open for reading"),
    ):
        TieredCache.forget(reader, "one")


def test_beams_and_padding_are_kept(tmp_path: Path) -> None:
    model, ids = made(), prompt(13, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with TieredStore.open(tmp_path / "store", dram=POOL) as store:
        cache = TieredCache(model, store, block=8)
        generated(model, ids, cache, 10, attention_mask=mask, num_beams=2)
        cache.commit()
        held, masked = cache.ids, cache._turn.mask
        store.close()
    assert masked is not None
    with TieredStore.open(tmp_path / "store", dram=POOL) as store:
        cache = TieredCache.open(model, store)
        assert torch.equal(cache.ids, held)
        after = torch.cat([held, prompt(3, batch=4)], dim=1)
        longer = torch.cat([masked, torch.ones(4, 3, dtype=torch.bool)], dim=1).long()
        assert cache.matches(after) == 0  # the padding is not what a mask of ones says
        assert cache.reuse(after, longer) == 22
        reference = in_memory(model)  # what the cache has was computed in these pieces
        _prefilled(model, reference, held, masked)
        expected = generated(model, after, reference, attention_mask=longer)
        assert torch.equal(generated(model, after, cache, attention_mask=longer), expected)
        store.close()


def _prefilled(model: Any, cache: Cache, ids: torch.Tensor, mask: torch.Tensor) -> None:
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask.long(), position_ids=positions, **past(cache))


def _reused(cache: TieredCache, ids: torch.Tensor) -> TieredCache:
    cache.reuse(ids)
    return cache


def _shuffled(model: Any, cache: TieredCache) -> None:
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    stepped(model, cache, prompt(1, batch=3))


def _anew(model: Any, cache: TieredCache) -> None:
    cache.reset()
    generated(model, prompt(30, seed=8), cache, 9)


CHANGES: dict[str, Callable[[Any, TieredCache], object]] = {
    "grows": lambda model, cache: generated(model, cache.ids, _reused(cache, cache.ids), 20),
    "other tokens": lambda model, cache: generated(model, prompt(25, seed=7), _reused(cache, prompt(25, seed=7)), 9),
    "begins anew": _anew,
    "beams": _shuffled,
    "shorter": lambda model, cache: cache.crop(-11),
}
"""What a cache may do between its last commit and another commit of the store."""


@pytest.mark.parametrize("change", quick(CHANGES, ["other tokens", "beams", "shorter"]))
def test_any_commit_of_the_store_keeps_a_cache_that_is_whole(change: str, tmp_path: Path) -> None:
    """Whatever the cache did since its own commit: it is as of that one."""
    model, ids = made(), prompt(19)
    expected = generated(model, ids, in_memory(model), 20)
    with TieredStore.open(tmp_path / "store", dram=POOL) as store:
        cache = TieredCache(model, store, block=8)
        generated(model, ids, cache, 9)
        cache.commit()
        CHANGES[change](model, cache)
        store.put("something", torch.ones(3))
    with TieredStore.open(tmp_path / "store", dram=POOL) as store:
        assert store.generation == 2
        cache = TieredCache.open(model, store)
        assert torch.equal(cache.ids, expected[:, :27])
        cache.reuse(expected[:, :28])
        assert torch.equal(generated(model, expected[:, :28], cache, 11), expected)
        store.close()


KILLED = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from tiered import TieredStore
from tiered.integrations.transformers import TieredCache
from tiered.integrations.transformers.kv_model import ARGUMENT

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**{sizes})).eval()
ids = torch.tensor({ids})
store = TieredStore.open(sys.argv[1], dram="1MiB")
cache = TieredCache(model, store, block=16)
options = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
while True:
    for commits in True, False:
        cache.reuse(ids)
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), **{{ARGUMENT: cache}}, max_new_tokens=7, **options)
        if commits:
            cache.commit()
            print(ids.shape[1], flush=True)
"""


@pytest.mark.parametrize("after", quick([1, 3], [3]))
def test_sigkill_leaves_the_last_commit(after: int, tmp_path: Path) -> None:
    """Killed while it generates on: the cache is as of its last commit, and goes on as if it had never stopped."""
    model, ids = wide(), prompt(180)
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(sizes=WIDE, ids=ids.tolist()))
    command = [sys.executable, str(script), str(tmp_path / "store")]
    child = programs.Popen(command, imported=programs.MODELS, stdout=-1, text=True)
    assert child.stdout is not None
    said = [int(child.stdout.readline()) for _ in range(after)]
    child.send_signal(signal.SIGKILL)
    said += [int(line) for line in child.stdout]
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    with TieredStore.open(tmp_path / "store", dram=POOL) as store:
        cache = TieredCache.open(model, store)
        length = cache.get_seq_length()
        assert length in (said[-1] - 1, said[-1] + 13)  # the commit after the last line may be there as well
        expected = generated(model, ids, in_memory(model), length + 20 - 180)
        assert torch.equal(cache.ids, expected[:, :length])
        assert torch.equal(generated(model, expected[:, : length + 1], cache, 19), expected)
        store.close()


def test_a_prefix_is_reused_and_forked(store: TieredStore) -> None:
    model, ids = made(), prompt(40)
    cache = TieredCache(model, store, block=8)
    generated(model, ids, cache, 1)
    computed: list[int] = []
    model.register_forward_pre_hook(lambda _, args, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True)
    for share in 40, 33, 24, 5, 0:
        other = torch.cat([ids[:, :share], prompt(50 - share, seed=3)], dim=1)
        fork = cache.fork(f"fork {share}")
        assert (fork.matches(other), fork.reuse(other)) == (share, share)
        computed.clear()
        tokens = generated(model, other, fork, 6)
        assert computed == [50 - share, 1, 1, 1, 1, 1]
        assert torch.equal(tokens, generated(model, other, in_memory(model), 6))
    assert torch.equal(cache.ids, ids)
    assert cache.reuse(ids) == 39  # at least one token is computed
    assert torch.equal(generated(model, ids, cache, 6), generated(model, ids, in_memory(model), 6))


# -- what is wrong -------------------------------------------------------------------------------------------------------------


def test_other_ids_are_noticed(store: TieredStore) -> None:
    model, ids = made(), prompt(12)
    cache = TieredCache(model, store, block=8)
    tokens = generated(model, ids, cache, 8)
    for wrong, says in (
        (prompt(25, seed=5), r"input_ids are 25 tokens, of which the first 0 are those of the cache 'chat', which has 19"),
        (torch.cat([ids, prompt(20, seed=5)], dim=1), r"the first 12 are those"),
        (tokens[:, :-1], r"input_ids are 19 tokens"),  # nothing is left to compute
        (ids, r"input_ids are 12 tokens"),
    ):
        with pytest.raises(MisuseError, match=says + r"[\s\S]*cache.reuse\(input_ids\) before generate"):
            generated(model, wrong, cache, 3)
        with pytest.raises(MisuseError, match=r"cache\.reuse"):
            generated(model, wrong, cache, 3, prompt_lookup_num_tokens=2)
        assert torch.equal(cache.ids, tokens[:, :-1])
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(MisuseError, match="differs from the one that the 19 tokens"):
        generated(model, tokens, cache, 3, attention_mask=mask)
    with pytest.raises(MisuseError, match=r"attention_mask is of shape \[1, 5\]"):
        model(tokens[:, -1:], **past(cache), attention_mask=torch.ones(1, 5))
    assert torch.equal(generated(model, tokens, cache, 4), generated(model, ids, in_memory(model), 12))


def test_wrong_use_raises(store: TieredStore) -> None:
    model, ids = made(), prompt(12, batch=2)
    cache = TieredCache(model, store, block=8)
    with pytest.raises(MisuseError, match="is open already"):
        TieredCache(model, store, block=8)
    with pytest.raises(MisuseError, match="keeps no gradients"):
        model(ids, **past(cache))
    assert cache.get_seq_length() == 0
    tokens = generated(model, ids, cache, 5)
    other = made(num_hidden_layers=2)
    others = TieredCache(other, store, name="other")
    wrapped = EncoderDecoderCache(cache, DynamicCache())
    wrongs: list[tuple[Callable[[], object], str]] = [
        (lambda: generated(other, tokens, cache), "was made with another model"),  # which has a cache, too
        (lambda: generated(made(), tokens, cache), "none has begun"),
        (lambda: model.model(ids, **past(cache)), "none has begun"),
        (lambda: generated(model, tokens[:1], cache), "has 2 sequences, and these are 1"),
        (lambda: generated(model, tokens, cache, num_beams=2), "has 2 sequences, and these are 4"),
        (lambda: cache.reuse(tokens[:1]), "has 2 sequences, and these are 1"),
        (lambda: model(inputs_embeds=torch.ones(2, 1, 64), **past(cache)), "give the model input_ids"),
        (lambda: cache.crop(3), "give a negative number"),
        (lambda: copy.deepcopy(cache), r"fork\(name\)"),
        (lambda: cache.layers[0].crop(-1), "call this of the cache"),
        (lambda: model(ids, **past(wrapped)), "not part of an EncoderDecoderCache"),
        (lambda: model(ids, **past(cache), attention_mask=torch.ones(2, 1, 12, 28)), "of shape"),
    ]
    for wrong, says in wrongs:
        with torch.no_grad(), pytest.raises(MisuseError, match=says):
            wrong()
    assert torch.equal(generated(model, tokens, cache, 5), generated(model, ids, in_memory(model), 10))
    others.close()
    cache.commit()
    cache.close()
    with pytest.raises(MisuseError, match=r"is closed|none has begun"):
        generated(model, tokens, cache)
    with pytest.raises(MisuseError, match=r"keeps a cache named 'chat' already: TieredCache.open"):
        TieredCache(model, store)
    for another, says in (
        (made("qwen3"), "another class"),
        (made(num_hidden_layers=2), "another configuration"),
        (made(rms_norm_eps=1e-3), "another configuration"),
        (_moved(made()), "another weights"),
    ):
        with pytest.raises(MisuseError, match=f"made with a LlamaForCausalLM of {says}"):
            TieredCache.open(another, store)
    narrow = made()
    again = TieredCache.open(narrow, store)
    tokens = torch.cat([again.ids, prompt(1, batch=2)], dim=1)
    narrow.to(torch.bfloat16)
    says = r"has keys of 2 x 16 and values of 2 x 16 float32, and the model now makes .*bfloat16"
    with pytest.raises(MisuseError, match=says):
        generated(narrow, tokens, again, 3)
    again.close()
    with pytest.raises(MisuseError, match=r"keeps no conversation named 'talk' \(there are: 'chat'\)"):
        TieredCache.open(model, store, name="talk")
    assert TieredCache(model, store, existing="overwrite").get_seq_length() == 0


def _moved(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    return model


def test_what_no_change_of_a_cache_can_be_is_refused_and_changes_nothing(store: TieredStore) -> None:
    model = made()
    cache = TieredCache(model, store)
    model.generate(torch.arange(12).view(2, 6), **{ARGUMENT: cache}, max_new_tokens=3, do_sample=False)
    length = cache.get_seq_length()
    for call, wrong in (
        (cache.crop, (None, "x", 1, 1.5)),
        (cache.reorder_cache, (None, "x", torch.tensor([0.5]), torch.tensor([5]), torch.tensor([[0]]))),
        (cache.batch_repeat_interleave, (None, "x", 0, -1, 2.5)),
        (cache.batch_select_indices, (None, "x", 5, [7], [0.5])),
        (cache.commit, ("x", torch.zeros(2, 6, dtype=torch.int64, device="meta"))),
    ):
        for value in wrong:
            with pytest.raises(MisuseError):
                call(value)  # type: ignore[operator]
    assert cache.get_seq_length() == length
    cache.batch_select_indices(torch.tensor([True, False]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.get_seq_length() == length


def test_what_a_cache_cannot_be_of_is_refused(store: TieredStore, tmp_path: Path) -> None:
    model = made()
    mamba = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    store.put("model/param/0", torch.ones(2), owner=Owner("model", "model"))
    store.commit()
    for given, says in (
        ((mamba, store), "layers of"),
        ((t5, store), "attends to an encoder"),
        ((torch.nn.Linear(2, 2), store), "one of transformers"),
        ((model, "store"), "is a TieredStore"),
        ((None, store), "one of transformers"),
    ):
        with pytest.raises(MisuseError, match=says):
            TieredCache(*given)
    for options in {"block": 0}, {"name": ""}, {"existing": "resume"}, {"name": "model"}:
        with pytest.raises(MisuseError):
            TieredCache(model, store, **options)
    store.close()
    reading = TieredStore.open(tmp_path / "store", dram=POOL, access="read")
    with pytest.raises(MisuseError, match="is open for reading, and a cache is written"):
        TieredCache(model, reading)
    reading.close()
    with TieredStore.open(None, dram=POOL) as scratch:
        cache = TieredCache(model, scratch)
        generated(model, prompt(5), cache, 3)
        with pytest.raises(MisuseError, match="without a disk"):
            cache.commit()


def test_tensors_of_others_below_its_name_stay(store: TieredStore) -> None:
    """Whatever a cache does; and one whose names would mix is refused, with nothing changed."""
    model, ids = made(), prompt(20)
    keys = "chat/kv/x", "chat/kv/9/77", "chat/kv", "chat/x", "other/kv/0"
    mine = {key: torch.full((3,), float(at)) for at, key in enumerate(keys)}
    store.update(mine)
    store.table("chats", 10, 2)[:] = torch.ones(10, 2)
    cache = TieredCache(model, store, block=4)
    generated(model, ids, cache)
    cache.commit()
    cache.fork("copy").reset()
    cache.crop(-9)
    cache.commit()
    cache.close()
    for existing in ("overwrite", "refuse"):  # the first was not committed
        TieredCache(model, store, existing=existing).close()
    assert all(torch.equal(store[key], mine[key]) for key in mine)
    assert store.table("chats")[:].eq(1).all()
    before = set(store)
    with pytest.raises(MisuseError, match="the cache 'chats' would lie within that name"):
        TieredCache(model, store, name="chats")
    zero.page(torch.nn.Linear(2, 2), store, name="agent")
    with pytest.raises(MisuseError, match="the store has the model 'agent', and the cache 'agent/chat'"):
        TieredCache(model, store, name="agent/chat")
    assert {key for key in store if not key.startswith("agent/")} == before


def test_weights_that_change_are_noticed(store: TieredStore) -> None:
    model = made()
    cache = TieredCache(model, store)
    generated(model, prompt(5), cache, 3)
    _moved(model)
    with pytest.raises(MisuseError, match="weights of the model have changed"):
        cache.commit()


def test_a_store_that_was_rolled_back_is_noticed(store: TieredStore) -> None:
    model, ids = made(), prompt(12)
    cache = TieredCache(model, store, block=8)
    tokens = generated(model, ids, cache, 5)
    cache.commit()
    generated(model, tokens, cache, 6)
    store.rollback()
    with pytest.raises(MisuseError, match="was rolled back"):
        generated(model, torch.cat([cache.ids, prompt(1)], dim=1), cache)
    cache.close()
    cache = TieredCache.open(model, store)
    assert torch.equal(generated(model, tokens, cache, 7), generated(model, ids, in_memory(model), 12))


def test_a_damaged_record(store: TieredStore) -> None:
    model = made()
    cache = TieredCache(model, store, block=8)
    generated(model, prompt(12), cache, 5)
    cache.commit()
    cache.close()
    key = "chat/kv/record"
    right = store.get(key).numpy().tobytes()
    for wrong in (
        b"{}",
        right[:-5],
        right.replace(b'"version":2', b'"version":1'),
        right.replace(b'"block":8', b'"block":4'),
        right.replace(b'"rest":[]', b'"rest":[[1],[2]]'),
        right.replace(b'"block":8', b'"block":0'),
        right.replace(b"[0,1,null]", b"[77,1,null]"),
        right.replace(b"[0,1,null]", b"[0,2,null]"),
        right.replace(b"[0,1,null]", b"[0,1,[3]]"),
        right.replace(b'"float32"', b'"tensor"'),
        right.replace(b'"window":null', b'"window":4'),
    ):
        assert wrong != right
        store.put(key, torch.frombuffer(bytearray(wrong), dtype=torch.uint8), owner=Owner("cache", "chat"))
        with pytest.raises(ManifestError, match=r"damaged|other version"):
            TieredCache.open(model, store)
    store.put(key, torch.frombuffer(bytearray(right), dtype=torch.uint8), owner=Owner("cache", "chat"))
    store.delete("chat/kv/1/0", owner=Owner("cache", "chat"))
    with pytest.raises(ManifestError, match=r"tensor 'chat/kv/1/0' is missing"):
        TieredCache.open(model, store)


def test_hooks_go_with_the_last_cache(store: TieredStore) -> None:
    model = made()
    first, second = TieredCache(model, store, name="a"), TieredCache(model, store, name="b")
    first.close()
    generated(model, prompt(5), second, 2)
    second.close()
    del second
    assert not model._forward_pre_hooks
    assert "prepare_inputs_for_generation" not in vars(model)
    TieredCache(model, store, name="c")  # and with one that nobody keeps
    assert not model._forward_pre_hooks


# -- trouble -------------------------------------------------------------------------------------------------------------------


@root
def test_a_full_disk(tmp_path: Path) -> None:
    """The error is named, the commit before holds, and with room again the same tokens come."""
    model, ids = wide(), prompt(150)
    expected = generated(model, ids, in_memory(model), 60)
    with small_ext4(tmp_path, 24 << 20) as disk:
        store = TieredStore.open(disk / "store", dram=POOL)
        cache = TieredCache(model, store, block=16)
        tokens = generated(model, ids, cache, 5)
        cache.commit()
        fill(disk)
        long = torch.cat([tokens, prompt(900, seed=2)], dim=1)
        for _ in range(2):
            cache.reuse(long)
            with pytest.raises((CapacityError, WriteError), match=r"disk/store|dram|nvme"):
                generated(model, long, cache, 3)
        assert cache.matches(tokens) == 154
        (disk / "neighbour").unlink()
        cache.reuse(tokens)
        assert torch.equal(generated(model, tokens, cache, 55), expected)
        cache.commit()
        store.close()
        with TieredStore.open(disk / "store", dram=POOL) as store:
            assert torch.equal(TieredCache.open(model, store).ids, expected[:, :-1])
            store.close()


@pytest.mark.parametrize("every", quick([83, 241], [241]))
def test_an_interruption_anywhere_in_a_forward(every: int, tmp_path: Path) -> None:
    """Ctrl-C at each of many lines, most of them of the store: the cache has what it had, or what the forward made."""
    model, ids = made(num_hidden_layers=1), prompt(15)
    expected = generated(model, ids, in_memory(model), 8)
    store = TieredStore.open(tmp_path / "store", dram=POOL)
    cache = TieredCache(model, store, block=4)
    generated(model, ids, cache, 1)
    cache.commit()
    total = lines_of(lambda: stepped(model, cache, expected[:, 15:16]))
    struck = tries = 0
    for number in range(0, total, every):
        for block in 0, 1:  # a token within a block, and the first one of a block
            cache.reuse(expected[:, : 15 + block + 1])
            assert cache.get_seq_length() == 15 + block
            next_one = expected[:, 15 + block : 16 + block]
            tries += 1
            struck += struck_at(number, partial(stepped, model, cache, next_one)) is not None
            try:
                assert cache.matches(expected) == cache.get_seq_length()
                rest = expected[:, : cache.get_seq_length() + 1]
                assert torch.equal(generated(model, rest, cache, 23 - rest.shape[1]), expected), number
            except InterruptedStore:
                store.close()
                store = TieredStore.open(tmp_path / "store", dram=POOL)
                cache = TieredCache.open(model, store)
    assert struck > 0.9 * tries
    store.close()


def test_nothing_is_left_behind(store: TieredStore) -> None:
    """Tensors and the file's size are the same after each of many rounds of growing, cropping and reordering."""
    model, ids = made(), prompt(30)
    cache = TieredCache(model, store, block=8)
    seen = set()
    for round_ in range(8):
        cache.reset()
        generated(model, ids, cache, 5, num_beams=3)
        cache.reset()
        generated(model, ids, cache, 9, prompt_lookup_num_tokens=3)
        cache.crop(-3)
        cache.commit()
        if round_ >= 4:
            seen.add((len(store), os.path.getsize(Path(store.folder) / "data.0")))
    assert len(seen) == 1
    assert len(store) == 2 + 3 * 5  # record and stamp, and the blocks of 35 tokens in three layers


@pytest.mark.soak  # ten minutes
def test_ten_minutes_of_generation(store: TieredStore) -> None:
    """A context of five times the pool that grows, is cropped and goes on: memory, descriptors and the disk are flat."""
    model, ids = wide(), prompt(800)
    cache = TieredCache(model, store, block=16)
    seen: list[tuple[int, int, int, int]] = []
    end = time.monotonic() + 600
    while time.monotonic() < end or len(seen) < 25:
        cache.reuse(ids)
        tokens = generated(model, ids, cache, 40)
        cache.commit(tokens)
        descriptors = len(os.listdir("/proc/self/fd"))
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        seen.append((resident, descriptors, os.path.getsize(Path(store.folder) / "data.0"), len(store)))
    early, late = seen[5:15], seen[-10:]
    assert max(one[0] for one in late) < max(one[0] for one in early) + (8 << 20)
    for at in 1, 2, 3:
        assert {one[at] for one in late} <= {one[at] for one in early}


# -- against a list of tensors -------------------------------------------------------------------------------------------------

WINDOWS = (None, 6)


class Oracle(RuleBasedStateMachine):
    """A cache of two layers, one with a window, beside tensors that are concatenated, indexed and cut."""

    @initialize(block=st.integers(1, 5))
    def begin(self, block: int) -> None:
        kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOWS[1]}
        config = Gemma3TextConfig(**SIZES | kinds | {"num_hidden_layers": 2}, head_dim=4)
        torch.manual_seed(0)
        self.model = Gemma3ForCausalLM(config)
        self.path = Path(os.environ["ORACLE_STORE"]) / str(len(os.listdir(os.environ["ORACLE_STORE"])))
        self.store = TieredStore.open(self.path, dram=POOL)
        self.cache = TieredCache(self.model, self.store, block=block)
        self.have: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ids = torch.zeros((0, 0), dtype=torch.long)
        self.committed = False
        self.kept: Any = None

    def forward(self, new: int, layers: int) -> None:
        batch = self.ids.shape[0] or 2
        ids = torch.randint(0, 300, (batch, new))
        given = [tuple(torch.randn(batch, 2, new, size) for size in (4, 3)) for _ in WINDOWS]
        self.cache.begin(self.model, {"input_ids": ids})
        length = self.ids.shape[1]
        for at, (window, (keys, values)) in enumerate(zip(WINDOWS, given, strict=True)):
            if at == layers:
                return  # as an exception leaves it
            start = 0 if window is None else max(0, length - window + 1)
            assert self.cache.get_mask_sizes(new, at) == (length - start + new, start)
            before = self.have[at] if self.have else (keys[:, :, :0], values[:, :, :0])
            found = self.cache.update(keys, values, at)
            for mine, old, fresh in zip(found, before, (keys, values), strict=True):
                assert torch.equal(mine, torch.cat([old[:, :, start:], fresh], dim=2))
                assert mine.is_contiguous()
        self.cache.end(object())
        self.have = [
            tuple(torch.cat([old, fresh], dim=2) for old, fresh in zip(before, fresh_ones, strict=True))
            for before, fresh_ones in zip(self.have, given, strict=True)
        ] if self.have else given  # fmt: skip
        self.ids = torch.cat([self.ids.reshape(batch, length), ids], dim=1)
        assert torch.equal(self.cache.ids, self.ids)

    @rule(new=st.integers(1, 12))
    def append(self, new: int) -> None:
        self.forward(new, 2)

    @rule(new=st.integers(1, 7), layers=st.integers(0, 1))
    def is_interrupted(self, new: int, layers: int) -> None:
        self.forward(new, layers)

    @precondition(lambda self: self.have)
    @rule(count=st.integers(0, 9))
    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        length = max(0, self.ids.shape[1] - count)
        self.ids = self.ids[:, :length]
        self.have = [tuple(part[:, :, :length] for part in layer) for layer in self.have] if length else []
        if not length:
            self.ids = self.ids[:0]

    @precondition(lambda self: self.have)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.ids.shape[0] - 1), min_size=1, max_size=4))
        how = data.draw(st.sampled_from(["reorder", "select"]))
        (self.cache.reorder_cache if how == "reorder" else self.cache.batch_select_indices)(torch.tensor(rows))
        self.ids = self.ids[rows]
        self.have = [tuple(part[rows] for part in layer) for layer in self.have]

    @precondition(lambda self: self.have and self.ids.shape[0] < 4)
    @rule()
    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.ids = self.ids.repeat_interleave(2, dim=0)
        self.have = [tuple(part.repeat_interleave(2, dim=0) for part in layer) for layer in self.have]

    @rule()
    def commit(self) -> None:
        self.cache.commit()
        self.committed, self.kept = True, (self.ids, self.have)

    @precondition(lambda self: self.committed)
    @rule(whose=st.sampled_from(["nobody's", "the store's"]))
    def open_again(self, whose: str) -> None:
        if whose == "the store's":
            self.store.commit()
        self.store.close()
        self.store = TieredStore.open(self.path, dram=POOL)
        self.cache = TieredCache.open(self.model, self.store)
        self.ids, self.have = self.kept
        assert torch.equal(self.cache.ids, self.ids)
        blocks = sum(len(layer.extent.blocks) for layer in self.cache.layers)
        assert len(self.store) == blocks + 2

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


@pytest.mark.parametrize("examples", quick([6, 60], [6]))
def test_a_cache_is_a_list_of_tensors(examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_STORE", str(tmp_path))
    few = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    run_state_machine_as_test(Oracle, settings=few)  # type: ignore[no-untyped-call]
