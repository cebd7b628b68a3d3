"""The models that are served: from the name that a client asks for to what routing it takes."""

from collections.abc import Sequence

from kvroute.fleet.fleet import Fleets
from kvroute.routing.decision import ServedModel


class Catalog:
    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = tuple(models)
        self._by_fleet = {model.fleet.name: model for model in models}
        self._fleets = Fleets([model.fleet for model in models])

    def resolve(self, name: str) -> ServedModel | None:
        """The model of that name: a configured one, else what the instances of a "*" model list."""
        fleet = self._fleets.resolve(name)
        return None if fleet is None else self._by_fleet[fleet.name]

    def complete(self) -> bool:
        """Whether every instance that is to tell its models has told them. Until then a name that nobody lists may be
        one that somebody will."""
        return self._fleets.all_listed()

    def only_name(self) -> str | None:
        """The model to take when a request names none: the one that is served, if it is just one."""
        cards = self._fleets.model_cards()
        return str(cards[0]["id"]) if len(cards) == 1 else None

    def cards(self) -> list[dict[str, object]]:
        """The union of the instances' model cards, for GET /v1/models."""
        return self._fleets.model_cards()
