"""Pictures: files of the right kind, showing what the mask says."""

import re
import sys

import pytest
import torch

from warploom import masks
from warploom.masks import ColumnMask, draw

PARTIAL_AND_PADDED = masks.Document([[6, 10, 5], [20]]) & masks.Padding([21, 9])


@pytest.mark.parametrize(
    "mask,q,k",
    [
        (masks.Causal(), 9, 9),
        (masks.SlidingWindow(3), 1, 40),
        (masks.Full(), 1, 1),
        (masks.Chunked(100), 700, 900),
        (PARTIAL_AND_PADDED, 21, 21),
    ],
)
def test_png(tmp_path, mask, q, k):
    from matplotlib.image import imread

    mask.draw(tmp_path / "mask.png", q, k)
    image = imread(tmp_path / "mask.png")
    assert image.ndim == 3 and min(image.shape[:2]) > 200
    assert len({tuple(pixel) for pixel in image[::7, ::7].reshape(-1, image.shape[2]).round(2).tolist()}) > 2


def test_svg_counts_colours_and_words(tmp_path):
    from matplotlib import rc_context

    mask = masks.Document([6, 10, 5], causal=False)
    tiles = mask.tiles(4, 4)
    with rc_context({"svg.fonttype": "none"}):
        mask.draw(str(tmp_path / "mask.svg"), block_m=4, block_n=4)
    text = (tmp_path / "mask.svg").read_text()
    assert "Document([6, 10, 5], causal=False)" in text
    assert f"{mask.density():.1%} visible, {tiles.skipped:.1%} of tiles skipped" in text
    for count, words in ((tiles.hidden, "hidden"), (tiles.partial, "partial"), (tiles.full, "full")):
        assert re.search(rf"{words}: [a-z ]+\({int(count)}\)", text)
    for kind, count in ((draw.HIDDEN, tiles.hidden), (draw.PARTIAL, tiles.partial), (draw.FULL, tiles.full)):
        assert text.count(f"fill: {draw.COLORS[kind]}") == int(count) + 1  # the tiles and the legend's patch
    assert text.count(f"fill: {draw.ELEMENT}") == int(mask.dense().sum()) + 1


def test_batch_and_head(tmp_path):
    mask = ColumnMask(torch.randint(0, 9, (2, 3, 8), dtype=torch.int32), causal=True)
    mask.draw(tmp_path / "mask.png", batch=1, head=2)
    with pytest.raises(ValueError, match="batch=2, head=0: the mask has 2 batch entries and 3 heads"):
        mask.draw(tmp_path / "mask.png", batch=2)


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"ending in .svg or .png, got 'mask.jpg'"):
        masks.Causal().draw("mask.jpg", 4, 4)
    with pytest.raises(ValueError, match="nothing to draw"):
        masks.Causal().draw("mask.png", 0, 4)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        masks.Causal().draw(tmp_path / "mask.png", 4, 4)


@pytest.mark.parametrize("q,k", [(1, 1), (1, 5000), (64, 64), (65, 65), (1024, 1024), (131072, 131072), (8, 40)])
def test_default_tiles(q, k):
    m, n = draw.tile_size(q, k)
    assert 1 <= m <= max(1, q // 2) and 1 <= n <= max(1, k // 2) and max(m, n) <= 128
    assert -(-k // n) <= 40 or n == 128
