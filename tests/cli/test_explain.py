"""`warploom explain` prints the plan of warploom.explain(), from shapes alone."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
import torch

import warploom
from warploom.cli import main
from warploom.commands.mask_argument import parse_mask
from warploom.masks import Document, SlidingWindow


def printed(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert main(["explain", "--device", "cpu", *arguments]) == 0
    return capsys.readouterr().out


def test_prints_the_plan_of_the_same_call(capsys: pytest.CaptureFixture) -> None:
    q = torch.zeros(2, 96, 8, 32, requires_grad=True)
    k, v = torch.zeros(2, 160, 2, 32), torch.zeros(2, 160, 2, 48)
    plan = warploom.explain(q, k, v, causal=True, window=(40, 3), softcap=5.0, sink=torch.zeros(8), dropout_p=0.1)
    call = "--batch 2 --seqlen 96 --seqlen-k 160 --heads 8 --kv-heads 2 --head-dim 32 --head-dim-v 48"
    options = "--dtype fp32 --causal --window 40,3 --softcap 5 --sink --dropout 0.1 --backward"
    assert printed(capsys, *call.split(), *options.split()) == f"{plan}\n"
    assert json.loads(printed(capsys, *call.split(), *options.split(), "--json")) == plan.to_dict()


def test_mask_and_backend(capsys: pytest.CaptureFixture) -> None:
    q = torch.zeros(1, 96, 1, 64, dtype=torch.bfloat16)
    plan = warploom.explain(q, q, q, mask=Document([50, 46]), backend="reference")
    shown = printed(capsys, "--seqlen", "96", "--heads", "1", "--mask", "Document([50, 46])", "--backend", "reference")
    assert shown == f"{plan}\n"
    assert "column mask" in shown and "reference" in shown


def test_allocates_nothing_of_the_call_s_size() -> None:
    """A call whose q alone would hold 64 GiB; its process stays under 2 GiB."""
    code = "import sys; from warploom.cli import main; sys.exit(main(sys.argv[1:]))"
    call = "explain --device cpu --batch 64 --seqlen 131072 --heads 32 --head-dim 128 --causal --backward"
    limit = 2 * 2**30

    run = subprocess.run(
        [sys.executable, "-c", code, *call.split()],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert run.returncode == 0, run.stderr
    assert "seqlen 131072×131072" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mask", "Document([50, 40]) ^ Causal()"], "is no mask; the builders are"),
        (["--mask", "Nope(3)"], "is no mask; the builders are"),
        (["--mask", "Document(open('x'))"], "takes numbers, booleans, None and lists"),
        (["--mask", "__import__('os').getcwd()"], "is no mask"),
        (["--mask", "Document("], "cannot be read"),
        (["--mask", "SlidingWindow()"], "SlidingWindow"),
        (["--mask", "Document([50, 100])"], "lengths sum to 150"),
        (["--kv-heads", "3"], "heads"),
        (["--backend", "nonsense"], "backend"),
        (["--softcap", "-1"], "softcap"),
        (["--softcap", "nan"], "softcap"),
        (["--dropout", "2"], "dropout_p"),
        (["--window=-1,-1"], "None"),
        (["--mask", "Padding([97])"], "97"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_input_in_words(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "--device", "cpu", "--seqlen", "96", "--heads", "4", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("warploom explain: ") and words in error


@pytest.mark.parametrize("name", ["--batch", "--seqlen-k", "--heads", "--head-dim"])
@pytest.mark.parametrize("value", ["99999999999999999999", "-1", "1.5", "x"])
def test_sizes_past_their_limits_in_words(name: str, value: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["explain", "--device", "cpu", "--seqlen", "96", "--heads", "4", f"{name}={value}"])
    assert left.value.code == 2
    assert f"argument {name}: takes a whole number" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_missing_device_in_words(capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "--seqlen", "8", "--heads", "1", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["40", "40,3", "none,3", "40,none", "-2,8"])
def test_windows(text: str, capsys: pytest.CaptureFixture) -> None:
    left, right = [None if part == "none" else int(part) for part in (text + ",0").split(",")[:2]]
    q = torch.zeros(1, 96, 1, 64, dtype=torch.bfloat16)
    plan = warploom.explain(q, q, q, window=(left, right))
    assert printed(capsys, "--seqlen", "96", "--heads", "1", f"--window={text}") == f"{plan}\n"


def test_mask_expressions() -> None:
    mask = parse_mask("Document([30, 34], causal=False) & SlidingWindow(9, right=None)")
    wanted = Document([30, 34], causal=False) & SlidingWindow(9, right=None)
    assert torch.equal(mask.dense(64, 64), wanted.dense(64, 64))
