"""URLs in messages have no secrets."""

import pytest

from leyden.urls import has_password, without_userinfo


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host/v1", "http://host/v1"),
        ("http://me:secret@host:8000/v1?a=b@c", "http://host:8000/v1?a=b@c"),
        ("https://secret@host", "https://host"),
        ("http://me:se@cret@host/v1", "http://host/v1"),
        ("http://me:se/c#ret@host/v1?a=b@c", "http://host/v1?a=b@c"),
        ("node agent.mjs", "node agent.mjs"),
    ],
)
def test_user_and_password_are_left_out(url: str, shown: str) -> None:
    assert without_userinfo(url) == shown


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("postgresql://me:secret@host/db", True),
        ("postgresql://me:se/c?ret@host/db", True),
        ("postgresql://host/db?sslmode=require&password=secret", True),
        ("postgresql://host/db?sslmode=require&sslpassword=secret", True),
        ("postgresql://me@host:5432/db?sslmode=require", False),
        ("postgresql:///db", False),
    ],
)
def test_a_password_is_found_before_the_host_and_in_the_query(url: str, found: bool) -> None:
    assert has_password(url) == found
