"""The peer half of the store benchmark: Microsoft Agent Lightning 0.3.0's store server, driven over HTTP.

One lifecycle here is ten requests, each of the route and the form of body that Agent Lightning's own code sends
when its runner, its default tracer and its LLM proxy work against a remote in-memory store:

1.  `POST /v1/agl/queues/rollouts/enqueue` creates the rollout (`LightningStoreClient.enqueue_rollout`);
2.  `POST /v1/agl/queues/rollouts/dequeue` leases the first one queued (`LitAgentRunner.iter`);
3.  three times `POST /v1/agl/spans/next` then `POST /v1/traces`: the LLM proxy takes a sequence id when a
    model call comes in (`RolloutAttemptMiddleware`) and exports the call afterwards as OTLP protobuf
    (`LightningSpanExporter`). The span that holds the tokens is LiteLLM's `raw_gen_ai_request`: the prompt's
    ids and the choices, with the completion's ids and logprobs, are Python literals in string attributes, which
    is the form that `LlmProxyTraceToTriplet` reads back (logprobs are there with the proxy's `logprobs` callback);
4.  `POST /v1/traces` with the agent's own spans, as the default tracer flushes them in one batch when the
    rollout ends: two ordinary ones (`operation` and `emit_message`) and the reward (`emit_reward`);
5.  `POST /v1/agl/rollouts/{rollout}/attempts/{attempt}` ends the attempt, and with it the rollout.

Where Agent Lightning offers a choice the cheaper one for its server is taken. Left out are requests and spans
that it sends in practice and that this lifecycle does not ask for: the seven other spans that LiteLLM exports
with a model call, the tracer's second copy of each model call, the session span, the read of the resources
before a rollout, the heartbeats of the workers, and the two further requests that a reward takes when the agent
returns it instead of emitting it.

The session given to these functions must not cap its connections below the number of workers
(`aiohttp.TCPConnector(limit=0)`): every real worker is a process with its own connections.
"""

import ast
import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

INSTALL: list[str] = [
    "agentlightning==0.3.0",
    "aiologic==0.16.0",
    "anyio==4.12.0",
    "fastapi==0.127.0",
    "httptools==0.7.1",
    "litellm[proxy]==1.80.11",
    "opentelemetry-exporter-otlp==1.39.1",
    "opentelemetry-sdk==1.39.1",
    "protobuf==6.33.2",
    "pydantic==2.12.5",
    "starlette==0.50.0",
]
"""Arguments of `pip install`: what its server runs on, as of its release on 2025-12-24.

Agent Lightning pins nothing, and with what is newest in November 2026 its server is slower and its own
exporters no longer reach a store. It does not ask for httptools, which uvicorn parses requests with if it can.
"""

PROMPT_TOKENS = 200
COMPLETION_TOKENS = 300
MODEL_CALLS = 3
SPANS = MODEL_CALLS + 3
"""Spans that one lifecycle leaves in the store."""

READY_SECONDS = 120.0
POLL_SECONDS = 0.05
DEQUEUE_SECONDS = 60.0
CHECK_SAMPLES = 20


def command(python: str, port: int) -> list[str]:
    """Return the command that starts the server, where `python` is the interpreter of the environment of INSTALL.

    It is `agl store` with its in-memory store in one process, which is the most that store supports: the
    server refuses `--n-workers` above 1 for it. The variable only keeps LiteLLM, which the package imports,
    from asking the network for a table of prices at start.
    """
    return [
        "env",
        "LITELLM_LOCAL_MODEL_COST_MAP=True",
        python,
        "-m",
        "agentlightning.cli.store",
        "--backend",
        "memory",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "WARNING",
    ]


async def ready(session: aiohttp.ClientSession, base: str) -> None:
    """Waits until the server at `base` (`http://host:port`) answers."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            async with session.get(f"{base}/v1/agl/health") as response:
                if response.status == 200:
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer from {base} within {READY_SECONDS:.0f} s")
        await asyncio.sleep(POLL_SECONDS)


async def lifecycle(session: aiohttp.ClientSession, base: str, worker: str, number: int) -> None:
    """Takes one rollout from its creation to its end. `number` tells this task from the others."""
    agl = f"{base}/v1/agl"
    task: dict[str, Any] = dict.fromkeys(("input", "mode", "resources_id", "config", "metadata"))
    task |= {"input": {"question": f"task {number}"}, "mode": "train"}
    queued = await _post(session, f"{agl}/queues/rollouts/enqueue", {"rollouts": [task]}, status=201)
    _expect(len(queued) == 1 and queued[0]["status"] == "queuing", "enqueue", queued)

    rollout, attempt = await _dequeue(session, agl, worker)
    for call in range(1, MODEL_CALLS + 1):
        issued = await _post(session, f"{agl}/spans/next", {"rollout_id": rollout, "attempt_id": attempt})
        _expect(issued == {"sequence_id": call}, "sequence id", issued)
        span = _ended(MODEL_CALL, os.urandom(16))
        span.attributes.append(_key_value("llm.hosted_vllm.id", f"chatcmpl-{os.urandom(16).hex()}"))
        await _export(session, base, _own(PROXY, rollout, attempt, call), PROXY_SCOPE, [span])

    trace = os.urandom(16)
    spans = [_ended(span, trace) for span in (OPERATION, MESSAGE, REWARD)]
    await _export(session, base, _own(TRACER, rollout, attempt), TRACER_SCOPE, spans)

    ended = await _post(session, f"{agl}/rollouts/{rollout}/attempts/{attempt}", {"status": "succeeded"})
    _expect(ended["attempt_id"] == attempt and ended["status"] == "succeeded", "end of the attempt", ended)


async def check(session: aiohttp.ClientSession, base: str, expected: int) -> None:
    """Raises unless the store holds `expected` rollouts, all succeeded, and all their spans.

    The counts are of everything; the contents are read back for a sample.
    """
    agl = f"{base}/v1/agl"
    async with session.get(f"{agl}/statistics") as response:
        response.raise_for_status()
        statistics = await response.json()
    counts = {name: statistics[f"total_{name}"] for name in ("rollouts", "attempts", "spans")}
    wanted = {"rollouts": expected, "attempts": expected, "spans": expected * SPANS}
    _expect(counts == wanted, f"counts, not {wanted}", counts)

    for offset in random.Random(0).sample(range(expected), min(CHECK_SAMPLES, expected)):
        query = {"limit": 1, "offset": offset, "status_in": ["succeeded"], "filter_logic": "and"}
        found = await _post(session, f"{agl}/rollouts/search", query)
        _expect(found["total"] == expected and len(found["items"]) == 1, "succeeded rollouts", found)
        _expect(found["items"][0]["attempt"]["status"] == "succeeded", "attempt", found)
        rollout = found["items"][0]["rollout_id"]
        query = {"rollout_id": rollout, "limit": -1, "offset": 0, "sort_by": "sequence_id", "sort_order": "asc"}
        _check_spans((await _post(session, f"{agl}/spans/search", query))["items"])


def _check_spans(spans: list[dict[str, Any]]) -> None:
    """Raises unless the spans of one rollout are those that a lifecycle sends, in order and whole."""
    names = ["raw_gen_ai_request"] * MODEL_CALLS + [
        "agentlightning.operation",
        "agentlightning.message",
        "agentlightning.annotation",
    ]
    _expect([span["name"] for span in spans] == names, "names of spans", [span["name"] for span in spans])
    _expect([span["sequence_id"] for span in spans] == list(range(1, SPANS + 1)), "sequence ids", spans)
    for span in spans[:MODEL_CALLS]:
        choice = ast.literal_eval(span["attributes"]["llm.hosted_vllm.choices"])[0]
        prompt = ast.literal_eval(span["attributes"]["llm.hosted_vllm.prompt_token_ids"])
        _expect(prompt == PROMPT_IDS and choice["token_ids"] == COMPLETION_IDS, "token ids", span)
        _expect(len(choice["logprobs"]["content"]) == COMPLETION_TOKENS, "logprobs", span)
    _expect(spans[-1]["attributes"]["agentlightning.reward.0.value"] == 1.0, "reward", spans[-1])


async def _dequeue(session: aiohttp.ClientSession, agl: str, worker: str) -> tuple[str, str]:
    """Leases the first rollout queued, polling as the runner does, and returns its id and its attempt's."""
    deadline = time.monotonic() + DEQUEUE_SECONDS
    while True:
        leased = await _post(session, f"{agl}/queues/rollouts/dequeue", {"limit": 1, "worker_id": worker})
        if leased:
            attempt = leased[0]["attempt"]
            _expect(attempt["worker_id"] == worker and attempt["status"] == "preparing", "dequeue", leased)
            return leased[0]["rollout_id"], attempt["attempt_id"]
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing to dequeue within {DEQUEUE_SECONDS:.0f} s")
        await asyncio.sleep(POLL_SECONDS)


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any], status: int = 200) -> Any:
    async with session.post(url, json=body) as response:
        reply = await response.read()
        _expect(response.status == status, f"status {response.status} from {url}", reply[:500])
    return json.loads(reply)


async def _export(
    session: aiohttp.ClientSession,
    base: str,
    resource: Resource,
    scope: InstrumentationScope,
    spans: list[Span],
) -> None:
    """Sends spans as the OTLP exporter of OpenTelemetry does by default: protobuf, not compressed."""
    batch = ResourceSpans(resource=resource, scope_spans=[ScopeSpans(scope=scope, spans=spans)])
    body = ExportTraceServiceRequest(resource_spans=[batch]).SerializeToString()
    async with session.post(f"{base}/v1/traces", data=body, headers=PROTOBUF) as response:
        reply = await response.read()
        _expect(response.status == 200 and not reply, f"status {response.status} of an export", reply[:500])


def _expect(condition: bool, what: str, reply: object) -> None:
    if not condition:
        raise RuntimeError(f"unexpected {what}: {str(reply)[:2000]}")


def _own(resource: Resource, rollout: str, attempt: str, sequence: int | None = None) -> Resource:
    """Return the resource with the attributes by which the server tells whose spans these are."""
    owned = Resource()
    owned.CopyFrom(resource)
    owned.attributes.append(_key_value("agentlightning.rollout_id", rollout))
    owned.attributes.append(_key_value("agentlightning.attempt_id", attempt))
    if sequence is not None:
        owned.attributes.append(_key_value("agentlightning.span_sequence_id", sequence))
    return owned


def _ended(span: Span, trace: bytes) -> Span:
    """Return a copy of the span that ends now, in the trace given."""
    ended = Span()
    ended.CopyFrom(span)
    ended.trace_id = trace
    ended.span_id = os.urandom(8)
    ended.end_time_unix_nano = time.time_ns()
    ended.start_time_unix_nano = ended.end_time_unix_nano - 1_000_000
    return ended


def _span(name: str, attributes: dict[str, str | int | float], ok: bool) -> Span:
    """Return what all the spans of one name share."""
    return Span(
        name=name,
        kind=Span.SPAN_KIND_INTERNAL,
        attributes=_attributes(attributes),
        status=Status(code=Status.STATUS_CODE_OK if ok else Status.STATUS_CODE_UNSET),
        flags=0x100,
    )


def _attributes(attributes: Mapping[str, str | int | float]) -> list[KeyValue]:
    return [_key_value(key, value) for key, value in attributes.items()]


def _key_value(key: str, value: str | int | float) -> KeyValue:
    if isinstance(value, str):
        encoded = AnyValue(string_value=value)
    elif isinstance(value, bool):
        encoded = AnyValue(bool_value=value)
    elif isinstance(value, int):
        encoded = AnyValue(int_value=value)
    else:
        encoded = AnyValue(double_value=value)
    return KeyValue(key=key, value=encoded)


PROTOBUF = {"Content-Type": "application/x-protobuf"}

_random = random.Random(0)
PROMPT_IDS = [_random.randrange(150_000) for _ in range(PROMPT_TOKENS)]
COMPLETION_IDS = [_random.randrange(150_000) for _ in range(COMPLETION_TOKENS)]
CHOICE = {
    "finish_reason": "stop",
    "index": 0,
    "logprobs": {
        "content": [
            {"token": " a", "bytes": [32, 97], "logprob": -_random.random(), "top_logprobs": []}
            for _ in range(COMPLETION_TOKENS)
        ],
        "refusal": None,
    },
    "message": {"content": " a" * COMPLETION_TOKENS, "role": "assistant", "tool_calls": None},
    "token_ids": COMPLETION_IDS,
    "stop_reason": None,
}
USAGE = {
    "completion_tokens": COMPLETION_TOKENS,
    "prompt_tokens": PROMPT_TOKENS,
    "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
}

MODEL_CALL = _span(
    "raw_gen_ai_request",
    {
        "llm.hosted_vllm.messages": str([{"role": "user", "content": "a question"}]),
        "llm.hosted_vllm.logprobs": 1,
        "llm.hosted_vllm.extra_body": str({"return_token_ids": True}),
        "llm.hosted_vllm.choices": str([CHOICE]),
        "llm.hosted_vllm.created": 1_766_534_400,
        "llm.hosted_vllm.model": "model",
        "llm.hosted_vllm.object": "chat.completion",
        "llm.hosted_vllm.usage": str(USAGE),
        "llm.hosted_vllm.prompt_token_ids": str(PROMPT_IDS),
    },
    ok=True,
)
OPERATION = _span(
    "agentlightning.operation",
    {"agentlightning.operation.name": "tool", "agentlightning.operation.input.x": 1},
    ok=False,
)
MESSAGE = _span("agentlightning.message", {"agentlightning.message.body": "note"}, ok=False)
REWARD = _span(
    "agentlightning.annotation",
    {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0},
    ok=True,
)

SDK = {
    "telemetry.sdk.language": "python",
    "telemetry.sdk.name": "opentelemetry",
    "telemetry.sdk.version": "1.39.1",
    "service.name": "unknown_service",
}
TRACER = Resource(attributes=_attributes(SDK))
TRACER_SCOPE = InstrumentationScope(name="agentlightning.tracer.otel")
PROXY = Resource(attributes=_attributes({**SDK, "deployment.environment": "production", "model_id": "litellm"}))
PROXY_SCOPE = InstrumentationScope(name="litellm")
