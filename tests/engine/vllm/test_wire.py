"""vLLM's requests and events without vLLM, and the checksums of weights."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from leyden.engine.protocol import EngineError, EngineRequest, Publication, VllmAddress
from leyden.engine.remote import connected
from leyden.engine.vllm import wire
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.launch import VllmInstallation, VllmOptions, command, environment, find_vllm
from leyden.engine.vllm.process import find_reason
from leyden.engine.vllm.publisher import merge_parts
from leyden.engine.vllm.serving import ServingOptions
from leyden.engine.weight_files import WeightFiles
from leyden.records import Sampling


def body(request: EngineRequest, sampled: tuple[int, ...] = (), room: int = 100, seeded: bool = True) -> dict:
    return json.loads(wire.body(request.after(sampled), room, seeded))


REQUEST = EngineRequest((1, 2, 3), Sampling(seed=7, top_p=0.9), (5,), 10, "session")


def test_a_continued_generation_asks_for_the_rest_with_other_noise() -> None:
    first, rest = body(REQUEST), body(REQUEST, (8, 9))
    assert first["token_ids"] == [1, 2, 3] and rest["token_ids"] == [1, 2, 3, 8, 9]
    assert first["sampling_params"]["max_tokens"] == 10 and rest["sampling_params"]["max_tokens"] == 8
    assert first["sampling_params"]["seed"] == 7 != rest["sampling_params"]["seed"]
    assert rest == body(REQUEST, (8, 9))
    assert first["sampling_params"]["stop_token_ids"] == [5] and first["sampling_params"]["top_p"] == 0.9


def test_seeds_are_sent_only_where_they_are_wanted_and_tokens_only_where_there_is_room() -> None:
    sent = body(REQUEST, room=4, seeded=False)["sampling_params"]
    assert "seed" not in sent and sent["max_tokens"] == 4


@pytest.mark.parametrize("named", [{"token_id": 3}, {"token": "token_id:3"}])
def test_both_names_of_a_token_are_understood(named: dict[str, object]) -> None:
    top = {**named, "logprob": -0.5}
    content = [{"logprob": -1.0, "token": "token_id:4", "top_logprobs": [{**named, "logprob": -9999.0}, top]}]
    event = {"choices": [{"token_ids": [4], "logprobs": {"content": content}, "finish_reason": None}]}
    (found,) = wire.events(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]")
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert wire.top(logprobs.content[0], 2) == ((3, -0.5),)


def test_the_logprobs_of_a_prompt_are_read_from_an_answer_that_is_not_streamed() -> None:
    request = replace(REQUEST, top_logprobs=2, prompt_logprobs=True)
    sent = json.loads(wire.prompt_logprobs_body(request))
    assert sent["stream"] is False and sent["sampling_params"]["prompt_logprobs"] == 2
    second = {"2": {"logprob": -3.0, "rank": 9}, "7": {"logprob": -0.5}, "8": {"logprob": -1.0}}
    third = {"3": {"logprob": -0.1}, "4": {"logprob": -9999.0}}
    answer = {"choices": [{"token_ids": [9], "finish_reason": "length"}], "prompt_logprobs": [None, second, third]}
    (event,) = wire.events(json.dumps(answer).encode())
    wanted = (-3.0, -0.1), (((7, -0.5), (8, -1.0)), ((3, -0.1),))
    assert wire.prompt_logprobs(event, (1, 2, 3), 2) == wanted
    assert wire.prompt_logprobs(event, (1, 2, 3), 0) == (wanted[0], ())
    with pytest.raises(EngineError, match="logprobs of the prompt"):
        wire.prompt_logprobs(event, (1, 5, 3), 2)
    with pytest.raises(EngineError, match="logprobs of the prompt"):
        wire.prompt_logprobs(event, (1, 2, 3, 4), 2)


def test_an_error_event_is_raised_in_one_line() -> None:
    with pytest.raises(EngineError, match="vLLM: too many tokens"):
        list(wire.events(b'data: {"error": {"message": "too many\\n tokens", "code": 400}}\n\n'))
    assert wire.error_message(b"<html>no") == "<html>no"
    assert wire.error_message(b'{"detail": "missing"}') == "missing"


def test_whitespace_is_bounded_by_separators() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    white = {"x-guidance": {"whitespace_pattern": r"( |\n[ \t]{0,20})?"}}
    request = EngineRequest((1,), Sampling(), (5,), 10, "session", grammar=f"start: %json {json.dumps(schema | white)}")
    grammar = body(request)["sampling_params"]["structured_outputs"]["grammar"]
    assert "whitespace_pattern" not in grammar
    for text, is_whole in ((b'{"a": 1,\n  "b":2', True), (b'{"a":1,   "b"', False), (b'{"a":1    ,', False)):
        taken = LLMatcher(LLTokenizer("byte"), grammar).try_consume_tokens(list(text))
        assert (taken == len(text)) == is_whole


def test_a_continued_request_has_a_grammar_and_penalties_that_know_its_tokens() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    request = EngineRequest((1,), sampling, (5,), 10, "session", grammar="start: /a+b/")
    assert "logit_bias" not in body(request)["sampling_params"]
    sent = body(request, sampled=(97, 97, 98))["sampling_params"]
    assert sent["logit_bias"] == {"97": -1.0, "98": -0.75}
    grammar = sent["structured_outputs"]["grammar"]
    assert grammar == "start: /a+b/\n// sampled: 97 97 98"
    assert LLMatcher(LLTokenizer("byte"), grammar).try_consume_tokens(list(b"aab")) == 3  # it is a comment


def test_a_checksum_sees_every_element_and_its_position() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.randn(37, 11, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert checksum(tensor) == checksum(tensor.clone())
        changed, swapped, zero = tensor.clone(), tensor.clone(), tensor.clone()
        changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(9.0, dtype=dtype))
        swapped[[0, 1]] = swapped[[1, 0]]
        assert len({checksum(tensor), checksum(changed), checksum(swapped), checksum(tensor[:-1])}) == 4
        zero[0, 0] = 0.0
        negative = zero.clone()
        negative[0, 0] = -0.0
        assert checksum(zero) == checksum(negative)
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))


def test_the_checksums_of_the_parts_of_workers_add_up_to_those_of_whole_tensors() -> None:
    matrix, bias, norm = torch.randn(6, 8, dtype=torch.float64), torch.randn(6), torch.ones(4)

    def parts(rank: int) -> dict[str, list[object]]:
        rows, columns = slice(3 * rank, 3 * rank + 3), slice(4 * rank, 4 * rank + 4)
        return {
            "rows": ["float64", checksum(matrix[rows], row=3 * rank), False],
            "columns": ["float64", checksum(matrix[:, columns], column=4 * rank, width=8), False],
            "bias": ["float32", checksum(bias[rows], column=3 * rank), False],
            "norm": ["float32", checksum(norm), True],
        }

    whole = ("float64", checksum(matrix))
    assert merge_parts([parts(0), parts(1)]) == {
        "rows": whole,
        "columns": whole,
        "bias": ("float32", checksum(bias)),
        "norm": ("float32", checksum(norm)),
    }
    with pytest.raises(EngineError, match="the workers of vLLM have different weights of norm"):
        merge_parts([parts(0), {**parts(1), "norm": ["float32", 5, True]}])


def test_the_command_follows_the_version_and_the_transfer() -> None:
    old, new = VllmInstallation("0.25.1", False), VllmInstallation("0.32.0", True)
    files, ipc = VllmOptions(Path("/m")), VllmOptions(Path("/m"), transfer="ipc", arguments=("--seed", "1"))
    path = Path("/s")
    assert "--enable-scale-out" not in command(files, old, path)
    assert "--enable-scale-out" in command(files, new, path)
    assert "--weight-transfer-config" not in command(files, old, path)
    assert command(ipc, old, path)[-4:] == ['{"backend": "ipc"}', "--enable-sleep-mode", "--seed", "1"]
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment(files)
    assert environment(ipc)["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert "NCCL_SOCKET_IFNAME" not in environment(files)
    assert environment(VllmOptions(Path("/m"), transfer="nccl"), "eth1")["NCCL_SOCKET_IFNAME"] == "eth1"


def test_the_reason_of_a_crash_is_the_last_error_of_the_log() -> None:
    log = "starting\nValueError: first\nValueError: no such model\nlook there\n"
    assert find_reason(log) == "ValueError: no such model | look there"
    log += "Traceback\nRuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    assert find_reason(log) == "ValueError: no such model | look there | Traceback"
    assert find_reason("a\nb\nc\nd\n") == "b | c | d"
    assert find_reason("") == "its log is empty"


def test_an_interpreter_that_has_no_vllm_is_known(tmp_path: Path) -> None:
    assert find_vllm(str(tmp_path / "python")) is None


async def test_the_time_of_a_publication_does_not_include_the_optimiser_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("leyden.engine.vllm.backend.time", clock)

    class CurrentModel:
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(())

        def adapter(self) -> None:
            return None

    async def deliver() -> int:
        clock.now += 3.0
        return 12

    options, url = VllmOptions(tmp_path), "unix:/nowhere.sock"
    backend = VllmBackend(
        options,
        tmp_path / "log",
        lambda: (),
        ServingOptions(context_length=64, vocab_size=64, concurrency=1, url=url),
        files=WeightFiles(),
    )
    monkeypatch.setattr(backend, "_deliver", deliver)
    async with backend.changing_weights(1):
        clock.now += 100.0
    assert await backend.publish(CurrentModel(), 1) == Publication(seconds=3.0, transferred_bytes=12)
    await backend.stop()


async def test_a_server_process_reaches_vllm_by_its_address_until_the_trainer_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("leyden.engine.vllm.http.RESTART_LIMIT_S", 0.0)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    async with connected(VllmAddress("/s", 1024, 512, 32, version=4), reader, writer) as (engine, lost):
        assert isinstance(engine, VllmEngine)
        assert (engine.context_length, engine.vocab_size, engine.version) == (1024, 512, 4)
        with pytest.raises(EngineError, match="the connection to vLLM is lost"):
            [chunk async for chunk in engine.generate(REQUEST)]
        assert engine._session is not None and not engine._session.closed
        assert not lost.done()
        ours.close()
        await lost
        writer.close()
    assert engine._session.closed
