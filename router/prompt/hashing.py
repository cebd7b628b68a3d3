"""Block hashes: the keys of the index.

The format is shared by all gateways on one Redis, so it changes only together with the index's key prefix:

- root = xxh3_64 of the fields (model, LoRA, cache salt, media ids...), each as its length in bytes (little-endian u32)
  and its UTF-8 bytes;
- hash of block i = xxh3_64(token ids of block i as little-endian u32, seed = hash of block i - 1, or the root).

Only full blocks are hashed. A hash stands for the whole prefix up to the end of its block and for all that separates
KV caches, so equal hashes mean equal KV. (xxh3 is no cryptographic hash: who forges a collision makes the router
misjudge where a prompt is cached, which costs time and nothing else.)
"""

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4


def root_hash(model: str, *, lora: str = "", cache_salt: str = "", media: Sequence[str] = ()) -> int:
    """The hash that a prompt's chain begins with."""
    return _root_hash((model, lora, cache_salt, *media))


@lru_cache(maxsize=4096)
def _root_hash(fields: tuple[str, ...]) -> int:
    encoded = bytearray()
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        encoded += len(data).to_bytes(4, "little") + data
    return xxh3_64_intdigest(encoded)


def chain(root: int, tokens: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """Hashes of the full blocks of `tokens`. Raises OverflowError for an id that is not an unsigned 32-bit number."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return chain_bytes(root, memoryview(packed).cast("B"), block_tokens * TOKEN_BYTES)


def chain_bytes(root: int, data: bytes | memoryview, block_bytes: int) -> tuple[int, ...]:
    """Hashes of the full blocks of `data`: the same chain over bytes, where no tokenizer is known."""
    view = memoryview(data)
    hashes = []
    parent = root
    for start in range(0, len(view) - block_bytes + 1, block_bytes):
        parent = xxh3_64_intdigest(view[start : start + block_bytes], parent)
        hashes.append(parent)
    return tuple(hashes)
