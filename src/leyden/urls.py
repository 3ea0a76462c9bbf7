"""URLs without the secrets in them, for messages and logs."""

from collections.abc import Iterable
from urllib.parse import parse_qs


def without_userinfo(url: str) -> str:
    """Return a URL without the user and the password in it; other text as it is.

    Everything before the last @ may be a password with a slash in it, so that a path with an @ is shortened too.
    """
    scheme, separator, rest = url.partition("://")
    place, question, query = rest.partition("?")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{question}{query}" if separator else url


def has_password(url: str) -> bool:
    """Whether a URL has a password, before the host or in its query."""
    rest = url.partition("://")[2]
    return ":" in rest.rpartition("@")[0] or bool(password_keys(parse_qs(rest.partition("?")[2])))


def password_keys(query: Iterable[str]) -> list[str]:
    """Return those keys of a query whose values are passwords, such as `password` and `sslpassword`."""
    return [key for key in query if key.lower().endswith("password")]
