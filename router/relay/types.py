"""What the relay takes, gives and raises."""

import msgspec

Headers = list[tuple[bytes, bytes]]
"""Header names in lower case, values as received; repeated names stay repeated."""


class Timeouts(msgspec.Struct, frozen=True):
    """Bounds on an exchange with an instance, in seconds."""

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    """From sending the request to the first byte of the answer's body: queue, prefill and, unless streaming, decode."""
    idle_s: float = 300.0
    """Between two reads of an answer that has begun."""


class UpstreamError(Exception):
    """An exchange with an instance failed.

    UpstreamError
    +-- ConnectError           no connection: refused, unreachable, TLS, or not within connect_s
    +-- FirstByteTimeout       sent, but no byte of an answer within first_byte_s
    +-- UpstreamDisconnected   the connection was lost before a byte of the answer came
    +-- AnswerBroken           the answer had begun, then broke off: connection lost, or not HTTP
        +-- IdleTimeout        the answer had begun, then nothing came for idle_s
    """


class ConnectError(UpstreamError):
    pass


class FirstByteTimeout(UpstreamError):
    pass


class UpstreamDisconnected(UpstreamError):
    pass


class AnswerBroken(UpstreamError):
    pass


class IdleTimeout(AnswerBroken):
    pass
