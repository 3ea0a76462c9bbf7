"""Renders messages to token ids and parses completions: tokenizers, chat templates, renderers. No torch."""

import sys
from types import ModuleType


def _import_renderers() -> None:
    """Import the `renderers` package without the OpenAI SDK, which takes as long as the rest of the server.

    The package needs the SDK for an annotation in `renderers.client`, which is not used here.
    """
    if "openai" in sys.modules:
        return
    placeholder = ModuleType("openai")
    vars(placeholder)["AsyncOpenAI"] = object
    sys.modules["openai"] = placeholder
    try:
        import renderers  # noqa: F401 - later imports find it
    finally:
        del sys.modules["openai"]


_import_renderers()
