"""Serves the pages' files, and exchanges a key for the cookie by which a browser sends it.

Pages come with a policy that allows scripts and styles of this server only; data is fetched by the pages and shown as
text, so nothing that an agent wrote can become markup.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files

from msgspec import Struct

from leyden.server.control.keys import KeyKind, KeyRefused
from leyden.server.http.errors import ApiError
from leyden.server.http.responses import Raw, Request
from leyden.server.service import ServerContext

HTML = "text/html; charset=utf-8"
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_THIRTY_DAYS = 30 * 86_400.0

SECURITY_HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
)
_NO_CACHE = ("cache-control", "no-cache")

_FOLDER = files("leyden.server.dashboard").joinpath("static")
_FILES = {file.name: file.read_bytes() for file in _FOLDER.iterdir() if file.is_file()}


class SignIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A key to set as a cookie."""

    key: str


def page(scripts: Sequence[str]) -> Callable[[ServerContext, Request[None, dict[str, str]]], Awaitable[Raw]]:
    """Return the handler of a page. The browser loads its scripts while it reads the document."""
    links = ", ".join(f"</static/{name}>; rel=modulepreload" for name in scripts)

    async def show(service: ServerContext, request: Request[None, dict[str, str]]) -> Raw:
        """Return the page; its script shows what the path names."""
        return Raw(_FILES["index.html"], HTML, (*SECURITY_HEADERS, _NO_CACHE, ("link", links)))

    return show


def sign_in_page(error: ApiError, headers: Mapping[str, str]) -> bytes:
    """Return the page that asks for a key."""
    return _FILES["signin.html"]


async def show_sign_in(service: ServerContext, request: Request[None, None]) -> Raw:
    """Return the page that asks for a key, or takes it from the part of the link that is not sent to the server."""
    return Raw(_FILES["signin.html"], HTML, (*SECURITY_HEADERS, _NO_CACHE))


async def sign_in(service: ServerContext, request: Request[SignIn, None]) -> Raw:
    """Set a viewer's key as a cookie; for an admin key, a new viewer's key."""
    text = request.body.key.strip()
    key = service.keyring.verify(text)
    if key.kind is KeyKind.ADMIN:
        text, key = service.keyring.create(KeyKind.VIEWER, _THIRTY_DAYS)
    elif key.kind is not KeyKind.VIEWER:
        raise KeyRefused(f"a key of kind {key.kind} opens no page: use a viewer's key")
    age = int(key.expires - service.keyring.clock())
    cookie = f"{service.keyring.cookie}={text}; Path=/; HttpOnly; SameSite=Lax; Max-Age={age}"
    return Raw(b"{}", "application/json", (("set-cookie", cookie), *SECURITY_HEADERS))


async def static_file(service: ServerContext, request: Request[None, None]) -> Raw:
    """Return a script or a style of the pages."""
    name = request.path["file"]
    content_type = next((kind for suffix, kind in _TYPES.items() if name.endswith(suffix)), None)
    if name not in _FILES or content_type is None:
        raise ApiError(404, "not_found", f"there is no file {name}")
    return Raw(_FILES[name], content_type, (*SECURITY_HEADERS, _NO_CACHE))
