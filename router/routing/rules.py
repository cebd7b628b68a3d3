"""Which policy decides a request: the first route whose conditions all hold, else the model's own."""

import operator
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvroute.relay.types import Headers
from kvroute.routing.decision import NamedPolicy, ServedModel

COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


class Rule(msgspec.Struct, frozen=True):
    """One route: every condition given must hold; a route without conditions always does."""

    policy: str
    model: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Lower-case names and the exact values that the request must carry."""
    prompt_tokens: tuple[str, int] | None = None
    """A comparison of COMPARISONS and its right-hand side."""

    def matches(self, model: str, headers: Headers, prompt_tokens: int) -> bool:
        if self.model is not None and self.model != model:
            return False
        if self.prompt_tokens is not None:
            comparison, bound = self.prompt_tokens
            if not COMPARISONS[comparison](prompt_tokens, bound):
                return False
        return all(wanted in headers for wanted in self.headers)


class PolicyTable:
    """The configured policies and the routes to them."""

    def __init__(self, policies: Mapping[str, NamedPolicy], rules: Sequence[Rule]) -> None:
        self._policies = policies
        self._rules = tuple(rules)

    def select(self, model: ServedModel, name: str, headers: Headers, prompt_tokens: int) -> NamedPolicy:
        """`name` is the model as the client asked for it; `headers` have lower-case names."""
        for rule in self._rules:
            if rule.matches(name, headers, prompt_tokens):
                return self._policies[rule.policy]
        return self._policies[model.policy]
