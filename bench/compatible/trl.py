"""Rows that train with TRL, on data made here and with a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

import torch

from bench.compatible.hugging_face import llama, show_training
from bench.compatible.side import Side, row

GROUP = "trl"
NEEDS = ("trl", "datasets", "peft", "transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer",
         "trl.trainer.dpo_trainer")  # fmt: skip

TEXTS = ["the cat sat", "on a mat", "a dog ran far", "to the sea", "it rains", "we stay in", "read a book", "write a line"]


def tokenizer() -> Any:
    """Return a tokenizer of bytes, with three special tokens."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {one: 3 + index for index, one in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    found.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return found


def _model() -> Any:
    return llama(vocab_size=259)


def _optimizers(side: Side, model: Any) -> Any:
    return side.adamw([p for p in model.parameters() if p.requires_grad], lr=1e-3), None


def _arguments(side: Side, **options: Any) -> dict[str, Any]:
    defaults = {
        "output_dir": str(side.folder / "output"),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
    }
    return {**defaults, **options}


def _lora(model: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def _sft(side: Side, *, lora: bool = False, conversations: bool = False, completions: bool = False, **options: Any) -> None:
    import datasets
    import trl

    model = side.page(_lora(_model()) if lora else _model())
    if conversations:
        turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}] for text in TEXTS]
        data = datasets.Dataset.from_dict({"messages": turns})
    elif completions:
        data = datasets.Dataset.from_dict({"prompt": TEXTS, "completion": [text[::-1] for text in TEXTS]})
    else:
        data = datasets.Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**_arguments(side, max_length=32, **options)),
        train_dataset=data,
        processing_class=tokenizer(),
        optimizers=_optimizers(side, model),
    )
    trainer.train()
    show_training(side, trainer)


for _name, _options in {
    "full": {},
    "full, with clipping": {"max_grad_norm": 0.1},
    "conversations": {"conversations": True},
    "prompts with completions": {"completions": True},
    "packing": {"packing": True, "max_length": 24},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "LoRA": {"lora": True},
    "LoRA, with gradient checkpointing": {"lora": True, "gradient_checkpointing": True},
}.items():

    @row(GROUP, f"SFT, {_name}", needs=NEEDS, slow=3)
    def _(side: Side, options: Any = _options) -> None:
        options = dict(options)
        if options.get("max_length"):
            _packed(side, **options)
        else:
            _sft(side, **options)


def _packed(side: Side, **options: Any) -> None:
    import datasets
    import trl

    model = side.page(_model())
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**_arguments(side, **options)),
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        optimizers=_optimizers(side, model),
    )
    trainer.train()
    show_training(side, trainer)


def _pairs() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"prompt": TEXTS, "chosen": [t[::-1] for t in TEXTS], "rejected": ["no"] * len(TEXTS)})


def _dpo(side: Side, *, lora: bool = False, reference: str = "", **options: Any) -> None:
    import trl

    model = _lora(_model()) if lora else _model()
    if reference == "loaded":
        import transformers

        model.save_pretrained(side.folder / "model")
        model = transformers.LlamaForCausalLM.from_pretrained(side.folder / "model")
    side.page(model)
    ref = None
    if reference in ("memory", "paged"):
        torch.manual_seed(1)
        ref = _model().eval().requires_grad_(False)
        if reference == "paged":
            ref = side.page(ref, name="reference")
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=ref,
        args=trl.DPOConfig(**_arguments(side, max_length=32, **options)),
        train_dataset=_pairs(),
        processing_class=tokenizer(),
        optimizers=_optimizers(side, model),
    )
    trainer.train()
    show_training(side, trainer)


for _name, _options in {
    "full, a reference model in memory": {"reference": "memory"},
    "full, a paged reference model": {"reference": "paged"},
    "full, a reference model that TRL loads": {"reference": "loaded"},
    "full, precompute_ref_log_probs": {"reference": "memory", "precompute_ref_log_probs": True},
    "full, with clipping": {"reference": "memory", "max_grad_norm": 0.1},
    "LoRA": {"lora": True},
    "LoRA, with clipping": {"lora": True, "max_grad_norm": 0.1},
}.items():

    @row(GROUP, f"DPO, {_name}", needs=NEEDS, slow=3)
    def _(side: Side, options: Any = _options) -> None:
        _dpo(side, **options)


@row(GROUP, "reward model", needs=(*NEEDS, "trl.trainer.reward_trainer"), slow=3)
def _(side: Side) -> None:
    import datasets
    import transformers
    import trl

    config = llama().config
    config.vocab_size, config.num_labels = 259, 1
    model = side.page(transformers.LlamaForSequenceClassification(config))
    data = datasets.Dataset.from_dict({"chosen": [text[::-1] for text in TEXTS], "rejected": TEXTS})
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(**_arguments(side, max_length=32)),
        train_dataset=data,
        processing_class=tokenizer(),
        optimizers=_optimizers(side, model),
    )
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "GRPO", needs=(*NEEDS, "trl.trainer.grpo_trainer"), slow=4)
def _(side: Side) -> None:
    import datasets
    import trl

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(set(str(text)))) for text in completions]

    model = side.page(_model())
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**_arguments(side, max_completion_length=6, num_generations=2, max_steps=2)),
        train_dataset=datasets.Dataset.from_dict({"prompt": TEXTS}),
        processing_class=tokenizer(),
        optimizers=_optimizers(side, model),
    )
    trainer.train()
    show_training(side, trainer)
