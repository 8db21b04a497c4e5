#!/usr/bin/env python3
# No pathlib: an engine starts in milliseconds.
# ruff: noqa: PTH104, PTH108, PTH110, PTH118, PTH120, PTH123
"""A scripted stand-in for `llama-server` with settable faults and times, for what the real one can't do.

It speaks the protocol of a managed child (state lines on stdout, the exit line on stdin), HTTP on `--host`,
and prints `--help` and `--version` in llama-server's form. What it does is set by a JSON object in
`<model file>.json`, overlaid by one in the environment variable STUB_KNOBS; `KNOBS` lists them.
Beside the model it keeps

- `<model>.journal`: a JSON line per thing that happened ({"event", "pid", "t" monotonic seconds, ...});
- `<model>.serving.<pid>`: there while a POST runs; left behind by a dead process it means "stopped while
  serving".

GGML_STUB_DEVICES are the lines of `--list-devices`, semicolons between them. In the folder GGML_STUB_USAGE it
keeps `<uuid>,<pid>` with the bytes of `memory_mib` on each device of CUDA_VISIBLE_DEVICES, for the fake NVML.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time

from stub_http import Exchange, read_request
from stub_sessions import Sessions

KNOBS: dict[str, object] = {
    "load_seconds": 0.05,  # from the first state line to `ready`
    "load_steps": 2,  # progress lines in between
    "load_gate": None,  # a path: the end of the load comes only once it exists
    "hang": None,  # "loading": never ready; "serving": takes requests and never answers
    "stall": False,  # with hang "loading": not even progress lines
    "crash": None,  # "start" (no state line), "loading", "ready", "serving" (after one token), "wake"
    "crash_once": False,  # it crashes only if it never did before
    "crash_code": 1,  # exit code, or minus a signal number
    "crash_text": "",  # last lines on stderr before the crash
    "exit_after": None,  # seconds of being ready, then it ends with crash_code
    "ignore_exit": False,  # the exit line is read and nothing happens
    "ignore_term": False,  # SIGTERM is ignored, also while loading
    "ignore_eof": False,  # the end of stdin is ignored
    "fork_child": False,  # a helper process in the same group that ignores TERM, INT and HUP
    "tokens": 8,  # when the request does not say
    "token_seconds": 0.0,  # pace
    "token_gate": None,  # a path: all tokens but the first come only once it exists
    "replay_gate": None,  # a path: a replay's bytes but the first come only once it exists
    "prompt_seconds": 0.0,  # before the first token
    "stderr_lines": 0,  # noise at start
    "chatter": "",  # on stderr with each POST
    "status": None,  # POSTs are refused with this status
    "echo": False,  # POSTs are answered with what arrived: method, path, headers, body
    "count_body": False,  # POSTs are answered with the size and the SHA-256 of what arrived
    "stream_paths": False,  # conversations are named in the path, as older engines have it
    "kept_bytes": None,  # so much of a conversation's end is kept for replays, all if None
    "n_ctx": 512,
    "measure_gate": None,  # a path: what it would take is told only once that exists
    "asleep_mib": None,  # what it keeps of each GPU while it sleeps
    "untold_mib": 0,  # what it takes of each GPU beyond what it tells
    "memory_mib": None,  # {"CUDA0": [model, context, compute], "Host": ...}: told when measured and at a load
}
STATE_PREFIX = "cmd_child_to_router:state:"
EXIT_LINE = "cmd_router_to_child:exit"
LOST_AFTER_READY_S = 0.05


def help_text():
    with open(os.path.join(os.path.dirname(os.path.realpath(__file__)), "stub_help.txt")) as file:
        return file.read()


def option_table():
    """Read the help text: every spelling → (first long spelling, takes a value)."""
    table = {}
    for line in help_text().splitlines():
        if not line.startswith("-") or line.startswith("-----"):
            continue
        spelled, tail = [], line
        while tail.startswith("-"):
            name, _, tail = tail.partition(" ")
            spelled.append(name.rstrip(","))
            tail = tail.lstrip() if name.endswith(",") else tail
        long = next(name for name in spelled if name.startswith("--") or name == spelled[-1])
        for name in spelled:
            table[name] = (long, bool(tail) and not tail.startswith("  "))
    return table


def parse_arguments(argv):
    """Turn argv into {first long spelling: value or True}; an unknown one ends the program."""
    table, options, rest = option_table(), {}, list(argv)
    while rest:
        name = rest.pop(0)
        if name not in table:
            fail(f"error: invalid argument: {name}")
        long, valued = table[name]
        if valued and not rest:
            fail(f'error while handling argument "{name}": expected value for argument')
        options[long] = rest.pop(0) if valued else not name.startswith("--no-")
    for name, (long, valued) in table.items():
        variable = "LLAMA_ARG_" + name.lstrip("-").replace("-", "_").upper()
        if long not in options and variable in os.environ:
            options[long] = os.environ[variable] if valued else True
    return options


def fail(text):
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


class Slots:
    """What runs and what waits, as `/metrics` tells it."""

    def __init__(self, count, mark):
        self.free, self.mark = count, mark
        self.processing = self.deferred = 0
        self.last_task = time.monotonic()
        self.changed = threading.Condition()

    def __enter__(self):
        with self.changed:
            self.deferred += 1
            if self.processing + self.deferred == 1:
                open(self.mark, "w").close()
            while self.free == 0:
                self.changed.wait()
            self.free -= 1
            self.deferred -= 1
            self.processing += 1

    def __exit__(self, *_):
        with self.changed:
            self.free += 1
            self.processing -= 1
            self.last_task = time.monotonic()
            if self.processing + self.deferred == 0:
                os.unlink(self.mark)
            self.changed.notify()

    def busy(self):
        return self.processing + self.deferred


class Engine:
    """One scripted instance: its knobs, its state and its threads."""

    def __init__(self, options):
        self.options = options
        self.model = options.get("--model", "")
        self.knobs = self.read_knobs()
        self.managed = "LLAMA_SERVER_ROUTER_PORT" in os.environ
        self.keys = [
            k for k in (options.get("--api-key") or os.environ.get("LLAMA_API_KEY") or "").split(",") if k
        ]
        parallel = int(options.get("--parallel", -1))
        self.slots = Slots(parallel if parallel > 0 else 4, f"{self.model}.serving.{os.getpid()}")
        self.sessions = Sessions()
        self.state = "loading"
        self.waking = threading.Lock()
        self.out = threading.Lock()
        self.started = time.monotonic()
        self.ready_at = None

    def read_knobs(self):
        knobs = dict(KNOBS)
        texts = [os.environ.get("STUB_KNOBS", "{}")]
        if os.path.exists(self.model + ".json"):
            with open(self.model + ".json") as file:
                texts.insert(0, file.read())
        for given in map(json.loads, texts):
            unknown = set(given) - set(KNOBS)
            if unknown:
                fail(f"error: no such knob: {', '.join(sorted(unknown))}")
            knobs.update(given)
        return knobs

    # What it tells

    def journal(self, event, **fields):
        entry = json.dumps({"event": event, "pid": os.getpid(), "t": time.monotonic(), **fields})
        file = os.open(self.model + ".journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, entry.encode() + b"\n")
        os.close(file)

    def log(self, text, level="I"):
        spent = time.monotonic() - self.started
        seconds, micro = divmod(int(spent * 1e6), 1_000_000)
        stamp = f"{seconds // 60}.{seconds % 60:02}.{micro // 1000:03}.{micro % 1000:03}"
        with self.out:
            sys.stderr.write(f"{stamp} {level} {text}\n")
            sys.stderr.flush()

    def tell(self, state, payload):
        if self.managed:
            line = STATE_PREFIX + json.dumps({"state": state, "payload": payload}, separators=(",", ":"))
            with self.out:
                os.write(1, line.encode() + b"\n")

    def progress(self, value):
        self.tell("loading", {"stages": ["text_model"], "current": "text_model", "value": value})

    # Its life

    def run(self):
        if self.options.get("--fit") == "on":
            self.be_measured()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.journal("start", argv=sys.argv[1:], environ=sorted(os.environ), visible=visible)
        if self.knobs["ignore_term"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.knobs["fork_child"]:
            self.fork_helper()
        for k in range(int(self.knobs["stderr_lines"])):
            self.log(f"noise {k} " + "." * 80)
        self.crash_at("start")
        listener = self.bind()
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()
        self.load("loading")
        if not self.knobs["ignore_term"]:
            signal.signal(signal.SIGTERM, self.on_term)
            signal.signal(signal.SIGINT, self.on_term)
        self.become_ready(self.about())
        self.crash_at("ready")
        if self.managed:
            threading.Thread(target=self.read_stdin, daemon=True).start()
        self.live()

    def be_measured(self):
        """Tell what it would take, as a real one does before it loads, and be ended at that."""
        if not self.knobs["memory_mib"]:
            fail("this stub was not told what it takes")
        while self.knobs["measure_gate"] and not os.path.exists(self.knobs["measure_gate"]):
            self.log("measuring")
            time.sleep(0.05)
        self.log("common_params_fit_impl: getting device memory data for initial parameters:")
        self.log("common_memory_breakdown_print: | memory breakdown [MiB] | total   free    self |")
        for name, (model, context, compute) in self.takes().items():
            total = model + context + compute
            row = f"{total} = {model} + {context} + {compute}"
            row = row if name == "Host" else f"24077 = 945 + ({row}) + 0"
            self.log(f"common_memory_breakdown_print: |   - {name} (stub) | {row} |")
        self.log("common_fit_params: fitting params to free memory took 0.00 seconds")
        select.select([0], [], [], 60)
        os._exit(1)

    def takes(self):
        """Return what it takes by device; what is for a GPU that it does not see goes to the first."""
        taken = dict(self.knobs["memory_mib"] or {})
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        for name in [n for n in taken if n.startswith("CUDA") and seen is not None]:
            if int(name[4:]) >= len(seen.split(",")):
                taken["CUDA0"] = [a + b for a, b in zip(taken["CUDA0"], taken.pop(name), strict=True)]
        return taken

    def take_memory(self, asleep_mib=None):
        """Let the fake NVML show what is taken; it counts living processes only."""
        folder = os.environ.get("GGML_STUB_USAGE")
        taken = self.takes()
        for k, uuid in enumerate(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if folder else ()):
            told = taken.get(f"CUDA{k}", ())
            mib = sum(told) + self.knobs["untold_mib"] * bool(told) if asleep_mib is None else asleep_mib
            # At once: the fake NVML reads it at any time, and an empty one would be bytes that are free.
            draft = os.path.join(folder, f"draft-{uuid}-{os.getpid()}")
            with open(draft, "w") as file:
                file.write(str(int(mib * 2**20)))
            os.rename(draft, os.path.join(folder, f"{uuid},{os.getpid()}"))

    def tell_buffers(self):
        for name, sizes in self.takes().items():
            for kind, size in zip(("model", "KV", "compute"), sizes, strict=True):
                self.log(f"sched_reserve: {name} {kind} buffer size = {size:.2f} MiB")

    def load(self, phase):
        self.log(f"srv    load_model: loading model '{self.model}'")
        self.progress(0.0)
        steps = max(1, int(self.knobs["load_steps"]))
        while self.knobs["hang"] == "loading" and phase == "loading":
            if not self.knobs["stall"]:
                self.progress(0.5)
            time.sleep(0.2)
        for k in range(steps):
            time.sleep(float(self.knobs["load_seconds"]) / steps)
            self.progress((k + 1) / steps)
        self.wait_for_gate("load_gate")
        self.take_memory()
        self.tell_buffers()
        self.crash_at(phase)
        if not os.path.exists(self.model):
            self.log(
                f"gguf_init_from_file: failed to open GGUF file '{self.model}' (No such file or directory)",
                "E",
            )
            fail("srv  llama_server: exiting due to model loading error")

    def about(self):
        names = [n for n in str(self.options.get("--alias", "")).split(",") if n] or [self.model]
        meta = {
            "vocab_type": 1,
            "n_vocab": 297,
            "n_ctx": int(self.knobs["n_ctx"]),
            "n_ctx_train": 2048,
            "n_embd": 64,
        }
        meta.update(n_params=112064, size=448256, ftype="(guessed) all F32")
        return {"id": names[0], "aliases": names, "tags": [], "object": "model", "created": 0} | {
            "owned_by": "llamacpp",
            "meta": meta,
        }

    def become_ready(self, payload):
        self.state = "ready"
        self.slots.last_task = time.monotonic()
        self.ready_at = time.monotonic()
        self.journal("ready")
        self.tell("ready", payload)
        self.log("srv  llama_server: model loaded")
        self.log(f"srv  llama_server: listening on {self.options.get('--host')}")

    def live(self):
        idle = float(self.options.get("--sleep-idle-seconds", -1))
        limit = self.knobs["exit_after"]
        while True:
            time.sleep(0.02)
            now = time.monotonic()
            if limit is not None and now - self.ready_at >= float(limit):
                self.crash("exit_after")
            resting = self.state == "ready" and not self.slots.busy()
            if 0 < idle <= now - self.slots.last_task and resting:
                self.state = "sleeping"
                self.take_memory(self.knobs["asleep_mib"])
                self.tell("sleeping", None)

    def wake(self):
        with self.waking:
            if self.state == "sleeping":
                self.load("wake")
                self.become_ready(None)

    def fork_helper(self):
        pid = os.fork()
        if pid == 0:
            for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(ignored, signal.SIG_IGN)
            for fd in (0, 1, 2):
                os.close(fd)
            while True:
                signal.pause()
        self.journal("helper", helper=pid)

    # Its ends

    def crash_at(self, phase):
        if self.knobs["crash"] == phase and not (self.knobs["crash_once"] and self.has_crashed()):
            self.crash(phase)

    def has_crashed(self):
        with open(self.model + ".journal") as file:
            return any(json.loads(line)["event"] == "crash" for line in file)

    def crash(self, phase):
        self.journal("crash", phase=phase)
        if self.knobs["crash_text"]:
            print(self.knobs["crash_text"], file=sys.stderr, flush=True)
        code = int(self.knobs["crash_code"])
        if code < 0:
            signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
            os.kill(os.getpid(), -code)
            time.sleep(60)
        os._exit(code)

    def end(self, event, code):
        self.journal(event, serving=self.slots.busy())
        os._exit(code)

    def on_term(self, *_):
        """A ready llama-server stops serving on the first TERM and then hangs; the second ends it."""
        if self.state == "terminated":
            self.end("second_term", 1)
        self.journal("term", serving=self.slots.busy())
        self.state = "terminated"

    def read_stdin(self):
        """Read exit lines from `ready` on; one within 50 ms of it may be lost, here it always is."""
        pending = bool(select.select([0], [], [], 0)[0])
        buffer = b""
        while True:
            got = os.read(0, 4096)
            if not got:
                self.journal("eof", serving=self.slots.busy())
                if not self.knobs["ignore_eof"]:
                    os._exit(1)
                return
            lost = not pending and time.monotonic() - self.ready_at < LOST_AFTER_READY_S
            pending = False
            *lines, buffer = (buffer + got).split(b"\n")
            for line in lines:
                if EXIT_LINE.encode() not in line:
                    continue
                if lost or self.knobs["ignore_exit"]:
                    self.journal("exit_line_lost" if lost else "exit_line_ignored", serving=self.slots.busy())
                else:
                    self.end("exit_line", 0)

    # HTTP

    def bind(self):
        host, port = str(self.options.get("--host", "127.0.0.1")), int(self.options.get("--port", 8080))
        try:
            if host.endswith(".sock"):
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(host)
            else:
                listener = socket.socket(socket.AF_INET)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
            listener.listen(128)
        except OSError:
            fail(f"couldn't bind HTTP server socket, hostname: {host}, port: {port}")
        return listener

    def accept(self, listener):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection):
        connection.settimeout(5.0)
        reader = connection.makefile("rb")
        try:
            for left in range(99, -1, -1):
                request = read_request(reader)
                if request is None:
                    break
                connection.settimeout(None)
                exchange = Exchange(self, connection, reader, request, last=left == 0)
                exchange.answer()
                if exchange.closes:
                    break
                connection.settimeout(5.0)
        except OSError:
            pass
        finally:
            # A file object made from the socket keeps it open beyond its own close.
            reader.close()
            connection.close()

    def wait_for_gate(self, knob, gone=lambda: False):
        gate = self.knobs[knob]
        while gate and not os.path.exists(str(gate)):
            if gone():
                raise ConnectionResetError
            time.sleep(0.005)


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    options = parse_arguments(sys.argv[1:])
    if options.get("--help"):
        print(help_text(), end="")
    elif options.get("--version"):
        print("version: 1 (stub)\nbuilt with GNU 11.4.0 for Linux x86_64", file=sys.stderr)
    elif options.get("--list-devices"):
        print("Available devices:")
        for device in filter(None, os.environ.get("GGML_STUB_DEVICES", "").split(";")):
            print(f"  {device}")
    elif "--model" not in options:
        fail("error: --model is needed")
    else:
        Engine(options).run()


if __name__ == "__main__":
    main()
