"""Writes the tokenizer for vLLM's grammars: the model's, with every added token special.

Generations have token ids only, so vLLM uses the tokenizer for grammars alone. Text in a grammar then never matches an
added token such as `<tool_call>`, as with the embedded engine.
"""

import json
from pathlib import Path


def write_tokenizer(tokenizer: str, model: Path, folder: Path) -> Path:
    """Write a tokenizer.json into a folder, with the end token of the model in `model`; return the folder."""
    settings = model / "tokenizer_config.json"
    end = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.is_file() else None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
