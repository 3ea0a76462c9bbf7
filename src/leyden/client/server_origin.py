"""Recognises requests that go to our server, by scheme, host and port."""

from urllib.parse import urlsplit

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PORTS = {"http": 80, "https": 443}


class ServerOrigin:
    """Scheme, host and port of a server. All names of the loopback address are equal."""

    def __init__(self, url: str) -> None:
        self._origin = _origin_of(url)

    def matches(self, scheme: str, host: str | None, port: int | None) -> bool:
        """Whether a request goes to this server."""
        return _normalize(scheme, host or "", port) == self._origin

    def matches_url(self, url: str) -> bool:
        """Whether a URL is on this server; one that cannot be read is not."""
        try:
            return _origin_of(url) == self._origin
        except ValueError:
            return False


def _origin_of(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return _normalize(parts.scheme, parts.hostname or "", parts.port)


def _normalize(scheme: str, host: str, port: int | None) -> tuple[str, str, int | None]:
    host = host.lower().strip("[]")
    return scheme, "localhost" if host in _LOOPBACK else host, port or _PORTS.get(scheme)
