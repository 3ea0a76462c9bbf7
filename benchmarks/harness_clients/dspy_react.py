"""DSPy's ReAct. Each step is a new prompt with the steps so far in it, so no turn repeats an answer."""

import os

import dspy
from conversation import add, finish, questions

model = dspy.LM(
    "openai/agent", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], cache=False
)
dspy.configure(lm=model)
agent = dspy.ReAct("question -> answer", tools=[add], max_iters=3)
finish([agent(question=question).answer for question in questions])
