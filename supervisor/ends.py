"""Why an instance ended, told from exit, phase and last lines, since nearly all exit codes are 1."""

import re
import signal as signals
from collections.abc import Sequence

from llamastead.shared.words import EndClass
from llamastead.supervisor.holder_link import HolderExit

# What the engine says when memory ran out, on the host or on a device.
_OUT_OF_MEMORY = re.compile(
    r"unable to allocate \S+ buffer|insufficient memory|failed to allocate(?: \S+)? buffer"
    r"|Cannot allocate memory|out of memory|std::bad_alloc|ErrorOutOf(?:Device|Host)Memory",
    re.IGNORECASE,
)
# What no second start would change: the files, the arguments or the engine itself are at fault.
_LASTING = tuple(
    re.compile(pattern)
    for pattern in (
        r"error while loading shared libraries: .*",
        r"can't run .*",
        r"invalid argument: .*",
        r"error while handling (?:argument|environment variable) .*",
        r"expected value for argument.*",
        r"failed to open GGUF file .*",
        r"unknown model architecture: .*",
        r"tensor '.*' data is not within the file bounds.*",
        r"illegal split file.*",
        r"failed to read key-value pairs.*",
        r"failed to load multimodal model.*",
    )
)
_UNKNOWN_ARCHITECTURE = "unknown model architecture: "
# What may pass: a second start is worth a try.
_PASSING = tuple(
    re.compile(pattern)
    for pattern in (
        r"couldn't bind HTTP server socket.*",
        r"failed to reload model after sleeping.*",
        r"GGML_ASSERT\(.*",
        r"(?:CUDA|ROCm|HIP|Vulkan) error.*",
        r"failed to load model from .*",
        r"error: .*",
    )
)
_SIGNAL_WORDS: dict[int, str] = {
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
_BEFORE_READY = frozenset({"starting", "loading"})
# Time, level and origin before the engine's own words: `0.00.294.316 E srv  load_model: …`.
_LOG_PREFIX = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} [A-Z] (?:\S+ +)?")


def classify_exit(ended: HolderExit, *, kernel_ran_out: bool = False) -> tuple[EndClass, str]:
    """Return the class of an end and its reason in words.

    A stop that was asked for is STOPPED here; who asked knows the finer class (evicted, idle, abandoned).
    `kernel_ran_out` says that the kernel ended processes for lack of memory while this one ran.
    """
    if ended.asked:
        return (
            EndClass.STOPPED,
            "killed, since it did not stop in time" if ended.killed else "stopped",
        )
    reason = explain_death(ended.code, ended.signal, ended.tail)
    if _find((_OUT_OF_MEMORY,), ended.tail):
        return EndClass.OUT_OF_MEMORY, reason
    if ended.signal == signals.SIGKILL and kernel_ran_out:
        return EndClass.OUT_OF_MEMORY, "killed by the kernel, which had no memory left (signal 9)"
    if ended.signal in _FROM_OUTSIDE:
        return EndClass.KILLED, reason
    if ended.phase in _BEFORE_READY:
        return EndClass.FAILED_TO_START, reason
    return EndClass.CRASHED, reason


def is_doomed(ended: HolderExit) -> bool:
    """Whether another start would end the same way as long as files, settings and engine stay as they are."""
    if classify_exit(ended)[0] is not EndClass.FAILED_TO_START:
        return False
    return ended.signal == signals.SIGILL or bool(_find(_LASTING, ended.tail))


def explain_death(code: int | None, signal: int | None, tail: Sequence[str]) -> str:
    """Return one sentence on an exit, from its last stderr lines where they say more than the number does."""
    told = _find((_OUT_OF_MEMORY, *_LASTING, *_PASSING), tail)
    if told.startswith(_UNKNOWN_ARCHITECTURE):
        told += ": this engine is older than the model; give a newer llama-server with --engine PATH"
    if signal is not None:
        words = _SIGNAL_WORDS.get(signal, f"ended by signal {signal}")
        return f"{words}: {told}" if told and signal not in (signals.SIGILL, signals.SIGKILL) else words
    if told:
        return f"{told} (exit code {code})"
    if code == 0:
        return "ended by itself without an error (exit code 0)"
    last = next((line for line in reversed(tail) if line.strip()), "nothing on stderr")
    return f"exit code {code}: {_plain(last)}"


def _find(patterns: Sequence[re.Pattern[str]], tail: Sequence[str]) -> str:
    """Return what the last line to match says, for the first pattern that any line matches; else ""."""
    for pattern in patterns:
        for line in reversed(tail):
            if match := pattern.search(line):
                return _plain(line if pattern is _OUT_OF_MEMORY else match[0])
    return ""


def _plain(line: str) -> str:
    return _LOG_PREFIX.sub("", line).strip()
