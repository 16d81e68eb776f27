"""These tests need TRITON_INTERPRET=1 before triton is imported; tests/decode/test_interpreted.py runs them so."""

import os

from tests.interpreter import patch_numpy_scalars

if os.environ.get("TRITON_INTERPRET") == "1":
    patch_numpy_scalars()
else:
    collect_ignore_glob = ["test_*.py"]
