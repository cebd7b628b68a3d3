"""From `use` and `with` to a policy object."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvroute.config_problems import did_you_mean, reason_of


def make_policy(use: str, kind: type, given: Mapping[str, Any]) -> Any:
    """A policy of the dataclass `kind`, whose name is `use`, with the parameters `given`.

    Raises ValidationError, with each parameter that is unknown, missing or of a wrong type as the location of an error;
    and ValueError where the policy itself refuses its parameters.
    """
    fields = {each.name: each for each in dataclasses.fields(kind) if each.init}
    hints = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    errors: list[InitErrorDetails] = []
    for name, value in given.items():
        if name not in fields:
            errors.append(_error(name, f"{use} has no parameter {name!r}{did_you_mean(name, fields)}"))
            continue
        try:
            values[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            errors += [_error(name, reason_of(each), *each["loc"]) for each in error.errors()]
    for name, field in fields.items():
        if name not in given and field.default is field.default_factory is dataclasses.MISSING:
            errors.append(InitErrorDetails(type="missing", loc=(name,), input=given))
    if errors:
        raise ValidationError.from_exception_data(use, errors)
    return kind(**values)


def _error(name: str, reason: str, *inside: str | int) -> InitErrorDetails:
    # The text goes in as a value, since it may hold braces, which a template gives a meaning.
    error = PydanticCustomError("policy_parameter", "{reason}", {"reason": reason})
    return InitErrorDetails(type=error, loc=(name, *inside), input=None)
