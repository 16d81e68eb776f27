"""docs/from-flexattention.md: each mask_mod stands beside a builder, and the two are compared where the page is executed."""

import re
from pathlib import Path

from warploom import masks

PAGE = (Path(__file__).parents[2] / "docs" / "from-flexattention.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## mask_mods and their builders\n")[2].partition("\n## ")[0]


def test_every_kind_of_mask_mod_is_compared_with_its_builder():
    kinds = re.split(r"^### ", SECTION, flags=re.MULTILINE)[1:]
    assert len(kinds) >= 10
    for kind in kinds:
        blocks = re.findall(r"```python\n(.*?)\n```", kind, flags=re.DOTALL)
        assert blocks and all("assert same(" in block for block in blocks), kind.splitlines()[0]


def test_every_builder_that_a_mask_mod_is_written_for_is_there():
    written = re.findall(r"assert same\((.*)", SECTION)
    for name in set(masks.__all__) - {"Mask", "ResolvedMask", "TileClasses", "CausalBlockwise", "QKSparse", "RandomEviction"}:
        assert any(name in line for line in written), name


def test_same_compares_every_element():
    """The page's helper finds a difference of one element."""
    helper = re.search(r"(S = 64\n\ndef same.*?)\n```", PAGE, flags=re.DOTALL)
    assert helper
    space = dict(vars(masks))
    exec(helper[1], space)
    assert space["same"](masks.Causal(), lambda b, h, q, k: q >= k)
    assert not space["same"](masks.Causal(), lambda b, h, q, k: (q >= k) & ((q != 63) | (k != 0)))
