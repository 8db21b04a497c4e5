"""`llamastead events`: what happened and happens in the herd, read from Redis."""

import argparse
import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from llamastead.cli.client import require_local_redis
from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import BLOCK_MS, check, connect
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.parse import messages

FIRST = ("kind", "model", "state", "instance")  # shown first, in this order, without their names


def events(settings: Settings, parsed: argparse.Namespace) -> int:
    """Print the last events, and with --follow those to come."""
    require_local_redis(settings)
    return asyncio.run(_events(settings, parsed))


async def _events(settings: Settings, parsed: argparse.Namespace) -> int:
    client = connect(settings.redis_url)
    try:
        await check(client, settings.redis_url)
        stream = Keys(settings.redis_prefix).events
        last = "0-0"
        newest_first: Any = await client.xrevrange(stream, count=parsed.lines)
        for key, fields in reversed(newest_first):
            last = _show(key, fields, parsed)
        while parsed.follow:
            for message in messages(await client.xread({stream: last}, block=BLOCK_MS), stream):
                last = _show(message.id, message.fields, parsed)
        return 0
    finally:
        await client.aclose()


def _show(key: str, fields: Mapping[str, str], parsed: argparse.Namespace) -> str:
    if parsed.json:
        print(json.dumps({"id": key, **fields}, ensure_ascii=False), flush=True)
    else:
        moment = datetime.fromtimestamp(int(key.partition("-")[0]) / 1000, UTC).astimezone()
        head = [fields[name] for name in FIRST if fields.get(name)]
        rest = [f"{name}={value}" for name, value in fields.items() if name not in FIRST and value]
        print(f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}", *head, *rest, flush=True)
    return key
