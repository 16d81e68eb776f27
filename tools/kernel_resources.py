"""Registers, stack, shared memory and faults of every Triton kernel variant, compiled without a GPU.

python tools/kernel_resources.py [-j 2] [--only TEXT]    writes tests/attention/resources.json, which a test guards

The launches are recorded from the package's own calls on small CPU tensors, so that signatures, constants and tiles are
those of a real call; Triton then compiles them for sm_80 and sm_90.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from warploom import masks  # noqa: E402
from warploom.attention.arguments import dense_args, varlen_args  # noqa: E402
from warploom.attention.chunks import chunk_args  # noqa: E402
from warploom.attention.problem import AttentionArgs  # noqa: E402
from warploom.attention.stats import stats_args  # noqa: E402
from warploom.attention.triton import bias_sums, call, run, stats  # noqa: E402
from warploom.decode.problem import DecodeArgs  # noqa: E402
from warploom.decode.triton import launch as decode_launch  # noqa: E402
from warploom.decode.triton import plan as decode_plan  # noqa: E402
from warploom.decode.triton import tree as decode_tree  # noqa: E402
from warploom.runtime.triton_launch import settings  # noqa: E402

from tools.machine_code import faults, listing  # noqa: E402  isort: skip

TABLE = ROOT / "tests" / "attention" / "resources.json"
ARCHITECTURES = (80, 90)
# Bytes of shared memory that a block may ask for.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_POINTERS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
_POINTERS |= {torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8"}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SEQLEN = 256


@dataclass(frozen=True)
class Resources:
    """What one program of a binary takes."""

    registers: int  # a thread
    stack: int  # bytes a thread, where spilled registers go
    shared: int  # bytes
    wgmma: int  # HGMMA instructions
    faults: int = 0  # what tools/machine_code.py finds wrong
    waits: int = 0  # for wgmma: as many as there are products where ptxas runs them one by one


@dataclass(frozen=True)
class Recorded:
    """A launch that did not happen."""

    kernel: Any
    constants: dict[str, Any]
    arguments: tuple[Any, ...]


def recorder(found: list[Recorded]) -> type:
    """What stands for `Launch` and adds to ``found`` what would be launched."""

    class Recorder:
        def __init__(self, kernel: Any, constants: dict[str, Any], direct: bool) -> None:
            self.kernel, self.constants = kernel, constants

        def __call__(self, grid: tuple[int, int], *arguments: Any) -> None:
            found.append(Recorded(self.kernel, self.constants, arguments))

        def raw(self) -> None:
            return None

        def kept(self, grid: tuple[int, int], rest: tuple[Any, ...]) -> Callable[..., None]:
            return lambda *first: self(grid, *first, *rest)

    return Recorder


def _dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionArgs:
    args = dense_args(q, k, v, **options)
    vector = next((t for t in args.mask[2:] if t is not None), None)
    if vector is None:
        return args
    return args._replace(bounds=torch.zeros(*vector.shape[:2], -(-vector.shape[2] // 64), 8, dtype=torch.int32))


def _packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionArgs:
    cu = torch.tensor([0, 100, _SEQLEN], dtype=torch.int32)
    return varlen_args(q[0], k[0], v[0], cu, max_seqlen_q=156, max_seqlen_k=156, **options)


def _chunks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionArgs:
    args = chunk_args(q, k, v, torch.tensor([_SEQLEN], dtype=torch.int32), seqlen_q=2 * _SEQLEN, **options)
    if args.lts is None:
        return args
    return args._replace(bounds=torch.zeros(1, 1, _SEQLEN // 64, 8, dtype=torch.int32))


def _paged(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionArgs:
    cu, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, _SEQLEN], [_SEQLEN]))
    options |= {"block_table": torch.zeros(1, 16, dtype=torch.int32), "seqused_k": used}
    pages = [t.view(16, 16, *t.shape[2:]) for t in (k, v)]
    return varlen_args(q[0], *pages, cu, max_seqlen_q=_SEQLEN, max_seqlen_k=_SEQLEN, **options)


def _fp8_pages(q: Tensor, k: Tensor, v: Tensor, page_size: int, token: bool, **options: Any) -> AttentionArgs:
    args = _paged(q, k, v, **options)
    k, v = (t[0].unflatten(0, (-1, page_size)).to(torch.float8_e4m3fn) for t in (k, v))
    scale = torch.ones(k.shape[:3] if token else k.shape[2])
    return args._replace(k=k, v=v, k_scale=scale, v_scale=scale)


def _odd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionArgs:
    """Views whose rows lie an odd number of elements apart, from an odd address on."""

    def odd(t: Tensor) -> Tensor:
        row = t.shape[2] * t.shape[3] + 5
        storage = torch.zeros(t.shape[1] * row + 1, dtype=t.dtype)
        return storage.as_strided(t.shape, (t.shape[1] * row, row, t.shape[3], 1), 1)

    return dense_args(odd(q), odd(k), odd(v), **options)


def _vectors() -> masks.ColumnMask:
    return masks.ColumnMask(*(torch.full((1, 1, _SEQLEN), row, dtype=torch.int32) for row in (180, 200, 20, 40)))


FEATURES: dict[str, tuple[Callable[..., AttentionArgs], dict[str, Any]]] = {
    "causal": (_dense, {"causal": True}),
    "columns": (_dense, {"mask": masks.Document([100, 156])}),
    "dense": (_dense, {}),
    "window": (_dense, {"window": (64, 32)}),
    "four vectors": (_dense, {"mask": _vectors()}),
    "softcap": (_dense, {"causal": True, "softcap": 5.0}),
    "dropout": (_dense, {"causal": True, "dropout_p": 0.1, "dropout_seed": 1}),
    "packed": (_packed, {"causal": True}),
    "paged": (_paged, {"causal": True}),
    "paged, fp8 by token": (_fp8_pages, {"causal": True, "page_size": 16, "token": True}),
    "paged, fp8 by head": (_fp8_pages, {"causal": True, "page_size": 64, "token": False}),
    "odd strides": (_odd, {"causal": True}),
    "columns, packed": (_packed, {"mask": _vectors()}),
    "chunks": (_chunks, {"causal": True}),
    "chunks, columns, dropout": (_chunks, {"mask": _vectors(), "window": (64, 32), "dropout_p": 0.1, "dropout_seed": 1}),
    "columns, dropout": (_dense, {"mask": masks.Document([100, 156]), "dropout_p": 0.1, "dropout_seed": 1, "softcap": 5.0}),
}

_INVARIANT = {"causal": True, "batch_invariant": True}
INVARIANT: dict[str, tuple[Callable[..., AttentionArgs], dict[str, Any]]] = {
    "batch-invariant": (_dense, _INVARIANT),
    "batch-invariant, packed": (_packed, _INVARIANT),
    "batch-invariant, paged": (_paged, _INVARIANT),
    "batch-invariant, window": (_dense, {"window": (64, 32), "batch_invariant": True}),
    "batch-invariant, columns": (_dense, {"mask": masks.Document([100, 156]), "batch_invariant": True}),
    "batch-invariant, columns, packed": (_packed, {"mask": _vectors(), "batch_invariant": True}),
}


def _biased(q: Tensor, k: Tensor, v: Tensor, kind: str, dtype: torch.dtype | None = None, **options: Any) -> AttentionArgs:
    """A call whose bias asks for a gradient: a kind of problem.AttentionArgs, or how a tensor's elements are shared."""
    dtype = q.dtype if dtype is None else dtype
    if kind == "entries":  # whose batch entries share it
        q, k, v = (t.expand(4, -1, -1, -1).contiguous() for t in (q, k, v))
    matrix = (1, 2, _SEQLEN, _SEQLEN)
    shapes = {"matrix": matrix, "entries": matrix, "heads": (1, 1, _SEQLEN, _SEQLEN), "keys": (1, 2, 1, _SEQLEN)}
    shape = shapes.get(kind) or {"alibi": (1, 2), "distance": (2, 511)}[kind]
    bias = torch.zeros(shape, dtype=dtype if kind in shapes else torch.float32)
    args = (_packed if options.pop("packed", False) else _dense)(q, k, v, **options)
    return args._replace(bias=bias, bias_kind="tensor" if kind in shapes else kind, bias_origin=255, bias_grad=True)


_DROPPED = {"dropout_p": 0.1, "dropout_seed": 1, "softcap": 5.0}
BIASES: dict[str, tuple[Callable[..., AttentionArgs], dict[str, Any]]] = {
    "bias matrix": (_biased, {"kind": "matrix"}),
    "bias matrix, fp32, causal": (_biased, {"kind": "matrix", "dtype": torch.float32, "causal": True}),
    "bias matrix, fp32, columns, dropout": (
        _biased, {"kind": "matrix", "dtype": torch.float32, "mask": masks.Document([100, 156]), **_DROPPED},
    ),
    "bias of batch entries": (_biased, {"kind": "entries"}),
    "bias of batch entries, causal, softcap": (_biased, {"kind": "entries", "causal": True, "softcap": 5.0}),
    "bias of all heads": (_biased, {"kind": "heads"}),
    "bias of all heads, columns, dropout": (_biased, {"kind": "heads", "mask": masks.Document([100, 156]), **_DROPPED}),
    "bias of keys": (_biased, {"kind": "keys"}),
    "alibi": (_biased, {"kind": "alibi", "causal": True}),
    "distance": (_biased, {"kind": "distance"}),
    "distance, columns, dropout": (_biased, {"kind": "distance", "mask": masks.Document([100, 156]), **_DROPPED}),
    "distance, packed": (_biased, {"kind": "distance", "packed": True}),
}  # fmt: skip

STATS: dict[str, tuple[Callable[..., AttentionArgs], dict[str, Any]]] = {
    "stats": (_dense, {"causal": True}),
    "stats, columns": (_dense, {"mask": masks.Document([100, 156]), "softcap": 5.0}),
    "stats, packed": (_packed, {"mask": _vectors(), "window": (64, 32)}),
    "sums": (_dense, {"causal": True}),
    "sums, packed": (_packed, {"causal": True, "softcap": 5.0}),
    "stats, bias matrix": (_biased, {"kind": "matrix", "dtype": torch.float32, "causal": True}),
}

DECODE = ("decode", "paged decode", "decode, queries", "paged decode, queries", "decode, queries, odd strides")
TREES = ("decode, tree", "paged decode, tree")
TREE_WINDOWS = ("decode, tree, window", "paged decode, tree, window")
FP8 = ("decode, fp8", "paged decode, fp8", "decode, queries, fp8")
LATENT = ("decode, latent", "decode, queries, latent", "paged decode, queries, latent", "decode, tree, latent")
PREFIXES = (
    *("decode, prefix", "paged decode, prefix", "paged decode, fp8, prefix", "paged decode, alibi, prefix"),
    "paged decode, small pages, prefix",
)
DECODE_BIASES = ("decode, alibi", "decode, distance", "paged decode, key", "decode, queries, distance", "decode, tree, key")


@dataclass(frozen=True)
class Case:
    """A call whose kernels are compiled for one architecture."""

    architecture: int
    dtype: str
    head_dim: int
    head_dim_v: int
    feature: str  # of FEATURES, INVARIANT, BIASES, STATS, or decode: one of DECODE, TREES and so on, PREFIXES or DECODE_BIASES

    def __str__(self) -> str:
        return f"sm_{self.architecture} {self.dtype} {self.head_dim}/{self.head_dim_v} {self.feature}"


def cases() -> list[Case]:
    """Every configuration under a band and under column vectors, every feature once, decode."""
    widths = (64, 128, 256)
    found = [
        Case(a, t, d, d, f) for a in reversed(ARCHITECTURES) for t in DTYPES for d in widths for f in ("causal", "columns")
    ]
    rest = [f for f in FEATURES if f not in ("causal", "columns")]
    found += [Case(90, "bf16", d, d, f) for d in widths for f in rest]
    found += [Case(90, "bf16", *dims, "causal") for dims in ((72, 72), (192, 128))]
    found += [Case(90, "bf16", d, d, f) for d in widths for f in INVARIANT]
    others = ((90, "fp32"), (80, "fp16"))
    found += [Case(a, t, 128, 128, f) for a, t in others for f in ("batch-invariant", "batch-invariant, paged")]
    found += [Case(90, "bf16", d, d, f) for d in (64, 128) for f in BIASES]
    wide = ((90, "bf16", 256), (90, "fp32", 128), (80, "fp16", 128), (80, "fp32", 256))
    found += [Case(a, t, d, d, f) for a, t, d in wide for f in ("bias of all heads", "distance")]
    found += [Case(90, "bf16", d, d, f) for d in widths for f in STATS]
    found += [Case(a, t, d, d, "stats, columns") for a, t in ((90, "fp32"), (80, "fp16"), (80, "fp32")) for d in widths]
    # Tiles of unequal widths, by turns in one place of shared memory.
    unequal = ((64, 16), (40, 24), (24, 16), (72, 32), (96, 16), (256, 32), (16, 64), (32, 128), (64, 128), (192, 128))
    found += [Case(90, "fp16", *dims, f) for dims in unequal for f in ("odd strides", "columns", "packed")]
    found += [Case(a, t, d, d, f) for a in ARCHITECTURES for t in DTYPES for d in widths for f in DECODE[:2]]
    found += [Case(90, "bf16", *dims, f) for dims in ((128, 128), (64, 16), (256, 32), (32, 128)) for f in DECODE[2:]]
    found += [Case(90, "fp32", *dims, f) for dims in ((160, 48), (16, 64)) for f in ("decode, queries", "causal")]
    found += [Case(90, t, d, d, f) for t, d in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp32", 128)) for f in TREES]
    found += [Case(90, "bf16", d, d, f) for d in (64, 128, 256) for f in FP8]
    found += [Case(90, "bf16", d, d, f) for d in (128, 256) for f in TREE_WINDOWS]
    found += [Case(90, "bf16", d, d, f) for d in (64, 128, 256) for f in DECODE_BIASES]
    found += [Case(90, "bf16", d, d, f) for d in (64, 128, 256) for f in PREFIXES]
    found += [Case(a, t, d, d, PREFIXES[1]) for a, t in ((90, "fp32"), (80, "fp16"), (80, "fp32")) for d in (64, 128, 256)]
    found += [Case(90, "bf16", 576, 512, f) for f in LATENT]
    found += [Case(a, t, 576, 512, LATENT[0]) for a, t in ((90, "fp32"), (80, "fp16"))] + [Case(90, "bf16", 96, 64, LATENT[0])]
    found += [Case(a, t, 128, 128, "decode, queries, distance") for a, t in ((90, "fp32"), (80, "fp16"))]
    return found


def recorded(case: Case) -> dict[str, Recorded]:
    """The launches of a case by "case kernel"; the kernel's name says which gradients it computes."""
    with _recording(case.architecture) as launches:
        dtype = DTYPES[case.dtype]
        if "decode" in case.feature:
            _decode(case, dtype)
        else:
            build, options = (FEATURES | INVARIANT | BIASES | STATS)[case.feature]
            heads, dims = (2, 1, 1), (case.head_dim, case.head_dim, case.head_dim_v)
            q, k, v = (torch.zeros(1, _SEQLEN, h, d, dtype=dtype) for h, d in zip(heads, dims, strict=True))
            args = build(q, k, v, **options)
            if case.feature in STATS:
                lse = torch.zeros((2, _SEQLEN) if args.cu_seqlens_q is not None else (1, 2, _SEQLEN))
                stats.stats(stats_args(args)._replace(bounds=args.bounds), lse, "sums" not in case.feature)
            else:
                out, lse = run.forward(args)
                # Gradients of a batch-invariant call are those of other calls.
                if "paged" not in case.feature and case.feature not in INVARIANT:
                    run.backward(args, torch.zeros_like(out), None, out, lse)
    named = {}
    for launch in launches:
        name = launch.kernel.__name__.removesuffix("_kernel")
        if name == "dkdv":
            name = "+".join(n for n, flag in (("dk", "WITH_DK"), ("dv", "WITH_DV")) if launch.constants[flag])
        named[f"{case} {name}"] = launch
    return named


def _decode(case: Case, dtype: torch.dtype) -> None:
    batch, capacity, page = 2, 8192, 16 if "small pages" in case.feature else 64
    # Sixteen queries of four heads fill the rows of Hopper's matrix instructions.
    queries = 16 if "queries" in case.feature else 64 if "tree" in case.feature else 1
    odd = 1 if "odd strides" in case.feature else 0
    q = torch.zeros(batch, queries, 8, case.head_dim, dtype=dtype)
    kept = torch.float8_e4m3fn if "fp8" in case.feature else dtype
    rows = (torch.zeros(batch, capacity, 2 * d + odd, dtype=kept) for d in (case.head_dim, case.head_dim_v))
    dims = (case.head_dim, case.head_dim_v)
    k, v = (t[:, :, : 2 * d].unflatten(2, (2, d)) for t, d in zip(rows, dims, strict=True))
    table = None
    if "paged" in case.feature:
        k, v = (t.reshape(-1, page, 2, t.shape[-1]) for t in (k, v))
        table = torch.zeros(batch, capacity // page, dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)
    tree = torch.full((1, queries), -1, dtype=torch.int32) if "tree" in case.feature else None
    scale = torch.ones(k.shape[:3]) if "fp8" in case.feature else None
    left = 4096 if "window" in case.feature else None
    latent = "latent" in case.feature
    v = k[..., : case.head_dim_v] if latent else v
    args = DecodeArgs(q, k, v, lengths, table, None, tree, scale, scale, left, 0, 0.1, 0.0, "triton", latent=latent)
    biases = {"alibi": (1, 8), "distance": (8, 8192), "key": (batch, 8, capacity)}
    for kind in biases.keys() & set(case.feature.split(", ")):
        args = args._replace(bias=torch.zeros(biases[kind]), bias_kind=kind)
    if "prefix" in case.feature:
        found = torch.zeros(batch + 1, dtype=torch.int32)
        args = args._replace(prefix=found) if table is not None else args._replace(prefix_keys=4096)
    decode_launch.forward(args)


@contextmanager
def _recording(architecture: int) -> Iterator[list[Recorded]]:
    """Calls on CPU tensors make the launches that they would make on a device of the architecture."""
    launches: list[Recorded] = []
    recording = recorder(launches)

    def planned(shape: decode_plan.Shape) -> decode_plan.Plan:
        return decode_plan.plan.__wrapped__(shape._replace(device=0))

    caches = (run._forward_launch, run._rows_launch, run._dkdv_launch, run._dq_launch, run._shared_launch, decode_tree._launch)
    caches += (bias_sums._gradient_launch, bias_sums._sums_launch, bias_sums._distance_launch)
    caches += (stats._stats_launch, stats._largest_launch)
    for cached in caches:
        cached.cache_clear()
    try:
        with (
            patch.object(run, "Launch", recording),
            patch.object(bias_sums, "Launch", recording),
            patch.object(stats, "Launch", recording),
            patch.object(decode_plan, "Launch", recording),
            patch.object(decode_tree, "Launch", recording),
            patch.object(decode_launch, "plan", planned),
            patch.object(call, "capability", lambda device: architecture),
            patch.object(stats, "capability", lambda device: architecture),
            patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(architecture, 10)),
            patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)),
        ):
            yield launches
    finally:
        for cached in caches:
            cached.cache_clear()


@dataclass(frozen=True)
class Specialised:
    """What Triton compiles a binary from, beside the kernel's source; names are the kernel's parameters."""

    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]  # by the parameter's place
    options: dict[str, Any]  # warps, stages and the like


def specialised(launch: Recorded) -> Specialised:
    """What a launch asks for; pointers that a kernel specialises on are taken to be aligned."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    parameters = launch.kernel.params
    given = dict(zip((p.name for p in parameters if not p.is_constexpr), launch.arguments, strict=True))
    for i, p in enumerate(parameters):
        value = launch.constants[p.name] if p.is_constexpr else given[p.name]
        special = not p.do_not_specialize
        if p.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[p.name], constants[p.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[p.name] = "*" + _POINTERS[value.dtype]
            if special:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[p.name] = f"tensordesc<{_POINTERS[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, float):
            signature[p.name] = "fp32"
        else:
            signature[p.name] = p.annotation_type or ("i32" if -(2**31) <= value < 2**31 else "i64")
            if special and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.constants.items() if name not in signature}
    return Specialised(signature, constants, attributes, options)


def compiled_launch(launch: Recorded, architecture: int) -> Any:
    """Triton's binary of a launch, for an architecture that need not be here."""
    s = specialised(launch)
    source = ASTSource(launch.kernel, s.signature, s.constants, s.attributes)
    with settings():
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=s.options)


def compile_launch(launch: Recorded, architecture: int) -> Resources:
    """What the binary of a launch takes."""
    return resources_of(launch, compiled_launch(launch, architecture), architecture)


def resources_of(launch: Recorded, compiled: Any, architecture: int) -> Resources:
    """What a binary takes, and its faults, which are printed too."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("-res-usage", cubin.name)
        code = _cuobjdump("-sass", cubin.name) if architecture >= 90 else ""
    found = faults(compiled.asm["ttgir"], compiled.asm["ptx"], listing(compiled.asm["cubin"])) if architecture >= 90 else []
    for fault in found:
        print(f"{launch.kernel.__name__}: {fault}", file=sys.stderr)
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    wgmma, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    return Resources(registers, stack, compiled.metadata.shared, wgmma, len(found), waits)


def _cuobjdump(option: str, path: str) -> str:
    done = subprocess.run([_TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True)
    return done.stdout


def _measure(job: tuple[Case, str]) -> tuple[str, dict[str, int] | str, float]:
    case, name = job
    torch.set_num_threads(1)
    start = time.perf_counter()
    found: dict[str, int] | str
    try:
        found = asdict(compile_launch(recorded(case)[name], case.architecture))
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:120]}"
    return name, found, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-j", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("--only", default="", help="variants whose name holds this text; prints, writes nothing")
    chosen = parser.parse_args()
    jobs = [(case, name) for case in cases() for name in recorded(case) if chosen.only in name]
    table: dict[str, dict[str, int]] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(chosen.j) as pool:
            for name, found, seconds in pool.map(_measure, jobs):
                if isinstance(found, str):
                    failed += 1
                    print(f"{name:<44} FAILED {found}", flush=True)
                    continue
                table[name] = found
                row = "  ".join(f"{key} {value:>6}" for key, value in found.items())
                print(f"{name:<44} {row}  {seconds:5.1f} s", flush=True)
    if not chosen.only and not failed:
        TABLE.write_text(json.dumps({"triton": triton.__version__, "variants": table}, indent=1) + "\n")
    print(f"{len(table)} variants, {sum(v['stack'] > 0 for v in table.values())} with a stack, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
