"""What a holder is and does, from its first connection to the removal of its folder."""

import collections
import contextlib
import errno
import json
import os
import re
import signal
import socket
import time

from clients import VERSION, Client
from faults import fault_point
from ladder import Ladder
from loop import READ, Loop
from output import BoundedLog, LinePipe
from spawn import StartRefusedError, boot_id, leadership_lock, spawn, start_time, write_json

# What is neither information nor debugging: warnings, errors, what has no level such as a failed assertion;
# each with the indented lines below it.
NEWS = re.compile(rb"\n((?!\d[\d.]* [ID] |[ \t\n]).+(?:\n[ \t].*)*)")
NEWS_A_SECOND = 10
MORE = b"more such lines are in the log file only"
STATE_PREFIX = b"cmd_child_to_router:state:"
FIRST_VISITOR_S = 10.0  # how long a spare waits for its supervisor's first connection
SPARE_GRACE_S = 2.0
LINES_EVERY_S = 0.02
SETTLED_S = 1.0  # within this after a ready line the log, which a thread of the engine writes, is up to it
TAIL_LINES = 50
LONGEST_LINE = 8192
LONGEST_STATE = 1 << 20
ENGINE_PHASES = ("loading", "ready", "sleeping")
IDENTITY = ("instance", "model", "nonce", "revision", "spec_hash")


class Holder:
    """One instance, or a spare that waits to become one.

    `phase` is how far the engine came: spare, starting, loading, ready, sleeping; stopping and exited lie
    over it. `ready_at` is the monotonic time of its latest ready line, None before the first.
    """

    def __init__(self, loop, listener, folder):
        self.loop, self.folder = loop, folder
        self.spec = self.engine = self.ladder = self.exit = None
        self.phase, self.state, self.payload = "spare", None, None
        self.ready_payload = self.ready_at = None
        self.epoch = 0
        self.orphaned = False
        self._leave_at_exit = False
        self._clients = []
        self._news_until, self._news_left = 0.0, 0
        self._tail = collections.deque(maxlen=TAIL_LINES)
        self._listener = listener
        loop.watch(listener.fileno(), READ, lambda _: self._on_connection())
        self._grace = loop.after(FIRST_VISITOR_S, self._on_grace_over)

    @property
    def key(self):
        """The engine's API key."""
        return self.spec["env"].get("LLAMA_API_KEY", "")

    @property
    def address(self):
        """Where the engine listens; a supervisor of an earlier version says only its unix socket."""
        return self.spec.get("address", f"unix:{self.spec['socket']}")

    # Supervisors

    def _on_connection(self):
        connection, _ = self._listener.accept()
        self._clients.append(Client(self.loop, connection, self._on_message, self._on_gone, self._say_hello))

    def _on_gone(self, client):
        self._clients.remove(client)
        self._mind_grace()

    def _mind_grace(self):
        """The grace runs only while no supervisor, leader or not, is connected."""
        self.loop.cancel(self._grace)
        self._grace = None
        if not self._has_supervisor():
            grace = SPARE_GRACE_S if self.spec is None else self.spec["orphan_grace_s"]
            self._grace = self.loop.after(grace, self._on_grace_over)

    def _has_supervisor(self):
        return any(client.is_supervisor for client in self._clients)

    def _on_grace_over(self):
        self._grace = None
        if not self._runs():
            self.leave()
            return
        self.orphaned = True
        self._stop(self.spec["orphan_grace_s"], force=False)

    def _on_message(self, client, message):
        op = message["type"]
        handle = {
            "hello": self._on_hello,
            "start": self._on_start,
            "stop": self._on_stop,
            "forget": self._on_forget,
        }
        if op not in handle:
            return
        epoch = message.get("epoch")
        if op == "hello" and message.get("role") != "leader":
            epoch = self.epoch
        if epoch is None or epoch < self.epoch:
            why = "epoch"
        else:
            self.epoch = epoch
            why = None
        if op == "hello":
            # A deposed leader is still a supervisor whose instances are not orphans.
            client.is_supervisor = True
            self._mind_grace()
        if why is None:
            why = handle[op](client, message)
        if why is not None:
            client.send("refused", op=op, why=why, epoch=self.epoch)

    def _on_hello(self, client, _message):
        self._say_hello(client)

    def _on_start(self, _client, message):
        spec = message["spec"]
        if self.spec is not None:
            same = all(self.spec[name] == spec[name] for name in ("instance", "spec_hash"))
            return None if same else f"it holds {self.spec['instance']}"
        try:
            self._start(spec, message["epoch"])
        except StartRefusedError as refusal:
            return str(refusal)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return f"{error.strerror}: {error.filename}" + (": make room on its disk" if full else "")
        for each in self._clients:
            self._say_hello(each)
        return None

    def _on_stop(self, _client, message):
        deadline_s, force = message.get("deadline_s"), bool(message.get("force"))
        if self.engine is None:
            return "nothing runs"
        if self._runs():
            self._stop(deadline_s, force)
        return None

    def _on_forget(self, _client, _message):
        if self._runs():
            return "it runs"
        self.leave()
        return None

    def _say_hello(self, client):
        phase = "exited" if self.exit else "stopping" if self.ladder else self.phase
        spec = self.spec or {}
        client.send(
            "hello",
            holder=1,
            phase=phase,
            **{name: spec.get(name) for name in IDENTITY},
            pid=self.engine.pid if self.engine else None,
            address=self.address if spec else None,
            place=spec.get("place"),
            needs=spec.get("needs"),
            epoch=self.epoch,
            state=self.state,
            payload=self.payload,
            ready_payload=self.ready_payload,
            exit=self.exit,
        )

    def _tell(self, kind, droppable=False, **fields):
        for client in list(self._clients):
            client.send(kind, droppable, **fields)

    def tell_step(self, step, processing=None):
        """Tell everybody how far a stop came."""
        self._tell("stop", step=step, processing=processing)

    # The engine

    def _start(self, spec, epoch):
        run_dir = os.path.dirname(os.path.dirname(self.folder))
        with leadership_lock(os.path.join(run_dir, "epoch"), epoch):
            # Our sockets stay reachable: they and our working directory move along with the folder.
            folder = os.path.dirname(spec["socket"])
            if folder != self.folder:
                os.rename(self.folder, folder)
                self.folder = folder
                fault_point("holder.moved")
            identity = {
                "v": VERSION,
                **{name: spec[name] for name in IDENTITY},
                "address": spec.get("address", f"unix:{spec['socket']}"),
                "epoch": epoch,
                "boot_id": boot_id(),
                "holder_pid": os.getpid(),
                "holder_start": start_time(os.getpid()),
            }
            write_json("intent.json", identity)
            fault_point("holder.intent")
            self.engine = spawn(spec, identity)
        fault_point("holder.spawned")
        self.spec, self.phase = spec, "starting"
        self._log = BoundedLog(spec["log_path"], spec["log_bytes"])
        self._note(f"starts, pid {self.engine.pid}")
        self._out = LinePipe(self.loop, self.engine.stdout, self._on_stdout, LONGEST_STATE)
        self._err = LinePipe(self.loop, self.engine.stderr, self._on_output, LONGEST_LINE, LINES_EVERY_S)

    def _on_stdout(self, lines):
        for line in lines.split(b"\n"):
            if not line.startswith(STATE_PREFIX) or not self._on_state(line[len(STATE_PREFIX) :]):
                self._on_output(line)

    def _on_state(self, line):
        try:
            told = json.loads(line)
            self.state, self.payload = told["state"], told.get("payload")
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        if self.state in ENGINE_PHASES:
            self.phase = self.state
        if self.state == "ready":
            fault_point("holder.ready")
            first = self.ready_at is None
            self.ready_at = time.monotonic()
            if first:
                self.ready_payload = self.payload
                if self.ladder is not None:
                    self.ladder.on_ready()
        self._tell("state", state=self.state, payload=self.payload)
        return True

    def _on_output(self, lines):
        """Keep what the engine logs; pass all of it on while it loads, then only what somebody should see.

        A ready engine logs hundreds of lines a request, so no work is done on each.
        """
        self._log.write(lines)
        self._tail.extend(lines.rsplit(b"\n", TAIL_LINES)[-TAIL_LINES:])
        settled = self.phase == "ready" and time.monotonic() - self.ready_at > SETTLED_S
        told = self._news_in(lines) if settled else lines
        if told:
            self._tell("lines", droppable=True, lines=[shown(line) for line in told.split(b"\n")])

    def _news_in(self, lines):
        """Return the news among the lines, not so many that an engine which always warns floods us."""
        news = NEWS.findall(b"\n" + lines)
        if not news:
            return b""
        now = time.monotonic()
        if now >= self._news_until:
            self._news_until, self._news_left = now + 1.0, NEWS_A_SECOND
        if len(news) > self._news_left:
            news = [*news[: self._news_left], MORE] if self._news_left else []
        self._news_left = max(0, self._news_left - len(news))
        return b"\n".join(news)

    def _note(self, text):
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {self.spec['instance']} {text}"
        self._log.write(line.encode())

    def _runs(self):
        return self.engine is not None and self.exit is None

    def _stop(self, deadline_s, force):
        if self.ladder is None:
            self.ladder = Ladder(self)
            self.ladder.begin(deadline_s, force)
        else:
            self.ladder.hurry(deadline_s, force)

    def on_child_signal(self):
        """The engine may have ended: kill what is left of its group while its pid names it, then reap it."""
        if not self._runs():
            return
        if os.waitid(os.P_PID, self.engine.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self.engine.signal_group(signal.SIGKILL)
        _, status = os.waitpid(self.engine.pid, 0)
        fault_point("holder.reaped")
        self._on_exit(os.waitstatus_to_exitcode(status))

    def _on_exit(self, code):
        self._out.finish()
        self._err.finish()
        os.close(self.engine.stdin)
        if self.ladder is not None:
            self.ladder.end()
        self.exit = {
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "tail": [shown(line) for line in self._tail],
            "phase": self.phase,
            "asked": self.ladder is not None,
            "killed": self.ladder is not None and self.ladder.killed,
            "orphaned": self.orphaned,
            "samples": self.ladder.samples if self.ladder is not None else "",
        }
        self._note(f"ended, exit code {code}" if code >= 0 else f"ended by signal {-code}")
        self._tell("exit", **self.exit)
        fault_point("holder.exited")
        if self._leave_at_exit or (self.orphaned and not self._has_supervisor()):
            self.leave()
        else:
            self._mind_grace()

    # The end

    def on_terminate(self):
        """Somebody wants us gone (a machine that shuts down): stop the engine in order, then leave."""
        self._leave_at_exit = True
        if self._runs():
            self._stop(self.spec["stop_timeout_s"], force=False)
        else:
            self.leave()

    def leave(self):
        """Remove the folder and end; nothing runs any more."""
        for client in self._clients:
            client.close()
        remove_folder(self.folder)
        self.loop.stop()


def shown(line):
    """Return a line of the engine's output as it is told."""
    return line[:LONGEST_LINE].decode(errors="replace")


def remove_folder(path):
    """Remove a folder with all that is in it; what is already gone is fine."""
    for parent, folders, files in os.walk(path, topdown=False):
        for name in files:
            _ignore_missing(os.unlink, os.path.join(parent, name))
        for name in folders:
            full = os.path.join(parent, name)
            _ignore_missing(os.unlink if os.path.islink(full) else os.rmdir, full)
    _ignore_missing(os.rmdir, path)


def _ignore_missing(remove, path):
    with contextlib.suppress(FileNotFoundError):
        remove(path)


def hold(folder):
    """Be the holder of `folder` until it is over; returns the exit code."""
    os.umask(0o077)
    # What a wrapper left open for our supervisor, its lock for example, is not to be held as long as we live.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):  # the list itself
                os.close(fd)
    # The descriptor that we were given must not be the engine's standard input one day.
    listener = socket.socket(fileno=os.dup(0))
    listener.setblocking(False)
    os.close(0)
    os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.chdir(folder)
    loop = Loop()
    holder = Holder(loop, listener, os.path.abspath(folder))
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def on_signals(_events):
        got = reading.recv(4096)
        if signal.SIGCHLD in got:
            holder.on_child_signal()
        if signal.SIGTERM in got or signal.SIGINT in got:
            holder.on_terminate()

    loop.watch(reading.fileno(), READ, on_signals)
    loop.run()
    return 0
