"""An axolotl configuration with the plugin ends with the parameters that it has without, bit for bit, and resumes.

axolotl pins the versions of its libraries, so these run in an environment of its own; elsewhere they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("axolotl")

import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tiered import MisuseError
from tiered.integrations.axolotl import TieredArgs, TieredPlugin

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {
    "base_model": "small/",
    "tokenizer_type": "PreTrainedTokenizerFast",
    "special_tokens": {"pad_token": "<pad>"},
    "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}],
    "dataset_prepared_path": "prepared",
    "val_set_size": 0,
    "sequence_len": 64,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 4,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "save_steps": 2,
    "save_total_limit": 2,
    "attn_implementation": "sdpa",
    "device_map": "cpu",
    "seed": 1,
    **dict.fromkeys(("bf16", "fp16", "tf32", "load_in_8bit"), False),
}
OURS = {"plugins": ["tiered.integrations.axolotl.TieredPlugin"], "tiered_store": "store/", "tiered_dram": "4MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("axolotl")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=259, num_key_value_heads=2, **sizes)).save_pretrained(made / "small")
    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(made / "small")
    lines = (f'{{"text": "the number {number * number} is a square"}}\n' for number in range(64))
    (made / "data.jsonl").write_text("".join(lines))
    return made


def train(folder: Path, name: str, **settings: Any) -> dict[str, torch.Tensor]:
    """Run axolotl, and return the parameters that it has saved."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**SETTINGS, **settings}))
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", f"{name}.yaml"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return load_file(folder / settings["output_dir"] / "model.safetensors")


def test_a_configuration_computes_as_in_memory_and_resumes(folder: Path) -> None:
    before = load_file(folder / "small" / "model.safetensors")
    expected = train(folder, "memory", output_dir="memory")
    assert not any(torch.equal(expected[name], before[name]) for name in before)
    found = train(folder, "paged", output_dir="paged", **OURS, tiered_open={"keep": 4})
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {path.name for path in (folder / "paged").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert not list((folder / "paged" / "checkpoint-2").glob("*.safetensors"))
    (folder / "paged" / "model.safetensors").unlink()
    more = {"tiered_existing": "resume", "resume_from_checkpoint": "paged/checkpoint-2", "tiered_open": {"keep": 4}}
    again = train(folder, "resumed", output_dir="paged", **OURS, **more)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_settings_that_cannot_be_are_named(tmp_path: Path) -> None:
    plugin = TieredPlugin()
    assert plugin.get_input_args() == f"{TieredArgs.__module__}.TieredArgs"
    for setting in ("deepspeed", "fsdp_config", "load_in_4bit", "rl"):
        with pytest.raises(MisuseError, match=f"{setting}: .* leave it out"):
            plugin.pre_model_load({"tiered_store": str(tmp_path / "store"), setting: "zero3.json"})
    assert not (tmp_path / "store").exists()
