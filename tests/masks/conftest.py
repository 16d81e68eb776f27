import os
import random

import pytest


@pytest.fixture
def seed(request):
    """A fresh seed for each test, printed with a failure; WARPLOOM_TEST_SEED repeats one."""
    value = int(os.environ.get("WARPLOOM_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"WARPLOOM_TEST_SEED={value}")
    return value
