#!/bin/sh
# The agent of the workers' benchmark as a command: one question, one answer, by curl.
curl -sf "$OPENAI_BASE_URL/chat/completions" -H "authorization: Bearer $OPENAI_API_KEY" \
  -H "content-type: application/json" -o /dev/null \
  -d '{"model": "model", "messages": [{"role": "user", "content": "What is the answer?"}]}' && echo 1.0
