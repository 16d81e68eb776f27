"""Hypothesis draws anew on every run by hand and the same examples in CI, whose verdict is to be about the change."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
