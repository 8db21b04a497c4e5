"""Turns Redis replies into records."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamastead.shared.store.records import Command, Demand, Message, Ticket, Wait
from llamastead.shared.words import UseKind, WaitReason


def pairs(flat: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (field, value) of a flat reply."""
    return zip(flat[::2], flat[1::2], strict=True)


def lease_id(value: str) -> str:
    """Return the lease id of a `<lease id>:<beat>`."""
    return value.rpartition(":")[0]


def demands(entries: Sequence[Sequence[Any]]) -> dict[str, Demand]:
    """Return model → demand from the scripts' queue facts, keeping their order."""
    return {model: _demand(int(first_ms), tickets) for model, first_ms, tickets in entries}


def _demand(first_ms: int, flat: Sequence[str]) -> Demand:
    tickets = sorted(
        (_ticket(name, value) for name, value in pairs(flat)), key=lambda t: (t.enqueued_ms, t.id)
    )
    return Demand(first_ms, tuple(tickets))


def _ticket(ticket: str, value: str) -> Ticket:
    fields = json.loads(value)
    return Ticket(
        ticket,
        fields["gateway"],
        UseKind(fields["kind"]),
        fields["request_id"],
        fields["enqueued_ms"],
        fields["deadline_ms"],
    )


WAIT_FIELDS = ("wait_reason", "wait_for", "wait_until_ms", "wait_since_ms", "wait_rank_ms", "wait_ordered")


def wait(values: Sequence[str | None]) -> Wait:
    """Return why an entry waits from the values of WAIT_FIELDS."""
    reason, blockers, until_ms, since_ms, rank_ms, ordered = (value or "" for value in values)
    return Wait(
        WaitReason(reason) if reason in set(WaitReason) else None,
        json.loads(blockers or "{}"),
        int(until_ms) if until_ms else None,
        int(since_ms or 0),
        int(rank_ms or 0),
        ordered == "1",
    )


def messages(reply: Any, stream: str) -> tuple[Message, ...]:
    """Return the entries of one stream from an XREAD reply, in the shape of RESP2 or RESP3."""
    if not reply:
        return ()
    streams = reply if isinstance(reply, Mapping) else dict(reply)
    entries = streams.get(stream, [])
    if isinstance(reply, Mapping) and entries and isinstance(entries[0], list):
        entries = [entry for part in entries for entry in part]
    return tuple(Message(entry, dict(fields)) for entry, fields in entries)


def command(now_ms: int, entry: str, fields: dict[str, str], again: bool) -> Command:
    """Return an entry of `commands`; `fields` is taken apart. `again`: it was read before."""
    verb, gateway = fields.pop("verb", ""), fields.pop("gateway", "")
    until = fields.pop("deadline_ms", None)
    deadline_ms = None if until is None else int(until)
    expired = deadline_ms is not None and deadline_ms <= now_ms
    return Command(entry, verb, gateway, deadline_ms, expired, fields, again)
