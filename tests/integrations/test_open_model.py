"""``import_model`` and ``open_model``: a model in a store needs no folder, and says what is wrong where it cannot be opened."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tiered import ManifestError, MisuseError, TieredStore, zero  # noqa: E402
from tiered.integrations.kept import FILES, LARGEST, kept_models, put_file  # noqa: E402
from tiered.integrations.transformers import from_pretrained, import_model, open_model, open_tokenizer  # noqa: E402
from tiered.zero.paging.pager import pager_of  # noqa: E402
from tiered.zero.paging.storage import model_named  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
IDS = torch.arange(5)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.generation_config.eos_token_id = [7, 9]
    model.to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def opened(folder: Path, **options: Any) -> TieredStore:
    return TieredStore.open(folder, dram="2MiB", **options)


def tokens(model: Any) -> list[int]:
    given = {"attention_mask": torch.ones_like(IDS), "do_sample": False, "pad_token_id": 0, "max_new_tokens": 8}
    found: list[int] = model.generate(IDS, **given)[0].tolist()
    return found


@pytest.mark.parametrize("compute", [None, torch.float32])
def test_a_model_is_opened_as_it_was_imported(folder: Path, tmp_path: Path, compute: torch.dtype | None) -> None:
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=compute or torch.bfloat16)
    told: list[tuple[str, float]] = []
    with opened(tmp_path / "store") as store:
        model = import_model(folder, store, compute=compute, progress=lambda *one: told.append(one))
        assert tokens(model) == tokens(reference)
        stored = sum(store.spec(key).nbytes for key in store if key.startswith("model/param/"))
        store.close()  # what import_model committed is all there is
    assert stored < 2.2 * sum(parameter.numel() for parameter in reference.parameters())
    assert told[-1] == ("committing", 0.0)
    assert max(share for _, share in told) == 1
    shutil.rmtree(folder)
    with opened(tmp_path / "store", access="read") as one, opened(tmp_path / "store", access="read") as other:
        for store in one, other:
            model = open_model(store)
            assert (type(model), model.dtype, model.training) == (LlamaForCausalLM, compute or torch.bfloat16, False)
            assert model.generation_config.eos_token_id == [7, 9]
            assert tokens(model) == tokens(reference)
            for (name, ours), (same, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
                assert name == same
                assert torch.equal(ours + 0, theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_larger_than_a_unit_are_divided_into_rows(tmp_path: Path, tied: bool) -> None:
    """The memory that a reader needs is that of units, not of its vocabulary. Slices of 512 rows or more: same bits."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 24_000, "intermediate_size": 3000, "tie_word_embeddings": tied}
    reference = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    reference.save_pretrained(tmp_path / "llama")
    with TieredStore.open(tmp_path / "store", dram="32MiB") as store:
        import_model(tmp_path / "llama", store, largest_unit=400_000)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="3MiB", access="read") as store:
        model = open_model(store)
        units = {unit.plan.name: unit.plan.stored_nbytes for unit in pager_of(model).units}
        assert max(size for name, size in units.items() if "down_proj" not in name) <= 400_000
        assert sum(name.startswith("model.embed_tokens.weight[") for name in units) == 16  # of 1,536 rows
        assert sum(name.startswith("model.layers.1.mlp.down_proj.weight[") for name in units) == 0  # 64 rows, less than a block
        with torch.no_grad():
            for length in 1, 5, 40:
                ids = torch.arange(length)[None]
                assert torch.equal(model(ids).logits, reference(ids).logits), length
        assert tokens(model) == tokens(reference)
        for name, values in model.state_dict().items():
            assert torch.equal(values, reference.state_dict()[name])


def test_another_class_and_another_commit(folder: Path, tmp_path: Path) -> None:
    """Training goes on from an import, and its commits keep what opening takes."""
    with opened(tmp_path / "store") as store:
        import_model(folder, store, cls=AutoModelForSequenceClassification, name="judge", num_labels=3, missing="initialise")
        assert kept_models(store) == ["judge"]
        store.close()
    with opened(tmp_path / "store") as store:
        model = open_model(store, name="judge")
        assert type(model) is LlamaForSequenceClassification
        optimizer = zero.AdamW(model.parameters(), lr=0.1)
        model.config.pad_token_id = 0
        model(IDS, labels=torch.tensor([1])).loss.backward()
        optimizer.step()
        zero.commit(model, optimizer)
        shutil.copytree(store.folder, tmp_path / "pending")
        optimizer.flush()
        zero.commit(model, optimizer)
        changed = model.score.weight + 0
        store.close()
    with opened(tmp_path / "store", access="read") as store:
        assert torch.equal(open_model(store).score.weight + 0, changed)
    with opened(tmp_path / "pending", access="read") as store, pytest.raises(MisuseError, match="updates that are not applied"):
        open_model(store)


def test_the_tokenizer_is_kept(folder: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "without") as store:
        import_model(folder, store)
        with pytest.raises(MisuseError, match="keeps no tokenizer of model 'model'"):
            open_tokenizer(store)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    with opened(tmp_path / "with") as store:
        import_model(folder, store)
        shutil.rmtree(folder)
        assert open_tokenizer(store)("the sea")["input_ids"] == made.encode("the sea").ids


def test_what_cannot_be_opened_says_so(folder: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        with pytest.raises(MisuseError, match="has no model that can be opened by itself"):
            open_model(store)
        from_pretrained(LlamaForCausalLM, folder, store, name="bare")
        with pytest.raises(MisuseError, match=r"keeps no config.json of a model named 'bare'"):
            open_model(store, name="bare")
        for wrong, says in (
            ({"existing": "resume"}, "existing is"),
            ({"compute": torch.float16}, r"compute is torch.float32 or None, not torch.float16"),
            ({"dtype": torch.float16}, "dtype=: .* compute=torch.float32 computes in fp32"),  # with which it was not opened
            ({"policy": zero.Policy(quantize="int4")}, "policy=: give quantize='int8'"),  # which was not looked at
        ):
            with pytest.raises(MisuseError, match=says):
                import_model(folder, store, **wrong)
        with pytest.raises(MisuseError, match="already has a model named 'bare'"):
            import_model(folder, store, name="bare")
        import_model(folder, store)
        for option, value in ("dtype", torch.float16), ("policy", zero.Policy(quantize="int4")), ("existing", "overwrite"):
            with pytest.raises(MisuseError, match=f"^{option}=: .*: leave it out"):
                open_model(store, **{option: value})
        for opening, error, says in (
            (b"[1]", ManifestError, "no JSON object of strings"),
            (json.dumps({"class": "Nothing", "stored": "float32", "compute": "float32"}).encode(), MisuseError, "no class"),
            (json.dumps({"class": "LlamaForCausalLM", "stored": "x"}).encode(), ManifestError, "two types of elements"),
        ):
            put_file(store, "model", "opening.json", opening)
            with pytest.raises(error, match=says):
                open_model(store)
        store.put("model/files/config.json", torch.ones(3), owner=model_named("model"))
        with pytest.raises(ManifestError, match="and no file"):
            open_model(store)


def test_parameters_that_stay_in_fp32_are_not_rounded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the files have them in fp32; where all is in 16 bits there, nothing is rounded."""
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm"})
    with opened(tmp_path / "16 bits") as store:
        import_model(folder, store, compute=torch.float32)
    (file,) = folder.glob("*.safetensors")
    values = load_file(file)
    save_file({key: one.float() if "norm" in key else one for key, one in values.items()}, file, {"format": "pt"})
    with opened(tmp_path / "store") as store:
        with pytest.raises(MisuseError, match=r"'model.layers.0.input_layernorm.weight' stays in float32 .* round it"):
            import_model(folder, store, compute=torch.float32)
        assert not any(key.startswith("model/") for key in store)


def test_a_file_that_is_too_large_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "tokenizer.json" in FILES
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(LARGEST + 1)
    with opened(tmp_path / "store") as store:
        with pytest.raises(MisuseError, match=r"and the tokenizer.json of a model at most"):
            import_model(folder, store)
        assert list(store) == []
