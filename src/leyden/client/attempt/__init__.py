"""One attempt in the worker: its state, what the agent printed and returned, and how it ended.

The server hands out a `Lease`, which the worker, the process that runs the code and a Python agent get as it is. The
worker keeps an `ActiveAttempt`. How an attempt ended is a `FinishRequest` from the process that saw its code return to
the server, completed by the worker with the reward.
"""
