"""vLLM as the engine: a client of its token endpoint, its server process, and the publication of weights to it.

The server uses `VllmEngine`; the trainer owns `VllmProcess` and `VllmPublisher`. vLLM runs in another process and may
be installed in another Python environment, so nothing here imports it.
"""
