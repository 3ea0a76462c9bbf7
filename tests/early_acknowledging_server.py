"""A server of which the store acknowledges before it commits. The chaos test must find what it loses."""

import sys
import time

from leyden.cli import main
from leyden.records import Event
from leyden.store.write.writer import Transaction, Writer

_DELAY_S = 0.2


def _work(writer: Writer) -> None:
    while batch := writer._next_batch():
        with writer._database.transaction() as cursor:
            transaction = Transaction(cursor, writer._database.dialect, writer._clock())
            for job in batch:
                job.run(transaction)
            transaction.write_log()
            log: list[Event] = transaction.events
            writer._loop.call_soon_threadsafe(writer._resolve, batch, log)
            time.sleep(_DELAY_S)


if __name__ == "__main__":
    Writer._work = _work
    sys.exit(main())
