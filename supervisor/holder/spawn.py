"""Starting the engine so that a later supervisor can find it, prove it is the one, and end it."""

import contextlib
import fcntl
import json
import os
import signal
import time

from faults import fault_point

LOCK_PATIENCE_S = 1.0
HANDLED = (  # what Python or the holder handles or ignores; the engine gets the defaults
    signal.SIGCHLD,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGPIPE,
    signal.SIGTERM,
    signal.SIGXFSZ,
)


class StartRefusedError(Exception):
    """The engine is not started; the message is one word or sentence for the `why` of a refusal."""


class Engine:
    """A started process: its pid, which is also its process group, and our ends of its pipes."""

    def __init__(self, pid, stdin, stdout, stderr):
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr

    def signal_group(self, number):
        """Send a signal to the engine and every process it forked; none left is fine.

        Requires: the engine is not reaped yet, so its pid can't be anybody else's.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def say(self, line):
        """Write one line to its standard input; an engine that is gone or deaf is noticed elsewhere."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self.stdin, line.encode() + b"\n")


def boot_id():
    """Return what tells this boot of the machine from others, within which pid and start time are unique."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_time(pid):
    """Return when a process started, in clock ticks since boot."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name in parentheses may hold anything, also spaces and parentheses.
        return int(file.read().rpartition(b")")[2].split()[19])


def write_json(path, content):
    """Put a file in place whole or not at all. Raises OSError naming the file."""
    draft = path + ".draft"
    try:
        with open(draft, "w") as file:
            json.dump(content, file)
        os.rename(draft, path)
    except OSError as error:
        error.filename = os.path.abspath(path)
        raise


@contextlib.contextmanager
def leadership_lock(path, epoch):
    """Hold off changes of the leadership number while it is `epoch`; StartRefusedError when it is another.

    Leaders write the number under an exclusive lock of the same file, so between our look and the engine's
    start nobody becomes a leader that would have refused it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StartRefusedError("epoch") from None
    try:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise StartRefusedError("the leadership number is locked by somebody else")
            time.sleep(0.002)
        if int(os.pread(fd, 32, 0) or 0) != epoch:
            raise StartRefusedError("epoch")
        yield
    finally:
        os.close(fd)


def spawn(spec, identity):
    """Start the engine of `spec` and return it, its record written before its first instruction runs.

    The child waits for our word after the fork. A holder that dies before the record is on disk takes the
    word with it, so no engine is without a record. Raises OSError when the record can't be written; what
    keeps the program from starting shows as its exit code 127 and a line on its stderr.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink("e.sock")
    stdin, stdout, stderr, word = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    # A signal to the child between fork and exec must not run our handlers there: it shares our wake-up
    # socket.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        _become_engine(spec, stdin[0], stdout[1], stderr[1], word)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    for fd in (stdin[0], stdout[1], stderr[1], word[0]):
        os.close(fd)
    os.set_blocking(stdin[1], False)
    try:
        fault_point("holder.forked")
        write_json("record.json", {**identity, "engine_pid": pid, "engine_start": start_time(pid)})
        fault_point("holder.recorded")
        os.write(word[1], b"go")
    except OSError:
        os.close(word[1])
        os.waitpid(pid, 0)
        for fd in (stdin[1], stdout[0], stderr[0]):
            os.close(fd)
        raise
    os.close(word[1])
    return Engine(pid, stdin[1], stdout[0], stderr[0])


def _become_engine(spec, stdin, stdout, stderr, word):
    try:
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setpgid(0, 0)
        os.close(word[1])
        if os.read(word[0], 2):
            for fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
                os.dup2(fd, target)
            os.chdir(spec["cwd"])
            environment = {**spec["env"], "LLAMASTEAD_NONCE": spec["nonce"]}
            os.execve(spec["argv"][0], spec["argv"], environment)  # noqa: S606 - an argument list, no shell
    except OSError as error:
        os.write(2, f"can't run {spec['argv'][0]} in {spec['cwd']}: {error.strerror}\n".encode())
    finally:
        os._exit(127)
