"""Writes of an answer joined into one system call."""

from typing import Any

from llamastead.gateway.joined import JoinedWrites, call_joined


class Sink:
    """A transport that notes what reaches it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, data: bytes) -> None:
        """Note a write."""
        self.calls.append(data)

    def close(self) -> None:
        """Note the end."""
        self.calls.append("close")

    def is_closing(self) -> bool:
        """Answer what only a real transport knows."""
        return "close" in self.calls


async def test_a_head_leaves_with_the_piece_that_follows_and_alone_without_one() -> None:
    """Two answers, one whose body is at hand and one whose body comes later: one write, then two."""
    sink = Sink()
    joined = JoinedWrites(sink)  # type: ignore[arg-type]

    async def send(message: Any) -> None:
        joined.write(message["data"])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for start in ({"body_follows": True}, {}):
            await send({"type": "http.response.start", "data": b"head ", **start})
            await send({"type": "http.response.body", "data": b"body "})

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    await call_joined(app, joined, {}, receive, send)
    assert sink.calls == [b"head body ", b"head ", b"body "]


def test_what_is_held_back_leaves_before_the_end() -> None:
    """An answer that breaks off between head and body: the head is sent, then the connection closes."""
    sink = Sink()
    joined = JoinedWrites(sink)  # type: ignore[arg-type]
    joined.hold()
    joined.write(b"head")
    assert sink.calls == []
    joined.close()
    assert sink.calls == [b"head", "close"]
    assert joined.is_closing()
