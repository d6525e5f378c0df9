"""The numbers of the page: float64, each run of them once."""

from __future__ import annotations

import base64

import numpy as np

from .._description import Array


class Numbers:
    """All runs of float64 of the page, one after the other, equal ones once."""

    def __init__(self) -> None:
        self._place: dict[bytes, int] = {}
        self._chunks: list[bytes] = []
        self._count = 0

    def place(self, *parts: Array | float) -> int:
        """Return where a run of numbers begins, adding it if it is new."""
        run = np.concatenate([np.ravel(np.asarray(part, np.float64)) for part in parts]).astype("<f8")
        chunk = run.tobytes()
        if chunk not in self._place:
            self._place[chunk] = self._count
            self._chunks.append(chunk)
            self._count += run.size
        return self._place[chunk]

    def base64(self) -> str:
        """Return the numbers as little-endian float64."""
        return base64.b64encode(b"".join(self._chunks)).decode("ascii")
