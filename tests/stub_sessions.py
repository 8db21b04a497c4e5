"""Resumable streams of `stub_engine.py`: what a POST with a conversation id said, kept for replays."""

import threading
import time
from urllib.parse import parse_qs, unquote


class Session:
    """The bytes of one conversation, and whether more are to come."""

    def __init__(self):
        self.data = b""
        self.done = self.cancelled = False
        self.started_at, self.completed_at = int(time.monotonic()), 0
        self.changed = threading.Condition()

    def append(self, data):
        with self.changed:
            if self.cancelled:
                raise ConnectionResetError
            self.data += data
            self.changed.notify_all()

    def end(self, cancelled=False):
        with self.changed:
            self.done, self.cancelled = True, self.cancelled or cancelled
            self.completed_at = int(time.monotonic())
            self.changed.notify_all()

    def has_dropped(self, start, kept):
        with self.changed:
            return kept is not None and start < len(self.data) - kept

    def pieces(self, start):
        """Yield what there is from a byte on, and what comes, until the end."""
        while True:
            with self.changed:
                while len(self.data) <= start and not self.done:
                    self.changed.wait()
                piece = self.data[start:]
                if not piece:
                    return
            start += len(piece)
            yield piece


class Sessions:
    """All conversations of one engine, by id."""

    def __init__(self):
        self.by_id = {}

    def begin(self, name):
        self.stop(name)
        self.by_id[name] = Session()
        return self.by_id[name]

    def stop(self, name):
        session = self.by_id.pop(name, None)
        if session is not None:
            session.end(cancelled=True)

    def look_up(self, wanted):
        return [
            {
                "conversation_id": name,
                "is_done": session.done,
                "total_bytes": len(session.data),
                "started_at": session.started_at,
                "completed_at": session.completed_at,
            }
            for name, session in self.by_id.items()
            if any(name == one or name.startswith(f"{one}::") for one in wanted)
        ]


def named_in(target, in_path):
    """Return (id, first byte) of a target of a stream, None where this engine has no such route.

    `in_path` is the older form, `/v1/stream/<id>`, in which a slash, however written, ends the route.
    """
    path, _, query = target.partition("?")
    fields = {name: values[-1] for name, values in parse_qs(query).items()}
    if in_path:
        name = unquote(path.removeprefix("/v1/stream/"))
        known = path.startswith("/v1/stream/") and "/" not in name
    else:
        name, known = fields.get("conv_id", ""), path == "/v1/stream"
    return (name, fields.get("from", "0")) if known else None
