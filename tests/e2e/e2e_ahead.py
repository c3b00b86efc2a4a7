# SPDX-License-Identifier: Apache-2.0
"""What is done with servers of one's own first and judged later, by the tests of one file.

Most of it is starting servers, each the work of one thread, and nothing of it is timed: two such pieces run at a time.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from e2e_servers import Servers

Piece = Callable[[Servers, pytest.TempPathFactory], Any]

_pieces: dict[str, tuple[int, Piece]] = {}
"""The number of starts in a row, and the piece, by the name of its fixture."""


def ahead(num_starts: int) -> Callable[[Piece], Any]:
    """Make a piece the fixture of its name. It is made when the first of all such fixtures is asked for."""

    def make_fixture(piece: Piece) -> Any:
        name = piece.__name__
        if name in _pieces and _pieces[name][1].__module__ != piece.__module__:
            raise ValueError(f"two files have a piece called {name}: one of them would get the other's")
        _pieces[name] = (num_starts, piece)

        @pytest.fixture(scope="module", name=name)
        def fixture(pieces: dict[str, Future[Any]]) -> Any:
            return pieces[name].result()

        return fixture

    return make_fixture


def begin(threads: ThreadPoolExecutor, wanted: Iterable[str], *arguments: Any) -> dict[str, Future[Any]]:
    """Begin the pieces that are wanted, the longest first."""
    names = sorted(_pieces.keys() & set(wanted), key=lambda name: -_pieces[name][0])
    return {name: threads.submit(_pieces[name][1], *arguments) for name in names}
