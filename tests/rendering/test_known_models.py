"""A model and its own checkpoints are rendered alike, whatever the folder is called."""

from pathlib import Path
from typing import Any

import pytest
from gpt_oss_files import FOLDER_VARIABLE, VOCABULARY, vocabulary
from model_families import DECIDED, FAMILIES, MESSAGES, TEMPLATES, THINKING, template_of, write_model
from renderers import GLM45Renderer, Qwen3Renderer, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from smallpolicy import small_policy

from leyden.config import CheckpointConfig
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.protocol import TrainerState
from leyden.learner.snapshot import Snapshot
from leyden.models.source import ModelSource
from leyden.records import DEFAULT_POLICY
from leyden.rendering.factory import renderer_for
from leyden.rendering.known_models import find_known_model
from leyden.rendering.tokenizer import RENDERER_FILE, Tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_and_its_checkpoint_are_rendered_alike(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "gpt-oss":  # its renderer downloads its vocabulary otherwise
        (tmp_path / VOCABULARY).write_bytes(vocabulary())
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    model = THINKING.get(family, FAMILIES[family])
    template = template_of(family)
    source = write_model(tmp_path / "model", model, template)
    snapshot = Snapshot.of(small_policy(), TrainerState(step=1), moments=True)
    checkpoint = Checkpoints(tmp_path / "run", DEFAULT_POLICY, source, CheckpointConfig()).write(snapshot)
    source_of_next = ModelSource(str(checkpoint), checkpoint)
    next_one = Checkpoints(tmp_path / "next", DEFAULT_POLICY, source_of_next, CheckpointConfig())
    later = next_one.write(snapshot)  # of a run that started from the checkpoint
    original = renderer_for(Tokenizer.load(source.folder, source.name))
    prompt = original.render_ids(MESSAGES, add_generation_prompt=True)
    answer = [*Tokenizer.load(source.folder).encode("Ten."), original.get_stop_token_ids()[0]]
    following: list[Any] = [{"role": "user", "content": "Thanks."}]
    for folder in (checkpoint, later):
        again = renderer_for(Tokenizer.load(folder, str(folder)))
        assert type(again) is type(original)
        assert again.render_ids(MESSAGES, add_generation_prompt=True) == prompt
        bridged, expected = (each.bridge_to_next_turn(prompt, answer, following) for each in (again, original))
        assert (bridged and bridged.token_ids) == (expected and expected.token_ids)
        assert again.parse_response(answer).content == original.parse_response(answer).content


@pytest.mark.parametrize("family", DECIDED)
def test_a_folder_of_any_name_has_the_renderer_that_writes_its_template(family: str, tmp_path: Path) -> None:
    model = THINKING.get(family, FAMILIES[family])
    source = write_model(tmp_path / "model", model, (TEMPLATES / f"{family}.jinja").read_text())
    known, folder = (Tokenizer.load(source.folder, name) for name in (model, "runs/mine/step-100"))
    assert MODEL_RENDERER_MAP[find_known_model(folder) or ""] == family
    assert type(renderer_for(folder)) is type(renderer_for(known)) is type(create_renderer(known))
    assert not (source.folder / RENDERER_FILE).exists()
    text = known.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert folder.decode(renderer_for(folder).render_ids(MESSAGES, add_generation_prompt=True)) == text


def test_the_template_decides_and_not_the_name(tmp_path: Path) -> None:
    template = (TEMPLATES / "glm-4.5.jinja").read_text()
    source = write_model(tmp_path / "model", "zai-org/GLM-4.5-Air", template)
    assert isinstance(renderer_for(Tokenizer.load(source.folder, "Qwen/Qwen3-0.6B")), GLM45Renderer)
    edited = template.replace("[gMASK]<sop>", "[gMASK] <sop>")
    (source.folder / "chat_template.jinja").write_text(edited)
    assert find_known_model(Tokenizer.load(source.folder, "mine")) is None
    qwen = write_model(tmp_path / "qwen", "Qwen/Qwen3-0.6B", (TEMPLATES / "qwen3.jinja").read_text())
    assert isinstance(renderer_for(Tokenizer.load(qwen.folder)), Qwen3Renderer)
