"""Recognises loopback and wildcard addresses."""

import ipaddress
from contextlib import suppress


def is_loopback(host: str | None) -> bool:
    """Whether a name or address reaches this machine only."""
    with suppress(ValueError):
        return ipaddress.ip_address(host or "").is_loopback
    return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether an address means all of a machine's addresses, so that it cannot be used in a URL."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == ""
