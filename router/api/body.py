"""From a request's bytes to the few facts that routing needs."""

import json
import re
from collections.abc import Mapping
from urllib.parse import parse_qs

import msgspec

from kvroute.api.errors import ApiError, bad_request
from kvroute.api.types import Receive, Scope

NO_FIELDS: Mapping[str, object] = {}

# The form field `model` of a multipart body (RFC 7578): its part's headers, a blank line, the value up to the line end.
_FORM_MODEL = re.compile(
    rb'\r\ncontent-disposition:[^\r\n]*;\s*name="?model"?\s*(?:\r\n[^\r\n]+)*\r\n\r\n([^\r\n]+)\r\n', re.I
)


class ClientGone(Exception):
    """The client closed the connection before its request had arrived."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises ApiError 413 beyond `limit` bytes, ClientGone when the client leaves."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        _check_size(len(body), limit)
        return body
    parts = [body]
    size = len(body)
    while True:
        _check_size(size, limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body = message.get("body", b"")
        parts.append(body)
        size += len(body)
        if not message.get("more_body", False):
            _check_size(size, limit)
            return b"".join(parts)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ApiError(413, f"The request body exceeds {limit} bytes.", code="request_too_large")


def check_declared_size(scope: Scope, limit: int) -> None:
    """Refuse by Content-Length, before a byte of the body is read; and coded bodies, which routing can't read."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            _check_size(int(value), limit)
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            raise ApiError(415, "Request bodies must not be compressed.", code="unsupported_content_encoding")


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`; ApiError 400 says what is wrong with it and where."""
    value: object
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _parse_as_engines_do(body)
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return value


def _parse_as_engines_do(body: bytes) -> object:
    """Engines parse with Python's json, which takes lone surrogates, NaN and overlong numbers: theirs to refuse."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise bad_request(f"The request body is not valid JSON: {error.msg} at {where}.", code="invalid_json") from None
    except (UnicodeDecodeError, ValueError):
        raise bad_request("The request body is not valid JSON in UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None


def model_name(fields: Mapping[str, object]) -> str | None:
    """The body's model; None when absent or null. Raises ApiError 400 when it is not a string."""
    model = fields.get("model")
    if model is None or isinstance(model, str):
        return model
    raise bad_request("`model` must be a string.", param="model")


def passthrough_fields(scope: Scope, body: bytes) -> Mapping[str, object]:
    """What can be known of a request on a route that the router has no special knowledge of.

    A JSON object's fields; of a form, its model; without a body, the query's model.
    """
    content_type = b""
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value.lower()
    if body and content_type.startswith((b"multipart/", b"application/x-www-form-urlencoded")):
        return _form_fields(content_type, body)
    if body:
        return parse_object(body)
    models = parse_qs(scope["query_string"].decode("latin-1")).get("model")
    return {"model": models[0]} if models else NO_FIELDS


def _form_fields(content_type: bytes, body: bytes) -> Mapping[str, object]:
    if content_type.startswith(b"multipart/"):
        found = _FORM_MODEL.search(body)
        return {"model": found[1].decode("utf-8", "replace")} if found else NO_FIELDS
    models = parse_qs(body.decode("latin-1")).get("model")
    return {"model": models[0]} if models else NO_FIELDS
