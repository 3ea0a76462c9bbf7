"""A body is refused before it is decoded where it would expand to too many objects."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.server.http import expansion
from leyden.server.http.expansion import TooManyValues, check_msgpack

_values: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=70_000)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=300)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=40), inner),
    max_leaves=30,
)


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + _count(item) for item in value.values())
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


@given(_values)
def test_every_value_of_a_messagepack_document_is_counted_once(value: Any) -> None:
    data, count = msgspec.msgpack.encode(value), _count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expansion, "MAX_VALUES", count)
        check_msgpack(data)
        patch.setattr(expansion, "MAX_VALUES", count - 1)
        with pytest.raises(TooManyValues):
            check_msgpack(data)
