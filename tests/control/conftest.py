# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import control_fakes
import pytest


@pytest.fixture(params=["route", "direct"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test for both ways on which a POST of boundaries is answered."""
    monkeypatch.setattr(control_fakes, "is_direct", request.param == "direct")
