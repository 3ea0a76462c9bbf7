"""Calls of strict tools are checked beside the server, within limits."""

import time
from typing import Any

from modelserving import eventually

from leyden.server.gateway.answers import strict_checks
from leyden.server.gateway.answers.strict_checks import StrictChecks

SCHEMA = {"type": "object", "required": ["a"]}
PARTS: dict[str, Any] = {f"p{at}": {"anyOf": [{"$ref": f"#/$defs/p{at + 1}"}] * 2} for at in range(60)}
ENDLESS = {"$defs": {**PARTS, "p60": False}, "$ref": "#/$defs/p0"}


async def test_calls_are_checked_and_counted_in_another_process() -> None:
    checks = StrictChecks()
    used = time.process_time()
    checks.add("s", [('{"a": 1}', SCHEMA), ("{}", SCHEMA), ("{}", ENDLESS)])
    await eventually(lambda: checks.counts == {"valid": 1, "invalid": 1, "unchecked": 1})
    assert time.process_time() - used < 5
    process = checks._process
    assert process is not None
    process.kill()
    await process.wait()
    checks.add("s", [("{}", SCHEMA)])  # the process is gone
    await eventually(lambda: checks.counts["unchecked"] == 2)
    checks.add("s", [("{}", SCHEMA)])  # and is started again
    await eventually(lambda: checks.counts["invalid"] == 2)
    await checks.close()


async def test_very_many_calls_of_an_answer_are_checked() -> None:
    checks = StrictChecks()
    checks.add("s", [("{}", True)] * 12_000)
    await eventually(lambda: checks.counts["valid"] > 100 and checks.counts.total() == 12_000)
    await checks.close()


async def test_what_waits_for_too_many_others_is_not_checked() -> None:
    checks = StrictChecks()
    for _ in range(strict_checks._MAX_OF_SESSION + 2):
        checks.add("s", [("{}", SCHEMA)])
    assert checks.counts["unchecked"] == 2
    checks.add("other", [("{}", SCHEMA)])
    assert checks.counts["unchecked"] == 2
    await eventually(lambda: checks.counts["invalid"] == strict_checks._MAX_OF_SESSION + 1)
    await checks.close()
