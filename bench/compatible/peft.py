"""Rows that adapt a model with PEFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.compatible.hugging_face import llama, padded, samples, show_training, trainer_of
from bench.compatible.side import Side, row

GROUP = "peft"
NEEDS = ("peft", "transformers.models.llama.modeling_llama")
LAYERS = ["q_proj", "v_proj", "down_proj"]

CONFIGS: dict[str, Callable[[Any], Any]] = {
    "LoRA": lambda peft: peft.LoraConfig(r=4, target_modules=LAYERS, task_type="CAUSAL_LM"),
    "LoRA with dropout": lambda peft: peft.LoraConfig(r=4, target_modules=LAYERS, lora_dropout=0.1),
    "LoRA, all linear layers, bias='all'": lambda peft: peft.LoraConfig(
        r=4, target_modules="all-linear", bias="all", task_type="CAUSAL_LM"
    ),
    "LoRA, rsLoRA": lambda peft: peft.LoraConfig(r=4, target_modules=LAYERS, use_rslora=True),
    "LoRA of the embedding": lambda peft: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "DoRA": lambda peft: peft.LoraConfig(r=4, target_modules=LAYERS, use_dora=True),
    "PiSSA": lambda peft: peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights="pissa"),
    "OLoRA": lambda peft: peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights="olora"),
    "IA3": lambda peft: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "modules_to_save": lambda peft: peft.LoraConfig(r=4, target_modules=LAYERS, modules_to_save=["lm_head", "embed_tokens"]),
    "trainable_token_indices": lambda peft: peft.LoraConfig(
        r=4, target_modules=LAYERS, trainable_token_indices={"embed_tokens": [3, 4, 5]}
    ),
    "target_parameters": lambda peft: peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]),
    "AdaLoRA": lambda peft: peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=LAYERS, total_step=10),
    "LoHa": lambda peft: peft.LoHaConfig(r=4, target_modules=LAYERS),
    "LoKr": lambda peft: peft.LoKrConfig(r=4, target_modules=LAYERS),
    "OFT": lambda peft: peft.OFTConfig(oft_block_size=16, target_modules=LAYERS),
    "VeRA": lambda peft: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "LayerNorm tuning": lambda peft: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "prompt tuning": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda peft: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda peft: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32),
}


def adapted(side: Side, make: Callable[[Any], Any], *, before: bool) -> Any:
    """Return a model with adapters, which are added before or after it is paged."""
    import peft

    model = llama() if before else side.page(llama())
    model = peft.get_peft_model(model, make(peft))
    return side.page(model) if before else model


def train(side: Side, model: Any, optimizer: Any, steps: int = 3, first: int = 0) -> None:
    """Make steps with batches of ``samples``."""

    def loss(model: Any, number: int) -> torch.Tensor:
        return model(**padded(samples(24)[4 * number : 4 * number + 4])).loss

    model.train()
    side.train(model, optimizer, steps, loss=loss, first=first)


def trained(model: Any) -> list[Any]:
    """Return the parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


for _name, _make in CONFIGS.items():

    @row(GROUP, f"{_name}, adapters before paging", needs=NEEDS, slow=2)
    def _(side: Side, make: Any = _make) -> None:
        model = adapted(side, make, before=True)
        train(side, model, side.adamw(trained(model), lr=1e-2))


for _name in ("LoRA", "DoRA", "PiSSA", "IA3", "modules_to_save", "prompt tuning", "prefix tuning"):

    @row(GROUP, f"{_name}, adapters after paging", needs=NEEDS, slow=2)
    def _(side: Side, make: Any = CONFIGS[_name]) -> None:
        model = adapted(side, make, before=False)
        train(side, model, side.adamw(trained(model), lr=1e-2))


@row(GROUP, "LoRA after paging, adapters in memory with torch's AdamW", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=False)
    train(side, model, torch.optim.AdamW(trained(model), lr=1e-2, fused=True))


@row(GROUP, "LoRA, optimizer over all parameters", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=True)
    train(side, model, side.adamw(model.parameters(), lr=1e-2))


@row(GROUP, "LoRA, clip_grad_norm_", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=True)
    optimizer = side.adamw(trained(model), lr=1e-2)
    batch = padded(samples(4))

    def clip() -> None:
        side.show("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    side.train(model, optimizer, 3, loss=lambda model, number: model(**batch).loss, between=clip)


@row(GROUP, "LoRA of two adapters, set_adapter", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import peft

    model = peft.get_peft_model(llama(), CONFIGS["LoRA"](peft))
    model.add_adapter("other", CONFIGS["LoRA"](peft))
    model.set_adapter("other")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    side.page(model)
    optimizer = side.adamw([p for name, p in model.named_parameters() if "lora_" in name], lr=1e-2)
    train(side, model, optimizer, 2)
    model.set_adapter("default")
    train(side, model, optimizer, 2, first=2)


@row(GROUP, "disable_adapter()", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=True)
    train(side, model, side.adamw(trained(model), lr=1e-2), 2)
    model.eval()
    with model.disable_adapter(), torch.no_grad():
        side.show("base", model(**padded(samples(4))).logits)
    with torch.no_grad():
        side.show("adapted", model(**padded(samples(4))).logits)


@row(GROUP, "merge_and_unload()", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=True)
    train(side, model, side.adamw(trained(model), lr=1e-2), 2)
    merged = model.merge_and_unload()
    side.show("logits", merged.eval()(**padded(samples(4))).logits)
    side.show_model(merged)


@row(GROUP, "merge_adapter() and unmerge_adapter()", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=True)
    optimizer = side.adamw(trained(model), lr=1e-2)
    train(side, model, optimizer, 2)
    model.merge_adapter()
    side.show("merged", model.eval()(**padded(samples(4))).logits)
    model.unmerge_adapter()
    train(side, model, optimizer, 2, first=2)


for _name in ("DoRA", "PiSSA", "IA3", "modules_to_save"):

    @row(GROUP, f"{_name} merged and unloaded", needs=NEEDS, slow=2)
    def _(side: Side, name: str = _name) -> None:
        model = adapted(side, CONFIGS[name], before=True)
        train(side, model, side.adamw(trained(model), lr=1e-2), 2)
        side.show_model(model.merge_and_unload())


@row(GROUP, "adapters saved, and loaded into another model", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import peft

    model = adapted(side, CONFIGS["LoRA"], before=True)
    train(side, model, side.adamw(trained(model), lr=1e-2), 2)
    model.save_pretrained(side.folder / "adapter")
    torch.manual_seed(1)
    side.show_model(peft.PeftModel.from_pretrained(llama(), side.folder / "adapter"))


@row(GROUP, "adapters loaded before paging, and trained on", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import peft

    model = peft.get_peft_model(llama(), CONFIGS["LoRA"](peft))
    model.save_pretrained(side.folder / "adapter")
    model = side.page(peft.PeftModel.from_pretrained(llama(), side.folder / "adapter", is_trainable=True))
    train(side, model, side.adamw(trained(model), lr=1e-2))


@row(GROUP, "adapters loaded after paging (load_adapter)", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import peft

    peft.get_peft_model(llama(), CONFIGS["LoRA"](peft)).save_pretrained(side.folder / "adapter")
    model = adapted(side, CONFIGS["LoRA"], before=True)
    optimizer = side.adamw(trained(model), lr=1e-2)
    train(side, model, optimizer, 2)
    model.load_adapter(str(side.folder / "adapter"), "other")
    model.set_adapter("other")
    side.show("logits", model.eval()(**padded(samples(4))).logits)


@row(GROUP, "get_peft_model_state_dict and set_peft_model_state_dict", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import peft

    model = adapted(side, CONFIGS["LoRA"], before=True)
    optimizer = side.adamw(trained(model), lr=1e-2)
    kept = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    side.show("kept", kept)
    train(side, model, optimizer, 2)
    peft.set_peft_model_state_dict(model, kept)
    train(side, model, optimizer, 2, first=2)


@row(GROUP, "print_trainable_parameters, get_nb_trainable_parameters", depends=False, needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=True)
    side.show("numbers", model.get_nb_trainable_parameters())


@row(GROUP, "generate() of an adapted model", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=True)
    train(side, model, side.adamw(trained(model), lr=1e-2), 2)
    ids = padded(samples(2))["input_ids"][:, :5]
    side.show(
        "ids", model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    )


@row(GROUP, "LoRA with gradient checkpointing", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    model = adapted(side, CONFIGS["LoRA"], before=True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    train(side, model, side.adamw(trained(model), lr=1e-2))


@row(GROUP, "LoRA in a Trainer", needs=(*NEEDS, "transformers.trainer"), slow=3)
def _(side: Side) -> None:
    import peft

    model = peft.get_peft_model(llama(), CONFIGS["LoRA"](peft))
    trainer = trainer_of(side, model, optimizer=lambda model: side.adamw(trained(model), lr=1e-2), max_grad_norm=0.0)
    trainer.train()
    show_training(side, trainer)
