"""Several hosts on one machine: network namespaces on a switch of their own, with links that can be cut.

No namespace has a way out, and nothing of them is left afterwards. Needs root.
"""

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator

FALSE_MAC = "02:00:00:00:00:01"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Hosts by name, each with one address on the same network."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._prefix = f"ls{secrets.token_hex(2)}"
        self.names = names

    def address(self, host: str) -> str:
        """Return a host's address."""
        return f"10.77.0.{self.names.index(host) + 11}"

    def inside(self, host: str) -> list[str]:
        """Return the words that make a command run on a host, as the same process."""
        return ["nsenter", f"--net=/run/netns/{self._name(host)}"]

    def cut(self, one: str, other: str) -> None:
        """Lose every packet between two hosts, in both directions and without a word to anybody."""
        for here, there in ((one, other), (other, one)):
            self._neighbour(here, "replace", there, "lladdr", FALSE_MAC, "nud", "permanent")

    def mend(self, one: str, other: str) -> None:
        """Let two hosts reach each other again."""
        for here, there in ((one, other), (other, one)):
            self._neighbour(here, "del", there)

    def up(self) -> None:
        """Make the switch and the hosts."""
        switch = self._name("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in self.names:
            name = self._name(host)
            _ip("netns", "add", name)
            _ip("link", "add", f"p-{host}", "netns", switch, "type", "veth", "peer", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", f"p-{host}", "master", "br0", "up")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")

    def down(self) -> None:
        """Remove everything; what is missing already is fine."""
        for host in (*self.names, "switch"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._name(host))

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _neighbour(self, host: str, verb: str, other: str, *words: str) -> None:
        _ip("-n", self._name(host), "neigh", verb, self.address(other), *words, "dev", "eth0")


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Yield hosts of these names."""
    assert os.geteuid() == 0, "network namespaces need root"
    made = Hosts(names)
    try:
        made.up()
        yield made
    finally:
        made.down()
