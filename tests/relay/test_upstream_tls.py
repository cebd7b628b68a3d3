"""Instances behind TLS: the same exchanges, and certificates that are not trusted."""

import asyncio
import shutil
import ssl
from collections.abc import Awaitable, Callable

import pytest

from kvroute.relay.types import AnswerBroken, ConnectError
from kvroute.relay.upstream import Upstream
from tests.relay.conftest import Run
from tests.support.exchanges import OK, PATIENT, always, get, once, whole
from tests.support.raw_server import Script, raw_server
from tests.support.tls import server_and_client_context

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return server_and_client_context(tmp_path_factory.mktemp("tls"))


PlayTls = Callable[[Script, Callable[[Upstream], Awaitable[None]]], None]


@pytest.fixture
def play_tls(run: Run, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> PlayTls:
    def play(script: Script, scenario: Callable[[Upstream], Awaitable[None]]) -> None:
        async def main() -> None:
            async with raw_server(script, tls=contexts[0]) as port:
                upstream = Upstream(f"https://127.0.0.1:{port}", PATIENT, ssl_context=contexts[1])
                async with asyncio.timeout(20):
                    await scenario(upstream)
                    await upstream.close()

        run(main())

    return play


def test_exchanges_over_tls_share_a_connection(play_tls: PlayTls) -> None:
    async def scenario(upstream: Upstream) -> None:
        for reused in (False, True):
            answer = await get(upstream)
            assert answer.reused is reused
            assert await whole(answer) == b"ok"

    play_tls(always(OK), scenario)


def test_large_bodies_pass_both_ways_over_tls(play_tls: PlayTls) -> None:
    body = bytes(range(256)) * 20_000

    async def scenario(upstream: Upstream) -> None:
        answer = await upstream.send(b"POST", b"/", [], body)
        await asyncio.sleep(0.05)
        assert await whole(answer) == body

    play_tls(always(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body), scenario)


def test_a_body_without_framing_ends_with_the_tls_connection(play_tls: PlayTls) -> None:
    async def scenario(upstream: Upstream) -> None:
        assert await whole(await get(upstream)) == b"all of it"

    play_tls(once(b"HTTP/1.1 200 OK\r\n\r\nall of it"), scenario)


def test_a_body_that_breaks_off_over_tls(play_tls: PlayTls) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        with pytest.raises(AnswerBroken):
            await whole(answer)

    play_tls(once(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"), scenario)


def test_an_idle_tls_connection_that_the_server_closes_is_forgotten(play_tls: PlayTls) -> None:
    async def scenario(upstream: Upstream) -> None:
        await whole(await get(upstream))
        await asyncio.sleep(0.1)
        assert upstream.open_connections == 0

    play_tls(once(OK), scenario)


def test_a_certificate_that_is_not_trusted_is_no_connection(
    run: Run, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async def main() -> None:
        async with raw_server(always(OK), tls=contexts[0]) as port:
            with pytest.raises(ConnectError, match="certificate"):
                await get(Upstream(f"https://127.0.0.1:{port}", PATIENT))

    run(main())
