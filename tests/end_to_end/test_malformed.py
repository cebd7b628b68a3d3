"""A thousand malformed requests: each a 4xx in OpenAI's form or a closed connection, never a 500, never a crash."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable

import httpx

from kvroute.simulator.process import SimProcess
from tests.support.gateway import GatewayProcess
from tests.support.serving import exchange

COUNT = 1000
GOOD = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
VALUES: list[object] = [None, True, -1, 0, 2**63, 1e308, "", "x", [], [[]], {}, {"a": {"b": []}}, "\ud800", "\x00"]


def post(body: bytes, *headers: str, path: str = "/v1/chat/completions", length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", "Connection: close", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def bad_json(rng: random.Random) -> bytes:
    body = bytearray(json.dumps(GOOD).encode())
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(3)
        position = rng.randrange(len(body))
        if kind == 0:
            del body[position:]
        elif kind == 1:
            body[position : position + 1] = bytes([rng.randrange(256)])
        else:
            body[position:position] = rng.choice([b"{", b"]", b'"', b"\xff", b"\\u", b",,", b"\x00", b"NaN"])
        if not body:
            return post(b"{")
    try:
        json.loads(bytes(body))
    except ValueError:
        return post(bytes(body))
    return post(bytes(body) + b"}")


def wrong_types(rng: random.Random) -> bytes:
    body = dict(GOOD)
    body["messages"] = rng.choice(
        [*VALUES[:4], "x", [], {}, [1], [None], [{"content": "x"}], [{"role": 5, "content": "x"}], [[GOOD]]]
    )
    for name in rng.sample(["temperature", "stop", "tools", "unknown", "cache_salt", "chat_template_kwargs"], 3):
        body[name] = rng.choice(VALUES)
    return post(json.dumps(body).encode())


def wrong_model(rng: random.Random) -> bytes:
    model = rng.choice([5, [], {}, True, "nope", "../sim", "s" * 10_000, "\ud800", "\x00", "*"])
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/anything"])
    return post(json.dumps(GOOD | {"model": model}).encode(), path=path)


def no_object(rng: random.Random) -> bytes:
    return post(rng.choice([b"", b"[]", b"5", b'"x"', b"null", b"[" * 50_000, b'{"a":' * 50_000, b"\xef\xbb\xbf"]))


def huge_headers(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return post(b"{}", f"X-Big: {'x' * rng.randint(70_000, 200_000)}")
    return post(b"{}", *(f"X-{number}: {'y' * 50}" for number in range(rng.randint(1500, 3000))))


def truncated(rng: random.Random) -> bytes:
    whole = post(json.dumps(GOOD).encode())
    return whole[: rng.randrange(1, len(whole) - 1)]


def wrong_length(rng: random.Random) -> bytes:
    return post(b"{}", length=rng.choice([3, 100, 10**9, 10**12, 2**64, 10**30]))


def smuggling(rng: random.Random) -> bytes:
    hidden = "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
    headers = rng.choice(
        [
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 5",
            "Content-Length: 5\r\nContent-Length: 50",
            "Content-Length: 5, 5",
            "Content-Length: 0x5",
            "Content-Length : 5",
            "Content-Length: -5",
            "Content-Length: 5\r\n\tTransfer-Encoding: chunked",
            "Transfer-Encoding: gzip, chunked",
            "Transfer-Encoding: chunked, identity",
            "Transfer-Encoding: xchunked",
            "Transfer-Encoding : chunked",
            "Transfer-Encoding: \x0bchunked",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
            "X: a\rTransfer-Encoding: chunked",
            "X: a\nContent-Length: 5",
            "Transfer-Encoding: chunked\x00",
        ]
    )
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n0\r\n\r\n{hidden}".encode("latin-1")


def not_http(rng: random.Random) -> bytes:
    return rng.choice(
        [
            rng.randbytes(rng.randint(1, 400)) + b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
            b"G\x00T / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET http://evil/../v1/x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]
    )


def odd_requests(rng: random.Random) -> bytes:
    return rng.choice(
        [
            post(b"{}", "Content-Encoding: gzip"),
            post(b"{}", path="/v1/../health"),
            post(b"{}", path="/v1/%2e%2e/%2e%2e/etc/passwd"),
            post(b"{}", path="/nothing/here"),
            b"GET /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
            b"DELETE /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
            post(b"--x\r\n\r\n--x--", "Content-Type: multipart/form-data; boundary=x", path="/v1/audio/transcriptions"),
        ]
    )


KINDS: list[Callable[[random.Random], bytes]] = [
    bad_json,
    wrong_types,
    wrong_model,
    no_object,
    huge_headers,
    truncated,
    wrong_length,
    smuggling,
    not_http,
    odd_requests,
]


def verdict(answer: bytes) -> str:
    """What came back, in a word; raises AssertionError for what must not."""
    if not answer:
        return "closed"
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    assert 400 <= status < 500, answer
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} <= set(error), answer
    assert error["message"]
    return str(status)


async def test_a_thousand_malformed_requests(gateway: GatewayProcess, two_engines: list[SimProcess]) -> None:
    rng = random.Random(1)
    requests = [KINDS[number % len(KINDS)](rng) for number in range(COUNT)]
    limit = asyncio.Semaphore(20)

    async def one(raw: bytes) -> str:
        async with limit:
            # The client has said all that it will say; what is not complete by then never will be.
            return verdict(await exchange(gateway.port, raw, close_write=True, timeout_s=30))

    verdicts = Counter(await asyncio.gather(*map(one, requests)))
    assert verdicts.total() == COUNT
    assert {"400", "404", "431", "closed"} <= set(verdicts)
    assert gateway.process is not None
    assert gateway.process.poll() is None
    assert "Traceback" not in gateway.stderr_path.read_text()
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(gateway.url + "/v1/chat/completions", json=GOOD)
        assert answer.status_code == 200
        for engine in two_engines:
            state = (await client.get(engine.url + "/sim/state")).json()
            assert state["running"] == state["waiting"] == 0
