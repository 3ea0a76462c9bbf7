"""The description and the server agree: whatever the description allows, and much that it does not, gets an answer
that it describes, and never a failure.
"""

import functools
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import one_of
from randomness import examples
from serving import ServerProcess

from leyden.server.control.openapi import openapi_document, openapi_path
from leyden.server.control.routes import ROUTES
from leyden.server.http.content import JSON, MSGPACK
from leyden.server.http.responses import Raw

if TYPE_CHECKING:
    import schemathesis

_TYPED = [route for route in ROUTES if Raw not in (route.body, route.returns)]
_ROLLOUTS = 4


@functools.cache
def described() -> Any:
    """What is described, as Schemathesis reads it; made by the first test, since it takes seconds."""
    import schemathesis

    @schemathesis.serializer(MSGPACK)
    def to_msgpack(context: Any, value: Any) -> Any:
        try:
            return msgspec.msgpack.encode(value)
        except (OverflowError, TypeError):
            return b"\xc1"  # what MessagePack cannot write; nor is this MessagePack

    @schemathesis.deserializer(MSGPACK)
    def from_msgpack(context: Any, response: Any) -> Any:
        return msgspec.msgpack.decode(response.content)

    schema = schemathesis.openapi.from_dict(openapi_document(_TYPED))  # raw content has no schema to generate from
    schema.config.generation.with_security_parameters = False  # the admin's key: what keys may do is tested elsewhere
    return schema


def _name(operation: Any) -> str:
    return f"{operation.method}-{operation.definition.raw['operationId']}".lower()


# What a call, or a reward, says where nothing in the store speaks against it.
_SOUND: dict[str, dict[str, Any]] = {
    "record_calls": {
        "parent": None,
        "retry_of": None,
        "kept_ids": 0,
        "kept_messages": 0,
        "logprobs": None,
        "versions": [],
    },
    "record_rewards": {"kind": "step", "call": None, "span": None},
}


def aim(case: "schemathesis.Case") -> None:
    """Turn most cases to what is really there, made for the operation at hand; half of the records become sound."""
    chance = crc32(repr((case.path_parameters, case.query, case.body)).encode(errors="replace"))
    name, index = _name(case.operation), chance % _ROLLOUTS
    real = {
        "run": f"run-{name}",
        "group": name,
        "rollout": f"{name}.{index}",
        "attempt": f"{name}.{index}.1",
        "worker": "w",
        "policy": "p",
    }
    if case.path_parameters and chance >> 8 & 3:
        case.path_parameters = {parameter: real[parameter] for parameter in case.path_parameters}
    sound = _SOUND.get(case.operation.definition.raw["operationId"])
    if sound and isinstance(case.body, list) and chance >> 10 & 1:
        case.body = [{**item, **sound, "id": f"{chance}"} if isinstance(item, dict) else item for item in case.body]
    for part in (case.query, case.body):
        hurry(part)


def hurry(part: Any) -> None:
    """Wait for nothing, and queue no thousands."""
    if isinstance(part, dict):
        for name, most in (("wait", 0.01), ("size", 20)):
            if isinstance(part.get(name), int | float) and part[name] > most:
                part[name] = most


@functools.cache
def make_work(url: str, key: str, name: str) -> None:
    """A run with a group whose rollouts are finished, running with a call and a reward, running, and queued."""

    def post(path: str, body: Any) -> Any:
        reply = requests.post(url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=30)
        reply.raise_for_status()
        return reply.json()

    run = f"/api/runs/run-{name}"
    post("/api/runs", {"id": f"run-{name}", "settings": {"lease_s": 3600}, "config": {"model": "spark"}})
    post(run + "/groups", {"id": name, "task": {"id": "t", "input": {"wide": 2**70}}, "size": _ROLLOUTS})
    post(run + "/metrics", [{"step": 1, "name": "loss", "value": 0.5}])
    post(run + "/versions", {"policy": "policy", "number": 1})
    leases = post("/api/lease", {"worker": "w", "count": _ROLLOUTS - 1, "run": f"run-{name}"})
    call = {"id": "c", "prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5], "versions": [[1, 1]]}
    for lease in leases[:2]:
        attempt = f"{run}/attempts/{lease['attempt']['id']}"
        post(attempt + "/calls", [call])
        post(attempt + "/rewards", [{"id": "r", "value": 1.0}])
    credit = {"attempt": leases[0]["attempt"]["id"], "call": "c", "value": 1.0, "advantage": 0.5, "tokens": 1}
    post(run + "/credits", {"step": 1, "calls": [credit]})
    post(f"{run}/attempts/{leases[0]['attempt']['id']}/finish", {"outcome": {"ending": "succeeded"}, "result": [1]})


@pytest.mark.parametrize("route", _TYPED, ids=lambda route: f"{route.method} {openapi_path(route)}")
def test_every_answer_is_as_described_and_none_is_a_failure(route: Any, server: ServerProcess) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as conformance

    checks = [
        not_a_server_error,
        conformance.status_code_conformance,
        conformance.content_type_conformance,
        conformance.response_schema_conformance,
    ]
    operation = described()[openapi_path(route)][route.method]
    make_work(server.url, server.admin_key, _name(operation))

    @settings(
        max_examples=examples(40, share=8),
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=one_of(*(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)))
    def check(case: schemathesis.Case) -> None:
        aim(case)
        accepted = MSGPACK if case.media_type == MSGPACK else JSON
        headers = {"authorization": f"Bearer {server.admin_key}", "accept": accepted}
        reply = case.call_and_validate(base_url=server.url, headers=headers, checks=checks, timeout=30)
        if reply.status_code == 200 and "/attempts/" in case.path:  # what was taken can be read back
            attempt = "/api/runs/{run}/attempts/{attempt}".format(**case.path_parameters)
            assert requests.get(server.url + attempt, headers=headers, timeout=30).status_code == 200

    check()


def test_the_server_describes_every_route_that_it_serves(server: ServerProcess) -> None:
    described = requests.get(f"{server.url}/openapi.json", timeout=30).json()
    assert described == msgspec.json.decode(msgspec.json.encode(openapi_document(ROUTES)))
    served = {(route.method.lower(), openapi_path(route)) for route in ROUTES}
    assert {(method, path) for path, methods in described["paths"].items() for method in methods} == served
    assert {"/openapi.json", "/v1/traces", "/v1/chat/completions", "/role/{role}/v1/messages"} <= set(
        described["paths"]
    )


def test_every_operation_has_a_unique_id_and_a_summary() -> None:
    operations = [op for methods in openapi_document(ROUTES)["paths"].values() for op in methods.values()]
    assert len(operations) == len(ROUTES)
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"].endswith(".") for operation in operations)
