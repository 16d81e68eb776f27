"""The report's tables: what is hidden behind a click, where a run was made, how numbers are rounded."""

from __future__ import annotations

from warploom.bench import tables

RUN = {"device": "NVIDIA H200", "date": "2020-01-01", "commit": "abc", "torch": "2.11", "rows": []}


def test_long_tables_are_folded_and_keep_their_notes_below() -> None:
    rows = [{"case": f"case {n}", "contenders": {"warploom": {"ms": 1.0}, "x": {"refused": "no"}}} for n in range(11)]
    table = tables.timed(rows, compared=True)
    text = tables.folded(table)
    assert text.startswith('<details markdown="1">\n<summary>All 11 rows</summary>\n\n| case |')
    hidden, _, below = text.partition("</details>\n")
    assert hidden.count("| case ") == 12 and below == "\n- x does not appear everywhere: case 0: no\n"
    short = tables.timed(rows[:10], compared=True)
    assert tables.folded(short) == short


def test_provenance_is_one_line() -> None:
    roofs = {"gemm_tflops": 789.6, "copy_gb_s": 4247.4}
    assert tables.where("a.json", {**RUN, "roofs": roofs}) == (
        "Measured on NVIDIA H200, 2020-01-01, commit abc, torch 2.11, bf16 product of 8192³ 790 TFLOP/s, copy 4247 GB/s. "
        "Data: `a.json`.\n"
    )
    assert tables.where("b.json", {"device": "NVIDIA H100"}) == "Measured on NVIDIA H100. Data: `b.json`.\n"
    quick = {"device": "CPU, 2 threads", "roofs": {"gemm_tflops": 0.4577, "copy_gb_s": 84.1}}
    assert ", bf16 product 0.46 TFLOP/s, copy 84 GB/s. " in tables.where("d.json", quick)
    assert tables.where("c.json", {"processor": "x86", "threads": 2}) == "Measured on x86, 2 threads. Data: `c.json`.\n"


def test_ratios_are_rounded_down() -> None:
    assert [tables.rounded_down(each) for each in (0.9969, 1.0, 1.29999, 0.29, None)] == ["0.99", "1.00", "1.29", "0.29", "–"]
