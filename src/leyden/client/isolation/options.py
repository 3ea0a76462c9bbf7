"""What is isolated, and how."""

from typing import Literal

from msgspec import Struct

Mode = Literal["none", "user", "sandbox"]
ModeChoice = Literal["none", "user", "sandbox", "auto"]


class IsolationOptions(Struct, frozen=True, kw_only=True):
    """How processes with agent code are isolated on this machine."""

    mode: Mode = "none"
    server: str = ""
    """The URL of the gateway."""
    base: str = "."
    """The agent's folder, which a sandbox shows read-only."""
    path: tuple[str, ...] = ()
    """Folders of Python modules, which a sandbox shows read-only."""
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Folders of runs and files with keys, which a sandbox hides if they are inside of what it shows."""
    network: tuple[str, ...] = ()
    """`host:port` of what a sandbox may reach besides the gateway; `*`: it has the network of the machine."""
    memory_mb: int | None = None
    """Limit of the memory of an agent's processes, and of each file system in memory of its sandbox."""
    environment: tuple[str, ...] = ()
    """Names of variables that isolated agents inherit besides those that programs need; `*` stands for any text."""
    sockets: str = ""
    """The folder in which the forwarder of the worker listens, one Unix socket for each of `targets`."""


class SandboxUnavailable(Exception):
    """A mode does not work here; the message says why."""
