# SPDX-License-Identifier: Apache-2.0
"""Tables of the documentation."""

from collections.abc import Iterable

__all__ = ["markdown_table"]


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]], text_columns: int = 1) -> str:
    """A Markdown table without a last newline: the first `text_columns` stand on the left, the others on the right."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * text_columns + "--:|" * (len(head) - text_columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
