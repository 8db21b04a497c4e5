"""Who may call what: keys as llama-server takes them, and admin keys for management."""

from collections.abc import Iterable
from dataclasses import dataclass

from llamastead.gateway.routes import Access
from llamastead.shared.errors import ApiError
from llamastead.shared.secret import same_key

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Keys:
    """The keys of this gateway.

    Without inference keys inference is open; without admin keys the inference keys do for management;
    without any, everything is open.
    """

    inference: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def check(self, access: Access, headers: Headers) -> None:
        """Return when the headers carry a key good for `access`, else raise ApiError 401 or 403."""
        if access is Access.OPEN or not (self.inference or self.admin):
            return
        if access is Access.INFERENCE and not self.inference:
            return
        given = _given_key(headers)
        known = _among(given, self.inference)
        if _among(given, self.admin) or (known and (access is Access.INFERENCE or not self.admin)):
            return
        if known:
            raise ApiError(
                403, "This route needs an admin key (--admin-key); the key given is for inference only"
            )
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
