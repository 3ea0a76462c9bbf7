"""One attempt in the worker: its state, what the agent printed and returned, and how it ended.

An attempt has one type at each boundary that it crosses. The server keeps an `Attempt` and hands out a `Lease`; the
worker keeps an `ActiveAttempt`; a host process receives an `Invocation`, which it shows the agent, and returns
an `AttemptEnd`, which the worker completes with the reward and sends to the server as a `FinishRequest`.
"""
