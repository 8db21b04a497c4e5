"""The run folder: private, and held by one `up` at a time."""

import fcntl
import json
import os
import ssl
import stat
from pathlib import Path

from llamastead.shared.disk import unusable
from llamastead.shared.ports import describe
from llamastead.shared.settings import Settings, SettingsError


class StartError(Exception):
    """The herd can't start here and now; the message names what is in the way and what to do."""


def prepare_run_folder(path: Path) -> None:
    """Make the run folder, readable by its owner only. Raises SettingsError when it can't be ours."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat()
        if owner.st_uid != os.geteuid():
            raise SettingsError(
                f"the run folder {path} belongs to user {owner.st_uid}, not to us ({os.geteuid()}): "
                "give another --run-dir"
            )
        if stat.S_IMODE(owner.st_mode) & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise SettingsError(
            f"the run folder {path} can't be used ({error.strerror}): give another --run-dir"
        ) from None


class RunLock:
    """The exclusive lock of a run folder; the kernel drops it when its process ends, however that happens."""

    def __init__(self, run_dir: Path) -> None:
        """Take the lock. Raises StartError, naming the process that has it."""
        self._file = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(self._file, 32).strip()
            os.close(self._file)
            holder = describe(int(text) if text.isdigit() else None)
            raise StartError(
                f"the run folder {run_dir} is in use by {holder}: stop that one, or give another --run-dir"
            ) from None
        try:
            self._write(f"{os.getpid()}\n".encode())
        except OSError as error:
            os.close(self._file)
            raise StartError(unusable(run_dir / "lock", error)) from None

    def release(self) -> None:
        """Give the lock back."""
        self._write(b"")
        os.close(self._file)

    def _write(self, text: bytes) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)


class GatewayNote:
    """`gateway.json` in the run folder: where client commands of this machine find the gateway and a key."""

    def __init__(self, settings: Settings, url: str) -> None:
        """Write the note, readable by its owner only. Raises StartError when there is no room for it."""
        self._path = gateway_note_path(settings.run_dir)
        admin = [key.get_secret_value() for key in settings.admin_keys]
        key = next(iter(admin or sorted(settings.inference_keys())), None)
        draft = self._path.with_suffix(".draft")
        note = {"url": url, "key": key}
        if settings.api_prefix:
            note["prefix"] = settings.api_prefix
        if settings.ssl_cert_file:
            note["cert"] = str(settings.ssl_cert_file)
        try:
            draft.touch(mode=0o600)
            draft.write_text(json.dumps(note))
            draft.replace(self._path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise StartError(unusable(self._path, error)) from None

    def remove(self) -> None:
        """Remove the note."""
        self._path.unlink(missing_ok=True)


def gateway_note_path(run_dir: Path) -> Path:
    """Return where the note of a run folder lies."""
    return run_dir / "gateway.json"


def http_place(url: str, prefix: str = "", tls: bool = False) -> tuple[str, str | None]:
    """Return the base URL for an HTTP client and the unix socket to dial, None for TCP.

    `prefix` is what all paths begin with; `tls` says what is spoken on a unix socket.
    """
    if url.startswith("unix:"):
        base = "https://localhost" if tls else "http://localhost"
        return f"{base}{prefix}", url.removeprefix("unix:").removeprefix("//")
    return url.rstrip("/") + prefix, None


def trust(cert: str | Path | None) -> ssl.SSLContext | bool:
    """Return what an HTTP client on this machine trusts: the gateway's own certificate, whatever its name."""
    if not cert:
        return True
    context = ssl.create_default_context(cafile=str(cert))
    context.check_hostname = False
    return context


def remove_sockets(run_dir: Path) -> None:
    """Remove the sockets that killed processes left; for the holder of the lock, when nothing runs."""
    for folder in (run_dir / "redis", *(run_dir / "i").glob("*")):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_socket():
                path.unlink(missing_ok=True)
