"""Logs of all processes: one line an event, readable or JSON, with the facts that `extra=` gives."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_PLAIN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_BARE = re.compile(r'[^\s"=]+')
QUIET = ("httpx", "httpcore", "asyncio", "rq", "rq.worker", "uvicorn.access")


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _PLAIN and value is not None}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info  supervisor instance ready model=m instance=i`."""

    def __init__(self, role: str) -> None:
        """`role` is the word that says which process speaks."""
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback, if any, follows it."""
        facts = "".join(f" {key}={_word(value)}" for key, value in _facts(record).items())
        line = f"{_time(record)} {record.levelname.lower():<7} {self.role} {record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, role, logger, message, then the facts."""

    def __init__(self, role: str) -> None:
        """`role` is the word that says which process speaks."""
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "role": self.role,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


OURS = (TextFormatter, JsonFormatter)
"""What tells a handler that `setup` made from others."""


def setup(level: str, log_format: str, role: str, stream: TextIO | None = None) -> None:
    """Send all logs of this process to `stream` (default: standard error).

    `level` is debug, info, warning or error; `log_format` is text or json. Chatty libraries speak from
    warning on, unless the level is debug. May be called again.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(role) if log_format == "json" else TextFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
    logging.captureWarnings(True)
