"""``tiered import`` and ``tiered generate``: the tokens of the model in memory, without its folder, from less memory
than its weights take."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from tests import programs  # noqa: E402
from tests.programs import ONE_THREAD  # noqa: E402
from tests.quick import quick  # noqa: E402
from tiered import CapacityError, MisuseError, TieredStore  # noqa: E402
from tiered.cli.generate.answers import Answer, Pace  # noqa: E402
from tiered.cli.generate.live import Display  # noqa: E402
from tiered.cli.generate.summary import GenerationSummary, describe  # noqa: E402
from tiered.cli.generate.text import ByteText  # noqa: E402
from tiered.cli.main import main  # noqa: E402
from tiered.cli.output import Progress  # noqa: E402
from tiered.integrations.transformers import import_model, open_model, open_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

PROMPT = "The sea is"
GREEDY = ["--tokens", "24"]
DRAWN = ["--tokens", "24", "--temperature", "0.8", "--top-p", "0.9", "--seed", "7"]
SIZES = {
    "vocab_size": 300,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that tokens differ
    "eos_token_id": 299,
}
DRAM, UNIT = "1MiB", "128KiB"


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    threads, level = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(level)


def llama(**sizes: Any) -> Any:
    torch.manual_seed(1)
    given = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, **sizes}
    return LlamaForCausalLM(LlamaConfig(**given))


def moe() -> Any:
    torch.manual_seed(2)
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, hidden_size=64, num_hidden_layers=4)).to(torch.bfloat16)


def write_tokenizer(folder: Path) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the sea is wide and the sky is high, and the sea is deep"] * 3, trainer)
    made.save(str(folder / "tokenizer.json"))
    return made


@dataclass
class Imported:
    """A store with an imported model, whose folder is gone, and what the model in memory makes of ``PROMPT``."""

    store: Path
    tokenizer: Any
    tokens: dict[str, list[int]] = field(default_factory=dict)


def in_memory(model: Any, prompt: list[int]) -> dict[str, list[int]]:
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "pad_token_id": 0}
    greedy = model.generate(ids, do_sample=False, **given)
    torch.manual_seed(7)
    drawn = model.generate(ids, do_sample=True, temperature=0.8, top_p=0.9, top_k=0, **given)
    return {"greedy": greedy[0, len(prompt) :].tolist(), "drawn": drawn[0, len(prompt) :].tolist()}


CASES = {
    "llama": (llama, True, None),
    "moe": (moe, True, None),
    "moe in float32": (moe, True, torch.float32),
    "bytes": (llama, False, None),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Imported]:
    found = {}
    for name, (make, has_tokenizer, compute) in CASES.items():
        folder = tmp_path_factory.mktemp("source") / name
        make().save_pretrained(folder, max_shard_size="500KB")
        tokenizer = write_tokenizer(folder) if has_tokenizer else None
        prompt = tokenizer.encode(PROMPT).ids if tokenizer else list(PROMPT.encode())
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=compute or "auto")
        store = tmp_path_factory.mktemp("stores") / "store"
        options = ["--compute", "float32"] if compute else []
        assert main(["import", str(folder), str(store), "--dram", "8MiB", "--unit", UNIT, *options]) == 0
        shutil.rmtree(folder)
        found[name] = Imported(store, tokenizer, in_memory(model, prompt))
    return found


@pytest.mark.parametrize(
    ("name", "way"),
    quick(
        [(name, way) for name in CASES for way in ("greedy", "drawn")],
        [("llama", "greedy"), ("moe in float32", "drawn")],
    ),
)
def test_text_is_that_of_the_model_in_memory(
    name: str, way: str, imported: dict[str, Imported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, report = imported[name], tmp_path / "report.json"
    options = GREEDY if way == "greedy" else DRAWN
    given = ["generate", str(one.store), "--prompt", PROMPT, "--dram", DRAM, *options, "--json", str(report)]
    assert main(given) == 0
    shown, told = capsys.readouterr(), json.loads(report.read_text())
    assert len(set(told["tokens"])) > 5
    assert told["tokens"] == one.tokens[way]
    if one.tokenizer is not None:
        assert told["text"] == one.tokenizer.decode(told["tokens"])
    else:
        bytes_ = ByteText()
        assert told["text"] == "".join(map(bytes_.add, told["tokens"])) + bytes_.end()
        assert "no tokenizer.json of this model: each byte is a token" in shown.err
    assert shown.out.rstrip("\n") == told["text"].rstrip("\n")
    assert f"{len(told['tokens'])}/24" in shown.err or told["tokens"][-1] == SIZES["eos_token_id"]
    assert " a token (" in shown.err
    if told["weights_bytes"] > 1 << 20:
        assert told["per_token"]["read_bytes"] > 0
        assert "twice the memory (--dram " in shown.err
    assert 0 <= told["hit_share"] <= 1
    assert (told["expert_bytes"] > 0) == name.startswith("moe")
    assert (told["experts"] is not None) == name.startswith("moe")
    assert ("of those chosen were in memory" in shown.err) == name.startswith("moe")
    if told["experts"] is not None:
        assert told["experts"]["hits"] + told["experts"]["misses"] >= 4 * 2 * len(told["tokens"])
        assert 0 < told["experts"]["hit_share"] < 1
    assert (told["window_bytes"] is None) == (name.startswith("moe") or told["weights_bytes"] <= 1 << 20)


def test_a_small_model_needs_a_tenth_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An import cuts units by the size of the model, so that none is the whole of it."""
    torch.manual_seed(1)
    sizes = {**SIZES, "vocab_size": 4000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "llama")
    store = str(tmp_path / "store")
    assert main(["import", str(tmp_path / "llama"), store]) == 0
    given = ["generate", store, "--prompt", PROMPT, "--dram", str(weights // 10), *GREEDY, "--json"]
    capsys.readouterr()
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == in_memory(model.eval(), list(PROMPT.encode()))["greedy"]


def test_json_alone_on_stdout(imported: dict[str, Imported], capsys: pytest.CaptureFixture[str]) -> None:
    one = imported["llama"]
    assert main(["generate", str(one.store), "--prompt", PROMPT, "--dram", DRAM, *GREEDY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == one.tokens["greedy"]


@pytest.mark.parametrize("name", quick(["llama", "moe", "bytes"], ["moe", "bytes"]))
def test_a_conversation_is_kept(
    name: str, imported: dict[str, Imported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two commands say what the model in memory says of all that was said before."""
    one, folder, report = imported[name], tmp_path / "store", tmp_path / "report.json"
    shutil.copytree(one.store, folder)
    given = ["generate", str(folder), "--dram", "4MiB", "--tokens", "9", "--json", str(report), "--keep", "chat"]
    said: list[int] = []
    for prompt in PROMPT, " and the sky":
        assert main([*given, "--prompt", prompt]) == 0
        said += one.tokenizer.encode(prompt).ids if one.tokenizer else list(prompt.encode())
        told = json.loads(report.read_text())
        with TieredStore.open(folder, dram="4MiB", access="read") as store:
            ids = torch.tensor([said])
            expected = open_model(store).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0
            )
        assert told["tokens"] == expected[0, len(said) :].tolist()
        assert told["prompt_tokens"] == len(said)
        said += told["tokens"]
    capsys.readouterr()
    assert main([*given, "--prompt", PROMPT, "--model", "model", "--keep", "model"]) == 1
    assert "the store has the model 'model'" in capsys.readouterr().err


def test_several_processes_read_at_once(imported: dict[str, Imported]) -> None:
    one = imported["moe"]
    with TieredStore.open(one.store, dram=DRAM, access="read") as store:
        model = open_model(store)
        ids = torch.tensor([one.tokenizer.encode(PROMPT).ids])
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        first = model.generate(ids, max_new_tokens=4, **given)[0, ids.shape[1] :].tolist()
        command = [sys.executable, "-m", "tiered", "generate", str(one.store), "--prompt", PROMPT, "--dram", DRAM]
        done = programs.run([*command, *GREEDY, "--json"], capture_output=True, text=True, env=ONE_THREAD, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tokens"] == one.tokens["greedy"]
        again = model.generate(ids, max_new_tokens=24, **given)[0, ids.shape[1] :].tolist()
    assert first == one.tokens["greedy"][:4]
    assert again == one.tokens["greedy"]


def refused(given: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    capsys.readouterr()
    assert main(given) == code
    shown = capsys.readouterr()
    assert not shown.out
    return shown.err.splitlines()[-1]


def test_what_cannot_be_is_one_line(
    imported: dict[str, Imported], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ["generate", str(imported["llama"].store), "--dram", DRAM, "--prompt"]
    assert "no tokens: give it some text" in refused([*here, ""], capsys)
    assert "the model has 128 positions" in refused([*here, "a", "--tokens", "128"], capsys)
    assert "give --temperature" in refused([*here, "a", "--seed", "1"], capsys, 2)
    assert "--top-p: 1.5 is not a share" in refused([*here, "a", "--temperature", "1", "--top-p", "1.5"], capsys, 2)
    assert "of a model named 'other'" in refused([*here, "a", "--model", "other"], capsys)
    assert "is not a folder" in refused(["generate", str(tmp_path / "none"), "--prompt", "a"], capsys)
    with TieredStore.open(tmp_path / "empty", dram=DRAM) as store:
        store.put("x", torch.ones(3))
        store.commit()
    there = ["generate", str(tmp_path / "empty"), "--dram", DRAM, "--prompt", "a"]
    assert "tiered import FOLDER STORE makes one" in refused(there, capsys)
    monkeypatch.setitem(sys.modules, "tiered.integrations.transformers.pretrained", None)
    monkeypatch.setitem(sys.modules, "tiered.integrations.transformers", None)
    assert "generate needs transformers: pip install '.[hf]'" in refused([*here, "a"], capsys)
    model = ["import", str(tmp_path), str(tmp_path / "new"), "--as", "model"]
    assert "a model needs transformers: pip install '.[hf]'" in refused(model, capsys)


def test_a_model_without_room_for_bytes_needs_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    small = {**SIZES, "vocab_size": 64, "eos_token_id": 3, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**small)).save_pretrained(tmp_path / "source")
    store = str(tmp_path / "store")
    assert main(["import", str(tmp_path / "source"), store, "--dram", DRAM]) == 0
    here = ["generate", store, "--dram", DRAM, "--prompt", "a"]
    assert "bytes are no tokens of one with 64 tokens" in refused(here, capsys)


def test_import_refuses_and_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path / "llama")
    other = moe()
    other.save_pretrained(tmp_path / "moe")
    store = str(tmp_path / "store")
    into = [store, "--dram", "2MiB"]
    tensors = ["import", str(tmp_path / "llama"), *into, "--as", "tensors", "--verify"]
    assert "are for models: --as tensors" in refused(tensors, capsys, 2)
    assert "no folder with a config.json" in refused(["import", str(tmp_path), *into, "--as", "model"], capsys)
    assert not os.path.exists(store)
    assert main(["import", str(tmp_path / "llama"), *into]) == 0
    assert "LlamaForCausalLM of " in capsys.readouterr().out
    assert "already has a model named 'model'" in refused(["import", str(tmp_path / "moe"), *into], capsys)
    assert main(["import", str(tmp_path / "moe"), *into, "--model", "second"]) == 0
    assert "2 models, 'model', 'second': choose one with --model" in refused(["generate", *into, "--prompt", "a"], capsys)
    assert main(["import", str(tmp_path / "moe"), *into, "--existing", "overwrite"]) == 0
    with TieredStore.open(store, dram="2MiB", access="read") as opened:
        for name in "model", "second":
            model = open_model(opened, name=name)
            assert type(model) is Qwen3MoeForCausalLM
            for (one, ours), (another, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
                assert one == another
                assert torch.equal(ours + 0, theirs)


@pytest.mark.parametrize("damage", ["missing", "of another shape"])
def test_weights_that_are_not_those_of_the_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """``transformers`` would initialise them at random, and only log it."""
    weight = "model.layers.0.mlp.down_proj.weight"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=2, **sizes))
    values = {name: value for name, value in model.state_dict().items() if damage != "missing" or name != weight}
    if damage != "missing":
        values[weight] = torch.zeros(32, 40)
    model.config.save_pretrained(tmp_path / "model")
    save_file(values, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    command = ["import", str(tmp_path / "model"), str(tmp_path / "store"), "--dram", "16MiB"]
    assert main(command) == 1
    told = capsys.readouterr().err
    assert repr(weight) in told
    assert (f"lack {weight!r}" if damage == "missing" else "[32, 40], and [32, 48]") in told
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_import_leaves_nothing(
    signum: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama().save_pretrained(tmp_path / "llama")
    monkeypatch.setattr(Progress, "working", lambda *_: os.kill(os.getpid(), signum))
    given = ["import", str(tmp_path / "llama"), str(tmp_path / "store"), "--dram", DRAM]
    assert "stopped; nothing was committed" in refused(given, capsys, 128 + signum)
    assert os.listdir(tmp_path) == ["llama"]


def test_an_import_that_is_stopped_keeps_what_was_there(
    imported: dict[str, Imported], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moe().save_pretrained(tmp_path / "moe")
    store = tmp_path / "store"
    shutil.copytree(imported["llama"].store, store)

    def at_the_end(_: Progress, what: str, share: float) -> None:
        if what == "committing":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "working", at_the_end)
    given = ["import", str(tmp_path / "moe"), str(store), "--dram", "2MiB", "--existing", "overwrite"]
    assert "stopped; nothing was committed" in refused(given, capsys, 130)
    with TieredStore.open(store, dram="1MiB", access="read") as opened:
        assert type(open_model(opened)) is LlamaForCausalLM


def test_ctrl_c_ends_a_generation(
    imported: dict[str, Imported], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Display.text

    def and_stop(display: Display, more: str) -> None:
        text(display, more)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Display, "text", and_stop)
    given = ["generate", str(imported["llama"].store), "--prompt", PROMPT, "--dram", DRAM, *GREEDY]
    assert main(given) == 130
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1] == "tiered: stopped"
    assert len(shown.out) < 24


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_text_above_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    out, err = Terminal(), Terminal()
    with Display(out, err) as display:
        for word in ("one", "two\nthree", "four", "five", "six", "seven", "eight", "nine", "\x1b[2Jten"):
            display.text(word + " ")
            display.numbers("12 tokens/s", 0.5)
    assert err.getvalue() == ""
    shown = out.getvalue()
    assert "one two" in shown
    assert "12 tokens/s" in shown
    assert "\x1b[2J" not in shown
    assert shown.rstrip("\n").endswith("\N{REPLACEMENT CHARACTER}[2Jten ")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    assert "tiered generate llama/ " in capsys.readouterr().out.partition("examples:")[2]


def test_bytes_that_are_no_text_are_shown() -> None:
    text = ByteText()
    assert [text.add(token) for token in (*"é".encode(), 0xC3, 300)] == ["", "é", "", "\N{REPLACEMENT CHARACTER}<300>"]
    assert text.add(0xC3) + text.end() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("read", "routed", "window", "said"),
    [
        (700.0, 0, 100.0, "0.00 MB of the weights do not fit in memory; 0.00 MB more are\n"),
        (600.0, 0, 0.0, "read, because what is read ahead takes memory, too"),
        (550.0, 0, None, "less is read, because\n          rows of the embedding that no token uses stay on the disk"),
        (100.0, 300, None, None),
    ],
)
def test_a_window_is_never_below_zero(read: float, routed: int, window: float | None, said: str | None) -> None:
    pace = Pace(tokens=1, seconds=1.0, read=int(read), busy=1.0, leases=4, hits=2, stalled=0.5)
    answer = Answer(3, ByteText(), (), ())
    summary = GenerationSummary("Llama", [answer], 0.1, pace, pace, weights=1000, routed=routed, memory=400)
    assert summary.window == window
    assert summary.as_json()["window_bytes"] == window
    told = describe(summary)
    assert " -" not in told.replace(" --", "")
    assert told.count("what is read ahead takes memory") == (window is not None)
    assert said is None or said in told


def told_by(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    """What a command that fails says, in one line."""
    assert main([*given]) == 1
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said
    return said.splitlines()[-1]


def test_what_first_attempts_are_told(
    imported: dict[str, Imported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = tmp_path / "llama", str(imported["llama"].store)
    llama().save_pretrained(folder)
    of = ["generate", "--dram", DRAM]
    told = told_by(capsys, *of, str(folder), "--prompt", "a")
    assert f"is the folder of a model, and no store: tiered import {folder} STORE puts it into one" in told
    told = told_by(capsys, *of, store, "--prompt", "\udcff\udcfe hi")
    assert "the prompt is not UTF-8 text (at character 0)" in told
    told = told_by(capsys, *of, store, "--prompt", "the sea is wide " * 60)
    assert "the model has 128 positions, and the prompt is" in told
    assert told.endswith("tokens long: shorten it")
    told = told_by(capsys, *of, store, "--prompt", PROMPT, "--tokens", "128")
    assert "lower --tokens 128 to at most 12" in told
    assert main([*of, store, "--prompt", PROMPT, "--keep", ""]) == 2
    assert "--keep: a conversation has a name that is not empty" in capsys.readouterr().err


def test_what_an_import_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = [str(tmp_path / "store"), "--dram", "8MiB"]
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    told = told_by(capsys, "import", str(tmp_path / "t5"), *to)
    assert "has a model of the type 't5', which AutoModelForCausalLM does not make" in told
    assert "import_model(..., cls=)" in told
    llama().save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "generation_config.json").write_text('{"num_return_sequences": 2}')
    told = told_by(capsys, "import", str(tmp_path / "llama"), *to)
    assert "transformers cannot make the model in" in told
    assert "num_return_sequences" in told


@pytest.mark.filterwarnings("default:the files in")
def test_layers_that_only_the_files_have_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "llama"
    llama().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["import", str(folder), str(tmp_path / "store"), "--dram", "8MiB"]) == 0
    told = capsys.readouterr().err
    assert "note: the files in" in told
    assert "are left out: 'model.layers.3.input_layernorm.weight' and 8 more" in told


def test_penalties_of_the_checkpoint_do_not_act(
    imported: dict[str, Imported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The most likely token is taken, whatever generation_config.json says."""
    folder, one = tmp_path / "llama", imported["llama"]
    llama().save_pretrained(folder)
    write_tokenizer(folder)
    acting = {"repetition_penalty": 1.9, "do_sample": True, "min_p": 0.2, "guidance_scale": 1.5, "stop_strings": ["e"]}
    (folder / "generation_config.json").write_text(json.dumps(acting | {"eos_token_id": SIZES["eos_token_id"]}))
    assert main(["import", str(folder), str(tmp_path / "store"), "--dram", "8MiB"]) == 0
    capsys.readouterr()
    given = ["generate", str(tmp_path / "store"), "--prompt", PROMPT, "--dram", "4MiB", *GREEDY, "--json"]
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == one.tokens["greedy"]


def test_a_tokenizer_that_cannot_be_read_is_not_called_missing(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    llama().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    with TieredStore.open(tmp_path / "store", dram="8MiB") as store:
        import_model(folder, store)
        with pytest.raises(MisuseError, match=r"the tokenizer that .* keeps of model 'model' cannot be read"):
            open_tokenizer(store)


def test_the_tokens_of_several_answers_are_counted_together() -> None:
    pace = Pace(tokens=2, seconds=4.0, read=0, busy=0.0, leases=4, hits=4, stalled=0.0)

    def told(count: int) -> str:
        answers = [Answer(3, ByteText(), (), ()) for _ in range(count)]
        return describe(GenerationSummary("Llama", answers, 0.1, pace, pace, weights=1000, routed=0, memory=2000))

    assert "(0.50 tokens/s): computing" in told(1)
    assert "(1.50 tokens/s of all 3 together): computing" in told(3)


def test_more_memory_brings_nothing_where_all_weights_fit() -> None:
    """What a token reads beside them, such as keys and values, is no reason for more."""
    pace = Pace(tokens=2, seconds=4.0, read=100, busy=1.0, leases=4, hits=4, stalled=0.0)
    summary = GenerationSummary("Llama", [Answer(3, ByteText(), (), ())], 0.1, pace, pace, weights=1000, routed=0, memory=1000)
    assert "memory    all weights fit: more would bring nothing" in describe(summary)
    assert summary.as_json()["seconds_with_one_more_gib"] is None


def test_the_budget_that_is_named_is_one_that_an_import_can_be_for(tmp_path: Path) -> None:
    """An import divides a weight into slices of 512 rows at least, so that no unit, however small, serves each budget."""
    wide = LlamaConfig(hidden_size=256, intermediate_size=2048, num_hidden_layers=1, **SIZES)
    LlamaForCausalLM(wide).save_pretrained(tmp_path / "model")
    for unit, said in (("64KiB", "the smallest that works is"), ("64MiB", "anew it works with")):
        assert main(["import", str(tmp_path / "model"), str(tmp_path / unit), "--unit", unit]) == 0
        refused = pytest.raises(CapacityError, match=f"{said} 6,291,456 bytes")
        with TieredStore.open(tmp_path / unit, dram="1MiB", access="read") as store, refused:
            open_model(store)
    assert main(["generate", str(tmp_path / "64KiB"), "--prompt", PROMPT, "--tokens", "2", "--dram", "6291456"]) == 0
