"""The shared directory: names, presence of readers, and engines in several processes on one pool."""

import asyncio
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvroute.simulator.__main__ import bandwidth
from kvroute.simulator.chunks import chunk_hashes, file_name
from kvroute.simulator.pool import Pool
from kvroute.simulator.process import SimProcess
from kvroute.simulator.readers import STALE_S, Readers
from kvroute.simulator.timing import PoolTiming

# 2,048 tokens, eight chunks.
PROMPT = list(range(300, 2348))


def test_a_chunks_hash_is_sha256_of_canonical_cbor_cut_to_eight_bytes() -> None:
    # Written out by hand from RFC 8949: text "0"; then [unsigned 64-bit, [256 times 7], []].
    root = hashlib.sha256(b"\x610").digest()[:8]
    chunk = hashlib.sha256(b"\x83\x1b" + root + b"\x99\x01\x00" + b"\x07" * 256 + b"\x80").digest()[:8]
    assert chunk_hashes([7] * 300) == [int.from_bytes(chunk, "big")]


@pytest.mark.parametrize(
    ("token", "encoded"), [(23, b"\x17"), (24, b"\x18\x18"), (256, b"\x19\x01\x00"), (70_000, b"\x1a\x00\x01\x11\x70")]
)
def test_token_ids_are_encoded_in_as_few_bytes_as_hold_them(token: int, encoded: bytes) -> None:
    root = hashlib.sha256(b"\x610").digest()[:8]
    chunk = hashlib.sha256(b"\x83\x1b" + root + b"\x99\x01\x00" + encoded * 256 + b"\x80").digest()[:8]
    assert chunk_hashes([token] * 256) == [int.from_bytes(chunk, "big")]


def test_only_full_chunks_have_hashes_and_each_stands_for_all_before_it() -> None:
    hashes = chunk_hashes(PROMPT)
    assert len(hashes) == 8
    assert chunk_hashes(PROMPT[:-1]) == hashes[:7]
    assert set(chunk_hashes([0, *PROMPT[1:]])).isdisjoint(hashes)
    assert set(chunk_hashes(PROMPT, seed="1")).isdisjoint(hashes)


def test_file_names_are_lmcaches() -> None:
    assert file_name("Qwen/Qwen3-Coder", 0xABC) == "Qwen-SEP-Qwen3-Coder@1@0@abc@bfloat16.data"


@pytest.mark.parametrize(
    ("text", "value"), [("9.6e9", 9.6e9), ("10GB/s", 1e10), ("500 MB", 5e8), ("2GiB/s", 2 * 2**30), ("7", 7)]
)
def test_bandwidths_are_read_with_and_without_units(text: str, value: float) -> None:
    assert bandwidth(text) == value


@pytest.mark.parametrize("text", ["", "fast", "10 Gb/s", "0GB/s", "-1"])
def test_other_bandwidths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text) + "$"):
        bandwidth(text)


SHOW = """
import sys, time
from pathlib import Path
from kvroute.simulator.readers import Readers
readers = Readers(Path(sys.argv[1]), wall_time=time.time)
readers.show(3)
print("shown", flush=True)
time.sleep(60)
"""


@pytest.fixture
def reading_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that shows three reads."""
    with subprocess.Popen([sys.executable, "-c", SHOW, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"shown\n"
        yield process
        process.kill()


def test_readers_of_other_processes_are_counted_until_they_die(
    tmp_path: Path, reading_process: subprocess.Popen[bytes]
) -> None:
    (shown,) = (tmp_path / ".readers").iterdir()
    at = shown.stat().st_mtime
    readers = Readers(tmp_path, wall_time=lambda: at)
    readers.show(2)
    assert readers.others() == 3
    reading_process.kill()
    reading_process.wait()
    assert readers.others() == 0


def test_a_process_that_no_longer_says_so_does_not_read(
    tmp_path: Path, reading_process: subprocess.Popen[bytes]
) -> None:
    (shown,) = (tmp_path / ".readers").iterdir()
    at = shown.stat().st_mtime
    assert Readers(tmp_path, wall_time=lambda: at + STALE_S + 0.1).others() == 0


def test_processes_of_other_machines_are_known_by_their_files_age_alone(tmp_path: Path) -> None:
    readers = Readers(tmp_path, wall_time=time.time)
    foreign = tmp_path / ".readers" / f"elsewhere-{2**22 + 1}"
    foreign.write_bytes(b"12345")
    assert readers.others() == 5
    os.utime(foreign, (time.time() - 60, time.time() - 60))
    assert readers.others() == 0


def test_a_process_without_reads_shows_nothing(tmp_path: Path) -> None:
    readers = Readers(tmp_path, wall_time=time.time)
    readers.show(2)
    readers.show(0)
    assert list((tmp_path / ".readers").iterdir()) == []


async def complete(engine: SimProcess, prompt: list[int]) -> int:
    """Its cached tokens."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        body = {"model": "org/sim", "prompt": prompt, "max_tokens": 1}
        answer = await client.post(engine.url + "/v1/completions", json=body)
        answer.raise_for_status()
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


async def stored(pool: Path, chunks: int) -> None:
    async with asyncio.timeout(10):
        while len(await asyncio.to_thread(lambda: list(pool.glob("*.data")))) < chunks:
            await asyncio.sleep(0.01)


# The read of 2,048 tokens, 0.52 GB, takes 0.5 s.
SLOW_POOL = ["--model-name", "org/sim", "--pool-bandwidth", "1.04GB/s", "--pool-latency-s", "0", "--overhead-s", "0"]
READ_S = 2048 * PoolTiming().kv_bytes_per_token / 1.04e9


async def test_what_one_engine_computed_another_reads_from_the_pool(tmp_path: Path) -> None:
    options = [*SLOW_POOL, "--time-scale", "20", "--pool-dir", str(tmp_path)]
    async with SimProcess(options) as one, SimProcess(options) as other:
        assert await complete(one, [*PROMPT, 5]) == 0
        await stored(tmp_path, 8)
        assert await complete(other, [*PROMPT, 6]) == len(PROMPT)
        async with httpx.AsyncClient(trust_env=False) as client:
            metrics = (await client.get(other.url + "/metrics")).text
    assert 'vllm:external_prefix_cache_hits_total{engine="0",model_name="org/sim"} 2048.0' in metrics
    assert 'vllm:external_prefix_cache_queries_total{engine="0",model_name="org/sim"} 2049.0' in metrics


def test_a_chunks_file_has_its_real_size_and_takes_no_room(tmp_path: Path) -> None:
    pool = Pool(
        tmp_path,
        "org/sim",
        PoolTiming(),
        Readers(tmp_path, wall_time=time.time),
        simulated_time=time.monotonic,
        time_scale=1,
    )
    pool.store(chunk_hashes(PROMPT))
    files = list(tmp_path.glob("*@*"))
    assert {file.name for file in files} == {file_name("org/sim", each) for each in chunk_hashes(PROMPT)}
    assert {file.stat().st_size for file in files} == {256 * PoolTiming().kv_bytes_per_token}
    assert sum(file.stat().st_blocks for file in files) == 0


def test_the_pool_holds_what_comes_before_the_first_chunk_that_is_missing(tmp_path: Path) -> None:
    readers = Readers(tmp_path, wall_time=time.time)
    pool = Pool(tmp_path, "sim", PoolTiming(), readers, simulated_time=time.monotonic, time_scale=1)
    hashes = chunk_hashes(PROMPT)
    pool.store(hashes)
    assert pool.stored_tokens(hashes) == 2048
    (tmp_path / file_name("sim", hashes[3])).unlink()
    assert pool.stored_tokens(hashes) == 3 * 256


async def test_the_last_token_is_computed_though_the_pool_has_its_chunk(tmp_path: Path) -> None:
    options = [*SLOW_POOL, "--time-scale", "20", "--pool-dir", str(tmp_path)]
    async with SimProcess(options) as one, SimProcess(options) as other:
        await complete(one, PROMPT)
        await stored(tmp_path, 8)
        assert await complete(other, PROMPT) == len(PROMPT) - 256


async def test_two_processes_that_read_at_once_share_the_bandwidth(tmp_path: Path) -> None:
    options = [*SLOW_POOL, "--pool-dir", str(tmp_path)]
    async with SimProcess(options) as writer, SimProcess(options) as one, SimProcess(options) as other:
        await complete(writer, [*PROMPT, 5])
        await stored(tmp_path, 8)
        started = time.monotonic()
        assert await asyncio.gather(complete(one, [*PROMPT, 6]), complete(other, [*PROMPT, 7])) == [len(PROMPT)] * 2
        # However much they overlapped, the pool has given 1 GB; alone each would have been done in half the time.
        assert time.monotonic() - started > 2 * READ_S * 0.9
    assert list((tmp_path / ".readers").iterdir()) == []


async def test_a_client_that_leaves_during_a_read_ends_it(tmp_path: Path) -> None:
    options = [*SLOW_POOL, "--pool-dir", str(tmp_path)]
    async with SimProcess(options) as writer, SimProcess([*options, "--pool-bandwidth", "1MB/s"]) as reader:
        await complete(writer, [*PROMPT, 5])
        await stored(tmp_path, 8)
        request = asyncio.create_task(complete(reader, [*PROMPT, 6]))
        async with asyncio.timeout(10):
            while not list((tmp_path / ".readers").iterdir()):
                await asyncio.sleep(0.01)
            request.cancel()
            while list((tmp_path / ".readers").iterdir()):
                await asyncio.sleep(0.01)
