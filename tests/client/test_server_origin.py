"""Which requests go to our server."""

from leyden.client.server_origin import ServerOrigin


def test_an_origin_is_scheme_host_and_port() -> None:
    assert ServerOrigin("http://127.0.0.1:8484").matches("http", "localhost", 8484)
    assert ServerOrigin("https://Train.example").matches("https", "train.example", 443)
    assert not ServerOrigin("http://127.0.0.1:8484").matches("http", "127.0.0.1", 8485)
    assert not ServerOrigin("http://a").matches("https", "a", None)


def test_a_url_on_the_server_is_recognised_by_any_name_of_the_loopback_address() -> None:
    origin = ServerOrigin("http://127.0.0.1:8484")
    assert origin.matches_url("http://localhost:8484/v1/messages") and origin.matches_url("http://[::1]:8484")
    assert not origin.matches_url("http://localhost:8485/v1") and not origin.matches_url("https://localhost:8484")
    assert not origin.matches_url("http://[no-address:99999999") and not origin.matches_url("")
