"""The stack of docker-compose.yml under test, through the compose command and the engine's client."""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from waiting import until_blocking

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
LASTING = ("redis", "supervisor", "worker", "gateway", "balancer")


def docker(*args: str) -> str:
    """Run the engine's client and return what it printed."""
    return subprocess.run(["docker", *args], check=True, capture_output=True, text=True).stdout.strip()


def until(look: Callable[[], Any], what: str) -> Any:
    """Wait as `until_blocking` does, with the patience that containers need."""
    return until_blocking(look, what, PATIENCE_S)


class Stack:
    """One compose project."""

    def __init__(self, project: str, port: int, compose: str) -> None:
        """`compose` is the command: `docker compose` or a stand-alone program."""
        self.project, self.port = project, port
        self.url = f"http://127.0.0.1:{port}"
        self.command = [*shlex.split(compose), "--project-name", project, "--project-directory", str(ROOT)]
        ours = ("LLAMASTEAD_", "LLAMA_", "COMPOSE_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.env |= {"LLAMASTEAD_PORT": str(port), "COMPOSE_DISABLE_ENV_FILE": "1"}
        # One thread: several that wait for each other crawl on a machine where other things run.
        self.env |= {"LLAMASTEAD_INSTANCE_ARGS": "--threads 1"}

    def compose(self, *args: str, stdin: bytes | None = None, patience_s: float = PATIENCE_S) -> str:
        """Run a compose command and return its standard output; fail with its errors."""
        done = subprocess.run(
            [*self.command, *args],
            input=stdin,
            capture_output=True,
            env=self.env,
            timeout=patience_s,
            check=False,
        )
        assert done.returncode == 0, f"compose {args}:\n{done.stderr.decode()}\n{self.logs(60)}"
        return done.stdout.decode().strip()

    def logs(self, lines: int = 200) -> str:
        """Return what health checks said of unhealthy containers, and the last lines of all containers."""
        label = f"label=com.docker.compose.project={self.project}"
        unwell = docker("ps", "--all", "--quiet", "--filter", label, "--filter", "health=unhealthy").split()
        checks = [f"{known['Name']}: {known['State']['Health']}" for known in map(self.inspect, unwell)]
        done = subprocess.run(
            [*self.command, "logs", "--no-color", "--tail", str(lines)],
            capture_output=True,
            env=self.env,
            check=False,
        )
        return "\n".join([*checks, done.stdout.decode(errors="replace")])

    def up(self, *args: str) -> None:
        """Start, or scale, and wait until everything is healthy; images are never built or pulled here."""
        self.compose("up", "--detach", "--wait", "--no-build", "--pull", "never", *args)

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        self.compose("down", "--volumes", "--remove-orphans")

    def add_models(self, files: dict[str, bytes]) -> None:
        """Write files to the models volume, as the worker's user."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))
        self.compose(
            *("run", "--rm", "--no-deps", "-T", "--entrypoint", "tar", "worker", "-x", "-C", "/models"),
            stdin=packed.getvalue(),
        )

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """Return all that the engine knows of a container."""
        return dict(json.loads(docker("inspect", container))[0])

    def healthy(self, container: str) -> bool:
        """Whether it runs and, if it has a health check, that says healthy."""
        state = self.inspect(container)["State"]
        health = state.get("Health", {}).get("Status", "healthy")
        return (state["Status"], health) == ("running", "healthy")

    def kill_main_process(self, service: str) -> str:
        """Kill the first container's process from outside, as a crash would, and return the container's id.

        Not through the engine: it takes `docker kill` for a wish and does not restart then.
        """
        container = self.containers(service)[0]
        kill(self.inspect(container)["State"]["Pid"])
        return container

    def processes(self, service: str, word: str) -> list[int]:
        """Return the pids on the host of those processes of a service whose command line has `word`."""
        lines = docker("top", self.containers(service)[0], "-eo", "pid,args").splitlines()[1:]
        return sorted(int(line.split()[0]) for line in lines if word in line.split(maxsplit=1)[1])

    def redis_cli(self, *args: str) -> str:
        """Run redis-cli as an operator would, inside the Redis container."""
        command = f'redis-cli --no-auth-warning -u "$(cat /secrets/redis-url)" {shlex.join(args)}'
        return self.compose("exec", "-T", "redis", "sh", "-c", command)

    def leftovers(self) -> str:
        """Return what the engine still has of this project."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (("ps", "-a"), ("network", "ls"), ("volume", "ls"))
        return "".join(docker(*kind, "--quiet", "--filter", label) for kind in kinds)


def kill(pid: int) -> None:
    """Kill a process by its pid on the host; never 0 or 1, which mean something else."""
    assert pid > 1, "the container is not running"
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def stack(project: str, port: int, compose: str) -> Iterator[Stack]:
    """Yield a stack that is not started yet, and remove all of it afterwards."""
    made = Stack(project, port, compose)
    made.down()
    try:
        yield made
    finally:
        made.down()
