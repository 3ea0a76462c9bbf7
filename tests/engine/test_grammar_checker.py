"""Grammars are compiled in a process with limits before an engine compiles them."""

from importlib.resources import files
from pathlib import Path

import pytest

from leyden.engine.grammar import GrammarError
from leyden.engine.grammar_checker import GrammarChecker
from leyden.rendering.tokenizer import Tokenizer


async def test_a_file_of_the_user_does_not_shadow_a_module_of_the_checker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(str(files("leyden") / "models" / "spark"))
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('the wrong module')")
    monkeypatch.chdir(tmp_path)
    stop_ids = (tokenizer.control_tokens["<|im_end|>"],)
    checker = GrammarChecker(tokenizer.control_json, len(tokenizer))
    await checker.check('start: "yes"', stop_ids, "session")
    with pytest.raises(GrammarError, match="unknown name"):
        await checker.check("start: other", stop_ids, "session")


async def test_a_process_that_died_while_idle_says_nothing_about_the_next_grammar() -> None:
    tokenizer = Tokenizer.load(str(files("leyden") / "models" / "spark"))
    stop_ids = (tokenizer.control_tokens["<|im_end|>"],)
    checker = GrammarChecker(tokenizer.control_json, len(tokenizer))
    await checker.check('start: "yes"', stop_ids, "session")
    (idle,) = checker._idle
    idle.kill()
    await checker.check('start: "no"', stop_ids, "session")
