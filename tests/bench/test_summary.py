"""The report's summary, on made-up runs: which rows make a line, and what stands in it."""

from __future__ import annotations

from typing import Any

import pytest

from warploom.bench import summary


def row(suite: str, measure: str, case: str, backend: str | None = None, **ms: float) -> dict[str, Any]:
    names = {"ours": "warploom", "flex": "cuDNN-Flex", "vectors": "warploom, with the vectors", "fused": "fla, fused chunk"}
    found: dict[str, Any] = {"suite": suite, "measure": measure, "case": case}
    found["contenders"] = {names.get(name, name): {"ms": value} for name, value in ms.items()}
    return found | ({"verdict": {"backend": backend}} if backend else {})


def run(*rows: dict[str, Any], device: str = "NVIDIA H100 80GB HBM3") -> dict[str, Any]:
    return {"device": device, "roofs": {"gemm_tflops": 700.0, "copy_gb_s": 3000.0}, "rows": list(rows)}


DENSE = run(
    row("dense", "forward", "a", ours=1.0, cuDNN=2.0, FA4=1.0),
    row("dense", "forward", "b", ours=1.0, cuDNN=0.5),
    row("dense", "backward", "a", ours=1.0, cuDNN=1.239),
)
MASKS = run(
    row("masks", "forward", "tree, B1 S32768 H64/8 D128", "hopper", ours=1.0, flex=0.999),
    row("masks", "forward", "causal, B1 S32768 H64/8 D128", "hopper", ours=1.0, flex=1.5),
    row("masks", "backward", "tree, B1 S32768 H64/8 D128", "hopper", ours=1.0, flex=1.25),
    row("masks", "mask", "tree, B1", ours=0.005, vectors=0.009, flex=0.5),
    device="NVIDIA H200",
)
LINEAR = run(row("linear", "forward", "a", ours=1.0, fused=3.0, **{"fla, chunk": 2.0}, copy=0.5))


def test_a_line_has_the_mean_and_the_worst_rounded_down() -> None:
    found = summary.table({"dense.json": DENSE, "masks.json": MASKS, "linear.json": LINEAR}).splitlines()
    assert "| Dense, Hopper | torch's cuDNN | 1.00 (0.50) | 1.23 (1.23) | H100 | 2 + 1 |" in found
    assert "| Dense, Hopper | FlashAttention-4 | 1.00 (1.00) | – | H100 | 1 |" in found
    assert "| Column masks, Hopper | cuDNN's FlexAttention | 1.22 (0.99) | 1.25 (1.25) | H200 | 2 + 1 |" in found
    assert "| Linear | fla's faster kernel | 2.00 (2.00) | – | H100 | 1 |" in found
    assert not any(line.startswith(("| Dense, Triton", "| Column masks, Triton", "| Decode")) for line in found)


def test_a_short_table_is_of_the_whole_one() -> None:
    runs = {"linear.json": run(row("linear", "graph", "step", ours=1.0, **{"fla, recurrent": 2.0})), "dense.json": DENSE}
    whole, short = (summary.table(runs, each).splitlines() for each in (False, True))
    assert len(whole) == len(short) + 1 and set(short) < set(whole)
    assert any(line.startswith("| Linear, a step |") for line in whole)


def test_what_the_headline_shows_is_there() -> None:
    lines = {(family.what, peer) for family in summary.FAMILIES for peer in family.peers}
    lines |= {(what, name) for what, _, _, name in summary.PROCESSOR}
    assert set(summary.HEADLINE) <= lines


def test_cases_in_which_a_peer_is_faster_are_named() -> None:
    assert summary.behind({"dense.json": DENSE, "masks.json": MASKS}) == (
        "A peer is faster than the Hopper kernels in these cases. torch's cuDNN: forward b 0.50. "
        "cuDNN's FlexAttention: forward tree 0.99.\n"
    )
    assert summary.behind({"linear.json": LINEAR}) == ""


def test_conditions_name_sizes_versions_and_days() -> None:
    sizes = "D64 S1024 full", "D192/128 S8192 causal"
    dense = run(*(row("dense", "forward", case, ours=1.0, cuDNN=2.0) for case in sizes))
    dense |= {"torch": "2.11.0", "date": "2026-11-22"}
    assert summary.conditions({"dense.json": dense, "masks.json": MASKS | {"cudnn": 91900, "date": "2026-11-23"}}) == (
        "GPU rows: one GPU, bf16 where no FP8 is named, device time with a cold L2 cache. With the Hopper kernels, dense calls "
        "have head_dim 64 to 192 and 1,024 to 8,192 tokens a sequence; masked calls have head_dim 128 and 32,768 tokens a "
        "sequence. Measured with torch 2.11.0, cuDNN 9.19.0, 2026-11-22 to 2026-11-23.\n"
    )
    assert summary.conditions({"cpu.json": {"processor": "x86", "rows": []}}) == ""


def test_preparation_says_what_it_includes() -> None:
    said = summary.preparation({"masks.json": MASKS, "dense.json": DENSE})
    assert "(tree, B1, H200)" in said and "5.0 us from column vectors" in said and "500 us for the plan" in said
    assert "9.0 us with the vectors made from lengths" in said and "not in these numbers" in said
    assert summary.preparation({"dense.json": DENSE}) == ""


@pytest.mark.parametrize(
    "name,device,backends,whose",
    [
        ("dense.json", "NVIDIA H100 80GB HBM3", [], "Hopper"),
        ("dense.json", "NVIDIA GH200 480GB", [], "Hopper"),
        ("dense.json", "NVIDIA A100-SXM4-80GB", [], None),
        ("results/dense-triton.json", "NVIDIA H100 80GB HBM3", ["hopper"], "Triton"),
        ("masks.json", "NVIDIA H200", ["triton"], "Triton"),
        ("masks.json", "NVIDIA H200", ["hopper", "triton"], None),
        ("masks.json", "another", ["hopper"], "Hopper"),
    ],
)
def test_whose_kernels_a_run_timed(name: str, device: str, backends: list[str], whose: str | None) -> None:
    rows = [row("masks", "forward", "a", backend, ours=1.0) for backend in backends]
    assert summary.kernels(name, run(*rows, device=device)) == whose


def test_machines_in_a_word() -> None:
    devices = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "CPU, 2 threads"
    assert [summary.machine({"device": device}) for device in devices] == ["H100", "H200", "A100", "CPU, 2 threads"]


def test_processors_compare_what_stands_under_one_case() -> None:
    rows = [
        {"case": "documents", "dtype": dtype, "backward": backward, "what": what, "ms": ms}
        for dtype, backward, what, ms in (
            ("float32", False, "warploom", 2.0),
            ("float32", False, "torch, dense mask", 6.0),
            ("bfloat16", False, "warploom", 1.0),
            ("bfloat16", False, "torch, dense mask", 12.0),
            ("float32", True, "warploom", 4.0),
        )
    ]
    found = summary.table({"cpu.json": {"processor": "x86", "threads": 2, "rows": rows}})
    assert "| Packed documents, CPU | torch with a dense mask | 6.00 (3.00) | – | CPU | 2 |" in found
    assert "together with its forward" in found
