"""The ids of responses and of their output items. They contain the id of the call in the record.

So a response is found by its id without a table, and items that a client sends back name the answer they are from.
"""

import re

_INPUT = re.compile(r"in_(call-[0-9a-f]+)_\d+").fullmatch
_ITEM = re.compile(r"(?:msg|rs|fc|ctc)_(call-[0-9a-f]+)_\d+").fullmatch


def response_id(call: str) -> str:
    """Return the id of the response of a recorded call."""
    return f"resp_{call}"


def call_of_response(id: str) -> str | None:
    """Return the recorded call of a response; None for an id that was not given out here."""
    return id.removeprefix("resp_") if id.startswith("resp_call-") else None


def item_id(prefix: str, call: str, index: int = 0) -> str:
    """Return the id of an output item; `index` counts the items of one type in an answer."""
    return f"{prefix}_{call}_{index}"


def call_of_item(id: object) -> str | None:
    """Return the recorded call whose answer an item is from; None for an id that was not given out here."""
    found = _ITEM(id) if isinstance(id, str) else None
    return found[1] if found else None


def input_id(call: str, index: int) -> str:
    """Return the id of an input item, by which it is listed and can be referred to."""
    return f"in_{call}_{index}"


def call_of_input(id: str) -> str | None:
    """Return the recorded call whose input an item is of."""
    found = _INPUT(id)
    return found[1] if found else None
