from __future__ import annotations

import pytest
import torch
import transformers

from warploom.integrations.transformers import register


@pytest.fixture(autouse=True)
def _registered_on_one_thread():
    """Tiny matrices: a second thread only adds waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    register()
    yield
    torch.set_num_threads(threads)
