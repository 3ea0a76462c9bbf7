"""A tool loop on the `openai` package: chat or responses, streamed or not; or a text that goes on."""

import json

from conversation import ADD, add, args, finish, questions, system, timeout_s
from openai import OpenAI

client = OpenAI(timeout=timeout_s)
answers = []
if args.dialect == "chat":
    messages: list = [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        while messages[-1]["role"] != "assistant":
            request = {"model": "agent", "messages": messages, "tools": [{"type": "function", "function": ADD}]}
            if args.stream:
                with client.chat.completions.stream(**request) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**request).choices[0].message
            messages.append(message.to_dict())
            for call in message.tool_calls or ():
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        answers.append(messages[-1]["content"])
elif args.dialect == "completions":
    text = system
    for question in questions:
        text += f"\n\nQ: {question}\nA:"
        request = {"model": "agent", "prompt": text, "max_tokens": 100, "stream": args.stream}
        completion = client.completions.create(**request)
        chunks = completion if args.stream else [completion]
        answer = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        text += answer
        answers.append(answer.strip())
else:
    items: list = []
    for question in questions:
        items.append({"role": "user", "content": question})
        while True:
            request = {"model": "agent", "input": items, "instructions": system, "tools": [{"type": "function", **ADD}]}
            if args.stream:
                with client.responses.stream(**request) as stream:
                    response = stream.get_final_response()
            else:
                response = client.responses.create(**request)
            items += [item.to_dict() for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                result = add(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})
            if not calls:
                break
        answers.append(response.output_text)
finish(answers)
