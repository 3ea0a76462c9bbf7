"""The bubblewrap command of a sandbox: what a program sees of the machine, and what it can reach."""

import ipaddress
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from leyden.client.isolation import sandbox_init
from leyden.client.isolation.forwarding import socket_name
from leyden.client.isolation.options import IsolationOptions, SandboxUnavailable
from leyden.guardian import MAX_PROCESSES

SCRATCH = "/tmp"
_SHARED_MEMORY = "/dev/shm"
_MAX_SCRATCH = 4 << 30
_SOCKETS = "/run/leyden"
_SYSTEM = [*map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu"))]
_WHOLE_NETWORK = "*"


def targets(options: IsolationOptions) -> list[str]:
    """Return `host:port` of everything that is forwarded; nothing where the sandbox has the machine's network."""
    if _WHOLE_NETWORK in options.network:
        return []
    url = urlsplit(options.server)
    port = url.port or (443 if url.scheme == "https" else 80)
    host = url.hostname or ""
    return list(dict.fromkeys((f"[{host}]:{port}" if ":" in host else f"{host}:{port}", *options.network)))


def sandboxed(options: IsolationOptions, command: Sequence[str], folder: str, user: int | None) -> list[str]:
    """Return the command that runs `command` in a sandbox; `user` is the id that it gets where this process is root."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable("there is no `bwrap` here: install bubblewrap")
    words = [bwrap, "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--cap-drop", "ALL"]
    words += ["--unshare-user"] if user is None else ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    words += ["--cap-add", "CAP_NET_BIND_SERVICE"]  # to listen on ports like that of the server
    words += [*_files(options, command[0]), *_network(options)]
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]  # they are in memory, and without a limit
    routes = [(each.address, each.port, f"{_SOCKETS}/{socket_name(each.target)}") for each in _routes(options)]
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


def _files(options: IsolationOptions, program: str) -> list[str]:
    """Return the options of what the sandbox sees. Later ones cover earlier ones."""
    base = Path(options.base)
    if not _is_specific(base):
        raise SandboxUnavailable(f"the agent's folder is {base}: move the agent into a folder of its own")
    words = []
    for path in _SYSTEM:
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    words += ["--proc", "/proc", "--dev", "/dev"]
    size = _MAX_SCRATCH if options.memory_mb is None else min(_MAX_SCRATCH, options.memory_mb << 20)
    for folder in (_SHARED_MEMORY, SCRATCH):  # the memory of both is counted with that of the processes, too
        words += ["--perms", "1777", "--size", str(size), "--tmpfs", folder]
    modules = filter(_is_specific, map(Path, filter(None, (*sys.path, *options.path))))
    shown = [*_interpreter(), *modules, base.absolute(), *_program_folders(program)]
    visible = [path for path in dict.fromkeys(shown) if path.exists() and not _is_within(path, _SYSTEM)]
    around = {
        parent for path in (*visible, *map(Path, (*options.readable, *options.writable))) for parent in path.parents
    }
    for path in sorted({*around, Path(_SOCKETS).parent} - {Path("/"), Path(SCRATCH)} - set(visible)):
        if not _is_within(path, (*_SYSTEM, *visible)):
            words += ["--perms", "0755", "--dir", str(path)]  # bubblewrap would create them for root only
    for path in sorted(visible):
        words += ["--ro-bind", str(path), str(path)]
    for path in map(Path, options.hidden):
        if path.is_dir() and _is_within(path, shown):
            words += ["--perms", "0755", "--tmpfs", str(path), "--remount-ro", str(path)]
    for bind, paths in (("--ro-bind", options.readable), ("--bind", options.writable)):
        for each in paths:
            words += [bind, each, each]
    return words


def _network(options: IsolationOptions) -> list[str]:
    if targets(options):
        hosts = str(Path(options.sockets) / "hosts")
        return ["--unshare-net", "--ro-bind", options.sockets, _SOCKETS, "--ro-bind", hosts, "/etc/hosts"]
    resolver = Path("/etc/resolv.conf").resolve()
    return ["--ro-bind", str(resolver), str(resolver)] if resolver.exists() else []


def _interpreter() -> list[Path]:
    """Return the folders of this Python and of Leyden."""
    installed = Path(sys.executable).resolve().parents[1]
    return [Path(sys.base_prefix), Path(sys.prefix), installed, Path(__file__).parents[2]]


def _program_folders(program: str) -> list[Path]:
    """Return the folder of a program and, where it is a link, of what it points to."""
    found = shutil.which(program)
    return [] if found is None else [Path(found).absolute().parent, Path(found).resolve().parent]


def _is_specific(folder: Path) -> bool:
    """Whether a folder is neither the home folder, nor around it, nor that of all temporary files: not to be shown."""
    return not Path.home().is_relative_to(folder.absolute()) and folder.absolute() != Path(tempfile.gettempdir())


def _is_within(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.absolute().is_relative_to(folder) for folder in folders)
