"""The demo itself: compare, time, look for neighbours, draw."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from warploom.runtime.progress import Progress

from . import encoder, sentences
from .machine import OtherPrograms
from .memory import PeakMemory
from .report import Comparison, DemoReport, Neighbour, Timing
from .routes import ROUTES, Route, embed, groups

# fp32 embeddings have elements below 1, and six layers summed in another order move them by a few units in
# the last place (2e-7 measured); a wrong mask moves them by 1e-2 and more.
FP32_BOUND = 1e-5
LONGEST = 512  # positions the encoder knows
CPU_SENTENCES = 300
GPU_SENTENCES = 1200
MOST_PASSES = 3
SECONDS = 70  # of passes, unless their number is given


@dataclass(frozen=True)
class DemoOptions:
    """What `run_demo` embeds, on what, and how often.

    Attributes:
        sentences: how many; None is as many as a device embeds five ways in about a minute.
        seed: which sentences, and in which order.
        repeats: timed passes over all sentences, of every route in turn; the median counts. None is up to 3, as long
            as all are likely to end within 70 s.
        device: "auto", or a torch device.
        dtype: "float32", "bfloat16" or "float16".
        batch_size: sentences in a padded batch.
        row_tokens: tokens in a packed row.
        out: folder of the pictures, made if missing; None draws nothing.
        progress: a progress bar on stderr.
    """

    sentences: int | None = None
    seed: int = 0
    repeats: int | None = None
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int = 32
    row_tokens: int = 2048
    out: Path | None = None
    progress: bool = False


def run_demo(options: DemoOptions) -> DemoReport:
    """Embed the same sentences by every route, compare and time them.

    Raises:
        ValueError: an option out of range, a package missing, or weights that are not the expected ones.
    """
    _check(options)
    device = _device(options.device)
    from warploom.integrations.transformers import register

    usual = GPU_SENTENCES if device.startswith("cuda") else CPU_SENTENCES
    count = usual if options.sentences is None else options.sentences
    texts = sentences.sample(count, options.seed)
    loaded = encoder.load(device, options.dtype)
    register()
    tokens = loaded.tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
    lengths = [len(sentence) for sentence in tokens]
    plans = {route.key: groups(lengths, route.layout, options.batch_size, options.row_tokens) for route in ROUTES}
    low_precision = options.dtype != "float32"
    passes = MOST_PASSES if options.repeats is None else options.repeats
    steps = passes * sum(map(len, plans.values())) + len(ROUTES)
    steps += len(plans[ROUTES[0].key]) if low_precision else 0
    progress = Progress(steps, options.progress)

    embeddings, computed = {}, {}
    peaks: dict[str, list[int | None]] = {route.key: [] for route in ROUTES}
    seconds: dict[str, list[float]] = {route.key: [] for route in ROUTES}
    memory = PeakMemory(device)
    for route in ROUTES:
        progress.start(f"{route.name} (warm-up)")
        embed(loaded.model, tokens, route, plans[route.key][:1], progress.step)
    begun, others = perf_counter(), OtherPrograms()
    for number in range(passes):  # in turn, so that a busy moment of the machine touches every route alike
        spent = perf_counter() - begun
        if options.repeats is None and number and spent * (number + 1) / number > SECONDS:
            break
        for route in ROUTES:
            progress.start(route.name)
            memory.start()
            start = perf_counter()
            embeddings[route.key], computed[route.key] = embed(loaded.model, tokens, route, plans[route.key], progress.step)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds[route.key].append(perf_counter() - start)
            peaks[route.key].append(memory.stop())
    foreign = others.cores()
    bound = FP32_BOUND
    if low_precision:
        bound = 2 * _rounding(loaded.model, tokens, plans, embeddings, progress)
    progress.close()

    nearest, agreeing = _neighbours(texts, embeddings["eager_padded"], embeddings["warploom_packed"])
    pictures: list[str] = []
    timings = [Timing(r.key, r.name, seconds[r.key], sum(lengths), computed[r.key], _highest(peaks[r.key])) for r in ROUTES]
    machine = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    if options.out is not None:
        from .pictures import draw

        pictures = draw(options.out, timings, lengths, options.batch_size, options.row_tokens, machine, options.dtype)
    return DemoReport(
        sha256=loaded.sha256,
        device=machine,
        dtype=options.dtype,
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        seed=options.seed,
        sentences=len(texts),
        longest=max(lengths),
        comparisons=[
            _compare("eager padded, warploom padded", embeddings, "warploom_padded", bound),
            _compare("eager padded, warploom packed", embeddings, "warploom_packed", bound),
        ],
        timings=timings,
        neighbours=nearest,
        neighbours_agreeing=agreeing,
        foreign_cores=foreign,
        pictures=pictures,
    )


def _check(options: DemoOptions) -> None:
    for name, least in (("repeats", 1), ("batch_size", 1), ("row_tokens", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}; it takes {least} or more")
    if options.dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: got {options.dtype!r}; it takes float32, bfloat16 or float16")


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device: got {name!r}; it takes auto, cpu, or cuda where there is a GPU")
    return name


def _highest(peaks: list[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return max(known, default=None)


def _compare(name: str, embeddings: dict[str, Tensor], other: str, bound: float) -> Comparison:
    delta = (embeddings["eager_padded"] - embeddings[other]).abs().max().item()
    return Comparison(name, delta, bound)


def _rounding(model: Any, tokens: Any, plans: Any, embeddings: dict[str, Tensor], progress: Progress) -> float:
    """How far the dtype alone moves eager's embeddings from fp32's: the measure of a low-precision bound."""
    route: Route = ROUTES[0]
    progress.start("eager in fp32, for the bound")
    exact, _ = embed(copy.deepcopy(model).float(), tokens, route, plans[route.key], progress.step)
    return (exact - embeddings[route.key]).abs().max().item()


def _neighbours(texts: list[str], eager: Tensor, packed: Tensor, shown: int = 3) -> tuple[list[Neighbour], int]:
    """The closest pairs that are no near-copies of each other, and how many neighbours both embeddings agree on."""
    by_eager, by_packed = (_similarities(x) for x in (eager, packed))
    agreed = by_eager.argmax(1) == by_packed.argmax(1)
    best, index = by_packed.max(1)
    found: list[Neighbour] = []
    used: set[int] = set()
    for i in best.masked_fill(best > 0.9, -1.0).argsort(descending=True).tolist():
        j = int(index[i])
        if i not in used and j not in used and len(found) < shown:
            found.append(Neighbour(texts[i], texts[j], float(best[i]), bool(agreed[i])))
            used.update((i, j))
    return found, int(agreed.sum())


def _similarities(embeddings: Tensor) -> Tensor:
    return (embeddings @ embeddings.T).fill_diagonal_(-1.0)
