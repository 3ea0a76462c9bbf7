// Solves word problems with a calculator: OpenAI's official SDK for JavaScript. It knows nothing of Leyden.
//
// The task is one line of JSON on stdin, the answer one line of JSON on stdout. OPENAI_BASE_URL and OPENAI_API_KEY say
// which model it talks to, as for any such agent.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const SYSTEM = "Use the calculator, then answer after ####.";
const MAX_CALLS = 4;
const TOOL = {
  type: "function",
  function: {
    name: "calculator",
    description: "Evaluate an arithmetic expression.",
    parameters: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
  },
};

function calculate(text) {
  try {
    const { expression } = JSON.parse(text);
    if (!/^[\d\s.+*/()-]+$/.test(expression) || expression.includes("**")) throw new Error("invalid syntax");
    return String(Math.round(Function(`"use strict"; return (${expression})`)() * 1e4) / 1e4);
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

const task = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI();
const messages = [
  { role: "system", content: SYSTEM },
  { role: "user", content: task.question },
];
let answer = null;
for (let call = 0; call < MAX_CALLS && answer === null; call++) {
  const model = process.env.OPENAI_MODEL ?? "node";
  const reply = await client.chat.completions.create({ model, messages, tools: [TOOL], max_tokens: 256 });
  const message = reply.choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) answer = (message.content ?? "").split("####").at(-1).trim();
  for (const { id, function: { arguments: text } } of message.tool_calls ?? []) {
    messages.push({ role: "tool", tool_call_id: id, content: calculate(text) });
  }
}
console.log(JSON.stringify(answer ?? ""));
