"""The load of an engine is counted for a minute."""

import pytest

from leyden.server.gateway.calls.engine_load import EngineLoad, LoadCounts


def test_calls_failures_and_tokens_are_counted_for_a_minute() -> None:
    now = 100.0
    load = EngineLoad(lambda: now)
    with load.call(ValueError):
        load.add_tokens(3)
        assert load.running == 1
    with pytest.raises(ValueError), load.call(ValueError):
        raise ValueError
    with pytest.raises(KeyError), load.call(ValueError):  # the caller's own error
        raise KeyError
    assert (load.running, load.recent()) == (0, LoadCounts(3, 1, 3))
    now = 140.0
    load.add_tokens(2)
    assert load.recent() == LoadCounts(3, 1, 5)
    now = 161.0
    assert load.recent() == LoadCounts(0, 0, 2)
