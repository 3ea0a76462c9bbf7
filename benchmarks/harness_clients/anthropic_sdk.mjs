// A tool loop on the `@anthropic-ai/sdk` package, streamed or not.
import Anthropic from "@anthropic-ai/sdk";
import { add, ADD, finish, questions, stream, system } from "./conversation.mjs";

const client = new Anthropic();
const tool = { name: ADD.name, description: ADD.description, input_schema: ADD.parameters };
const messages = [];
const answers = [];
for (const question of questions) {
  messages.push({ role: "user", content: question });
  for (;;) {
    const request = { model: "agent", max_tokens: 500, system, messages, tools: [tool] };
    const message = stream ? await client.messages.stream(request).finalMessage() : await client.messages.create(request);
    messages.push({ role: "assistant", content: message.content });
    const calls = message.content.filter((block) => block.type === "tool_use");
    if (!calls.length) {
      answers.push(message.content.map((block) => block.text ?? "").join(""));
      break;
    }
    const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: String(add(call.input.a, call.input.b)) }));
    messages.push({ role: "user", content: results });
  }
}
finish(answers);
