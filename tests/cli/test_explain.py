"""`warploom explain` prints the plan of warploom.explain(), from shapes alone."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest
import torch

import warploom
from tests.sizes import Sizes
from warploom.bias import ALiBi, Key, Relative
from warploom.cli import main
from warploom.commands.devices import CAPABILITIES
from warploom.commands.mask_argument import parse_mask
from warploom.masks import Document, SlidingWindow
from warploom.runtime import machine, modules, triton_backend


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


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("alibi", ALiBi(torch.ones(4))),
        ("relative", Relative(torch.zeros(4, 9))),
        ("key", Key(torch.zeros(1, 4, 96))),
        ("tensor", torch.zeros(4, 96, 96)),
    ],
)
def test_biases(name: str, bias: Any, capsys: pytest.CaptureFixture) -> None:
    q = torch.zeros(1, 96, 4, 64, dtype=torch.bfloat16)
    assert printed(capsys, "--seqlen", "96", "--heads", "4", "--bias", name) == f"{warploom.explain(q, q, q, bias=bias)}\n"
    shown = printed(capsys, "--seqlen", "96", "--heads", "4", "--bias", name, "--bias-grad", "--backward")
    assert "with a gradient" in shown


@pytest.mark.parametrize("given", [["--bias-grad"], ["--bias-grad", "--backward"], ["--bias-grad", "--bias", "alibi"]], ids=len)
def test_a_gradient_of_no_bias_was_left_out_without_a_word(given: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "--seqlen", "96", "--heads", "4", *given]) == 2
    assert "--bias-grad asks for the gradient of a bias" in capsys.readouterr().err


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


CALL = ("--seqlen", "300", "--heads", "4", "--head-dim", "128", "--causal")


def elsewhere(capsys: pytest.CaptureFixture, device: str, *arguments: str) -> dict:
    """What it says in JSON, of the call above; the text says no less."""
    assert main(["explain", "--device", device, *CALL, *arguments]) == 0
    text = capsys.readouterr().out
    assert main(["explain", "--device", device, *CALL, *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert text.startswith(f"device    {device.lower()}, compute capability {found['device']['capability']}, not here: ")
    assert f"runs      {found['implementation']}: {found['reason']}" in text
    assert all(f"refused   {row['implementation']}: {row['why']}\n" in text + "\n" for row in found["refused"])
    return found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All optional packages, as far as the package can tell."""
    monkeypatch.setattr(modules, "find_spec", lambda name: object())
    for name in ("cannot_load", "cannot_build"):
        monkeypatch.setattr(modules, name, lambda: None)
    monkeypatch.setattr(triton_backend, "_HAS_TRITON", True)


@pytest.mark.parametrize(
    ("device", "runs"),
    [("h100", "hopper"), ("H200", "hopper"), ("sm_90a", "hopper"), ("a100", "ampere"), ("l40s", "ampere"), ("b200", "triton")],
)
def test_a_gpu_that_is_not_here(device: str, runs: str, installed: None, capsys: pytest.CaptureFixture) -> None:
    found = elsewhere(capsys, device)
    assert (found["implementation"], found["with_extras"]) == (runs, None)
    assert found["device"]["here"] is False
    assert machine.assumed is None and "this machine has" not in str(modules.cannot_run())


def test_a_gpu_that_is_not_here_has_the_tiles_and_the_mask_of_its_call(installed: None, capsys: pytest.CaptureFixture) -> None:
    options = ["--mask", "Document([100, 200])", "--backward", "--sink", "--dropout", "0.1", "--softcap", "0"]
    found = elsewhere(capsys, "h100", *options)
    m, n = found["tile"]
    tiles = (Document([100, 200]) & warploom.masks.Causal()).tiles(m, n, 300, 300)
    assert found["tiles"] == {name: int(getattr(tiles, name)) for name in ("hidden", "partial", "full")}
    assert set(found["backward_tiles"]) == {"dq", "dk", "dv"}
    assert "column mask (lts); sink; dropout; forward + backward" in found["call"]


def test_a_gpu_that_is_not_here_without_the_extras_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """It says what would run with what is installed, why, and what the extras would change."""
    monkeypatch.setattr(modules, "find_spec", lambda name: None)
    monkeypatch.setattr(triton_backend, "_HAS_TRITON", False)
    found = elsewhere(capsys, "h100")
    assert found["implementation"] == "reference"
    refused = {row["implementation"]: row["why"] for row in found["refused"]}
    assert "pip install 'warploom[hopper]'" in refused["hopper"] and "pip install 'warploom[triton]'" in refused["triton"]
    assert found["with_extras"]["implementation"] == "hopper"
    assert found["with_extras"]["tile"] is not None
    assert main(["explain", "--device", "h100", *CALL]) == 0
    shown = capsys.readouterr().out
    assert "with all extras (pip install 'warploom[triton,hopper]')\nruns      hopper: " in shown
    assert main(["explain", "--device", "h100", "--backend", "hopper", *CALL]) == 2
    assert "backend='hopper' cannot run this call" in capsys.readouterr().err


@pytest.mark.parametrize("bias", ["alibi", "relative", "key", "tensor"])
def test_a_bias_on_a_gpu_that_is_not_here(bias: str, installed: None, capsys: pytest.CaptureFixture) -> None:
    found = elsewhere(capsys, "h100", "--bias", bias, "--backward")
    here = bias in ("alibi", "relative")
    assert found["implementation"] == ("hopper" if here else "triton")
    refused = {row["implementation"]: row["why"] for row in found["refused"]}
    assert here or refused["hopper"] == "takes no bias but ALiBi and tables of distances"


def test_who_runs_a_backward_pass_that_the_forward_s_has_no_kernel_for(installed: None, capsys: pytest.CaptureFixture) -> None:
    call = ("--bias", "alibi", "--backward")
    assert "; backward attn_bwd_sm90_" in elsewhere(capsys, "h100", *call)["reason"]
    assert elsewhere(capsys, "h100", *call, "--bias-grad")["reason"].endswith(
        "; backward by triton: computes no gradient of slopes"
    )
    table = ("--bias", "relative", "--backward", "--bias-grad")
    assert "_distance_grad" in elsewhere(capsys, "h100", *table)["reason"]


def test_who_runs_the_backward_pass_of_ampere_s_forward(installed: None, capsys: pytest.CaptureFixture) -> None:
    for head_dim, name in (("64", "triton"), ("8", "reference")):
        found = elsewhere(capsys, "a100", "--head-dim", head_dim, "--backward")
        assert found["implementation"] == "ampere" and "; module attn_fwd_sm80_" in found["reason"]
        assert found["reason"].endswith(f"; backward by {name}: it has none of its own")
    assert "backward" not in elsewhere(capsys, "a100")["reason"]


def test_every_name_of_a_gpu_is_answered(capsys: pytest.CaptureFixture) -> None:
    for name, (major, minor) in CAPABILITIES.items():
        assert elsewhere(capsys, name)["device"]["capability"] == f"{major}.{minor}"


@pytest.mark.parametrize("name", ["nonsense", "sm_", "sm_9", "h1000", ""])
def test_a_gpu_that_nobody_knows_in_words(name: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["explain", "--device", name, *CALL]) == 2
    error = capsys.readouterr().err
    assert error.startswith("warploom explain: --device takes cpu, cuda, one of a100, ") and error.count("\n") == 1


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("seqlen", [2**20, 2**24, 2**29])
@pytest.mark.parametrize("band", ["--causal", "--window=4096,100", "--window=none,-7"])
def test_the_longest_call_under_a_band_makes_no_large_tensor(
    device: str, seqlen: int, band: str, capsys: pytest.CaptureFixture
) -> None:
    with Sizes() as sizes:
        assert main(["explain", "--device", device, "--seqlen", str(seqlen), "--heads", "32", band, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["tiles"].values()) == -(-seqlen // found["tile"][0]) * -(-seqlen // found["tile"][1])
    assert sizes.largest <= 64
