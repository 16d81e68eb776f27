"""docs/masks.md shows what the code does."""

import re
from pathlib import Path

import pytest

from warploom import masks

PAGE = (Path(__file__).parents[2] / "docs" / "masks.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"```python\n([^\n]+\.dense\(8, 8\))\n```\n```text\n(.*?)\n```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(PICTURES)))
def test_picture(number):
    expression, picture = PICTURES[number]
    dense = eval(expression, dict(vars(masks)))[0, 0]
    assert "\n".join(" ".join("■" if v else "·" for v in row) for row in dense.tolist()) == picture


def test_every_builder_has_a_section_with_a_picture():
    drawn = " ".join(expression for expression, _ in PICTURES)
    for name in set(masks.__all__) - {"ColumnMask", "Mask", "ResolvedMask", "TileClasses", "Full"}:
        assert f"{name}(" in drawn
        assert re.search(rf"^### .*\b{name}\b", PAGE, flags=re.MULTILINE)


def test_snippet(tmp_path, monkeypatch):
    snippet = re.search(r"```python\n(mask = Document\(\[300.*?)\n```", PAGE, flags=re.DOTALL)
    assert snippet
    monkeypatch.chdir(tmp_path)
    exec(snippet[1], dict(vars(masks)))
    assert (tmp_path / "mask.png").stat().st_size > 1000
