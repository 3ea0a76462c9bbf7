"""Binds the port of a server."""

import socket

from leyden.server.options import ServeError


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
        raise ServeError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another port (--port, or server.port)"
        ) from error
    return listener
