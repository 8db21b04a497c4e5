"""Errors as llama-server words them on the wire: {"error": {"code", "message", "type", ...}}."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    502: "server_error",
    503: "unavailable_error",
}


@dataclass
class ApiError(Exception):
    """An answer that refuses a request.

    `status` is the HTTP status, `message` says what is wrong and what to do next, `fields` are members
    to add to the error object (for example `param`, `reason`, `log`), `retry_after` whole seconds for the
    header of that name.
    Not frozen: Python writes a raised exception's traceback into it.
    """

    status: int
    message: str
    fields: dict[str, Any] = field(default_factory=dict)
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        """Return the JSON body: llama-server's shape, its `code` equal to the HTTP status."""
        kind = TYPES.get(self.status, "server_error")
        # It may quote a client's text, and JSON can hold halves of characters, which UTF-8 can't.
        message = self.message.encode(errors="backslashreplace").decode()
        return {"error": {"code": self.status, "message": message, "type": kind, **self.fields}}

    def to_json(self) -> str:
        """Return it as JSON text, as it travels in settled tickets and answers to commands."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the error that `to_json` wrote; raises ValueError when the text is something else."""
        try:
            return cls(**json.loads(text))
        except TypeError as problem:
            raise ValueError(f"not an error as to_json writes it: {text[:200]}") from problem
