"""The first process in a sandbox: `python -I -S sandbox_init.py OPTIONS PROGRAM ...`.

It forwards connections on the loopback addresses of the sandbox to Unix sockets of the worker, gives up its privileges
and becomes the program. Imports only the standard library.
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # without site-packages it finds the standard library only
    sys.path.append(str(Path(__file__).parents[3]))

from leyden.client.isolation.forwarding import Forwarder, ForwardRoute
from leyden.client.isolation.no_mounts import forbid_mounts


def _listen(address: str, port: int, path: str) -> ForwardRoute:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except PermissionError:  # without root, bubblewrap's network belongs to a user namespace around that of the program
        sys.exit(
            f"only root's sandboxes can forward port {port}: use one above 1023, or allow the whole network "
            '(`workers.network = ["*"]`)'
        )
    listener.listen(1024)
    return ForwardRoute(listener, socket.AF_UNIX, path)


def _forward(routes: list[ForwardRoute]) -> None:
    """Forward until the sandbox ends. The descriptors of the program are closed: their other ends see it end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept = {route.listener.fileno() for route in routes}
    for fd in {int(each.name) for each in Path("/proc/self/fd").iterdir()} - kept:
        with suppress(OSError):
            os.close(fd)
    Forwarder(routes).run()


def main(options: str, command: list[str]) -> None:
    """Start the forwarder and become the command."""
    wanted = json.loads(options)
    routes = [_listen(*route) for route in wanted["routes"]]
    if wanted["user"] is not None:
        os.setgroups([])
        os.setresgid(wanted["user"], wanted["user"], wanted["user"])
        os.setresuid(wanted["user"], wanted["user"], wanted["user"])
    try:
        forbid_mounts()
    except OSError as error:
        sys.exit(f"this kernel cannot forbid mounts, which a sandbox needs (seccomp): {error}")
    if routes and os.fork() == 0:
        _forward(routes)
    for route in routes:
        route.listener.close()
    limit = wanted["max_processes"]
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
