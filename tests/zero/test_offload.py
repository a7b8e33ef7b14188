"""``zero.offload`` and ``zero.onload`` between steps: the bits of training stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tiered import MisuseError, TieredStore, zero


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(96, 96) for _ in range(12)))


@pytest.mark.parametrize("components", [("parameters",), ("states", "gradients"), ("parameters", "gradients", "states")])
def test_training_goes_on_bit_for_bit(store: TieredStore, components: tuple[str, ...]) -> None:
    reference, model = build(), zero.page(build(), store)
    theirs = torch.optim.AdamW(reference.parameters(), fused=True)
    ours = zero.AdamW(model.parameters())
    x = torch.randn(4, 96)
    for step in range(7):
        losses = []
        for side, optimizer in ((reference, theirs), (model, ours)):
            optimizer.zero_grad()
            loss = side(x).square().mean()
            loss.backward()
            if step % 2 and side is model:
                zero.offload(model, components=components)
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        moved = zero.offload(model, components=components)
        assert set(moved.bytes) == set(components)
        assert sum(moved.bytes.values()) > 0
        assert moved.stayed == ()
        if step > 3:
            back = zero.onload(model, components=components)
            assert back.bytes.keys() == moved.bytes.keys()
    assert torch.equal(nn.utils.parameters_to_vector(reference.parameters()), nn.utils.parameters_to_vector(model.parameters()))


def test_all_of_it_leaves_memory(store: TieredStore) -> None:
    model = zero.page(build(), store)
    optimizer = zero.AdamW(model.parameters())
    model(torch.ones(2, 96)).sum().backward()
    optimizer.step()
    optimizer.flush()
    moved = zero.offload(model)
    assert moved.bytes["parameters"] == 12 * (96 * 96 + 96) * 4
    assert moved.bytes["states"] >= 2 * moved.bytes["parameters"]
    assert moved.given_back >= 1 << 20
    assert store.statistics().tiers[0].used == 0
    zero.onload(model, components=["parameters"])
    assert store.statistics().tiers[0].used >= moved.bytes["parameters"]


def test_misuse_is_named(store: TieredStore) -> None:
    model = zero.page(build(), store)
    with pytest.raises(MisuseError, match="each of components is 'parameters', 'gradients' or 'states', not 'moments'"):
        zero.offload(model, components=["moments"])

    model[3].register_forward_hook(lambda *_: zero.offload(model))
    with pytest.raises(MisuseError, match="the model is computing"):
        model(torch.ones(2, 96))
    with pytest.raises(MisuseError, match="not paged"):
        zero.offload(build())


def test_the_optimizer_may_be_given(store: TieredStore) -> None:
    model, other = zero.page(build(), store), zero.page(build(), store, name="other")
    optimizer = zero.AdamW(model.parameters(), lr=1e-3)
    assert set(zero.offload(model, optimizer, components=["parameters", "states"]).bytes) == {"parameters", "states"}
    for wrong in (zero.AdamW(other.parameters(), lr=1e-3), ["states"]):
        with pytest.raises(MisuseError, match=r"optimizer|components="):
            zero.offload(model, wrong)  # type: ignore[arg-type]
