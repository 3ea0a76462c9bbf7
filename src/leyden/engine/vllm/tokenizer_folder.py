"""The tokenizer that vLLM's grammars follow: the model's, with every mark special.

Generations carry token ids only, so that vLLM uses a tokenizer for nothing but grammars. In these text never matches a
mark such as `<tool_call>`, as with the embedded engine.
"""

import json
from pathlib import Path


def write_tokenizer(tokenizer: str, model: Path, folder: Path) -> Path:
    """Write a tokenizer.json, with the end token of the model in another folder; returns the folder written to."""
    settings = model / "tokenizer_config.json"
    end = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.is_file() else None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
