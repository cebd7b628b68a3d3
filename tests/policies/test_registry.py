"""Policies of other packages, by entry point."""

from importlib.metadata import EntryPoint

import pytest

from kvroute.policies.least_loaded import LeastLoaded
from kvroute.policies.registry import BUILT_IN, PolicyLoadError, load_policies


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group="kvroute.policies")


def test_without_packages_there_are_the_built_in_ones() -> None:
    assert load_policies([]) == BUILT_IN


def test_a_package_adds_its_own() -> None:
    found = load_policies([point("mine", "kvroute.policies.least_loaded:LeastLoaded")])
    assert found["mine"] is LeastLoaded


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("min_prefill", "kvroute.policies.least_loaded:LeastLoaded", "is taken"),
        ("mine", "no_such_package:Policy", "can't be imported"),
        ("mine", "kvroute.policies.base:load", "is not a dataclass with a method"),
        ("mine", "kvroute.simulator.timing:Timing", "is not a dataclass with a method"),
    ],
)
def test_what_cannot_be_used_is_named(name: str, value: str, reason: str) -> None:
    with pytest.raises(PolicyLoadError, match=reason):
        load_policies([point(name, value)])
