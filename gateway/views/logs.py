"""GET /logs/{model}: the kept log lines of a model, also of one whose instance is gone, and what follows."""

import asyncio
from collections.abc import AsyncIterator

from llamastead.gateway.commands import Commands
from llamastead.shared.errors import ApiError

FOLLOW_PAUSE_S = 0.5
MOST_LINES = 10_000


def wanted_lines(text: str | None) -> int:
    """Return how many lines `?lines=` asks for (default 100); ApiError 400 when it is no such number."""
    if text is None:
        return 100
    # Python refuses to read a number of thousands of digits.
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > MOST_LINES:
        raise ApiError(400, f"lines must be a number up to {MOST_LINES}, not {text!r}", {"param": "lines"})
    return int(text)


async def read_tail(commands: Commands, model: str, lines: int) -> tuple[str, str]:
    """Return the last `lines` lines and the position behind them."""
    answer = await commands.ask("logs", {"model": model, "lines": str(lines), "offset": ""})
    return answer["text"], str(answer["next"])


async def follow(commands: Commands, model: str, offset: str, stop: asyncio.Event) -> AsyncIterator[str]:
    """Yield what is written after `offset`, piece by piece, until `stop` is set or the supervisor is gone."""
    while not stop.is_set():
        try:
            answer = await commands.ask("logs", {"model": model, "lines": "0", "offset": offset})
        except ApiError as problem:
            yield f"-- {problem.message}\n"
            return
        offset = str(answer["next"])
        if answer["text"]:
            yield answer["text"]
            continue
        try:
            async with asyncio.timeout(FOLLOW_PAUSE_S):
                await stop.wait()
        except TimeoutError:
            continue
