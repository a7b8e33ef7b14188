"""docs/examples/serve.py, asked by the client of OpenAI's API."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from tests import programs  # noqa: E402
from tests.cli.test_generate import PROMPT, SIZES, write_tokenizer  # noqa: E402
from tests.cli.test_generate_chat import TEMPLATE  # noqa: E402
from tests.programs import ONE_THREAD  # noqa: E402
from tiered import TieredStore  # noqa: E402
from tiered.integrations.transformers import import_model, open_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SERVE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "serve.py"
LONGEST = 1 << 17


def model() -> Any:
    torch.manual_seed(1)
    sizes = {**SIZES, "max_position_embeddings": LONGEST, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, rope_theta=10_000)).eval()


def answered(folder: Path, content: str, count: int) -> str:
    """What the model in memory answers."""
    with TieredStore.open(folder, dram="1MiB", access="read") as store:
        tokenizer = open_tokenizer(store)
    ids = torch.tensor([tokenizer.encode(f"<user>{content}\n<assistant>", add_special_tokens=False)])
    made = model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model().save_pretrained(folder / "llama")
    write_tokenizer(folder / "llama")
    (folder / "llama" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "llama" / "chat_template.jinja").write_text(TEMPLATE)
    with TieredStore.open(folder / "store", dram="8MiB") as opened:
        import_model(folder / "llama", opened)
    shutil.rmtree(folder / "llama")
    return folder / "store"


@pytest.fixture(scope="module")
def address(store: Path) -> Iterator[str]:
    command = [sys.executable, str(SERVE), str(store), "--dram", "2MiB", "--port", "0"]
    environment = {**ONE_THREAD, "PYTHONPATH": str(SERVE.parents[2])}
    with programs.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            shown = ""
            for line in server.stderr:
                shown += line
                if found := re.search(r"running on (http://\S+)", line):
                    break
            else:
                raise AssertionError(shown)
            yield found[1]
        finally:
            server.terminate()
            server.communicate(timeout=60)


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


def asked(content: str, **options: Any) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 12, **options}


def posted(address: str, contents: bytes, timeout: float) -> tuple[int, str]:
    """The status and the text of the answer to a request that has these contents."""
    request = urllib.request.Request(f"{address}/v1/chat/completions", data=contents)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_answers_are_those_of_the_model_in_memory(client: Any, store: Path) -> None:
    expected = answered(store, PROMPT, 12)
    whole = client.chat.completions.create(**asked(PROMPT))
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    pieces = list(client.chat.completions.create(**asked(PROMPT), stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    assert len(pieces) > 2
    assert [one.id for one in client.models.list()] == ["model"]


def test_an_answer_ends_before_a_stop_string(client: Any, store: Path) -> None:
    text = answered(store, PROMPT, 12)
    stop = text[len(text) // 2 :][:2]
    for options in {"stop": stop}, {"stop": ["never", stop]}:
        whole = client.chat.completions.create(**asked(PROMPT, **options))
        assert whole.choices[0].message.content == text[: text.index(stop)]
        assert whole.choices[0].finish_reason == "stop"
        pieces = list(client.chat.completions.create(**asked(PROMPT, **options), stream=True))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text[: text.index(stop)]


def test_requests_wait_in_one_queue(client: Any, store: Path) -> None:
    contents = [PROMPT, "and the sky", "it is deep", "wide"]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda one: client.chat.completions.create(**asked(one)), contents))
    assert [one.choices[0].message.content for one in made] == [answered(store, one, 12) for one in contents]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_generation(client: Any, address: str, store: Path, stream: bool) -> None:
    """Otherwise the next request would wait for a hundred thousand tokens."""
    endless = asked(PROMPT, max_tokens=100_000, temperature=1.0)
    if stream:
        with client.chat.completions.create(**endless, stream=True) as answer:
            assert next(iter(answer)).choices[0].delta.content is not None
    else:
        with pytest.raises(TimeoutError):
            posted(address, json.dumps(endless).encode(), timeout=2)
    assert client.chat.completions.create(**asked(PROMPT)).choices[0].message.content == answered(store, PROMPT, 12)


def test_parts_of_a_message_are_one_text(client: Any, store: Path) -> None:
    parts = [{"type": "text", "text": PROMPT[:4]}, {"type": "text", "text": PROMPT[4:]}]
    whole = client.chat.completions.create(**asked(PROMPT, messages=[{"role": "user", "content": parts}]))
    assert whole.choices[0].message.content == answered(store, PROMPT, 12)


def test_tokens_are_counted(client: Any, store: Path) -> None:
    whole = client.chat.completions.create(**asked(PROMPT))
    pieces = list(client.chat.completions.create(**asked(PROMPT), stream=True, stream_options={"include_usage": True}))
    with TieredStore.open(store, dram="1MiB", access="read") as opened:
        prompted = len(open_tokenizer(opened).encode(f"<user>{PROMPT}\n<assistant>", add_special_tokens=False))
    for usage in whole.usage, pieces[-1].usage:
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompted, 12, prompted + 12)


def test_a_seed_repeats_an_answer_that_is_drawn(client: Any) -> None:
    def drawn(seed: int) -> str:
        made = client.chat.completions.create(**asked(PROMPT, temperature=1, top_p=0.95, seed=seed))
        text: str = made.choices[0].message.content
        return text

    assert drawn(7) == drawn(7)
    assert len({drawn(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (b"{no json", "the request is not JSON: "),
        (b"{}", "messages is a list of objects"),
        (b'{"messages": [{"role": "system", "content": "x"}]}', "template does not take these messages: no system here"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000000}', "1,000,000 more, too many for"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', "temperature is a number from 0 to 2, not -1"),
    ],
)
def test_what_is_no_request_is_refused(contents: bytes, told: str, address: str) -> None:
    """More of them: tests/integrations/test_chat_request.py."""
    status, text = posted(address, contents, timeout=60)
    assert status == 400, text
    error = json.loads(text)["error"]
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]
    assert "Error" not in error["message"]


def test_the_client_says_what_is_wrong(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens is a number from 1 on"):
        client.chat.completions.create(**asked(PROMPT, max_tokens=0))


def served(*arguments: str) -> tuple[int, str]:
    """The exit code of a server that does not begin, and what it says."""
    environment = {**ONE_THREAD, "PYTHONPATH": str(SERVE.parents[2])}
    child = programs.run([sys.executable, str(SERVE), *arguments], capture_output=True, text=True, env=environment, timeout=120)
    return child.returncode, child.stderr


def test_what_cannot_be_served_is_said_in_a_line(store: Path, tmp_path: Path) -> None:
    code, said = served(str(tmp_path / "nowhere"))
    assert (code, said.count("\n")) == (1, 1), said
    assert "serve.py: " in said
    model().save_pretrained(tmp_path / "llama")
    write_tokenizer(tmp_path / "llama")
    with TieredStore.open(tmp_path / "two", dram="8MiB") as opened:
        for name in "first", "second":
            import_model(tmp_path / "llama", opened, name=name)
    code, said = served(str(tmp_path / "two"), "--dram", "4MiB")
    assert (code, said.count("\n")) == (1, 1), said
    assert "has 2 models, 'first', 'second': choose one with --model" in said
    assert not (tmp_path / "nowhere").exists()
