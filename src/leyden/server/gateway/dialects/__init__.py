"""API dialects. Each reads requests of one API into a `GenerationRequest` and writes `AnswerEvent`s as its answers.

`registry.DIALECTS` lists them. No dialect knows the store, an engine or the web framework.
"""
