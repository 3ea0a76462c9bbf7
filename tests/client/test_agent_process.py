"""Which variables of the worker an agent inherits."""

import pytest

from leyden.client.agent_process import agent_environment
from leyden.client.isolation.options import IsolationOptions, Mode
from leyden.config.schema import WorkerConfig

SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PGPASSWORD", "GITHUB_TOKEN", "SSH_AUTH_SOCK")
NEEDED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "OMP_NUM_THREADS", "VIRTUAL_ENV")


@pytest.mark.parametrize("mode", ["user", "sandbox"])
def test_an_isolated_agent_inherits_what_programs_need_and_what_is_named(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SECRETS, *NEEDED, "LEYDEN_KEY", "SEARCH_URL", "SEARCH_KEY", "INDEX", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"of {name}")
    monkeypatch.setenv("https_proxy", "http://me:password@proxy:3128")
    options = IsolationOptions(mode=mode, workers=WorkerConfig(environment=("SEARCH_*", "INDEX", "LEYDEN_KEY")))
    found = agent_environment(options, "http://server", "leyden-key")
    assert not {*SECRETS, "https_proxy", "LEYDEN_KEY"} & set(found)
    for name in (*NEEDED, "SEARCH_URL", "SEARCH_KEY", "INDEX", "HTTP_PROXY"):
        assert found[name] == f"of {name}"
    assert found["OPENAI_BASE_URL"] == "http://server/v1" and found["OPENAI_API_KEY"] == "leyden-key"


def test_an_agent_that_is_not_isolated_inherits_all_but_keys_of_leyden(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("LEYDEN_KEY", "LEYDEN_UPSTREAM_KEY", "LEYDEN_STORE")
    for name in (*SECRETS, *own):
        monkeypatch.setenv(name, "x")
    found = agent_environment(IsolationOptions(), "http://server", "leyden-key")
    assert set(SECRETS) <= set(found) and not set(own) & set(found)
