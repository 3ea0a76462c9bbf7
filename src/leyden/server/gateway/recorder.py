"""Where calls go when they are over: into the record, then into the conversation that later calls may continue."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from leyden.records import Call, Purpose, RunSettings
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prefix_index import History, PrefixIndex
from leyden.store.errors import Conflict, NotFound, StoreError
from leyden.store.queue import ActiveLease
from leyden.store.store import Store


class AttemptCalls(Struct, frozen=True):
    """Whose calls they are."""

    live: ActiveLease
    settings: RunSettings
    conversation: PrefixIndex


class Recorder:
    """Records calls, and counts them: by how their prompts were made and how they ended, and those not trained on."""

    def __init__(self, store: Store) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.untrained: Counter[str] = Counter()
        """Calls of training rollouts from which no gradient comes, by the reason."""
        self._store = store

    async def record(self, ledger: AttemptCalls, calls: Sequence[Call], history: History) -> None:
        """Record the answers to one ask; when this returns they are durable."""
        live = ledger.live
        try:
            await self._store.record_calls(live.run, live.attempt, calls)
        except (Conflict, NotFound) as over:
            raise GatewayError(ErrorKind.FORBIDDEN, str(over)) from over
        except StoreError as error:
            raise GatewayError(ErrorKind.FAILED, str(error), retry_after=1.0) from error
        for call in calls:
            ledger.conversation.add(call, history)
            self.counts[str(call.made), str(call.status)] += 1
            why = call.unusable if ledger.settings.allow_biased_sampling else call.untrainable
            if why is not None and live.purpose is Purpose.TRAIN:
                self.untrained[why] += 1
