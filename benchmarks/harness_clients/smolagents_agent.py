"""A tool-calling agent of smolagents. It tells the model of earlier calls in text, so no turn repeats an answer."""

import os

from conversation import add, args, finish, questions, system
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel("agent", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(
    tools=[tool(add)], model=model, instructions=system, stream_outputs=args.stream, verbosity_level=0
)
finish([agent.run(question, reset=at == 0) for at, question in enumerate(questions)])
