"""Train a small convolutional network on pictures of CIFAR's size, in the shape of a script for DeepSpeed.

    python docs/examples/deepspeed_cifar.py --config docs/examples/deepspeed_cifar.json

Two lines are other ones than with DeepSpeed: the import, and the call of ``initialize``. The pictures are made up: noise,
brighter in the quarter that is their class.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tiered import zero


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def pictures(count):
    labels = torch.randint(0, 4, (count,))
    images = torch.randn(count, 3, 32, 32)
    for image, label in zip(images, labels, strict=True):
        image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 0.5
    return TensorDataset(images, labels)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
beside = Path(__file__).with_suffix(".json")
parser.add_argument("--config", default=beside, help="DeepSpeed's configuration (default: the one beside this script)")
parser.add_argument("--pictures", type=int, default=2048, help="how many there are (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=2, help="times that all of them are seen (default: %(default)s)")
args = parser.parse_args()

torch.manual_seed(0)
engine, optimizer, loader, _ = zero.initialize(model=Net(), training_data=pictures(args.pictures), config=args.config)
for epoch in range(args.epochs):
    right = seen = 0
    for inputs, labels in loader:
        outputs = engine(inputs.to(engine.device))
        loss = F.cross_entropy(outputs, labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        right, seen = right + (outputs.argmax(1).cpu() == labels).sum().item(), seen + len(labels)
        print(f"loss {loss.item()!r}")
    print(f"epoch {epoch}: {right / seen:.0%} right, {engine.global_steps} steps")
