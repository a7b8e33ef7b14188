"""``TieredCache``: keys and values in a store. Tokens and logits are bit for bit those of ``DynamicCache``, a kept cache goes on
as if nothing had stopped, and what cannot be right raises."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
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
from tests.stress.strikes import lines_of, struck_at  # noqa: E402
from tiered import CapacityError, ManifestError, MisuseError, TieredStore, WriteError  # noqa: E402
from tiered.errors import InterruptedStore  # noqa: E402
from tiered.integrations.transformers import TieredCache, import_model, open_model  # noqa: E402

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


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    threads, level = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(level)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram=POOL) as opened:
        yield opened
        opened.close()  # what was not committed is not kept


def made(family: str = "llama", **changes: Any) -> Any:
    narrow = made()
    narrow.load_state_dict(model.state_dict())
    again = TieredCache.open(narrow, store)
    narrow.to(torch.bfloat16)
    with pytest.raises(MisuseError, match=r"has keys of 2 x 16 and values of 2 x 16 float32, and the model now makes .*bfloat16"):
        generated(narrow, tokens, again, 3)
    again.close()
    with pytest.raises(MisuseError, match=r"keeps no cache named 'talk' \(there are: 'chat'\)"):
        TieredCache.open(model, store, name="talk")
    assert TieredCache(model, store, existing="overwrite").get_seq_length() == 0


def _moved(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    return model


def test_what_a_cache_cannot_be_of_is_refused(store: TieredStore, tmp_path: Path) -> None:
    model = made()
    mamba = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    store.put("model/param/0", torch.ones(2))
    store.commit()
    for given, says in (
        ((mamba, store), "layers of"),
        ((t5, store), "attends to an encoder"),
        ((torch.nn.Linear(2, 2), store), "one of transformers"),
        ((model, "store"), "is a TieredStore"),
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
        right.replace(b'"version":1', b'"version":2'),
        right.replace(b'"block":8', b'"block":4'),
        right.replace(b'"block":8', b'"block":0'),
        right.replace(b"[0,1,null]", b"[77,1,null]"),
        right.replace(b"[0,1,null]", b"[0,2,null]"),
        right.replace(b"[0,1,null]", b"[0,1,[3]]"),
        right.replace(b'"float32"', b'"tensor"'),
        right.replace(b'"window":null', b'"window":4'),
    ):
        assert wrong != right
        store.put(key, torch.frombuffer(bytearray(wrong), dtype=torch.uint8))
        with pytest.raises(ManifestError, match=r"damaged|other version"):
            TieredCache.open(model, store)
    store.put(key, torch.frombuffer(bytearray(right), dtype=torch.uint8))
    store.delete("chat/kv/1/0")
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


def test_an_interruption_anywhere_in_a_forward(tmp_path: Path) -> None:
    """Ctrl-C at each of many lines, most of them of the store: the cache has what it had, or what the forward made."""
    model, ids = made(num_hidden_layers=1), prompt(15)
    expected = generated(model, ids, in_memory(model), 8)
    store = TieredStore.open(tmp_path / "store", dram=POOL)
    cache = TieredCache(model, store, block=4)
    generated(model, ids, cache, 1)
    cache.commit()
    total = lines_of(lambda: _stepped(model, cache, expected[:, 15:16]))
    struck = 0
    for number in range(0, total, 19):
        for block in 0, 1:  # a token within a block, and the first one of a block
            cache.reuse(expected[:, : 15 + block + 1])
            assert cache.get_seq_length() == 15 + block
            next_one = expected[:, 15 + block : 16 + block]
            struck += struck_at(number, partial(_stepped, model, cache, next_one)) is not None
            try:
                assert cache.matches(expected) == cache.get_seq_length()
                rest = expected[:, : cache.get_seq_length() + 1]
                assert torch.equal(generated(model, rest, cache, 23 - rest.shape[1]), expected), number
            except InterruptedStore:
                store.close()
                store = TieredStore.open(tmp_path / "store", dram=POOL)
                cache = TieredCache.open(model, store)
    assert struck > total // 10
    store.close()


def test_nothing_is_left_behind(store: TieredStore) -> None:
    """Tensors and the file's size are the same after each of many rounds of growing, cropping and reordering."""
    model, ids = made(), prompt(30)
    cache = TieredCache(model, store, block=8)
    seen = set()
    for round_ in range(12):
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


def test_a_cache_is_a_list_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_STORE", str(tmp_path))
    few = settings(
        max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    run_state_machine_as_test(Oracle, settings=few)  # type: ignore[no-untyped-call]
