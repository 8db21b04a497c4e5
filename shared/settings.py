"""All settings in one place: each field is a flag, an environment variable and a line of help.

Flags and variables are spelled as llama-server spells them where it has them; all others are `--max-wait` and
`LLAMASTEAD_MAX_WAIT` for a field `max_wait`. The command line wins over LLAMASTEAD_…, that over LLAMA_ARG_…,
that over the default. Seconds are floats.
"""

import json
import os
import re
import shlex
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from llamastead.shared.files import absolute_path
from llamastead.shared.margins import parse_margins, parse_sizes
from llamastead.shared.settings_fields import ENV_PREFIX, LlamaServerEnv, field_extra, setting

NEVER_S = 1e9  # stands for no limit where a number is reckoned with: thirty years
SOCKET_PATH_MAX = 107  # bytes of a unix socket's path: sun_path of Linux without its closing zero


class SettingsError(Exception):
    """Settings that can't work; the message names the setting, what is wrong and what to do."""


def default_run_dir() -> Path:
    """Return $XDG_RUNTIME_DIR/llamastead, else ~/.local/state/llamastead."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "llamastead"
    return Path.home() / ".local" / "state" / "llamastead"


def default_host_id() -> str:
    """Return this machine's name, fit to be part of keys and file names."""
    return re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower())[:32].strip("-") or "host"


def parse_object(text: str) -> dict[str, Any]:
    """Return a JSON object, {} for an empty text. Raises ValueError for anything else."""
    try:
        value = json.loads(text) if text.strip() else {}
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


Words = Annotated[tuple[str, ...], NoDecode]
Keys = Annotated[tuple[SecretStr, ...], NoDecode]


class Settings(BaseSettings):
    """Everything that can be set for the herd and its processes."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    # -- what llama-server's router has, spelled alike
    host: str = setting("127.0.0.1", "address to listen on", env="LLAMA_ARG_HOST")
    port: int = setting(8080, "port to listen on", env="LLAMA_ARG_PORT", ge=0, le=65535)
    models_dir: Path | None = setting(
        None, "folder with GGUF files and model folders", env="LLAMA_ARG_MODELS_DIR"
    )
    models_preset: Path | None = setting(None, "INI file with model presets", env="LLAMA_ARG_MODELS_PRESET")
    models_max: int = setting(
        4, "models loaded at the same time at most, 0 = no limit", env="LLAMA_ARG_MODELS_MAX", ge=0
    )
    models_memory_margin: str = setting(
        "",
        "MiB of each GPU that stay free, others by name: 1024,gpu1=2048,host=4096 "
        "(default: 1024 of a GPU, a tenth of the host)",
        env="LLAMA_ARG_MODELS_MEMORY_MARGIN",
        metavar="MIB",
    )
    device_memory: str = setting(
        "",
        "MiB that a device has, in place of what it says; host: it shares the host's memory, "
        "as in gpu0=20000,Vulkan0=host",
        metavar="DEVICE=MIB",
    )
    models_autoload: bool = setting(
        True, "load a model when a request names it", env="LLAMA_ARG_MODELS_AUTOLOAD"
    )
    api_keys: Keys = setting(
        (),
        "key that clients need; several by commas or by repeating",
        flag="--api-key",
        env="LLAMA_API_KEY",
        metavar="KEY",
    )
    api_key_file: Path | None = setting(
        None, "file with keys, one a line, # comments", env="LLAMA_ARG_API_KEY_FILE"
    )
    reuse_port: bool = setting(
        False, "let other processes listen on the same port", env="LLAMA_ARG_REUSE_PORT"
    )
    ssl_key_file: Path | None = setting(
        None, "private key of the certificate (PEM): clients speak TLS", env="LLAMA_ARG_SSL_KEY_FILE"
    )
    ssl_cert_file: Path | None = setting(
        None, "certificate with its chain (PEM)", env="LLAMA_ARG_SSL_CERT_FILE"
    )
    api_prefix: str = setting("", "path that all paths begin with, as in /llm", env="LLAMA_ARG_API_PREFIX")
    static_path: Path | None = setting(
        None, "folder with pages to serve in place of the web UI", flag="--path", env="LLAMA_ARG_STATIC_PATH"
    )
    timeout: float | None = setting(
        None,
        "seconds an answer may take to begin and may pause, where these aren't set (0 or -1: no limit)",
        env="LLAMA_ARG_TIMEOUT",
        ge=-1,
    )
    ui_config: str = setting("", "settings of the web UI as JSON", env="LLAMA_ARG_UI_CONFIG", metavar="JSON")
    ui_config_file: Path | None = setting(
        None, "file with the settings of the web UI", env="LLAMA_ARG_UI_CONFIG_FILE"
    )
    ui: bool = setting(True, "serve llama-server's own web UI under /", env="LLAMA_ARG_UI")
    cors_origins: str = setting(
        "*",
        "origins whose pages may call, by commas; * any, localhost this machine's",
        env="LLAMA_ARG_CORS_ORIGINS",
        metavar="ORIGINS",
    )
    cors_methods: str = setting(
        "GET, POST, DELETE, OPTIONS", "methods that pages may use", env="LLAMA_ARG_CORS_METHODS"
    )
    cors_headers: str = setting("*", "headers that pages may send", env="LLAMA_ARG_CORS_HEADERS")
    cors_credentials: bool = setting(
        True,
        "let pages of the origins named use the browser's credentials",
        env="LLAMA_ARG_CORS_CREDENTIALS",
    )
    stop_timeout: float = setting(
        10.0, "seconds an instance or a whole herd has to stop before it is killed", gt=0
    )

    # -- our own
    admin_keys: Keys = setting(
        (),
        "key for load, unload and logs; without one the clients' keys do",
        flag="--admin-key",
        metavar="KEY",
    )
    probe_keys: Keys = setting(
        (),
        "key of clients, such as health checks, that may use only what is loaded",
        flag="--probe-key",
        metavar="KEY",
    )
    engine: Path | None = setting(
        None, "llama-server to run (default: on PATH, else the installed engine wheel)"
    )
    run_dir: Path = setting(default_run_dir, "folder for sockets, locks, logs and the embedded Redis's data")
    redis_url: str = setting(
        "", "Redis or Valkey to use: redis://, rediss:// or unix:// (default: an embedded one)", repr=False
    )
    redis_prefix: str = setting("llamastead:", "prefix of all keys in Redis", min_length=1)
    host_id: str = setting(
        default_host_id, "name of this machine in the herd", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$"
    )
    max_wait: float = setting(
        30.0, "seconds the first in the queue waits before a busy model is drained for it", ge=0
    )
    min_residence: float = setting(2.0, "seconds a model that served stays loaded at least", ge=0)
    unload_after: float | None = setting(
        None, "idle seconds after which a model is unloaded (default: never)", ge=-1
    )
    orphan_grace: float = setting(60.0, "seconds an instance lives on without any supervisor", gt=0)
    drain_wait: float = setting(
        0.0, "seconds a gateway that leaves goes on accepting, so that a balancer sees it leave first", ge=0
    )
    queue_limit: int = setting(256, "requests that may wait for one model", ge=1)
    queue_limit_total: int = setting(1024, "requests that may wait in all", ge=1)
    queue_timeout: float = setting(600.0, "seconds a request waits at most (0 or -1: no limit)", ge=-1)
    connect_timeout: float = setting(
        5.0,
        "seconds a connection to a model's server is tried (0 or -1: no limit)",
        ge=-1,
    )
    first_byte_timeout: float = setting(
        0.0, "seconds a model's server has until its answer begins (0 or -1: no limit)", ge=-1
    )
    idle_timeout: float = setting(0.0, "seconds an answer that began may pause (0 or -1: no limit)", ge=-1)
    total_timeout: float = setting(
        0.0,
        "seconds an answer may take, its wait in the queue apart (0 or -1: no limit)",
        ge=-1,
    )
    ping_delay: float = setting(
        5.0, "seconds of silence after which the client of a stream is sent its first comment line", ge=0
    )
    ping_interval: float = setting(
        2.0, "seconds between comment lines on a stream that says nothing (0 or -1: none)", ge=-1
    )
    detach_limit: float = setting(
        600.0,
        "seconds a conversation (X-Conversation-Id) goes on without a client at most (0 or -1: no limit)",
        ge=-1,
    )
    socket_idle: float = setting(
        300.0, "seconds without a message after which a WebSocket keeps no model busy (0 or -1: never)", ge=-1
    )
    socket_limit: float = setting(3600.0, "seconds a WebSocket stays open at most (0 or -1: no limit)", ge=-1)
    stall_timeout: float = setting(
        120.0, "seconds without progress after which a load is given up (0 or -1: never)", ge=-1
    )
    instance_listen: str = setting(
        "unix",
        "where instances listen: unix (sockets in the run folder), or tcp:ADDRESS of this host for gateways "
        "on other hosts (tcp alone is tcp:127.0.0.1)",
        metavar="WHERE",
    )
    instance_ports: str = setting(
        "42000-42999", "ports of instances that listen on TCP", metavar="FIRST-LAST"
    )
    gateways: int = setting(1, "gateway processes that `up` starts, all on the one port", ge=1, le=64)
    workers: int = setting(1, "processes of one `llamastead gateway`", ge=1, le=64)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "what is logged")
    log_format: Literal["text", "json"] = setting("text", "how it is logged")

    # -- given by the command line or to children only
    instance_args: Words = setting((), "llama-server options for all instances, as shell words", flag=None)
    listen_fd: Words = setting((), "listening sockets handed down by `up`", flag=None)

    # -- clocks of the protocol, scaled down by tests
    heartbeat: float = setting(2.0, "seconds between two heartbeats of a gateway", flag=None, gt=0)
    suspect_after: float = setting(10.0, "seconds of silence that make a gateway suspect", flag=None, gt=0)
    swept_after: float = setting(
        5.0, "further seconds after which a suspect gateway is swept", flag=None, gt=0
    )
    linger: float = setting(0.25, "seconds a gateway keeps an unused lease", flag=None, ge=0)
    leader_ttl: float = setting(10.0, "seconds a leadership lasts unless renewed", flag=None, gt=0)
    leader_renew: float = setting(3.0, "seconds between two renewals of the leadership", flag=None, gt=0)
    reread: float = setting(
        5.0, "seconds after which facts are read again without being told", flag=None, gt=0
    )
    watch: float = setting(1.0, "seconds between two looks at preset file and folders", flag=None, gt=0)
    admission_timeout: float = setting(
        5.0, "seconds a new request waits for an absent Redis", flag=None, gt=0
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Say the order: command line, LLAMASTEAD_…, LLAMA_ARG_…."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, LlamaServerEnv(settings_cls)

    @field_validator("models_memory_margin", mode="after")
    @classmethod
    def _margins(cls, value: str) -> str:
        parse_margins(value)
        return value

    @field_validator("instance_listen", mode="after")
    @classmethod
    def _instance_listen(cls, value: str) -> str:
        kind, _, address = value.partition(":")
        if kind not in ("unix", "tcp") or (kind == "unix" and address):
            raise ValueError("must be unix, tcp or tcp:ADDRESS")
        if address in ("0.0.0.0", "::", "*"):  # noqa: S104 - refused
            raise ValueError("must name one address of this host: gateways elsewhere are told it")
        return value

    @field_validator("instance_ports", mode="after")
    @classmethod
    def _instance_ports(cls, value: str) -> str:
        first, _, last = value.partition("-")
        if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
            raise ValueError("must be two ports from 1024 to 65535, the smaller first, as in 42000-42999")
        return value

    @field_validator("device_memory", mode="after")
    @classmethod
    def _sizes(cls, value: str) -> str:
        parse_sizes(value)
        return value

    @field_validator("api_keys", "admin_keys", "probe_keys", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        return (
            tuple(key.strip() for key in value.split(",") if key.strip()) if isinstance(value, str) else value
        )

    @field_validator("instance_args", "listen_fd", mode="before")
    @classmethod
    def _split_words(cls, value: Any) -> Any:
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("api_prefix", mode="after")
    @classmethod
    def _one_slash(cls, value: str) -> str:
        return f"/{value.strip('/')}" if value.strip("/") else ""

    @field_validator("queue_timeout", "stall_timeout", "detach_limit", mode="after")
    @classmethod
    def _no_limit(cls, value: float) -> float:
        return value if value > 0 else NEVER_S

    @field_validator("ui_config", mode="after")
    @classmethod
    def _ui_config(cls, value: str) -> str:
        parse_object(value)
        return value

    @field_validator(
        *("models_dir", "models_preset", "api_key_file", "engine", "run_dir"),
        *("ssl_key_file", "ssl_cert_file", "static_path", "ui_config_file"),
        mode="after",
    )
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return absolute_path(value) if value is not None else None

    @field_validator("unload_after", mode="after")
    @classmethod
    def _never(cls, value: float | None) -> float | None:
        return value if value is not None and value > 0 else None

    @model_validator(mode="before")
    @classmethod
    def _timeout_for_both(cls, values: dict[str, Any]) -> dict[str, Any]:
        """llama-server's one time-out is the time to the first byte and between bytes."""
        timeout = values.get("timeout")
        both = {} if timeout is None else dict.fromkeys(("first_byte_timeout", "idle_timeout"), timeout)
        return {**both, **values}

    @model_validator(mode="before")
    @classmethod
    def _embedded_redis_url(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("redis_url"):
            return values
        run_dir = absolute_path(values.get("run_dir") or default_run_dir())
        return {**values, "redis_url": f"unix://{run_dir}/redis/valkey.sock"}

    @property
    def embedded_redis(self) -> bool:
        """Whether Redis is the one that `llamastead up` keeps in the run folder."""
        return self.redis_url == f"unix://{self.run_dir}/redis/valkey.sock"

    @property
    def instance_host(self) -> str | None:
        """The address that instances listen on by TCP, None where they use unix sockets."""
        kind, _, address = self.instance_listen.partition(":")
        return (address or "127.0.0.1") if kind == "tcp" else None

    @property
    def instance_port_range(self) -> tuple[int, int]:
        """The first and the last port for instances that listen on TCP."""
        first, _, last = self.instance_ports.partition("-")
        return int(first), int(last)

    def ui_settings(self) -> dict[str, Any]:
        """Return what the web UI begins with; SettingsError if its file holds no JSON object."""
        if self.ui_config_file is None:
            return parse_object(self.ui_config)
        try:
            return parse_object(self.ui_config_file.read_text())
        except (OSError, ValueError) as error:
            raise SettingsError(f"--ui-config-file {self.ui_config_file} can't be read: {error}") from None

    def check_tls(self) -> None:
        """Raise SettingsError unless there are both key and certificate, fit to be used, or neither."""
        if self.ssl_key_file is None and self.ssl_cert_file is None:
            return
        if self.ssl_key_file is None or self.ssl_cert_file is None:
            lacks = "--ssl-key-file" if self.ssl_key_file is None else "--ssl-cert-file"
            raise SettingsError(f"TLS needs key and certificate: give {lacks} too")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_cert_file, self.ssl_key_file)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"--ssl-key-file {self.ssl_key_file} and --ssl-cert-file {self.ssl_cert_file}: {error}"
            ) from None

    def inference_keys(self) -> frozenset[str]:
        """Return the keys of clients, those of the key file included; SettingsError if it can't be read."""
        keys = {key.get_secret_value() for key in self.api_keys}
        if self.api_key_file is not None:
            try:
                lines = [line.strip() for line in self.api_key_file.read_text().splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"--api-key-file {self.api_key_file} can't be read: {error}") from None
            keys |= {line for line in lines if line and not line.startswith("#")}
        return frozenset(keys)

    def check_socket_paths(self) -> None:
        """Raise SettingsError when the sockets of instances would not fit below the run folder."""
        path = os.fsencode(f"{self.run_dir}/i/{self.host_id}-999999-999999/e.sock")
        if len(path) > SOCKET_PATH_MAX:
            room = SOCKET_PATH_MAX - len(path) + len(os.fsencode(self.run_dir))
            raise SettingsError(
                f"the run folder {self.run_dir} is too long: sockets in it may have {SOCKET_PATH_MAX} bytes, "
                f"so it may have {room}. Give a shorter --run-dir."
            )

    def child_env(self) -> dict[str, str]:
        """Return the variables that give a child process exactly these settings, secrets included."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            f"{ENV_PREFIX}{name}".upper(): _env_text(value)
            for name, value in values.items()
            if value not in (None, ())
        }


def _env_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        secret = [part.get_secret_value() for part in value if isinstance(part, SecretStr)]
        return ",".join(secret) if secret else shlex.join(value)
    return str(value)


def load_settings(given: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings from `given` (field → value, from the command line) over the environment.

    Raises SettingsError naming the flag and the variable of the first value that can't be taken.
    """
    try:
        return Settings(**(given or {}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise SettingsError(
            _explain(str(first["loc"][0]) if first["loc"] else "", first["msg"], given or {})
        ) from None


def flag_of(name: str) -> str | None:
    """Return the flag of a field, None when it has none."""
    flag = field_extra(Settings.model_fields[name])["flag"]
    return f"--{name.replace('_', '-')}" if flag == "" else flag


def _explain(name: str, problem: str, given: Mapping[str, Any]) -> str:
    info = Settings.model_fields.get(name)
    if info is None:
        return f"{name or 'settings'}: {problem}"
    flag, variable, llama = flag_of(name), f"{ENV_PREFIX}{name}".upper(), field_extra(info)["env"]
    if name in given and flag:
        place = flag
    elif variable in os.environ or not llama:
        place = variable
    else:
        place = llama
    secret = "key" in name or name == "redis_url"
    value = given.get(name, os.environ.get(place))
    shown = "" if secret or value is None else f", not {str(value)!r}"
    return f"{place}: {problem[:1].lower()}{problem[1:]}{shown}"
