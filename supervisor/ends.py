"""Why an instance ended, told from exit, phase and last lines, since nearly all exit codes are 1."""

import re
import signal as signals
from collections.abc import Sequence
from typing import Protocol

from llamastead.shared.words import EndClass

# What the engine says when memory ran out, on the host or on a device.
_OUT_OF_MEMORY = re.compile(
    r"unable to allocate \S+ buffer|insufficient memory|failed to allocate buffer|Cannot allocate memory"
    r"|out of memory|failed to allocate \S+ buffer|std::bad_alloc|ErrorOutOf(?:Device|Host)Memory",
    re.IGNORECASE,
)
# Lines that say what was wrong, most telling first.
_TELLING = [
    re.compile(pattern)
    for pattern in (
        r"error while loading shared libraries: .*",
        r"can't run .*",
        r"invalid argument: .*",
        r"error while handling (?:argument|environment variable) .*",
        r"expected value for argument.*",
        r"couldn't bind HTTP server socket.*",
        r"failed to open GGUF file .*",
        r"unknown model architecture: .*",
        r"tensor '.*' data is not within the file bounds.*",
        r"failed to load multimodal model.*",
        r"failed to reload model after sleeping.*",
        r"illegal split file.*",
        r"failed to read key-value pairs.*",
        r"GGML_ASSERT\(.*",
        r"(?:CUDA|ROCm|HIP) error.*",
        r"failed to load model from .*",
        r"error: .*",
    )
]
_SIGNAL_WORDS = {
    signals.SIGILL: (
        "illegal instruction (SIGILL): this build of llama-server needs processor features that this machine "
        "lacks; use another build with --engine PATH"
    ),
    signals.SIGKILL: "killed by signal 9 from outside, likely by the kernel for lack of memory",
    signals.SIGSEGV: "segmentation fault (SIGSEGV)",
    signals.SIGABRT: "aborted (SIGABRT)",
    signals.SIGBUS: "bus error (SIGBUS): a memory-mapped model file was cut short or became unreadable",
}
# Signals by which others end a process; all remaining ones are its own doing.
_FROM_OUTSIDE = frozenset({signals.SIGKILL, signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT})
# Phases in which the engine has not served yet.
_BEFORE_READY = frozenset({"spare", "starting", "loading"})
# Level letters of the engine's log lines: 0.00.294.316 E srv  load_model: …
_LOG_PREFIX = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} ([A-Z]) (?:\S+ +)?")


class Exit(Protocol):
    """What a holder tells of the end of its engine; exactly one of `code` and `signal` is set.

    `asked` says that the holder was told to stop it, `killed` that the holder had to use KILL.
    """

    @property
    def code(self) -> int | None: ...
    @property
    def signal(self) -> int | None: ...
    @property
    def tail(self) -> Sequence[str]: ...
    @property
    def phase(self) -> str: ...
    @property
    def asked(self) -> bool: ...
    @property
    def killed(self) -> bool: ...


def classify_exit(ended: Exit) -> tuple[EndClass, str]:
    """Return the class of an end and its reason in words.

    A stop that was asked for is STOPPED here; who asked knows the finer class (evicted, idle, abandoned).
    """
    if ended.asked:
        return (
            EndClass.STOPPED,
            "killed, since it did not stop in time" if ended.killed else "stopped as asked",
        )
    reason = explain_death(ended.code, ended.signal, ended.tail)
    if _says_out_of_memory(ended.tail):
        return EndClass.OUT_OF_MEMORY, reason
    if ended.signal in _FROM_OUTSIDE:
        return EndClass.KILLED, reason
    if ended.phase in _BEFORE_READY:
        return EndClass.FAILED_TO_START, reason
    return EndClass.CRASHED, reason


def explain_death(code: int | None, signal: int | None, tail: Sequence[str]) -> str:
    """Return one sentence on an exit, from its last stderr lines where they say more than the number does."""
    told = _telling_line(tail)
    if signal is not None:
        words = _SIGNAL_WORDS.get(signals.Signals(signal), f"ended by signal {signal}")
        return f"{words}: {told}" if told and signal not in (signals.SIGILL, signals.SIGKILL) else words
    if told:
        return f"{told} (exit code {code})"
    if code == 0:
        return "ended by itself without an error (exit code 0)"
    last = next((line for line in reversed(tail) if line.strip()), "nothing on stderr")
    return f"exit code {code}: {_plain(last)}"


def _says_out_of_memory(tail: Sequence[str]) -> bool:
    return any(_OUT_OF_MEMORY.search(line) for line in tail)


def _telling_line(tail: Sequence[str]) -> str:
    for pattern in (_OUT_OF_MEMORY, *_TELLING):
        for line in reversed(tail):
            if match := pattern.search(line):
                return _plain(line if pattern is _OUT_OF_MEMORY else match[0])
    return ""


def _plain(line: str) -> str:
    return _LOG_PREFIX.sub("", line).strip()
