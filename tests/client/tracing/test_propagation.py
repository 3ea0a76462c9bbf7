"""Identity goes with every client, thread and task to our server, and with none to another."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from worker_harness import WorkerHarness

from leyden.records import trace_id


@pytest.mark.parametrize("rollouts", [48, pytest.param(200, marks=pytest.mark.slow)])
async def test_rollouts_in_one_process_with_every_client_at_once_land_on_their_own_attempts(
    harness: WorkerHarness, rollouts: int
) -> None:
    await harness.open()
    for n in range(rollouts):
        await harness.queue(f"g{n}", {"n": n, "of": rollouts})
    with harness.worker("clients.py:solve", reward="scores.py:all_said", concurrency=rollouts):
        for n in range(rollouts):
            (episode,) = await harness.episodes(f"g{n}", timeout_s=120)
            assert [call.response["content"] for call in episode.calls] == [f"{n}"] * 5, episode.attempt.outcome
            assert episode.final_reward(0.0) == 1.0


async def test_a_trace_started_by_a_framework_still_belongs_to_the_attempt(harness: WorkerHarness) -> None:
    await harness.open()
    for n in range(4):
        await harness.queue(f"g{n}", {"n": n})
    with harness.worker("clients.py:solve_rooted"):
        for n in range(4):
            episode = await harness.episode(f"g{n}")
            (call,), (span,) = episode.calls, episode.spans
            assert (call.response["content"], call.span) == (f"{n}", span.span_id)
            assert span.trace_id != trace_id(episode.attempt.id)


async def test_a_call_without_a_known_context_is_refused_and_counted(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("lonely", {"n": 1, "lonely": True})
    with harness.worker("asking.py:solve"):
        episode = await harness.episode("lonely")
    assert episode.attempt.outcome and "403" in episode.attempt.outcome.message and not episode.calls
    assert (
        'leyden_requests_refused_total{reason="no_context"} 1.0' in harness.server.service.telemetry.render().decode()
    )


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """Another server, which says what it was told."""
    with HTTPServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


async def test_the_context_is_sent_to_processes_and_not_to_other_servers(
    harness: WorkerHarness, elsewhere: str
) -> None:
    await harness.open()
    await harness.queue("g", {"url": elsewhere})
    with harness.worker("clients.py:tell"):
        episode = await harness.episode("g")
    told = episode.attempt.result
    assert told is not None, episode.attempt.outcome
    assert len(told["told"]) == 4
    for headers in told["told"]:
        assert headers["host"] and not {"traceparent", "baggage"} & headers.keys()
    process = told["process"].splitlines()
    assert f"BAGGAGE=leyden.attempt={episode.attempt.id}" in process
    assert any(line.startswith("PATH=") for line in process)
    assert f"TRACEPARENT=00-{trace_id(episode.attempt.id)}-" in told["own"] and "BAGGAGE=mine=1\n" in told["own"]
