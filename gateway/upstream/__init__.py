"""Connections to instances: HTTP/1.1 over unix sockets, kept and shared per instance."""

from llamastead.gateway.upstream.connection import AddressRefused, Response, Unreachable, UpstreamDied
from llamastead.gateway.upstream.pool import Pool, Pools

__all__ = ["AddressRefused", "Pool", "Pools", "Response", "Unreachable", "UpstreamDied"]
