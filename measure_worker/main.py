"""The worker's process: takes long jobs off the supervisor, one at a time."""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Sequence
from itertools import pairwise

from redis.exceptions import RedisError

from llamastead.measure_worker.leftovers import clean_up
from llamastead.measure_worker.outage import Outage
from llamastead.shared import log as logs
from llamastead.shared.jobs import DOWNLOAD, MEASURE, import_rq
from llamastead.shared.settings import Settings
from llamastead.shared.store.connect import check, connect, connect_sync, explain
from llamastead.shared.store.errors import StoreUnreachable
from llamastead.shared.store.keys import Keys

log = logging.getLogger(__name__)

MONITORING_S = 5


def run(settings: Settings) -> int:
    """Work until told to end; return the exit code: 0 when told to, 1 when Redis is away or gone.

    SIGTERM and SIGINT end the worker after its job, a second one ends the job too. SIGHUP does nothing.
    """
    logs.setup(settings.log_level, settings.log_format, "worker")
    signal.signal(
        signal.SIGHUP, lambda *_: None
    )  # a handler, not SIG_IGN: children must not inherit deafness
    if token := hub_token(settings.instance_args):
        os.environ.setdefault("HF_TOKEN", token)
    keys = Keys(settings.redis_prefix)
    try:
        asyncio.run(_check(settings.redis_url))
        return _work(settings, keys)
    except StoreUnreachable as error:
        log.error("%s", error)
    except RedisError as error:
        log.error("%s", explain(settings.redis_url, error))
    return 1


def hub_token(words: Sequence[str]) -> str:
    """Return the hub's token among the options for all instances, "" without one: downloads use it too."""
    parts = [part for word in words for part in word.split("=", 1)]
    return next((value for name, value in pairwise(parts) if name in ("--hf-token", "-hft")), "")


async def _check(url: str) -> None:
    client = connect(url)
    try:
        for warning in await check(client, url):
            log.warning(warning)
    finally:
        await client.aclose()


def _work(settings: Settings, keys: Keys) -> int:
    rq = import_rq(keys)
    from llamastead.measure_worker.worker import MeasureWorker, TableJob

    TableJob.keys, TableJob.run_dir = keys, settings.run_dir
    if left := clean_up(settings.run_dir):
        log.info("what killed jobs left is cleaned up", extra={"jobs": left})
    worker = MeasureWorker(
        [MEASURE, DOWNLOAD],
        keys,
        settings.host_id,
        Outage(settings.redis_url),
        name=f"{settings.host_id}-{secrets.token_hex(4)}",
        connection=connect_sync(settings.redis_url),
        job_class=TableJob,
        serializer=rq.serializers.JSONSerializer,
        job_monitoring_interval=MONITORING_S,
    )
    log.info("waiting for jobs", extra={"worker": worker.name, "queues": f"{MEASURE},{DOWNLOAD}"})
    worker.work()
    log.info("ended", extra={"worker": worker.name, "asked": worker.was_stopped})
    return 0 if worker.was_stopped else 1
