"""The bubblewrap command of a sandbox: what a program sees of the machine, and what it can reach."""

import ipaddress
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from leyden.client.isolation import sandbox_init
from leyden.client.isolation.forwarding import socket_name
from leyden.client.isolation.options import IsolationOptions, SandboxUnavailable
from leyden.client.isolation.sandbox_files import SOCKETS, file_options
from leyden.process.guardian import MAX_PROCESSES

_WHOLE_NETWORK = "*"


def targets(options: IsolationOptions) -> list[str]:
    """Return `host:port` of everything that is forwarded; nothing if the sandbox has the machine's network."""
    if _WHOLE_NETWORK in options.workers.network:
        return []
    url = urlsplit(options.server)
    port = url.port or (443 if url.scheme == "https" else 80)
    host = url.hostname or ""
    return list(dict.fromkeys((f"[{host}]:{port}" if ":" in host else f"{host}:{port}", *options.workers.network)))


def sandboxed(options: IsolationOptions, command: Sequence[str], folder: str, user: int | None) -> list[str]:
    """Return the command that runs `command` in a sandbox; `user` is the id that it gets if this process is root."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable("there is no `bwrap` here: install bubblewrap")
    words = [bwrap, "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--cap-drop", "ALL"]
    words += ["--unshare-user"] if user is None else ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    words += ["--cap-add", "CAP_NET_BIND_SERVICE"]  # to listen on ports like that of the server
    words += [*file_options(options, command[0]), *_network(options)]
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]  # they are in memory, and without a limit
    routes = [(each.address, each.port, f"{SOCKETS}/{socket_name(each.target)}") for each in _routes(options)]
    init = json.dumps({"user": user, "routes": routes, "max_processes": MAX_PROCESSES})
    interpreter = [sys.executable, "-I", "-S", sandbox_init.__file__, init]
    return [*words, "--chdir", folder, "--", *interpreter, *command]


def hosts_file(options: IsolationOptions) -> str:
    """Return the `/etc/hosts` of a sandbox: names of what is forwarded are addresses of its loopback."""
    names = [f"{each.address} {each.name}\n" for each in _routes(options) if each.name != "localhost"]
    return "".join(["127.0.0.1 localhost\n", *dict.fromkeys(names)])


def server_inside(options: IsolationOptions) -> str:
    """Return the gateway's URL as the sandbox knows it: an address that is not loopback gets a name."""
    url = urlsplit(options.server)
    if not targets(options) or _is_loopback_or_name(url.hostname or ""):
        return options.server
    gateway = next(_routes(options))
    return f"{url.scheme}://{gateway.name}:{gateway.port}"


class _SandboxRoute(NamedTuple):
    target: str
    name: str
    """What the target is called in the sandbox."""
    address: str
    port: int


def _routes(options: IsolationOptions) -> Iterator[_SandboxRoute]:
    """Yield where each target is reached in the sandbox; the gateway is the first."""
    for number, target in enumerate(targets(options)):
        text, _, port = target.rpartition(":")
        host = text.strip("[]")
        if host in ("localhost", "::1"):
            yield _SandboxRoute(target, "localhost", "127.0.0.1", int(port))
        elif not _is_loopback_or_name(host):
            name = f"leyden-{host.replace('.', '-').replace(':', '-')}"
            yield _SandboxRoute(target, name, f"127.0.1.{number + 1}", int(port))
        elif host[0].isdigit():
            yield _SandboxRoute(target, "localhost", host, int(port))
        else:
            yield _SandboxRoute(target, host, f"127.0.1.{number + 1}", int(port))


def _is_loopback_or_name(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def _network(options: IsolationOptions) -> list[str]:
    if targets(options):
        hosts = str(Path(options.sockets) / "hosts")
        return ["--unshare-net", "--ro-bind", options.sockets, SOCKETS, "--ro-bind", hosts, "/etc/hosts"]
    resolver = Path("/etc/resolv.conf").resolve()
    return ["--ro-bind", str(resolver), str(resolver)] if resolver.exists() else []
