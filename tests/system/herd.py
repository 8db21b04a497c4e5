"""A real herd for the end-to-end tests: the command as a user starts it, with its own run folder and port."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from ports import free_port as free_port
from tiny import tiny_model
from waiting import PATIENCE_S as PATIENCE_S
from waiting import until as until

from llamastead.shared.addresses import UnixAddress, parse_address
from llamastead.shared.secret import instance_key, read_or_make_herd_secret
from llamastead.shared.store.connect import connect
from llamastead.shared.store.keys import Keys

KEYS = Keys("llamastead:")
# Times of the protocol scaled down, so that what takes seconds in earnest takes a test's blink.
QUICK: Mapping[str, str] = {
    "LLAMASTEAD_HEARTBEAT": "0.3",
    "LLAMASTEAD_SUSPECT_AFTER": "2",
    "LLAMASTEAD_SWEPT_AFTER": "1",
    "LLAMASTEAD_LINGER": "0.05",
    "LLAMASTEAD_LEADER_TTL": "3",
    "LLAMASTEAD_LEADER_RENEW": "0.5",
    "LLAMASTEAD_REREAD": "1",
    "LLAMASTEAD_MIN_RESIDENCE": "0",
    "LLAMASTEAD_UI": "false",  # a fresh run folder has it unpacked anew, a third of a second each
}


def clean_environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Return this process's environment plus `extra`, without settings of ours, llama-server or the hub.

    The hub cache is a folder that isn't there: no model of this machine appears in a test.
    """
    ours = ("LLAMASTEAD_", "LLAMA_", "RQ_", "HF_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return kept | {"HF_HUB_CACHE": "/nonexistent/hub"} | dict(extra)


class Role:
    """One `llamastead …` process of a test; its output goes to a file beside the run folder. `prefix` are
    words that become the command, as `nsenter` does.
    """

    def __init__(
        self, name: str, args: list[str], run_dir: Path, env: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> None:
        self.name, self.args, self.run_dir, self.env = name, args, run_dir, dict(env)
        self.prefix = tuple(prefix)
        self.process: asyncio.subprocess.Process | None = None
        self.log = run_dir.parent / f"{name}.log"

    async def start(self) -> None:
        """Start it in a process group of its own."""
        with self.log.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                *self.prefix,
                sys.executable,
                "-m",
                "llamastead",
                *self.args,
                stdout=out,
                stderr=out,
                stdin=asyncio.subprocess.DEVNULL,
                env=clean_environment(self.env | {"LLAMASTEAD_RUN_DIR": str(self.run_dir)}),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The pid of the started process."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    async def signal(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code once it ended."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)

    def output(self) -> str:
        """Return what it printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def instance_pids(run_dir: Path) -> list[int]:
    """Return the pids of the engines whose command line names a socket below `run_dir`, from /proc; not of
    those that a worker measures, or that only hand out the pages of the web UI.
    """
    needle, found = os.fsencode(str(run_dir)), []
    others = os.fsencode(f"{run_dir}/w/"), os.fsencode(f"{run_dir}/web-ui/")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                ours = [word for word in arguments if word.startswith(needle)]
                if b"--host" in arguments and ours and not any(word.startswith(others) for word in ours):
                    found.append(int(entry.name))
    return sorted(found)


def processes_naming(run_dir: Path) -> list[int]:
    """Return the pids of all processes whose command line or environment names `run_dir`, save our own."""
    needle, found = os.fsencode(str(run_dir)), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return sorted(found)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a run folder with a path short enough for unix sockets, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir(mode=0o700)
        yield run_dir


class Herd:
    """`llamastead up` on a free port, or the roles apart; `client` talks to the first gateway."""

    def __init__(self, run_dir: Path, env: Mapping[str, str]) -> None:
        self.run_dir, self.env = run_dir, dict(env)
        self.roles: dict[str, Role] = {}
        self.ports: list[int] = []
        self.headers: dict[str, str] = {}  # what clients send unless told otherwise, for example a key
        self.models = run_dir.parent / "models"
        self.models.mkdir(exist_ok=True)
        self.redis_url = self.env.get("LLAMASTEAD_REDIS_URL", f"unix://{run_dir}/redis/valkey.sock")

    def add_models(self, *names: str) -> None:
        """Write tiny models, each with weights of its own, to the folder `models`."""
        for name in names:
            tiny_model(self.models / f"{name}.gguf", sum(map(ord, name)))

    async def up(self, *args: str, ready: bool = True) -> Role:
        """Start `llamastead up` with these arguments and wait until its gateway is ready."""
        port = free_port()
        role = await self.role("up", "up", "--port", str(port), *args)
        self.ports.append(port)
        if ready:
            await self.ready(role, port)
        return role

    async def role(
        self, name: str, *args: str, prefix: Sequence[str] = (), run_dir: Path | None = None
    ) -> Role:
        """Start any `llamastead` command as a process that the test can signal by `name`."""
        role = Role(name, list(args), run_dir or self.run_dir, self.env, prefix)
        self.roles[name] = role
        await role.start()
        return role

    async def gateway(self, name: str, *args: str) -> Role:
        """Start one more gateway on a port of its own and wait until it is ready."""
        port = free_port()
        role = await self.role(name, "gateway", "--port", str(port), *args)
        self.ports.append(port)
        await self.ready(role, port)
        return role

    async def ready(self, role: Role, port: int) -> None:
        """Wait until the gateway on `port` says it is ready, and that the herd is open if a supervisor was
        started before it; fail with the role's output if it ended.
        """
        led = any(each.args[0] in ("up", "supervisor") for each in self.roles.values())

        async def look() -> bool:
            assert role.process is not None
            assert role.process.returncode is None, f"{role.name} ended:\n{role.output()[-4000:]}"
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"http://127.0.0.1:{port}/readyz")
            return answer.status_code == 200 and (answer.json()["herd"] or not led)

        try:
            await until(look, f"{role.name} on port {port}")
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{role.output()[-4000:]}") from None

    def client(self, gateway: int = 0, **options: Any) -> httpx.AsyncClient:
        """Return an HTTP client for gateway number `gateway`."""
        options.setdefault("timeout", PATIENCE_S)
        options.setdefault("headers", self.headers)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.ports[gateway]}", **options)

    async def status(self, model: str) -> dict[str, Any]:
        """Return the `status` object of a model as GET /models shows it."""
        async with self.client() as client:
            entries = (await client.get("/models")).json()["data"]
        return dict(next(e["status"] for e in entries if e["id"] == model))

    @contextlib.asynccontextmanager
    async def redis(self) -> AsyncIterator[Any]:
        """Yield a client of the herd's Redis."""
        client = connect(self.redis_url)
        try:
            yield client
        finally:
            await client.aclose()

    async def counted(self) -> dict[str, Any]:
        """Return all tickets, leases and queue entries that Redis holds, by key."""
        async with self.redis() as redis:
            kinds = (KEYS.tickets("*"), KEYS.leases("*"))
            names = [name for kind in kinds async for name in redis.scan_iter(match=kind)]
            found = {name: await redis.hgetall(name) for name in names}
            queue = await redis.zrange(KEYS.queue, 0, -1)
        return found | ({KEYS.queue: queue} if queue else {})

    async def nothing_counted(self) -> None:
        """Wait until neither a ticket nor a lease is left; fail showing what is."""
        left: dict[str, Any] = {}

        async def look() -> bool:
            nonlocal left
            left = await self.counted()
            return not left

        try:
            await until(look, "no tickets and no leases")
        except AssertionError as failure:
            raise AssertionError(f"{failure}: {left}") from None

    async def instance(self, model: str) -> dict[str, str]:
        """Return the hash of a model's instance with its id as `id`, empty while there is none."""
        async with self.redis() as redis:
            name = await redis.hget(KEYS.model(model), "instance")
            return {"id": name, **await redis.hgetall(KEYS.instance(name))} if name else {}

    async def direct(self, model: str) -> httpx.AsyncClient:
        """Return a client of the model's running engine itself, past the gateway."""
        fields = await self.instance(model)
        key = instance_key(read_or_make_herd_secret(self.run_dir / "secret"), fields["id"], fields["nonce"])
        where = parse_address(fields["address"])
        unix = isinstance(where, UnixAddress)
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=where.path if unix else None),
            base_url="http://instance" if unix else f"http://{where.authority}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=PATIENCE_S,
        )

    async def unload(self, model: str) -> None:
        """Have a model unloaded and wait until the gateway says so."""

        async def decided() -> bool:
            async with self.client() as client:
                answer = await client.post("/models/unload", json={"model": model})
            return answer.status_code != 503  # nobody led, or the next leader read it too late

        await until(decided, f"an answer about unloading {model}")

        async def look() -> bool:
            return (await self.status(model))["value"] == "unloaded"

        await until(look, f"unloaded {model}")

    async def command(self, *words: str, env: Mapping[str, str] = {}) -> tuple[int, str, str]:
        """Run a `llamastead` command of this herd to its end; return exit code, output and errors."""
        ours = {"LLAMASTEAD_RUN_DIR": str(self.run_dir), "LLAMASTEAD_REDIS_URL": self.redis_url}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "llamastead", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=clean_environment(self.env | ours | dict(env)),
        )
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def stop(self) -> None:
        """Stop everything that still runs, politely first; then kill what is left by pid."""
        for role in self.roles.values():
            if role.process is not None and role.process.returncode is None:
                role.process.send_signal(signal.SIGTERM)
        for role in self.roles.values():
            if role.process is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(role.process.wait(), PATIENCE_S)
        for pid in processes_naming(self.run_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def herd(env: Mapping[str, str] = {}) -> AsyncIterator[Herd]:
    """Yield a herd that is not started yet; whatever the test starts through it is ended afterwards."""
    with run_folder() as run_dir:
        made = Herd(run_dir, env)
        try:
            yield made
        except BaseException:
            for role in made.roles.values():
                print(f"--- the last words of {role.name}:\n{role.output()[-6000:]}")
            raise
        finally:
            await made.stop()
