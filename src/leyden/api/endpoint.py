"""An endpoint of the control API, declared once as a method without a body.

A declaration names method, path and permission; its parameters that the path does not name are the body of a POST, or
the query of another request. From it follow the client's method (`Remote` inherits the declarations), the server's
route (`server/control/routes.py`) and the OpenAPI description.
"""

from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from functools import partial
from string import Formatter
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, Self, TypeVar, get_type_hints, overload

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Permission(StrEnum):
    """What an endpoint requires of a key. `server/control/keys.py` says which kinds of keys have it."""

    READ = "read"
    """Read runs and their content."""
    READ_ALL = "read_all"
    """Read what concerns all runs; not with a key of one run."""
    VIEW = "view"
    """See pages and what they show: never without a key, also if a server accepts requests without one."""
    READ_EPISODES = "read_episodes"
    """Read episodes, which reward functions need."""
    MANAGE = "manage"
    """Create runs, queue and cancel rollouts, publish versions and metrics."""
    DELETE = "delete"
    WORK = "work"
    """Lease, send heartbeats, finish, score."""
    RECORD = "record"
    """Record model calls; not agents, which could invent tokens."""
    REWARD = "reward"
    """Record rewards; agents only if the run allows it."""
    TRACE = "trace"
    """Send spans."""
    CALL_MODELS = "call_models"
    """Call models: agents for their attempt; clients outside any rollout, if the server allows that."""
    CREATE_KEYS = "create_keys"
    """Create keys; workers only those of pools."""


class BoundRequest(NamedTuple):
    """A request of an endpoint: the path with its parameters filled in, and what it carries."""

    path: str
    body: Any
    query: Any


class EndpointCaller(Protocol):
    """Whatever sends requests of endpoints."""

    async def call(self, endpoint: "Endpoint[P, T]", *args: P.args, **kwargs: P.kwargs) -> T:
        """Send one request and return its reply."""


class Endpoint(Generic[P, R]):
    """One declared endpoint. Read from an `EndpointCaller`, it is the method that calls it."""

    def __init__(
        self, method: str, path: str, permission: Permission | None, waits: bool, declared: Callable[..., Any]
    ) -> None:
        self.method, self.path, self.permission, self.waits = method, path, permission, waits
        self.name, self.summary = declared.__name__, (declared.__doc__ or "").partition("\n")[0]
        types = get_type_hints(declared, include_extras=True)
        self.returns: type[R] = types.pop("return")
        self.parameters = tuple(types)
        in_path = {name for _, name, _, _ in Formatter().parse(path)}
        self.content = next((name for name in types if name not in in_path), None)
        """Name of the parameter that is the body or the query."""
        content_type = types[self.content] if self.content else None
        self.body = content_type if method == "POST" else None
        self.query = None if method == "POST" else content_type

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundRequest:
        """Return the request for some arguments."""
        values = dict(zip(self.parameters, args, strict=False)) | kwargs
        content = values.pop(self.content) if self.content else None
        body, query = (content, None) if self.body is not None else (None, content)
        return BoundRequest(self.path.format(**values), body, query)

    def arguments(self, path: Mapping[str, str], content: Any) -> list[Any]:
        """Return the arguments of a request, in their order: the inverse of `bind`."""
        return [path.get(name, content) for name in self.parameters]

    @overload
    def __get__(self, caller: None, owner: type) -> Self: ...
    @overload
    def __get__(self, caller: EndpointCaller, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, caller: EndpointCaller | None, owner: type) -> Any:
        return self if caller is None else partial(caller.call, self)


def endpoint(
    method: str, path: str, permission: Permission | None, *, waits: bool = False
) -> Callable[[Callable[Concatenate[Any, P], T]], Endpoint[P, T]]:
    """Declare an endpoint. `waits`: its reply may take long; a client that disconnects cancels the request."""
    return lambda declared: Endpoint(method, path, permission, waits, declared)
