"""The official OpenAI client against the gateway and two simulated instances."""

import json
import socket
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from kvroute.simulator.process import SimProcess
from kvroute.simulator.workload import text
from tests.support.gateway import GatewayProcess

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "hello"}], max_tokens=6
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_a_stream_gives_the_same_text_and_its_usage(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    whole = await client.chat.completions.create(model="sim", messages=messages, max_tokens=12)
    stream = await client.chat.completions.create(
        model="sim", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_tools_are_called_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "use the tool"}]
    whole = await client.chat.completions.create(model="sim", messages=messages, tools=[TOOL])
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.tool_calls[0].function.name == "look_up"
    stream = await client.chat.completions.create(model="sim", messages=messages, tools=[TOOL], stream=True)
    calls = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "look_up"


async def test_a_tool_result_can_be_sent_back(client: openai.AsyncOpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": json.dumps({"key": "a"})}}
    answer = await client.chat.completions.create(
        model="sim",
        messages=[
            {"role": "user", "content": "look a up"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
        tools=[TOOL],
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize("prompt", ["hello world", [10, 11, 12], ["hello world"]], ids=["text", "ids", "list"])
async def test_completions(client: openai.AsyncOpenAI, prompt: str | list[int]) -> None:
    answer = await client.completions.create(model="sim", prompt=prompt, max_tokens=3)
    assert answer.choices[0].text
    stream = await client.completions.create(model="sim", prompt=prompt, max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text


async def test_models_are_the_union_of_the_fleet(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["sim"]
    assert (await client.models.retrieve("sim")).id == "sim"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


async def test_a_wrong_model_is_404_from_the_gateway(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"
    assert refused.value.type == "invalid_request_error"


async def test_the_engines_own_error_passes_untouched(
    client: openai.AsyncOpenAI, two_engines: list[SimProcess]
) -> None:
    bad = {"model": "sim", "messages": "x"}
    async with httpx.AsyncClient(trust_env=False) as direct:
        expected = await direct.post(two_engines[0].url + "/v1/chat/completions", json=bad)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**bad)  # type: ignore[call-overload]
    assert refused.value.response.content == expected.content
    assert expected.json()["error"]["param"] == "body.messages"


async def test_a_second_turn_lands_where_the_first_one_is_cached(client: openai.AsyncOpenAI) -> None:
    import random

    for number in range(4):
        messages = [{"role": "user", "content": text(random.Random(number), 800)}]
        headers = {"x-kvroute-debug": "1"}
        first = await client.chat.completions.with_raw_response.create(
            model="sim", messages=messages, max_tokens=4, extra_headers=headers
        )
        answer = first.parse()
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
        messages += [{"role": "user", "content": "go on"}]
        second = await client.chat.completions.with_raw_response.create(
            model="sim", messages=messages, max_tokens=4, extra_headers=headers
        )
        usage = second.parse().usage
        assert second.headers["x-kvroute-instance"] == first.headers["x-kvroute-instance"]
        assert second.headers["x-kvroute-reason"] == "gpu hit"
        predicted = int(second.headers["x-kvroute-cached-tokens"])
        assert answer.usage.prompt_tokens - 64 <= predicted <= usage.prompt_tokens_details.cached_tokens
        assert float(second.headers["x-kvroute-estimate-ms"]) < float(first.headers["x-kvroute-estimate-ms"])


async def test_without_the_debug_header_nothing_is_told_of_the_fleet(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.with_raw_response.create(
        model="sim", messages=[{"role": "user", "content": "x"}]
    )
    assert not [name for name in answer.headers if name.startswith("x-kvroute")]


async def test_request_ids_are_kept_or_made(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    kept = await client.chat.completions.with_raw_response.create(
        model="sim", messages=messages, extra_headers={"x-request-id": "mine-1"}
    )
    made = await client.chat.completions.with_raw_response.create(model="sim", messages=messages)
    assert kept.headers.get_list("x-request-id") == ["mine-1"]
    assert len(made.headers["x-request-id"]) == 32


async def test_each_request_leaves_one_line_that_explains_it(
    client: openai.AsyncOpenAI, gateway: GatewayProcess
) -> None:
    await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "secret words"}])
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "secret words"}])
    good, bad = await gateway.records(2)
    assert good["outcome"] == "ok"
    assert good["status"] == 200
    assert {"instance", "policy", "reason", "predicted_ttft_ms", "ttft_ms", "prompt_tokens"} <= set(good)
    assert bad["outcome"] == "refused"
    assert bad["status"] == 404
    assert "secret" not in gateway.log_path.read_text()


async def test_metrics_and_state_are_on_the_admin_port_only(
    gateway: GatewayProcess, client: openai.AsyncOpenAI
) -> None:
    await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "x"}])
    async with httpx.AsyncClient(trust_env=False) as http:
        metrics = (await http.get(gateway.admin + "/metrics")).text
        assert 'kvroute_requests_total{model="sim",outcome="ok",status="200"} 1.0' in metrics
        assert "kvroute_instance_up" in metrics
        state = (await http.get(gateway.admin + "/admin/instances")).json()
        assert [each["health"] for each in state["models"][0]["instances"]] == ["up", "up"]
        for path in ("/metrics", "/admin/instances", "/admin/index"):
            assert (await http.get(gateway.url + path)).status_code == 404
        assert (await http.get(gateway.url + "/ready")).json() == {"ready": True, "reason": ""}


async def test_other_routes_pass_through_by_the_bodys_model(gateway: GatewayProcess) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(gateway.url + "/v1/embeddings", json={"model": "sim", "input": "x"})
        assert answer.json() == {"detail": "Not Found"}
        assert answer.status_code == 404
        unknown = await http.post(gateway.url + "/v1/embeddings", json={"model": "nope", "input": "x"})
        assert unknown.json()["error"]["code"] == "model_not_found"
        escape = await http.get(gateway.url + "/v1/%2e%2e/metrics")
        assert escape.json()["error"]["code"] == "invalid_path"


async def test_body_query_and_headers_reach_the_engine_unchanged(tmp_path: object) -> None:
    import asyncio
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    seen: list[bytes] = []

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                seen.append(head + await reader.readexactly(length))
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\nx-engine: a\r\nx-engine: b\r\n\r\n{}"
            )
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(engine, "127.0.0.1", 0, family=socket.AF_INET)
    port = server.sockets[0].getsockname()[1]
    body = b'{ "model":"sim",  "messages":[{"role":"user","content":"x"}], "unknown_field": [1, {"deep": null}] }'
    async with server, GatewayProcess(tmp_path, [f"http://127.0.0.1:{port}"]) as gateway, httpx.AsyncClient() as http:
        answer = await http.post(
            gateway.url + "/v1/chat/completions?beta=true&x=%20y",
            content=body,
            headers={
                "authorization": "Bearer key",
                "traceparent": "00-ab-cd-01",
                "x-kvroute-debug": "1",
                "te": "trailers",
            },
        )
    assert answer.headers.get_list("x-engine") == ["a", "b"]
    head, _, sent = seen[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert sent == body
    assert lines[0] == b"POST /v1/chat/completions?beta=true&x=%20y HTTP/1.1"
    assert b"authorization: Bearer key" in lines
    assert b"traceparent: 00-ab-cd-01" in lines
    names = [line.split(b":")[0].lower() for line in lines[1:]]
    assert len(names) == len(set(names))
    assert not {b"te", b"x-kvroute-debug", b"accept-encoding"} & set(names)
