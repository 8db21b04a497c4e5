"""The loop of `llamastead up`, with a real Valkey, a real engine and roles that do what a test wants."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from llamastead.shared.settings import Settings
from llamastead.shared.store.keys import Keys
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.registry.options import OptionTable
from llamastead.up.announce import Announcer
from llamastead.up.loop import BACKOFF_FIRST_S
from llamastead.up.processes import children_of, descendants_of

PROGRAM = Path(__file__).with_name("up_with_fakes.py")
PATIENCE_S = 30.0


class Run:
    """One `up` with fake roles in a run folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.journal = folder / "journal"
        self.output = folder / "output"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str, **wishes: dict[str, Any]) -> "Run":
        """Start it with these words; `wishes` says per role what its fake does."""
        ours = ("LLAMA_", "LLAMASTEAD_", "FAKE_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        env |= {"LLAMASTEAD_RUN_DIR": str(self.run_dir), "FAKE_JOURNAL": str(self.journal)}
        env |= {f"FAKE_{role.upper()}": json.dumps(wish) for role, wish in wishes.items()}
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), "--port", "0", *words], env=env, stdout=out, stderr=out
            )
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until its output matches."""
        return until(lambda: re.search(pattern, self.text()), lambda: f"{pattern!r} in:\n{self.text()}")

    def listens(self, gateways: int = 1) -> str:
        """Wait until it says so and all roles heed signals; return the address."""
        url = self.says(r"listening  (http://127\.0\.0\.1:\d+)")[1]
        self.noted("gateway", "waiting", gateways)
        self.noted("worker", "waiting")
        self.noted("supervisor", "waiting")
        return url

    def noted(self, role: str, event: str, times: int = 1) -> list[tuple[int, float]]:
        """Wait until a role noted an event so often; return pid and time of each."""

        def found() -> list[tuple[int, float]] | None:
            lines = self.journal.read_text().splitlines() if self.journal.exists() else []
            parts = [line.split() for line in lines]
            these = [(int(pid), float(at)) for who, pid, what, at in parts if (who, what) == (role, event)]
            return these if len(these) >= times else None

        return until(found, lambda: f"{times} × {role} {event}; output:\n{self.text()}")

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def ended(self) -> int:
        """Wait for its end and return the exit code."""
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def left_behind(self) -> list[str]:
        """Sockets in the run folder."""
        return [str(path) for path in self.run_dir.rglob("*") if path.is_socket()]


def until(look: Callable[[], Any], what: Callable[[], str]) -> Any:
    """Wait until `look` finds something and return it."""
    end = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < end, f"waited in vain for {what()}"
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture
def run(short_tmp: Path) -> Iterator[Run]:
    """An `up` to be started; killed with all below it when the test left it running."""
    made = Run(short_tmp)
    yield made
    if made.process is not None and made.process.poll() is None:
        below = descendants_of(made.pid, set())
        for pid in (made.pid, *below):
            with contextlib.suppress(ProcessLookupError):  # a role may just have ended by itself
                os.kill(pid, signal.SIGKILL)
        made.process.wait()


def test_says_engine_models_readiness_and_address(run: Run) -> None:
    """Start everything and read what a person is told, then stop: exit code 0, no process, no socket."""
    run.start()
    url = run.listens()
    run.says(re.escape(f"curl {url}/v1/completions"))  # a line of its own, behind the address
    text = run.text()
    assert "engine     " in text
    assert "models     1 from models_dir" in text
    assert "supervisor ready after" in text
    assert json.loads((run.run_dir / "gateway.json").read_text()) == {"url": url, "key": None}
    assert (run.run_dir / "redis/valkey.sock").stat().st_mode & 0o777 == 0o700
    below = descendants_of(run.pid, set())
    assert len(below) == 4
    run.send(signal.SIGTERM)
    assert run.ended() == 0
    assert [pid for pid in below if not gone(pid)] == []
    assert run.left_behind() == []
    assert not (run.run_dir / "gateway.json").exists()


def test_listens_on_all_addresses_that_it_is_given(run: Run) -> None:
    """Give an address and a socket file: both are said, the note has the first one; at the end the file is
    gone.
    """
    path = run.folder / "gw.sock"
    run.start("--host", f"127.0.0.1,{path}")
    found = run.says(r"listening  (http://127\.0\.0\.1:\d+), unix:(\S+)")
    assert found[2] == str(path)
    assert path.is_socket()
    assert json.loads((run.run_dir / "gateway.json").read_text())["url"] == found[1]
    run.noted("gateway", "waiting")
    run.send(signal.SIGTERM)
    assert run.ended() == 0
    assert not path.exists()


async def test_the_models_of_an_earlier_run_are_not_announced(
    redis: Redis, redis_url: str, keys: Keys, short_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let a supervisor lead over what an earlier run left, have the announcer look twice, then publish anew:
    only what is there now is told.
    """
    await redis.hset(keys.herd, "incarnation", "1")
    await redis.zadd(keys.models, {"old": 1})
    await redis.hset(keys.model("old"), mapping={"name": "old", "source": "models_dir"})
    await redis.hset(keys.leadership, mapping={"pid": "42", "host": "h"})
    settings = Settings(run_dir=short_tmp, redis_url=redis_url, host_id="h")
    engine = Engine(Path("/llama-server"), "1", OptionTable(()))
    following = asyncio.create_task(Announcer(settings, engine, None).follow(lambda: 42))

    async def looks() -> int:
        facts = await redis.info("commandstats")
        return int(facts.get("cmdstat_hgetall", {}).get("calls", 0))

    before = await looks()
    while await looks() < before + 2 and not following.done():  # noqa: ASYNC110 - another process counts
        await asyncio.sleep(0.02)
    assert not following.done()
    await redis.zadd(keys.models, {"new": 2})
    await redis.hset(keys.model("new"), mapping={"name": "new", "source": "preset"})
    await redis.hset(keys.leadership, "ready", "1")
    await following
    assert "models     1 from models_dir, 1 from preset" in capsys.readouterr().out


def test_stops_in_order(run: Run) -> None:
    """Interrupt it and compare when each role was told: gateways first, the supervisor once they are gone."""
    run.start("--gateways", "2").listens(2)
    run.send(signal.SIGINT)
    assert run.ended() == 0
    gateways = run.noted("gateway", "SIGTERM", 2)
    supervisor = run.noted("supervisor", "SIGTERM")
    assert max(at for _, at in gateways) < supervisor[0][1]
    assert run.noted("worker", "SIGTERM")


def test_a_dead_role_comes_back_with_growing_pauses(run: Run) -> None:
    """Let the worker end at once each time: the others stay, and the pauses between its starts double."""
    run.start(worker={"exit": 1})
    starts = [at for _, at in run.noted("worker", "start", 4)][:4]
    pauses = [b - a for a, b in pairwise(starts)]
    least = [BACKOFF_FIRST_S * 2**n for n in range(len(pauses))]
    # What a start takes beside a pause differs with the machine's load, so that only the least is certain.
    assert [pause > at_least for pause, at_least in zip(pauses, least, strict=True)] == [True] * 3
    assert "exit=1" in run.text()
    assert len(run.noted("supervisor", "start")) == 1


def test_a_killed_gateway_comes_back_on_the_same_port(run: Run) -> None:
    """Kill the gateway and connect once it is gone: nothing is refused, since `up` holds the socket."""
    url = run.start().listens()
    pid = run.noted("gateway", "start")[0][0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), lambda: "the gateway's end")
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert "exit=SIGKILL" in run.text()


def test_killed_redis_comes_back_with_its_data(run: Run) -> None:
    """Kill Valkey once the fake supervisor wrote to it: it comes back and still knows the leadership."""
    run.start().listens()
    redis = [
        pid
        for pid in descendants_of(run.pid, set())
        if "valkey-server" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    time_of_write = run.run_dir / "redis/appendonlydir/appendonly.aof.1.incr.aof"
    until(lambda: "leadership" in time_of_write.read_text(), lambda: "the write to reach the file")
    os.kill(redis[0], signal.SIGKILL)
    run.says("child=redis .*exit=SIGKILL")

    def asked() -> str:
        words = [sys.executable, "-m", "llamastead", "redis", "HGET", "llamastead:leadership", "host"]
        env = {**os.environ, "LLAMASTEAD_RUN_DIR": str(run.run_dir)}
        return subprocess.run(words, env=env, capture_output=True, text=True).stdout.strip()

    assert until(asked, lambda: "an answer of the restarted Valkey")


def test_a_role_that_can_not_work_as_configured_ends_everything(run: Run) -> None:
    """Let the supervisor end with EX_CONFIG: no restart, everything stops, the code is handed on."""
    run.start(supervisor={"exit": os.EX_CONFIG})
    assert run.ended() == os.EX_CONFIG
    assert len(run.noted("supervisor", "start")) == 1
    assert run.left_behind() == []


def test_a_file_broken_later_takes_nothing_down(run: Run) -> None:
    """Kill a supervisor whose next lives end with EX_CONFIG: it is tried again, the gateway stays."""
    run.start(supervisor={"exit": os.EX_CONFIG, "later": True}).listens()
    os.kill(run.noted("supervisor", "start")[0][0], signal.SIGKILL)
    run.noted("supervisor", "start", 4)
    assert len(run.noted("gateway", "start")) == 1


def test_deaf_children_are_killed_within_the_stop_timeout(run: Run) -> None:
    """Make gateway, worker and supervisor ignore TERM and INT: it ends in time anyway, with nobody left."""
    deaf = {"deaf": True}
    run.start("--stop-timeout", "2", gateway=deaf, worker=deaf, supervisor=deaf).listens()
    below = descendants_of(run.pid, set())
    began = time.monotonic()
    run.send(signal.SIGTERM)
    assert run.ended() == 0
    assert time.monotonic() - began < 2 * 5
    assert [pid for pid in below if not gone(pid)] == []


def test_a_second_signal_hurries(run: Run) -> None:
    """With a stop timeout of ten minutes and a deaf gateway send TERM twice: it ends within seconds."""
    run.start("--stop-timeout", "600", gateway={"deaf": True}).listens()
    run.send(signal.SIGTERM)
    run.noted("gateway", "SIGTERM")
    run.says("once more cuts the answers under way answers_s=360\n")
    run.send(signal.SIGTERM)
    assert run.ended() == 0


def test_orphans_live_through_the_supervisors_death_and_end_with_up(run: Run) -> None:
    """Kill a supervisor that has a child: it lives on below `up`, and is killed and reaped at the end."""
    run.start("--stop-timeout", "1", supervisor={"orphan": True}).listens()
    orphan, supervisor = run.noted("supervisor", "orphan")[0][0], run.noted("supervisor", "start")[0][0]
    os.kill(supervisor, signal.SIGKILL)
    run.noted("supervisor", "start", 2)
    assert f"PPid:\t{run.pid}\n" in Path(f"/proc/{orphan}/status").read_text()
    run.send(signal.SIGTERM)
    assert run.ended() == 0
    assert gone(orphan)


def test_when_up_is_killed_its_roles_go_and_the_next_one_starts(run: Run) -> None:
    """Kill `up` itself: roles and Valkey end by themselves, what the supervisor started stays."""
    run.start(supervisor={"orphan": True}).listens()
    orphan = run.noted("supervisor", "orphan")[0][0]
    below = descendants_of(run.pid, set()) - {orphan}
    run.send(signal.SIGKILL)
    run.ended()
    until(lambda: all(map(gone, below)), lambda: "the end of all roles")
    assert not gone(orphan)
    os.kill(orphan, signal.SIGKILL)
    run.output.unlink()
    run.start().listens()
    run.send(signal.SIGTERM)
    assert run.ended() == 0


def test_c111_hup_is_passed_to_the_supervisor_and_ends_nothing(run: Run) -> None:
    """Send SIGHUP ten times to `up` and to its Valkey: the supervisor hears of it, all pids stay."""
    run.start().listens()
    below = descendants_of(run.pid, set())
    heard = 0
    for _ in range(10):
        run.send(signal.SIGHUP)
        heard += 1
        run.noted("supervisor", "SIGHUP", heard)
    for pid in below:
        os.kill(pid, signal.SIGHUP)
    run.noted("supervisor", "SIGHUP", heard + 1)
    assert descendants_of(run.pid, set()) == below


def test_the_run_folder_has_one_up(run: Run) -> None:
    """Start a second one on the folder: it ends at once and says who has it, the first is not disturbed."""
    run.start().listens()
    second = Run(run.folder)
    second.output = run.folder / "second"
    assert second.start().ended() == 1
    assert re.search(
        rf"run folder \S+ is in use by pid {run.pid} \(.*up_with_fakes.*give another --run-dir", second.text()
    )
    assert len(second.text().splitlines()) == 1
    assert run.process is not None
    assert run.process.poll() is None


def test_a_taken_port_is_told_with_its_holder(run: Run) -> None:
    """Hold a port and start `up` on it: it ends at once naming our pid, with nothing left in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run.start("--port", str(port)).ended() == 1
    assert re.search(rf"port {port} on 127\.0\.0\.1 is taken by pid {os.getpid()} \(", run.text())
    assert len(run.text().splitlines()) == 1
    assert run.left_behind() == []


def test_an_unreachable_redis_is_told_without_its_password(run: Run) -> None:
    """Give a Redis that isn't there: it ends at once, saying where and what to do, the password left out."""
    assert run.start("--redis-url", "redis://:s3cret@127.0.0.1:1/0").ended() == 1
    assert "redis://:***@127.0.0.1:1/0 can't be reached" in run.text()
    assert "s3cret" not in run.text()
    assert not run.journal.exists()


def test_an_address_of_no_redis_is_told_in_a_line(run: Run) -> None:
    """Give an address that is no Redis URL: it ends at once, without a traceback."""
    assert run.start("--redis-url", "http://x").ended() == 1
    assert run.text().splitlines()[-1].startswith("llamastead: http://x is no Redis address")
    assert "Traceback" not in run.text()


def test_a_run_folder_too_long_for_sockets_is_refused(run: Run) -> None:
    """Give a run folder of a hundred letters: a clear message says how long it may be."""
    assert run.start("--run-dir", f"{run.folder}/{'x' * 100}").ended() == os.EX_CONFIG
    assert re.search(r"run folder \S+ is too long: .* 107 bytes.*Give a shorter --run-dir", run.text())


def test_secrets_travel_by_environment(run: Run) -> None:
    """Configure keys: no command line of a child shows them, every role has them in its environment."""
    run.start("--api-key", "k-one,k-two", "--admin-key", "k-adm").listens()
    for pid in descendants_of(run.pid, set()):
        assert "k-one" not in Path(f"/proc/{pid}/cmdline").read_text()
    gateway = run.noted("gateway", "start")[0][0]
    environ = Path(f"/proc/{gateway}/environ").read_text().split("\0")
    assert "LLAMASTEAD_API_KEYS=k-one,k-two" in environ
    assert "LLAMASTEAD_ADMIN_KEYS=k-adm" in environ
    assert json.loads((run.run_dir / "gateway.json").read_text())["key"] == "k-adm"


def test_only_one_role(run: Run, redis_url: str) -> None:
    """Run `up --only supervisor` on a given Redis: one child, restarted when killed, ended by TERM."""
    run.start("--only", "supervisor", "--redis-url", redis_url, "--redis-prefix", "only:")
    run.says("supervisor ready")
    first = run.noted("supervisor", "start")[0][0]
    assert descendants_of(run.pid, set()) == {first}
    os.kill(first, signal.SIGKILL)
    second = run.noted("supervisor", "waiting", 2)[1][0]
    run.send(signal.SIGTERM)
    assert run.ended() == 0
    assert run.noted("supervisor", "SIGTERM")[0][0] == second


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_works_as_pid_1(run: Run, redis_url: str) -> None:
    """As PID 1 of a pid namespace: orphans become its children, are reaped, and end with it on TERM."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, str(PROGRAM)]
    words += [
        "--only",
        "supervisor",
        "--redis-url",
        redis_url,
        "--redis-prefix",
        "pid1:",
        "--stop-timeout",
        "1",
    ]
    env = os.environ | {"LLAMASTEAD_RUN_DIR": str(run.run_dir), "FAKE_JOURNAL": str(run.journal)}
    env["FAKE_SUPERVISOR"] = json.dumps({"orphan": True})
    with run.output.open("ab") as out:
        run.process = subprocess.Popen(words, env=env, stdout=out, stderr=out)
    run.says("supervisor ready")
    (inside,) = children_of({run.pid})
    os.kill(inside, signal.SIGTERM)
    assert run.ended() == 0
    assert "killing what was left" in run.text()
