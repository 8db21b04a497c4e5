"""A listening socket that is about to close, seen from its clients."""

import socket

from llamastead.gateway.last_call import accept_waiting


def test_everybody_in_the_queue_is_accepted_and_nobody_is_waited_for() -> None:
    """Three clients connect and one of them sends; all are accepted at once, what was sent is there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        clients[1].sendall(b"hello")
        accepted = accept_waiting(listener)
        listener.close()
        assert [each.getpeername() for each in accepted] == [each.getsockname() for each in clients]
        assert accepted[1].recv(16) == b"hello"
        for each in clients + accepted:
            each.close()


def test_an_empty_queue_gives_nobody() -> None:
    """Without any client the call returns at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert accept_waiting(listener) == []
