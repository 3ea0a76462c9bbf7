"""The OpenAI Agents SDK: Responses, as it is by default, Responses that the server stores, or chat."""

import asyncio

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from conversation import add, args, finish, questions, system

set_tracing_disabled(True)
if args.dialect == "chat":
    set_default_openai_api("chat_completions")


async def main() -> list:
    """Ask both questions in one conversation."""
    agent = Agent("adder", instructions=system, model="agent", tools=[function_tool(add)])
    said: list = []
    options: dict = {"auto_previous_response_id": True} if args.dialect == "stored" else {}
    answers = []
    for question in questions:
        said.append({"role": "user", "content": question})
        if args.stream:
            result = Runner.run_streamed(agent, said, **options)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, said, **options)
        if args.dialect == "stored":
            said, options["previous_response_id"] = [], result.last_response_id
        else:
            said = result.to_input_list()
        answers.append(result.final_output)
    return answers


finish(asyncio.run(main()))
