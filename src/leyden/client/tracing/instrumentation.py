"""Instruments agent frameworks with OpenInference, if installed, so that unchanged agents emit spans.

Each instrumentor is set up when its framework is imported. AutoGen and others emit spans themselves.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from leyden.client.tracing import context
from leyden.client.tracing.propagation import when_imported

_log = logging.getLogger("leyden.host")


def install() -> None:
    """Install the import hooks of all frameworks. Call it before the agent is loaded."""
    when_imported("langchain_core.runnables.base", lambda _: _try(_instrument_langchain))
    when_imported("agents", lambda module: _try(lambda: _instrument_openai_agents(module)))
    _reduce_autogen_spans()


def _try(instrument: Callable[[], None]) -> None:
    """Instrument, or log a warning: an agent must run even if its framework is newer than the instrumentor."""
    try:
        instrument()
    except Exception as error:
        _log.warning("a framework could not be instrumented, so it emits no spans: %s: %s", type(error).__name__, error)


def _instrument_langchain() -> None:
    """Instrument LangChain and LangGraph. They do not set OpenTelemetry's current span, so a span finder is added."""
    if not _installed("openinference.instrumentation.langchain"):
        return
    from openinference.instrumentation.langchain import LangChainInstrumentor, get_current_span

    LangChainInstrumentor().instrument(config=_without_messages())
    context.span_finders.append(get_current_span)


def _instrument_openai_agents(agents: ModuleType) -> None:
    """Instrument the OpenAI Agents SDK and remove its exporter, which would send rollouts to OpenAI with our key."""
    if not hasattr(agents, "set_trace_processors"):  # an unrelated module named `agents`
        return
    if not _installed("openinference.instrumentation.openai_agents"):
        agents.set_trace_processors([])
        return
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    OpenAIAgentsInstrumentor().instrument(config=_without_messages())


def _reduce_autogen_spans() -> None:
    """Disable spans of AutoGen's messages, which would be nine in ten; agents and tools keep theirs."""
    os.environ.setdefault("AUTOGEN_DISABLE_RUNTIME_TRACING", "true")
    warnings.filterwarnings("ignore", "Resolved model mismatch", UserWarning)  # the gateway serves any model name


def _without_messages() -> Any:
    """Hide messages in spans: the calls record them, and in spans they would grow quadratically."""
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
    except ModuleNotFoundError:  # its parent package is missing
        return False
