"""What the tests of the holder share: specs, a supervisor that only watches, and looks into /proc."""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
from waiting import PATIENCE_S as PATIENCE_S
from waiting import until as until

from llamastead.supervisor.holders import (
    HolderEvent,
    Holders,
    instance_folders,
    kill_recorded,
    read_record,
)
from llamastead.supervisor.launch import InstanceSpec

KEY = "test-key"
E = TypeVar("E")


def spec_for(
    run_dir: Path, engine: Path, model: Path, instance: str = "host-1-1", **changes: Any
) -> InstanceSpec:
    """Return a spec of a small instance; `options` are further arguments, `env` further variables."""
    nonce = secrets.token_hex(16)
    sock = str(run_dir / "i" / instance / "e.sock")
    small = (
        "-c",
        "512",
        "-np",
        "2",
        "-t",
        "1",
        "--no-warmup",
        "-fit",
        "off",
        "--metrics",
        "--log-colors",
        "off",
    )
    argv = (str(engine), "-m", str(model), "--host", sock, *small, *changes.pop("options", ()))
    env = {
        "PATH": os.environ["PATH"],
        "LLAMA_SERVER_ROUTER_PORT": "0",
        "LLAMA_API_KEY": KEY,
        "HOME": "/nonexistent",
    }
    env |= changes.pop("env", {})
    fields: dict[str, Any] = {
        "instance": instance,
        "model": "tiny",
        "nonce": nonce,
        "revision": "0123456789ab",
        "spec_hash": hashlib.sha256(repr(argv).encode()).hexdigest()[:16],
        "argv": argv,
        "env": env,
        "cwd": str(run_dir),
        "socket": sock,
        "address": f"unix:{sock}",
        "stop_timeout_s": 10.0,
        "orphan_grace_s": 60.0,
        "log_path": str(run_dir / "logs" / "tiny.log"),
        "log_bytes": 1 << 20,
    }
    return InstanceSpec(**{**fields, **changes})


class Watcher:
    """A supervisor without opinions: its holders, and every event they told."""

    def __init__(self, run_dir: Path, epoch: int | None = 1, leader: bool = True) -> None:
        self.events: list[tuple[str, HolderEvent]] = []
        self._changed = asyncio.Event()
        self.holders = Holders(run_dir, self._take)
        self.holders.set_leadership(epoch, leader)

    def _take(self, instance: str, event: HolderEvent) -> None:
        self.events.append((instance, event))
        self._changed.set()

    async def event(self, kind: type[E], test: Callable[[E], bool] = lambda _: True) -> E:
        """Return the first event of a kind that passes a test, waiting for it if need be."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._changed.clear()
                for _, event in self.events:
                    if isinstance(event, kind) and test(event):
                        return event
                await self._changed.wait()

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of a kind so far."""
        return [event for _, event in self.events if isinstance(event, kind)]


async def caught_up(watcher: Watcher, instance: str) -> None:
    """Return once all was read that the holder had told until now: its `hello` comes behind that.

    A holder leaves lines out for a reader that is behind.
    """
    link = watcher.holders._links[instance]
    before = link.view
    watcher.holders.look_again()
    await until(lambda: link.view is not before, "the answer to a hello")


def client(spec: InstanceSpec) -> httpx.AsyncClient:
    """Return a client of an instance; new connections only, so that a missing socket shows."""
    transport = httpx.AsyncHTTPTransport(uds=spec.socket)
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(
        transport=transport, base_url="http://instance", headers=headers, timeout=PATIENCE_S
    )


def alive(pid: int) -> bool:
    """Whether a process lives; one that waits to be reaped does not."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def journal(model: Path) -> list[dict[str, Any]]:
    """Return what the stub engine wrote down of itself."""
    path = Path(f"{model}.journal")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def cleaned(run_dir: Path) -> Iterator[None]:
    """Leave nothing behind of the instances below a run folder; a holder that failed fails the test."""
    try:
        yield
        failures = [path.read_text() for path in run_dir.glob("i/*/holder.err") if path.stat().st_size]
        assert failures == []
    finally:
        for folder in instance_folders(run_dir):
            if record := read_record(folder):
                kill_recorded(record)
