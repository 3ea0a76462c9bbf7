"""Fixtures of the gateway's tests: a server with an attempt that has an active lease, and OpenAI's client for it."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from modelserving import ModelServer, model_server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ModelServer]:
    """A server whose model says what the test writes, with one attempt."""
    async with model_server(tmp_path) as running:
        await running.new_attempt()
        yield running


@pytest.fixture
async def client(server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client with the attempt's key; it does not retry."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as made:
        yield made
