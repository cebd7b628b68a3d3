"""How LMCache names KV in a shared directory (its fs connector, 0.5): chunk hashes and file names.

The prompt is cut into chunks of 256 tokens; only full ones are stored. A chunk's hash is the first 8 bytes
(big-endian) of

    SHA-256(canonical CBOR of [hash of the chunk before it, [token ids], []])

which is LMCache's `pre_caching_hash_algorithm: sha256_cbor`; before the first chunk stands the hash, made in the same
way, of the seed's text. The seed is PYTHONHASHSEED, and "0" is what LMCache's documentation has fleets agree on.
CBOR: RFC 8949, core deterministic encoding.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

CHUNK_TOKENS = 256


def chunk_hashes(tokens: Sequence[int], seed: str = "0") -> list[int]:
    """Hashes of the full chunks of a prompt, as unsigned 64-bit numbers."""
    text = seed.encode()
    parent = _first_8_bytes(_cbor_head(3, len(text)) + text)
    hashes = []
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        ids = b"".join(map(_cbor_token, tokens[start : start + CHUNK_TOKENS]))
        parent = _first_8_bytes(_cbor_head(4, 3) + _cbor_head(0, parent) + _cbor_head(4, CHUNK_TOKENS) + ids + b"\x80")
        hashes.append(parent)
    return hashes


def file_name(model: str, chunk_hash: int) -> str:
    """`<model>@<world size>@<worker>@<chunk hash>@<dtype>.data`, of an engine with one worker and bf16 KV."""
    return f"{model.replace('/', '-SEP-')}@1@0@{chunk_hash:x}@bfloat16.data"


def _first_8_bytes(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def _cbor_head(major: int, value: int) -> bytes:
    """A data item's head: three bits of major type (0: unsigned, 3: text, 4: array), then the value in as few bytes as
    hold it."""
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << (8 * size):
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise OverflowError(f"{value} takes more than 64 bits")


@lru_cache(maxsize=1 << 16)
def _cbor_token(token: int) -> bytes:
    # Prompts repeat a few thousand ids; building each item anew would be most of the time that hashing takes.
    return _cbor_head(0, token)
