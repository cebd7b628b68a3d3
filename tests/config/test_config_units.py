"""Quantities as written and as understood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from kvroute.config_units import Address, Bytes, BytesPerSecond, Count, Number, Seconds

PARSERS = {
    "seconds": TypeAdapter(Seconds),
    "bytes": TypeAdapter(Bytes),
    "bytes per second": TypeAdapter(BytesPerSecond),
    "number": TypeAdapter(Number),
    "count": TypeAdapter(Count),
    "address": TypeAdapter(Address),
}


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        ("seconds", "250ms", 0.25),
        ("seconds", "30s", 30),
        ("seconds", "2m", 120),
        ("seconds", "1.5h", 5400),
        ("seconds", "1d", 86400),
        ("seconds", " 5 s ", 5),
        ("seconds", "7", 7),
        ("seconds", 0.5, 0.5),
        ("seconds", 0, 0),
        ("bytes", "512MiB", 512 * 1024**2),
        ("bytes", "64KiB", 65536),
        ("bytes", "10MB", 10_000_000),
        ("bytes", "1.5GiB", 3 * 1024**3 // 2),
        ("bytes", "2TB", 2 * 10**12),
        ("bytes", "100B", 100),
        ("bytes", 4096, 4096),
        ("bytes per second", "10GB/s", 10e9),
        ("bytes per second", "800MiB/s", 800 * 1024**2),
        ("bytes per second", "1GB", 1e9),
        ("bytes per second", 5e9, 5e9),
        ("number", "30K", 30_000),
        ("number", "2e-8", 2e-8),
        ("number", 0.5, 0.5),
        ("count", "1M", 1_000_000),
        ("count", "1.5k", 1500),
        ("count", 64, 64),
        ("count", "64", 64),
        ("address", "0.0.0.0:8000", ("0.0.0.0", 8000)),
        ("address", ":8000", ("0.0.0.0", 8000)),
        ("address", "[::1]:0", ("::1", 0)),
        ("address", "gateway.internal:65535", ("gateway.internal", 65535)),
    ],
)
def test_a_quantity_is_understood(kind: str, written: object, value: object) -> None:
    assert PARSERS[kind].validate_python(written) == value


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("seconds", "30 parsecs"),
        ("seconds", "s"),
        ("seconds", "-1s"),
        ("seconds", -1),
        ("seconds", True),
        ("seconds", None),
        ("seconds", [1]),
        ("seconds", float("inf")),
        ("seconds", float("nan")),
        ("seconds", "1e999"),
        ("bytes", "10 bits"),
        ("bytes", "10MB/s"),
        ("bytes", "1e999"),
        ("bytes per second", "10GB/h"),
        ("number", "30KiB"),
        ("count", 2.5),
        ("count", "0.5"),
        ("count", True),
        ("address", "8000"),
        ("address", 8000),
        ("address", "host:65536"),
        ("address", "host:"),
        ("address", "::1:8000"),
        ("address", "[nonsense]:80"),
        ("address", "a b:80"),
    ],
)
def test_what_is_not_such_a_quantity_is_refused(kind: str, written: object) -> None:
    with pytest.raises(ValidationError):
        PARSERS[kind].validate_python(written)


def test_a_refusal_shows_how_to_write_it() -> None:
    with pytest.raises(ValidationError, match="must be a duration, such as 250ms, 30s, 5m or 1h"):
        PARSERS["seconds"].validate_python("soon")


@given(st.integers(0, 2**53))
def test_a_plain_number_of_bytes_is_kept_exactly(number: int) -> None:
    assert PARSERS["bytes"].validate_python(number) == number
    assert PARSERS["bytes"].validate_python(str(number)) == number


@given(st.floats(0, 1e9), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_units_are_read_in_any_case(number: float, unit: str) -> None:
    seconds = PARSERS["seconds"]
    assert seconds.validate_python(f"{number!r}{unit}") == seconds.validate_python(f"{number!r} {unit.upper()}")


@given(st.text(max_size=10), st.sampled_from(sorted(PARSERS)))
def test_any_text_is_a_quantity_or_refused(text: str, kind: str) -> None:
    try:
        value = PARSERS[kind].validate_python(text)
    except ValidationError:
        return
    assert isinstance(value, tuple) or value >= 0
