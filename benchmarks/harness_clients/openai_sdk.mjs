// A tool loop on the `openai` package: chat or responses, streamed or not; or a text that goes on.
import OpenAI from "openai";
import { add, ADD, dialect, finish, questions, stream, system, timeout } from "./conversation.mjs";

const client = new OpenAI({ timeout });
const answers = [];
if (dialect === "chat") {
  let messages = [{ role: "system", content: system }];
  for (const question of questions) {
    messages.push({ role: "user", content: question });
    const fn = { ...ADD, parse: JSON.parse, function: ({ a, b }) => String(add(a, b)) };
    const runner = client.chat.completions.runTools({ model: "agent", messages, tools: [{ type: "function", function: fn }], stream });
    answers.push(await runner.finalContent());
    messages = [...runner.messages];
  }
} else if (dialect === "completions") {
  let text = system;
  for (const question of questions) {
    text += `\n\nQ: ${question}\nA:`;
    const completion = await client.completions.create({ model: "agent", prompt: text, max_tokens: 100, stream });
    let answer = "";
    for await (const chunk of stream ? completion : [completion]) answer += chunk.choices.map((choice) => choice.text).join("");
    text += answer;
    answers.push(answer.trim());
  }
} else {
  const input = [];
  for (const question of questions) {
    input.push({ role: "user", content: question });
    for (;;) {
      const request = { model: "agent", instructions: system, input, tools: [{ type: "function", ...ADD, strict: false }] };
      const response = stream ? await client.responses.stream(request).finalResponse() : await client.responses.create(request);
      const calls = response.output.filter((item) => item.type === "function_call");
      input.push(...response.output);
      for (const call of calls) {
        // As a program would that keeps the arguments as an object: JavaScript writes 2.0 as 2.
        const { a, b } = JSON.parse(call.arguments);
        call.arguments = JSON.stringify({ a, b });
        input.push({ type: "function_call_output", call_id: call.call_id, output: String(add(a, b)) });
      }
      if (!calls.length) {
        answers.push(response.output_text);
        break;
      }
    }
  }
}
finish(answers);
