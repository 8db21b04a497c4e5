"""The memory ledger: per device, every byte has a name, and what is free is the smaller of two accounts.

The ledger's own account is `total - margin - external - held - releasing - measuring`; the device's is what
it shows as free, less the margin and less what is booked and does not show yet. Integers throughout, no state
of its own: all is computed from `State`. A device that was not read has no limit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from llamastead.shared.words import InstanceState
from llamastead.supervisor.core.state import Device, Instance, Releasing, State

Amounts = Mapping[str, int]

S = InstanceState
# While one of these is on a device, what it shows is no one's fixed figure.
_MOVES = frozenset({S.RECOVERING, S.STARTING, S.LOADING, S.WAKING, S.STOPPING, S.STOP_FAILED})
# A device's figures are coarse, and drivers keep a little.
_TOLERANCE = 64 << 20

RELEASE_AWAITED_S = 15.0
"""How long bytes of an ended process are waited for to show as free, and how long others must use more than
before until nothing is hoped for any more.
"""


@dataclass(frozen=True)
class Account:
    """All bytes of one device by name; `total` is their sum, less `debt`: what is promised beyond it.

    `free` is what the ledger has left, `shows` what the device itself says is free (None: it says nothing).
    """

    device: str
    total: int
    margin: int
    external: int
    held: Amounts
    releasing: Amounts
    measuring: Amounts
    free: int
    debt: int
    shows: int | None = None


@dataclass(frozen=True)
class Read:
    """What came of a reading: the state as it is now, and bytes by device that never showed as free."""

    state: State
    missing: Mapping[str, int] = field(default_factory=dict)


def booked(instance: Instance) -> Amounts:
    """Return the bytes an instance holds: what was measured asleep while it rests, else what it needs."""
    return instance.rests if instance.resting else instance.needs


def capacity(state: State) -> dict[str, int]:
    """Return what each device has for us when everything of ours is gone, and what others use just now."""
    return {name: max(0, d.total - d.margin - d.lasting) for name, d in state.devices.items()}


def emptied(state: State) -> dict[str, int]:
    """Return what each device would have for us now if everything of ours were gone."""
    return {name: max(0, d.total - d.margin - d.external) for name, d in state.devices.items()}


def free(state: State) -> dict[str, int]:
    """Return what may be booked now per device; below 0 when more is held than there is."""
    return {name: _free(state, name, device) for name, device in state.devices.items()}


def _free(state: State, name: str, device: Device) -> int:
    named = _sum(booked(i) for i in state.instances.values()).get(name, 0)
    leaving = sum(r.amounts.get(name, 0) for r in state.releasing.values())
    measured = sum(amounts.get(name, 0) for amounts in state.measuring.values())
    ledger = device.total - device.margin - device.external - named - leaving - measured
    if device.free is None:
        return ledger
    unseen = sum(_unseen(instance, name) for instance in state.instances.values())
    return min(ledger, device.free - device.margin - unseen - measured)


def account(state: State) -> tuple[Account, ...]:
    """Return the account of every device, in order of name."""
    return tuple(_account(state, name, device) for name, device in sorted(state.devices.items()))


def _account(state: State, name: str, device: Device) -> Account:
    held: dict[str, int] = {}
    for instance in state.instances.values():
        amount = booked(instance).get(name, 0)
        if amount:
            held[instance.model] = held.get(instance.model, 0) + amount
    releasing: dict[str, int] = {}
    for ended in state.releasing.values():
        amount = ended.amounts.get(name, 0)
        if amount:
            releasing[ended.model] = releasing.get(ended.model, 0) + amount
    measuring = {model: a[name] for model, a in state.measuring.items() if a.get(name)}
    parts = (*held.values(), *releasing.values(), *measuring.values())
    left = device.total - device.margin - device.external - sum(parts)
    return Account(
        device=name,
        total=device.total,
        margin=device.margin,
        external=device.external,
        held=held,
        releasing=releasing,
        measuring=measuring,
        free=max(0, left),
        debt=max(0, -left),
        shows=device.free,
    )


def take_reading(
    state: State,
    readings: Mapping[str, Device],
    seen: Mapping[str, Amounts],
    now: float,
    *,
    complete: bool = True,
) -> Read:
    """Take what the devices show: `seen` is what each instance's process uses, so far as devices tell.

    Settles what was awaited to show as free, gives up on what was awaited too long, and works out anew what
    others use on every device where nothing of ours moves, if all that is ours is known (`complete`).
    """
    instances = {name: _seen(i, seen.get(name)) for name, i in state.instances.items()}
    before = state.devices
    devices = {name: _with_external(reading, before.get(name), now) for name, reading in readings.items()}
    state = replace(state, instances=instances, devices=devices)
    state = replace(state, releasing=_still_awaited(state))
    late = [r for r in state.releasing.values() if r.until <= now]
    missing = {n: b for n, b in _sum(r.amounts for r in late).items() if b}
    state = replace(state, releasing={i: r for i, r in state.releasing.items() if r.until > now})
    devices = {
        name: _lasts(device, _external(state, name, device), missing.get(name, 0), now)
        if complete and _is_quiet(state, name)
        else device
        for name, device in state.devices.items()
    }
    return Read(replace(state, devices=devices), missing)


def _with_external(reading: Device, before: Device | None, now: float) -> Device:
    """Return a reading with what was known of others on that device."""
    if before is None:
        return replace(reading, more_since=now)
    known = {name: getattr(before, name) for name in ("external", "lasting", "more_since", "judged")}
    return replace(reading, **known)


def _lasts(device: Device, external: int, missing: int, now: float) -> Device:
    """Return a device with what others use of it, and how much of that is there for good: what was there when
    it was judged first, what our own ended processes left for good (`missing`), and what has stayed.
    """
    lasting = device.lasting + missing
    more_since = device.more_since if device.external > device.lasting else now
    if not device.judged or external <= lasting or now - more_since >= RELEASE_AWAITED_S:
        return replace(device, external=external, lasting=external, more_since=now, judged=True)
    return replace(device, external=external, lasting=lasting, more_since=more_since)


def release(state: State, instance: Instance, now: float, *, failed: bool) -> State:
    """Return the state with an ended instance's bytes awaited on the devices that free them late.

    They go to the entry it was sent away for. `failed`: its load failed, so it made no room by ending. What
    it may have taken since the last reading counts against what that showed until the next one.
    """
    amounts = {
        name: amount
        for name, amount in booked(instance).items()
        if amount and name in state.devices and state.devices[name].frees_late
    }
    if not amounts:
        return state
    owner = instance.leaving.for_model if instance.leaving else None
    ended = Releasing(instance.model, amounts, now + RELEASE_AWAITED_S, owner, failed)
    fresh = {name: _unseen(instance, name) for name in amounts}
    return replace(_less_free(state, fresh), releasing={**state.releasing, instance.id: ended})


def settle(state: State, instance: Instance, shown: Amounts) -> State:
    """Return the state with what an instance's devices are taken to show as used by it from now on.

    The last reading may be from before it used that: until the next one it counts against what it showed.
    """
    fresh = {name: amount - instance.shown.get(name, 0) for name, amount in shown.items()}
    return _less_free(state, fresh).put(replace(instance, shown=dict(shown)))


def _less_free(state: State, taken: Amounts) -> State:
    """Return the state with so much less of what devices were last read to have free."""
    devices = {
        name: device
        if device.free is None
        else replace(device, free=max(0, device.free - max(0, taken.get(name, 0))))
        for name, device in state.devices.items()
    }
    return replace(state, devices=devices)


def fit(needs: Amounts, grows: Amounts, room: Amounts) -> tuple[Amounts, float]:
    """Return what a start books and the share (0..1) of its growth that has room, the same on all devices."""
    shares = [
        max(0, min(size, room[name] - needs.get(name, 0))) / size
        for name, size in grows.items()
        if size > 0 and name in room
    ]
    share = min(shares, default=1.0)
    taken = {name: needs.get(name, 0) + int(grows.get(name, 0) * share) for name in {*needs, *grows}}
    return taken, share


def _seen(instance: Instance, seen: Amounts | None) -> Instance:
    if seen is None:
        return instance
    if instance.resting:
        return replace(instance, rests=dict(seen), shown=dict(seen))
    if instance.state not in _MOVES:
        # What its process really uses is the peak of what it needs.
        more = {name: max(amount, instance.needs.get(name, 0)) for name, amount in seen.items() if amount}
        instance = replace(instance, needs={**instance.needs, **more})
    return replace(instance, shown={**instance.shown, **seen})


def _unseen(instance: Instance, device: str) -> int:
    """Return what is booked for an instance and not shown as used by the device."""
    return max(0, booked(instance).get(device, 0) - instance.shown.get(device, 0))


def _still_awaited(state: State) -> dict[str, Releasing]:
    """Return what is left to await: as long as a device shows as used what nobody accounts for.

    All of an instance's bytes on a device or none: half of them freed is no reason to send another away.
    """
    left = dict(state.releasing)
    for name, device in state.devices.items():
        waiting = sorted(
            (i for i, r in left.items() if r.amounts.get(name)), key=lambda i: (left[i].until, i)
        )
        if not waiting:
            continue
        known = device.external + sum(_shows(i, name) for i in state.instances.values())
        used = 0 if device.free is None else device.total - device.free
        strange = used - known
        for instance in sorted(waiting, key=lambda i: (left[i].until, i)):
            awaited = left[instance].amounts[name] if strange > _TOLERANCE else 0
            strange -= awaited
            amounts = {**left[instance].amounts, name: awaited}
            left[instance] = replace(left[instance], amounts=amounts)
    return {i: r for i, r in left.items() if any(r.amounts.values())}


def _shows(instance: Instance, device: str) -> int:
    """Return how much of a device's used bytes an instance may account for."""
    moves = instance.state in _MOVES
    return booked(instance).get(device, 0) if moves else instance.shown.get(device, 0)


def _is_quiet(state: State, device: str) -> bool:
    moving = any(i.state in _MOVES and booked(i).get(device) for i in state.instances.values())
    awaited = any(r.amounts.get(device) for r in state.releasing.values())
    return not moving and not awaited and not any(a.get(device) for a in state.measuring.values())


def _external(state: State, name: str, device: Device) -> int:
    if device.free is None:
        return device.external
    ours = sum(i.shown.get(name, 0) for i in state.instances.values())
    return max(0, device.total - device.free - ours)


def _sum(amounts: Iterable[Amounts]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in amounts:
        for name, amount in each.items():
            total[name] = total.get(name, 0) + amount
    return total
