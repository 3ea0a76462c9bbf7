"""An exported model has a card that says how it was trained, and can be uploaded with it."""

import base64
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.hf_api
import pytest
import yaml
from msgspec.structs import replace

from leyden.config import Config, ConfigError
from leyden.local.model_card import base_licence, push, write_card
from leyden.runs.run_folder import stored_config

DEMO = Path(__file__).parents[2] / "results" / "demo"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "runs" / "demo"))


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    to = tmp_path / "exported"
    to.mkdir()
    write_card(run, stored_config(run), run / "step-48", to)
    return to


def test_a_card_says_what_was_trained_how_and_how_well(exported: Path) -> None:
    _, head, text = (exported / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "apache-2.0"
    assert "| base model | spark, licence apache-2.0 |" in text
    assert "| data | tasks.jsonl; held out: held_out.jsonl |" in text
    assert "advantage grpo, loss ppo_clip" in text
    rows = [json.loads(line) for line in (DEMO / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: (row["held_out/reward"], row["held_out/error"]) for row in rows if "held_out/reward" in row}
    before, after = (f"{by_step[step][0]:.3f} ± {by_step[step][1]:.3f} |" for step in (0, 48))
    assert f"| held-out tasks, step 0, before training | {before}" in text
    assert f"| held-out tasks, step 48, this model | {after}" in text
    assert "](curve.png)" in text and (exported / "curve.png").is_file()
    assert "/" not in text.replace("](", "").replace("1/", ""), "a path of the machine"


def test_the_licence_is_that_of_the_base_or_said_to_be_unknown(run: Path, tmp_path: Path) -> None:
    config: Config = replace(stored_config(run), model=str(tmp_path / "base"))
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    assert base_licence(config) == "unknown"
    (base / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# Base\n")
    assert base_licence(config) == "mit"


class Hub(ThreadingHTTPServer):
    """The part of the Hub's API that an upload uses."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, object]] = []
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._reply({"id": "me/calc", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.refuses:
            self._reply({"error": "Invalid user token"}, 401)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._reply({"url": f"{self.server.url}/me/calc"})
        elif self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            self._reply({"files": modes})
        elif "/commit/main" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._reply({"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.url}/me/calc/commit/0"})
        else:
            self._reply({"errors": [], "warnings": []})

    def _reply(self, value: object, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield running
        running.shutdown()


def test_a_model_is_uploaded_with_its_card(hub: Hub, exported: Path) -> None:
    assert push(exported, "me/calc") == f"{hub.url}/me/calc"
    assert hub.created == [{"name": "calc", "organization": "me", "visibility": "private"}]
    assert hub.files == {path.name: path.read_bytes() for path in exported.iterdir()}


def test_a_refused_upload_says_where_the_model_is_and_what_to_do(hub: Hub, exported: Path) -> None:
    hub.refuses = True
    with pytest.raises(ConfigError, match=r"--push me/calc: .*401.*the model is in .*hf auth login"):
        push(exported, "me/calc")


def test_without_a_network_an_upload_says_so_in_one_line(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        with pytest.raises(ConfigError, match=r"--push me/calc: .*refused.*the model is in .*"):
            push(exported, "me/calc")
