"""The address of a server: whether others reach it, and its port."""

import errno
import ipaddress
import socket
from contextlib import suppress

from leyden.server.options import ServeError


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


def bind_port(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it; without it a response can take 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        other = "an address of this machine (`server.host`; of leyden serve --host)"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            other = "another port (`server.port`; of leyden serve --port)"
        raise ServeError(f"cannot listen on {host}:{port} ({error.strerror}): choose {other}") from error
    return listener
