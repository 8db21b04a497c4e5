"""Names of all keys: docs/redis.md shows what each holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Builds keys below one prefix, for example `llamastead:`. Lua builds the same in include/keys.lua."""

    prefix: str

    @property
    def herd(self) -> str:
        return self.prefix + "herd"

    @property
    def leader(self) -> str:
        return self.prefix + "leader"

    @property
    def leadership(self) -> str:
        return self.prefix + "leadership"

    @property
    def models(self) -> str:
        return self.prefix + "models"

    @property
    def aliases(self) -> str:
        return self.prefix + "aliases"

    @property
    def instances(self) -> str:
        return self.prefix + "instances"

    @property
    def queue(self) -> str:
        return self.prefix + "queue"

    @property
    def gateways(self) -> str:
        return self.prefix + "gateways"

    @property
    def downloads(self) -> str:
        return self.prefix + "downloads"

    @property
    def commands(self) -> str:
        return self.prefix + "commands"

    @property
    def events(self) -> str:
        return self.prefix + "events"

    @property
    def workers(self) -> str:
        return self.prefix + "workers"

    @property
    def jobs(self) -> str:
        return self.prefix + "jobs"

    @property
    def rq(self) -> str:
        """The value of RQ_KEY_PREFIX; RQ puts the colon behind it."""
        return self.prefix + "rq"

    def model(self, name: str) -> str:
        return f"{self.prefix}model:{name}"

    def instance(self, instance: str) -> str:
        return f"{self.prefix}instance:{instance}"

    def leases(self, instance: str) -> str:
        return f"{self.prefix}leases:{instance}"

    def tickets(self, model: str) -> str:
        return f"{self.prefix}tickets:{model}"

    def conversation(self, name: str) -> str:
        return f"{self.prefix}conversation:{name}"

    def download(self, name: str) -> str:
        return f"{self.prefix}download:{name}"

    def gateway(self, gateway: str) -> str:
        return f"{self.prefix}gateway:{gateway}"

    def inbox(self, gateway: str) -> str:
        return f"{self.prefix}inbox:{gateway}"

    def devices(self, host: str) -> str:
        return f"{self.prefix}devices:{host}"

    def held(self, host: str, device: str) -> str:
        return f"{self.prefix}held:{host}:{device}"

    def measurement(self, identity: str, preset: str) -> str:
        return f"{self.prefix}measurement:{identity}:{preset}"

    def metadata(self, identity: str) -> str:
        return f"{self.prefix}metadata:{identity}"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}worker:{worker}"

    def job(self, job: str) -> str:
        return f"{self.prefix}job:{job}"
