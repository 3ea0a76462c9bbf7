"""vLLM as the engine: a client of its token endpoint, its server process, and the publication of weights to it.

The server uses `VllmEngine`; the trainer owns `VllmProcess` and `VllmPublisher`. vLLM runs in a process and, where it
needs one, in a Python environment of its own: nothing here imports it.
"""
