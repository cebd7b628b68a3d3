"""KV events: what a subscriber makes of them is what is in the cache, and they look as vLLM's do."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from kvroute.prompt.hashing import chain, root_hash
from kvroute.simulator.blocks import BlockCache
from kvroute.simulator.engine import HASH_SEED, Engine
from kvroute.simulator.events import END_OF_REPLAY, Publisher
from kvroute.simulator.metrics import Histograms
from kvroute.simulator.process import SimProcess, free_port
from kvroute.simulator.timing import Timing

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "vllm-0.32.0-http.json").read_text())
BLOCK = 4


@asynccontextmanager
async def publishing_engine(blocks: int = 40) -> AsyncIterator[tuple[Engine, Publisher]]:
    """Ten thousand times as fast as the clock."""
    publisher = Publisher(free_port(), free_port())
    started = time.monotonic()
    engine = Engine(
        Timing(max_running=4),
        BlockCache(blocks, BLOCK),
        simulated_time=lambda: (time.monotonic() - started) * 10_000,
        time_scale=10_000,
        vocabulary=range(100),
        seed=0,
        histograms=Histograms("sim"),
        publisher=publisher,
    )
    try:
        yield engine, publisher
    finally:
        await engine.close()
        await publisher.close()


async def generate(engine: Engine, prompt: list[int], answer_tokens: int, *, salt: str = "") -> list[int]:
    generation = engine.prepare(prompt, answer_tokens, cache_salt=salt)
    engine.start(generation)
    try:
        return [token async for piece in generation.pieces() for token in piece]
    finally:
        engine.leave(generation)


async def replay(publisher: Publisher, first: int) -> list[list[bytes]]:
    """Answers to one replay request, the last one included."""
    assert publisher.replay_endpoint is not None
    answers = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(publisher.replay_endpoint.replace("*", "127.0.0.1"))
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        async with asyncio.timeout(10):
            while not answers or answers[-1][2] != END_OF_REPLAY:
                answers.append(await socket.recv_multipart())
    return answers


async def replayed_events(publisher: Publisher) -> list[dict[str, Any]]:
    answers = await replay(publisher, 0)
    return [event for frames in answers[:-1] for event in msgspec.msgpack.decode(frames[3])[1]]


class Model:
    """What a subscriber knows."""

    def __init__(self) -> None:
        self.blocks: dict[int, int | None] = {}
        """Hash to parent."""

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.blocks[block]
            # Nothing is left without what comes before it.
            assert all(parent is None or parent in self.blocks for parent in self.blocks.values())
        else:
            parent = event["parent_block_hash"]
            assert parent is None or parent in self.blocks
            assert len(event["token_ids"]) == BLOCK * len(event["block_hashes"])
            for block in event["block_hashes"]:
                assert block not in self.blocks
                self.blocks[block] = parent
                parent = block


async def test_the_events_add_up_to_the_cache_at_every_moment() -> None:
    random = Random(5)
    prompts = [[prefix] * random.randint(4, 20) + [random.randint(0, 3)] * 9 for prefix in range(4) for _ in range(8)]
    random.shuffle(prompts)
    async with publishing_engine() as (engine, publisher):
        for start in range(0, len(prompts), 4):
            tasks = [asyncio.create_task(generate(engine, each, 12)) for each in prompts[start : start + 4]]
            await asyncio.sleep(0.002)
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            model = Model()
            events = await replayed_events(publisher)
            for event in events:
                model.apply(event)
            assert model.blocks.keys() == engine.cache.cached
        assert {"BlockStored", "BlockRemoved"} == {event["type"] for event in events}
        assert engine.reset()
        model.apply((await replayed_events(publisher))[-1])
        assert model.blocks == {}
        assert engine.cache.cached == frozenset()


async def test_stored_blocks_hold_the_tokens_of_prompt_and_answer() -> None:
    async with publishing_engine() as (engine, publisher):
        answer = await generate(engine, [1, 2, 3, 4, 5, 6], 7)
        events = await replayed_events(publisher)
    tokens = [token for event in events for token in event["token_ids"]]
    # The answer's last token is never fed back.
    assert tokens == [1, 2, 3, 4, 5, 6, *answer[:-1]]
    hashes = [block for event in events for block in event["block_hashes"]]
    assert tuple(hashes) == chain(root_hash(HASH_SEED), tokens, BLOCK)


async def test_a_salt_makes_other_blocks_and_is_told_with_the_first() -> None:
    async with publishing_engine() as (engine, publisher):
        await generate(engine, [1] * 12, 1)
        await generate(engine, [1] * 12, 1, salt="tenant-a")
        plain, salted = await replayed_events(publisher)
    assert plain["extra_keys"] == [None, None, None]
    assert salted["extra_keys"] == [["tenant-a"], None, None]
    assert set(plain["block_hashes"]).isdisjoint(salted["block_hashes"])


async def test_a_replay_begins_where_it_is_asked_to_and_ends_with_minus_one() -> None:
    async with publishing_engine() as (engine, publisher):
        for token in range(5):
            await generate(engine, [token] * 8, 1)
        answers = await replay(publisher, 3)
    assert [frames[:3] for frames in answers] == [
        [b"", b"", (3).to_bytes(8, "big")],
        [b"", b"", (4).to_bytes(8, "big")],
        [b"", b"", b"\xff" * 8],
    ]
    assert answers[-1][3] == b""


async def test_a_malformed_replay_request_does_not_end_the_service() -> None:
    async with publishing_engine() as (engine, publisher):
        assert publisher.replay_endpoint is not None
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(publisher.replay_endpoint.replace("*", "127.0.0.1"))
            await socket.send_multipart([b"what"])
            await socket.send_multipart([b"", b"short"])
            await generate(engine, [1] * 8, 1)
            assert len(await replay(publisher, 0)) == 2


def recorded(frames: list[str]) -> tuple[bytes, bytes, list[Any]]:
    topic, number, payload = map(base64.b64decode, frames)
    return topic, number, msgspec.msgpack.decode(payload)


async def test_messages_of_a_running_engine_have_the_recorded_form() -> None:
    port, replay_port = free_port(), free_port()
    options = ["--events-port", str(port), "--replay-port", str(replay_port), "--block-size", "16", "--kv-tokens", "64"]
    async with SimProcess([*options, "--time-scale", "100"]) as process, httpx.AsyncClient(trust_env=False) as client:
        sources = (await client.get(process.url + "/kv_event_sources")).json()
        expected = json.loads(GOLDEN["http"]["event_sources"]["answer"])
        endpoints = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay_port}"}
        assert sources == {"0": expected["0"] | endpoints}
        messages: list[list[bytes]] = []
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(f"tcp://127.0.0.1:{port}")
            async with asyncio.timeout(20):
                # Until the subscription has arrived, messages go nowhere.
                for token in range(1000):
                    body = {"prompt": [token] * 33, "max_tokens": 1, "cache_salt": "tenant-a"}
                    assert (await client.post(process.url + "/v1/completions", json=body)).is_success
                    if await socket.poll(50):
                        break
                messages.append(await socket.recv_multipart())
                for token in range(2000, 2003):
                    body = {"prompt": [token] * 33, "max_tokens": 1, "cache_salt": "tenant-a"}
                    assert (await client.post(process.url + "/v1/completions", json=body)).is_success
                assert (await client.post(process.url + "/reset_prefix_cache")).json() == {"success": True}
                while b"AllBlocksCleared" not in messages[-1][2]:
                    messages.append(await socket.recv_multipart())
    numbers = [int.from_bytes(number, "big") for _, number, _ in messages]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    forms = {}
    for topic, number, payload in messages:
        at, events, rank = msgspec.msgpack.decode(payload)
        assert (topic, len(number), rank) == (b"", 8, 0)
        assert isinstance(at, float)
        for event in events:
            forms[event["type"]] = (list(event), [type(value) for value in event.values()])
    expected_forms = {}
    for frames in GOLDEN["event_frames"]:
        topic, number, (at, events, rank) = recorded(frames)
        assert (topic, len(number), rank) == (b"", 8, 0)
        for event in events:
            if event.get("parent_block_hash") is None:
                expected_forms[event["type"]] = (list(event), [type(value) for value in event.values()])
    assert forms == expected_forms
