"""Chooses the renderer of a model."""

from typing import Any, cast

from leyden.rendering.chat_template import TemplateError
from leyden.rendering.chatml import ChatMLRenderer
from leyden.rendering.chatml_form import ChatMLForm, as_json, probes, read_form
from leyden.rendering.renderer import ChatRenderer, ConfigurableRenderer
from leyden.rendering.tokenizer import Tokenizer, TokenizerError


def renderer_for(tokenizer: Tokenizer) -> ChatRenderer:
    """Return the renderer that writes what the model's template writes: ours for ChatML, or a hand-written one.

    Template and tokenizer decide, so a model and its checkpoints are rendered alike. The model's name decides if no
    renderer writes the template: some known models have none, and some renderers differ from it on purpose. Of any
    other model the template itself is the renderer.
    """
    form = read_form(tokenizer)
    if form is not None and _is_chatml(tokenizer, form):
        return ChatMLRenderer(tokenizer, form)
    from renderers import DefaultRendererConfig, create_renderer  # slow to import: see leyden.rendering.renderer

    from leyden.rendering.known_models import find_known_model, is_known, renderer_like

    if (model := find_known_model(tokenizer)) is not None:
        return cast(ChatRenderer, renderer_like(tokenizer, model))
    if is_known(tokenizer.name_or_path):
        return cast(ChatRenderer, create_renderer(tokenizer))
    template = tokenizer.chat_template
    if template is None:
        raise TokenizerError(f"{tokenizer.name_or_path}: the model has no chat template; it cannot hold a conversation")
    parsers = (
        {"tool_parser": "qwen3"}
        if '<tool_call>\\n{"name"' in template and "<tool_call>" in tokenizer.control_tokens
        else {}
    )
    return cast(ChatRenderer, create_renderer(tokenizer, DefaultRendererConfig(**parsers)))


def keep_reasoning(renderer: ChatRenderer, tokenizer: Tokenizer) -> ChatRenderer:
    """Return a renderer that extends a turn with its reasoning even if the model's template drops it.

    A renderer that only runs the model's template never extends a turn, so it is returned as it is.
    """
    if isinstance(renderer, ChatMLRenderer):
        return ChatMLRenderer(tokenizer, renderer.form, keeps_reasoning=True)
    from renderers import DefaultRenderer

    if isinstance(renderer, DefaultRenderer) or not isinstance(renderer, ConfigurableRenderer):
        return renderer
    build: Any = type(renderer)
    return cast(ChatRenderer, build(tokenizer, renderer.config.model_copy(update={"thinking_retention": "all"})))


def switch_reasoning(renderer: ChatRenderer, tokenizer: Tokenizer, on: bool) -> ChatRenderer:
    """Return a renderer whose prompts have reasoning switched on or off; the same one if the template has no switch."""
    if isinstance(renderer, ChatMLRenderer) or not isinstance(renderer, ConfigurableRenderer):
        return renderer
    from renderers import DefaultRenderer

    config, build = renderer.config, cast(Any, type(renderer))
    names = set(type(config).model_fields)
    if isinstance(renderer, DefaultRenderer):  # it passes any name to the template
        names = {"enable_thinking"} if "enable_thinking" in (tokenizer.chat_template or "") else set()
    name = next((name for name in ("enable_thinking", "thinking") if name in names), None)
    if name is None or getattr(config, name, None) is on:
        return renderer
    return cast(ChatRenderer, build(tokenizer, config.model_copy(update={name: on})))


def _is_chatml(tokenizer: Tokenizer, form: ChatMLForm) -> bool:
    """Return whether the template and the renderer write the same tokens on every probe.

    Messages that quote a control token are compared as text, since the renderer encodes those differently on purpose.
    """
    try:
        renderer = ChatMLRenderer(tokenizer, form)
        for messages, tools in probes(form.knows_tools):
            quotes = any(isinstance(part, int) for part in tokenizer.split(as_json(messages)))
            for prompt in (False, True):
                ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=prompt)
                text = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=prompt, tokenize=False)
                if tokenizer.decode(ids) != text or not (quotes or ids == tokenizer.encode(text)):
                    return False
    except (TemplateError, TokenizerError):
        return False
    return True
