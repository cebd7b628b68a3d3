"""Fleets: the instances that serve one model."""

from collections.abc import Sequence, Set

from kvroute.fleet.instance import Health, Instance

ANY_MODEL = "*"
"""The name of a fleet that serves whatever its instances list at /v1/models."""

# Looked at for every instance at every request; an enumeration's members are slow to reach by name.
_DOWN = Health.DOWN


class Fleet:
    def __init__(self, name: str, instances: Sequence[Instance]) -> None:
        self.name = name
        self.instances = tuple(instances)
        self._any_model = name == ANY_MODEL

    def candidates(self, exclude: Set[str], model: str) -> list[Instance]:
        """The instances to choose from for a request for `model`, without those whose ids are in `exclude`.

        Instances that are down are asked only when no other is left: a wrong health state must not fail a request.
        """
        left: Sequence[Instance] = self.instances
        if exclude:
            left = [each for each in left if each.id not in exclude]
        if self._any_model:
            left = [each for each in left if model in each.models]
        return [each for each in left if each.health is not _DOWN] or list(left)


class Fleets:
    def __init__(self, fleets: Sequence[Fleet]) -> None:
        self._named = {fleet.name: fleet for fleet in fleets if fleet.name != ANY_MODEL}
        self._any = [fleet for fleet in fleets if fleet.name == ANY_MODEL]

    def resolve(self, model: str) -> Fleet | None:
        """The fleet of that name, else one for any model of which an instance lists this one."""
        named = self._named.get(model)
        if named is not None:
            return named
        for fleet in self._any:
            for instance in fleet.instances:
                if model in instance.models:
                    return fleet
        return None

    def all_listed(self) -> bool:
        """Whether each instance of the fleets for any model has listed its models at least once."""
        return all(instance.models for fleet in self._any for instance in fleet.instances)

    def model_cards(self) -> list[dict[str, object]]:
        """One /v1/models card for each model served: an engine's own where one lists it, else a minimal one."""
        cards: dict[str, dict[str, object]] = {}
        for fleet in (*self._named.values(), *self._any):
            for instance in fleet.instances:
                if instance.health is not Health.DOWN:
                    for name, card in instance.models.items():
                        if fleet.name in (name, ANY_MODEL):
                            cards.setdefault(name, card)
            if fleet.name != ANY_MODEL:
                card = {"id": fleet.name, "object": "model", "created": 0, "owned_by": "kvroute"}
                cards.setdefault(fleet.name, card)
        return list(cards.values())
