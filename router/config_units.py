"""Durations, sizes, rates, addresses and the like: as an operator writes them, and as settings hold them."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator
from redis.asyncio.connection import parse_url

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[-+]?[0-9]+)?)\s*([a-z]*)\s*", re.I)
_ADDRESS = re.compile(r"(\[[0-9a-f:.]+\]|[^:\s\[\]]*):([0-9]{1,5})", re.I)

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_COUNTS = {"": 1, "k": 1000, "m": 1000**2}


def _quantity(value: object, units: Mapping[str, float], wanted: str) -> float:
    """`wanted` completes "must be". Units are read in any case: M is never a milli, m never a mega."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number, unit = value, ""
    else:
        found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
        if found is None or found[2].lower() not in units:
            raise ValueError(f"must be {wanted}")
        number, unit = float(found[1]), found[2].lower()
    quantity = number * units[unit]
    if quantity < 0:
        raise ValueError("must not be negative")
    if not math.isfinite(quantity):
        raise ValueError(f"must be {wanted}")
    return quantity


def _seconds(value: object) -> float:
    return _quantity(value, _SECONDS, "a duration, such as 250ms, 30s, 5m or 1h")


def _bytes(value: object) -> int:
    return round(_quantity(value, _BYTES, "a size, such as 64KiB, 512MiB or 10GB"))


def _bytes_per_second(value: object) -> float:
    text = value.removesuffix("/s") if isinstance(value, str) else value
    return _quantity(text, _BYTES, "a bandwidth, such as 10GB/s or 800MiB/s")


def _number(value: object) -> float:
    return _quantity(value, _COUNTS, "a number, such as 2000, 0.5 or 30K")


def _count(value: object) -> int:
    wanted = "a whole number, such as 500000, 500K or 1M"
    quantity = _quantity(value, _COUNTS, wanted)
    if quantity != round(quantity):
        raise ValueError(f"must be {wanted}")
    return round(quantity)


def _address(value: object) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if found is None or int(found[2]) > 65535:
        raise ValueError("must be HOST:PORT, such as 0.0.0.0:8000 or [::]:8000")
    return found[1].strip("[]") or "0.0.0.0", int(found[2])


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        # Visible ASCII without ? and #.
        usable = bool(re.fullmatch('[!"$->@-~]+', value) and parts.hostname and parts.port != 0)
    except ValueError:
        usable = False
    if not usable or parts.scheme not in ("http", "https"):
        raise ValueError("must be an http:// or https:// URL, such as http://10.0.0.1:8000")
    if parts.username is not None:
        raise ValueError("must not carry a user name or password")
    return value.rstrip("/")


def _redis_url(value: str) -> str:
    try:
        parse_url(value)
    except ValueError:
        # Not redis-py's own words: they can quote a part of the password.
        raise ValueError(
            "must be a redis://, rediss:// or unix:// URL; special characters in a password are written as %XX"
        ) from None
    return value


def _name(value: str) -> str:
    if not re.fullmatch("[!-.0-~]+", value):
        raise ValueError("must consist of visible ASCII characters other than /")
    return value


def _bytes_or_auto(value: object) -> object:
    if value == "auto":
        return value
    with suppress(ValueError):
        if (found := _bytes(value)) > 0:
            return found
    raise ValueError("must be auto, or a number of bytes, such as 131072 or 128KiB")


def _comparison(value: object) -> tuple[str, int]:
    found = re.fullmatch(r"\s*(<=|>=|==|<|>)(.+)", value) if isinstance(value, str) else None
    if found is None:
        raise ValueError('must be a comparison in quotes, such as ">= 32768"')
    return found[1], _count(found[2])


Seconds = Annotated[float, BeforeValidator(_seconds)]
"""Seconds; written as a number of them or with a unit."""
Bytes = Annotated[int, BeforeValidator(_bytes)]
BytesOrAuto = Annotated[Literal["auto"] | int, BeforeValidator(_bytes_or_auto)]
"""Positive."""
BytesPerSecond = Annotated[float, BeforeValidator(_bytes_per_second)]
Number = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, BeforeValidator(_count)]
Address = Annotated[tuple[str, int], BeforeValidator(_address)]
"""(host, port); port 0 takes any free one."""
HttpUrl = Annotated[str, AfterValidator(_http_url)]
"""Without a trailing slash."""
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
Name = Annotated[str, AfterValidator(_name)]
Comparison = Annotated[tuple[str, int], BeforeValidator(_comparison)]
"""(operator, right-hand side)."""
