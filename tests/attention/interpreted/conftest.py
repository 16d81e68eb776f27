"""These tests need TRITON_INTERPRET=1 before triton is imported; tests/attention/test_interpreted.py runs them so."""

from tests.interpreter import ignored, poisoned_memory, products_in_order

__all__ = ["collect_ignore_glob", "poisoned_memory", "products_in_order"]

collect_ignore_glob = ignored()
