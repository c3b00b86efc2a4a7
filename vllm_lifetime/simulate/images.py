# SPDX-License-Identifier: Apache-2.0
"""In which format a plot is written."""

from pathlib import Path

__all__ = ["image_format"]


def image_format(path: Path) -> str:
    """The format that `path` names by its suffix; png where it has none.

    Raises ValueError for any other suffix, and ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # pgf is written by LaTeX, which is seldom there.
    known = sorted(set(FigureCanvasAgg.get_supported_filetypes()) - {"pgf"})
    name = path.suffix[1:].lower() or "png"
    if name not in known:
        raise ValueError(f"a plot cannot be written as {path.suffix!r}, as in {str(path)!r}; the formats are {', '.join(known)}")
    return name
