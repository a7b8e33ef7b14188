"""``zero.page(weights=...)``: a pretrained model, streamed into the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.zero.checkpoint.test_export import Narrow, same
from tests.zero.models import Mixed, Tied
from tiered import MisuseError, SafetensorsError, TieredError, TieredStore, zero

DRAM = "2MiB"


def pretrained(folder: Path, make: Callable[[], nn.Module], shard: int | str = 50_000) -> dict[str, torch.Tensor]:
    """Its values; the files are in ``folder``."""
    torch.manual_seed(7)
    model = make()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with TieredStore.open(None, dram="16MiB") as store:
        zero.export(zero.page(model, store), folder, shard=shard)
    return values


@pytest.mark.parametrize("build", ["memory", "meta", "init"])
@pytest.mark.parametrize("make", [Tied, Mixed, Narrow])
def test_the_values_are_those_of_the_files(tmp_path: Path, make: Callable[[], nn.Module], build: str) -> None:
    values = pretrained(tmp_path / "files", make)
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        if build == "meta":
            with torch.device("meta"):
                model = make()
            if make is Narrow:
                model.transient = torch.ones(4)
        elif build == "init":
            with zero.init(store):
                model = make()
        else:
            model = make()
        zero.page(model, store, weights=tmp_path / "files")
        assert same(dict(model.state_dict()), values)
        assert not [key for key in store if not key.startswith("model/")]
        model.loss(1).backward()  # type: ignore[operator]
        zero.AdamW(model.parameters()).step()


@pytest.mark.parametrize(("there", "here"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("policy", [zero.Policy(), zero.Policy(torch.bfloat16)])
def test_other_types_are_converted(tmp_path: Path, there: torch.dtype, here: torch.dtype, policy: zero.Policy) -> None:
    values = pretrained(tmp_path / "files", lambda: Tied().to(there))
    reference = Tied().to(here)
    reference.load_state_dict(values)
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store, TieredStore.open(None, dram=DRAM) as other:
        model = zero.page(Tied().to(here), store, weights=tmp_path / "files", policy=policy)
        assert same(dict(model.state_dict()), dict(zero.page(reference, other, policy=policy).state_dict()))


def test_a_tied_parameter_may_have_any_of_its_names(tmp_path: Path) -> None:
    values = dict(Tied().state_dict())
    for kept in ("embedding.weight", "head.weight", None):
        dropped = {"embedding.weight", "head.weight"} - {kept} if kept else set()
        given = {name: value.clone() for name, value in values.items() if name not in dropped}
        save_file(given, tmp_path / "model.safetensors")
        with TieredStore.open(None, dram=DRAM) as store:
            assert same(dict(zero.page(Tied(), store, weights=tmp_path).state_dict()), values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.pop("position"), "has no tensor for 'position'"),
        (lambda found: found.pop("scale"), "has no tensor for 'scale'"),
        (lambda found: [found.pop(f"blocks.{i}.out.bias") for i in range(3)] + [found.pop("position")], "and 1 more"),
        (lambda found: found.update(more=torch.ones(1)), "has 'more', which this model does not have"),
        (lambda found: found.update(position=torch.ones(16, 33)), r"'position' has shape \(16, 33\) .* and \(16, 32\)"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path that is short, for errors are shortened."""
    monkeypatch.chdir(tmp_path)
    found = {name: value.clone() for name, value in Tied().state_dict().items()}
    change(found)
    save_file(found, tmp_path / "model.safetensors")
    with TieredStore.open(None, dram=DRAM) as store:
        model = Tied()
        values = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(MisuseError, match=says):
            zero.page(model, store, weights=".")
        assert same(dict(model.state_dict()), values)
        assert len(store) == 0
        with pytest.raises(MisuseError, match="leave out"):
            zero.page(model, store, weights=tmp_path, existing="resume")
        (tmp_path / "model.safetensors").write_bytes(b"no")
        with pytest.raises(SafetensorsError):
            zero.page(model, store, weights=tmp_path)
        with pytest.raises(TieredError, match="neither"):
            zero.page(model, store, weights=tmp_path / "absent")


def test_a_buffer_that_nothing_computes(tmp_path: Path) -> None:
    pretrained(tmp_path / "files", Narrow)
    with torch.device("meta"):
        model = Narrow()
    with TieredStore.open(None, dram=DRAM) as store, pytest.raises(MisuseError, match=r"'transient' .* zero\.init"):
        zero.page(model, store, weights=tmp_path / "files")


@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4)
    original = transformers.GPT2LMHeadModel(config).eval()
    original.save_pretrained(tmp_path / "hub", max_shard_size="60KB")
    tokens = torch.arange(32).reshape(2, 16)
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        with zero.init(store):
            model = transformers.GPT2LMHeadModel(config)
        zero.page(model, store, weights=tmp_path / "hub").eval()
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, original(tokens).logits)
