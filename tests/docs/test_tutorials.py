"""The two tutorials are about one model: what the first trains and saves, the second loads."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def model(page: str) -> str:
    """The page's definitions of the model, from `class Layer` to the end of the block."""
    found = re.search(r"^class Layer\(.*?(?=^```)", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert found, page
    return found[0]


def test_serving_defined_a_model_whose_weights_were_never_trained():
    assert model("tutorial-serve.md") == model("tutorial-train.md")


def test_serving_loads_the_file_and_the_size_that_training_wrote():
    train, serve = ((DOCS / f"tutorial-{page}.md").read_text(encoding="utf-8") for page in ("train", "serve"))
    saved = re.search(r"torch\.save\(model\.state_dict\(\), \"(.+?)\"\)", train)
    dim = re.search(r"^SEQLEN, ROWS, DIM = \d+, \d+, (\d+)", train, flags=re.MULTILINE)
    assert saved and dim
    assert f'torch.load("{saved[1]}"' in serve
    assert f"\nDIM = {dim[1]} " in serve
