"""The site around the pages: pictures that a tool draws, and the tags that show a page where it is shared."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from tools import docs_pictures

ROOT = Path(__file__).parents[2]


def test_the_picture_of_masks_is_what_the_tool_draws():
    assert docs_pictures.svg() == (docs_pictures.IMAGES / "masks.svg").read_text(encoding="utf-8")


def test_the_card_has_the_size_that_the_tags_say():
    head = (docs_pictures.IMAGES / "social-card.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    tags = (ROOT / "docs" / "overrides" / "main.html").read_text(encoding="utf-8")
    assert f'og:image:width" content="{width}"' in tags and f'og:image:height" content="{height}"' in tags


@pytest.mark.parametrize("url", ["https://example.org/warploom/", "https://example.org/warploom/0.1"])
def test_a_shared_page_had_no_card(url, tmp_path, monkeypatch):
    """mike gives each version a site_url without a slash at its end."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Home\n", encoding="utf-8")
    (docs / "other.md").write_text('# The "other" page\n', encoding="utf-8")
    nav = [{"Home": "index.md"}, {"Other": "other.md"}]
    build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(tmp_path / "site"), site_url=url, nav=nav))

    for page, title in (("index.html", "Warploom"), ("other/index.html", "Other - Warploom")):
        html = (tmp_path / "site" / page).read_text(encoding="utf-8")
        tags = dict(re.findall(r'<meta (?:property|name)="((?:og|twitter):\S+)" content="(.*?)">', html))
        assert tags["og:image"] == tags["twitter:image"] == url.rstrip("/") + "/images/social-card.png"
        assert tags["og:title"] == tags["twitter:title"] == title
        assert tags["twitter:card"] == "summary_large_image"
