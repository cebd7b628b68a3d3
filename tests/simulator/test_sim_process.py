"""A simulated engine as a process: clients that leave, faults on demand, signals, and the official client."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from kvroute.simulator.process import SimProcess, free_port

CHAT: dict[str, Any] = {"model": "sim", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 6}
COMPLETIONS = "/v1/chat/completions"
CUT = (httpx.RemoteProtocolError, httpx.ReadError)
"""How a client sees a connection that is cut: it just ends, or it is reset if the server had not read everything."""


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[SimProcess]:
    process = SimProcess(["--time-scale", "50"])
    process.start()
    try:
        asyncio.run(process.wait_ready())
        yield process
    finally:
        process.stop()


@pytest.fixture
async def client(shared_engine: SimProcess) -> AsyncIterator[httpx.AsyncClient]:
    """To an engine without a fault."""
    async with httpx.AsyncClient(base_url=shared_engine.url, trust_env=False, timeout=20) as made:
        yield made
        (await made.post("/sim/faults", content=b"none")).raise_for_status()


async def state(client: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.get("/sim/state")).json()
    return answer


async def metric(client: httpx.AsyncClient, name: str) -> float:
    (line,) = [each for each in (await client.get("/metrics")).text.splitlines() if each.startswith(f"vllm:{name}{{")]
    return float(line.rpartition(" ")[2])


# An hour of work, whatever it is: nothing of this ends by itself while a test runs.
ENDLESS = ["--prefill-tokens-per-s", "100", "--decode-s-per-token", "60", "--max-running", "2"]
PREFILLING = CHAT | {"messages": [{"role": "user", "content": "word " * 8000}]}
DECODING = CHAT | {"max_tokens": 60}


async def left_behind(url: str, body: dict[str, Any], reached: dict[str, int]) -> None:
    """Send a request, wait until the engine's state has what `reached` says, and close the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    payload = json.dumps(body).encode()
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST %s HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(payload)))
    writer.write(payload)
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client, asyncio.timeout(20):
        while not reached.items() <= (await state(client)).items():
            await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("body", [PREFILLING, DECODING], ids=["prefilling", "decoding"])
async def test_a_client_that_leaves_takes_its_request_and_its_blocks_with_it(
    body: dict[str, Any], stream: bool
) -> None:
    async with (
        SimProcess(ENDLESS) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False) as client,
    ):
        await left_behind(engine.url, body | {"stream": stream}, {"running": 1})
        async with asyncio.timeout(5):
            while await metric(client, "num_requests_running"):
                await asyncio.sleep(0.005)
        assert await metric(client, "kv_cache_usage_perc") == 0
        after = await state(client)
        assert (after["running"], after["waiting"], after["aborted"]) == (0, 0, 1)


async def test_a_client_that_leaves_the_queue_is_never_run() -> None:
    async with (
        SimProcess([*ENDLESS, "--max-running", "1"]) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False) as client,
    ):
        first = asyncio.create_task(client.post(COMPLETIONS, json=DECODING))
        async with asyncio.timeout(10):
            while (await state(client))["running_ids"] != [0]:
                await asyncio.sleep(0.01)
        await left_behind(engine.url, DECODING, {"waiting": 1})
        async with asyncio.timeout(5):
            while (await state(client))["waiting_ids"]:
                await asyncio.sleep(0.005)
        after = await state(client)
        assert (after["running_ids"], after["requests"], after["aborted"]) == ([0], 2, 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_status_answers_with_it_and_none_ends_it(client: httpx.AsyncClient) -> None:
    await client.post("/sim/faults", json={"kind": "status", "code": 503})
    answer = await client.post(COMPLETIONS, json=CHAT)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == 503
    await client.post("/sim/faults", json={"kind": "none"})
    assert (await client.post(COMPLETIONS, json=CHAT)).status_code == 200


async def test_the_header_is_for_one_request(client: httpx.AsyncClient) -> None:
    fault = json.dumps({"kind": "status", "code": 429})
    assert (await client.post(COMPLETIONS, json=CHAT, headers={"x-sim-fault": fault})).status_code == 429
    assert (await client.post(COMPLETIONS, json=CHAT)).status_code == 200


async def test_refuse_cuts_the_connection_without_an_answer(client: httpx.AsyncClient) -> None:
    await client.post("/sim/faults", json={"kind": "refuse"})
    with pytest.raises(CUT):
        await client.post(COMPLETIONS, json=CHAT)


async def test_stall_takes_requests_and_never_answers(client: httpx.AsyncClient) -> None:
    await client.post("/sim/faults", json={"kind": "stall"})
    with pytest.raises(httpx.ReadTimeout):
        await client.post(COMPLETIONS, json=CHAT, timeout=0.3)


async def test_a_fault_leaves_the_probes_alone_unless_it_is_told_to_reach_them(client: httpx.AsyncClient) -> None:
    await client.post("/sim/faults", json={"kind": "status"})
    assert (await client.get("/health")).status_code == 200
    await client.post("/sim/faults", json={"kind": "status", "path": "/"})
    assert (await client.get("/health")).status_code == 500
    assert (await client.get("/metrics")).status_code == 500
    assert (await client.get("/sim/state")).status_code == 200


@pytest.mark.parametrize("chunks", [0, 2])
async def test_drop_mid_stream_cuts_after_so_many_pieces(client: httpx.AsyncClient, chunks: int) -> None:
    await client.post("/sim/faults", json={"kind": "drop_mid_stream", "after_chunks": chunks})
    received = b""
    with pytest.raises(CUT):
        async with client.stream("POST", COMPLETIONS, json=CHAT | {"stream": True}) as answer:
            assert answer.status_code == 200
            async for data in answer.aiter_raw():
                received += data
    # The chunk that names the role stands before the first piece.
    assert received.count(b'"content":') == 1 + chunks
    assert b"[DONE]" not in received
    assert (await state(client))["running"] == 0


async def test_drop_mid_stream_cuts_a_whole_answer_in_the_middle(client: httpx.AsyncClient) -> None:
    with pytest.raises(CUT):
        await client.post(COMPLETIONS, json=CHAT, headers={"x-sim-fault": "drop_mid_stream"})


async def test_slow_makes_requests_take_so_many_times_as_long(client: httpx.AsyncClient) -> None:
    # 100 tokens, 2.5 s of simulated time, 0.05 s of the clock's; ten times that.
    body = CHAT | {"max_tokens": 100}
    slow = json.dumps({"kind": "slow", "factor": 10})
    started = time.monotonic()
    await client.post(COMPLETIONS, json=body, headers={"x-sim-fault": slow})
    assert 0.5 < time.monotonic() - started < 4
    await client.post("/sim/faults", content=slow)
    started = time.monotonic()
    await client.post(COMPLETIONS, json=body)
    assert 0.5 < time.monotonic() - started < 4


@pytest.mark.parametrize("fault", ["explode", '{"kind": "slow", "speed": 3}', '{"kind": "status", "code": "x"}', ""])
async def test_faults_that_there_are_not_are_refused(client: httpx.AsyncClient, fault: str) -> None:
    assert (await client.post("/sim/faults", content=fault.encode())).status_code == 400
    assert (await client.post(COMPLETIONS, json=CHAT, headers={"x-sim-fault": fault})).status_code == 400


async def test_the_official_client_chats_streams_and_completes(shared_engine: SimProcess) -> None:
    async with openai.AsyncOpenAI(base_url=shared_engine.url + "/v1", api_key="none", max_retries=0) as official:
        whole = await official.chat.completions.create(**CHAT)
        stream = await official.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = await official.completions.create(model="sim", prompt="hello", max_tokens=3)
        with pytest.raises(openai.NotFoundError):
            await official.chat.completions.create(**CHAT | {"model": "nope"})
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert text.usage.completion_tokens == 3


async def test_many_requests_at_once_all_get_their_own_answers(client: httpx.AsyncClient) -> None:
    bodies = [{"prompt": f"question {number}", "max_tokens": 8} for number in range(100)]
    alone = [(await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] for body in bodies]
    together = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert [answer.json()["choices"][0]["text"] for answer in together] == alone


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_and_cleanly_and_one_line_is_all_it_ever_says(number: signal.Signals) -> None:
    port = free_port()
    command = [sys.executable, "-m", "kvroute.simulator", "--port", str(port), "--decode-s-per-token", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"sim simulated on http://127.0.0.1:{port}\n".encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            payload = json.dumps(CHAT | {"stream": True}).encode()
            head = b"POST %s HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(payload))
            connection.sendall(head + payload)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            process.send_signal(number)
            assert process.wait(10) == 0
        assert process.communicate(timeout=10) == (b"", b"")


async def test_a_killed_process_is_gone_and_can_be_started_again() -> None:
    async with SimProcess(["--time-scale", "50"]) as process:
        process.kill()
        async with httpx.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx.ConnectError):
                await http.get(process.url + "/health")
        process.start()
        await process.wait_ready()


@pytest.mark.parametrize(
    "arguments", [["--time-scale", "0"], ["--kv-tokens", "15"], ["--max-running", "0"], ["--pool-bandwidth", "fast"]]
)
async def test_a_process_that_cannot_start_is_reported(arguments: list[str]) -> None:
    process = SimProcess(arguments)
    with pytest.raises(RuntimeError, match="ended with status 2"):
        await process.__aenter__()
