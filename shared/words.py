"""The words of the product: states, ends and kinds, spelled alike in code, Redis, API, logs, metrics and docs."""

from enum import StrEnum


class InstanceState(StrEnum):
    """Where an instance is in its life. See supervisor/core/lifecycle.py for the table of transitions."""

    RECOVERING = "recovering"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    WAKING = "waking"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    STOP_FAILED = "stop_failed"


class WireStatus(StrEnum):
    """`status.value` of a model in GET /models, in llama-server's spelling."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    DOWNLOADING = "downloading"
    DOWNLOADED = "downloaded"


class EndClass(StrEnum):
    """Why an instance ended."""

    STOPPED = "stopped"
    EVICTED = "evicted"
    IDLE = "idle"
    ABANDONED = "abandoned"
    FAILED_TO_START = "failed_to_start"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    KILLED = "killed"
    LOST = "lost"


class UseKind(StrEnum):
    """What a request is to the scheduler: inference counts as use, a read only keeps the instance from being cut."""

    INFERENCE = "inference"
    READ = "read"


class Source(StrEnum):
    """Where a registry entry comes from, in llama-server's spelling where it has one."""

    CACHE = "cache"
    MODELS_DIR = "models_dir"
    PRESET = "preset"
