// What every script here talks about, and how it reports; as conversation.py.
export const [dialect] = process.argv.slice(2);
export const stream = process.argv.includes("--stream");
export const timeout = 1000 * Number(process.env.HARNESS_TIMEOUT_S ?? 600);
export const system = "You can add.";
export const questions = ["What is 2 + 3, and 4 + 5?", "And 10 + 20?"];
const number = { type: "number" };
export const ADD = {
  name: "add",
  description: "Add two numbers.",
  parameters: { type: "object", properties: { a: number, b: number }, required: ["a", "b"] },
};
export const add = (a, b) => a + b;
export const finish = (answers) => console.log(JSON.stringify(answers));
