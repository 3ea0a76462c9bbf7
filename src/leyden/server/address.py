"""Which addresses are this machine's own, and which are every address at once."""

import ipaddress
from contextlib import suppress


def is_loopback(host: str | None) -> bool:
    """Whether only this machine can be reached by a name or address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host or "").is_loopback
    return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether an address stands for all of a machine's, and so cannot be used to reach it."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == ""
