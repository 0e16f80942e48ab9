"""Traces that no model recorded (docs/trace.md), for what a recorded one does not reach."""

import random
import struct

FORMAT_F32, SCORER_NONE = 1, 0
MASK = (1 << 64) - 1


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def seal(body):
    return body + struct.pack("<Q", fnv1a(body))


def crowded(requests=4, turns=1, rows=80):
    """Requests that do not fit a pool of 2 MiB together: of one layer with 16 KV heads of 128
    dimensions in f32, 2 MiB hold 8 blocks of 16 tokens. A request is over after a step, so that the
    others get their turn. Of a turn's rows the last is rolled back; outputs are not recorded."""
    heads, dim = 16, 128
    draw = random.Random(7)
    values = [struct.pack("<e", draw.uniform(-1, 1)) for _ in range(4096)]
    parts = [
        b"KVTRACE1",
        struct.pack("<4I", 1, heads, heads, dim),
        struct.pack("<3I", FORMAT_F32, 0, 0),
        struct.pack("<3I", SCORER_NONE, 0, 0),
        struct.pack("<5I", 0, 0, 0, 0, 0),
        struct.pack("<IQ", requests, 0),
        struct.pack("<I", 0),
    ]
    for _ in range(requests):
        seen = turns * (rows - 1)
        parts.append(struct.pack("<4I", rows, turns, 0, seen))
        parts.append(struct.pack("<I", seen))
        for _ in range(turns):
            parts.append(struct.pack("<3I", rows, rows - 1, 0))
            parts.append(struct.pack(f"<{rows}I", *range(rows)))
            parts.append(b"".join(draw.choices(values, k=3 * rows * heads * dim)))
    return seal(b"".join(parts))
