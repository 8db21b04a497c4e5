"""The words of the product, spelled alike in code, Redis, API, logs, metrics and docs."""

from collections.abc import Mapping
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


WIRE_STATUS: Mapping[InstanceState, WireStatus] = {
    InstanceState.RECOVERING: WireStatus.LOADING,
    InstanceState.STARTING: WireStatus.LOADING,
    InstanceState.LOADING: WireStatus.LOADING,
    InstanceState.READY: WireStatus.LOADED,
    InstanceState.DRAINING: WireStatus.LOADED,
    InstanceState.SLEEPING: WireStatus.SLEEPING,
    InstanceState.WAKING: WireStatus.LOADING,
    InstanceState.STOPPING: WireStatus.LOADED,
    InstanceState.STOPPED: WireStatus.UNLOADED,
    InstanceState.FAILED: WireStatus.UNLOADED,
    InstanceState.STOP_FAILED: WireStatus.LOADED,
}
"""What a model is called on the wire while its instance is in a state: not gone means loaded."""


class ConversationState(StrEnum):
    """Where a resumable conversation is: waiting for its model, answering to its client, answering to nobody,
    or over in one of four ways.
    """

    QUEUED = "queued"
    STREAMING = "streaming"
    DETACHED = "detached"
    DONE = "done"
    STOPPED = "stopped"
    EXPIRED = "expired"
    LOST = "lost"


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


class JobState(StrEnum):
    """How far a job of the worker has come."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class DownloadState(StrEnum):
    """How far a download has come."""

    PLANNING = "planning"
    DOWNLOADING = "downloading"
    PLACING = "placing"


class UseKind(StrEnum):
    """What a request is to the scheduler: inference counts as use, a read only protects from being cut.

    A peek is a read that a sleeping engine answers, and sleeps on.
    """

    INFERENCE = "inference"
    READ = "read"
    PEEK = "peek"


class Source(StrEnum):
    """Where a registry entry comes from, in llama-server's spelling where it has one."""

    CACHE = "cache"
    MODELS_DIR = "models_dir"
    PRESET = "preset"


class WaitReason(StrEnum):
    """The one reason a queue entry waits for."""

    RECOVERING = "recovering"
    LOADING = "loading"
    GRANTING = "granting"
    WAKING = "waking"
    LEAVING = "leaving"
    STOP_FAILED = "stop_failed"
    BACK_OFF = "back_off"
    DOWNLOADING = "downloading"
    MEASURING = "measuring"
    VICTIM = "victim"
    RELEASING = "releasing"
    BUSY = "busy"
    RESIDENCE = "residence"
    PINNED = "pinned"
    STARTING_OTHERS = "starting_others"
    BEHIND = "behind"
