"""The HTTP side beside a real vLLM 0.32's recorded answers: same fields, same words."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.prompt.model_folder import kv_bytes_per_token
from kvroute.simulator.process import SimProcess
from kvroute.simulator.prompts import MODEL_FOLDER, Prompts
from kvroute.simulator.timing import PoolTiming
from kvroute.simulator.words import WORDS
from kvroute.simulator.workload import sessions, text

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "vllm-0.32.0-http.json").read_text())
MESSAGES = [{"role": "user", "content": "hello there"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimProcess]:
    """Of the recorded engine's name and limits, fast."""
    process = SimProcess(
        ["--model-name", "tiny", "--max-model-len", "4096", "--kv-tokens", "6144", "--block-size", "128"]
        + ["--time-scale", "50"]
    )
    process.start()
    try:
        asyncio.run(process.wait_ready())
        yield process
    finally:
        process.stop()


@pytest.fixture
def client(engine: SimProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, trust_env=False, timeout=20) as made:
        yield made


def recorded(name: str) -> Any:
    return json.loads(GOLDEN["http"][name]["answer"])


def shape(value: object) -> object:
    """Field names and types, all the way down."""
    if isinstance(value, dict):
        return [(key, shape(each)) for key, each in value.items()]
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return type(value).__name__


def chunks(stream: str) -> list[dict[str, Any]]:
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_chats_answer_has_the_recorded_fields(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert shape(answer.json()) == shape(recorded("chat"))
    assert re.fullmatch("chatcmpl-[0-9a-f]{16}", answer.json()["id"])


def test_a_completions_answer_has_the_recorded_fields(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "hello there", "max_tokens": 3})
    assert shape(answer.json()) == shape(recorded("completion"))


def test_a_chats_stream_has_the_recorded_chunks(client: httpx.Client) -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    expected = chunks(GOLDEN["http"]["chat_stream"]["answer"])
    assert [shape(each) for each in chunks(answer.text)] == [shape(each) for each in expected]


def test_without_include_usage_a_stream_ends_with_its_last_token(client: httpx.Client) -> None:
    last = chunks(client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)[-1]
    assert last["choices"][0]["finish_reason"] == "length"


def test_continuous_usage_counts_the_tokens_so_far_in_each_chunk(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": options})
    assert [each["usage"]["completion_tokens"] for each in chunks(answer.text)] == [0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_what_the_whole_answer_says(client: httpx.Client, path: str) -> None:
    body = {"messages": MESSAGES, "prompt": "hello there", "max_tokens": 30}
    choice = client.post(path, json=body).json()["choices"][0]
    whole = choice["message"]["content"] if "message" in choice else choice["text"]
    pieces = [each["choices"][0] for each in chunks(client.post(path, json=body | {"stream": True}).text)]
    assert "".join(each["delta"]["content"] if "delta" in each else each["text"] for each in pieces) == whole
    assert len(whole.split()) == 30


def test_different_prompts_get_different_answers(client: httpx.Client) -> None:
    bodies = [{"prompt": word, "max_tokens": 12} for word in ("one", "two", "three")]
    assert len({client.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies}) == 3


def test_a_chat_without_a_limit_ends_by_itself(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_limit_is_used_up(client: httpx.Client, limit: str) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, limit: 7}).json()
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "length"


def test_usage_tells_what_was_cached_and_what_was_put_into_the_cache(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "usage " + "word " * 300}], "max_tokens": 4}
    cold, warm = (client.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2))
    assert cold["prompt_tokens"] > 300
    assert cold["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "created_cache_tokens": 256,
        "multimodal_tokens": None,
    }
    assert warm["prompt_tokens_details"]["cached_tokens"] == 256
    assert warm["prompt_tokens_details"]["created_cache_tokens"] == 0
    salted = client.post("/v1/chat/completions", json=body | {"cache_salt": "a"}).json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_conversations_next_turn_hits_the_answer_before_it(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "turns"}]
    first = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 600}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["usage"]["total_tokens"] - 1) // 128 * 128


LONG = {"messages": [{"role": "user", "content": "word " * 5000}]}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("unknown_model", CHAT | {"model": "nope"}),
        ("messages_not_a_list", {"model": "tiny", "messages": "x"}),
        ("too_long", LONG),
        ("bad_max_tokens", CHAT | {"max_tokens": -1}),
    ],
)
def test_refusals_are_word_for_word_the_recorded_ones(client: httpx.Client, name: str, body: dict[str, Any]) -> None:
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == GOLDEN["http"][name]["status"]
    assert answer.json() == recorded(name)


def test_broken_json_is_refused_in_the_recorded_words(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", content=b"{bad")
    assert (answer.status_code, answer.json()) == (400, recorded("bad_json"))


def test_unknown_paths_and_methods_are_answered_as_fastapi_does(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={"model": "tiny", "input": "x"})
    assert (answer.status_code, answer.json()) == (404, recorded("unknown_path"))
    answer = client.get("/v1/chat/completions")
    assert (answer.status_code, answer.json()) == (405, {"detail": "Method Not Allowed"})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", b"{}", "body.messages"),
        ("/v1/chat/completions", b"[]", "body"),
        ("/v1/chat/completions", b'{"messages": []}', None),
        ("/v1/chat/completions", b'{"messages": ["x"]}', "body.messages.0"),
        ("/v1/chat/completions", b'{"messages": [{"content": "x"}]}', "body.messages.0.role"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 5}]}', "body.messages.0.content"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "max_tokens": "x"}', "body.max_tokens"),
        ("/v1/chat/completions", b"\xff", "body.0"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "max_tokens": true}', "body.max_tokens"),
        ("/v1/completions", b"{}", "body.prompt"),
        ("/v1/completions", b'{"prompt": ""}', "body.prompt"),
        ("/v1/completions", b'{"prompt": ["a", "b"]}', "body.prompt"),
        ("/v1/completions", b'{"prompt": [1, -1]}', "body.prompt"),
        ("/v1/completions", b'{"prompt": [1, 4294967296]}', "body.prompt"),
        ("/tokenize", b"{}", "body.prompt"),
        ("/detokenize", b'{"tokens": ["x"]}', "body.tokens"),
    ],
)
def test_whatever_cannot_be_read_is_a_400_of_the_apis_form(
    client: httpx.Client, path: str, body: bytes, param: str | None
) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert list(answer.json()["error"]) == ["message", "type", "param", "code"]
    assert answer.json()["error"]["param"] == param


def test_the_model_card_has_the_recorded_fields(client: httpx.Client) -> None:
    answer = client.get("/v1/models").json()
    assert shape(answer) == shape(recorded("models"))
    assert (answer["data"][0]["id"], answer["data"][0]["max_model_len"]) == ("tiny", 4096)


def test_the_small_routes_answer_as_vllm_does(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": "0.32.0"}
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/kv_event_sources").json() == {}
    for path in ("/health", "/ping"):
        assert (client.get(path).status_code, client.get(path).content) == (200, b"")
    assert client.post("/reset_prefix_cache").json() == recorded("reset")


def test_tokenize_counts_what_the_request_itself_would(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"model": "tiny", "prompt": "hello world"}).json()
    assert shape(answer) == shape(recorded("tokenize"))
    counted = client.post("/tokenize", json=CHAT).json()["count"]
    assert counted == client.post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"]


def test_detokenize_gives_back_what_tokenize_took(client: httpx.Client) -> None:
    written = "Größe: 12 <|im_end|> tokens\n"
    tokenized = client.post("/tokenize", json={"prompt": written, "return_token_strs": True}).json()
    assert client.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": written}
    assert len(tokenized["token_strs"]) == tokenized["count"]


def series(metrics: str) -> set[str]:
    """Names with their labels but for values that differ between engines."""
    found = set()
    for line in metrics.splitlines():
        name = line.rpartition(" ")[0]
        if name.startswith("vllm:") and "_created" not in name and "cache_config_info" not in name:
            found.add(name)
    return found


def test_all_metrics_are_a_vllms_with_its_labels_and_buckets(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json=CHAT)
    ours = series(client.get("/metrics").text)
    recorded_series = series(GOLDEN["metrics"])
    # A real engine's token buckets end with its context length.
    assert {each for each in ours - recorded_series if "computed_tokens_bucket" not in each} == set()
    assert recorded_series - ours == set()


def test_the_cache_configuration_is_told_as_labels(client: httpx.Client) -> None:
    (line,) = re.findall(r"^vllm:cache_config_info.*$", client.get("/metrics").text, re.M)
    (real,) = re.findall(r"^vllm:cache_config_info.*$", GOLDEN["metrics"], re.M)
    labels, real_labels = (set(re.findall(r'\w+="[^"]*"', each)) for each in (line, real))
    assert labels <= real_labels
    assert {'block_size="128"', 'num_gpu_blocks="48"'} <= labels


def value(client: httpx.Client, name: str) -> float:
    (found,) = re.findall(rf"^vllm:{name}\{{[^\n]*\}} (\S+)$", client.get("/metrics").text, re.M)
    return float(found)


def test_counters_count_tokens_and_requests(client: httpx.Client) -> None:
    names = ["prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"]
    names += ["time_to_first_token_seconds_count"]
    prompt = list(range(100, 400))
    client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5})
    before = [value(client, name) for name in names]
    client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5})
    after = [value(client, name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [300, 5, 300, 256, 1]


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def test_a_tool_is_called_when_the_user_says_so(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "use the tool"}], "tools": [TOOL]}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": "{}"}
    last = chunks(client.post("/v1/chat/completions", json=body | {"stream": True}).text)[-1]["choices"][0]
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["tool_calls"][0]["index"] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": "none"},
        {"messages": MESSAGES},
        {"messages": [{"role": "user", "content": "use the tool"}, {"role": "tool", "content": "42"}]},
        {"tools": []},
    ],
    ids=["choice-none", "no-such-word", "result-is-back", "no-tools"],
)
def test_otherwise_the_answer_is_text(client: httpx.Client, change: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "use the tool"}], "tools": [TOOL], "max_tokens": 2} | change
    assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_tools_and_the_system_prompt_are_part_of_the_prompt() -> None:
    prompts = Prompts()
    plain = prompts.text(prompts.read_chat({"messages": [{"role": "system", "content": "be brief"}, *MESSAGES]}))
    assert "<|im_start|>system\nbe brief<|im_end|>" in plain
    assert plain.endswith("<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "look_up"' in prompts.text(prompts.read_chat({"messages": MESSAGES, "tools": [TOOL]}))


def test_content_in_parts_is_the_same_prompt_as_its_lines() -> None:
    prompts = Prompts()
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    whole = prompts.read_chat({"messages": [{"role": "user", "content": "hello\nthere"}]})
    assert prompts.read_chat({"messages": [{"role": "user", "content": parts}]}) == whole


def test_a_word_with_its_space_is_one_token() -> None:
    prompts = Prompts()
    assert [prompts.text([token]) for token in prompts.vocabulary] == [" " + word for word in WORDS]


def test_the_model_folder_tells_the_kv_size_that_the_pool_has() -> None:
    assert kv_bytes_per_token(MODEL_FOLDER) == PoolTiming().kv_bytes_per_token == 253_952


def test_the_workload_is_the_same_for_the_same_seed_and_has_shared_system_prompts() -> None:
    load = sessions(12, seed=3)
    assert load == sessions(12, seed=3)
    assert load != sessions(12, seed=4)
    assert 1 < len({session.system for session in load}) <= 3
    assert len({session.document for session in load}) == 12


def test_a_workloads_documents_are_as_long_as_asked_for() -> None:
    for session in sessions(3, seed=1, turns=4, document_words=(100, 120)):
        assert len(session.turns) == 4
        tokens = Prompts().read_completion({"prompt": " " + session.document})
        assert 100 <= len(tokens) <= 120


def test_text_is_words_of_the_list() -> None:
    from random import Random

    assert set(text(Random(1), 500).split()) <= set(WORDS)
