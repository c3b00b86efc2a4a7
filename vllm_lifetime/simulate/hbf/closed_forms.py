# SPDX-License-Identifier: Apache-2.0
"""What the simulator must come to where arithmetic alone gives the answer; the tests hold it to these."""

__all__ = ["gain", "hbm_first_share", "placed_share", "saturated_gain"]


def hbm_first_share(hbm_bytes: float, flash_bytes: float) -> float:
    """Part of all writes that HBM takes under HBM-first once its pool has turned over: its part of the capacity.

    Dead blocks go oldest first from either tier, so both tiers turn over at one rate.
    """
    return hbm_bytes / (hbm_bytes + flash_bytes)


def placed_share(long_lived_share: float, hbm_bytes: float, write_bytes_per_s: float, residence_s: float) -> float:
    """Part of all writes that HBM takes if only what is short-lived goes there and is freed at its end.

    `residence_s`: mean time that a byte stays, weighted by bytes. HBM takes what it can turn over, or all that is short-lived.
    """
    return min(1 - long_lived_share, hbm_bytes / (write_bytes_per_s * residence_s))


def gain(baseline_share: float, share: float) -> float:
    """How much longer flash lasts if HBM takes `share` of the writes, not `baseline_share`."""
    return (1 - baseline_share) / (1 - share)


def saturated_gain(baseline_share: float, long_lived_share: float) -> float:
    """The gain where HBM holds all that is short-lived."""
    return gain(baseline_share, 1 - long_lived_share)
