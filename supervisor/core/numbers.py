"""The memory numbers of an error, for people and programs: what is needed, what there is, who holds it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from llamastead.supervisor.core import ledger
from llamastead.supervisor.core.state import State

_NAMED = 3  # of the processes that are not ours


def numbers(state: State, verb: str, amounts: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
    """Return a clause on each of these devices that has an account, and the accounts themselves.

    `verb` is what the model does with so many bytes: needs, or was given.
    """
    accounts = {account.device: account for account in ledger.account(state)}
    parts, memory = [], {}
    for name, amount in sorted(amounts.items()):
        account = accounts.get(name)
        if account is None or not amount:
            continue
        held = ", ".join(f"{model} {_mib(size)}" for model, size in sorted(account.held.items()))
        parts.append(
            f"{verb} {_mib(amount)} on {name}, which has {_mib(account.total)}: "
            f"{_mib(account.external)} are used by others{_strangers(state, name)}, "
            f"{_mib(account.margin)} are kept free" + (f", ours: {held}" if held else "")
        )
        memory[name] = {"needs": amount, **asdict(account), "strangers": dict(state.devices[name].strangers)}
    return "; ".join(parts), memory


def _strangers(state: State, device: str) -> str:
    """Return the biggest of the processes that are not ours, if the device tells of any."""
    found = sorted(state.devices[device].strangers.items(), key=lambda known: (-known[1], known[0]))
    told = ", ".join(f"{who} {_mib(size)}" for who, size in found[:_NAMED])
    return f" ({told})" if told else ""


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
