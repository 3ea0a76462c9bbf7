"""Forwards connections between sockets, in one thread. Imports only the standard library: it also runs in sandboxes.

`python -m leyden.client.isolation.forwarding FOLDER TARGET...` listens on one Unix socket in FOLDER for each target, a
`host:port`, and forwards to it.
"""

import selectors
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_CHUNK_BYTES, _MAX_BUFFER = 1 << 16, 1 << 20


class ForwardRoute(NamedTuple):
    """A listening socket, and where its connections are forwarded to."""

    listener: socket.socket
    family: int
    address: Any


class _End:
    """One of the two sockets of a forwarded connection."""

    def __init__(self, sock: socket.socket, connecting: bool = False) -> None:
        self.sock, self.connecting = sock, connecting
        self.peer: _End
        self.buffer = bytearray()
        self.ended = self.shut = self.closed = False
        sock.setblocking(False)


class Forwarder:
    """Forwards the connections of its routes until the process ends."""

    def __init__(self, routes: list[ForwardRoute]) -> None:
        self._selector = selectors.DefaultSelector()
        for route in routes:
            route.listener.setblocking(False)
            self._selector.register(route.listener, selectors.EVENT_READ, route)

    def run(self) -> None:
        """Forward for ever."""
        while True:
            for key, events in self._selector.select():
                if isinstance(key.data, ForwardRoute):
                    self._accept(key.data)
                elif not key.data.closed:
                    self._on_ready(key.data, events)

    def _accept(self, route: ForwardRoute) -> None:
        with suppress(OSError):
            one = _End(route.listener.accept()[0])
            other = _End(socket.socket(route.family), connecting=True)
            one.peer, other.peer = other, one
            try:
                other.sock.connect(route.address)
            except BlockingIOError:
                pass
            except OSError:
                one.sock.close()
                other.sock.close()
                return
            self._update(one)
            self._update(other)

    def _on_ready(self, end: _End, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                end.connecting = False
                del end.buffer[: end.sock.send(end.buffer)]
            if events & selectors.EVENT_READ:
                data = end.sock.recv(_CHUNK_BYTES)
                end.ended = not data
                end.peer.buffer += data
            self._update(end)
            self._update(end.peer)
        except BlockingIOError:
            pass
        except OSError:
            self._close(end)

    def _update(self, end: _End) -> None:
        """Wait for what this end can do next; close both when everything is forwarded."""
        if end.peer.ended and not end.buffer and not end.shut and not end.connecting:
            end.shut = True
            end.sock.shutdown(socket.SHUT_WR)
        if end.shut and end.peer.shut:
            self._close(end)
            return
        reads = not end.ended and not end.connecting and len(end.peer.buffer) < _MAX_BUFFER
        events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * bool(end.buffer or end.connecting)
        known = end.sock.fileno() in self._selector.get_map()
        if events and known:
            self._selector.modify(end.sock, events, end)
        elif events:
            self._selector.register(end.sock, events, end)
        elif known:
            self._selector.unregister(end.sock)

    def _close(self, end: _End) -> None:
        for each in (end, end.peer):
            if not each.closed:
                each.closed = True
                with suppress(KeyError, ValueError):
                    self._selector.unregister(each.sock)
                each.sock.close()


def socket_name(target: str) -> str:
    """Return the name of the Unix socket for a `host:port`."""
    return target.replace("/", "_").replace(":", "-") + ".sock"


def main(folder: Path, targets: list[str]) -> None:
    """Listen for every target and forward."""
    routes = []
    for target in targets:
        host, _, port = target.rpartition(":")
        ((family, _, _, _, address), *_) = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        path = folder / socket_name(target)
        path.unlink(missing_ok=True)  # of a forwarder that has died
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)  # agents have other user ids
        listener.listen(1024)
        routes.append(ForwardRoute(listener, family, address))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Forwarder(routes).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
