"""Which instances may serve a model."""

from kvroute.fleet.fleet import Fleet, Fleets
from kvroute.fleet.instance import Health, Instance


def instance(name: str, health: Health = Health.UP, *models: str) -> Instance:
    cards: dict[str, dict[str, object]] = {model: {"id": model, "root": name} for model in models}
    return Instance(id=name, url=f"http://{name}", health=health, models=cards)


def ids(instances: list[Instance]) -> list[str]:
    return [each.id for each in instances]


NOBODY: frozenset[str] = frozenset()


def test_up_and_unknown_instances_are_candidates() -> None:
    fleet = Fleet("m", [instance("a"), instance("b", Health.UNKNOWN), instance("c", Health.DOWN)])
    assert ids(fleet.candidates(NOBODY, "m")) == ["a", "b"]


def test_excluded_ones_are_not() -> None:
    fleet = Fleet("m", [instance("a"), instance("b")])
    assert ids(fleet.candidates({"a"}, "m")) == ["b"]


def test_those_that_are_down_are_asked_when_nobody_else_is_left() -> None:
    fleet = Fleet("m", [instance("a"), instance("b", Health.DOWN)])
    assert ids(fleet.candidates({"a"}, "m")) == ["b"]
    assert ids(fleet.candidates({"a", "b"}, "m")) == []


def test_a_fleet_for_any_model_asks_only_those_that_list_it() -> None:
    fleet = Fleet("*", [instance("a", Health.UP, "m"), instance("b", Health.UP, "m", "lora"), instance("c")])
    assert ids(fleet.candidates(NOBODY, "m")) == ["a", "b"]
    assert ids(fleet.candidates(NOBODY, "lora")) == ["b"]


def test_a_configured_name_comes_before_what_instances_list() -> None:
    named, any_model = Fleet("m", [instance("a")]), Fleet("*", [instance("b", Health.UP, "m", "n")])
    fleets = Fleets([any_model, named])
    assert fleets.resolve("m") is named
    assert fleets.resolve("n") is any_model
    assert fleets.resolve("other") is None
    assert fleets.resolve("*") is None


def test_model_cards_are_a_union_one_for_each_name() -> None:
    fleets = Fleets(
        [
            Fleet("m", [instance("a", Health.UP, "m", "other"), instance("b", Health.UP, "m")]),
            Fleet("quiet", [instance("c", Health.UNKNOWN)]),
            Fleet("*", [instance("d", Health.UP, "x"), instance("e", Health.DOWN, "gone")]),
        ]
    )
    cards = fleets.model_cards()
    assert [card["id"] for card in cards] == ["m", "quiet", "x"]
    assert cards[0]["root"] == "a"
    assert cards[1]["owned_by"] == "kvroute"
