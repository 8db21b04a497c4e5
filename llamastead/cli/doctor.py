"""`llamastead doctor`: whether this machine can run a herd, fact by fact."""

import argparse
import asyncio
import os
import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from typing import cast

from redis.exceptions import RedisError
from rich.text import Text

from llamastead.cli.check import none_found
from llamastead.cli.output import print_json, print_table
from llamastead.shared.devices.gpus import Gpus
from llamastead.shared.devices.host import read_host
from llamastead.shared.settings import Settings, SettingsError
from llamastead.shared.store.connect import check, connect, redact
from llamastead.shared.store.errors import StoreUnreachable
from llamastead.shared.store.keys import Keys
from llamastead.supervisor.configuration import sources_of
from llamastead.supervisor.devices import ONLY_LISTED, is_same, list_devices
from llamastead.supervisor.engine import Engine, EngineError, find_engine
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import RegistryError
from llamastead.supervisor.selftest import self_test
from llamastead.up.folder import StartError, gateway_note_path, prepare_run_folder
from llamastead.up.valkey import find_valkey

FILES_ENOUGH = 4096  # two descriptors a stream, and hundreds of clients
FILES_LEAST = 1024


class Verdict(StrEnum):
    """What a fact means for a herd."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    verdict: Verdict
    text: str


def doctor(settings: Settings, parsed: argparse.Namespace) -> int:
    """Print all findings; 1 when one of them keeps a herd from running."""
    findings = list(_findings(settings))
    if parsed.json:
        print_json([asdict(finding) for finding in findings])
    else:
        print_table(
            ("check", "verdict", "finding"),
            [(f.what, Text(f.verdict, style=COLOURS[f.verdict]), f.text) for f in findings],
        )
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def _findings(settings: Settings) -> Iterator[Finding]:
    yield _platform()
    yield Finding("llamastead", Verdict.OK, f"{version('llamastead')}, Python {platform.python_version()}")
    yield _run_folder(settings)
    yield from _engine(settings)
    yield from _memory()
    yield asyncio.run(_redis(settings))
    yield from asyncio.run(_supervisor(settings))
    yield _open_files()


def _platform() -> Finding:
    here = f"{platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("platform", Verdict.FAIL, f"{here}: Llamastead runs on Linux")
    if platform.machine() != "x86_64":
        return Finding(
            "platform", Verdict.WARN, f"{here}: bring an engine (--engine) and a Redis (--redis-url)"
        )
    return Finding("platform", Verdict.OK, here)


def _run_folder(settings: Settings) -> Finding:
    try:
        settings.check_socket_paths()
        prepare_run_folder(settings.run_dir)
    except SettingsError as error:
        return Finding("run folder", Verdict.FAIL, str(error))
    return Finding("run folder", Verdict.OK, str(settings.run_dir))


def _engine(settings: Settings) -> Iterator[Finding]:
    try:
        engine = find_engine(settings.engine)
    except EngineError as error:
        yield Finding("engine", Verdict.FAIL, str(error))
        return
    yield Finding("engine", Verdict.OK, f"{engine.version} at {engine.path}")
    try:
        self_test(engine, settings.run_dir)
        yield Finding("engine runs", Verdict.OK, "it loads a model on this processor")
    except (EngineError, OSError) as error:
        yield Finding("engine runs", Verdict.FAIL, str(error))
    yield from _devices(engine)
    yield _models(settings, engine)


def _devices(engine: Engine) -> Iterator[Finding]:
    """Tell of each device the engine lists; one that NVML does not know is accounted from this alone."""
    listed = list_devices(engine, os.environ)
    if listed is None:
        yield Finding(
            "devices", Verdict.WARN, "the engine did not list them: its GPUs are taken to be NVML's"
        )
        return
    gpus = Gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    known = gpus.read()
    gpus.close()
    if not listed:
        nvidia = f", although there are {len(known)} NVIDIA GPUs: is it built for them?" if known else ""
        verdict = Verdict.WARN if known else Verdict.OK
        yield Finding("devices", verdict, f"no GPU for the engine: models run on the processor{nvidia}")
    for device in listed:
        text = f"{device.name}: {device.description}, {device.total >> 20} MiB, {device.free >> 20} MiB free"
        if device.unified:
            yield Finding("devices", Verdict.OK, f"{text}; it shares the host's memory")
        elif any(is_same(gpu, device) for gpu in known):
            yield Finding("devices", Verdict.OK, text)
        else:
            yield Finding("devices", Verdict.WARN, f"{text}; {ONLY_LISTED}")


def _memory() -> Iterator[Finding]:
    """Tell of each device that will have an account; one that can't be read well is a warning."""
    gpus = Gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    found = (*gpus.read(), read_host())
    if gpus.problem:
        yield Finding("memory", Verdict.WARN, f"GPUs can't be read: {gpus.problem}")
    gpus.close()
    for device in found:
        text = f"{device.name}: {device.total >> 20} MiB, {device.free >> 20} MiB free, {device.description}"
        if device.problem:
            yield Finding("memory", Verdict.WARN, f"{text}; {device.problem}")
        else:
            yield Finding("memory", Verdict.OK, text)


def _models(settings: Settings, engine: Engine) -> Finding:
    try:
        sources = sources_of(settings, os.environ)
        registry = load_registry(sources, engine.options)
    except RegistryError as error:
        return Finding("models", Verdict.FAIL, str(error))
    count = f"{len(registry.entries)} found" if registry.entries else none_found(sources)
    if registry.problems:
        return Finding("models", Verdict.WARN, f"{count}; {'; '.join(map(str, registry.problems))}")
    return Finding("models", Verdict.OK, count)


async def _redis(settings: Settings) -> Finding:
    url = settings.redis_url
    try:
        client = connect(url)
        try:
            warnings = await check(client, url)
        finally:
            await client.aclose()
    except StoreUnreachable as error:
        if settings.embedded_redis and not gateway_note_path(settings.run_dir).exists():
            return _embedded_redis()
        return Finding("redis", Verdict.FAIL, str(error))
    return Finding(
        "redis", Verdict.WARN if warnings else Verdict.OK, "; ".join(warnings) or f"{redact(url)} answers"
    )


async def _supervisor(settings: Settings) -> list[Finding]:
    """Whether the supervisor that leads says that it serves; nothing while none was ever there."""
    keys = Keys(settings.redis_prefix)
    try:
        client = connect(settings.redis_url)
    except StoreUnreachable:
        return []
    try:
        leads = await client.exists(keys.leader)
        about = cast("dict[str, str]", await client.hgetall(keys.leadership))
    except RedisError:
        about = {}
    finally:
        await client.aclose()
    if not about:
        return []
    who = f"number {about.get('number')} on {about.get('host')}, pid {about.get('pid')}"
    if not leads:
        return [Finding("supervisor", Verdict.WARN, f"none leads; the last was {who}")]
    if about.get("ready") == "0":
        return [Finding("supervisor", Verdict.FAIL, f"{who}: {about.get('trouble')}")]
    return [Finding("supervisor", Verdict.OK, f"{who} leads")]


def _embedded_redis() -> Finding:
    """Nothing runs yet: what counts is whether `up` could start it."""
    try:
        find_valkey()
    except StartError as error:
        return Finding("redis", Verdict.FAIL, str(error))
    return Finding("redis", Verdict.OK, "an embedded Valkey comes with `llamastead up`")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} at once"
    if soft < FILES_LEAST:
        return Finding(
            "open files", Verdict.FAIL, f"{text}: too few; raise it, `ulimit -n {min(hard, FILES_ENOUGH)}`"
        )
    if soft < FILES_ENOUGH:
        return Finding(
            "open files", Verdict.WARN, f"{text}, enough for a few hundred clients; `ulimit -n` raises it"
        )
    return Finding("open files", Verdict.OK, text)
