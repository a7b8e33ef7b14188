"""TRL's trainers with paged models: the numbers of training in memory, and checkpoints that are commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from tests.quick import quick  # noqa: E402
from tiered import MisuseError, TieredStore, zero  # noqa: E402
from tiered.integrations.transformers import CommitCheckpoints  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
TEXTS = ["the cat sat", "on a mat", "a dog ran far", "to the sea", "it rains", "we stay in", "read a book", "write a line"]
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 4}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as opened:
        yield opened
        opened.close()


def tokenizer() -> Any:
    """A tokenizer of bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, num_attention_heads=2, num_key_value_heads=2, **sizes))


def adapted(seed: int = 0) -> Any:
    return peft.get_peft_model(llama(seed), LORA)


LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
REVERSED = [text[::-1] for text in TEXTS]
DATA = {
    "SFT": datasets.Dataset.from_dict({"prompt": TEXTS, "completion": REVERSED}),
    "DPO": datasets.Dataset.from_dict({"prompt": TEXTS, "chosen": REVERSED, "rejected": ["no"] * len(TEXTS)}),
}


class CommitSFT(CommitCheckpoints, trl.SFTTrainer):  # type: ignore[misc,name-defined]
    pass


class CommitDPO(CommitCheckpoints, trl.DPOTrainer):  # type: ignore[misc,name-defined]
    pass


KINDS = {"SFT": (trl.SFTTrainer, trl.SFTConfig, CommitSFT), "DPO": (trl.DPOTrainer, trl.DPOConfig, CommitDPO)}


def trainer(what: str, model: Any, folder: Path, kind: Any = None, more: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1}
    given |= {"learning_rate": 1e-3, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    given |= {"bf16": False, "gradient_checkpointing": False, "max_length": 32, "optim": "adamw_torch_fused"} | options
    plain, config, _ = KINDS[what]
    made = (kind or plain)(
        model=model, args=config(**given), train_dataset=DATA[what], processing_class=tokenizer(), **(more or {})
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def optimizer(kind: Any, model: Any) -> dict[str, Any]:
    return {"optimizers": (kind([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0), None)}


def logged(made: Any) -> list[dict[str, float]]:
    """What a trainer has logged, without what depends on the clock."""
    return [{k: v for k, v in one.items() if "runtime" not in k and "per_second" not in k} for one in made.state.log_history]


def same(one: Any, other: Any) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


CASES: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "SFT": ("SFT", llama, {}),
    "SFT, LoRA": ("SFT", adapted, {"gradient_checkpointing": True}),
    "DPO": ("DPO", llama, {}),
    "DPO, LoRA": ("DPO", adapted, {}),
}


@pytest.mark.parametrize("case", quick(CASES, ["SFT, LoRA", "DPO"]))
def test_trl_computes_as_in_memory(case: str, tmp_path: Path, store: TieredStore) -> None:
    what, make, options = CASES[case]
    memory, model = make(), make()
    before = [value.clone() for value in memory.state_dict().values()]
    more = {"ref_model": llama(1)} if case == "DPO" else {}
    given = {**optimizer(lambda *a, **o: torch.optim.AdamW(*a, **o, fused=True), memory), **more}
    reference = trainer(what, memory, tmp_path / "a", more=given, **options)
    torch.manual_seed(2)
    reference.train()
    zero.page(model, store)
    more = {"ref_model": zero.page(llama(1), store, name="reference")} if more else {}
    ours = trainer(what, model, tmp_path / "b", more={**optimizer(zero.AdamW, model), **more}, **options)
    torch.manual_seed(2)
    ours.train()
    assert logged(ours) == logged(reference)
    assert same(ours.model, reference.model)
    assert not all(torch.equal(a, b) for a, b in zip(before, memory.state_dict().values(), strict=False))


def test_an_adapter_in_memory_over_a_paged_model_in_dpo(tmp_path: Path, store: TieredStore) -> None:
    """TRL makes the adapter; the base model is what answers without it."""
    reference = trainer("DPO", llama(), tmp_path / "a", more={"peft_config": LORA})
    reference.train()
    ours = trainer("DPO", zero.page(llama(), store), tmp_path / "b", more={"peft_config": LORA})
    ours.train()
    assert logged(ours) == logged(reference)
    assert same(ours.model, reference.model)


@pytest.mark.parametrize("what", quick(["SFT", "DPO"], ["DPO"]))
def test_checkpoints_of_trl_are_commits(what: str, tmp_path: Path) -> None:
    def more(ref: Any) -> dict[str, Any]:
        return {"ref_model": ref} if what == "DPO" else {}

    reference = trainer(what, llama(), tmp_path / "a", more=more(llama(1)), **SAVING)
    reference.train()

    def train(store: TieredStore, existing: str, checkpoint: Any) -> Any:
        model = zero.page(llama(), store, existing=existing)
        ref = zero.page(llama(1), store, name="reference", existing="overwrite") if what == "DPO" else None
        made = trainer(what, model, tmp_path / "b", KINDS[what][2], more(ref), **SAVING)
        made.train(resume_from_checkpoint=checkpoint)
        assert same(made.model, reference.model)
        return made

    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        ours = train(store, "refuse", None)
        assert logged(ours) == logged(reference)
        assert sorted(path.name for path in (tmp_path / "b").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
        assert not list((tmp_path / "b").rglob("*.safetensors"))
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        again = train(store, "resume", str(tmp_path / "b" / "checkpoint-3"))
        found, expected = logged(again)[-2], logged(reference)[-2]
        assert {**found, "num_tokens": expected["num_tokens"]} == expected  # which TRL counts anew when it resumes
        again.save_model(str(tmp_path / "tuned"))
        assert same(LlamaForCausalLM.from_pretrained(tmp_path / "tuned"), reference.model)
        store.close()


def test_the_adapter_that_dpo_adds_is_named(tmp_path: Path, store: TieredStore) -> None:
    """On resuming it would be a copy of the trained one."""
    with pytest.raises(MisuseError, match=r"\.ref\..*peft_config="):
        trainer("DPO", zero.page(adapted(), store), tmp_path, CommitDPO)
