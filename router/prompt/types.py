"""What the rest of the router needs to know of a prompt."""

from enum import StrEnum

import msgspec


class Grade(StrEnum):
    """How far the block hashes can be trusted to match what an engine caches."""

    TOKENS = "tokens"
    """Hashed over the engine's own token ids."""
    TEXT = "text"
    """Hashed over rendered text, since no tokenizer is known: block borders and token counts are estimates."""
    NONE = "none"
    """Nothing to hash: the body has no prompt that the router can read."""


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as the index and the cost model see it.

    `hashes[i]` is the chained hash of the first `(i + 1) * block_tokens` tokens; only full blocks are hashed, so
    `len(hashes) == tokens // block_tokens` for grade TOKENS. `tokens` is an estimate unless `grade` is TOKENS.
    """

    tokens: int
    hashes: tuple[int, ...]
    block_tokens: int
    grade: Grade
