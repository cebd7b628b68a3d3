"""KV cache events over ZeroMQ, in the form of vLLM since 0.24.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0), and a msgpack array
[time, events, data-parallel rank]; an event is a map with its class name under "type", default values left out. A
replay is asked for with [empty, first sequence number] and answered by [empty, topic, number, payload] for each
buffered message, then [empty, empty, -1, empty].
"""

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

BUFFERED = 10_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

Event = dict[str, object]


def block_stored(hashes: Sequence[int], parent: int | None, tokens: Sequence[int], block_tokens: int) -> Event:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_tokens,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }


def blocks_removed(hashes: Sequence[int]) -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}


def all_blocks_cleared() -> Event:
    return {"type": "AllBlocksCleared"}


class Publisher:
    def __init__(self, port: int, replay_port: int | None) -> None:
        self.endpoint = f"tcp://*:{port}"
        self.replay_endpoint = f"tcp://*:{replay_port}" if replay_port else None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind(self.endpoint)
        self._replay = None
        if self.replay_endpoint:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.bind(self.replay_endpoint)
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFERED)
        self._next = 0

    async def publish(self, events: Sequence[Event]) -> None:
        number = self._next.to_bytes(8, "big")
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._next += 1
        self._buffer.append((number, payload))
        await self._socket.send_multipart([b"", number, payload])

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled."""
        if self._replay is None:
            return
        while True:
            client, _, start = await self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, payload in list(self._buffer):
                if int.from_bytes(number, "big") >= first:
                    await self._replay.send_multipart([client, b"", b"", number, payload])
            await self._replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self._context.destroy(linger=0)
