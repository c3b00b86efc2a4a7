# SPDX-License-Identifier: Apache-2.0
"""What flash writes for each byte that it is asked to write, if not the paper's 1.02.

The paper assumes that KV blocks are written whole and in order, so that nothing has to be moved. How much hangs on it says the
other end: KV that is still wanted, mixed at random over erase blocks of which the oldest is cleaned first.
"""

from collections.abc import Callable, Mapping
from math import log

__all__ = ["AMPLIFICATIONS", "random_writes"]


def random_writes(used_share: float, spare_share: float) -> float:
    """Write amplification of uniformly random writes, erase blocks cleaned oldest first (Desnoyers, SYSTOR 2012).

    `used_share`: part of the flash on offer that holds what is still wanted. `spare_share`: flash beyond that on offer, as a part
    of it. With utilization u = used / (1 + spare), the part v of a block that is still wanted when it is cleaned solves
    u = (v - 1) / ln v, and 1 / (1 - v) is written for each byte. Raises ValueError: nothing is left over to write to.
    """
    utilization = used_share / (1.0 + spare_share)
    if utilization >= 1.0:
        raise ValueError(f"flash that is wholly in use can be written to with spare flash only; spare_share is {spare_share}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if _utilization(middle) < utilization:
            low = middle
        else:
            high = middle
    return 1.0 / (1.0 - low)


def _utilization(valid: float) -> float:

    return (valid - 1.0) / log(valid)


AMPLIFICATIONS: Mapping[str, Callable[[float], float] | None] = {
    "data file": None,
    "appended": lambda used_share: 1.0,
    "random, 28 % spare": lambda used_share: random_writes(used_share, 0.28),
    "random, 7 % spare": lambda used_share: random_writes(used_share, 0.07),
}
"""By name: from the part of flash in use to bytes written for each byte asked. None: the device's own number."""
