"""Where an instance listens: `unix:<path>`, or `tcp:<host>:<port>` for gateways on other hosts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the instance's folder."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


def closing(address: UnixAddress) -> UnixAddress:
    """Return where an instance is reached once it stops: its holder has renamed the socket."""
    return UnixAddress(f"{address.path.rpartition('/')[0]}/closing.sock")


def outlives_its_instance(address: str) -> bool:
    """Return whether another instance may get this address while somebody still takes it for the first one's:
    a port, where each refuses the others' keys. A socket goes with its folder.
    """
    return address.startswith("tcp:")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port of a named interface of the instance's host."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{self.host}:{self.port}"

    @property
    def authority(self) -> str:
        """The address as a URL has it: `host:port`, an IPv6 host in brackets (RFC 3986)."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Return the address that `str` of one gave. Raises ValueError for anything else."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and 0 < int(port) < 65536:
        return TcpAddress(host, int(port))
    raise ValueError(f"an instance's address is unix:<path> or tcp:<host>:<port>, not {text!r}")
