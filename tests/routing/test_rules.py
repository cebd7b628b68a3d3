"""Routes: the first whose conditions all hold names the policy."""

import pytest

from kvroute.fleet.fleet import Fleet
from kvroute.policies.random import Random
from kvroute.prompt.reader import PromptReader
from kvroute.routing.decision import NamedPolicy, ServedModel
from kvroute.routing.rules import PolicyTable, Rule

MODEL = ServedModel(Fleet("m", []), PromptReader(), {}, None, "own")
NAMES = ("own", "long", "gold", "other")


def table(*rules: Rule) -> PolicyTable:
    return PolicyTable({name: NamedPolicy(name, Random()) for name in NAMES}, rules)


def choose(rules: tuple[Rule, ...], headers: list[tuple[bytes, bytes]] | None = None, tokens: int = 100) -> str:
    return table(*rules).select(MODEL, "m", headers or [], tokens).name


def test_without_routes_the_models_own_policy_decides() -> None:
    assert choose(()) == "own"


def test_the_first_match_wins() -> None:
    assert choose((Rule("long"), Rule("gold"))) == "long"


def test_a_header_must_have_the_exact_value() -> None:
    rules = (Rule("gold", headers=((b"x-tier", b"gold"),)),)
    assert choose(rules, [(b"x-tier", b"gold")]) == "gold"
    assert choose(rules, [(b"x-tier", b"silver")]) == "own"
    assert choose(rules) == "own"


def test_all_conditions_must_hold() -> None:
    rules = (Rule("long", model="m", headers=((b"a", b"1"),), prompt_tokens=(">=", 50)),)
    assert choose(rules, [(b"a", b"1")]) == "long"
    assert choose(rules, [(b"a", b"1")], tokens=49) == "own"


def test_the_model_is_the_one_that_was_asked_for() -> None:
    assert choose((Rule("other", model="x"),)) == "own"


@pytest.mark.parametrize(
    ("comparison", "matching"),
    [("<", {9}), ("<=", {9, 10}), (">", {11}), (">=", {10, 11}), ("==", {10})],
)
def test_lengths_are_compared(comparison: str, matching: set[int]) -> None:
    rules = (Rule("long", prompt_tokens=(comparison, 10)),)
    assert {tokens for tokens in (9, 10, 11) if choose(rules, tokens=tokens) == "long"} == matching
