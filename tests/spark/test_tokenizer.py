"""Spark's tokenizer, as it lies in the package."""

import sys
from pathlib import Path

from leyden.rendering.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src/leyden/models/spark"
sys.path.insert(0, str(ROOT / "spark"))

import make_tokenizer  # noqa: E402
from corpus import conversations  # noqa: E402

tokenizer = Tokenizer.load(FOLDER)


def test_making_it_again_gives_the_same_bytes(tmp_path: Path) -> None:
    make_tokenizer.make(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), f"run {make_tokenizer.__file__}"


def test_it_has_1024_tokens_and_every_control_token_is_one() -> None:
    assert len(tokenizer) == 1024
    assert [tokenizer.encode(mark) for mark in (*make_tokenizer.SPECIAL, *make_tokenizer.MARKS)] == [
        [id] for id in range(16)
    ]
    assert tokenizer.special_ids == {0, 1, 2}


def test_digits_and_line_feeds_are_single_tokens() -> None:
    assert [tokenizer.decode(id) for id in tokenizer.encode("12 345\n\n\n 6.70")] == [*"12 345\n\n\n 6.70"]


def test_what_it_was_made_for_is_short_in_it() -> None:
    """Other seeds than it was fitted to; a byte a token would be 1."""
    shown = [
        tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        for messages, tools in conversations(seed=1, number=80)
    ]
    assert sum(map(len, shown)) / sum(len(tokenizer.encode(text)) for text in shown) > 3
    assert max(len(tokenizer.encode(text)) for text in shown) < 1024
