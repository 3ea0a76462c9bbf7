"""AutoGen's assistant, which keeps its own context, on its OpenAI or Anthropic client."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from conversation import add, args, finish, questions, system

CAN = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
MODEL = {"model": "agent", "model_info": {**CAN, "family": "unknown"}}


async def main() -> list:
    """Ask both questions in one conversation."""
    if args.dialect == "messages":
        from autogen_ext.models.anthropic import AnthropicChatCompletionClient

        client = AnthropicChatCompletionClient(**MODEL, base_url=os.environ["ANTHROPIC_BASE_URL"], max_tokens=500)
    else:
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        client = OpenAIChatCompletionClient(**MODEL)
    talk = {"system_message": system, "max_tool_iterations": 2, "model_client_stream": args.stream}
    agent = AssistantAgent("adder", client, tools=[add], **talk)
    answers = []
    for question in questions:
        if args.stream:
            *_, result = [event async for event in agent.run_stream(task=question)]
        else:
            result = await agent.run(task=question)
        answers.append(result.messages[-1].content)
    await client.close()
    return answers


finish(asyncio.run(main()))
