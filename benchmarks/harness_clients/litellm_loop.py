"""A tool loop on `litellm.completion`, for an OpenAI or an Anthropic model."""

import json
import os

import litellm
from conversation import ADD, add, args, finish, questions, system

tools = [{"type": "function", "function": ADD}]
name = "anthropic/agent" if args.dialect == "messages" else "openai/agent"
base = os.environ["ANTHROPIC_BASE_URL" if args.dialect == "messages" else "OPENAI_BASE_URL"]
messages: list = [{"role": "system", "content": system}]
answers = []
for question in questions:
    messages.append({"role": "user", "content": question})
    while messages[-1]["role"] != "assistant":
        answer = litellm.completion(model=name, api_base=base, messages=messages, tools=tools, stream=args.stream)
        if args.stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    answers.append(messages[-1]["content"])
finish(answers)
