"""The rules of the house, held by the imports themselves."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = {"kvroute.policies": ROOT / "policies", "kvroute.simulator": ROOT / "simulator", "kvroute": ROOT / "router"}
ROOMS = [
    "kvroute.cli",
    "kvroute.demo",
    "kvroute.app",
    "kvroute.config",
    "kvroute.api",
    "kvroute.routing",
    "kvroute.relay",
    "kvroute.prompt",
    "kvroute.sources",
    "kvroute.index",
    "kvroute.fleet",
    "kvroute.cost",
    "kvroute.telemetry",
]
"""Imports point down this list."""


def modules() -> dict[str, Path]:
    """Every module of the package by its import name."""
    found: dict[str, Path] = {}
    for package, folder in HOUSE.items():
        for file in folder.rglob("*.py"):
            name = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
            found[name.removesuffix(".__init__")] = file
    return found


def imported(file: Path) -> set[str]:
    """The modules of ours that `file` imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & MODULES.keys()


def room(module: str) -> str:
    """The room that a module belongs to; configuration takes several files."""
    if module.startswith("kvroute.config"):
        return "kvroute.config"
    return ".".join(module.split(".")[:2])


MODULES = modules()


def test_all_of_the_house_is_seen() -> None:
    assert {room(module) for module in MODULES} == {*ROOMS, "kvroute", "kvroute.policies", "kvroute.simulator"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    mine = room(module)
    others = {other for other in map(room, imported(MODULES[module])) if other not in (mine, "kvroute")}
    if mine == "kvroute.policies":
        allowed = set()
    elif mine == "kvroute.simulator":
        allowed = {"kvroute.prompt"}
    else:
        below = set(ROOMS[ROOMS.index(mine) + 1 :]) if mine in ROOMS else set()
        allowed = below | {"kvroute.policies"}
        if mine in ("kvroute.cli", "kvroute.demo"):
            allowed.add("kvroute.simulator")
    assert others <= allowed


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: imported(file) - {module} for module, file in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in graph[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_fits_on_a_few_screens(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= 500
