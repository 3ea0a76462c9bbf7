"""A tool loop on the `anthropic` package, streamed or not."""

from anthropic import Anthropic
from conversation import ADD, add, args, finish, questions, system, timeout_s

client = Anthropic(timeout=timeout_s)
tool = {"name": ADD["name"], "description": ADD["description"], "input_schema": ADD["parameters"]}
messages: list = []
answers = []
for question in questions:
    messages.append({"role": "user", "content": question})
    while True:
        request = {"model": "agent", "max_tokens": 500, "system": system, "messages": messages, "tools": [tool]}
        if args.stream:
            with client.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**request)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))} for call in calls]
        messages.append({"role": "user", "content": results})
    answers.append("".join(block.text for block in message.content if block.type == "text"))
finish(answers)
