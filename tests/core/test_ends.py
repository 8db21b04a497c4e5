"""Why instances ended, from what the engine really prints."""

import pytest

from llamastead.shared.words import EndClass
from llamastead.supervisor.ends import classify_exit, is_doomed
from llamastead.supervisor.holder_link import HolderExit

CUT = "tensor 'blk.0.ffn_up' data is not within the file bounds, model is corrupted or incomplete"
ILLEGAL = (
    "illegal instruction (SIGILL): this build of llama-server needs processor features that this machine "
    "lacks; use another build with --engine PATH"
)
NOISE = "0.00.294.316 I srv  llama_server: cleaning up before exit..."


def exit_of(*tail, code=1, signal=None, phase="loading", asked=False, killed=False):
    """Return an exit with these last lines and noise around them."""
    return HolderExit(None if signal else code, signal, (NOISE, *tail, NOISE), phase, asked, killed, False)


OLDER = ": this engine is older than the model; give a newer llama-server with --engine PATH"


@pytest.mark.parametrize(
    ("ended", "end_class", "reason", "doomed"),
    [
        (
            exit_of("0.00.004.825 E gguf_init_from_file: failed to open GGUF file '/x' (No such file)"),
            EndClass.FAILED_TO_START,
            "failed to open GGUF file '/x' (No such file) (exit code 1)",
            True,
        ),
        (
            exit_of("llama_model_load: error loading model: unknown model architecture: 'frobnicator'"),
            EndClass.FAILED_TO_START,
            "unknown model architecture: 'frobnicator'" + OLDER + " (exit code 1)",
            True,
        ),
        (
            exit_of(CUT),
            EndClass.FAILED_TO_START,
            f"{CUT} (exit code 1)",
            True,
        ),
        (
            exit_of("error: invalid argument: --frobnicate", phase="starting"),
            EndClass.FAILED_TO_START,
            "invalid argument: --frobnicate (exit code 1)",
            True,
        ),
        (
            exit_of('error while handling argument "-c": stoi', "usage:", phase="starting"),
            EndClass.FAILED_TO_START,
            'error while handling argument "-c": stoi (exit code 1)',
            True,
        ),
        (
            exit_of("0.00.01 E srv  start: couldn't bind HTTP server socket, hostname: /e.sock, port: 8080"),
            EndClass.FAILED_TO_START,
            "couldn't bind HTTP server socket, hostname: /e.sock, port: 8080 (exit code 1)",
            False,
        ),
        (
            exit_of(
                "/opt/llama-server: error while loading shared libraries: libx.so: cannot open", code=127
            ),
            EndClass.FAILED_TO_START,
            "error while loading shared libraries: libx.so: cannot open (exit code 127)",
            True,
        ),
        (
            exit_of("can't run /opt/llama-server in /: Permission denied", code=127, phase="starting"),
            EndClass.FAILED_TO_START,
            "can't run /opt/llama-server in /: Permission denied (exit code 127)",
            True,
        ),
        (
            exit_of("0.00.12 E load: failed to load multimodal model, '/p'"),
            EndClass.FAILED_TO_START,
            "failed to load multimodal model, '/p' (exit code 1)",
            True,
        ),
        (
            exit_of(
                "0.00.294.316 E ggml_aligned_malloc: insufficient memory (attempted to allocate 976.56 MB)",
                "0.00.294.317 E llama_init: failed to load model from /x",
            ),
            EndClass.OUT_OF_MEMORY,
            "insufficient memory (attempted to allocate 976.56 MB) (exit code 1)",
            False,
        ),
        (
            exit_of("CUDA error: out of memory", signal=6),
            EndClass.OUT_OF_MEMORY,
            "aborted (SIGABRT): CUDA error: out of memory",
            False,
        ),
        (
            exit_of("load_tensors: AMX is not ready to be used!", signal=4),
            EndClass.FAILED_TO_START,
            ILLEGAL,
            True,
        ),
        (
            exit_of(signal=9, phase="ready"),
            EndClass.KILLED,
            "killed by signal 9 from outside, likely by the kernel for lack of memory",
            False,
        ),
        (exit_of(signal=15), EndClass.KILLED, "ended by signal 15", False),
        (exit_of(signal=40, phase="ready"), EndClass.CRASHED, "ended by signal 40", False),
        (exit_of(signal=11, phase="ready"), EndClass.CRASHED, "segmentation fault (SIGSEGV)", False),
        (exit_of(signal=11), EndClass.FAILED_TO_START, "segmentation fault (SIGSEGV)", False),
        (
            exit_of("0.09.1 E srv  wake: failed to reload model after sleeping", signal=6, phase="sleeping"),
            EndClass.CRASHED,
            "aborted (SIGABRT): failed to reload model after sleeping",
            False,
        ),
        (
            exit_of(code=0, phase="ready"),
            EndClass.CRASHED,
            "ended by itself without an error (exit code 0)",
            False,
        ),
        (
            exit_of("something else"),
            EndClass.FAILED_TO_START,
            "exit code 1: llama_server: cleaning up before exit...",
            False,
        ),
        (exit_of(code=0, phase="stopping", asked=True), EndClass.STOPPED, "stopped", False),
        (
            exit_of(signal=9, phase="stopping", asked=True, killed=True),
            EndClass.STOPPED,
            "killed, since it did not stop in time",
            False,
        ),
    ],
)
def test_an_end_has_its_class_and_its_reason(ended, end_class, reason, doomed):
    """Classify one exit as the engine makes it."""
    assert (*classify_exit(ended), is_doomed(ended)) == (end_class, reason, doomed)


def test_an_exit_without_a_word_is_told_as_such():
    """Classify an exit that left nothing on stderr."""
    ended = HolderExit(3, None, (), "loading", False, False, False)
    assert classify_exit(ended) == (EndClass.FAILED_TO_START, "exit code 3: nothing on stderr")


def test_a_kill_while_the_kernel_ran_out_of_memory_is_for_memory():
    """Classify a KILL that nobody asked for, once with and once without a kill by the kernel meanwhile."""
    ended = exit_of(signal=9, phase="loading")
    assert classify_exit(ended)[0] is EndClass.KILLED
    assert classify_exit(ended, kernel_ran_out=True)[0] is EndClass.OUT_OF_MEMORY
    assert classify_exit(exit_of(signal=15), kernel_ran_out=True)[0] is EndClass.KILLED
