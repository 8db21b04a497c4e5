"""Who may call what: keys as llama-server takes them, and admin keys for management."""

from collections.abc import Iterable
from dataclasses import dataclass

from llamastead.gateway.routes import Access
from llamastead.shared.errors import ApiError
from llamastead.shared.secret import same_key
from llamastead.shared.streams import owner_of

Headers = Iterable[tuple[bytes, bytes]]


@dataclass
class Keys:
    """The keys of this gateway; those of clients change when their file does, see gateway/keyfile.py.

    Without inference keys inference is open; without admin keys the inference keys do for management;
    without any, everything is open. A probe key is good for inference with what is loaded, and never more.
    """

    inference: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()
    probe: tuple[str, ...] = ()

    def owner(self, headers: Headers) -> str:
        """Return a short name for the key that the headers carry, empty where none is asked for."""
        given = _given_key(headers)
        known = _among(given, self.inference) or _among(given, self.admin) or _among(given, self.probe)
        return owner_of(given) if known else ""

    def probes(self, headers: Headers) -> bool:
        """Return whether the headers carry a key that may not have a model loaded."""
        return bool(self.probe) and _among(_given_key(headers), self.probe)

    def check(self, access: Access, headers: Headers) -> None:
        """Return when the headers carry a key good for `access`, else raise ApiError 401 or 403."""
        if access is Access.OPEN or not (self.inference or self.admin or self.probe):
            return
        if access is Access.INFERENCE and not self.inference:
            return
        given = _given_key(headers)
        known, probe = _among(given, self.inference), _among(given, self.probe)
        if _among(given, self.admin) or (known and (access is Access.INFERENCE or not self.admin)):
            return
        if probe and access is Access.INFERENCE:
            return
        if known or probe:
            raise ApiError(
                403, "This route needs an admin key (--admin-key); the key given is for inference only"
            )
        if not (self.inference or self.admin):
            return
        raise ApiError(401, "Invalid API Key")


def _given_key(headers: Headers) -> str:
    """Return the key a request carries: `Authorization: Bearer KEY` or bare, else `X-Api-Key`, else empty."""
    fallback = ""
    for name, value in headers:
        if name == b"authorization":
            text = value.decode("latin-1").strip()
            scheme, _, rest = text.partition(" ")
            return rest.strip() if scheme.lower() == "bearer" and rest else text
        if name == b"x-api-key":
            fallback = value.decode("latin-1").strip()
    return fallback


def _among(given: str, keys: tuple[str, ...]) -> bool:
    """Compare with every key, so that the time taken doesn't tell which one was near."""
    found = False
    for key in keys:
        found |= same_key(given, key)
    return found
