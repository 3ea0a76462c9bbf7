"""Labels in the names of metrics: roles and kinds of tasks, which are any text of agents and tasks, and bounded."""

import re
from collections.abc import Mapping, Sequence

OTHERS = "(others)"
_NOT_IN_LABELS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff,]+")  # queries separate names of metrics by commas
_MAX_LABEL = 160
_MAX_LABELS = 32
"""Of one step; the rarer ones are reported together."""


def by_label(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return values by what can be part of a metric's name; those whose texts become the same are joined."""
    labelled: dict[str, list[float]] = {}
    for text, some in values.items():
        label = " ".join(_NOT_IN_LABELS.sub(" ", text).split())[:_MAX_LABEL].strip()
        labelled.setdefault(label or "-", []).extend(some)
    if len(labelled) <= _MAX_LABELS:
        return labelled
    common = sorted(labelled, key=lambda label: (-len(labelled[label]), label))[: _MAX_LABELS - 1]
    rest = [value for label, some in labelled.items() if label not in common for value in some]
    return {**{label: labelled[label] for label in common}, OTHERS: rest}
