"""Refusals, in the words of a vLLM 0.32 server. Recorded ones, unless the comment says that they are inferred."""

Json = dict[str, object]


class Refusal(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str, kind: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.body: Json = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def unknown_model(name: str, served: str) -> Refusal:
    message = f"The model `{name}` does not exist. Valid aliases: {served}."
    return Refusal(404, message, "NotFoundError", "model")


def invalid(kind: str, where: str, message: str, given: object, context: Json | None = None) -> Refusal:
    """A body that does not have the route's form. vLLM passes the words of pydantic on: `kind` and `message` are those
    of https://docs.pydantic.dev/latest/errors/validation_errors, `where` is the path of the field."""
    detail: Json = {"type": kind, "loc": f"body.{where}" if where else "body", "msg": message, "input": _shown(given)}
    if context is not None:
        detail["ctx"] = context
    return Refusal(400, f"1 validation error:\n  {detail}", "Bad Request", str(detail["loc"]))


def missing(where: str, body: Json) -> Refusal:
    # Inferred: the recording has no missing field, but pydantic has these words for it.
    return invalid("missing", where, "Field required", body)


def bad_json(position: int, reason: str) -> Refusal:
    return invalid("json_invalid", str(position), "JSON decode error", {}, {"error": reason})


def too_long(limit: int) -> Refusal:
    """`limit`: tokens of prompt and answer together."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {limit + 1} "
        "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
        f"prompt. (parameter=input_tokens, value={limit + 1})"
    )
    return Refusal(400, message, "BadRequestError", "input_tokens")


def bad_max_tokens(value: int) -> Refusal:
    message = f"max_tokens must be at least 1, got {value}. (parameter=max_tokens, value={value})"
    return Refusal(400, message, "BadRequestError", "max_tokens")


def bad_messages(reason: str) -> Refusal:
    """The chat template refuses them. Inferred: the text is the template's."""
    return Refusal(400, reason, "BadRequestError", None)


def on_demand(status: int) -> Refusal:
    return Refusal(status, "A fault on demand.", "InternalServerError", None)


def _shown(given: object) -> object:
    """vLLM shows text and numbers, and only the size of what can be large: recorded for a dict, inferred for a list."""
    if isinstance(given, dict):
        return f"<dict of {len(given)} items>"
    if isinstance(given, list):
        return f"<list of {len(given)} items>"
    return given
