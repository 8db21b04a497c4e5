"""What `up` tells the person who started it: engine, models, address, and when it can be used."""

import asyncio
import contextlib
import json
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from redis.exceptions import RedisError

from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import connect
from llamastead.shared.store.gateway import GatewayStore
from llamastead.shared.store.keys import Keys
from llamastead.supervisor.engine import Engine
from llamastead.up.folder import http_place, trust

log = logging.getLogger(__name__)

LOOK_S = 0.1
LONG_S = 15.0  # after which the wait for a leader is worth a line


def say(text: str) -> None:
    """Print a line at once; a closed standard output is nobody's problem."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


class Announcer:
    """Follows the start and prints each fact once it is true."""

    def __init__(self, settings: Settings, engine: Engine | None, urls: Sequence[str]) -> None:
        """`engine` is None where no supervisor runs here; `urls` are where gateways listen, if any does."""
        self.settings = settings
        self.engine = engine
        self.urls = urls
        self.began = time.monotonic()

    def begin(self) -> None:
        """Print what is known before anything runs."""
        say(f"llamastead {version('llamastead')}, run folder {self.settings.run_dir}")
        if self.engine is not None:
            say(f"engine     {self.engine.version} at {self.engine.path}")

    def warn(self, warnings: Iterable[str]) -> None:
        """Pass on what was found odd."""
        for warning in warnings:
            log.warning(warning)

    async def follow(self, supervisor_pid: Callable[[], int | None]) -> None:
        """Print when the supervisor leads, which models there are, and when the gateway answers."""
        models: Mapping[str, Mapping[str, str]] = {}
        if self.engine is not None:
            models = await self._await_supervisor(supervisor_pid)
            say(f"models     {_per_source(models, self.settings.models_dir)}")
            say(f"supervisor ready after {time.monotonic() - self.began:.1f} s")
        if self.urls:
            prefix, cert = self.settings.api_prefix, self.settings.ssl_cert_file
            place, socket_path = http_place(self.urls[0], prefix, tls=cert is not None)
            await self._await_gateway(place, socket_path)
            say(f"listening  {', '.join(f'{url}{prefix}' for url in self.urls)}")
            if shown := next((name for name, fields in models.items() if fields.get("hidden") != "1"), None):
                say(f"try        {self._example(place, socket_path, shown)}")

    async def _await_supervisor(self, pid: Callable[[], int | None]) -> Mapping[str, Mapping[str, str]]:
        keys = Keys(self.settings.redis_prefix)
        client = connect(self.settings.redis_url)
        store = GatewayStore(client, keys)
        told = False
        try:
            while True:
                with contextlib.suppress(RedisError):
                    leader = await client.hgetall(keys.leadership)
                    leads = leader.get("host") == self.settings.host_id and leader.get("pid") == str(pid())
                    # Said once it has taken over; until then the models in Redis are those of an earlier run.
                    if leads and "ready" in leader:
                        return await store.read_models()
                    if not told and time.monotonic() - self.began > LONG_S:
                        told = True
                        _tell_of_wait(leader, leads)
                await asyncio.sleep(LOOK_S)
        finally:
            await client.aclose()

    async def _await_gateway(self, place: str, socket_path: str | None) -> None:
        transport = httpx.AsyncHTTPTransport(uds=socket_path, verify=trust(self.settings.ssl_cert_file))
        async with httpx.AsyncClient(transport=transport, timeout=2.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{place}/readyz")).is_success:
                        return
                await asyncio.sleep(LOOK_S)

    def _example(self, place: str, socket_path: str | None, model: str) -> str:
        # Plain completion: it gives sensible text with any model that generates, chat template or not.
        request = {"model": model, "prompt": "Once upon a time", "max_tokens": 32}
        body = json.dumps(request, ensure_ascii=False)
        key = " -H 'Authorization: Bearer YOUR-KEY'" if self.settings.inference_keys() else ""
        dial = f"--unix-socket {shlex.quote(socket_path)} " if socket_path else ""
        if self.settings.ssl_cert_file:
            dial += f"--cacert {shlex.quote(str(self.settings.ssl_cert_file))} "
        kind = "-H 'Content-Type: application/json'"
        return f"curl {dial}{place}/v1/completions{key} {kind} -d {shlex.quote(body)}"


def _tell_of_wait(leader: Mapping[Any, Any], ours: bool) -> None:
    """Say why there is no supervisor at work yet: ours is slow, or another one leads, or none."""
    if ours:
        log.warning("the supervisor is still taking over")
        return
    who = f"pid {leader.get('pid')} on {leader.get('host')}" if leader else "nobody"
    log.warning("the supervisor does not lead yet", extra={"leader": who})


def _per_source(models: Mapping[str, Mapping[str, str]], folder: Path | None) -> str:
    counts = Counter(fields.get("source", "?") for fields in models.values())
    listed = ", ".join(f"{count} from {source}" for source, count in sorted(counts.items()))
    if listed:
        return listed
    return f"none in {folder}" if folder else "none: give --models-dir or --models-preset"
