"""docs/performance.md, its pictures and README.md's table, from the JSON of benchmark runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean as mean

from warploom.bench import pictures, summary, tables
from warploom.bench.bars import BARS, judged, measured
from warploom.bench.mask_bars import Row
from warploom.bench.tables import Run

__all__ = ["fill", "is_run", "judged", "mean", "read", "write"]

INTRODUCTION = """# Performance

Made by `warploom bench report` from the JSON files in `benchmarks/results/`; every number below is in one of them. How
they are measured, and what they do not say, is in [Benchmarks](bench.md). Ratios are the peer's time over ours, so more
than 1 means that ours is faster; means are geometric.
"""
# Suites in the order of the page, and what a measure of theirs is where its name does not say it.
SUITES = {
    "dense": "Dense attention",
    "masks": "Column masks",
    "decode": "Decode",
    "serving": "Serving loop",
    "linear": "Linear attention",
    "fp8": "FP8 attention",
    "bias": "Biases",
    "training": "Training step",
}
PASSES = ("forward", "backward")
MEASURES = {
    ("masks", "mask"): "Preparing a mask",
    ("masks", "host"): "Host time of a call",
    ("decode", "graph"): "Replayed from a graph",
    ("decode", "eager"): "Queued by the host",
    ("decode", "graph, a layer"): "A layer of a graph of many",
    ("decode", "graph, FP8 cache"): "FP8 caches, replayed from a graph",
    ("decode", "graph, latent"): "Latent caches, replayed from a graph",
    ("decode", "graph, prefill over pages"): "Chunks of prompts over pages, replayed from a graph",
    ("decode", "graph, few keys"): "Few keys, replayed from a graph",
    ("decode", "graph, shared prefix"): "Shared prefixes, replayed from a graph",
    ("decode", "graph, nothing shared"): "Asking for a prefix where none is shared, replayed from a graph",
    ("decode", "graph, batch invariant"): "One set of bits, replayed from a graph",
    ("decode", "host in a row"): "Host time, calls in a row",
    ("serving", "step"): "A step of all layers",
    ("bias", "forward, stats"): "Forward, with stats",
    ("bias", "encoder step"): "A step of an encoder",
    ("linear", "graph"): "A step, replayed from a graph",
    ("linear", "host, decay"): "Host time of a call, decay",
    ("linear", "host in a row, decay"): "Host time, calls in a row, decay",
    ("linear", "graph, delta rule"): "A step of the delta rule, replayed from a graph",
    ("linear", "host, delta rule"): "Host time of a call, delta rule",
    ("linear", "host in a row, delta rule"): "Host time, calls in a row, delta rule",
}
NOTES = {
    (
        "masks",
        "mask",
    ): 'What a new mask costs before its first use: "warploom" from vectors that exist, "warploom, with the vectors" '
    "from lengths and the like on the device.",
    ("masks", "host"): "Time until a forward call returns on an idle device.",
    **{
        ("linear", f"{each}, decay {what}"): '"warploom, plain" is the same call without a decay.'
        for each in PASSES
        for what in ("a head", "a token")
    },
    ("linear", "host, decay"): "Time until a forward call returns on an idle device, with a decay a token and a head.",
    ("linear", "host, delta rule"): "Time until a forward call returns on an idle device.",
    ("linear", "host in a row, decay"): "Time until one of many forward calls returns, with a decay a token and a head.",
    ("linear", "host in a row, delta rule"): "Time until one of many forward calls returns.",
    (
        "fp8",
        "forward",
    ): '"warploom" is of numbers that are in FP8 already, "warploom, quantised too" quantises them in the call. cuDNN\'s FP8 '
    "call has one scale a tensor, and its result is in FP8 too. "
    '"fast sums" are those of tensor cores alone, "packed" documents are packed sequences.',
    ("fp8", "quantising"): "q, k and v, read once and written once.",
    ("decode", "eager"): "Wall time of a call, of calls queued one behind the other.",
    ("decode", "graph, FP8 cache"): '"warploom" reads a cache of e4m3, the others the same keys and values in bf16.',
    ("decode", "graph, prefill over pages"): '"warploom" and FlashInfer read pages of 16 keys, the others contiguous keys.',
    ("decode", "graph, few keys"): "attention() with no mask: queries of an image over a text, and short encoders.",
    ("decode", "graph, shared prefix"): '"warploom" is told what sequences share, "plain" reads the same table without.',
    ("decode", "graph, nothing shared"): '"warploom" is told that nothing is shared, "plain" nothing.',
    ("decode", "graph, batch invariant"): '"warploom" is attention() with batch_invariant=True, "plain" without.',
    ("decode", "host in a row"): "Time until one of many calls returns.",
    ("serving", "step"): "Wall time of a step: keys and values appended and attention of every layer, with what the host plans "
    "for them.",
}
# What tells the kinds of files that have a section.
KINDS = ("roofs", "ranks", "processor", "agree", "trials", "loss", "call")
# A part of another page that the report writes.
PART = re.compile(r"(<!-- bench: (\w+), written by `warploom bench report` -->\n)(.*?)(<!-- bench: end -->)", re.DOTALL)


def is_run(path: Path) -> bool:
    """Whether a JSON file holds speeds or bank conflicts, and not what fuzzers, sanitizers or sweeps found."""
    run = json.loads(path.read_text())
    return isinstance(run, dict) and any(kind in run for kind in KINDS)


def read(files: Sequence[Path]) -> dict[str, Run]:
    """The runs of these files by their paths."""
    runs = {path.as_posix(): json.loads(path.read_text()) for path in files}
    for name, run in runs.items():
        if not any(kind in run for kind in KINDS):
            raise ValueError(f"{name} is no file of `warploom bench`, `warploom banks` or a program in benchmarks/")
    return runs


def write(files: Sequence[Path], docs: Path) -> list[Path]:
    """Write performance.md and its pictures; returns what was written."""
    runs = read(files)
    images: dict[str, str] = {}
    sections = [INTRODUCTION, *_summary(runs, images), *_devices(runs, images)]
    sections += [*_ranks(runs), *_training(runs, images), *_processors(runs, images), *_shared_memory(runs)]
    if not any("roofs" in run and "CPU" not in run["device"] for run in runs.values()):
        sections.append("No run on a GPU is among the files.\n")
    (docs / "images").mkdir(parents=True, exist_ok=True)
    found = {docs / "performance.md": "\n".join(sections)}
    found |= {docs / "images" / name: drawn for name, drawn in images.items()}
    for path, text in found.items():
        path.write_text(text)
    return list(found)


def fill(page: str, runs: Mapping[str, Run]) -> str:
    """The page with its parts written anew.

    A part stands between ``<!-- bench: NAME, written by `warploom bench report` -->`` and ``<!-- bench: end -->``; NAME is
    "headline" for the table of `summary.HEADLINE` and what belongs to it.
    """
    parts = {"headline": "\n".join(_headline(runs, short=True))}

    def part(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        if name not in parts:
            raise ValueError(f"a page asks for the part {name!r} of the report; there is {', '.join(parts)}")
        return f"{begin}\n{parts[name]}\n{end}"

    return PART.sub(part, page)


def _headline(runs: Mapping[str, Run], short: bool) -> Iterator[str]:
    for text in (summary.table(runs, short), summary.conditions(runs), summary.behind(runs), summary.preparation(runs)):
        if text:
            yield text


def _summary(runs: Mapping[str, Run], images: dict[str, str]) -> Iterator[str]:
    found = list(_headline(runs, short=False))
    if found:
        yield "## Summary\n"
        yield from found
    drawn = pictures.headline(runs)
    if drawn:
        images["performance-headline.svg"] = drawn
        yield "![Causal attention, TFLOP/s of the Hopper kernels beside those of peers](images/performance-headline.svg)\n"


def _devices(runs: Mapping[str, Run], images: dict[str, str]) -> Iterator[str]:
    """The suites of `warploom bench`, each once: the Hopper kernels before the Triton kernels, passes before the rest."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for name, run in runs.items():
        for row in measured(run) if "roofs" in run else ():
            found.setdefault((row["suite"], name, row["measure"]), []).append(row)

    def place(key: tuple[str, str, str]) -> tuple[int, bool, int]:
        suite, name, measure = key
        known = [*SUITES].index(suite) if suite in SUITES else len(SUITES)
        return known, summary.kernels(name, runs[name]) == "Triton", PASSES.index(measure) if measure in PASSES else len(PASSES)

    titles: set[str] = set()
    told: set[str] = set()
    for key in sorted(found, key=place):
        suite, name, measure = key
        title = f"## {SUITES.get(suite, suite.capitalize())}\n"
        if title not in titles:
            yield title
        titles.add(title)
        title = _title(suite, measure, name, runs[name])
        where, again = summary.machine(runs[name]), ""
        if suite + title in titles:  # told apart by machines, if these differ
            again = f", {Path(name).stem}" if suite + title + where in titles else f", {where}"
        titles |= {suite + title, suite + title + where}
        yield f"### {title}{again}\n"
        yield from _measure(title, name, runs[name], found[key], images)
        yield from _missing(runs[name]) if name not in told else ()
        told.add(name)
    for name in runs:
        if "roofs" in runs[name] and name not in told:
            yield tables.where(name, runs[name])
            yield from _missing(runs[name])


def _missing(run: Run) -> Iterator[str]:
    """What a run left out, and what failed."""
    if run.get("left_out"):
        yield f"Left out for want of time: {', '.join(run['left_out'])}.\n"
    yield from (f"{row['case']} failed: {row['failed']}.\n" for row in run["rows"] if "failed" in row)


def _title(suite: str, measure: str, name: str, run: Run) -> str:
    found = MEASURES.get((suite, measure), measure.capitalize())
    whose = summary.kernels(name, run) if suite in ("dense", "masks") else None
    return f"{whose} kernels: {found[0].lower()}{found[1:]}" if whose else found


def _measure(title: str, name: str, run: Run, rows: list[Row], images: dict[str, str]) -> Iterator[str]:
    suite, measure = rows[0]["suite"], rows[0]["measure"]
    if (suite, measure) in NOTES:
        yield f"{NOTES[suite, measure]}\n"
    yield tables.where(name, run)
    plain = "kernels" in title or title[1].isupper()  # as FP8
    titles = SUITES.get(suite, suite.capitalize()), title if plain else title[0].lower() + title[1:]
    drawn = pictures.rates(f"{', '.join(titles)}, {summary.machine(run)}", rows, run["roofs"])
    if drawn:
        stem = Path(name).stem
        stem = stem if stem.startswith(suite) else f"{stem}-{suite}"
        image = re.sub(r"[^\w-]+", "-", f"performance-{stem}-{measure}") + ".svg"
        images[image] = drawn
        unit = next((each for each in ("TFLOP/s", "tokens a second") if each in drawn), "GB/s")
        yield f"![{unit} by case](images/{image})\n"
    # What a mask costs before its first use differs in kind, not only in time.
    table = tables.timed(rows, compared=measure != "mask")
    yield tables.folded(table) if drawn else table
    bars = BARS.get((suite, measure))
    if bars is not None:
        yield tables.asked(bars(rows))


def _ranks(runs: Mapping[str, Run]) -> Iterator[str]:
    """Runs of the distributed suite, a table a pass."""
    found = {name: run for name, run in runs.items() if "ranks" in run}
    if found:
        yield "## Context parallel\n"
        yield (
            "A sequence over several devices, by each method of [`warploom.distributed`](distributed.md); "
            '"warploom" is what it chooses. "ideal" is one device\'s own kernel over the whole sequence, its time divided by '
            "the number of devices.\n"
        )
    for name, run in found.items():
        for measure in PASSES:
            rows = [row for row in run["rows"] if row["measure"] == measure]
            if rows:
                yield f"### {measure.capitalize()}, {run['ranks']} ranks\n"
                yield tables.where(name, run)
                yield tables.folded(tables.timed(rows, compared=True))
                if run["device"].startswith("NVIDIA"):
                    yield tables.asked(BARS["distributed", measure](rows))
        if rows := [row for row in run["rows"] if "1" in row.get("strong", {})]:
            yield "### Strong scaling\n"
            yield "The same tokens on one device, by its own kernel, and on more ranks; in brackets how many times as fast.\n"
            yield tables.where(name, run)
            yield tables.strong(rows)


def _training(runs: Mapping[str, Run], images: dict[str, str]) -> Iterator[str]:
    for name, run in runs.items():
        if "loss" in run:
            images["training.svg"] = pictures.training(run)
            yield "## Training\n"
            yield (
                f"A small transformer, {len(run['loss']['fp32'])} steps: its loss with bf16 kernels and with fp32 attention. "
                '"again" is fp32 attention of q, k and v rounded to bf16. [Hopper kernels](hopper.md#backward) says what is '
                "trained.\n"
            )
            yield tables.where(name, run)
            yield "![Loss by step, and its distance from fp32's](images/training.svg)\n"
            yield tables.training(run)


def _processors(runs: Mapping[str, Run], images: dict[str, str]) -> Iterator[str]:
    for name, run in runs.items():
        if "processor" in run:
            title = run.get("title", "Attention on a CPU")
            image = f"performance-{Path(name).stem}.svg"
            images[image] = pictures.processor(title, run)
            yield f"## {title}\n"
            yield f"{run['shape']}.\n"
            yield tables.where(name, run)
            yield f"![Milliseconds by case](images/{image})\n"
            yield tables.folded(tables.processor(run))


def _shared_memory(runs: Mapping[str, Run]) -> Iterator[str]:
    """Files of `warploom banks`, each kind under one title."""
    kinds: dict[str, tuple[str, Callable[[Run], str]]] = {
        "agree": ("Bank conflicts, predicted and counted", tables.counted),
        "trials": ("What bank conflicts cost", tables.trials),
        "call": ("Bank conflicts of an attention kernel", _attention),
    }
    if any(kind in run for run in runs.values() for kind in kinds):
        yield "## Shared memory\n"
    for kind, (title, text) in kinds.items():
        found = [(name, run) for name, run in runs.items() if kind in run]
        if found:
            yield f"### {title}\n"
        for name, run in found:
            yield text(run)
            yield tables.where(name, run)


def _attention(run: Run) -> str:
    return (
        "The wavefronts of every shared-memory instruction of the Ampere forward, predicted and counted; "
        "[Shared memory](smem.md) has their sums.\n"
    )
