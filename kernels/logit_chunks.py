"""How many rows of logits exist at once on a GPU. Pure: no torch, so that a memory estimate can ask.

Bytes are bounded, not rows: with few rows the head's dX, a sum over the whole vocabulary for each of rows × H
elements, leaves the card idle (H200, 8B: 1,024 rows run at half the speed of 3,000).
"""

from __future__ import annotations

#: Of one chunk's logits, which become their own gradient in place.
LOGITS_BYTES = 640 << 20
#: 4,096 rows fill any card.
MAX_ROWS = 4096
#: Rows of a GEMM's tile.
STEP = 128


def most_rows(rows: int, vocabulary: int, element_size: int) -> int:
    """What no chunk of a pass of `rows` rows or fewer exceeds."""
    most = LOGITS_BYTES // (vocabulary * element_size) // STEP * STEP
    return min(max(most, STEP), MAX_ROWS, max(-(-rows // STEP), 1) * STEP)


def chunk_rows(rows: int, vocabulary: int, element_size: int) -> int:
    """Rows of a chunk: a multiple of STEP, as few chunks as LOGITS_BYTES allows, all of about one size.

    3,117 rows of 128,256 in bf16: two chunks of 1,664 and 1,453.
    """
    chunks = max(1, -(-rows // most_rows(rows, vocabulary, element_size)))
    return most_rows(-(-rows // chunks), vocabulary, element_size)
