"""The public contract of paging, sentence by sentence; what is still to come is listed in ``tests/store/test_contract.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tiered import MisuseError, TieredStore, zero


class Two(nn.Module):
    """Parameters of its own, and two layers; ``large`` more than an eighth of a pool of 1 MiB, hence divided."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.shift = nn.Parameter(torch.randn(5))
        self.small = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.large = nn.Sequential(nn.Linear(64, 192), nn.Linear(192, 250), nn.Linear(250, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.small(x) * self.scale.sum()) + self.shift


def test_units_and_keys(store: TieredStore) -> None:
    """"A unit is the largest module ... whose parameters fit an eighth of the pool; a larger one is divided into its children,
    and a single larger parameter is a unit by itself"; "Keys: NAME/param/<qualified name or unit>". """
    model = zero.page(Two(), store, name="m")
    assert sorted(key for key in store if "/param/" in key) == sorted(
        [
            "m/param/*",  # what is directly on the model
            "m/param/small",  # fits as it is
            "m/param/large.0",
            "m/param/large.1.weight",  # 192,000 bytes: more than an eighth of the pool
            "m/param/large.1.bias",
            "m/param/large.2",
        ]
    )
    assert store.spec("m/param/small").nbytes == 2 * (64 * 64 + 64) * 4
    optimizer = zero.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    assert any(key.startswith("m/") and key.endswith("/grad") for key in store)
    optimizer.step()
    optimizer.state_dict()
    assert any("/m#0" in key for key in store)
    assert any("/v#0" in key for key in store)


def test_parameters_directly_on_a_module_are_held_during_its_forward(store: TieredStore) -> None:
    """"parameters directly on a module are held during that module's forward" """
    seen = []

    class Root(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside = super().forward(x)
            seen.append(type(self._parameters["scale"]) is nn.Parameter)
            return inside

    torch.manual_seed(0)
    reference = Root()
    torch.manual_seed(0)
    model = zero.page(Root(), store)
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    assert seen == [True, True]
    assert type(model._parameters["scale"]) is not nn.Parameter, "and no longer"


def test_parameters_start_64_byte_aligned(store: TieredStore) -> None:
    """"parameters start 64-byte aligned in their unit" """
    model = zero.page(Two(), store, name="m")
    addresses = {}

    def look(module: nn.Module, args: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            addresses[f"{type(module).__name__}.{name}.{tuple(parameter.shape)}"] = parameter.data_ptr()

    for module in model.modules():
        module.register_forward_pre_hook(look)
    with torch.no_grad():
        model(torch.randn(1, 64))
    assert len(addresses) == 10
    assert {address % 64 for address in addresses.values()} == {0}
    assert store.spec("m/param/*").nbytes == 128


def test_a_second_page_under_a_name(store: TieredStore) -> None:
    """"A second page under a name that the store holds raises unless ... overwrite is said." """
    zero.page(nn.Linear(4, 4), store, name="m")
    with pytest.raises(MisuseError, match="already holds a model named 'm'"):
        zero.page(nn.Linear(4, 4), store, name="m")
    other = nn.Linear(8, 2)
    expected = other.weight.detach().clone()
    zero.page(other, store, name="m", existing="overwrite")
    assert torch.equal(other.state_dict()["weight"], expected)


def test_init_serves_in_place_initialisers(store: TieredStore) -> None:
    """"init also serves in-place initialisers on parameters already released" """

    def build() -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        for module in model.modules():  # as Hugging Face's _init_weights does, after all were built
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                module.bias.data.zero_()
        return model

    expected = build()
    with zero.init(store, window=20_000) as construction:
        model = build()
    assert construction.statistics().released > 0
    zero.page(model, store)
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name
