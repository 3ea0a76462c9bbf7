"""What frameworks need to be caught whole, unchanged: spans, by OpenInference's instrumentors where installed.

Each is set up when its framework is imported, so an agent pays for what it uses. AutoGen and others emit spans by
themselves.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from leyden.client.tracing import context
from leyden.client.tracing.import_hook import when_imported

_log = logging.getLogger("leyden.host")


def install() -> None:
    """Wait for the frameworks; before the agent is loaded."""
    when_imported("langchain_core.runnables.base", lambda _: _try(_instrument_langchain))
    when_imported("agents", lambda module: _try(lambda: _instrument_openai_agents(module)))
    _quieten_autogen()


def _try(instrument: Callable[[], None]) -> None:
    """Spans are worth having, but an agent whose framework is newer than its instrumentor must run without."""
    try:
        instrument()
    except Exception as error:
        _log.warning("there will be no spans of this framework: %s: %s", type(error).__name__, error)


def _instrument_langchain() -> None:
    """LangChain's and LangGraph's spans are not OpenTelemetry's current ones, so they are looked up when needed."""
    if not _installed("openinference.instrumentation.langchain"):
        return
    from openinference.instrumentation.langchain import LangChainInstrumentor, get_current_span

    LangChainInstrumentor().instrument(config=_without_messages())
    context.span_finders.append(get_current_span)


def _instrument_openai_agents(agents: ModuleType) -> None:
    """The SDK's own exporter goes either way: it would send the rollouts to OpenAI, with this server's key."""
    if not hasattr(agents, "set_trace_processors"):  # somebody else's module of that name
        return
    agents.set_default_openai_api("chat_completions")  # the server speaks no Responses; an agent may still choose
    if not _installed("openinference.instrumentation.openai_agents"):
        agents.set_trace_processors([])
        return
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    OpenAIAgentsInstrumentor().instrument(config=_without_messages())


def _quieten_autogen() -> None:
    """Its agents and tools have spans; those of the messages between them, unless wanted, would be nine in ten."""
    os.environ.setdefault("AUTOGEN_DISABLE_RUNTIME_TRACING", "true")
    warnings.filterwarnings("ignore", "Resolved model mismatch", UserWarning)  # a model answers to any name here


def _without_messages() -> Any:
    """The messages of model calls are in the calls themselves, once; in spans they would grow with their square."""
    from openinference.instrumentation import TraceConfig

    return TraceConfig(
        hide_input_messages=True,
        hide_output_messages=True,
        hide_prompts=True,
        hide_llm_tools=True,
        hide_llm_invocation_parameters=True,
    )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nothing of the kind at all
        return False
