"""URLs without the secrets in them, for messages and logs."""

from urllib.parse import parse_qs


def without_userinfo(url: str) -> str:
    """Return a URL without the user and the password in it; other text as it is."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}" if separator else url


def has_password(url: str) -> bool:
    """Whether a URL has a password, before the host or in its query."""
    rest = url.partition("://")[2]
    return ":" in rest.rpartition("@")[0] or "password" in parse_qs(rest.partition("?")[2])
