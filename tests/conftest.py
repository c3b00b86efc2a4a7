# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import contextlib
import signal

# A shell without job control starts what is in its background with SIGINT ignored; what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The environments of the agent frameworks have no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's business, and tests run side by side.
    settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
    settings.load_profile("any-machine")
