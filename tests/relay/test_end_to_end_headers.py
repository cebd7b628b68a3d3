"""Which headers travel on."""

from hypothesis import given
from hypothesis import strategies as st

from kvroute.relay.headers import HOP_BY_HOP, end_to_end

names = st.sampled_from([b"accept", b"x-a", b"x-b", b"content-length", *sorted(HOP_BY_HOP - {b"connection"})])
headers = st.lists(st.tuples(names, st.sampled_from([b"", b"1", b"x-a"])))


@given(headers)
def test_end_to_end_headers_keep_their_order_repetitions_and_values(given_headers: list[tuple[bytes, bytes]]) -> None:
    kept = end_to_end(given_headers)
    assert kept == [header for header in given_headers if header[0] not in HOP_BY_HOP]


@given(headers)
def test_to_strip_twice_is_to_strip_once(given_headers: list[tuple[bytes, bytes]]) -> None:
    once = end_to_end(given_headers, drop=frozenset({b"x-b"}))
    assert end_to_end(once, drop=frozenset({b"x-b"})) == once


def test_headers_that_connection_names_go_with_it() -> None:
    stripped = end_to_end(
        [(b"connection", b"close, X-A"), (b"x-a", b"1"), (b"x-b", b"2"), (b"connection", b"x-b"), (b"x-c", b"3")]
    )
    assert stripped == [(b"x-c", b"3")]


def test_keep_alive_and_close_alone_name_no_header() -> None:
    assert end_to_end([(b"connection", b"close"), (b"close", b"1")]) == [(b"close", b"1")]


def test_headers_to_drop_are_dropped_besides() -> None:
    assert end_to_end([(b"host", b"h"), (b"accept", b"*/*")], drop=frozenset({b"host"})) == [(b"accept", b"*/*")]


def test_what_is_given_stays_as_it_is() -> None:
    mine = [(b"te", b"trailers"), (b"accept", b"*/*")]
    drop = frozenset({b"x"})
    end_to_end(mine, drop=drop)
    assert mine == [(b"te", b"trailers"), (b"accept", b"*/*")]
    assert drop == {b"x"}
