"""Environment variables of processes that run agents: where the model is, without the worker's secrets.

Isolated agents inherit only what programs need to run, and what the configuration names: other variables may be keys.
"""

import os
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from leyden.client.isolation.options import IsolationOptions
from leyden.config.schema import STORE_VARIABLE, UPSTREAM_KEY_VARIABLE

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
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",  # output is complete even if the process is killed
    }
