"""Processes that run agents: their environment without the worker's secrets, their limits, and their crashes.

Isolated agents inherit only what programs need to run, and what the configuration names: other variables may be keys.
"""

import faulthandler
import os
import resource
from fnmatch import fnmatchcase
from tempfile import TemporaryFile
from urllib.parse import urlsplit

from leyden.client.isolation.options import IsolationOptions
from leyden.config.schema import STORE_VARIABLE, UPSTREAM_KEY_VARIABLE
from leyden.decoding import decode_text
from leyden.process.descendants import prefer_for_oom_kill

KEY_VARIABLE = "LEYDEN_KEY"
"""Holds a worker's own key, which no host process inherits, or the key of a command's attempt."""

_INHERITED = (
    *("PATH", "HOME", "TMPDIR", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "NODE_PATH", "JAVA_HOME"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
)
"""Variables that isolated agents inherit."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
"""In either case, and unless a password may be in them."""


def without_secrets() -> dict[str, str]:
    """Return the variables of this process without the keys that agents must not see."""
    secret = (KEY_VARIABLE, UPSTREAM_KEY_VARIABLE, STORE_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in secret}


def inherited_environment(options: IsolationOptions) -> dict[str, str]:
    """Return the variables of this process that agents inherit: isolated ones only those that are listed or named."""
    variables = without_secrets()
    if options.mode == "none":
        return variables
    patterns = (*_INHERITED, *options.workers.environment)
    return {
        name: value
        for name, value in variables.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns) or (name.lower() in _PROXIES and "@" not in value)
    }


def agent_environment(options: IsolationOptions, server: str, key: str) -> dict[str, str]:
    """Return the variables that agents inherit, and those that direct client libraries to the model."""
    inherited = inherited_environment(options)
    no_proxy = inherited.get("NO_PROXY") or inherited.get("no_proxy")
    no_proxy = ",".join(filter(None, (no_proxy, urlsplit(server).hostname)))
    return {
        **inherited,
        "OPENAI_BASE_URL": f"{server}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": server,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": server,
        "GOOGLE_GENAI_USE_VERTEXAI": "false",
        "GOOGLE_GENAI_USE_ENTERPRISE": "false",
        **dict.fromkeys(("GEMINI_API_KEY", "GOOGLE_API_KEY"), key),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",  # output is complete even if the process is killed
    }


_THREAD_STACK = 8 << 20
"""Address space of a thread's stack if the limit of stacks is not finite."""


def apply_limits(memory_mb: int | None, cpu_s: float | None = None, threads: int = 0) -> None:
    """Limit this process, which has just started, and its descendants; the stacks of its threads are no memory."""
    prefer_for_oom_kill()
    if memory_mb is not None:  # not RLIMIT_AS: address space that is only reserved costs nothing
        size = (memory_mb << 20) + threads * _stack_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    if cpu_s is not None:
        seconds = max(1, round(cpu_s))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _stack_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _THREAD_STACK if soft == resource.RLIM_INFINITY else soft


_MAX_BYTES = 64 * 1024
_MAX_LINES = 20


class CrashReport:
    """A temporary file that the child inherits, with Python's report of a fatal signal, or that of a guardian."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - closed by `close`, or with this object

    def fileno(self) -> int:
        """Return the descriptor that the child inherits."""
        return self._file.fileno()

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def read(self) -> str:
        """Return the fatal error and the stack of its thread, innermost first, or what else was written."""
        text = decode_text(os.pread(self.fileno(), _MAX_BYTES, 0))
        fatal, _, threads = text.partition("\n\n")
        current = [block for block in threads.split("\n\n") if block.startswith("Current thread")]
        stack = current[0].splitlines()[: _MAX_LINES + 1] if current else []
        return "\n".join([fatal, *stack]) if fatal.startswith("Fatal") else text.strip()


def report_crashes_to(fd: int) -> None:
    """Write a crash of this process to the file. The child calls this."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd, all_threads=True)
