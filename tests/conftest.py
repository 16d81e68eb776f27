"""Hypothesis draws anew on every run by hand and the same examples in CI, whose verdict is to be about the change.

It looks at no clock: an example may take as long as a busy machine needs.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "here", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("here")
