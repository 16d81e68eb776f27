"""What docs/smem.md shows beside its snippets: pictures that are there, and the page as the code writes it."""

from __future__ import annotations

import re
from pathlib import Path

from warploom.cli import main
from warploom.smem.atom_svg import svg
from warploom.smem.atoms import picture

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "smem.md").read_text(encoding="utf-8")


def test_pictures_of_banks_are_what_their_commands_write(tmp_path: Path) -> None:
    pictures = re.findall(r"\]\(images/(smem-[a-z]+\.svg)\)", PAGE)
    assert len(pictures) == 3
    for name in pictures:
        (command,) = re.findall(rf"\$ warploom (banks .*) --draw {re.escape(name)}", PAGE)
        written = tmp_path / name
        assert main([*command.split(), "--draw", str(written)]) == 0
        assert written.read_text(encoding="utf-8") == (DOCS / "images" / name).read_text(encoding="utf-8")


def test_hopper_pictures_are_what_their_commands_write() -> None:
    pictures = re.findall(r"\]\(images/((?:tma|wgmma)-[a-z0-9-]+)\.svg\)", PAGE)
    assert len(pictures) == 4
    for name in pictures:
        assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == svg(picture(name))
        assert f"--atom {name} --draw {name}.svg" in PAGE


def test_links_into_the_page_name_its_parts() -> None:
    document = (DOCS / "images" / "banks.html").read_text(encoding="utf-8")
    parts = re.findall(r"images/banks\.html#([a-z]+)\)", PAGE)
    assert parts and all(f'id="tab-{part}"' in document for part in parts)


def test_the_interactive_page_is_what_its_command_writes(tmp_path: Path) -> None:
    assert "](images/banks.html)" in PAGE
    (command,) = re.findall(r"\$ warploom (banks .*) --draw tile\.html", PAGE)
    written = tmp_path / "tile.html"
    assert main([*command.split(), "--draw", str(written)]) == 0
    assert written.read_text(encoding="utf-8") == (DOCS / "images" / "banks.html").read_text(encoding="utf-8")
