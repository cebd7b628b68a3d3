"""From pydantic's errors to what an operator reads: the field, its line, a reason in plain words."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvroute.config_yaml import Document, Path

_REASONS: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_type": "must be a mapping",
    "path_type": "must be a path",
    "string_too_short": "must not be empty",
    "string_type": "must be text; put a number, true or false in quotes to make it text",
    "tuple_type": "must be a list",
}
"""By pydantic's error type, for those that the settings can raise; other types keep pydantic's own words."""


def reason_of(error: ErrorDetails) -> str:
    reason = _REASONS.get(error["type"])
    if reason is not None:
        return reason.format_map(error.get("ctx", {}))
    message = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A hint to follow a complaint about an unknown name, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def reject_invalid(document: Document, error: ValidationError, root: type[BaseModel]) -> None:
    """Note what pydantic found wrong with `document` as an instance of `root`."""
    for each in error.errors(include_url=False):
        location = each["loc"]
        if each["type"] == "extra_forbidden":
            name = str(location[-1])
            document.reject(location, f"unknown field{did_you_mean(name, list(_fields_at(root, location[:-1])))}")
        elif each["type"] == "missing":
            document.reject(location, reason_of(each))
        else:
            document.reject(_present(document.value, location), reason_of(each))


def _present(value: Any, location: Path) -> Path:
    """The steps of `location` that the document has. Others are pydantic's own, such as a mark for "the key, not the
    value", or the field of a section that was written in short form."""
    path: Path = ()
    for step in location:
        if isinstance(value, dict | list) and (step in value if isinstance(value, dict) else isinstance(step, int)):
            value = value[step]  # type: ignore[index]
            path = (*path, step)
    return path


def _fields_at(root: type[BaseModel], location: Path) -> Iterator[str]:
    """The fields of the section at `location`, as they are written."""
    types: Iterable[Any] = (root,)
    for step in location:
        types = [each for outer in types for each in _types_inside(outer, step)]
    for section in types:
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from (each.alias or name for name, each in section.model_fields.items())


def _types_inside(annotation: Any, step: str | int) -> Iterator[Any]:
    """What `annotation` says that a step into such a value leads to."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, each in annotation.model_fields.items():
            if step == (each.alias or name):
                yield from _alternatives(each.annotation)
    elif get_origin(annotation) is dict:
        yield from _alternatives(get_args(annotation)[1])
    elif get_origin(annotation) is tuple:
        yield from _alternatives(get_args(annotation)[0])


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from _alternatives(each)
    else:
        yield annotation
