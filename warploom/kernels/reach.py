"""What host and kernels agree on about norms of queries and keys."""

from __future__ import annotations

PARTS = 128  # of a head's rows, the largest norm of each apart
