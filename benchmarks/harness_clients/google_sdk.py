"""A tool loop on the chats of the `google-genai` package, streamed or not."""

from conversation import ADD, add, args, finish, questions, system
from google import genai
from google.genai import types

declaration = {
    "name": ADD["name"],
    "description": ADD["description"],
    "parameters_json_schema": ADD["parameters"],
}
config = types.GenerateContentConfig(
    system_instruction=system,
    tools=[{"function_declarations": [declaration]}],
    thinking_config={"include_thoughts": True},
)
client = genai.Client()
chat = client.chats.create(model="agent", config=config)
answers = []
for question in questions:
    message = question
    while True:
        chunks = list(chat.send_message_stream(message)) if args.stream else [chat.send_message(message)]
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            break
        message = [
            types.Part.from_function_response(name=call.name, response={"result": add(**call.args)}) for call in calls
        ]
    answers.append("".join(part.text or "" for part in parts if not part.thought))
finish(answers)
