// Asks with nothing but Node, and says where its span would go.
const task = JSON.parse(process.env.LEYDEN_TASK);
const reply = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
  method: "POST",
  headers: { authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "content-type": "application/json" },
  body: JSON.stringify({ model: "any", messages: [{ role: "user", content: `Say number ${task.n}` }] }),
});
const span = { traceId: process.env.TRACEPARENT.split("-")[1], spanId: "ab".repeat(8), name: "node agent",
               startTimeUnixNano: "1", endTimeUnixNano: "2" };
const [name, value] = process.env.OTEL_EXPORTER_OTLP_HEADERS.split("=");
const sent = await fetch(`${process.env.OTEL_EXPORTER_OTLP_ENDPOINT}/v1/traces`, {
  method: "POST",
  headers: { [name]: decodeURIComponent(value), "content-type": "application/json" },
  body: JSON.stringify({ resourceSpans: [{ scopeSpans: [{ spans: [span] }] }] }),
});
console.log(JSON.stringify({ result: { said: Number((await reply.json()).choices[0].message.content), sent: sent.status },
                             reward: 0.5 }));
