"""Make spark's tokenizer: a byte-level BPE of 1,024 tokens in all, and its chat template, written into the package.

    python spark/make_tokenizer.py

Deterministic: the same bytes every time. Numbers are split into digits and a line feed is a token of its own, so that
digits line up for a small model, and a prompt that ends with a line feed has the same tokens whatever follows it.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from leyden.rendering import chat_template

sys.path.insert(0, str(Path(__file__).parent))

from corpus import conversations

SIZE = 1024
POSITIONS = 4096
FOLDER = Path(__file__).parents[1] / "src/leyden/models/spark"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
        "<tools>",
        "</tools>",
    ),
    *(f"<|reserved_{number}|>" for number in range(5)),
)
PIECES = r"\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"


def texts(template: str) -> Iterator[str]:
    """Yield the corpus as spark reads it, without the marks, which are no text."""
    marks = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKS))))
    for messages, tools in conversations():
        yield from filter(None, marks.split(chat_template.render(template, messages, tools=tools)))


def make_tokenizer(template: str) -> str:
    """Return the text of tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[*SPECIAL, *MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(template), trainer)
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in SPECIAL  # the other marks are part of what an answer says
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def make_config(template: str) -> str:
    """Return the text of tokenizer_config.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    return json.dumps(config, ensure_ascii=False, indent=1) + "\n"


def make(folder: Path) -> None:
    """Write both files into a folder."""
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8").removesuffix("\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(make_tokenizer(template), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(make_config(template), encoding="utf-8")


if __name__ == "__main__":
    make(FOLDER)
