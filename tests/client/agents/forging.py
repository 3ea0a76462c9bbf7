"""An agent that writes to its host's channel to the worker what no agent may say."""

import gc
from typing import Any

from leyden.api.wire import FinishRequest
from leyden.client.host_protocol import CodeReturned, MessagePipe, StepReward
from leyden.client.tracing.context import current_attempt
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Reward, RewardKind


def forge(task: dict[str, Any]) -> str:
    (pipe,) = [found for found in gc.get_objects() if isinstance(found, MessagePipe)]
    attempt = current_attempt()
    assert attempt is not None
    match task["do"]:
        case "final":
            pipe.send(StepReward(attempt, Reward("forged", 1e6, RewardKind.FINAL, source="reward")))
            pipe.send(StepReward(attempt, Reward("forged-2", 1e6, RewardKind.AUTOMATIC, source="reward")))
            pipe.send(StepReward(attempt, Reward("given", 0.5, RewardKind.STEP, source="reward")))
        case "stranger":
            pipe.send(CodeReturned("other.0.1", FinishRequest(Outcome(Ending.AGENT_ERROR, "forged"))))
            pipe.send(StepReward("other.0.1", Reward("forged-3", 1e6, RewardKind.STEP)))
        case "free":
            pipe.send(CodeReturned(attempt, FinishRequest(Outcome(Ending.LOST, "forged"), retry=Retry.FREE)))
        case "huge":
            pipe._socket.sendall((200 << 20).to_bytes(4, "big"))
        case "noise":
            pipe._socket.sendall((9).to_bytes(4, "big") + b'"\xff\xff\xff"}{[')
    return "done"


def quarter(task: dict[str, Any], result: Any) -> float:
    return 0.25
