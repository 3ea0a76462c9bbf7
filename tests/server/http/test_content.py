"""A body is refused before it is decoded if it would expand to too many objects."""

import pytest

from leyden.server.http.content import JSON, MAX_VALUES, MSGPACK, check_values
from leyden.server.http.errors import ApiError


@pytest.mark.parametrize(
    ("data", "form"), [(b"[" + b"[]," * MAX_VALUES + b"[]]", JSON), (b"\x90" * (MAX_VALUES + 1), MSGPACK)]
)
async def test_a_body_of_very_many_values_is_refused(data: bytes, form: str) -> None:
    with pytest.raises(ApiError) as refused:
        await check_values(data, form)
    assert refused.value.status == 413


async def test_a_long_text_in_json_counts_as_one_value() -> None:
    await check_values(b'["' + b"[,{" * MAX_VALUES + b'"]', JSON)
