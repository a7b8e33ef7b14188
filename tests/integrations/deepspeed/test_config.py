"""DeepSpeed's configuration: what becomes of each key, "auto", batch sizes, and what contradicts itself."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.deepspeed.documented import DOCUMENTED, SHAPES, paths_of
from tiered import MisuseError
from tiered.errors import WIDEST
from tiered.integrations.deepspeed.config import Config, batch_sizes, examined, read
from tiered.integrations.deepspeed.table import ALIASES, KEYS, Verdict, find, judged

ROOT = Path(__file__).resolve().parents[3]
ARGUMENTS = SimpleNamespace(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    max_grad_norm=0.5,
    learning_rate=2e-4,
    adam_beta1=0.8,
    adam_beta2=0.95,
    adam_epsilon=1e-6,
    weight_decay=0.1,
    warmup_steps=7,
    max_steps=70,
    fp16=False,
    bf16=True,
)
"""What Hugging Face's TrainingArguments have, as far as a configuration asks for it."""


def config_of(**more: Any) -> Config:
    return Config.of({"train_batch_size": 4, **more})


# -- the table


def test_every_documented_key_is_in_the_table() -> None:
    sections = {key.path.rpartition(".")[0] for key in KEYS} | {"zero_optimization", "optimizer"}
    paths = paths_of(DOCUMENTED)
    assert len(paths) > 250
    assert [path for path in paths if find(path) is None and path not in sections] == []


def test_every_documented_key_is_judged() -> None:
    rows = {row.path: row for row in judged(DOCUMENTED)}
    assert {row.verdict for row in rows.values()} == set(Verdict)
    refused = {path for path, row in rows.items() if row.verdict is Verdict.REFUSED}
    assert refused == {
        *("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "amp", "zero_optimization.zeropp_loco_param"),
        *("tensor_parallel", "hybrid_engine", "expert_parallel", "autotuning", "sparse_attention", "data_efficiency"),
        *("curriculum_learning", "wandb", "comet", "elasticity", "comms_logger", "compression_training", "compile", "pipeline"),
        *("progressive_layer_drop", "eigenvalue", "quantize_training", "weight_quantization", "nebula", "datastates_ckpt"),
        *("graph_harvesting", "use_data_before_expert_parallelism", "sequence_parallel_size"),
    }


def test_every_row_is_said_once_and_fits_a_line() -> None:
    assert len({key.path for key in KEYS}) == len(KEYS)
    for key in KEYS:
        assert 0 < len(key.why) <= WIDEST, key.path
        assert len(key.otherwise) <= WIDEST, key.path
        assert bool(key.allowed) == bool(key.otherwise), key.path


@pytest.mark.parametrize("key", [key for key in KEYS if key.verdict is Verdict.REFUSED], ids=lambda key: key.path)
def test_a_refused_key_is_refused_unless_it_asks_for_nothing(key: Any) -> None:
    def verdict(value: Any) -> Verdict:
        nested: Any = value
        for name in reversed(key.path.split(".")):
            nested = {name: nested}
        (row,) = judged(nested)
        return row.verdict

    below = {"inner": {"enabled": True}} if key.switch == "*.enabled" else {key.switch: 2}
    assert verdict(below if key.switch else {"it": "asks"} if key.inner else "asks") is Verdict.REFUSED
    assert verdict(None) is Verdict.UNNEEDED
    for value in key.off:
        assert verdict(value) is Verdict.UNNEEDED
    if key.switch:
        assert verdict({key.switch: False} if key.switch != "*.enabled" else {"inner": {"enabled": False}}) is Verdict.UNNEEDED


def test_null_is_as_if_the_key_were_not_there() -> None:
    for key in KEYS:
        if key.path == "train_batch_size":
            continue  # this one is needed
        *sections, name = key.path.split(".")
        nested: Any = {name: None}
        for section in reversed(sections):
            nested = {section: nested}
        assert all(row.verdict is not Verdict.REFUSED for row in config_of(**nested).rows), key.path


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimisation": {}}, "'zero_optimisation', did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stge": 3}}, "'zero_optimization.stge', did you mean 'zero_optimization.stage'?"),
        ({"offload_param": {"device": "cpu"}}, "did you mean 'zero_optimization.offload_param'?"),
        ({"fp16": {"initial_scale_pwer": 3}}, "did you mean 'fp16.initial_scale_power'?"),
        ({"gradient_accumulation": 3}, "did you mean 'gradient_accumulation_steps'?"),
        ({"xyzzy": 1}, "no key 'xyzzy'; docs/from_deepspeed.md lists all keys"),
        ({"scheduler": {"params": {"warmup_steps": 1}}}, "did you mean 'scheduler.params.warmup_num_steps'?"),
    ],
)
def test_an_unknown_key_raises_with_the_nearest(config: dict[str, Any], says: str) -> None:
    with pytest.raises(MisuseError) as raised:
        judged(config)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"train_batch_size": "8"}, "'train_batch_size' is a whole number"),
        ({"train_batch_size": 8.5}, "'train_batch_size' is a whole number"),
        ({"train_batch_size": True}, "'train_batch_size' is a whole number"),
        ({"fp16": True}, "'fp16' is a section"),
        ({"fp16": {"enabled": "yes"}}, "'fp16.enabled' is true or false"),
        ({"steps_per_print": float("inf")}, "'steps_per_print' is a whole number"),
    ],
)
def test_a_value_of_another_kind_raises(config: dict[str, Any], says: str) -> None:
    with pytest.raises(MisuseError, match=says):
        judged(config)


def test_other_names_of_keys() -> None:
    for name, key in ALIASES.items():
        assert find(name) == find(key)
    assert config_of(bfloat16={"enabled": True}).dtype == "bf16"
    assert Config.of({"train_batch_size": 1, "bfloat16": {"enabled": "auto"}}, arguments=ARGUMENTS).dtype == "bf16"


# -- reading


def test_it_is_read_from_a_file_a_dict_or_base64(tmp_path: Path) -> None:
    given = {"train_batch_size": 8}
    (tmp_path / "ds_config.json").write_text(json.dumps(given))
    coded = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    assert read(given) == read(tmp_path / "ds_config.json") == read(str(tmp_path / "ds_config.json")) == read(coded) == given


def test_a_file_of_an_editor_on_windows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{\r\n"train_batch_size": 4}\r\n')
    assert read(tmp_path / "config.json") == {"train_batch_size": 4}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 2}', "has 'a' twice"),
        ("{a: 1}", "is no JSON: .*quotes around names"),
        ('{"a": 1,, }', "is no JSON"),
        ('{"a": 1 /* without an end }', "is no JSON"),
        ("[1]", "has list in place"),
        ("[" * 100_000, "is no configuration|is no JSON"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(MisuseError, match=says):
        read(tmp_path / "c.json")


def test_what_is_no_configuration_at_all(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"cannot read the configuration .*missing.json: No such file"):
        read(tmp_path / "missing.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MisuseError, match="utf-8"):
        read(tmp_path / "binary")
    with pytest.raises(MisuseError, match="is a dict or the path"):
        read(3)
    with pytest.raises(MisuseError, match="not a regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MisuseError, match="not a regular file"):
        read(tmp_path / "pipe")


AS_PEOPLE_HAVE_THEM = r"""
# the whole batch
{
  "train_batch_size": "32",        // of all ranks
  /* of
     one */ "gradient_accumulation_steps": "auto",
  "steps_per_print": 1e2, # "quoted"
  "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": ["0.9", 0.95], "weight_decay": "0"}},
  "fp16": {"enabled": false, "loss_scale": "dynamic", "unheard_of": [1]},
  "bf16": {"enabled": "True"},
  "zero_optimization": {
    "stage": "3", "stage3_prefetch_bucket_size": "5e7",
    "offload_optimizer": {"device": "nvme", "nvme_path": "/no//comment#here", },
    "aio": {"block_size": 1048576, "single_submit": "false"},
  },
}
"""


def test_files_as_people_have_them(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(AS_PEOPLE_HAVE_THEM)
    values = read(file)
    assert values["train_batch_size"] == 32
    assert values["gradient_accumulation_steps"] == "auto"
    assert values["optimizer"]["params"] == {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0}
    assert values["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/no//comment#here"
    config = Config.of(file)
    assert (config.dtype, config.stage, config.train_batch_size) == ("bf16", 3, 32)
    assert not config.fp16.enabled
    rows = {row.path: row for row in config.rows}
    assert rows["fp16.unheard_of"].why == rows["fp16.loss_scale"].why == "its section is disabled"
    assert rows["zero_optimization.aio.block_size"].verdict is Verdict.UNNEEDED
    file.write_text(AS_PEOPLE_HAVE_THEM.replace('"stage": "3"', '"stage": three'))
    with pytest.raises(MisuseError, match="line 12 "):
        read(file)
    with pytest.raises(MisuseError, match=r"'optimizer\.params\.lr' is a number"):
        Config.of({"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": "fast"}}})


# -- batch sizes


@pytest.mark.parametrize(
    ("said", "ranks", "sizes"),
    [
        ((32, 4, 2), 4, (32, 4, 2)),
        ((32, 4, None), 2, (32, 4, 4)),
        ((32, None, 2), 2, (32, 8, 2)),
        ((None, 4, 2), 3, (24, 4, 2)),
        ((32, None, None), 4, (32, 8, 1)),
        ((None, 4, None), 4, (16, 4, 1)),
    ],
)
def test_batch_sizes_follow_from_each_other(said: tuple[int | None, ...], ranks: int, sizes: tuple[int, int, int]) -> None:
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    values = {name: value for name, value in zip(names, said, strict=True) if value is not None}
    assert batch_sizes(values, ranks) == sizes


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}, r"5 \* 2 \* 2 = 20"),
        ({"train_batch_size": 33, "gradient_accumulation_steps": 2}, r"8 \* 2 \* 2 = 32"),
        ({"train_batch_size": 1}, r"0 \* 1 \* 2 = 0"),
        ({"gradient_accumulation_steps": 2}, "says no batch size"),
        ({"train_micro_batch_size_per_gpu": 0}, "at least 1"),
    ],
)
def test_batch_sizes_that_contradict_each_other(values: dict[str, Any], says: str) -> None:
    with pytest.raises(MisuseError, match=says):
        batch_sizes(values, 2)


# -- "auto"


def test_auto_is_filled_as_hugging_face_fills_it() -> None:
    found = Config.of(SHAPES["transformers zero3"], ranks=2, arguments=ARGUMENTS)
    assert (found.train_batch_size, found.micro_batch_size, found.accumulation_steps) == (12, 2, 3)
    assert found.optimizer is not None
    assert found.optimizer.params == {"lr": 2e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    assert found.scheduler is not None
    assert found.scheduler.params == {"warmup_min_lr": 0, "warmup_max_lr": 2e-4, "warmup_num_steps": 7, "total_num_steps": 70}
    assert (found.dtype, found.clipping, found.stage) == ("bf16", 0.5, 3)


def test_auto_is_filled_from_the_training_arguments_themselves(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=200, warmup_steps=0.1, use_cpu=True, report_to=[])
    found = Config.of(SHAPES["transformers zero3"], arguments=arguments)
    assert found.micro_batch_size == 8
    assert found.optimizer is not None
    assert found.optimizer.params["lr"] == arguments.learning_rate
    assert found.scheduler is not None
    assert (found.scheduler.params["warmup_num_steps"], found.scheduler.params["total_num_steps"]) == (20, 200)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
        ({"gradient_clipping": "auto"}, "gradient_clipping"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "scheduler.params.warmup_num_steps"),
    ],
)
def test_auto_that_nothing_fills_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(MisuseError, match=f"'{key}' is \"auto\", and nothing says what it is"):
        Config.of({"train_batch_size": 1, **config})


# -- what contradicts itself, and what is refused


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled=true: fp16 is enabled, too"),
        ({"communication_data_type": "bf16"}, "communication_data_type=\"bf16\": gradients are sent"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 2},
         "gradients are added up in the type of the parameters, which is bf16"),
        ({"zero_optimization": {"stage": 4}}, "there are stages 0 to 3"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "no nvme_path"),
        ({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/a"},
                                "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}}, "in one store"),
        ({"optimizer": {"type": "Lamb"}}, "scales each step by the norm"),
        ({"optimizer": {"type": "OneBitAdam"}}, "in one bit"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "amsgrad"),
        ({"scheduler": {"type": "Cosine"}}, "no scheduler of this name"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "needs a loss scale"),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "the model is converted to it"),
        ({"gradient_allreduce_op": "sum"}, "averaged"),
        ({"wandb": {"enabled": True}, "pipeline": {"stages": 2}}, "wandb=.*; pipeline="),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_with_its_reason(config: dict[str, Any], says: str) -> None:
    with pytest.raises(MisuseError, match=says):
        config_of(**config)


def test_gradients_of_one_pass_may_be_added_up_in_any_type() -> None:
    found = config_of(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    assert {row.path: row.verdict for row in found.rows}["data_types.grad_accum_dtype"] is Verdict.UNNEEDED


def test_where_the_store_is() -> None:
    def place(**more: Any) -> Any:
        return config_of(**more).place

    assert (place().path, place().spills) == ("tiered-store", False)
    on_nvme = {"device": "nvme", "nvme_path": "/fast"}
    both = place(zero_optimization={"stage": 3, "offload_param": on_nvme, "offload_optimizer": on_nvme})
    assert (both.path, both.spills, both.params_offloaded, both.states_offloaded) == ("/fast/tiered", True, True, True)
    states = place(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert (states.spills, states.params_offloaded, states.states_offloaded) == (False, False, True)
    assert place(zero_optimization={"stage": 2, "cpu_offload": True}).states_offloaded
    own = place(tiered={"path": "/here", "dram": "8GiB", "nvme": 1 << 30}, zero_optimization={"offload_param": on_nvme})
    assert (own.path, own.dram, own.nvme) == ("/here", "8GiB", 1 << 30)


@pytest.mark.parametrize("name", SHAPES)
def test_configurations_that_people_have(name: str) -> None:
    found = Config.of(SHAPES[name], arguments=ARGUMENTS)
    assert found.optimizer is not None
    rows, batches = examined(SHAPES[name])
    assert not [row.path for row in rows if row.verdict is Verdict.REFUSED]
    assert batches is None


def test_the_page_has_the_table_as_it_is() -> None:
    child = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_deepspeed_keys.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert child.returncode == 0, child.stdout + child.stderr
    page = (ROOT / "docs" / "from_deepspeed.md").read_text()
    first = " ".join(line.partition(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    assert {key.path for key in KEYS} <= set(re.findall(r"`([^`]+)`", first))
