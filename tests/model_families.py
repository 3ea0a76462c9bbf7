"""Tokenizers of the model families that the `renderers` package knows: spark's vocabulary with their control tokens."""

import json
from pathlib import Path
from typing import Any

from gpt_oss_files import tokenizer_document
from renderers import create_renderer
from renderers.base import MODEL_RENDERER_MAP

from leyden.models.source import ModelSource
from leyden.rendering.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
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


def template_of(family: str) -> str:
    """The real template of a family if it is kept here."""
    return (TEMPLATES / f"{family}.jinja").read_text() if family in REAL else "{{ messages }}"
