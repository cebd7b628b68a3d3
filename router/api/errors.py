"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.

Only errors that arise in the gateway are made here; an engine's own error answer passes through untouched.
"""

import msgspec

from kvroute.relay.types import Headers


class ApiError(Exception):
    """What a client is told instead of an answer.

    `kind` is OpenAI's `type` ("invalid_request_error", "server_error"), `code` a stable word that programs can test.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        # It may quote the client, whose JSON may hold lone surrogates, which no answer and no log line could carry.
        message = message.encode("utf-8", "replace").decode("utf-8")
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        return error_body(self.message, self.kind, self.param, self.code)

    def headers(self) -> Headers:
        """Header pairs of the JSON answer, without Content-Length."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        return headers


def error_body(message: str, kind: str, param: str | None, code: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def unknown_model(model: str) -> ApiError:
    return ApiError(
        404,
        f"The model `{model[:256]}` does not exist or no instance serves it. GET /v1/models lists what is served.",
        code="model_not_found",
        param="model",
    )


def unknown_route(method: str, path: str) -> ApiError:
    return ApiError(404, f"Unknown request URL: {method} {path[:256]}.", code="unknown_url")


def unavailable(
    message: str, *, status: int = 503, code: str = "service_unavailable", retry_after_s: int = 1
) -> ApiError:
    return ApiError(status, message, code=code, kind="server_error", retry_after_s=retry_after_s)
