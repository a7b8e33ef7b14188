"""Train a LoRA adapter of a model of transformers whose weights stay on the disk.

    pip install '.[hf]'
    python docs/examples/lora.py                   # a small Llama with random weights
    python docs/examples/lora.py --model my-llama  # a folder with config.json and safetensors files

The weights of the base model are read only; the adapter and its Adam states are all that is written.
"""

import argparse
import tempfile

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

from tiered import TieredStore
from tiered.integrations.transformers import TieredTrainer, from_pretrained

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder of the base model (default: a small one is made)")
parser.add_argument("--dram", default="4MiB", help="host memory for all weights (default: %(default)s)")
parser.add_argument("--steps", type=int, default=10, help="optimizer steps of 8 texts (default: %(default)s)")
parser.add_argument("--out", default="lora-adapter", help="folder of the adapter (default: %(default)s)")
options = parser.parse_args()

torch.manual_seed(0)
if options.model is None:
    options.model = tempfile.mkdtemp()
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(options.model)

rows = torch.arange(64).reshape(-1, 1) + torch.arange(24)  # texts that count: the next token is one more
data = [{"input_ids": row % 64, "labels": row % 64} for row in rows]
lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
arguments = TrainingArguments(
    options.out,
    learning_rate=1e-2,
    max_steps=options.steps,
    per_device_train_batch_size=8,
    logging_steps=max(1, options.steps // 5),
    label_names=["labels"],
    report_to=[],
    use_cpu=True,
)
with TieredStore.open("lora-store", dram=options.dram) as store:
    model = from_pretrained(
        AutoModelForCausalLM,
        options.model,
        store,
        existing="overwrite",
        prepare=lambda base: peft.get_peft_model(base, lora),
    )
    trainer = TieredTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(options.out)  # the adapter only
print("loss", trainer.state.log_history[0]["loss"], "->", trainer.state.log_history[-2]["loss"])
