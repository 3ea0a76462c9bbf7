"""Everything on one machine: what `leyden train`, `eval` and `dev` do, from a configuration to a report."""

import os

# torch's threads spin while they wait for each other. On cores that agents, engine and trainer share, a thread that is
# not running is waited for by one that burns its core: waiting asleep was measured four times as fast there. It has to
# be said before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
