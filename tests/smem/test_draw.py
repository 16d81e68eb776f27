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
from warploom.smem.draw import draw
from warploom.smem.laid import LaidTile
from warploom.smem.page import CHECKED, write_page

LAYOUT = Tile(16, 16, swizzles=(Swizzle(1, 3, 3),))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.parametrize(
    ("pattern", "tile"),
    [
        ("sts.128", Tile(16, 16, pad=8)),
        ("lds.32@columns", Tile(256, 64, "f32", swizzles=(Swizzle(5, 0, 6),))),
        ("lds.16", Tile(1, 3)),
        ("ldmatrix.x4@256x16", Tile(16, 256)),
        ("ldmatrix.x4", LaidTile.of("Swizzle<3,3,3> o (8,64):(64,1)", "f16", 16)),
    ],
    ids=str,
)
def test_png(tmp_path: Path, pattern: str, tile: Tile | LaidTile) -> None:
    from matplotlib.image import imread

    draw(tmp_path / "tile.png", [count(pattern, tile)])
    image = imread(tmp_path / "tile.png")
    assert image.ndim == 3 and image.shape[1] > 900
    assert len({tuple(pixel) for pixel in image[::5, ::5].reshape(-1, image.shape[2]).round(2).tolist()}) > 3


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^banks as \.png need matplotlib \(pip install 'warploom\[lab\]'\)"):
        draw(tmp_path / "tile.png", [count("ldmatrix.x4", LAYOUT)])
    draw(tmp_path / "tile.svg", [count("ldmatrix.x4", LAYOUT)])
    assert (tmp_path / "tile.svg").stat().st_size


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ending in \.svg, \.png or \.html"):
        draw(tmp_path / "tile.pdf", [count("ldmatrix.x4", LAYOUT)])


def test_page_is_self_contained(tmp_path: Path) -> None:
    write_page(tmp_path / "banks.html", [count("ldmatrix.x4", LAYOUT)])
    page = (tmp_path / "banks.html").read_text()
    assert '"swizzle": "1,3,3"' in page
    assert not re.search(r"@[A-Z]+@", page), "a placeholder is left"
    addresses = set(re.findall(r"https?://[^\"'\s]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace, and nothing to load"
    assert not re.search(r"\b(src|href)\s*=|@import|url\(", page)


def test_design_draws_the_designed_layout(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "best.html"
    line = f"--design --rows 16 --cols 128 --access ldmatrix.x4 --draw {path}"
    assert main(["banks", *line.split()]) == 0
    assert '"swizzle": "3,3,4"' in path.read_text()


def opened(page: Path) -> str:
    """The page's document after its script has run, as a browser has it."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    run = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=3000",
            f"--user-data-dir={page.parent / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
    )
    assert f'class="">Model check: {len(CHECKED)} of {len(CHECKED)} predictions' in run.stdout
    assert 'id="error" role="alert"></div>' in run.stdout
    return run.stdout


def shown(document: str) -> dict[str, str]:
    return dict(re.findall(r'id="n-([a-z-]+)"[^>]*>(\d+)<', document))


def test_page_in_a_browser(tmp_path: Path) -> None:
    """Its script reproduces the Python model. Where there is no browser, the page still says so to whoever opens it."""
    write_page(tmp_path / "banks.html", [count("ldmatrix.x4", LAYOUT)])
    document = opened(tmp_path / "banks.html")
    assert shown(document) == {"phases": "4", "wavefronts": "4", "excess": "0", "excess-as-it-is": "4"}
    assert "Swizzle&lt;1,3,3&gt;: 0 excess wavefronts over the tile" in document


def test_page_finds_the_swizzle_of_two_accesses(tmp_path: Path) -> None:
    tile = Tile(16, 16)
    write_page(tmp_path / "banks.html", [count("sts.128", tile), count("ldmatrix.x4", tile)])
    document = opened(tmp_path / "banks.html")
    assert "Swizzle&lt;1,3,3&gt; removes all 4 excess wavefronts, with as few bits as can be (16 swizzles tried" in document
    assert "As it is: 4 excess wavefronts over the tile" in document
    assert "With Swizzle&lt;1,3,3&gt;, found: 0 excess wavefronts over the tile" in document


def test_the_button_takes_the_swizzle(tmp_path: Path) -> None:
    page = tmp_path / "banks.html"
    write_page(page, [count("ldmatrix.x4", Tile(16, 128))])
    page.write_text(page.read_text() + '<script>$("find").click(); document.title = $("swizzle").value;</script>')
    document = opened(page)
    assert "<title>3,3,4</title>" in document
    assert ">Swizzle&lt;3,3,4&gt;: 0 excess wavefronts over the tile" in document


def test_a_tile_without_conflicts_has_one_panel(tmp_path: Path) -> None:
    write_page(tmp_path / "banks.html", [count("lds.32", Tile(32, 32, "f32"))])
    document = opened(tmp_path / "banks.html")
    assert "No swizzle is needed: the tile has no conflicts as it is." in document
    assert '<section id="laid-panel" hidden="">' in document


def test_padding_is_shown_where_no_swizzle_is_as_good(tmp_path: Path) -> None:
    write_page(tmp_path / "banks.html", [count("lds.16", Tile(24, 20)), count("lds.64@columns", Tile(24, 20))])
    assert "No swizzle helps (34 swizzles tried" in opened(tmp_path / "banks.html")
    write_page(tmp_path / "banks.html", [count("lds.32@columns", Tile(33, 40, "f32"))])
    document = opened(tmp_path / "banks.html")
    assert re.search(r"With padding \d+, found: 0 excess wavefronts over the tile", document)


def test_a_text_that_is_no_layout_is_refused_where_it_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "banks.html"
    write_page(page, [count("lds.32", LaidTile.of("(8,64):(64,1)", "f16", 4))])
    typed = 'openLayout(text); document.title += $("error").textContent;'
    texts = '["(8,64):(64,x)", "(8,64):(64,1)"]'
    page.write_text(page.read_text() + f"<script>for (const text of {texts}) {{ {typed} }}</script>")
    assert "<title>Shared-memory bankslayout takes a number or \"(\" where ▸ stands: (8,64):(64,▸x)</title>" in opened(page)


def test_page_of_a_layout(tmp_path: Path) -> None:
    tile = LaidTile.of("Swizzle<3,3,3> o (64,64):(64,1)", "f16", 16)
    write_page(tmp_path / "banks.html", [count("ldmatrix.x4", tile)])
    document = opened(tmp_path / "banks.html")
    assert shown(document) == {"phases": "64", "wavefronts": "64", "excess": "0", "excess-without-the-swizzle": "448"}
    assert "64×64 elements, the first mode down, coloured by bank" in document


@pytest.mark.parametrize(
    ("pattern", "tile", "said"),
    [
        ("ldmatrix.x4@256x16", Tile(16, 256), "without a view"),
        ("lds.16", Tile(257, 8), "up to 256×256"),
        ("lds.16", LaidTile.of("(1024,128)"), "up to 65536 elements"),
    ],
    ids=str,
)
def test_page_refuses(tmp_path: Path, pattern: str, tile: Tile | LaidTile, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        write_page(tmp_path / "banks.html", [count(pattern, tile)])
