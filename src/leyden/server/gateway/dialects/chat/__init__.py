"""The OpenAI chat dialect: /v1/chat/completions and /v1/models.

`request` reads the parameters, `messages` the messages, `tools` the tools; `writer` writes answers.
"""
