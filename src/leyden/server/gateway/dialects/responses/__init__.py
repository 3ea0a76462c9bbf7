"""The OpenAI Responses dialect: /v1/responses and the routes beneath it.

`request` reads the parameters, `items` the input, `tools` the tools; `output` builds the items of an answer, and
`writer` sends them, whole or as events.
"""
