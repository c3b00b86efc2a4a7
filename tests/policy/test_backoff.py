# SPDX-License-Identifier: Apache-2.0
"""Failures in a row are tried more and more rarely."""

from vllm_lifetime.policy.backoff import Backoff


def test_waits_double_up_to_the_longest_and_a_success_ends_them() -> None:
    """1, 2, 4, 5, 5 seconds with a longest wait of 5."""
    backoff = Backoff(longest_s=5)
    now = 100.0
    assert backoff.may_try(now) and not backoff.is_failing
    for wait in (1, 2, 4, 5, 5):
        backoff.note(False, now)
        assert backoff.is_failing
        assert not backoff.may_try(now + wait - 0.001)
        now += wait
        assert backoff.may_try(now)
    backoff.note(True, now)
    assert backoff.may_try(now) and not backoff.is_failing
