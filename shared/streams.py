"""Resumable streams at an instance: names of conversations, and addresses at older and newer engines.

Older engines take a conversation's name in the path, newer ones in the query. Each answers 404 to the other
form, so both are tried, the newer first.
"""

import hashlib
from urllib.parse import quote, unquote

CONVERSATION_HEADER = b"x-conversation-id"
LOOKUP = "/v1/streams/lookup"
LONGEST_ID = 512


def owner_of(key: str) -> str:
    """Return the short name of a client's key, empty for no key; the key can't be told from it."""
    return hashlib.sha256(b"conversation " + key.encode()).hexdigest()[:16] if key else ""


def name_of(owner: str, conversation: str) -> str:
    """Return what a client's conversation is called here and at engines: its owner's, and fit for a path.

    What follows `::` stays behind that, since engines take `x` for all of `x::…` in a lookup.
    """
    # A lone surrogate, which JSON can write, is a name like any other.
    fit = quote(conversation, safe=":", errors="surrogatepass").replace("~", "%7E").replace("%", "~")
    return f"{owner}:{fit}" if owner else fit


def id_of(owner: str, name: str) -> str:
    """Return the client's own id of a conversation of this owner; the reverse of `name_of`."""
    return unquote(name.removeprefix(f"{owner}:" if owner else "").replace("~", "%"))


def targets(name: str, start: str = "") -> tuple[str, str]:
    """Return the two addresses of a conversation's stream; `start` is the byte to begin at, as written."""
    found = quote(name, safe="")
    start = quote(start, safe="")
    by_query = f"/v1/stream?conv_id={found}" + (f"&from={start}" if start else "")
    by_path = f"/v1/stream/{found}" + (f"?from={start}" if start else "")
    return by_query, by_path
