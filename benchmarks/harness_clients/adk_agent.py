"""An agent of Google's Agent Development Kit, in one session."""

import asyncio

from conversation import add, args, finish, questions, system
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner
from google.genai import types


async def main() -> None:
    """Ask the questions."""
    agent = LlmAgent(name="adder", model=Gemini(model="agent"), instruction=system, tools=[add])
    runner = InMemoryRunner(agent, app_name="adding")
    session = await runner.session_service.create_session(app_name="adding", user_id="user")
    config = RunConfig(streaming_mode=StreamingMode.SSE if args.stream else StreamingMode.NONE)
    answers = []
    for question in questions:
        message = types.Content(role="user", parts=[types.Part(text=question)])
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=message, run_config=config
        ):
            if event.is_final_response():
                answers.append("".join(part.text or "" for part in event.content.parts if not part.thought))
    finish(answers)


asyncio.run(main())
