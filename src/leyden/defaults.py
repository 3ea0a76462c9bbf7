"""Default values that more than one package needs. Each is defined here once; configuration and options import it."""

LEASE_S = 60.0
"""How long an attempt or a group scoring lives without a heartbeat."""
MAX_ATTEMPTS = 3
"""Attempts of a rollout, the first included, before a retryable failure is final."""
FAILURE_REWARD = 0.0
"""Reward of a rollout that ends as `agent_error` or `timeout`."""
SUCCESS = 1.0
"""Reward from which a rollout counts as solved."""
WORKER_PROCESSES = 1
"""Host processes of one worker."""
CONCURRENCY = 64
"""Rollouts that one worker runs at the same time, over all its host processes."""
PORT = 8484
"""Port of `leyden serve`."""
UPSTREAM_TIMEOUT_S = 600.0
"""How long an upstream model service may be silent."""
CONCURRENT_CALLS = 128
"""Requests that one rollout may have at the same time."""
MAX_BODY_MB = 32
"""Size limit of a request to the server, compressed or not."""
