"""YAML that remembers where each value stood."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from re import compile as regex
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and positions from the document's root to a value."""

_REFERENCE = regex(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a configuration file."""

    file: str
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field + ': ' if self.field else ''}{self.reason}"


@dataclass(slots=True)
class Document:
    """A document's plain value, the line (from 1) of every value in it, and what was wrong with it."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, path: Path) -> int:
        """The line of the value at `path`, or of the nearest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def field_name(path: Path) -> str:
    """`("models", "m", "instances", 0, "url")` as an operator reads it: models.m.instances[0].url."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def load_document(text: str, file: str, environ: Mapping[str, str]) -> Document:
    """Parse YAML, with `${NAME}` and `${NAME:-default}` in scalars replaced from `environ`.

    A value that consists of one reference gets the type that its replacement would have in YAML.
    """
    document = Document()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        column = f" at column {mark.column + 1}" if mark else ""
        document.problems.append(Problem(file, line, "", f"not YAML: {error.problem or error.context}{column}"))
        return document
    except yaml.YAMLError as error:
        document.problems.append(Problem(file, 1, "", f"not YAML: {error}"))
        return document
    if node is not None:
        document.value = _Builder(document, file, environ).build(node, ())
    return document


class _Builder:
    def __init__(self, document: Document, file: str, environ: Mapping[str, str]) -> None:
        self._document = document
        self._file = file
        self._environ = environ
        self._resolver = yaml.SafeLoader("")

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._document.lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(each, (*path, position)) for position, each in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in values:
                self._problem(line, (*path, key), f"given twice; first on line {self._document.lines[(*path, key)]}")
                continue
            values[key] = self.build(value_node, (*path, key))
            self._document.lines[(*path, key)] = line
        return values

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text: str = node.value
        if "${" not in text:
            return self._resolver.construct_object(node)
        missing: list[str] = []

        def replace(found: Any) -> str:
            name, default = found[1], found[2]
            value = self._environ.get(name, default)
            if value is None:
                missing.append(name)
                return ""
            return str(value)

        replaced = _REFERENCE.sub(replace, text)
        for name in missing:
            self._problem(node.start_mark.line + 1, path, f"environment variable {name} is not set and has no default")
        if node.style is None and _REFERENCE.fullmatch(text):
            tag = self._resolver.resolve(yaml.ScalarNode, replaced, (True, False))  # type: ignore[no-untyped-call]
            return self._resolver.construct_object(yaml.ScalarNode(tag, replaced))
        return replaced

    def _problem(self, line: int, path: Path, reason: str) -> None:
        self._document.problems.append(Problem(self._file, line, field_name(path), reason))
