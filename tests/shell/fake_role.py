"""A role of `up` that does what the test wants: `fake_role.py ROLE`.

FAKE_JOURNAL names a file that gets a line `role pid event monotonic-seconds` for each thing that happens.
FAKE_<ROLE> is a JSON object: `exit` ends it at once with that code (`later`: from its second life on), `deaf`
ignores TERM and INT, `orphan` starts a child in a session of its own that ignores TERM. The fake supervisor
leads, the fake gateway answers 200 to everything. `waiting` is noted by who heeds signals and does its work.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

ROLE = sys.argv[1]
WISHES = json.loads(os.environ.get(f"FAKE_{ROLE.upper()}", "{}"))


def note(event, pid=None):
    line = f"{ROLE} {pid or os.getpid()} {event} {time.monotonic()}\n"
    journal = os.open(os.environ["FAKE_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(journal, line.encode())
    os.close(journal)


def lives():
    lines = Path(os.environ["FAKE_JOURNAL"]).read_text().splitlines()
    return sum(line.split()[::2] == [ROLE, "start"] for line in lines)


def on_stop(number, _):
    note(signal.Signals(number).name)
    if not WISHES.get("deaf"):
        os._exit(0)


def start_orphan():
    ours, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(its, b"deaf")
        while True:
            signal.pause()
    os.read(ours, 4)
    note("orphan", pid)


def lead():
    from llamastead.shared.store.connect import connect_sync

    redis = connect_sync(os.environ["LLAMASTEAD_REDIS_URL"])
    prefix = os.environ["LLAMASTEAD_REDIS_PREFIX"]
    redis.hset(f"{prefix}herd", "incarnation", "1")
    redis.zadd(f"{prefix}models", {"small": 1})
    redis.hset(f"{prefix}model:small", mapping={"name": "small", "source": "models_dir"})
    about = {"pid": os.getpid(), "host": os.environ["LLAMASTEAD_HOST_ID"], "ready": "1"}
    redis.hset(f"{prefix}leadership", mapping=about)


def answer():
    listener = socket.socket(fileno=int(os.environ["LLAMASTEAD_LISTEN_FD"].split()[0]))
    while True:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()


note("start")
if "exit" in WISHES and (not WISHES.get("later") or lives() > 1):
    sys.exit(WISHES["exit"])
signal.signal(signal.SIGTERM, on_stop)
signal.signal(signal.SIGINT, on_stop)
signal.signal(signal.SIGHUP, lambda *_: note("SIGHUP"))
if WISHES.get("orphan"):
    start_orphan()
if ROLE == "supervisor":
    lead()
note("waiting")
if ROLE == "gateway":
    answer()
while True:
    signal.pause()
