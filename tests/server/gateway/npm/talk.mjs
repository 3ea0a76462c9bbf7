// A tool-using conversation with the official client. In: {url, key, stream, system, questions} on stdin; out: the answers.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const { url, key, stream, system, questions } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const number = { type: "number" };
const add = {
  name: "add",
  description: "Add two numbers.",
  parameters: { type: "object", properties: { a: number, b: number }, required: ["a", "b"] },
  parse: JSON.parse,
  function: ({ a, b }) => String(a + b),
};

let messages = [{ role: "system", content: system }];
const answers = [];
for (const question of questions) {
  messages.push({ role: "user", content: question });
  const request = { model: "spark", messages, tools: [{ type: "function", function: add }], stream };
  const runner = client.chat.completions.runTools(request); // the SDK's own loop
  answers.push(await runner.finalContent());
  messages = [...runner.messages];
}
console.log(JSON.stringify(answers));
