# SPDX-License-Identifier: Apache-2.0
"""What is done with servers of one's own first and judged later, by the tests of one file.

Most of it is starting servers, each the work of one thread, and nothing of it is timed: one such piece runs beside the tests of
shared servers, and two when those are over.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
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


class Ahead:
    """The pieces that are wanted, the longest first."""

    def __init__(self, wanted: Iterable[str], *arguments: Any) -> None:
        """Nothing is under way yet."""
        names = sorted(_pieces.keys() & set(wanted), key=lambda name: -_pieces[name][0])
        self.results: dict[str, Future[Any]] = {name: Future() for name in names}
        self._waiting = deque(names)
        self._arguments = arguments
        self._lanes: list[threading.Thread] = []

    def go_on(self, lanes: int) -> None:
        """Work on so many pieces at a time, at least."""
        while len(self._lanes) < lanes:
            lane = threading.Thread(target=self._work)
            self._lanes.append(lane)
            lane.start()

    def end(self) -> None:
        """Begin no other piece, and wait for those under way."""
        self._waiting.clear()
        for lane in self._lanes:
            lane.join()

    def _work(self) -> None:
        while True:
            try:
                name = self._waiting.popleft()
            except IndexError:
                return
            try:
                self.results[name].set_result(_pieces[name][1](*self._arguments))
            except BaseException as error:  # also what pytest raises to skip: it is for the tests that ask
                self.results[name].set_exception(error)
