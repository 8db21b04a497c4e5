"""The herd of the soak: gateways, supervisors and a worker on two ways to one Valkey, engines and a hub."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from fake_nvml import GIB, FakeGpu, FakeNvml, built_library
from fault_orders import FaultOrders
from full_disk import small_disk
from herd import QUICK, Herd, Role, free_port, herd, until
from hub import Hub, hub
from tcp_proxy import TcpProxy, tcp_proxy
from tiny import stub_engine
from valkey_server import start_valkey
from wall_clock import WallClock

STUBS, REALS = ("stub-a", "stub-b", "stub-c", "sleeper"), ("real-a", "real-b")
MODELS = STUBS + REALS
MODELS_MAX = 3
NAMES = ("g1", "g2", "g3", "s1", "s2", "w1")
DOWNLOADS = ("org/one", "org/two")
QUEUE_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 4.0
CLOCKS = QUICK | {
    "LLAMASTEAD_MAX_WAIT": "2",
    "LLAMASTEAD_MIN_RESIDENCE": "0.2",
    "LLAMASTEAD_QUEUE_TIMEOUT": str(QUEUE_TIMEOUT_S),
    "LLAMASTEAD_STOP_TIMEOUT": str(STOP_TIMEOUT_S),
    "LLAMASTEAD_STALL_TIMEOUT": "10",
    "LLAMASTEAD_ORPHAN_GRACE": "20",
}
TOKEN_S = 0.05
# Of the GPU, which with its margin has room for two of the first three.
GPU_GIB = {"stub-a": 6, "stub-b": 5, "stub-c": 4, "sleeper": 3}
GPU = FakeGpu("GPU-aaaa", "00000000:01:00.0", 12 * GIB, 12 * GIB)
CONTEXTS = (512, 640, 768)
RUN_FOLDER = "64m"
VALKEY = ("--save", "", "--enable-protected-configs", "yes")


def preset(folder: Path, models: Path, context: int = CONTEXTS[0]) -> str:
    """Return the presets of all models, whose context is that of all but the real ones."""
    lines = ["[*]", f"ctx-size = {context}", "threads = 1"]
    for name in STUBS:
        lines += [f"[{name}]", f"model = {models}/{name}.gguf", f"engine = {stub_engine(folder)}"]
        lines += ["sleep-idle-seconds = 1"] if name == "sleeper" else []
    for name in REALS:
        lines += [f"[{name}]", f"model = {models}/{name}.gguf", "ctx-size = 512"]
    return "\n".join(lines) + "\n"


class Stage:
    """What the faults act upon. Roles are named g1…, s1…, w1; `port_of` says where a gateway listens."""

    def __init__(
        self,
        made: Herd,
        gates: TcpProxy,
        reigns: TcpProxy,
        orders: FaultOrders,
        models_hub: Hub,
        *,
        tcp: bool,
        clock: WallClock | None,
        disk: bool,
    ) -> None:
        self.made, self.gates, self.reigns, self.orders, self.hub = made, gates, reigns, orders, models_hub
        self.folder = made.run_dir.parent
        self.valkey: subprocess.Popen[bytes]
        self.called_off: set[str] = set()
        self.clock, self.has_disk, self.has_gpu = clock, disk, clock is not None
        self.port_of = {name: free_port() for name in NAMES if name.startswith("g")}
        self.words = ["--models-preset", str(self.folder / "models.ini"), "--models-max", str(MODELS_MAX)]
        if tcp:
            first = 20_000 + 10 * (os.getpid() % 900)
            self.words += ["--instance-listen", "tcp", "--instance-ports", f"{first}-{first + 9}"]

    def start_valkey(self) -> None:
        """Start the Valkey, with the data it saved when it was told to save."""
        self.valkey = start_valkey(self.folder, *VALKEY, env=self.clock.env if self.clock else None)

    async def start(self, name: str) -> Role:
        """Start a gateway, a supervisor or a worker under its name; a gateway keeps its port."""
        proxy = self.gates if name.startswith("g") else self.reigns
        self.made.env["LLAMASTEAD_REDIS_URL"] = proxy.url
        if name.startswith("g"):
            return await self.made.role(name, "gateway", "--port", str(self.port_of[name]))
        if name.startswith("w"):
            return await self.made.role(name, "worker")
        return await self.made.role(name, "supervisor", *self.words)

    def write_presets(self, context: int) -> None:
        """Put the preset file there with this context for stubs."""
        draft = self.folder / "models.draft"
        draft.write_text(preset(self.folder, self.made.models, context))
        draft.replace(self.folder / "models.ini")

    def alive(self, kind: str) -> list[Role]:
        """Return the roles of a kind (g, s or w) that run."""
        return [
            role
            for name, role in sorted(self.made.roles.items())
            if name.startswith(kind) and role.process is not None and role.process.returncode is None
        ]

    async def accepts(self, name: str) -> bool:
        """Return whether a gateway says that it is ready."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=2.0) as client:
                url = f"http://127.0.0.1:{self.port_of[name]}/readyz"
                return (await client.get(url)).status_code == 200
        return False

    async def restart_the_dead(self) -> list[str]:
        """Start all roles that don't run, as `up` does; return which."""
        running = {role.name for kind in "gsw" for role in self.alive(kind)}
        dead = [name for name in NAMES if name not in running]
        for name in dead:
            await self.start(name)
        return dead

    async def all_up(self) -> None:
        """Start what does not run, wake what is paused, and wait until all gateways are ready."""
        for role in (*self.alive("g"), *self.alive("s"), *self.alive("w")):
            os.kill(role.pid, signal.SIGCONT)
        await self.restart_the_dead()
        for name in self.port_of:
            await until(lambda name=name: self.accepts(name), f"{name} to be ready")


def scripted_gpu(folder: Path) -> dict[str, str]:
    """Make the GPU that stubs take their memory of; return what the roles need in their environment."""
    FakeNvml(folder / "gpus").show(GPU)
    (folder / "usage").mkdir()
    return {
        "FAKE_NVML": str(folder / "gpus"),
        "FAKE_NVML_USAGE": str(folder / "usage"),
        "GGML_STUB_USAGE": str(folder / "usage"),
        "GGML_STUB_DEVICES": "CUDA0: Fake (9 MiB, 9 MiB free)",
        "LD_LIBRARY_PATH": str(built_library().parent),
    }


@contextlib.asynccontextmanager
async def stage(*, tcp: bool = False) -> AsyncIterator[Stage]:
    """Yield the herd, up and serving, its instances on TCP ports if `tcp`. A GPU and a clock that can be set
    need a compiler, a run folder that can be filled needs root.
    """
    compiler, root = shutil.which("cc") is not None, os.geteuid() == 0
    async with herd(CLOCKS) as made, contextlib.AsyncExitStack() as stack:
        folder = made.run_dir.parent
        made.add_models(*MODELS)
        for name in STUBS:
            knobs = {"token_seconds": TOKEN_S, "load_seconds": 0.2, "fork_child": name == "stub-b"}
            knobs["memory_mib"] = {"Host": [9, 5, 2]}
            if compiler:
                knobs["memory_mib"]["CUDA0"] = [GPU_GIB[name] * 1024 - 100, 50, 50]
                knobs["asleep_mib"] = 100
            (made.models / f"{name}.gguf.json").write_text(json.dumps(knobs))
        socket = folder / "valkey.sock"
        made.redis_url = f"unix://{socket}"
        ways = [await stack.enter_async_context(tcp_proxy(socket)) for _ in range(2)]
        orders = FaultOrders(folder / "orders")
        made.env.update(orders.env)
        clock = WallClock(folder) if compiler else None
        if clock is not None:
            made.env.update(scripted_gpu(folder) | clock.env)
        if root:
            stack.enter_context(small_disk(made.run_dir, RUN_FOLDER))
        models_hub = stack.enter_context(hub())
        for number, repository in enumerate(DOWNLOADS):
            models_hub.add(repository, {"big-Q4_K_M.gguf": bytes([number]) * (2 << 20)})
        made.env.update({"HF_ENDPOINT": models_hub.url, "HF_HUB_CACHE": str(folder / "cache")})
        set_up = Stage(made, *ways, orders, models_hub, tcp=tcp, clock=clock, disk=root)
        set_up.write_presets(CONTEXTS[0])
        set_up.start_valkey()
        try:
            await set_up.all_up()
            yield set_up
        finally:
            await made.stop()
            set_up.valkey.kill()
            set_up.valkey.wait(10)
