"""What holds for every request: sizes, forms, encodings, and errors that say what is wrong and where."""

import gzip
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
from serving import ServerProcess
from yarl import URL

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RolloutDetail, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Run, Task
from leyden.server.http.errors import ErrorBody

JSON = "application/json"
MSGPACK = "application/msgpack"
MEGABYTE = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that takes bodies of one megabyte."""
    with ServerProcess(tmp_path_factory.mktemp("home"), "--max-body-mb", "1") as process:
        yield process


class Reply(msgspec.Struct):
    """An answer, read."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        """The error of a refusal, which has one form everywhere."""
        assert self.headers["content-type"] == JSON
        assert set(msgspec.json.decode(self.body)) == {"error"}
        return msgspec.json.decode(self.body, type=ErrorBody).error


class Client:
    """An administrator who sends whatever a test wants."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def ask(self, method: str, path: str, data: Any = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = URL(self._url + path, encoded=True)
        async with self._session.request(
            method, url, data=data, headers=named, skip_auto_headers=("content-type", "accept-encoding")
        ) as reply:
            return Reply(reply.status, {k.lower(): v for k, v in reply.headers.items()}, await reply.read())

    async def create_run(self, data: Any, **headers: str) -> Reply:
        return await self.ask("POST", "/api/runs", data, **{"content_type": JSON, **headers})


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {server.admin_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield Client(session, server.url)


# Sizes


def run_spec(id: str, size: int) -> bytes:
    """A request to create a run, of so many bytes."""
    frame = msgspec.json.encode({"id": id, "config": ""})
    return frame.replace(b'""', b'"' + b"x" * (size - len(frame)) + b'"')


async def in_chunks(data: bytes) -> AsyncIterator[bytes]:
    """A body that does not say beforehand how long it is."""
    for start in range(0, len(data), 65_536):
        yield data[start : start + 65_536]


async def test_a_body_of_the_limit_is_taken_and_one_byte_more_is_not(client: Client) -> None:
    assert (await client.create_run(run_spec("full", MEGABYTE))).status == 200
    refusal = await client.create_run(run_spec("over", MEGABYTE + 1))
    assert (refusal.status, refusal.error.type) == (413, "too_large")
    assert "--max-body-mb" in refusal.error.message


async def test_a_body_of_unknown_length_is_held_to_the_limit(client: Client) -> None:
    assert (await client.create_run(in_chunks(run_spec("streamed", MEGABYTE)))).status == 200
    assert (await client.create_run(in_chunks(run_spec("over", 3 * MEGABYTE)))).status == 413


async def test_a_body_is_held_to_the_limit_after_unpacking(client: Client) -> None:
    bomb = gzip.compress(run_spec("bomb", 64 * MEGABYTE))
    assert len(bomb) < MEGABYTE
    assert (await client.create_run(bomb, content_encoding="gzip")).status == 413
    assert (await client.create_run(in_chunks(bomb), content_encoding="gzip")).status == 413
    assert (await client.ask("POST", "/v1/traces", bomb, content_type=JSON, content_encoding="gzip")).status == 413
    assert (await client.ask("GET", "/api/runs/bomb")).status == 404


async def test_a_refused_body_leaves_the_connection_usable(client: Client) -> None:
    for _ in range(3):
        assert (await client.create_run(run_spec("over", 2 * MEGABYTE))).status == 413
        assert (await client.ask("GET", "/healthz")).status == 200


# Encodings


@pytest.mark.parametrize(
    ("coding", "pack"), [("gzip", gzip.compress), ("GZIP", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_packed_body_is_unpacked(client: Client, coding: str, pack: Any) -> None:
    packed = pack(run_spec(f"packed-{coding}", 5000))
    assert (await client.create_run(packed, content_encoding=coding)).status == 200
    assert (await client.ask("GET", f"/api/runs/packed-{coding}")).status == 200


PACKED = gzip.compress(b'{"id": "broken"}')


@pytest.mark.parametrize(
    "data",
    [b"", b"not packed", PACKED[:-4], PACKED + b"junk", PACKED + gzip.compress(b" ")],
    ids=["empty", "not packed", "cut short", "junk behind it", "more behind it"],
)
async def test_a_packed_body_that_is_broken_is_refused(client: Client, data: bytes) -> None:
    refusal = await client.create_run(data, content_encoding="gzip")
    assert (refusal.status, refusal.error.type) == (400, "invalid_request")
    assert "compressed" in refusal.error.message


async def test_an_unknown_encoding_is_refused_with_those_that_are_known(client: Client) -> None:
    refusal = await client.create_run(b"{}", content_encoding="br")
    assert (refusal.status, refusal.error.type) == (415, "unsupported_encoding")
    assert "gzip" in refusal.error.message


# Forms


async def test_json_and_messagepack_say_the_same_both_ways(client: Client) -> None:
    spec = RunSpec("both", config={"a": [1, 2.5, None, True, "☃"]})
    as_json, as_msgpack = msgspec.json.encode(spec), msgspec.msgpack.encode(spec)
    runs = []
    for data, form in ((as_json, JSON), (as_msgpack, MSGPACK)):
        for accept in (JSON, MSGPACK):
            reply = await client.create_run(data, content_type=form, accept=accept)
            assert (reply.status, reply.headers["content-type"]) == (200, accept)
            decode = msgspec.json.decode if accept == JSON else msgspec.msgpack.decode
            runs.append(decode(reply.body, type=Run))
    assert runs[0].config == spec.config
    assert runs == [runs[0]] * 4


@pytest.mark.parametrize("accept", ["", "*/*", "text/html", "application/json, */*;q=0.1"])
async def test_an_answer_is_json_unless_the_client_accepts_messagepack(client: Client, accept: str) -> None:
    reply = await client.ask("GET", "/healthz", accept=accept)
    assert (reply.headers["content-type"], msgspec.json.decode(reply.body)) == (JSON, {"status": "ok"})


@pytest.mark.parametrize("form", [None, "application/json; charset=utf-8", "APPLICATION/JSON"])
async def test_a_body_is_json_unless_it_says_otherwise(client: Client, form: str | None) -> None:
    headers = {} if form is None else {"content_type": form}
    assert (await client.ask("POST", "/api/runs", b'{"id": "forms"}', **headers)).status == 200


@pytest.mark.parametrize("form", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "json"])
async def test_a_body_in_another_form_is_refused(client: Client, form: str) -> None:
    refusal = await client.create_run(b'{"id": "forms"}', content_type=form)
    assert (refusal.status, refusal.error.type) == (415, "unsupported_media_type")
    assert JSON in refusal.error.message and MSGPACK in refusal.error.message


async def test_integers_of_any_size_survive_in_a_task(client: Client, remote: Remote) -> None:
    wide = {"factor": 2**70 + 1, "negative": [-(2**200)], "fits": 2**63}
    await remote.create_run(RunSpec("wide"))
    await remote.enqueue("wide", GroupSpec("wide-g", Task("t", wide)))
    for accept in (JSON, MSGPACK):
        reply = await client.ask("GET", "/api/runs/wide/rollouts/wide-g.0", accept=accept)
        assert msgspec.json.decode(reply.body, type=RolloutDetail).task.input == wide
    (lease,) = await remote.lease(LeaseRequest("w", run="wide"))
    assert lease.task.input == wide
    await remote.finish("wide", lease.attempt.id, FinishRequest(Outcome(Ending.AGENT_ERROR), wide))
    assert (await remote.get_episode("wide", lease.attempt.id)).attempt.result == wide


async def test_numbers_that_json_cannot_write_are_refused_and_named(client: Client, remote: Remote) -> None:
    await remote.create_run(RunSpec("finite"))
    await remote.enqueue("finite", GroupSpec("finite-g", Task("t", None)))
    (lease,) = await remote.lease(LeaseRequest("w", run="finite"))
    path = f"/api/runs/finite/attempts/{lease.attempt.id}"
    for field, call in {
        "[0].sampling.temperature": {"id": "c", "sampling": {"temperature": float("nan")}},
        "[0].sampling.top_p": {"id": "c", "sampling": {"top_p": float("inf")}},
        "[0].started": {"id": "c", "started": float("nan")},
        "[0].logprobs[0]": {"id": "c", "completion_ids": [1], "logprobs": [-1e300]},
    }.items():
        data = msgspec.msgpack.encode([call])
        refusal = await client.ask("POST", path + "/calls", data, content_type=MSGPACK)
        assert (refusal.status, refusal.error.field) == (400, field)
    for value in (float("nan"), float("-inf")):
        data = msgspec.msgpack.encode([{"id": "r", "value": value}])
        refusal = await client.ask("POST", path + "/rewards", data, content_type=MSGPACK)
        assert (refusal.status, refusal.error.field) == (400, "[0].value")
    await remote.record_calls("finite", lease.attempt.id, [Call("c", completion_ids=(1,), logprobs=(-1e29,))])
    assert len((await remote.get_episode("finite", lease.attempt.id)).calls) == 1


@pytest.mark.parametrize(
    "input", [{None: 1}, {(1, 2): 3}, msgspec.msgpack.Ext(5, b"x")], ids=["no name", "two names", "extension"]
)
async def test_a_document_that_json_cannot_hold_is_refused(client: Client, remote: Remote, input: Any) -> None:
    await remote.create_run(RunSpec("documents"))
    data = msgspec.msgpack.encode({"id": "documents-g", "task": {"id": "t", "input": input}})
    assert (await client.ask("POST", "/api/runs/documents/groups", data, content_type=MSGPACK)).status == 400


# Errors that name what is wrong


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (b"", JSON),
        (b"", MSGPACK),
        (b"{", JSON),
        (b'{"id": "junk"} junk', JSON),
        (b'{"id": "junk"}{"id": "junk"}', JSON),
        (b"\xff\xfe", JSON),
        (b'{"id": "\xff"}', JSON),
        (b'{"id": "a", "config": "\\ud800"}', JSON),
        (b"NaN", JSON),
        (b"[" * 100_000, JSON),
        (b"\xc1", MSGPACK),
        (msgspec.msgpack.encode({"id": "junk"}) + b"\x00", MSGPACK),
        (msgspec.msgpack.encode({"id": "junk"})[:-1], MSGPACK),
        (b"\x81\xa2id\xa1\xff", MSGPACK),
        (b"\x91" * 100_000, MSGPACK),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(client: Client, data: bytes, form: str) -> None:
    refusal = await client.create_run(data, content_type=form)
    assert (refusal.status, refusal.error.type) == (400, "invalid_request")


@pytest.mark.parametrize("form", [JSON, MSGPACK])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/runs", {"id": 5}, "id"),
        ("/api/runs", {"id": "no spaces"}, "id"),
        ("/api/runs", {"id": "x" * 161}, "id"),
        ("/api/runs", {"id": "x\n"}, "id"),
        ("/api/runs", {"id": "a", "settings": {"lease_s": 0}}, "settings.lease_s"),
        ("/api/runs", {"id": "a", "settings": {"max_attempts": 1.5}}, "settings.max_attempts"),
        ("/api/runs/a/groups", {"id": "g", "task": {"id": "t", "input": 1}, "size": 0}, "size"),
        ("/api/runs/a/groups", {"id": "g", "task": {"id": "", "input": 1}}, "task.id"),
        ("/api/runs/a/metrics", [{"step": 1, "name": "a", "value": 1}, {"step": -1}], "[1].step"),
        ("/api/runs/a/attempts/b/finish", {"outcome": {"ending": "vanished"}}, "outcome.ending"),
        ("/api/lease", {"worker": "w", "wait": 301}, "wait"),
        ("/api/keys", {"kind": "attempt"}, "kind"),
    ],
)
async def test_a_wrong_field_is_named(client: Client, path: str, body: Any, field: str, form: str) -> None:
    data = msgspec.json.encode(body) if form == JSON else msgspec.msgpack.encode(body)
    refusal = await client.ask("POST", path, data, content_type=form)
    assert (refusal.status, refusal.error.type, refusal.error.field) == (400, "invalid_request", field)
    assert refusal.error.message.startswith(f"{field}: ")


@pytest.mark.parametrize("body", [{}, {"id": "a", "colour": "red"}, [], "a", None])
async def test_a_field_missing_or_unknown_is_named_in_the_message(client: Client, body: Any) -> None:
    refusal = await client.create_run(msgspec.json.encode(body))
    assert (refusal.status, refusal.error.type) == (400, "invalid_request")
    if isinstance(body, dict):
        assert ("colour" if body else "id") in refusal.error.message


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=many", "limit"),
        ("limit=", "limit"),
        ("after=-1", "after"),
        ("wait=nan", "wait"),
        ("wait=inf", "wait"),
        ("kind=%00", "kind"),
    ],
)
async def test_a_wrong_query_parameter_is_named(client: Client, query: str, field: str) -> None:
    refusal = await client.ask("GET", f"/api/runs/a/events?{query}")
    assert (refusal.status, refusal.error.field) == (400, field)


@pytest.mark.parametrize("query", ["colour=red", "after=1&Limit=3", "%ff=1", "%ff%fe", "a" * 5000])
async def test_an_unknown_query_parameter_is_refused(client: Client, query: str) -> None:
    assert (await client.ask("GET", f"/api/runs/a/events?{query}")).status == 400


# Paths and methods


@pytest.mark.parametrize(
    "path", ["/nowhere", "/api", "/api/run", "/api/runs/a/nothing", "/api//runs", "/healthz/x", "/v1"]
)
async def test_a_path_that_leads_nowhere_is_not_found(client: Client, path: str) -> None:
    reply = await client.ask("GET", path)
    assert (reply.status, reply.error.type) == (404, "not_found")
    assert path in reply.error.message


@pytest.mark.parametrize(
    "name", ["%7B%7D", "%7Brun%7D", "a%20b", "%00", "%ff", "%C3%A9", ".x", "-x", "x" * 161, "a%0A"]
)
async def test_a_path_with_what_cannot_be_an_id_is_refused(client: Client, name: str) -> None:
    refusal = await client.ask("GET", f"/api/runs/{name}")
    assert (refusal.status, refusal.error.type, refusal.error.field) == (400, "invalid_request", "run")


@pytest.mark.parametrize(
    "path", ["/api/runs/never", "/api/runs/never/events", "/api/runs/never/rollouts", "/api/runs/never/attempts/a"]
)
async def test_a_thing_that_is_not_there_is_not_found_by_name(client: Client, path: str) -> None:
    reply = await client.ask("GET", path)
    assert (reply.status, reply.error.type) == (404, "not_found")
    assert "never" in reply.error.message


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/api/runs", "GET, POST"),
        ("POST", "/api/runs/a", "DELETE, GET"),
        ("GET", "/api/lease", "POST"),
        ("OPTIONS", "/healthz", "GET"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_refused_with_those_it_takes(
    client: Client, method: str, path: str, allowed: str
) -> None:
    reply = await client.ask(method, path)
    assert (reply.status, reply.headers["allow"], reply.error.type) == (405, allowed, "method_not_allowed")


async def test_head_has_no_body(client: Client) -> None:
    reply = await client.ask("HEAD", "/healthz")
    assert (reply.status, reply.headers["allow"], reply.body) == (405, "GET", b"")


async def test_the_end_of_a_path_may_have_a_slash(client: Client) -> None:
    assert (await client.ask("GET", "/healthz/")).status == 200


async def test_a_conflict_says_what_is_in_the_way(client: Client) -> None:
    assert (await client.create_run(b'{"id": "same", "config": 1}')).status == 200
    assert (await client.create_run(b'{"id": "same", "config": 1}')).status == 200
    reply = await client.create_run(b'{"id": "same", "config": 2}')
    assert (reply.status, reply.error.type) == (409, "conflict")
    assert "config" in reply.error.message


async def test_a_call_for_a_websocket_is_answered_as_http(client: Client) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec_websocket_key": "x", "sec_websocket_version": "13"}
    assert (await client.ask("GET", "/healthz", **upgrade)).status == 200


async def test_refusals_are_counted_by_reason(client: Client) -> None:
    await client.ask("GET", "/api/runs/never")
    page = (await client.ask("GET", "/metrics")).body.decode()
    assert 'leyden_requests_refused_total{reason="not_found"}' in page
    assert 'leyden_requests_total{route="/api/runs/{run}",status="404"}' in page
