"""Options of a worker that was started from Python have the same limits as those that are read."""

from typing import Any

import pytest

from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.worker import work
from leyden.config.schema import RolloutConfig
from leyden.user_code.loading import LoadError


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"unresponsive_s": 0.0}, "unresponsive_s"),
        ({"grace_s": -1.0}, "grace_s"),
        ({"rollout": RolloutConfig(time_limit_s=float("nan"))}, "rollout.time_limit_s"),
    ],
)
async def test_limits_that_are_out_of_range_are_refused(fields: dict[str, Any], named: str) -> None:
    options = WorkerOptions(server="http://127.0.0.1:9", agent="no/agent.py:solve", **fields)
    with pytest.raises(LoadError, match=rf"^the options of the worker: Expected .* at `\$\.{named}`$"):
        await work(options, "key")
