"""How much of each device stays free."""

import pytest

from llamastead.shared.devices.device import HOST, Device
from llamastead.shared.margins import margin, parse_margins

GIB, MIB = 1 << 30, 1 << 20


def test_margins_are_for_all_gpus_or_by_name() -> None:
    """Say nothing, one number, and names beside it: GPUs and host get what is theirs."""
    gpu, other, host = (Device(name, 20 * GIB, 0) for name in ("gpu0", "gpu1", HOST))
    assert [margin(d, parse_margins("")) for d in (gpu, host)] == [GIB, 2 * GIB]
    assert [margin(d, parse_margins("512")) for d in (gpu, host)] == [512 * MIB, 2 * GIB]
    named = parse_margins("512, gpu1=2048,host=4096")
    assert [margin(d, named) for d in (gpu, other, host)] == [512 * MIB, 2 * GIB, 4 * GIB]


@pytest.mark.parametrize("text", ["x", "-1", "=5", "gpu0=", "1,2", "1.5"])
def test_a_margin_that_is_none_is_refused(text: str) -> None:
    """Give what is no MiB, no name, or twice: the error says what is expected."""
    with pytest.raises(ValueError, match="expected MiB"):
        parse_margins(text)
