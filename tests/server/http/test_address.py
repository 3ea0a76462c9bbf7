"""Why a server cannot listen, and what to change."""

import pytest

from leyden.server.http.address import bind_port
from leyden.server.options import ServeError


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_told_apart() -> None:
    with bind_port("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"127\.0\.0\.1:{port} .*: choose another port \(`server\.port`"):
            bind_port("127.0.0.1", port)
    for host in ("192.0.2.1", "nowhere.invalid"):
        with pytest.raises(ServeError, match=rf"{host}:0 .*: choose an address of this machine \(`server\.host`"):
            bind_port(host, 0)
