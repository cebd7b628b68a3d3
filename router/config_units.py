"""Durations, sizes, rates and addresses, as an operator writes them."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-zµ/]*)\s*", re.I)

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
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


def _quantity(value: object, units: Mapping[str, float], what: str, example: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < 0:
            raise ValueError("must not be negative")
        return float(value)
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2].lower() not in units:
        raise ValueError(f"must be {what}, such as {example}")
    return float(found[1]) * units[found[2].lower()]


def _seconds(value: object) -> float:
    return _quantity(value, {"": 1.0, **_SECONDS}, "a duration", "250ms, 30s, 5m or 1h")


def _bytes(value: object) -> int:
    return round(_quantity(value, _BYTES, "a size", "64KiB, 512MiB or 10GB"))


def _bytes_per_second(value: object) -> float:
    text = value.removesuffix("/s") if isinstance(value, str) else value
    return _quantity(text, _BYTES, "a bandwidth", "10GB/s or 800MiB/s")


def _count(value: object) -> int:
    return round(_quantity(value, _COUNTS, "a number", "500000, 500K or 1M"))


def _address(value: object) -> tuple[str, int]:
    if isinstance(value, tuple):
        return value
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\s]*):(\d{1,5})", value, re.I) if isinstance(value, str) else None
    if found is None or int(found[2]) > 65535:
        raise ValueError("must be HOST:PORT, such as 0.0.0.0:8000 or [::]:8000")
    return found[1].strip("[]") or "0.0.0.0", int(found[2])


Seconds = Annotated[float, BeforeValidator(_seconds)]
"""Seconds; written as a number of them or with a unit."""
Bytes = Annotated[int, BeforeValidator(_bytes)]
BytesPerSecond = Annotated[float, BeforeValidator(_bytes_per_second)]
Count = Annotated[int, BeforeValidator(_count)]
Address = Annotated[tuple[str, int], BeforeValidator(_address)]
"""(host, port); port 0 takes any free one."""
