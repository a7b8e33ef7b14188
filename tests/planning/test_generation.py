"""A plan of tokens: beside what a model really keeps, reads and sends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.cli.test_generate import llama, moe
from tests.cli.test_info import QUICK_PROBES
from tests.cli.train.test_train import failure
from tiered import Machine, MisuseError, TieredStore
from tiered.cli.main import main
from tiered.measuring import probes
from tiered.measuring.probes import measured_machine
from tiered.planning.generation import FORMS, PlannedWeights, Sequences, plan_generation, weights_of

MIB = 1 << 20
DENSE = PlannedWeights(32 * MIB, 32 * MIB, always=64 * MIB, experts=0, routed=1.0, cache=1024, unit=MIB, width=2)
AS_IT_IS = {"as it is": None}


def deepseek() -> DeepseekV3ForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    parts = {"v_head_dim": 16, "qk_nope_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **parts, topk_group=1, first_k_dense_replace=1))


@pytest.mark.parametrize("make", [llama, moe, deepseek])
def test_weights_and_keys_are_those_of_the_model(make: object) -> None:
    model = make()  # type: ignore[operator]
    found = weights_of(model)
    assert found.nbytes == sum(parameter.nbytes for parameter in model.parameters())
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        made = model(torch.ones(1, 6, dtype=torch.int64), use_cache=True)
    cache = made["cache" if "cache" in made else "past_key_values"]  # the name in earlier versions
    kept = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    if make is deepseek:  # transformers 5.0 keeps keys and values as attention uses them, later ones compressed
        assert found.cache * 6 <= kept
    else:
        assert found.cache * 6 == kept
    experts = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".mlp.experts." in name)
    assert found.experts == experts
    assert found.routed == {llama: 1.0, moe: 2 / 16, deepseek: 2 / 8}[make]  # type: ignore[index]


def test_a_token_reads_what_the_plan_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a dense model, in a quarter to three quarters of its weights."""
    model, store, report = llama(), str(tmp_path / "store"), tmp_path / "it.json"
    model.save_pretrained(tmp_path / "llama")
    assert main(["import", str(tmp_path / "llama"), store, "--dram", "8MiB"]) == 0
    weights = weights_of(model)
    for share in 0.45, 0.75:
        dram = max(int(share * weights.nbytes), 3 * weights.unit)
        given = ["--tokens", "12", "--dram", str(dram), "--json", str(report)]
        assert main(["generate", store, "--prompt", "ab", *given]) == 0
        read = json.loads(report.read_text())["per_token"]["read_bytes"]
        (planned,) = plan_generation(weights, None, dram, Sequences(), AS_IT_IS)
        # What is fetched ahead and not in time is fetched again on a busy machine: up to all weights for each token.
        assert 0.75 * planned.read <= read <= max(1.25 * planned.read, 1.05 * weights.nbytes)
    (planned,) = plan_generation(weights, None, round(weights.nbytes) + MIB, Sequences(), AS_IT_IS)
    assert planned.read == 0


@pytest.mark.parametrize("form", FORMS)
def test_the_smallest_budget_is_what_generate_asks_for(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where units are large, as a norm and the heads beside it are in memory together."""
    wide = llama(hidden_size=2048, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8)
    wide.save_pretrained(tmp_path / "llama")
    quantize = [] if form == "as it is" else ["--quantize", form]
    assert main(["import", str(tmp_path / "llama"), str(tmp_path / "store"), *quantize]) == 0
    given = ["generate", str(tmp_path / "store"), "--prompt", "ab", "--tokens", "1", "--dram"]
    smallest = weights_of(wide).least[form]
    assert smallest > MIB
    assert f" {smallest:,} bytes (its largest unit" in failure(capsys, *given, str(smallest - 4096))
    assert main([*given, str(smallest)]) == 0


def test_files_that_are_packed_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    asked = ["plan", str(tmp_path), "--generate", "--no-measure"]
    for method in (None, "bitsandbytes"):
        how = {"quant_method": method, "load_in_4bit": True}
        (tmp_path / "config.json").write_text(json.dumps(config | ({"quantization_config": how} if method else {})))
        assert main(asked) == 0
        assert ("have packed weights ('bitsandbytes'), which" in capsys.readouterr().out) is (method is not None)


def test_no_budget_is_smaller_than_that_of_a_store() -> None:
    assert set(weights_of(moe()).least.values()) == {MIB}


def test_what_does_not_fit_is_planned_with_the_budget_that_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, report = str(tmp_path / "machine.json"), tmp_path / "plan.json"
    Machine(read=1e8, write=1e8, dram=1 << 30).save(machine)
    llama(hidden_size=1024, intermediate_size=1024).save_pretrained(tmp_path / "llama")
    asked = ["plan", str(tmp_path / "llama"), "--generate", "--machine", machine, "--json", str(report), "--dram"]
    assert main([*asked, "1MiB"]) == 0
    told, small = capsys.readouterr().out, json.loads(report.read_text())
    works = small["forms"][0]["smallest"]
    assert f"fits      no: 1.0 MiB of DRAM is too little; {works:,} bytes work, with which this is" in told
    assert (small["fits"], small["dram"], small["planned_dram"]) == (False, MIB, works)
    assert main([*asked, str(works)]) == 0
    large = json.loads(report.read_text())
    assert (large["fits"], large["dram"], large["planned_dram"]) == (True, works, works)
    assert small["forms"] == large["forms"]


@pytest.mark.parametrize(("hbm", "dram"), [(16, 32), (32, 16), (8, 40), (24, 24)])
def test_what_a_device_holds_has_a_copy_in_host_memory(hbm: int, dram: int, tmp_path: Path) -> None:
    """64 tensors of 1 MiB, of which each pass uses all: what is read of the drive, and sent to the device."""
    keys = [f"{number:02}" for number in range(64)]
    with TieredStore.open(tmp_path, dram=96 * MIB) as store:
        for key in keys:
            store.put(key, torch.zeros(MIB // 4))
        store.commit()
    with TieredStore.open(tmp_path, dram=dram * MIB, hbm=hbm * MIB, device="cpu", access="read") as store:

        def use_all() -> tuple[int, int]:
            before = [link.up.bytes for link in store.statistics().links]
            for key in keys:
                with store.lease(key, tier="hbm"):
                    pass
            sent, *_, read = (link.up.bytes - was for link, was in zip(store.statistics().links, before, strict=True))
            return read, sent

        use_all()
        with store.trace() as order:
            use_all()
        store.follow(order)
        use_all()
        read, sent = use_all()
    machine = Machine(read=1e9, write=1e9, hbm=hbm * MIB)
    (planned,) = plan_generation(DENSE, machine, dram * MIB, Sequences(0), AS_IT_IS)
    # On a busy machine, what is fetched ahead and not in time is fetched again.
    assert 0.6 * planned.read <= read <= 1.25 * planned.read
    assert 0.6 * planned.sent <= sent <= 1.25 * planned.sent


def test_the_slowest_decides() -> None:
    def limit(**rates: float) -> str:
        machine = Machine(**{"read": 1e12, "write": 1e12, "flops": 1e15, "memory": 1e15, "hbm": 0, **rates})  # type: ignore[arg-type]
        (planned,) = plan_generation(DENSE, machine, 16 * MIB, Sequences(), AS_IT_IS)
        assert planned.seconds == max(planned.reading, planned.sending, planned.computing) > 0
        return planned.limit

    assert limit(read=1e6) == "the drive"
    assert limit(memory=1e6) == "computing"
    assert limit(flops=1e6) == "computing"
    assert limit(hbm=16 * MIB, link=1e6) == "the link"
    assert limit(hbm=16 * MIB, device_memory=1e6, memory=1e3) == "computing"


def test_experts_of_several_sequences() -> None:
    """A token of many sequences uses nearly all experts; what each token uses stays in memory first."""
    mixture = PlannedWeights(1000, 300, always=10 * MIB, experts=100 * MIB, routed=0.1, cache=0, unit=MIB, width=2)
    one, many = (plan_generation(mixture, None, 60 * MIB, Sequences(1, count), AS_IT_IS)[0] for count in (1, 100))
    assert one.read == pytest.approx(100 * MIB * 0.1 * 0.5)
    assert many.read == pytest.approx(100 * MIB * 0.5, rel=0.01)
    int8 = plan_generation(mixture, None, 60 * MIB, Sequences(), FORMS)[1]
    assert int8.weights == mixture.nbytes / 2
    assert int8.read == 0
    wide = plan_generation(replace(mixture, width=4), None, 60 * MIB, Sequences(), FORMS)
    each = (4, 1, 0.5625, 0.5 + 1 / 64 + 1 / 4096)
    assert [one.weights for one in wide] == [mixture.nbytes * nbytes / 4 for nbytes in each]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, report = str(tmp_path / "machine.json"), tmp_path / "plan.json"
    Machine(read=1e8, write=1e8, dram=1 << 30, name="a box").save(machine)
    moe().save_pretrained(tmp_path / "moe")
    asked = ["plan", str(tmp_path / "moe"), "--generate", "--machine", machine, "--dram", "1MiB"]
    assert main([*asked, "--json", str(report)]) == 0
    told = capsys.readouterr().out
    assert "model     moe of " in told
    assert "of which a token uses" in told
    assert "tokens/s" in told
    assert max(map(len, told.splitlines())) <= 128
    found = json.loads(report.read_text())
    assert [one["form"] for one in found["forms"]] == list(FORMS)
    assert found["forms"][0]["read"] > 0
    assert main([*asked, "--hbm", "512KiB", "--batch", "4"]) == 0
    told = capsys.readouterr().out
    assert "a device of 512.0 KiB" in told
    assert "to the device" in told
    assert "the first token is that after a prompt of 1,024 tokens of 4 sequences" in told
    assert main(["plan", str(tmp_path / "moe"), "--generate", "--no-measure", "--dram", "1MiB"]) == 0
    assert "tokens" not in capsys.readouterr().out.partition("weights   on")[2].partition("note")[0]


@pytest.mark.parametrize("options", [("--generate",), ()])
def test_a_budget_without_its_unit(options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moe().save_pretrained(tmp_path)
    assert "did you mean '12GiB'?" in failure(capsys, "plan", tmp_path, *options, "--no-measure", "--dram", "12")
    assert failure(capsys, "plan", tmp_path, *options, "--no-measure", "--dram", "1KiB").strip().endswith("is 1,048,576 bytes")


@pytest.mark.parametrize("options", [("--generate",), ()])
def test_sequences_that_are_longer_than_the_model_has_positions(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(max_position_embeddings=16).save_pretrained(tmp_path)
    for tokens in (16, 17):
        assert main(["plan", str(tmp_path), *options, "--no-measure", "--context", str(tokens)]) == 0
        told = "note      sequences of 17 tokens are longer than the 16 positions of the model (max_position_embeddings)"
        assert (told in capsys.readouterr().out) is (tokens > 16)


def test_updates_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK_PROBES.items():
        monkeypatch.setattr(probes, name, value)
    asked: list[str] = []
    machine = measured_machine(str(tmp_path), progress=lambda what, share: asked.append(what), of="generation")
    assert any(what.startswith("measuring leases") for what in asked)
    assert not any(what.startswith("measuring updates") for what in asked)
    assert machine.update == Machine(read=1, write=1).update


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--generate"], "--generate is of a model of transformers: name MODEL"),
        (["MODEL", "--generate", "--ranks", "2", "--optimizer", "lion"], "--optimizer, --ranks: of a training"),
        (["--hbm", "1GiB"], "--hbm needs --machine FILE"),
    ],
)
def test_bad_usage(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert says in capsys.readouterr().err


def test_models_without_attention_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MisuseError, match="generation is planned for a model of transformers"):
        weights_of(torch.nn.Linear(3, 3))
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64).save_pretrained(tmp_path)
    assert "no keys and values of attention" in failure(capsys, "plan", tmp_path, "--generate", "--no-measure")
