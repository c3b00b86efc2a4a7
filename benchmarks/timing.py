# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of single calls share."""

import gc


class QuietGc:
    """No collection while timing; what exists already is not looked at again."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()
        gc.unfreeze()
