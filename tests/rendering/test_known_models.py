"""A model and its own checkpoints are rendered alike, whatever the folder is called."""

import json
from pathlib import Path
from typing import Any

import pytest
from gpt_oss_files import FOLDER_VARIABLE, VOCABULARY, tokenizer_document, vocabulary
from renderers import GLM45Renderer, Qwen3Renderer, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from smallpolicy import small_policy

from leyden.config import CheckpointConfig
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.protocol import TrainerState
from leyden.models.source import ModelSource
from leyden.records import DEFAULT_POLICY
from leyden.rendering.factory import renderer_for
from leyden.rendering.known_models import find_known_model
from leyden.rendering.tokenizer import RENDERER_FILE, Tokenizer

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "tests/data/templates"
SPARK = Tokenizer.load(ROOT / "src/leyden/models/spark")
FAMILIES = {family: model for model, family in reversed(MODEL_RENDERER_MAP.items())}
"""By family, the first model of it that the `renderers` package knows."""
REAL = {"qwen3", "qwen3.5", "qwen3.8", "glm-4.5", "gpt-oss"}
"""Families whose real template is kept here."""
DECIDED = sorted(REAL - {"gpt-oss"})
"""Families whose template decides; the renderer of gpt-oss also writes the channel that an answer begins with."""
THINKING = {"qwen3.5": "Qwen/Qwen3.5-4B"}
"""Models of a family whose template is the one that is kept here, where that is not the first."""
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5.", "reasoning_content": "2 + 3 = 5."},
    {"role": "user", "content": "And doubled?"},
]


class _Recording(Tokenizer):
    """Notes the tokens that a renderer needs and this vocabulary lacks."""

    missing: list[str]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        found = super().convert_tokens_to_ids(tokens)
        if isinstance(tokens, str) and found in (None, self.unk_token_id):
            self.missing.append(tokens)
        return found

    def encode(self, text: str, add_special_tokens: bool = False, **more: Any) -> list[int]:
        found = super().encode(text, add_special_tokens, **more)
        if len(found) > 1 and text[:1] + text[-1:] in ("<>", "\uff5c\uff5c"):
            self.missing.append(text)
        return found


def document_for(model: str) -> dict[str, Any]:
    """Spark's vocabulary with the control tokens that the renderer of a known model needs."""
    document = json.loads(json.dumps(SPARK._document))
    while True:
        tokenizer = _Recording(document, SPARK.config, model)
        tokenizer.missing = []
        try:
            create_renderer(tokenizer).render_ids(MESSAGES, add_generation_prompt=True)
        except Exception as error:
            if not tokenizer.missing:
                raise error
        if not tokenizer.missing:
            return document
        first = len(tokenizer)
        document["added_tokens"] += [
            {
                "id": first + at,
                "content": token,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            | {"special": True}
            for at, token in enumerate(dict.fromkeys(tokenizer.missing))
        ]


def write_model(folder: Path, model: str, template: str) -> ModelSource:
    """The files of a known model's tokenizer."""
    folder.mkdir()
    is_gpt_oss = MODEL_RENDERER_MAP[model] == "gpt-oss"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_document() if is_gpt_oss else document_for(model)))
    (folder / "tokenizer_config.json").write_text(json.dumps({**SPARK.config, "chat_template": template}))
    return ModelSource(model, folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_and_its_checkpoint_are_rendered_alike(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "gpt-oss":  # its renderer downloads its vocabulary otherwise
        (tmp_path / VOCABULARY).write_bytes(vocabulary())
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    model = THINKING.get(family, FAMILIES[family])
    template = (TEMPLATES / f"{family}.jinja").read_text() if family in REAL else "{{ messages }}"
    source = write_model(tmp_path / "model", model, template)
    checkpoint = Checkpoints(tmp_path / "run", DEFAULT_POLICY, source, CheckpointConfig()).save(
        small_policy(), TrainerState(step=1)
    )
    source_of_next = ModelSource(str(checkpoint), checkpoint)
    next_one = Checkpoints(tmp_path / "next", DEFAULT_POLICY, source_of_next, CheckpointConfig())
    later = next_one.save(small_policy(), TrainerState(step=1))  # of a run that started from the checkpoint
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
