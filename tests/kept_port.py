# SPDX-License-Identifier: Apache-2.0
"""Ports that stay a test's own while nobody listens on them: the system gives a free one to the next who asks."""

import socket

HOST = "127.0.0.1"


class KeptPort:
    """A TCP port of the loopback interface, from now until `close`. Connections are refused while nobody listens."""

    def __init__(self) -> None:
        self._keeper = _bind(0)
        self.number: int = self._keeper.getsockname()[1]

    def listener(self) -> socket.socket:
        """A socket to listen on the port with; its user closes it."""
        return _bind(self.number)

    def close(self) -> None:
        """Give the port away."""
        self._keeper.close()


def _bind(number: int) -> socket.socket:
    """Return a socket on the port that does not listen yet. More than one may have it, but only of those made here."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((HOST, number))
    return bound
