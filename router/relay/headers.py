"""Which headers travel on (RFC 9110, 7.6.1): end-to-end ones do, those of one connection do not."""

from kvroute.relay.types import Headers

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
NOTHING: frozenset[bytes] = frozenset()


def end_to_end(headers: Headers, *, drop: frozenset[bytes] = NOTHING) -> Headers:
    """`headers` (lower-case names) without the hop-by-hop ones, those that Connection names, and those in `drop`."""
    for name, value in headers:
        # The two values that nearly every message carries name no header.
        if name == b"connection" and value not in (b"keep-alive", b"close"):
            drop |= {token.strip().lower() for token in value.split(b",")}
    return [header for header in headers if header[0] not in HOP_BY_HOP and header[0] not in drop]
