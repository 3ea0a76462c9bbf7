#!/bin/sh
# Asks with curl for the number in its task, which it reads from stdin.
number=$(sed 's/[^0-9]//g')
echo "asking for $number"
answer=$(curl -sf "$OPENAI_BASE_URL/chat/completions" \
  -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
  -d "{\"model\": \"any\", \"messages\": [{\"role\": \"user\", \"content\": \"Say number $number\"}]}") || exit 7
echo "$answer" | sed 's/.*"content":"\([0-9]*\)".*/{"said": \1}/'
echo "done" >&2
