"""Real English found on every machine: the language reference of the standard library, as sentences."""

from __future__ import annotations

import random
import re

_PARAGRAPH = re.compile(r"\n\s*\n")
_RULE = re.compile(r"\s*([*=\-~^\"+#])\1{3,}\s*")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"(])")
_CODE = ("::=", ">>>")


def reference_sentences() -> list[str]:
    """Every sentence of `pydoc_data.topics`, in order, without code, grammar, headings and repetitions."""
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in _PARAGRAPH.split(topics[name]):
            if _is_prose(paragraph):
                text = " ".join(line.strip() for line in paragraph.splitlines())
                found.update((sentence, None) for sentence in _split(text))
    return list(found)


def _is_prose(paragraph: str) -> bool:
    lines = [line for line in paragraph.splitlines() if line.strip()]
    indented = any(len(line) - len(line.lstrip()) >= 3 for line in lines)
    return not indented and not any(map(_RULE.fullmatch, lines)) and not any(mark in paragraph for mark in _CODE)


def _split(text: str) -> list[str]:
    pieces = (piece.lstrip("*- ").strip() for piece in _SENTENCE_END.split(text))
    return [piece for piece in pieces if piece.endswith((".", "?", "!")) and len(piece.split()) >= 4]


def sample(count: int, seed: int) -> list[str]:
    """`count` different sentences in random order.

    Raises:
        ValueError: fewer than 2, or more than there are.
    """
    every = reference_sentences()
    if not 2 <= count <= len(every):
        raise ValueError(f"sentences: got {count}; this Python's language reference has from 2 to {len(every)}")
    return random.Random(seed).sample(every, count)
