"""`leyden serve --model`: a run is served to clients of every dialect, without rollouts."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
import requests
from forked_commands import run_command
from serving import ServerProcess

from leyden.config import Config, ConfigError, EngineConfig, to_toml
from leyden.learner.protocol import TrainerState
from leyden.local.serve import find_served
from leyden.models.source import BUNDLED
from leyden.runs.checkpoint_files import write_checksums
from leyden.runs.run_checkpoints import find_checkpoint
from leyden.server.control.keys import KeyKind


def make_run(home: Path, best_step: int) -> Path:
    """Write the folder of a run with two checkpoints, both of the bundled model."""
    run = home / "mine"
    run.mkdir(parents=True)
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", engine=EngineConfig(slots=3))
    (run / "config.toml").write_text(to_toml(config))
    for step in (2, 4):
        shutil.copytree(str(BUNDLED["spark"]), run / f"step-{step}")
        state = msgspec.json.encode(TrainerState(step, best_step=best_step, best_reward=0.5))
        (run / f"step-{step}" / "state.json").write_bytes(state)
        write_checksums(run / f"step-{step}")
    return run


def test_the_best_checkpoint_of_a_run_is_found_by_its_folder_or_its_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", best_step=2)
    for model in (str(run), "mine"):
        (found,) = find_served(model, tmp_path / "runs")
        assert (found.name, found.source.folder, found.config.engine.slots) == ("mine", run / "step-2", 3)
    assert find_served("mine", tmp_path / "runs", "last")[0].source.folder == run / "step-4"
    assert find_served(str(run / "step-4"), tmp_path)[0].name == "step-4"
    with pytest.raises(ConfigError, match="best, last, or the number of a step"):
        find_served("mine", tmp_path / "runs", "newest")
    run.rename(tmp_path / "runs" / "spark")
    assert find_served("spark", tmp_path / "runs")[0].source.folder == Path(str(BUNDLED["spark"]))


def test_nothing_that_a_served_folder_names_is_run_or_called(tmp_path: Path) -> None:
    run = make_run(tmp_path / "elsewhere", best_step=2)
    engine = EngineConfig(
        kind="vllm", slots=3, url="http://far.example", vllm_python="/evil", vllm_arguments=("--load-format=evil",)
    )
    hostile = Config(run="mine", agent="evil", tasks="t", model="/evil", base="/evil", engine=engine)
    (run / "config.toml").write_text(to_toml(hostile))
    (found,) = find_served(str(run), tmp_path)
    assert found.config == Config(run="serve", agent="", tasks="", engine=EngineConfig(kind="vllm", slots=3))
    assert (found.name, found.source.folder) == ("mine", run / "step-2")
    (mine,) = find_served(str(run), tmp_path, vllm_python="/my/python")
    assert mine.config.engine.vllm_python == "/my/python"


def test_a_model_that_is_not_found_is_answered_with_names_that_are_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_run(tmp_path / "runs", best_step=2)
    (tmp_path / "small.toml").write_text('agent = "a.py:solve"\ntasks = "t.jsonl"\n')
    (tmp_path / "a.py").write_text("def solve(task): ...\n")
    (tmp_path / "t.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    evaluate = ("eval", "small.toml", "held_out=1", "--model")
    for command, said in (
        ((*evaluate, "mine", "--step", "7"), "runs/mine has no checkpoint of step 7; there are 2, 4"),
        ((*evaluate, "runs/mine", "--step", "7"), "runs/mine has no checkpoint of step 7; there are 2, 4"),
        ((*evaluate, "runs/mine/step-7"), "runs/mine/step-7; there are step-2, step-4"),
        ((*evaluate, "mien"), "nor a run, and cannot be downloaded from Hugging Face (did you mean 'mine'?)"),
        (("serve", "--port", "0", "--model", "mien"), "(did you mean 'mine'?)"),
        (("train", "small.toml", "model=Spark"), "(did you mean 'spark'?)"),
    ):
        done = run_command(*command, cwd=tmp_path)
        assert done.returncode == 1 and said in done.stderr, done.stderr
    assert find_checkpoint("mine", tmp_path / "runs") == str(tmp_path / "runs" / "mine" / "step-2")
    assert find_checkpoint("other/model", tmp_path / "runs") is None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    make_run(folder, best_step=4)
    with ServerProcess(folder, "--model", str(folder / "mine")) as server:
        yield server


QUESTION = [{"role": "user", "content": "What is 2 plus 3?"}]


def test_every_dialect_is_answered_with_any_key_on_this_machine(served: ServerProcess) -> None:
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="anything")
    chat = client.chat.completions.create(model="mine", messages=QUESTION, max_tokens=8, temperature=0)
    assert chat.usage is not None and 0 < chat.usage.completion_tokens <= 8
    streamed = client.chat.completions.create(model="mine", messages=QUESTION, max_tokens=8, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == (chat.choices[0].message.content or "")  # greedy: the client's sampling is used
    first = client.responses.create(model="mine", input="Say 5.", max_output_tokens=8)
    second = client.responses.create(model="mine", input="And 6?", max_output_tokens=8, previous_response_id=first.id)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.completions.create(model="mine", prompt="2 + 3 =", max_tokens=4).choices[0].text is not None
    claude = anthropic.Anthropic(base_url=served.url, api_key="anything")
    message = claude.messages.create(model="mine", messages=QUESTION, max_tokens=8)
    assert 0 < message.usage.output_tokens <= 8
    assert [model.id for model in client.models.list()] == ["mine"]


def test_the_same_question_gets_different_answers_unless_a_seed_is_given(served: ServerProcess) -> None:
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="anything")

    def ask(**more: Any) -> str:
        sampled = client.completions.create(model="mine", prompt="Tell", max_tokens=16, temperature=1.5, **more)
        return sampled.choices[0].text

    assert len({ask() for _ in range(4)}) > 1
    assert len({ask(seed=7) for _ in range(4)}) == 1


def test_only_model_calls_need_no_key(served: ServerProcess) -> None:
    assert requests.get(served.url + "/api/runs", timeout=30).status_code == 401
    assert requests.get(served.url + "/", timeout=30).status_code == 401
    body = {"model": "mine", "messages": QUESTION, "max_tokens": 4}
    chat = served.url + "/v1/chat/completions"
    elsewhere = {"host": "leyden.example.org"}  # as a web page of another site would reach this machine
    assert requests.post(chat, json=body, timeout=30).status_code == 200
    assert requests.post(chat, json=body, headers=elsewhere, timeout=30).status_code == 401
    key = Path(served.running.admin_key_file).with_name("client.key").read_text().strip()
    bearer = {"authorization": f"Bearer {key}"}
    assert requests.post(chat, json=body, headers={**elsewhere, **bearer}, timeout=30).status_code == 200
    assert requests.get(served.url + "/api/runs", headers=bearer, timeout=30).status_code == 403
    assert requests.get(served.url + "/healthz", timeout=30).ok


def test_its_engine_is_on_the_page_of_a_server_of_the_folder_and_in_top(served: ServerProcess) -> None:
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="anything")
    client.chat.completions.create(model="mine", messages=QUESTION, max_tokens=8)

    def seen(fleet: dict[str, Any]) -> bool:
        """The server writes it within a second."""
        (engine,) = fleet["engines"]
        known = (engine["run"], engine["policy"], engine["location"], engine["slots"], engine["failed"])
        assert known == ("mine.serve", "mine", "embedded", 3, 0)
        return bool(engine["calls"] >= 1 and engine["tokens"] >= 1)

    with ServerProcess(served.home) as server:
        headers = {"authorization": f"Bearer {server.key(KeyKind.VIEWER)}"}
        while not seen(requests.get(server.url + "/api/fleet", headers=headers, timeout=30).json()):
            time.sleep(0.1)
    top = run_command("top", "--once", "--home", str(served.home), cwd=served.home)
    assert re.search(r"engine mine.serve: mine \(embedded\): \d of 3 slots, 0 waiting, \d+ calls?", top.stdout), top
    served.stop()
    assert not (served.home / "mine.serve" / "engines.json").exists()  # nothing is left that looks alive
