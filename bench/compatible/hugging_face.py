"""Rows that use transformers and accelerate around a model: Trainer, generation, saving."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import utils

from bench.compatible.side import Side, drawn, row, tokens
from tiered import zero

GROUP = "hugging_face"
NEEDS = ("transformers", "transformers.trainer", "transformers.models.llama.modeling_llama", "transformers.generation.utils")
ACCELERATE = ("accelerate", "transformers.models.llama.modeling_llama")


def llama(**options: Any) -> Any:
    """Return a small Llama of 1 MiB."""
    import transformers

    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **options}))


def samples(count: int = 16, lengths: tuple[int, ...] = (16,)) -> list[dict[str, torch.Tensor]]:
    """Return samples of token numbers, of these lengths in turn."""
    found = [tokens(number, lengths[number % len(lengths)], below=250) + 3 for number in range(count)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in found]


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate samples of unequal lengths."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([one["input_ids"] for one in batch], batch_first=True)
    labels = pad([one["labels"] for one in batch], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def trainer_of(
    side: Side, model: Any = None, *, kind: Any = None, optimizer: Any = None, data: Any = None, extra: Any = None, **args: Any
) -> Any:
    """Make a Trainer of a paged model. ``optimizer``: makes ``optimizers=``; ``extra``: other arguments of the Trainer."""
    import transformers

    model = side.page(llama() if model is None else model)
    defaults = {
        "output_dir": str(side.folder / "output"),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    options = dict(extra or {})
    if "optimizer_cls_and_kwargs" not in options:
        made = optimizer(model) if optimizer else side.adamw(model.parameters(), lr=1e-3)
        options["optimizers"] = (made, None)
    return (kind or transformers.Trainer)(
        model=model,
        args=transformers.TrainingArguments(**{**defaults, **args}),
        train_dataset=samples() if data is None else data,
        eval_dataset=samples(8),
        **options,
    )


def show_training(side: Side, trainer: Any) -> None:
    """Show what was logged, and the model."""
    timed = ("time", "per_second", "flos")
    log = [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in trainer.state.log_history
    ]
    side.show("log", log)
    side.show_model(trainer.model)


def training(name: str, model: Callable[[], Any] | None = None, **options: Any) -> None:
    """Register a setting of the Trainer."""

    @row(GROUP, f"Trainer, {name}", needs=NEEDS, slow=3)
    def _(side: Side) -> None:
        trainer = trainer_of(side, model() if model else None, **options)
        trainer.train()
        show_training(side, trainer)


training("clipping (max_grad_norm=1, the default)")
training("without clipping (max_grad_norm=0)", max_grad_norm=0.0)
training("max_grad_norm=0.1", max_grad_norm=0.1)
training("gradient_accumulation_steps=2", gradient_accumulation_steps=2, per_device_train_batch_size=2)
training("gradient_accumulation_steps=2, without clipping", gradient_accumulation_steps=2, max_grad_norm=0.0)
training("bf16 autocast", bf16=True)
training("bf16 autocast, without clipping", bf16=True, max_grad_norm=0.0)
for _reentrant in (True, False):
    training(
        f"gradient_checkpointing, use_reentrant={_reentrant}",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": _reentrant},
        max_grad_norm=0.0,
    )
training("evaluation each step", eval_strategy="steps", eval_steps=1, max_grad_norm=0.0)
training("eval_on_start", eval_strategy="steps", eval_steps=2, eval_on_start=True, max_grad_norm=0.0)
training("label smoothing", label_smoothing_factor=0.1, max_grad_norm=0.0)
training("warmup_steps=2", warmup_steps=2, max_grad_norm=0.0)
for _schedule, _kwargs in {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "reduce_lr_on_plateau": {},
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 2},
}.items():
    training(
        f"lr_scheduler_type={_schedule!r}",
        lr_scheduler_type=_schedule,
        lr_scheduler_kwargs=_kwargs,
        warmup_steps=1,
        max_grad_norm=0.0,
        eval_strategy="steps",
        eval_steps=1,
    )
training("logging of gradient norms (logging_steps=1)", logging_steps=1, max_grad_norm=1.0, logging_first_step=True)
training("train_sampling_strategy='group_by_length'", train_sampling_strategy="group_by_length", max_grad_norm=0.0,
         data=samples(16, (8, 16, 12, 20)), extra={"data_collator": padded})  # fmt: skip
training(
    "samples of several lengths, padded", data=samples(16, (8, 16, 12)), max_grad_norm=0.0, extra={"data_collator": padded}
)
training("neftune_noise_alpha=5", neftune_noise_alpha=5.0, max_grad_norm=0.0)
training("num_train_epochs=2", num_train_epochs=2, max_steps=-1, max_grad_norm=0.0)
training("tied embeddings", lambda: llama(tie_word_embeddings=True), max_grad_norm=0.0)
training("torch_empty_cache_steps, seed, data_seed", torch_empty_cache_steps=1, seed=7, data_seed=8, max_grad_norm=0.0)
training("auto_find_batch_size", auto_find_batch_size=True, max_grad_norm=0.0)
training("average_tokens_across_devices, include_num_input_tokens_seen", include_num_input_tokens_seen="all", max_grad_norm=0.0)
training("torch_compile=True, backend='eager'", torch_compile=True, torch_compile_backend="eager", max_grad_norm=0.0)
training("dataloader_num_workers=1", dataloader_num_workers=1, max_grad_norm=0.0)


def _grouped(side: Side) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        from transformers.trainer_pt_utils import get_parameter_names

        decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], ["bias", "layernorm", "rmsnorm", "norm"]))
        named = list(model.named_parameters())
        return side.adamw(
            [
                {"params": [p for name, p in named if name in decayed], "weight_decay": 0.1},
                {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
            ],
            lr=1e-3,
        )

    return make


@row(GROUP, "Trainer, groups with and without weight decay", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    trainer = trainer_of(side, optimizer=_grouped(side), max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer, optimizer_cls_and_kwargs=", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    how = (zero.AdamW, {"lr": 1e-3}) if side.paged else (torch.optim.AdamW, {"lr": 1e-3, "fused": True})
    trainer = trainer_of(side, extra={"optimizer_cls_and_kwargs": how}, weight_decay=0.1)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer, optimizer_cls_and_kwargs=, without clipping", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    how = (zero.AdamW, {"lr": 1e-3}) if side.paged else (torch.optim.AdamW, {"lr": 1e-3, "fused": True})
    trainer = trainer_of(side, extra={"optimizer_cls_and_kwargs": how}, weight_decay=0.1, max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer, its own optimizer (optim='adamw_torch_fused')", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    import transformers

    args = transformers.TrainingArguments(
        output_dir=str(side.folder / "output"), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_steps=1, optim="adamw_torch_fused",
    )  # fmt: skip
    trainer = transformers.Trainer(model=side.page(llama()), args=args, train_dataset=samples())
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer, create_optimizer overridden", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    import transformers

    class Own(transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = side.adamw(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    trainer = trainer_of(side, kind=Own, extra={"optimizer_cls_and_kwargs": None}, max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer, compute_loss overridden with an L2 penalty", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    import transformers

    class Own(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs) + 1e-4 * sum(
                p.square().sum() for p in model.parameters()
            )

    trainer = trainer_of(side, kind=Own, max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer, a callback that reads parameters and gradients", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    import transformers

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            side.show("gradients", [p.grad.norm() for p in model.parameters()])

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            side.show("parameters", [p.detach().norm() for p in model.parameters()])

    trainer = trainer_of(side, extra={"callbacks": [Watch()]}, max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer.evaluate()", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    trainer = trainer_of(side, max_grad_norm=0.0)
    side.show("before", trainer.evaluate()["eval_loss"])
    trainer.train()
    side.show("after", trainer.evaluate()["eval_loss"])


@row(GROUP, "Trainer.predict()", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    trainer = trainer_of(side, max_grad_norm=0.0)
    trainer.train()
    side.show("predictions", trainer.predict(samples(6)).predictions)


@row(GROUP, "Trainer, compute_metrics", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    def metrics(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    trainer = trainer_of(side, extra={"compute_metrics": metrics}, eval_strategy="steps", eval_steps=2, max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)


SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.0}


@row(GROUP, "Trainer, save_strategy='steps'", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    from safetensors.torch import load_file

    trainer = trainer_of(side, **SAVING)
    trainer.train()
    show_training(side, trainer)
    side.show("saved", load_file(side.folder / "output" / "checkpoint-2" / "model.safetensors"))
    side.show("optimizer", torch.load(side.folder / "output" / "checkpoint-2" / "optimizer.pt")["state"])


@row(GROUP, "Trainer, resume_from_checkpoint", needs=NEEDS, slow=4)
def _(side: Side) -> None:
    trainer = trainer_of(side, **SAVING)
    trainer.train()
    again = trainer_of(side, **SAVING)
    again.train(resume_from_checkpoint=str(side.folder / "output" / "checkpoint-2"))
    show_training(side, again)


@row(GROUP, "Trainer, load_best_model_at_end", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    trainer = trainer_of(side, **SAVING, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer.save_model()", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    from safetensors.torch import load_file

    trainer = trainer_of(side, max_grad_norm=0.0)
    trainer.train()
    trainer.save_model(str(side.folder / "saved"))
    side.show("saved", load_file(side.folder / "saved" / "model.safetensors"))


@row(GROUP, "Trainer, early stopping", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    import transformers

    stop = transformers.EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
    trainer = trainer_of(side, **SAVING, load_best_model_at_end=True, metric_for_best_model="loss", extra={"callbacks": [stop]})
    trainer.train()
    side.show("steps", trainer.state.global_step)
    show_training(side, trainer)


@row(GROUP, "Trainer, packing (DataCollatorWithFlattening)", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    import transformers

    data = [{name: value.tolist() for name, value in one.items()} for one in samples(16, (5, 9, 7))]
    collate = transformers.DataCollatorWithFlattening(return_position_ids=True)
    trainer = trainer_of(side, data=data, extra={"data_collator": collate}, max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Trainer, BERT for classes", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
    )
    data = [{"input_ids": tokens(number, 12) + 3, "labels": torch.tensor(number % 2)} for number in range(16)]
    trainer = trainer_of(side, transformers.BertForSequenceClassification(config), data=data, max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)


@row(GROUP, "Seq2SeqTrainer, T5, predict_with_generate", needs=NEEDS, slow=3)
def _(side: Side) -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    model = side.page(transformers.T5ForConditionalGeneration(config))
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(side.folder / "output"), max_steps=3, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_steps=1, predict_with_generate=True, generation_max_length=6, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=samples(8),
        eval_dataset=samples(4),
        optimizers=(side.adamw(model.parameters()), None),
    )
    trainer.train()
    show_training(side, trainer)
    side.show("predictions", trainer.predict(samples(4)).predictions)


# -- accelerate ------------------------------------------------------------------------------------------------------------


def _accelerated(side: Side, *, clip: str = "", accumulate: int = 1, **options: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    model = side.page(llama())
    optimizer = side.adamw(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    loader = torch.utils.data.DataLoader(samples(24), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            side.show("loss", loss)
            if accelerator.sync_gradients and clip == "norm":
                side.show("norm", accelerator.clip_grad_norm_(model.parameters(), 0.1))
            if accelerator.sync_gradients and clip == "value":
                accelerator.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    side.show_model(accelerator.unwrap_model(model))


for _name, _options in {
    "a plain loop": {},
    "clip_grad_norm_": {"clip": "norm"},
    "clip_grad_value_": {"clip": "value"},
    "accumulate(model)": {"accumulate": 3},
    "accumulate(model) and clip_grad_norm_": {"accumulate": 3, "clip": "norm"},
    "mixed_precision='bf16'": {"mixed_precision": "bf16"},
}.items():

    @row(GROUP, f"accelerate, {_name}", needs=ACCELERATE, slow=2)
    def _(side: Side, options: Any = _options) -> None:
        _accelerated(side, **options)


@row(GROUP, "accelerate, save_state and load_state", needs=ACCELERATE, slow=2)
def _(side: Side) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = side.page(llama())
    model, optimizer = accelerator.prepare(model, side.adamw(model.parameters(), lr=1e-3))
    batch = padded(samples(4))

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            side.show("loss", loss)

    steps()
    accelerator.save_state(str(side.folder / "state"))
    steps()
    accelerator.load_state(str(side.folder / "state"))
    steps()
    side.show_model(model)


@row(GROUP, "accelerate, save_model and get_state_dict", needs=ACCELERATE, slow=2)
def _(side: Side) -> None:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(side.page(llama()))
    side.show("state_dict", accelerator.get_state_dict(model))
    accelerator.save_model(model, str(side.folder / "saved"))
    side.show("saved", load_file(side.folder / "saved" / "model.safetensors"))


# -- generation ------------------------------------------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "without a cache": {"use_cache": False, "do_sample": False},
    "static cache": {"cache_implementation": "static", "do_sample": False, "disable_compile": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2, "do_sample": False},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "scores and logits": {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "repetition penalty, forbidden words": {"do_sample": False, "repetition_penalty": 1.3, "bad_words_ids": [[7], [8]]},
}
for _name, _options in MODES.items():

    @row(GROUP, f"generate(), {_name}", needs=NEEDS, slow=2)
    def _(side: Side, options: Any = _options, name: str = _name) -> None:
        model = side.page(llama(initializer_range=0.5))
        optimizer = side.adamw(model.parameters(), lr=1e-3)
        batch = padded(samples(4))
        side.train(model, optimizer, 1, loss=lambda model, number: model(**batch).loss)
        model.eval()
        ids = batch["input_ids"][: 1 if "lookup" in name else 2, :5]
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **options)
        if not isinstance(found, torch.Tensor):
            side.show("logits", [found.logits, found.scores])
            found = found.sequences
        side.show("sequences", found)


@row(GROUP, "generate(), assisted by another model", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    torch.manual_seed(1)
    helper = llama(num_hidden_layers=1).eval()
    model = side.page(llama(initializer_range=0.5).eval())
    ids = tokens(0, 1, 5) + 3
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    found = model.generate(ids, assistant_model=helper, return_dict_in_generate=True, output_logits=True, **given)
    side.show("found", [found.sequences, found.logits])


@row(GROUP, "pipeline('text-generation')-like batch of logits with a cache", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    from tiered.integrations.transformers.kv_model import ARGUMENT

    model = side.page(llama().eval())
    past = None
    with torch.no_grad():
        for number in range(3):
            found = model(tokens(number, 2, 4), **{ARGUMENT: past}, use_cache=True)
            past = found[ARGUMENT]
            side.show("logits", found.logits)


# -- the model itself ------------------------------------------------------------------------------------------------------


@row(GROUP, "save_pretrained and from_pretrained", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import transformers

    model = side.page(llama())
    optimizer = side.adamw(model.parameters(), lr=1e-3)
    side.train(model, optimizer, 2, loss=lambda model, number: model(**padded(samples(4))).loss)
    model.save_pretrained(side.folder / "saved")
    side.show_model(transformers.LlamaForCausalLM.from_pretrained(side.folder / "saved"))


@row(GROUP, "save_pretrained in shards (max_shard_size)", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import transformers

    model = side.page(llama())
    model.save_pretrained(side.folder / "saved", max_shard_size="300KB")
    side.show("files", sorted(path.name for path in (side.folder / "saved").iterdir()))
    side.show_model(transformers.LlamaForCausalLM.from_pretrained(side.folder / "saved"))


@row(GROUP, "save_pretrained of tied embeddings", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import transformers

    model = side.page(llama(tie_word_embeddings=True))
    model.save_pretrained(side.folder / "saved")
    side.show_model(transformers.LlamaForCausalLM.from_pretrained(side.folder / "saved"))


@row(GROUP, "from_pretrained, then paged", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import transformers

    llama().save_pretrained(side.folder / "saved")
    model = side.page(transformers.LlamaForCausalLM.from_pretrained(side.folder / "saved", dtype=torch.float32).train())
    optimizer = side.adamw(model.parameters(), lr=1e-3)
    side.train(model, optimizer, 2, loss=lambda model, number: model(**padded(samples(4))).loss)


def _resized(side: Side, before: bool) -> None:
    model = llama(initializer_range=0.5)
    if before:
        model.resize_token_embeddings(270)
    side.page(model)
    if not before:
        model.resize_token_embeddings(270)
    optimizer = side.adamw(model.parameters(), lr=1e-3)
    side.train(model, optimizer, 2, loss=lambda model, number: model(**padded(samples(4))).loss)


for _before in (True, False):

    @row(GROUP, f"resize_token_embeddings {'before' if _before else 'after'} paging", needs=NEEDS, slow=2)
    def _(side: Side, before: bool = _before) -> None:
        _resized(side, before)


@row(GROUP, "get_input_embeddings().weight, get_output_embeddings().weight", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = side.page(llama())
    side.show("input", model.get_input_embeddings().weight)
    side.show("output", model.get_output_embeddings().weight)


@row(GROUP, "num_parameters(), get_memory_footprint()", depends=False, needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = side.page(llama())
    side.show("numbers", [model.num_parameters(), model.get_memory_footprint(), model.num_parameters(only_trainable=True)])


@row(GROUP, "init_weights() after paging", needs=NEEDS, slow=2, depends=False)
def _(side: Side) -> None:
    model = side.page(llama())
    for parameter in model.parameters():
        if hasattr(parameter, "_is_hf_initialized"):
            del parameter._is_hf_initialized
    model.apply(model._init_weights)
    optimizer = side.adamw(model.parameters(), lr=1e-3)
    side.train(model, optimizer, 2, loss=lambda model, number: model(**padded(samples(4))).loss)


@row(GROUP, "output_hidden_states and output_attentions", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = side.page(llama(attn_implementation="eager").eval())
    found = model(tokens(0, 2, 6), output_hidden_states=True, output_attentions=True)
    side.show("states", [found.hidden_states, found.attentions])


@row(GROUP, "gradient_checkpointing_enable() and a plain loop", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = side.page(llama())
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = side.adamw(model.parameters(), lr=1e-3)
    side.train(model, optimizer, 3, loss=lambda model, number: model(**padded(samples(4))).loss)


@row(GROUP, "inputs_embeds and a soft prompt of one's own", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = llama()
    model.prompt = torch.nn.Parameter(drawn(0, 1, 3, 64) * 0.02)
    side.page(model)
    optimizer = side.adamw(model.parameters(), lr=1e-2)

    def loss(model: Any, number: int) -> torch.Tensor:
        ids = tokens(number, 2, 6) + 3
        embedded = torch.cat([model.prompt.expand(2, -1, -1), model.get_input_embeddings()(ids)], 1)
        return model(inputs_embeds=embedded).logits[:, 3:].square().mean()

    side.train(model, optimizer, 3, loss=loss)


@row(GROUP, "a plain loop with get_scheduler and clip_grad_norm_", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import transformers

    model = side.page(llama())
    optimizer = side.adamw(model.parameters(), lr=1e-3)
    scheduler = transformers.get_scheduler("cosine", optimizer, 1, 6)

    def clip() -> None:
        norm = utils.clip_grad_norm_(model.parameters(), 1.0)
        side.show("finite", math.isfinite(float(norm)))
        side.show("norm", norm)

    batch = padded(samples(4))
    side.train(model, optimizer, 3, loss=lambda model, number: model(**batch).loss, between=clip, scheduler=scheduler)
