# SPDX-License-Identifier: Apache-2.0
"""An analysis as files: the report as one JSON object, the segments as JSON Lines."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_lifetime.analysis.report import Analysis
from vllm_lifetime.whole_file import replacing, write_text

__all__ = ["write_report", "write_segments"]


def write_report(analysis: Analysis, remarks: Sequence[str], path: Path) -> None:
    """All but the single segments. Shares are fractions, times normalised seconds. Raises OSError."""
    report = {
        "name": analysis.name,
        "sessions": analysis.sessions,
        "requests": analysis.requests,
        "delays": asdict(analysis.delays),
        "classes": [asdict(row) for row in analysis.classes],
        "temporal": None if analysis.temporal is None else asdict(analysis.temporal),
        "structural": None if analysis.structural is None else asdict(analysis.structural),
        "inter_worker": None if analysis.inter_worker is None else asdict(analysis.inter_worker),
        "verdict": analysis.verdict,
        "remarks": list(remarks),
    }
    write_text(path, json.dumps(report, indent=2) + "\n")


def write_segments(analysis: Analysis, path: Path) -> None:
    """One segment a line, fields as in `Segment`. Raises OSError."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for segment in analysis.segments:
            file.write(json.dumps(asdict(segment), ensure_ascii=False) + "\n")
