"""An agent is called with what its parameters ask for, and one that cannot be is refused before it is."""

from functools import partial

import pytest

from leyden.client.host.callable_agent import CallableAgent
from leyden.client.host_protocol import Invocation
from leyden.user_code.loading import LoadError

ABOUT = Invocation("a", "r", "00-0-0-01", key="key", base_url="http://server/v1")


def test_an_agent_takes_the_task_and_the_attempt_by_name() -> None:
    assert CallableAgent(lambda task: task, "f").bind(1, ABOUT)() == 1
    assert CallableAgent(lambda question, attempt: (question, attempt.id), "f").bind(1, ABOUT)() == (1, "a")
    assert CallableAgent(lambda task, *, attempt=None, tries=3: (attempt.key, tries), "f").bind(1, ABOUT)() == (
        "key",
        3,
    )
    assert CallableAgent(lambda *tasks: tasks, "f").bind(1, ABOUT)() == (1,)
    for wrong, says in (
        (lambda: 1, "has no parameter for the task"),
        (lambda attempt: 1, "has no parameter for the task"),
        (lambda task, database: 1, "takes task, database"),
        (lambda task, *, database: 1, "takes task, database"),
    ):
        with pytest.raises(LoadError, match=says):
            CallableAgent(wrong, "f")


async def test_async_agents_are_known_as_such() -> None:
    async def agent(task: int) -> int:
        return task

    class Callable:
        async def __call__(self, task: int) -> int:
            return task

    assert (
        CallableAgent(agent, "f").is_async
        and CallableAgent(Callable(), "f").is_async
        and CallableAgent(partial(agent), "f").is_async
    )
    assert not CallableAgent(lambda task: agent(task), "f").is_async  # a thread makes the coroutine, the loop awaits it
