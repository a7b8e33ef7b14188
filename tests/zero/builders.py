"""Code that builds models in all the ways that people do: in place, twice, tied, copied, replaced, converted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.zero.models import Mixed, Tied

__all__ = ["BUILDERS", "NAMES", "Pretrained"]


class Pretrained(nn.Module):
    """Hugging Face's manner: all modules first, then ``apply(self._init_weights)``, then tying."""

    def __init__(self, tie: str = "before") -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32, padding_idx=3)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.rope = nn.Parameter(torch.empty(16, 32), requires_grad=False)
        if tie == "before":
            self.head.weight = self.embedding.weight
        self.apply(self._init_weights)
        if tie == "after":
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / 8**0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            assert module.padding_idx is not None
            module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        elif isinstance(module, Pretrained):
            with torch.no_grad():
                module.rope.copy_(torch.rand(16, 32))
                module.rope[2:4] = 0.5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.rope[: tokens.shape[1]]
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return self.head(self.norm(x))

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 64, (2, 16), generator=generator)
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.Bilinear(4, 5, 6), nn.PReLU(), nn.Conv1d(3, 5, 3), nn.Embedding(7, 9, padding_idx=0)
    )


def initialisers() -> nn.Module:
    """In place, of all kinds, long after the parameters were released."""
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(14)))
    w = [layer.weight for layer in model]
    nn.init.xavier_uniform_(w[0])
    nn.init.orthogonal_(w[1])
    nn.init.trunc_normal_(w[2], std=0.1)
    nn.init.sparse_(w[3], 0.3)
    nn.init.eye_(w[4])
    with torch.no_grad():
        w[5].copy_(w[0] + w[1].t())
        w[6][1] = w[2][0]
        w[6][:, 2:5].mul_(3)
        w[7].set_(torch.randn(24, 24))
        torch.mul(w[0], w[2], out=w[8])
        torch._foreach_add_([w[9], w[10]], [w[0], w[1]])
        nn.utils.vector_to_parameters(torch.randn(2 * 24 * 24), [w[11], w[12]])
        for shares_memory in (w[11], w[12]):
            shares_memory.data = shares_memory.data.clone()
    w[13].data = torch.randn(24, 24).t()
    model[0].bias.data[:] = w[3].data.sum(1)
    model[1].bias.data.copy_(torch.from_numpy(w[4].detach().numpy()[0]) * w[2][0, 0].item())
    model[2].bias = nn.Parameter(model[2].bias)
    nn.init.normal_(model[2].bias, std=torch.cat([w[0], w[13]]).std().item())
    model[3].weight = nn.Parameter(w[3] * 2)
    del model[4].bias
    model[4].register_parameter("bias", None)
    model[5].requires_grad_(False)
    return model


def transformer() -> nn.Module:
    """Copies its layers, and registers nothing while it does."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[1])
    nn.utils.parametrizations.spectral_norm(model[2])
    nn.init.normal_(model[0].parametrizations.weight.original1)
    return model


def shared() -> nn.Module:
    one = nn.Linear(16, 16)
    model = nn.Sequential(one, nn.ReLU(), one, nn.Linear(16, 16), nn.ParameterList([nn.Parameter(torch.randn(9)), one.bias]))
    model[3].weight = one.weight
    nn.init.uniform_(model[3].weight)
    return model


def converted() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 8))
    model[0].to(memory_format=torch.channels_last)
    model[2].to(torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def loaded() -> nn.Module:
    donor, model = Mixed(), Mixed()
    model.load_state_dict({name: value + 1 for name, value in donor.state_dict().items()})
    model.double().float()
    return model


def skipped() -> nn.Module:
    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 32, 32) for _ in range(3)))
    for parameter in model.parameters():
        nn.init.uniform_(parameter)
    return model


def gradients() -> nn.Module:
    """Trains a little while it is built."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(4, 16)).square().sum()
    for layer in model:
        _ = layer.weight.detach().norm().item()
    loss.backward()
    sgd.step()
    model.zero_grad()
    return model


BUILDERS: list[Callable[[], nn.Module]] = [
    *(plain, Tied, Mixed, Pretrained, lambda: Pretrained("after"), initialisers, transformer, parametrized, shared),
    *(converted, loaded, skipped, gradients),
]
NAMES = [
    *("plain", "gpt", "mixed", "pretrained", "tied_after", "initialisers", "transformer", "parametrized", "shared"),
    *("converted", "loaded", "skipped", "gradients"),
]
