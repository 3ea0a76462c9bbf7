"""Runs pytest's workers, `leyden` commands, and Python files that train, in forks of a process with their imports.

A process that is started anew spends up to ten seconds of a core on imports, more than on what most tests look at. A
fork runs the same `main` with its own arguments, folder, environment, input, output and exit. `tests/cli/test_cli.py`
and the first training of `tests/local/test_train.py` start commands as a user does. As a program, with the arguments
`-u -c CODE`, this file is a Python interpreter that forks.
"""

import atexit
import gc
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

_TRAINING = ["leyden.local.train", "matplotlib.figure", "transformers.models.llama.modeling_llama"]
_IMPORTS = {
    "train": _TRAINING,
    "eval": ["leyden.local.evaluate"],
    "dev": ["leyden.local.dev"],
    "replay": ["leyden.local.replay"],
    "export": ["leyden.local.export"],
    "serve": ["leyden.server.serve"],
    "worker": ["leyden.client.worker.worker"],
    "-c": [
        *_TRAINING,
        "peft",
        "openai",
        "anthropic",
        "google.genai",
        "ray",
        "hypothesis.stateful",
        "torch._dynamo.testing",
        "leyden.server.serve",
    ],
}
"""What the process imports before it forks for a command, and for a worker of pytest."""
FORKING_PYTHON = shlex.join([sys.executable, __file__])
"""A Python interpreter, for code, that has imported what tests need."""
_REQUEST_BYTES = 2**20
_ADDRESS = "LEYDEN_TEST_FORKS"
"""The environment variable with the address of the process."""


class ForkedCommand:
    """A running command, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, status: int, stdout: IO[Any] | None, stderr: IO[Any] | None) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the command runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit status."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Read the rest of the output and wait for the end."""
        output: dict[str, Any] = {}
        streams = {"stdout": self.stdout, "stderr": self.stderr}
        readers = [
            threading.Thread(target=lambda name=name, stream=stream: output.update({name: stream.read()}), daemon=True)
            for name, stream in streams.items()
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        self.wait(timeout)
        for stream in filter(None, streams.values()):
            stream.close()
        return output.get("stdout"), output.get("stderr")

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _ForkServer:
    """A connection to the process that forks. That process ends with the one that started it."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)

    def fork(self, arguments: list[str], folder: Path, descriptors: list[int]) -> int:
        """Fork a process; `descriptors` are where its exit status goes, and its standard input, output and errors."""
        request = json.dumps({"arguments": arguments, "folder": str(folder), "environment": dict(os.environ)})
        socket.send_fds(self._socket, [request.encode()], descriptors)
        return int(self._socket.recv(16))


def start_fork_server() -> None:
    """Start the process that forks, unless the process that started this one has: all workers of pytest share one."""
    if _ADDRESS in os.environ:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux chooses a name that is no file
        listener.listen(64)
        command = [sys.executable, str(Path(__file__)), str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.PIPE)
        os.environ[_ADDRESS] = listener.getsockname()[1:].decode()
    assert process.stdin is not None
    atexit.register(process.communicate)  # its standard input closes, which ends it


_server: _ForkServer | None = None


def start_command(
    *arguments: str,
    cwd: Path | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    text: bool = False,
) -> ForkedCommand:
    """Start `leyden ARGUMENTS`, or a Python file if that is the first of them.

    Its input is a file descriptor or nothing. Output goes where `subprocess.Popen` would send it.
    """
    global _server
    if _server is None:
        _server = _ForkServer("\0" + os.environ[_ADDRESS])
    kept: list[int] = []
    given: list[int] = []

    def pipe() -> int:
        reading, writing = os.pipe()
        kept.append(reading)
        given.append(writing)
        return writing

    status = pipe()
    given.append(os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(stdin))
    standard = [given[-1], 1, 2]
    streams: list[IO[Any] | None] = [None, None]
    for index, asked in enumerate((stdout, stderr)):
        if asked == subprocess.PIPE:
            standard[1 + index] = pipe()
            streams[index] = os.fdopen(kept[-1], "r" if text else "rb")
        elif asked == subprocess.STDOUT:
            standard[1 + index] = standard[1]
        elif asked is not None:
            standard[1 + index] = asked
    try:
        pid = _server.fork(list(arguments), cwd or Path.cwd(), [status, *standard])
    finally:
        for descriptor in given:
            os.close(descriptor)
    return ForkedCommand(pid, kept[0], *streams)


def run_command(*arguments: str, cwd: Path | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run `leyden ARGUMENTS` to its end; returns what it printed."""
    process = start_command(*arguments, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stdout, stderr = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(["leyden", *arguments], process.returncode, stdout, stderr)


def _serve(listener: socket.socket) -> list[str] | None:
    """Fork for every request. Returns a command's arguments in the fork, and None when standard input closes."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    running: dict[int, tuple[int, int]] = {}  # file descriptor of a process -> its pid, where its exit status goes
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                pid, status = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                continue
            if key.fd == listener.fileno():
                client = listener.accept()[0]
                clients[client.fileno()] = client
                selector.register(client, selectors.EVENT_READ)
                continue
            if key.fd not in clients:
                return None
            client = clients[key.fd]
            text, descriptors, _, _ = socket.recv_fds(client, _REQUEST_BYTES, 4)
            if not text:
                selector.unregister(client)
                clients.pop(key.fd).close()
                continue
            status, *standard = descriptors
            request = json.loads(text)
            gc.disable()  # nothing that is imported is garbage
            _import_for(request["arguments"])
            gc.enable()
            gc.freeze()  # or the end of every fork traverses and copies all that was imported
            pid = os.fork()
            if pid == 0:
                selector.close()
                for connection in (listener, *clients.values()):
                    connection.close()
                for descriptor in (status, *running, *(status for _, status in running.values())):
                    os.close(descriptor)
                _become(standard, request["folder"], request["environment"])
                return [str(one) for one in request["arguments"]]
            for descriptor in standard:
                os.close(descriptor)
            handle = os.pidfd_open(pid)
            running[handle] = pid, status
            selector.register(handle, selectors.EVENT_READ)
            client.send(str(pid).encode())


def _import_for(arguments: list[str]) -> None:
    """Import what a command needs."""
    trains = arguments[0].endswith(".py")
    for module in ["leyden.cli", *(_TRAINING if trains else _IMPORTS.get(arguments[0], ()))]:
        import_module(module)
    if "--model" in arguments:
        import_module("leyden.local.serve")
    if "transformers" in sys.modules:  # the first model that is loaded fills this cache, for half a second
        import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def _become(standard: list[int], folder: str, environment: dict[str, str]) -> None:
    """Take over the input, output, folder and environment of a command."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator is seeded by the fork


def _fork_code(code: str) -> int:
    """Run code in a fork with this process's input and output; returns its exit status."""
    ended, status = os.pipe()
    _ForkServer("\0" + os.environ[_ADDRESS]).fork(["-c", code], Path.cwd(), [status, 0, 1, 2])
    os.close(status)
    return int(os.read(ended, 16) or 1)


def _run(arguments: list[str]) -> None:
    """Run a command, and end as it asks."""
    if arguments[0] == "-c":
        sys.argv = ["-c"]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(arguments[1], vars(sys.modules["__main__"]))
    elif arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.argv = ["leyden", *arguments]
        sys.exit(import_module("leyden.cli").main())


def _end(status: int) -> NoReturn:
    """End as an interpreter does, without clearing what was imported: the fork would first copy all of it."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "-u":
        sys.exit(_fork_code(sys.argv[-1]))
    if (arguments := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        try:
            _run(arguments)
        except SystemExit as error:
            if not isinstance(error.code, int | None):
                raise
            _end(error.code or 0)
        _end(0)
