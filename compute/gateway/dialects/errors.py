"""What a refused or failed request says, in the form that each dialect's official client understands.

| kind              | status | OpenAI type, code                              | Anthropic type        |
|-------------------|--------|------------------------------------------------|-----------------------|
| invalid           | 400    | invalid_request_error                          | invalid_request_error |
| unsupported       | 400    | invalid_request_error, unsupported_parameter   | invalid_request_error |
| too_long          | 400    | invalid_request_error, context_length_exceeded | invalid_request_error |
| denied            | 401    | authentication_error, invalid_api_key          | authentication_error  |
| unknown_agent     | 404    | invalid_request_error, model_not_found         | not_found_error       |
| unknown_route     | 404    | invalid_request_error, unknown_url             | not_found_error       |
| wrong_method      | 405    | invalid_request_error, method_not_allowed      | invalid_request_error |
| over              | 410    | invalid_request_error, episode_over            | invalid_request_error |
| too_large         | 413    | invalid_request_error, request_too_large       | request_too_large     |
| client_gone       | 499    | (nobody reads it)                              |                       |
| engine_failed     | 502    | server_error, engine_failed                    | api_error             |
| unavailable       | 503    | server_error, unavailable                      | overloaded_error      |
| internal          | 500    | server_error                                   | api_error             |

Clients retry 5xx by themselves; `retry-after` says when. They do not retry 410: the episode is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

RETRY_AFTER_S = 1  # an engine that went away is replaced within seconds


class ErrorKind(StrEnum):
    """Why a request has no answer."""

    INVALID = "invalid"
    UNSUPPORTED = "unsupported"
    TOO_LONG = "too_long"
    DENIED = "denied"
    UNKNOWN_AGENT = "unknown_agent"
    UNKNOWN_ROUTE = "unknown_route"
    WRONG_METHOD = "wrong_method"
    OVER = "over"
    TOO_LARGE = "too_large"
    CLIENT_GONE = "client_gone"
    ENGINE_FAILED = "engine_failed"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    status: int
    openai_type: str
    openai_code: str | None
    anthropic_type: str


def _client(status: int, code: str | None, anthropic_type: str = "invalid_request_error") -> _Form:
    return _Form(
        status=status,
        openai_type="invalid_request_error",
        openai_code=code,
        anthropic_type=anthropic_type,
    )


def _server(status: int, code: str | None, anthropic_type: str) -> _Form:
    return _Form(status=status, openai_type="server_error", openai_code=code, anthropic_type=anthropic_type)


_FORMS: dict[ErrorKind, _Form] = {
    ErrorKind.INVALID: _client(400, None),
    ErrorKind.UNSUPPORTED: _client(400, "unsupported_parameter"),
    ErrorKind.TOO_LONG: _client(400, "context_length_exceeded"),
    ErrorKind.DENIED: _Form(
        status=401,
        openai_type="authentication_error",
        openai_code="invalid_api_key",
        anthropic_type="authentication_error",
    ),
    ErrorKind.UNKNOWN_AGENT: _client(404, "model_not_found", "not_found_error"),
    ErrorKind.UNKNOWN_ROUTE: _client(404, "unknown_url", "not_found_error"),
    ErrorKind.WRONG_METHOD: _client(405, "method_not_allowed"),
    ErrorKind.OVER: _client(410, "episode_over"),
    ErrorKind.TOO_LARGE: _client(413, "request_too_large", "request_too_large"),
    ErrorKind.CLIENT_GONE: _client(499, "client_gone"),
    ErrorKind.ENGINE_FAILED: _server(502, "engine_failed", "api_error"),
    ErrorKind.UNAVAILABLE: _server(503, "unavailable", "overloaded_error"),
    ErrorKind.INTERNAL: _server(500, None, "api_error"),
}


class CallError(Exception):
    """A request without an answer. `param` names the field at fault, `allowed` the route's method, if so."""

    def __init__(
        self, kind: ErrorKind, message: str, *, param: str | None = None, allowed: str | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.param, self._allowed = kind, message, param, allowed

    @property
    def status(self) -> int:
        """The HTTP status."""
        return _FORMS[self.kind].status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that tell a client when to try again, or with which method."""
        if self._allowed is not None:
            return [(b"allow", self._allowed.encode())]
        if self.kind in (ErrorKind.ENGINE_FAILED, ErrorKind.UNAVAILABLE):
            return [(b"retry-after", str(RETRY_AFTER_S).encode())]
        return []


def invalid(message: str, param: str | None = None) -> CallError:
    """A request that cannot be read as it stands."""
    return CallError(ErrorKind.INVALID, message, param=param)


def unsupported(message: str, param: str | None = None) -> CallError:
    """A request that asks for what is not offered, and would not be answered truly without it."""
    return CallError(ErrorKind.UNSUPPORTED, message, param=param)


def openai_error(error: CallError) -> dict[str, Any]:
    """The body that OpenAI's clients read."""
    form = _FORMS[error.kind]
    return {
        "error": {
            "message": error.message,
            "type": form.openai_type,
            "param": error.param,
            "code": form.openai_code,
        }
    }


def anthropic_error(error: CallError) -> dict[str, Any]:
    """The body that Anthropic's clients read."""
    form = _FORMS[error.kind]
    return {"type": "error", "error": {"type": form.anthropic_type, "message": error.message}}
