"""Policies as a file names them: their parameters are the fields of a dataclass."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.config import ConfigError, PolicySettings, build_policy, parse_config
from kvroute.policies.registry import BUILT_IN


@dataclass(frozen=True)
class Picky:
    """A policy of another package."""

    zone: str
    share: float = 0.5
    tags: tuple[str, ...] = ()
    _turn: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.share > 1:
            raise ValueError("share is {0 to 1}")


KINDS = {**BUILT_IN, "picky": Picky}
INSTANCES = "{instances: ['http://a:1']}"


def policy(written: str) -> PolicySettings:
    text = f"policies: {{p: {written}}}\nmodels: {{m: {INSTANCES}}}"
    return parse_config(text, "f.yaml", {}, KINDS).policies["p"]


def problems(written: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        policy(written)
    return [f"{each.field}: {each.reason}" for each in caught.value.problems]


@pytest.mark.parametrize("use", sorted(BUILT_IN))
def test_every_built_in_policy_needs_no_parameters(use: str) -> None:
    assert isinstance(build_policy(policy(f"{{use: {use}}}"), KINDS), BUILT_IN[use])


def test_parameters_reach_the_policy_with_the_types_of_its_fields() -> None:
    settings = policy("{use: picky, with: {zone: west, share: 1, tags: [a, b]}}")
    assert build_policy(settings, KINDS) == Picky(zone="west", share=1.0, tags=("a", "b"))


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_built_policy_has_the_parameters_given(seconds: float, share: float) -> None:
    settings = policy(f"{{use: min_prefill, with: {{tolerance_s: {seconds!r}, tolerance_share: {share!r}}}}}")
    assert build_policy(settings, KINDS) == BUILT_IN["min_prefill"](seconds, share)


def test_all_parameters_that_do_not_fit_are_problems() -> None:
    assert problems("{use: picky, with: {zoen: west, share: much, tags: [[]], _turn: []}}") == [
        "policies.p.with.zoen: picky has no parameter 'zoen'; did you mean 'zone'?",
        "policies.p.with.share: must be a number",
        "policies.p.with.tags[0]: must be text; put a number, true or false in quotes to make it text",
        "policies.p.with._turn: picky has no parameter '_turn'",
        "policies.p.with.zone: is missing",
    ]


@pytest.mark.parametrize("written", ["{use: picky}", "{use: picky, with: null}", "{use: picky, with: {}}"])
def test_a_parameter_without_a_default_must_be_given(written: str) -> None:
    assert problems(written) == ["policies.p.with.zone: is missing"]


def test_a_policy_may_refuse_parameters_in_its_own_words() -> None:
    assert problems("{use: picky, with: {zone: a, share: 2}}") == ["policies.p.with: share is {0 to 1}"]


def test_a_policy_without_parameters_takes_none() -> None:
    assert problems("{use: round_robin, with: {x: 1}}") == ["policies.p.with.x: round_robin has no parameter 'x'"]


@pytest.mark.parametrize("name", ["p", "random"])
def test_models_and_routes_name_a_configured_policy_or_a_kind(name: str) -> None:
    text = f"policies: {{p: {{use: random}}}}\nmodels: {{m: {{policy: {name}, instances: ['http://a:1']}}}}"
    config = parse_config(f"{text}\nroutes: [{{policy: {name}}}]", "f.yaml", {}, KINDS)
    assert config.models["m"].policy == config.routes[0].policy == name


def test_a_policy_that_is_at_fault_itself_is_not_unknown_as_well() -> None:
    text = f"policies: {{p: {{use: nothing}}}}\nmodels: {{m: {INSTANCES}}}\nroutes: [{{policy: p}}]"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml", {}, KINDS)
    assert [each.field for each in caught.value.problems] == ["policies.p.use"]
