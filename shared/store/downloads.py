"""Downloads in Redis as the worker changes them: on a blocking client, and only while they are wanted."""

from redis import Redis

from llamastead.shared.hub_plan import Plan
from llamastead.shared.store.keys import Keys
from llamastead.shared.store.scripts import BlockingScripts


class DownloadRecords:
    """The worker's part of `download:<name>`. Methods raise redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys = keys
        self._scripts = BlockingScripts(redis, keys.prefix)

    def keep_plan(self, name: str, plan: Plan) -> bool:
        """Keep what a download consists of and tell the supervisor; False if nobody wants it any more."""
        reply = self._scripts.call(
            "keep_plan",
            {"download_key": self._keys.download(name), "commands": self._keys.commands},
            {"name": name, "plan": plan.to_json(), "total": plan.total},
        )
        return bool(reply)
