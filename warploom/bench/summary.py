"""What the runs say in one table: a line for each family of kernels and what it was measured beside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import geometric_mean
from typing import Any

from warploom.bench import mask_bars
from warploom.bench.bars import measured, ratios
from warploom.bench.tables import rounded_down

Runs = Mapping[str, dict[str, Any]]  # by the file's path
PASSES = ("forward", "backward")
FLASHINFER = "FlashInfer", "FlashInfer, tensor cores"
SDPA_LOOPS = "cuDNN, masked", "SDPA, masked", "SDPA, eager"  # of the serving loop
SHAPE = r", B\d+ S\d.*"  # of a mask's case


@dataclass(frozen=True)
class Family:
    """Rows of one suite, of runs of one kind of kernels, beside some peers."""

    what: str
    suite: str
    kernels: str | None  # "Hopper", "Triton"; None: any
    peers: Mapping[str, tuple[str, ...]]  # a name for readers, and contenders: the fastest of them counts
    measures: tuple[str, str | None] = PASSES  # what stands under forward and backward


FAMILIES = (
    Family(
        "Dense, Hopper",
        "dense",
        "Hopper",
        {"torch's FlashAttention-2": ("FA2",), "FlashAttention-4": ("FA4",), "torch's cuDNN": ("cuDNN",)},
    ),
    Family(
        "Column masks, Hopper",
        "masks",
        "Hopper",
        {"cuDNN's FlexAttention": (mask_bars.CUDNN,), "torch's FlexAttention": (mask_bars.FLEX,)},
    ),
    Family(
        "Dense, Triton",
        "dense",
        "Triton",
        {"torch's cuDNN": ("cuDNN",), "torch's FlashAttention-2": ("FA2",), "torch's FlexAttention": ("FlexAttention",)},
    ),
    Family("Column masks, Triton", "masks", "Triton", {"torch's FlexAttention": ("FlexAttention",)}),
    Family(
        "Decode",
        "decode",
        None,
        {"torch's cuDNN": ("cuDNN",), "torch's FlashAttention-2": ("FA2",), "FlashInfer": FLASHINFER},
        ("graph", None),
    ),
    Family("Decode, latent caches", "decode", None, {"FlashInfer": FLASHINFER}, ("graph, latent", None)),
    Family(
        "Prefill over pages",
        "decode",
        None,
        {"FlashInfer": FLASHINFER, "FlashAttention-4, contiguous": ("FA4",)},
        ("graph, prefill over pages", None),
    ),
    Family("Serving loop", "serving", None, {"torch's SDPA": SDPA_LOOPS, "FlashInfer": FLASHINFER}, ("step", None)),
    Family("Linear", "linear", None, {"fla's faster kernel": ("fla, chunk", "fla, fused chunk")}),
    Family(
        "Linear, normalized",
        "linear",
        None,
        {"fla's faster kernel": ("fla, chunk", "fla, fused chunk")},
        ("forward, normalized", "backward, normalized"),
    ),
    Family("Linear, a step", "linear", None, {"fla's recurrent kernel": ("fla, recurrent",)}, ("graph", None)),
    *(
        Family(
            f"Linear, {kind}",
            "linear",
            None,
            {"fla's simple GLA": ("fla, simple GLA",)},
            (f"forward, {kind}", f"backward, {kind}"),
        )
        for kind in ("decay a head", "decay a token")
    ),
    Family(
        "A matrix as bias, both passes",
        "bias",
        None,
        {"torch's efficient kernel": ("efficient",), "torch's FlexAttention": ("FlexAttention",)},
        ("forward and backward", None),
    ),
    Family("FP8", "fp8", None, {"cuDNN's FP8": ("cuDNN, FP8",), "torch's cuDNN, bf16": ("cuDNN",)}, ("forward", None)),
    Family(
        "Gated delta rule",
        "linear",
        None,
        {"fla's chunk kernel": ("fla, chunk",)},
        ("forward, delta rule", "backward, delta rule"),
    ),
    Family(
        "Gated delta rule, a step",
        "linear",
        None,
        {"fla's recurrent kernel": ("fla, recurrent",)},
        ("graph, delta rule", None),
    ),
)
# Of the files that benchmarks/cpu_attention.py and cpu_linear.py write: what, cases, beside what.
PROCESSOR = (
    ("Packed documents, CPU", "documents", "torch, dense mask", "torch with a dense mask"),
    ("Packed documents, CPU", "documents", "torch, documents as a batch", "torch, documents as a batch"),
    ("Full and causal, CPU", "", "torch", "torch"),
    ("Linear, CPU", "", "token by token, fused", "a fused loop over tokens"),
)
# What README.md shows of the table.
HEADLINE = (
    ("Dense, Hopper", "torch's FlashAttention-2"),
    ("Dense, Hopper", "FlashAttention-4"),
    ("Dense, Hopper", "torch's cuDNN"),
    ("Column masks, Hopper", "cuDNN's FlexAttention"),
    ("Dense, Triton", "torch's cuDNN"),
    ("Column masks, Triton", "torch's FlexAttention"),
    ("Decode", "torch's cuDNN"),
    ("Linear", "fla's faster kernel"),
    ("Packed documents, CPU", "torch with a dense mask"),
)


def kernels(name: str, run: dict[str, Any]) -> str | None:
    """Whose dense and masked passes a run timed, "Hopper" or "Triton".

    A file's name that ends in -triton says it; else the verdicts of its rows, else a device that runs the Hopper kernels.
    """
    if re.search(r"-triton\.json$", name):
        return "Triton"
    found = {row["verdict"]["backend"] for row in run["rows"] if row.get("verdict", {}).get("backend")}
    if found == {"hopper"} or (not found and re.search(r"\bG?H[128]00\b", run["device"])):
        return "Hopper"
    return "Triton" if found == {"triton"} else None


def machine(run: dict[str, Any]) -> str:
    """In a word or two, as H100."""
    if "processor" in run:
        return "CPU"
    found = re.search(r"\b[A-Z]{1,2}\d+\w*", run["device"].removeprefix("NVIDIA "))
    return found.group() if found else str(run["device"])


def table(runs: Runs, short: bool = False) -> str:
    """The table and what its numbers are, in Markdown; "" where no run has a peer. A short one has the `HEADLINE` alone."""
    found = {(what, peer): cells for what, peer, cells in (*_devices(runs), *_processors(runs))}
    lines = [f"| {what} | {peer} | {cells} |" for (what, peer), cells in found.items() if not short or (what, peer) in HEADLINE]
    if not lines:
        return ""
    head = [
        "| ours | beside | forward, mean (worst) | backward, mean (worst) | on | cases a pass |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ]
    words = (
        "A number is the peer's time over ours: above 1, ours is faster. It is the geometric mean of the cases, with the worst "
        'case in brackets, both rounded down. "Hopper" and "Triton" say which of our kernels ran.'
    )
    if any("processor" in run for run in runs.values()):
        words += " On CPUs the backward is timed together with its forward."
    return "\n".join([*head, *lines, "", words, ""])


def conditions(runs: Runs) -> str:
    """How the rows of GPUs were measured: sizes of the Hopper kernels' calls, versions and days; "" without such rows."""
    devices = [run for run in runs.values() if "roofs" in run]
    versions = [
        dict.fromkeys(f"torch {run['torch']}" for run in devices if run.get("torch")),
        dict.fromkeys(f"cuDNN {n // 10000}.{n // 100 % 100}.{n % 100}" for run in devices if (n := run.get("cudnn"))),
        dict.fromkeys(f"Triton {run['triton']}" for run in devices if run.get("triton")),
    ]
    days = sorted(str(run["date"]) for run in devices if run.get("date"))
    if not days:
        return ""
    sizes = []
    for what, suite in (("dense", "dense"), ("masked", "masks")):
        cases = [
            case
            for family in FAMILIES
            if (family.suite, family.kernels) == (suite, "Hopper")
            for measure in family.measures
            for contenders in family.peers.values()
            for _, case, _ in _ratios(runs, family, measure, contenders)
        ]
        dims, lengths = ([int(n) for case in cases for n in re.findall(rf"\b{letter}(\d+)", case)] for letter in "DS")
        if dims and lengths:
            dim, length = (" to ".join(dict.fromkeys((f"{min(each):,}", f"{max(each):,}"))) for each in (dims, lengths))
            sizes.append(f"{what} calls have head_dim {dim} and {length} tokens a sequence")
    return (
        "GPU rows: one GPU, bf16 where no FP8 is named, device time with a cold L2 cache."
        + (f" With the Hopper kernels, {'; '.join(sizes)}." if sizes else "")
        + f" Measured with {', '.join(chain(*versions))}, {' to '.join(dict.fromkeys((days[0], days[-1])))}.\n"
    )


def behind(runs: Runs) -> str:
    """A sentence on the cases of the Hopper kernels in which a peer was faster, a mask's worst; "" where there are none."""
    found = []
    for family in FAMILIES:
        for peer, contenders in family.peers.items() if family.kernels == "Hopper" else ():
            parts = []
            for measure in family.measures:
                slower = sorted(each for each in _ratios(runs, family, measure, contenders) if each[0] < 1)
                if slower:
                    worst = {re.sub(SHAPE, "", case): ratio for ratio, case, _ in reversed(slower)}
                    cases = ", ".join(f"{case} {rounded_down(worst[case])}" for case in sorted(worst, key=worst.__getitem__))
                    parts.append(f"{measure} {cases}")
            found += [f"{peer}: {'; '.join(parts)}."] if parts else []
    return f"A peer is faster than the Hopper kernels in these cases. {' '.join(found)}\n" if found else ""


def preparation(runs: Runs) -> str:
    """What a new mask costs, with and without making its vectors, of the runs beside cuDNN; "" where none was timed."""
    found = []
    for run in runs.values():
        for row in measured(run) if "roofs" in run else ():
            times = {name: each["ms"] for name, each in row["contenders"].items() if "ms" in each}
            ours, made, plan = (times.get(name) for name in ("warploom", mask_bars.VECTORS, mask_bars.CUDNN))
            if row["measure"] == "mask" and ours and made and plan:
                found.append(
                    f"Preparing a new mask is not in these numbers ({row['case']}, {machine(run)}): it takes "
                    f"{ours * 1e3:.1f} us from column vectors, {made * 1e3:.1f} us with the vectors made from lengths on the "
                    f"device, and {plan * 1e3:.0f} us for the plan of cuDNN's FlexAttention from existing intervals.\n"
                )
    return "\n".join(found)


def _ratios(runs: Runs, family: Family, measure: str | None, contenders: Sequence[str]) -> list[tuple[float, str, str]]:
    """The time of the fastest of these contenders over ours, the case and the machine."""
    found = []
    for name, run in runs.items():
        if "roofs" not in run or family.kernels not in (None, kernels(name, run)):
            continue
        for row in measured(run):
            if (row["suite"], row["measure"]) == (family.suite, measure):
                theirs = [ratio for each in contenders for ratio in ratios([row], each).values()]
                found += [(min(theirs), row["case"], machine(run))] if theirs else []
    return found


def _devices(runs: Runs) -> Iterator[tuple[str, str, str]]:
    for family in FAMILIES:
        for peer, contenders in family.peers.items():
            found = [_ratios(runs, family, measure, contenders) for measure in family.measures]
            machines = dict.fromkeys(on for each in found for _, _, on in each)
            if machines:
                yield family.what, peer, _cells([[ratio for ratio, _, _ in each] for each in found], ", ".join(machines))


def _processors(runs: Runs) -> Iterator[tuple[str, str, str]]:
    for what, case, theirs, name in PROCESSOR:
        for run in runs.values():
            rows = run["rows"] if "processor" in run else ()
            times = {(row["case"], row["dtype"], row["backward"], row["what"]): row["ms"] for row in rows}
            found: tuple[list[float], list[float]] = ([], [])
            for (each, dtype, backward, contender), ms in times.items():
                if contender == theirs and each.startswith(case):
                    found[backward].append(ms / times[each, dtype, backward, "warploom"])
            if any(found):
                yield what, name, _cells(found, machine(run))


def _cells(found: Sequence[Sequence[float]], on: str) -> str:
    cells = [f"{rounded_down(geometric_mean(each))} ({rounded_down(min(each))})" if each else "–" for each in found]
    cases = " + ".join(dict.fromkeys(str(len(each)) for each in found if each))
    return " | ".join([*cells, on, cases])
