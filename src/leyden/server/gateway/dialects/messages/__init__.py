"""The Anthropic Messages dialect: /v1/messages, its token counts, and /v1/models in Anthropic's format.

`request` reads the parameters, `content` the messages, `tools` the tools; `writer` writes answers and errors.
"""
