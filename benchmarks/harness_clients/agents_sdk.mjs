// The OpenAI Agents SDK for JavaScript: Responses, as it is by default, Responses that the server stores, or chat.
import { Agent, run, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";
import { add, dialect, finish, questions, stream, system } from "./conversation.mjs";

setTracingDisabled(true);
if (dialect === "chat") setOpenAIAPI("chat_completions");
const adding = tool({
  name: "add",
  description: "Add two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(add(a, b)),
});
const agent = new Agent({ name: "adder", instructions: system, model: "agent", tools: [adding] });
let history = [];
let previousResponseId;
const answers = [];
for (const question of questions) {
  history.push({ role: "user", content: question });
  const result = await run(agent, history, { stream, previousResponseId });
  if (stream) await result.completed;
  history = dialect === "stored" ? [] : result.history;
  if (dialect === "stored") previousResponseId = result.lastResponseId;
  answers.push(result.finalOutput);
}
finish(answers);
