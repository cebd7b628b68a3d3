"""YAML that remembers where each value stood."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]
"""Keys and positions from the document's root to a value."""

_REFERENCE = re.compile(r"(?P<escaped>\$\$\{)|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>[^}]*))?\}|\$\{")

_NULL = ("", "~", "null", "Null", "NULL")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# Longer ones are read as floating point; no setting is that large, and Python bounds the digits of an int.
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a configuration."""

    file: str
    line: int
    """From 1; 0 where there is none to name."""
    field: str
    reason: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.field}: {self.reason}" if self.field else f"{place}: {self.reason}"


@dataclass(slots=True)
class Document:
    """A document's plain value, the line (from 1) of every value in it, and what was wrong with it."""

    file: str
    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _faulty: set[Path] = field(default_factory=set)

    def report(self, path: Path, reason: str, line: int | None = None) -> None:
        """Note a problem at `path`; `line` where it is not the line of the value there."""
        self.problems.append(
            Problem(self.file, self._line_of(path) if line is None else line, field_name(path), reason)
        )

    def reject(self, path: Path, reason: str) -> None:
        """Note that the value at `path` can't be used, unless it or a value around it has been rejected already: the
        first reason explains those that follow from it."""
        if not any(path[:length] in self._faulty for length in range(len(path) + 1)):
            self._faulty.add(path)
            self.report(path, reason)

    def _line_of(self, path: Path) -> int:
        """The line of the value at `path`, or of the nearest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


def field_name(path: Path) -> str:
    """`("models", "m", "instances", 0, "url")` as an operator reads it: models.m.instances[0].url."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def load_document(text: str, file: str, environ: Mapping[str, str]) -> Document:
    """Parse YAML, with `${NAME}` and `${NAME:-default}` in scalars replaced from `environ`.

    As in a shell, the default is taken where the variable is unset or empty. A plain (unquoted) scalar that consists of
    one reference gets the type that its replacement would have; `$${` stands for `${` itself. Plain scalars have the
    types of YAML 1.2's core schema (section 10.3.2 there) less its hexadecimal, octal and infinite numbers. So `off`,
    `yes` and `12:30` are text, as most people think they are, and not YAML 1.1's booleans and base-60 numbers.
    """
    document = Document(file)
    try:
        # The base loader resolves no types: that is done below, once references are replaced.
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        column = f" (column {mark.column + 1})" if mark else ""
        what = ": ".join(filter(None, (error.context, error.problem)))
        document.report((), f"not YAML: {what}{column}", mark.line + 1 if mark else 1)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.report((), f"not YAML: U+{ord(text[error.position]):04X} is not allowed", line)
    else:
        if node is not None:
            document.value = _Builder(document, environ).build(node, ())
    return document


class _Builder:
    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self._document = document
        self._environ = environ
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: Path) -> Any:
        # Already there for a value with a key: an operator looks for the key, also where the value begins below it.
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag[18:] not in ("str", "seq", "map"):
            self._document.reject(path, f"the tag {node.tag} is not supported")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._document.reject(path, "refers to itself")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.build(each, (*path, position)) for position, each in enumerate(node.value)]
            return self._mapping(node.value, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, pairs: list[tuple[yaml.Node, yaml.Node]], path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in pairs:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._document.report(path, "a key must be text", line)
                continue
            key = self._replaced(key_node.value, path)
            here = (*path, key)
            if key in values:
                self._document.report(here, f"given twice; first on line {self._document.lines[here]}", line)
                continue
            self._document.lines[here] = line
            values[key] = self.build(value_node, here)
        return values

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text = self._replaced(node.value, path)
        if node.style is None and (text == node.value or _REFERENCE.fullmatch(node.value)):
            return _plain(text)
        return text

    def _replaced(self, text: str, path: Path) -> str:
        missing: list[str] = []

        def replace(found: re.Match[str]) -> str:
            name, default = found["name"], found["default"]
            if found["escaped"]:
                return "${"
            if name is None:
                self._document.reject(path, "${ must begin ${NAME} or ${NAME:-default}; $${ stands for itself")
                return found[0]
            if default is None and name not in self._environ:
                missing.append(name)
            return self._environ.get(name) or default or ""

        text = _REFERENCE.sub(replace, text)
        if missing:
            names = ", ".join(dict.fromkeys(missing))
            self._document.reject(path, f"not set in the environment and without a default: {names}")
        return text


def _plain(text: str) -> str | int | float | bool | None:
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
