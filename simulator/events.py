"""KV cache events over ZeroMQ, in the form of vLLM 0.24 to 0.32.

A message has three frames: topic (empty), sequence number (8 bytes, big-endian, from 0 at the engine's start), and a
msgpack array [time, events, data-parallel rank]; an event is a map with its class name under "type". A replay is asked
for with [empty, first sequence number] and answered, on the same socket, by [empty, topic, number, payload] for each
buffered message from there on, then [empty, empty, -1, empty].
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

BUFFERED_MESSAGES = 10_000
PUBLISHER_HWM = 100_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

Event = dict[str, object]


def block_stored(
    hashes: Sequence[int], parent: int | None, tokens: Sequence[int], block_tokens: int, cache_salt: str = ""
) -> Event:
    """Consecutive blocks with the tokens that they hold; `parent` is None for a prompt's first block, which is the one
    that tells the salt."""
    extra_keys: list[list[str] | None] = [None] * len(hashes)
    if cache_salt and parent is None:
        extra_keys[0] = [cache_salt]
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_tokens,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra_keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def block_removed(block: int) -> Event:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}


def all_blocks_cleared() -> Event:
    return {"type": "AllBlocksCleared"}


class Publisher:
    """The engine's two sockets. Belongs to the running event loop."""

    def __init__(self, port: int, replay_port: int | None) -> None:
        """Binds at once; raises zmq.ZMQError when a port is taken."""
        self.endpoint = f"tcp://*:{port}"
        self.replay_endpoint = None if replay_port is None else f"tcp://*:{replay_port}"
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED_MESSAGES)
        self._next = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(PUBLISHER_HWM)
        self._replays: asyncio.Task[None] | None = None
        try:
            self._socket.bind(self.endpoint)
            if self.replay_endpoint is not None:
                socket = zmq.asyncio.Socket(self._context, zmq.ROUTER)
                # A ROUTER drops what goes above its mark, and a whole replay has to fit.
                socket.set_hwm(2 * (BUFFERED_MESSAGES + 1))
                socket.bind(self.replay_endpoint)
                self._replays = asyncio.create_task(self._serve_replays(socket))
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: Sequence[Event]) -> None:
        """One message. Never blocks: a PUB socket drops what a slow subscriber does not fetch."""
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._buffer.append((self._next, payload))
        self._socket.send_multipart([b"", self._next.to_bytes(8, "big"), payload])
        self._next += 1

    async def close(self) -> None:
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.wait([self._replays])
        self._context.destroy(linger=0)

    async def _serve_replays(self, socket: zmq.asyncio.Socket) -> None:
        with socket:
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    # Malformed: vLLM says nothing either.
                    continue
                client, first = frames[0], int.from_bytes(frames[2], "big")
                for number, payload in list(self._buffer):
                    if number >= first:
                        await socket.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
                await socket.send_multipart([client, b"", b"", END_OF_REPLAY, b""])
