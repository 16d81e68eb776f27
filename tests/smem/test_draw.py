"""Pictures and the page show what the model counts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from warploom.cli import main
from warploom.smem import Swizzle, Tile, count
from warploom.smem.draw import COLORS, CONFLICT, draw
from warploom.smem.page import CHECKED, write_page
from warploom.smem.page_template import TEMPLATE

LAYOUT = Tile(16, 16, swizzles=(Swizzle(1, 3, 3),))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def rectangles(svg: str, color: str) -> int:
    return len(re.findall(rf"fill: {color}", svg))


def test_svg_counts_words_and_conflicts(tmp_path: Path) -> None:
    draw(tmp_path / "tile.svg", [count("ldmatrix.x4", LAYOUT)])
    svg = (tmp_path / "tile.svg").read_text()
    assert "ldmatrix.x4 on 16×16 f16, swizzle &lt;1,3,3&gt;" in svg
    assert "8 wavefronts, 4 ideal, 4 excess" in svg and "4 wavefronts, 4 ideal, 0 excess" in svg
    for color in COLORS:
        # 32 words a phase, before and after; 16 banks in use before and 32 after.
        assert rectangles(svg, color) == 2 * 32 + 16 + 32
    assert len(re.findall(rf"stroke: {CONFLICT}", svg)) == 4 * 32 + 4 * 16


@pytest.mark.parametrize(
    ("pattern", "tile"),
    [
        ("sts.128", Tile(16, 16, pad=8)),
        ("lds.32@columns", Tile(256, 64, "f32", swizzles=(Swizzle(5, 0, 6),))),
        ("lds.16", Tile(1, 3)),
        ("ldmatrix.x4@256x16", Tile(16, 256)),
    ],
    ids=str,
)
def test_png(tmp_path: Path, pattern: str, tile: Tile) -> None:
    from matplotlib.image import imread

    draw(tmp_path / "tile.png", [count(pattern, tile)])
    image = imread(tmp_path / "tile.png")
    assert image.ndim == 3 and image.shape[1] > 900
    assert len({tuple(pixel) for pixel in image[::5, ::5].reshape(-1, image.shape[2]).round(2).tolist()}) > 3


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install warploom\[demo\]"):
        draw(tmp_path / "tile.svg", [count("ldmatrix.x4", LAYOUT)])


def test_page_is_self_contained(tmp_path: Path) -> None:
    write_page(tmp_path / "banks.html", [count("ldmatrix.x4", LAYOUT)])
    page = (tmp_path / "banks.html").read_text()
    assert '"swizzle": "1,3,3"' in page
    assert "/*" not in page.replace("/*START*/", ""), "a placeholder is left"
    addresses = set(re.findall(r"https?://[^\"'\s]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace, and nothing to load"
    assert not re.search(r"\b(src|href)\s*=|@import|url\(", page)


def test_page_template_has_every_placeholder() -> None:
    assert set(re.findall(r"/\*(\w+)\*/", TEMPLATE)) == {"START", "CHECKS", "ACCESSES", "DTYPES", "ORDERS"}


def test_design_draws_the_designed_layout(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "best.html"
    line = f"--design --rows 16 --cols 128 --access ldmatrix.x4 --draw {path}"
    assert main(["banks", *line.split()]) == 0
    assert '"swizzle": "3,3,4"' in path.read_text()


def test_page_in_a_browser(tmp_path: Path) -> None:
    """Its script reproduces the Python model. Where there is no browser, the page still says so to whoever opens it."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    write_page(tmp_path / "banks.html", [count("ldmatrix.x4", LAYOUT)])
    run = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=3000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / "banks.html").as_uri(),
        ],
        capture_output=True,
        text=True,
    )
    assert f'class="">Model check: {len(CHECKED)} of {len(CHECKED)} predictions' in run.stdout
    shown = dict(re.findall(r'id="n-([a-z-]+)">(\d+)<', run.stdout))
    assert shown == {"phases": "4", "wavefronts": "4", "excess": "0", "excess-as-it-is": "4"}
    assert 'id="error" role="alert"></div>' in run.stdout
