"""Whether the gateway lives, and whether it should be sent traffic."""

from collections.abc import Sequence

from kvroute.fleet.instance import Health
from kvroute.routing.decision import ServedModel


class Readiness:
    """Ready while not draining and while every model could be served by somebody.

    One model without instances makes the gateway not ready only when no other has any: the rest still deserves traffic.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models
        self.draining = False

    def check(self) -> tuple[bool, str]:
        """(ready, why not)."""
        if self.draining:
            return False, "draining"
        for model in self._models:
            if any(instance.health is Health.UP for instance in model.fleet.instances):
                return True, ""
        return False, "no instance is up"
