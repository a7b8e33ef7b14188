"""Hugging Face's Trainer with paged models: the numbers of training in memory, checkpoints that are commits, weights that are
read a tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import tiered  # noqa: E402
from tests.first_calls import WRONG, refused_in_one_line  # noqa: E402
from tests.quick import quick  # noqa: E402
from tiered import MisuseError, TieredStore, UncommittedWarning, zero  # noqa: E402
from tiered.integrations.transformers import TieredCallback, TieredTrainer, from_pretrained  # noqa: E402
from tiered.integrations.transformers.training import ADAM_LIKE, OF_TORCH  # noqa: E402
from tiered.zero.paging.tensors.stored import StoredTensor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
KINDS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "attention_dropout": 0.1,
}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA | options))


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def experts() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**LLAMA, **sizes}, output_router_logits=True))


def data(count: int = 24, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "disable_tqdm": True}
    given |= {"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-3, "logging_steps": 1}
    given |= {"optim": "adamw_torch_fused", "save_strategy": "no"} | options
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    if "activation_checkpointing" not in names:  # as it was called before
        given = {name.replace("activation_", "gradient_"): value for name, value in given.items()}
    return TrainingArguments(**given)


def trainer(kind: Any, model: Any, folder: Path, more: dict[str, Any] | None = None, **options: Any) -> Any:
    args = arguments(folder, **options)
    made = kind(model=model, args=args, train_dataset=data(), eval_dataset=data(8, 2), **(more or {}))
    made.remove_callback(transformers.PrinterCallback)
    return made


def logged(made: Any) -> list[dict[str, float]]:
    """What a trainer has logged, without what depends on the clock."""
    return [{k: v for k, v in one.items() if "runtime" not in k and "per_second" not in k} for one in made.state.log_history]


def same(one: Any, other: Any) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def paged(model: Any, store: TieredStore, **options: Any) -> Any:
    return zero.page(model, store, **options)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as opened:
        yield opened
        opened.close()


# An unmodified Trainer

Made = Callable[[], Any]
CHECKPOINTED = {"activation_checkpointing": True}
CASES: dict[str, tuple[Made, dict[str, Any]]] = {
    "llama": (llama, {}),
    "gpt2": (gpt2, {}),
    "t5": (t5, {}),
    "experts": (experts, {}),
    "accumulation": (llama, {"gradient_accumulation_steps": 2}),
    "bf16": (llama, {"bf16": True}),
    "reentrant": (llama, {**CHECKPOINTED, "activation_checkpointing_kwargs": {"use_reentrant": True}}),
    "checkpoint": (llama, {**CHECKPOINTED, "activation_checkpointing_kwargs": {"use_reentrant": False}}),
    "together": (
        gpt2,
        {"bf16": True, "gradient_accumulation_steps": 2, **CHECKPOINTED}
        | {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "evaluation": (llama, {"eval_strategy": "steps", "eval_steps": 2}),
    "smoothing": (llama, {"label_smoothing_factor": 0.1}),
    "schedule": (llama, {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1}),
    "plateau": (llama, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}),
    "noise": (llama, {"neftune_noise_alpha": 5.0}),
    "unclipped": (llama, {"max_grad_norm": 0.0}),
    "epochs": (llama, {"max_steps": -1, "num_train_epochs": 2}),
}


@pytest.mark.parametrize("case", quick(CASES, ["llama", "t5", "together", "evaluation"]))
def test_trainer_computes_as_in_memory(case: str, tmp_path: Path, store: TieredStore) -> None:
    make, options = CASES[case]
    reference = trainer(Trainer, make(), tmp_path / "a", **options)
    reference.train()
    given = {"optimizer_cls_and_kwargs": (zero.AdamW, dict(KINDS))}
    ours = trainer(Trainer, paged(make(), store), tmp_path / "b", given, **options)
    ours.train()
    assert logged(ours) == logged(reference)
    assert same(ours.model, reference.model)
    expected, found = (one.predict(data(8, 3)) for one in (reference, ours))
    assert found.metrics["test_loss"] == expected.metrics["test_loss"]


@pytest.mark.parametrize("name", ["adamw_torch_fused", "sgd"])
def test_a_trainer_without_an_optimizer_says_which_lines_make_one(name: str, tmp_path: Path, store: TieredStore) -> None:
    reference = trainer(Trainer, llama(), tmp_path / "a", optim=name)
    reference.train()
    model = paged(llama(), store)
    with pytest.raises(MisuseError, match=r"make tiered\.zero\.(AdamW|SGD)") as raised:
        trainer(Trainer, model, tmp_path / "b", optim=name).train()
    imported, made = str(raised.value).splitlines()[1:]
    assert imported == "    from tiered import zero"
    pair = re.fullmatch(r"    Trainer\(\.\.\., optimizer_cls_and_kwargs=(.*)\)", made)
    assert pair is not None
    model.load_state_dict(llama().state_dict())
    ours = trainer(Trainer, model, tmp_path / "c", {"optimizer_cls_and_kwargs": eval(pair[1], {"zero": zero})})
    ours.train()
    assert logged(ours) == logged(reference)
    assert same(ours.model, reference.model)


def test_an_optimizer_that_is_given_and_groups_of_its_own(tmp_path: Path, store: TieredStore) -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        vectors = [p for p in model.parameters() if p.dim() < 2]
        return [{"params": vectors, "lr": 1e-2}, {"params": [p for p in model.parameters() if p.dim() > 1]}]

    memory, model = llama(), paged(llama(), store)
    given = {"optimizers": (torch.optim.AdamW(groups(memory), weight_decay=0.1, fused=True), None)}
    reference = trainer(Trainer, memory, tmp_path / "a", given)
    reference.train()
    ours = trainer(Trainer, model, tmp_path / "b", {"optimizers": (zero.AdamW(groups(model), weight_decay=0.1), None)})
    ours.train()
    assert logged(ours) == logged(reference)
    assert same(model, memory)
    for one in (reference, ours):
        torch.manual_seed(2)
        one.train()  # on, with the same optimizer
    assert same(model, memory)


@pytest.mark.soak
def test_the_best_of_ordinary_checkpoints_is_loaded_at_the_end(tmp_path: Path, store: TieredStore) -> None:
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    options |= {"save_steps": 1, "save_total_limit": 2, "learning_rate": 0.05}
    reference = trainer(Trainer, llama(), tmp_path / "a", **options)
    reference.train()
    given = {"optimizer_cls_and_kwargs": (zero.AdamW, {**KINDS, "lr": 0.05})}
    ours = trainer(Trainer, paged(llama(), store), tmp_path / "b", given, **options)
    ours.train()
    assert ours.state.best_global_step == reference.state.best_global_step != 4
    assert same(ours.model, reference.model)


def test_ordinary_checkpoints_are_those_of_memory_and_lead_both_ways(tmp_path: Path, store: TieredStore) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    reference = trainer(Trainer, llama(), tmp_path / "a", **options)
    reference.train()
    given = {"optimizer_cls_and_kwargs": (zero.AdamW, dict(KINDS))}
    ours = trainer(Trainer, paged(llama(), store), tmp_path / "b", given, **options)
    ours.train()
    expected, found = (load_file(tmp_path / name / "checkpoint-2" / "model.safetensors") for name in "ab")
    assert found.keys() == expected.keys()  # each tied weight once
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = trainer(Trainer, llama(), tmp_path / "c", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert same(again.model, reference.model)
    model = paged(llama(), store, existing="overwrite")
    for kind in (Trainer, TieredTrainer):
        back = trainer(kind, model, tmp_path / "d", given, **options)
        back.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
        assert same(model, reference.model)
        assert logged(back)[-2]["loss"] == logged(reference)[-2]["loss"]


def test_save_pretrained_writes_each_tied_weight_once(tmp_path: Path, store: TieredStore) -> None:
    memory, model = llama(), paged(llama(), store)
    for made, name in ((memory, "a"), (model, "b")):
        made.save_pretrained(tmp_path / name, max_shard_size="100KB")
    there = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == there
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in there)


def test_generation_is_that_of_memory(store: TieredStore) -> None:
    tokens, options = data()[0]["input_ids"][None], {"max_new_tokens": 6, "pad_token_id": 0}
    memory, model = llama().eval(), paged(llama().eval(), store)
    for beams in (1, 3):
        expected, found = (one.generate(tokens, num_beams=beams, do_sample=False, **options) for one in (memory, model))
        assert torch.equal(found, expected)
        with zero.gathered(model):
            assert torch.equal(model.generate(tokens, num_beams=beams, do_sample=False, **options), expected)


def test_what_is_frozen_beside_an_adapter_is_never_written(tmp_path: Path) -> None:
    """A step writes the adapter and its moments; and the frozen rest of each layer is a unit of its own after a resume, too."""
    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 300}

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))

    def step(model: Any, optimizer: Any, number: int) -> float:
        ids = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    reference = made(0)
    theirs = torch.optim.AdamW([one for one in reference.parameters() if one.requires_grad], lr=1e-2, fused=True)
    expected = [step(reference, theirs, number) for number in range(8)]
    adapter = sum(one.nbytes for one in reference.parameters() if one.requires_grad)
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = zero.page(made(0), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        assert [step(model, optimizer, number) for number in range(2)] == expected[:2]
        before = store.statistics().links[-1].down.bytes
        assert [step(model, optimizer, number) for number in range(2, 6)] == expected[2:6]
        written = (store.statistics().links[-1].down.bytes - before) / 4
        assert written < 4.5 * adapter < sum(one.nbytes for one in reference.parameters()) / 4  # gradients, too
        zero.commit(model, optimizer)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = made(1)
        model.requires_grad_(True)  # which says nothing of how the commit was divided
        zero.page(model, store, existing="resume")
        for name, one in model.named_parameters():
            one.requires_grad_("lora_" in name)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        zero.resume(model, optimizer)
        assert [step(model, optimizer, number) for number in range(6, 8)] == expected[6:]
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in reference.state_dict().items())
        store.close()


def test_what_cannot_be_says_so(tmp_path: Path, store: TieredStore) -> None:
    model = paged(llama(), store)
    with pytest.raises(MisuseError, match=r"make tiered\.zero\.AdamW"):
        trainer(Trainer, model, tmp_path).train()
    with pytest.raises(MisuseError, match="cannot change in the store while there are gradients"):
        model.resize_token_embeddings(80)
    with pytest.raises(MisuseError, match="cannot change in the store"):
        trainer(Trainer, model, tmp_path, bf16_full_eval=True).evaluate()
    with pytest.raises(MisuseError, match="bf16=True for autocast"):
        trainer(TieredTrainer, model, tmp_path, bf16_full_eval=True)
    with pytest.raises(MisuseError, match="optim='adamw_torch_fused'"):
        trainer(TieredTrainer, model, tmp_path, optim="adafactor").train()
    with pytest.raises(MisuseError, match="is not paged"):
        trainer(TieredTrainer, llama(), tmp_path)
    with pytest.raises(MisuseError, match=r"on cuda.*TrainingArguments\(use_cpu=True\)"):
        trainer(TieredTrainer, model, tmp_path)._move_model_to_device(model, torch.device("cuda"))
    packed = paged(llama(), store, name="packed", policy=zero.Policy(quantize="int8"))
    with pytest.raises(MisuseError, match=r"for reading only: train an adapter over it \(peft\.get_peft_model\)"):
        trainer(TieredTrainer, packed, tmp_path).train()
    assert trainer(TieredTrainer, packed, tmp_path, eval_strategy="no").evaluate(data())["eval_loss"] > 0
    with pytest.raises(MisuseError, match="a whole number from 1 on"):
        TieredCallback(0)
    with pytest.raises(MisuseError, match="does nothing without"):
        TieredCallback()


def test_the_end_of_the_block_commits_a_training_that_saved_nothing(tmp_path: Path) -> None:
    def made(store: TieredStore, existing: str) -> Any:
        return trainer(TieredTrainer, paged(llama(), store, existing=existing), tmp_path, lr_scheduler_type="cosine")

    folder = tmp_path / "store"
    with warnings.catch_warnings(), TieredStore.open(folder, dram="4MiB") as store:
        warnings.simplefilter("error", UncommittedWarning)
        first = made(store, "refuse")
        first.train()
        expected = {name: value.clone() for name, value in first.model.state_dict().items()}
    with TieredStore.open(folder, dram="4MiB") as store:
        again = made(store, "resume")
        again.create_optimizer_and_scheduler(4)
        model = again.model
        zero.resume(model, again.optimizer, scheduler=again.lr_scheduler)
        assert again.lr_scheduler.state_dict() == first.lr_scheduler.state_dict()
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        store.close()


def test_a_training_goes_on_from_the_end_of_a_block_that_saved_nothing(tmp_path: Path) -> None:
    """Again and again, bit for bit; and not with a state of before steps that somebody else made."""

    def made(store: TieredStore, existing: str, steps: int, **options: Any) -> Any:
        model = paged(llama(), store, existing=existing)
        return trainer(TieredTrainer, model, tmp_path / "out", lr_scheduler_type="constant", max_steps=steps, **options)

    with TieredStore.open(tmp_path / "whole", dram="4MiB") as store:
        whole = made(store, "refuse", 6)
        whole.train()
        expected = {name: value.clone() for name, value in whole.model.state_dict().items()}
        store.close()
    folder = tmp_path / "store"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncommittedWarning)
        for steps in (2, 4, 6):
            with TieredStore.open(folder, dram="4MiB") as store:
                one = made(store, "refuse" if steps == 2 else "resume", steps)
                one.train(resume_from_checkpoint=steps > 2)
                assert one.state.global_step == steps
        with TieredStore.open(folder, dram="4MiB") as store:
            model = paged(llama(), store, existing="resume")
            found = model.state_dict()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        with TieredStore.open(folder, dram="4MiB") as store:
            one = made(store, "resume", 8)
            one.train(resume_from_checkpoint=True)
            one.model(**{name: value[None] for name, value in data()[0].items()}).loss.backward()
            one.optimizer.step()
    with TieredStore.open(folder, dram="4MiB") as store:
        one = made(store, "resume", 2)
        with pytest.raises(MisuseError, match=r"has no state of a Trainer: .* zero\.resume\(model, trainer\.create_opt"):
            one.train(resume_from_checkpoint=True)
        optimizer = one.create_optimizer()
        zero.resume(one.model, optimizer, scheduler=one.create_scheduler(2))
        assert set(optimizer.steps.values()) == {9}
        one.train()
        assert set(optimizer.steps.values()) == {11}
        store.close()


# Adapters


def test_an_adapter_over_a_paged_model(tmp_path: Path, store: TieredStore) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    options = {"save_strategy": "steps", "save_steps": 2, "label_names": ["labels"]}
    reference = trainer(Trainer, peft.get_peft_model(llama(), config), tmp_path / "a", **options)
    reference.train()
    around = trainer(Trainer, peft.get_peft_model(paged(llama(), store), config), tmp_path / "b", **options)
    around.train()  # the adapter stays in memory, with torch's optimizer
    assert logged(around) == logged(reference)
    model = paged(peft.get_peft_model(llama(), config), store, existing="overwrite")
    whole = trainer(TieredTrainer, model, tmp_path / "c", **options)
    whole.train()
    assert logged(whole) == logged(reference)
    assert same(model, reference.model)
    with pytest.raises(MisuseError, match=r"after peft\.get_peft_model"):
        trainer(TieredTrainer, around.model, tmp_path)
    whole.save_model(str(tmp_path / "adapter"))
    reference.save_model(str(tmp_path / "reference"))
    file = "adapter_model.safetensors"
    assert (tmp_path / "adapter" / file).read_bytes() == (tmp_path / "reference" / file).read_bytes()
    assert same(model.merge_and_unload(), reference.model.merge_and_unload())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("saved", [["lm_head"], ["model.embed_tokens"], ["lm_head", "embed_tokens"], None])
def test_modules_of_a_paged_base_are_saved_with_an_adapter(store: TieredStore, saved: list[str] | None, tied: bool) -> None:
    """peft trains a copy of them, in memory as the adapter is; an optimizer of torch leaves the frozen base alone."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=saved, ensure_weight_tying=tied)
    results = []
    for page in (False, True):
        base = llama(tie_word_embeddings=tied)
        torch.manual_seed(1)
        model = peft.get_peft_model(paged(base, store) if page else base, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens, losses = data()[0]["input_ids"][None], []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append((losses, peft.get_peft_model_state_dict(model)))
    (losses, wanted), (same_losses, found) = results
    assert same_losses == losses
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("kind", ["LoRA", "AdaLoRA", "VeRA", "a head", "two"])
def test_of_a_base_nothing_is_read_to_save_an_adapter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft makes a dict of all values, the base's among them, before it takes those of the adapter."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    config: Any = peft.LoraConfig(r=4, **options, modules_to_save=["lm_head"] if kind == "a head" else None)
    if kind == "AdaLoRA":
        config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=4, **options)
    elif kind == "VeRA":
        config = peft.VeraConfig(r=4, **options)

    def prepared(base: Any) -> Any:
        torch.manual_seed(0)
        model = peft.get_peft_model(base, config)
        if kind == "two":
            model.add_adapter("other", peft.LoraConfig(r=2, **options))
        return model

    trainer(Trainer, prepared(llama()), tmp_path).save_model(str(tmp_path / "reference"))
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        made = trainer(TieredTrainer, paged(prepared(llama()), store), tmp_path)
        copied: list[int] = []
        clone = StoredTensor.clone
        monkeypatch.setattr(StoredTensor, "clone", lambda one: copied.append(one.numel()) or clone(one))
        made.save_model(str(tmp_path / "saved"))
        whole = sum(parameter.numel() for parameter in made.model.parameters())
        assert sum(copied) < whole / (2 if kind == "a head" else 5)
        store.close()
    files = sorted(path.relative_to(tmp_path / "reference") for path in (tmp_path / "reference").rglob("*.safetensors"))
    assert len(files) == (2 if kind == "two" else 1)
    for file in files:
        assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "reference" / file).read_bytes()


def test_an_adapter_is_made_before_paging_and_resumed(tmp_path: Path, pretrained: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    options = {**SAVING, "label_names": ["labels"]}

    def prepared(store: TieredStore, existing: str) -> Any:
        torch.manual_seed(0)
        given = {"existing": existing, "prepare": lambda model: peft.get_peft_model(model, config)}
        return from_pretrained(AutoModelForCausalLM, pretrained / "llama", store, **given)

    torch.manual_seed(0)
    reference = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(pretrained / "llama"), config)
    trainer(Trainer, reference, tmp_path / "a", **{**options, "save_strategy": "no"}).train()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = prepared(store, "refuse")
        trainer(TieredTrainer, model, tmp_path / "b", **options).train()
        assert same(model, reference)
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:  # and its end has committed nothing new
        model = prepared(store, "resume")
        trainer(TieredTrainer, model, tmp_path / "b", **options).train(str(tmp_path / "b" / "checkpoint-4"))
        assert same(model, reference)
        store.close()


def test_an_adapter_that_is_made_after_paging_is_in_a_commit(tmp_path: Path) -> None:
    """Its parameters are in memory, where an optimizer of torch trains them."""
    peft = pytest.importorskip("peft")

    def adapted(store: TieredStore, existing: str) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = peft.get_peft_model(paged(llama(), store, existing=existing), peft.LoraConfig(r=2, target_modules=["q_proj"]))
        return model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)

    def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(2):
            tokens = torch.arange(8)[None]
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model, optimizer = adapted(store, "refuse")
        trained(model, optimizer)
        zero.commit(model, extra={"optimizer": optimizer.state_dict()})
        expected = trained(model, optimizer)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model, optimizer = adapted(store, "resume")
        optimizer.load_state_dict(zero.resume(model)["optimizer"])
        assert trained(model, optimizer) == expected
        zero.commit(model)  # without an extra
        trained(model, optimizer)
        kept = {name: one.detach().clone() for name, one in model.named_parameters() if "lora" in name}
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:  # the end of the block has them
        model, _ = adapted(store, "resume")
        assert zero.resume(model) is None
        assert kept
        assert all(torch.equal(model.get_parameter(name), value) for name, value in kept.items())


def test_embeddings_are_resized_before_paging(store: TieredStore, pretrained: Path) -> None:
    torch.manual_seed(1)
    expected = AutoModelForCausalLM.from_pretrained(pretrained / "llama")
    expected.resize_token_embeddings(80)

    def resized(model: Any) -> Any:
        model.resize_token_embeddings(80)
        return model

    torch.manual_seed(1)
    assert same(from_pretrained(AutoModelForCausalLM, pretrained / "llama", store, prepare=resized), expected)


@pytest.mark.parametrize("name", quick(OF_TORCH, list(OF_TORCH)[:1]))
def test_other_optimizers_of_trainer(name: str, tmp_path: Path, store: TieredStore) -> None:
    reference = trainer(Trainer, llama(), tmp_path / "a", optim=name)
    reference.train()
    found = trainer(TieredTrainer, paged(llama(), store), tmp_path / "b", optim=name)
    found.train()
    assert type(getattr(found.optimizer, "optimizer", found.optimizer)).__module__.startswith("tiered")
    assert same(found.model, reference.model)


@pytest.mark.parametrize("name", [*ADAM_LIKE, *OF_TORCH])
def test_names_of_trainers_optimizers(name: str, store: TieredStore, tmp_path: Path) -> None:
    """``optim`` gives the class of that algorithm, with the values of TrainingArguments."""
    given = {"learning_rate": 0.02, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1}
    made = trainer(TieredTrainer, paged(llama(), store), tmp_path, optim=name, **given).create_optimizer()
    words = {"8bit": zero.AdamW8bit, "4bit": zero.AdamW4bit, "lion": zero.Lion, "adamw": zero.AdamW}
    expected = next((kind for word, kind in words.items() if word in name), None)
    assert type(made) is expected if expected else type(made).__name__.lower() == name
    assert {group["lr"] for group in made.param_groups} == {0.02}
    assert {group["weight_decay"] for group in made.param_groups} == {0.0, 0.1}
    if name in ADAM_LIKE:
        assert all(tuple(group["betas"]) == (0.8, 0.95) and group.get("eps", 1e-6) == 1e-6 for group in made.param_groups)


# Checkpoints that are commits

SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}


@pytest.mark.parametrize("name", quick(["sgd", "adamw_8bit", "lion_32bit", "muon"], ["adamw_8bit", "muon"]))
def test_commits_of_other_optimizers_are_gone_on_from(name: str, tmp_path: Path) -> None:
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")

    def begun(store: TieredStore, existing: str) -> Any:
        model = paged(llama(), store, existing=existing)
        if name == "muon":
            return trainer(TieredTrainer, model, tmp_path / "a", {"optimizers": (zero.Muon(model), None)}, **SAVING)
        return trainer(TieredTrainer, model, tmp_path / "a", **SAVING, optim=name)

    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=5) as store:
        whole = begun(store, "refuse")
        whole.train()
        expected = {key: value.clone() for key, value in whole.model.state_dict().items()}
        states = whole.optimizer.state_dict()["state"]
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=5) as store:
        again = begun(store, "overwrite")
        again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
        assert logged(again)[-4:-1] == logged(whole)[-4:-1]
        found = again.model.state_dict()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        assert_states(again.optimizer.state_dict()["state"], states)
        store.close()


def assert_states(found: Any, expected: Any) -> None:
    """States of two optimizers are the same."""
    assert found.keys() == expected.keys()
    for index, state in expected.items():
        assert all(torch.equal(torch.as_tensor(found[index][name]), torch.as_tensor(value)) for name, value in state.items())


def commits(folder: Path) -> dict[str, int]:
    files = sorted(folder.glob("checkpoint-*/tiered.json"))
    return {path.parent.name: json.loads(path.read_text())["generation"] for path in files}


def test_checkpoints_are_commits_and_training_goes_on_from_them(tmp_path: Path) -> None:
    options = {**SAVING, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    reference = trainer(Trainer, llama(), tmp_path / "a", optim="adamw_torch", **options)
    reference.optimizer_cls_and_kwargs = (torch.optim.AdamW, {**KINDS, "fused": True})
    reference.train()

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    def begun(store: TieredStore, existing: str, stops: bool) -> Any:
        model = paged(llama(), store, existing=existing)
        return trainer(TieredTrainer, model, tmp_path / "b", {"callbacks": [Stop()] if stops else []}, **options)

    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        first = begun(store, "refuse", stops=True)
        with pytest.raises(KeyboardInterrupt):
            first.train()
        store.close()
    assert commits(tmp_path / "b") == {"checkpoint-1": 1, "checkpoint-2": 2}
    weights = [path for path in (tmp_path / "b").rglob("*") if path.suffix in (".safetensors", ".pt", ".bin", ".pth")]
    assert not weights
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        (tmp_path / "b" / "checkpoint-2" / "tiered.json").unlink()  # the commit knows
        second = begun(store, "resume", stops=True)
        with pytest.raises(KeyboardInterrupt):  # once more, after nothing was done
            second.train(resume_from_checkpoint=True)
        assert second.state.global_step == 3
        second.remove_callback(Stop)
        second.train(resume_from_checkpoint=True)  # by the folder: the store has changed since
        assert logged(second)[-4:-1] == logged(reference)[-4:-1]
        assert same(second.model, reference.model)
        assert list(commits(tmp_path / "b")) == ["checkpoint-4", "checkpoint-5"]  # keep=2
        assert tuple(commits(tmp_path / "b").values()) == store.generations
        third = begun(store, "overwrite", stops=False)
        third.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))
        assert same(third.model, reference.model)
        (tmp_path / "b" / "checkpoint-5" / "tiered.json").write_text('{"generation": 1}')
        with pytest.raises(MisuseError, match="is not there any more"):
            third.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-5"))
        store.close()


def test_a_limit_of_checkpoints_holds_over_a_resumed_training(tmp_path: Path) -> None:
    constant = {**SAVING, "lr_scheduler_type": "constant"}
    reference = trainer(Trainer, llama(), tmp_path / "a", **{**constant, "save_strategy": "no"})
    reference.train()
    for existing, steps in (("refuse", 3), ("resume", 5)):
        with TieredStore.open(tmp_path / "store", dram="1MiB", keep=9) as store:
            model = paged(llama(), store, existing=existing)
            options = {**constant, "save_total_limit": 2, "max_steps": steps}
            ours = trainer(TieredTrainer, model, tmp_path / "b", **options)
            ours.train(resume_from_checkpoint=existing == "resume")
            assert sorted(commits(tmp_path / "b")) == [f"checkpoint-{steps - 1}", f"checkpoint-{steps}"]
            assert tuple(commits(tmp_path / "b").values()) == store.generations
            assert same(model, reference.model) is (steps == 5)
            store.close()


def test_each_training_in_a_store_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    """Of several in one open store: with a limit, stopped by an exception, without a limit; and commits of the program."""

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=9) as store:
        program = store.commit({"step": "of the program"})
        for name, limit, callbacks in (("a", 1, []), ("b", 1, [Stop()]), ("c", None, [])):
            model = paged(llama(), store, existing="overwrite")
            ours = trainer(TieredTrainer, model, tmp_path / name, {"callbacks": callbacks}, **SAVING, save_total_limit=limit)
            if callbacks:
                with pytest.raises(KeyboardInterrupt):
                    ours.train()
            else:
                ours.train()
        assert list(commits(tmp_path / "a")) == ["checkpoint-5"]
        assert list(commits(tmp_path / "b")) == ["checkpoint-2"]
        assert list(commits(tmp_path / "c")) == [f"checkpoint-{step}" for step in range(1, 6)]
        named = [number for name in "abc" for number in commits(tmp_path / name).values()]
        assert store.generations == (program, *named)
        for _ in range(9):  # what has a limit stays until its training drops it
            store.commit()
        assert store.generations[:2] == (*commits(tmp_path / "a").values(), *commits(tmp_path / "b").values())
        assert len(store.generations) == 2 + 9
        store.close()


def test_checkpoints_of_another_store_are_no_commits_of_this_one(tmp_path: Path) -> None:
    """They have the same numbers. Nothing of them is loaded, or deleted."""
    for name, steps in (("old", 5), ("new", 2)):
        with TieredStore.open(tmp_path / name, dram="1MiB", keep=1 if name == "new" else 9) as store:
            options = {**SAVING, "max_steps": steps, "lr_scheduler_type": "constant"}
            ours = trainer(TieredTrainer, paged(llama(), store), tmp_path / "run", **options)
            ours.train()
            assert list(commits(tmp_path / "run")) == [f"checkpoint-{step}" for step in range(1 if name == "old" else 2, 6)]
            if name == "new":
                assert store.generations == (2,)
                (tmp_path / "run" / "checkpoint-3" / "tiered.json").write_text('{"generation": 2, "mark": "another"}')
                with pytest.raises(MisuseError, match=r"generation 2 of .* is of another training than this checkpoint"):
                    ours.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
            store.close()


def test_the_best_commit_stays_and_is_loaded_at_the_end(tmp_path: Path) -> None:
    options = {**SAVING, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.05}
    reference = trainer(Trainer, llama(), tmp_path / "a", **options, save_total_limit=2)
    reference.train()
    assert reference.state.best_global_step < 4
    for limit, name in ((2, "b"), (None, "c")):
        with TieredStore.open(tmp_path / f"store-{name}", dram="1MiB") as store:
            ours = trainer(TieredTrainer, paged(llama(), store), tmp_path / name, **options, save_total_limit=limit)
            ours.train()
            assert logged(ours) == logged(reference)
            assert same(ours.model, reference.model)
            best = f"checkpoint-{ours.state.best_global_step}"
            assert sorted(commits(tmp_path / name)) == [best, *(["checkpoint-4"] * (limit is None)), "checkpoint-5"]
            assert set(commits(tmp_path / name).values()) == set(store.generations)
            store.close()


def test_a_callback_commits_in_any_trainer(tmp_path: Path) -> None:
    options = {"max_steps": 5}
    reference = trainer(Trainer, llama(), tmp_path / "a", **options)
    reference.train()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        given = {"optimizer_cls_and_kwargs": (zero.AdamW, dict(KINDS)), "callbacks": [TieredCallback(3)]}
        ours = trainer(Trainer, paged(llama(), store), tmp_path / "b", given, **options)
        ours.train()
        assert (store.generation, store.meta) == (1, {"step": 3})
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        again = trainer(TieredTrainer, paged(llama(), store, existing="resume"), tmp_path / "b", **options)
        again.train(resume_from_checkpoint=True)
        assert same(again.model, reference.model)
        store.close()


@pytest.mark.parametrize("only_model", quick([False, True], [True]))
def test_models_are_saved_by_exports(tmp_path: Path, store: TieredStore, only_model: bool) -> None:
    ours = trainer(TieredTrainer, paged(llama(), store), tmp_path / "out", **SAVING, save_only_model=only_model)
    ours.train()
    assert (store.generation == 0) is only_model
    folder = tmp_path / "out" / "checkpoint-5" if only_model else tmp_path / "saved"
    if not only_model:
        ours.save_model(str(folder))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert same(LlamaForCausalLM.from_pretrained(folder), ours.model)


# Reading weights


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    llama().save_pretrained(folder / "llama", max_shard_size="100KB")
    torch.manual_seed(0)
    LlamaModel(LlamaConfig(**LLAMA)).save_pretrained(folder / "base")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**{**LLAMA, **sizes})).save_pretrained(folder / "mixtral")
    gpt2().to(torch.bfloat16).save_pretrained(folder / "gpt2")
    return folder


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (AutoModelForCausalLM, "llama"),
        (LlamaForCausalLM, "base"),
        (LlamaForSequenceClassification, "llama"),
        (AutoModelForCausalLM, "mixtral"),
        (AutoModelForCausalLM, "gpt2"),
    ],
)
def test_weights_come_into_the_store_as_transformers_reads_them(
    cls: Any, name: str, dtype: Any, pretrained: Path, store: TieredStore
) -> None:
    torch.manual_seed(1)
    expected = cls.from_pretrained(pretrained / name, dtype=dtype)
    torch.manual_seed(1)
    model = from_pretrained(cls, pretrained / name, store, dtype=dtype, micro_batch=1)
    assert type(model) is type(expected)
    assert not model.training
    assert same(model, expected)
    assert all(a.dtype == b.dtype for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    tied = model.get_output_embeddings()
    if tied is not None:
        assert (tied.weight is model.get_input_embeddings().weight) is model.config.tie_word_embeddings
    tokens = data()[0]["input_ids"][None]
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


def test_no_more_than_the_window_is_in_memory(
    tmp_path: Path, store: TieredStore, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[Any] = []
    init = zero.init
    monkeypatch.setattr(zero, "init", lambda store: blocks.append(init(store)) or blocks[-1])
    model = from_pretrained(AutoModelForCausalLM, pretrained / "llama", store)
    found = blocks[0].statistics()
    assert found.peak <= found.limit < sum(p.nbytes for p in model.parameters()) // 2
    with TieredStore.open(tmp_path / "other", dram="2MiB") as other:
        large = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": 4096})).eval()  # more than a third of the pool
        large.save_pretrained(tmp_path / "large")
        assert same(from_pretrained(AutoModelForCausalLM, tmp_path / "large", other), large)
        assert blocks[1].statistics().peak == 0
        other.close()


def test_a_committed_model_is_resumed_without_reading_weights(tmp_path: Path, pretrained: Path) -> None:
    folder = tmp_path / "config"
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:  # which commits at its end
        model = from_pretrained(AutoModelForCausalLM, pretrained / "gpt2", store)
        ours = trainer(TieredTrainer, model, tmp_path / "out", **SAVING)
        ours.train()
        ours.evaluate()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        model.config.save_pretrained(folder)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = from_pretrained(AutoModelForCausalLM, folder, store, existing="resume")
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        again = trainer(TieredTrainer, model, tmp_path / "out", **{**SAVING, "max_steps": 6})
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 6
        store.close()


@pytest.mark.parametrize("option", [{"torch_dtype": torch.bfloat16}, {"dtype": "torch.bfloat16"}, {"dtype": None}], ids=str)
def test_a_type_means_the_same_again(store: TieredStore, pretrained: Path, option: dict[str, Any]) -> None:
    first, again = (
        from_pretrained(AutoModelForCausalLM, pretrained / "llama", store, existing=existing, **option)
        for existing in ("refuse", "overwrite")
    )
    zero.commit(again)
    assert first.dtype == again.dtype == (torch.float32 if None in option.values() else torch.bfloat16)


def test_folders_and_options_that_cannot_be_read_are_named(tmp_path: Path, store: TieredStore, pretrained: Path) -> None:
    with pytest.raises(MisuseError, match="some/model is no folder here, and the hub does not give it"):
        from_pretrained(AutoModelForCausalLM, "some/model", store)
    llama().config.save_pretrained(tmp_path / "pickled")
    torch.save(llama().state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(MisuseError, match=r"neither model\.safetensors nor"):
        from_pretrained(AutoModelForCausalLM, tmp_path / "pickled", store)
    with pytest.raises(MisuseError, match="device_map=: the store decides"):
        from_pretrained(AutoModelForCausalLM, pretrained / "llama", store, device_map="auto")
    for dtype, given in ((torch.int8, "torch.int8"), ("int8", "torch.int8"), ("bfloat", "'bfloat'"), (16, "16")):
        for existing in ("refuse", "resume"):
            with pytest.raises(MisuseError, match=rf"^dtype is torch\.float32, .*, 'auto' or None, not {given}$"):
                from_pretrained(AutoModelForCausalLM, pretrained / "llama", store, dtype=dtype, existing=existing)
    for prepare, told in (("peft", "and 'peft' is none"), (lambda base: base.eval() and None, "this one returned None")):
        with pytest.raises(MisuseError, match=rf"prepare= is a function .* returns what is paged .*{told}"):
            from_pretrained(AutoModelForCausalLM, pretrained / "llama", store, prepare=prepare)
    with pytest.raises(MisuseError, match=r"quantization_config=: .* give policy=zero\.Policy\(quantize='nf4'\)"):
        from_pretrained(AutoModelForCausalLM, pretrained / "llama", store, quantization_config={"load_in_4bit": True})
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(MisuseError, match="has an adapter"):
        from_pretrained(AutoModelForCausalLM, tmp_path, store)
    assert list(store) == []


def test_a_callback_writes_a_page_of_the_training(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = zero.page(llama(), store)
        machine = {"read": 1e9, "write": 1e9}
        plan = tiered.plan(llama(), workload=tiered.Workload(4, 8), machine=machine, dram="2MiB")
        optimizer = zero.AdamW(model.parameters(), **KINDS)
        callback = TieredCallback(report=tmp_path / "run.html", plan=plan)
        more = {"optimizers": (optimizer, None), "callbacks": [callback]}
        trainer(Trainer, model, tmp_path / "out", more, max_steps=9).train()
        assert store.generation == 0  # it commits nothing
    text = (tmp_path / "run.html").read_text()
    shown = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert shown["title"].startswith("LlamaForCausalLM of ")
    assert shown["losses"]["steps"] == list(range(1, 10))
    assert shown["series"]["step"] == list(range(1, 10))
    assert [step[0] for step in shown["timeline"]["steps"]] == ["step 6", "step 7", "step 8"]
    assert {name for name, *_ in shown["compared"]} >= {"a step", "read in a step", "written in a step"}
    assert shown["run"]["arguments"]["max_steps"] == 9


def test_first_calls_with_wrong_types_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused_in_one_line("tiered.integrations.transformers") >= 5 * len(WRONG)


def test_an_adapter_is_loaded_into_a_paged_model_without_memory_for_what_it_replaces(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path)
    found = []
    with TieredStore.open(None, dram="4MiB") as store:
        for model in (llama(), zero.page(llama(), store)):
            adapted = peft.PeftModel.from_pretrained(model, tmp_path, low_cpu_mem_usage=True)
            found.append(adapted(input_ids=torch.arange(8).view(1, 8)).logits.detach())
    assert torch.equal(*found)
