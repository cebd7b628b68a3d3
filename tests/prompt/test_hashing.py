"""The block hash format, which gateways on one Redis share."""

from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvroute.prompt.hashing import chain, chain_bytes, root_hash

ids = st.lists(st.integers(0, 2**32 - 1), max_size=300)


def plainly(root: int, tokens: list[int], block_tokens: int) -> tuple[int, ...]:
    """The format's words, one by one."""
    hashes = []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_tokens])
        root = xxhash.xxh3_64(data, seed=root).intdigest()
        hashes.append(root)
    return tuple(hashes)


@given(st.integers(0, 2**64 - 1), ids, st.integers(1, 64))
def test_the_chain_is_as_documented(root: int, tokens: list[int], block_tokens: int) -> None:
    assert chain(root, tokens, block_tokens) == plainly(root, tokens, block_tokens)


@given(ids, ids)
def test_a_longer_prompt_has_the_hashes_of_its_prefix(tokens: list[int], more: list[int]) -> None:
    prefix = chain(1, tokens, 16)
    assert chain(1, tokens + more, 16)[: len(prefix)] == prefix


@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=100), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(tokens) // 16 * 16 - 1))
    changed = [*tokens]
    changed[position] ^= 1
    before, after = chain(1, tokens, 16), chain(1, changed, 16)
    block = position // 16
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


def test_everything_that_separates_caches_separates_roots() -> None:
    roots = [
        root_hash("m"),
        root_hash("n"),
        root_hash("m", lora="a"),
        root_hash("m", cache_salt="a"),
        root_hash("m", media=["a"]),
        root_hash("m", media=["a", ""]),
        root_hash("ma"),
        root_hash("", lora="m"),
    ]
    assert len(set(roots)) == len(roots)


def test_known_answers() -> None:
    """These values are in operators' Redis servers: a change of them is a change of the format."""
    assert root_hash("m") == 5996342643462224776
    assert chain(root_hash("m"), range(32), 16) == (5330890470986380770, 6604758450216520208)


@pytest.mark.parametrize("bad", [[-1], [2**32], ["1"], [1.5], [None]])
def test_what_is_no_token_id_is_refused(bad: list[object]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        chain(1, bad * 16, 16)  # type: ignore[arg-type]


@given(st.binary(max_size=500), st.binary(max_size=100))
def test_text_chains_have_the_prefix_property_too(data: bytes, more: bytes) -> None:
    prefix = chain_bytes(7, data, 32)
    assert len(prefix) == len(data) // 32
    assert chain_bytes(7, data + more, 32)[: len(prefix)] == prefix


def test_token_blocks_are_bytes_blocks_of_their_encoding() -> None:
    assert chain(7, range(100), 16) == chain_bytes(7, array("I", range(100)).tobytes(), 64)
