"""Train a byte-level GPT on Shakespeare, in the shape of a script for DeepSpeed: accumulation, schedule, checkpoints.

    python docs/examples/deepspeed_gpt.py --config docs/examples/deepspeed_gpt.json --save checkpoints

Two lines are other ones than with DeepSpeed: the import, and the call of ``initialize``. Run it again with more ``--steps``,
and it goes on from its last checkpoint.
"""

import argparse
import importlib.resources
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tiered import zero


class GPT(nn.Module):
    def __init__(self, width=128, layers=4, context=64):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Parameter(torch.randn(context, width) * 0.02)
        layer = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, **layer) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens, labels):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
beside = Path(__file__).with_suffix(".json")
parser.add_argument("--config", default=beside, help="DeepSpeed's configuration (default: the one beside this script)")
parser.add_argument("--save", default="checkpoints", help="folder of checkpoints (default: %(default)s)")
parser.add_argument("--steps", type=int, default=50, help="steps in all (default: %(default)s)")
parser.add_argument("--width", type=int, default=128, help="width of the model (default: %(default)s)")
args = parser.parse_args()

text = torch.tensor(list((importlib.resources.files("tiered.data") / "shakespeare.txt").read_bytes()))
torch.manual_seed(0)
engine, _, _, _ = zero.initialize(model=GPT(args.width), config=args.config)
engine.load_checkpoint(args.save)
while engine.global_steps < args.steps:
    drawn = torch.Generator().manual_seed(engine.micro_steps)
    at = torch.randint(0, len(text) - 65, (engine.train_micro_batch_size_per_gpu(),), generator=drawn)
    window = torch.stack([text[i : i + 65] for i in at]).to(engine.device)
    loss = engine(window[:, :-1], window[:, 1:])
    engine.backward(loss)
    engine.step()
    print(f"loss {loss.item()!r}")
    if engine.global_steps == args.steps:
        engine.save_checkpoint(args.save)
