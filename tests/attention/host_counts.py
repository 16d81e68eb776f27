"""What calls launch on a GPU that is pretended; a process of its own runs it: `python -m tests.attention.host_counts`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import warploom
from tools.frozen.pretend import Recorder, described, hopper
from warploom import masks
from warploom.attention import api
from warploom.attention import caches as caches_of
from warploom.attention.bounds import BLOCK, COARSE_BLOCK, prepared_bounds
from warploom.bias import ALiBi, Key, Relative
from warploom.fp8 import quantize
from warploom.runtime.likeness import like

SEQLEN = 256
_PACKAGE = str(Path(warploom.__file__).parent)
PREPARING = ["document_kernel", "bounds_kernel"]
PREPARING_IDS = ["run_kernel", "bounds_kernel"]


def launched(recorder: Recorder, call: Callable[[], Any]) -> list[str]:
    """Names of kernels, of modules what they begin with."""
    recorder.clear()
    call()
    return launched_kinds(recorder)


def launched_kinds(recorder: Recorder) -> list[str]:
    return [each["kernel"].partition("_sm90")[0] for each in recorder.launches]


def check(backend: str, forward: list[str], backward: list[str]) -> None:
    """A call under a new mask is preparing it and the call, from the third call on without arguments checked."""
    recorder = Recorder()
    with hopper(recorder) as fresh:
        fresh()
        q, k, v = (torch.randn(1, SEQLEN, heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
        upstream = torch.ones_like(q)

        def call(mask: masks.Mask, dropout_p: float = 0.0) -> Tensor:
            return warploom.attention(q, k, v, mask=mask, dropout_p=dropout_p, backend=backend)

        def step(mask: masks.Mask, dropout_p: float = 0.0) -> None:
            out = call(mask, dropout_p)
            torch.autograd.grad(out, (q, k, v), upstream)

        def document(first: int) -> masks.Document:
            return masks.Document(torch.tensor([first, SEQLEN - first], dtype=torch.int32))

        for n in range(2):
            step(document(n))
            step(document(n), 0.1)
            with torch.no_grad():
                call(document(n))
        with patch.object(api, "dense_args", side_effect=AssertionError("checked again")):
            for n in range(2, 6):
                mask = document(n)
                assert launched(recorder, partial(step, mask)) == PREPARING + forward + backward, recorder.launches
                assert launched(recorder, partial(step, mask)) == forward + backward, recorder.launches
                assert launched(recorder, partial(step, mask, 0.1)) == forward + backward, recorder.launches
            with torch.no_grad():
                mask = document(7)
                assert launched(recorder, partial(call, mask)) == PREPARING + forward, recorder.launches
                assert launched(recorder, partial(call, mask)) == forward
                for stream, preparing in ((7, PREPARING), (7, []), (0, [])):  # no stream waits for what another one prepares
                    with patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index, stream=stream: stream):
                        assert launched(recorder, partial(call, mask)) == preparing + forward, (stream, recorder.launches)
                with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
                    for _ in range(2):  # a graph prepares at every replay
                        assert launched(recorder, partial(call, mask)) == PREPARING + forward
                ids = torch.arange(SEQLEN) % 100
                for mask in (masks.Document.from_position_ids(ids), masks.Document.from_segment_ids(ids // 30)):
                    assert launched(recorder, partial(call, mask)) == PREPARING_IDS + forward, recorder.launches
        parts = torch.tensor([[100, 50]])
        for made in (
            masks.PrefixDocument(parts, parts // 2),
            masks.SharedQuestion(9, parts),
            masks.SharedQuestion(parts[:, 0], parts),
            masks.CausalBlockwise(parts),
        ):
            with torch.no_grad():
                assert launched(recorder, partial(call, made)) == PREPARING + forward, recorder.launches
        others = {
            "span_kernel": masks.BidirectionalSpans(parts, parts // 2),
            "tree_kernel": masks.Tree(torch.arange(SEQLEN) - 1),
            "position_kernel": masks.PrefixLM(parts[:, 0]),
            "position_kernel of chunks": masks.Chunked(40),
            "position_kernel of tokens": masks.GlobalWindow(parts[:, 0], 9, 3),
            "position_kernel of halves": masks.BlockDiffusion(SEQLEN // 2, 16),
        }
        for name, made in others.items():
            kernel = name.partition(" ")[0]
            with torch.no_grad():
                assert launched(recorder, partial(call, made)) == [kernel, "bounds_kernel", *forward], recorder.launches


def check_memory() -> None:
    """Preparing a mask allocates its vectors and 8 numbers a block of 64 or 2048 columns: 4 (n S + 8 blocks) bytes.

    Documents in a row say besides where they start.
    """
    made: list[Tensor] = []

    def noted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*arguments: Any, **named: Any) -> Tensor:
            made.append(function(*arguments, **named))
            return made[-1]

        return make

    lengths, seqlen = torch.tensor([[3000, 1001]]), 4001
    blocks = -(-seqlen // BLOCK) + -(-seqlen // COARSE_BLOCK)
    with hopper(Recorder()) as fresh:
        fresh()
        like((1,), torch.int32, torch.device("cuda", 0))  # an element that stands for shapes ever after
        for mask, count in (
            (masks.Document(lengths), seqlen + 3),
            (masks.Document.from_position_ids(torch.arange(seqlen), causal=False), 2 * seqlen),
            (masks.SharedQuestion(9, lengths), seqlen),
            (masks.CausalBlockwise(lengths), 3 * seqlen),
        ):
            with (
                patch.object(Tensor, "new_empty", noted(Tensor.new_empty)),
                patch.object(torch, "empty_like", noted(torch.empty_like)),
                patch.object(torch, "empty", noted(torch.empty)),
            ):
                prepared_bounds(mask.resolve(seqlen, seqlen, torch.device("cuda", 0)), seqlen, seqlen)
            taken = sum(t.numel() * t.element_size() for t in made)
            assert taken == 4 * (count + 8 * blocks), (mask, taken)
            made.clear()


def check_documents() -> None:
    """Documents of one batch entry run as packed sequences, which their mask is not looked at for; features apart do not."""
    seqlen, recorder = 4 * SEQLEN, Recorder()
    with hopper(recorder) as fresh:
        fresh()
        q, k, v = (torch.randn(1, seqlen, heads, 96).bfloat16().requires_grad_() for heads in (4, 2, 2))

        def step(mask: masks.Mask, **options: Any) -> None:
            out, lse = warploom.attention(q, k, v, mask=mask, backend="hopper", return_lse=True, **options)
            assert out.shape == q.shape and lse.shape == (1, 4, seqlen)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        def names(mask: masks.Mask, **options: Any) -> list[str]:
            recorder.clear()
            step(mask, **options)
            return [each["kernel"] for each in recorder.launches]

        for n in range(4):
            mask = masks.Document(torch.tensor([100 + n, seqlen - 300], dtype=torch.int32))
            if n == 2:
                patched = patch.object(api, "dense_args", side_effect=AssertionError("checked again"))
                patched.start()
            vectors, forward, bounds, backward = names(mask)
            assert (vectors, bounds) == ("document_kernel", "bounds_kernel")
            assert "varlen" in forward and "columns" not in forward and "columns" in backward
            assert names(mask) == [forward, backward]
        patched.stop()
        for apart, options in (
            (mask, {"dropout_p": 0.1}),
            (mask, {"sink": torch.zeros(4)}),
            (mask, {"batch_invariant": True}),
            (masks.Document.from_cu_seqlens(torch.tensor([0, 100, seqlen])), {}),  # of which nobody reads that it begins with 0
            (masks.Document([4] * (seqlen // 4)), {}),
            (mask & masks.Document([seqlen]), {}),
        ):
            assert all("columns" in name for name in names(apart, **options)[-2:]), recorder.launches
        assert not any("varlen" in name for name in launched_by_triton(q, k, v, mask, recorder))


def launched_by_triton(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, recorder: Recorder) -> list[str]:
    """Its kernels read column vectors and their bounds."""
    for _ in range(3):
        recorder.clear()
        warploom.attention(q, k, v, mask=mask, backend="triton")
    values = [each for each in recorder.launches if each["kernel"] == "forward_kernel"]
    assert len(values) == 1
    return [each["kernel"] for each in recorder.launches]


def check_packed(backend: str, preparing: list[str], forward: list[str]) -> None:
    """As ``check``, of forward passes of packed sequences whose starts and mask are new."""
    recorder = Recorder()
    with hopper(recorder) as fresh, torch.no_grad():
        fresh()
        q, k, v = (torch.randn(SEQLEN, heads, 64).bfloat16() for heads in (4, 2, 2))

        def call(starts: Tensor, mask: masks.Mask) -> Tensor:
            return warploom.attention_varlen(q, k, v, starts, mask=mask, causal=True, backend=backend)

        def drawn(first: int) -> tuple[Tensor, masks.Mask]:
            rows = torch.full((1, 1, SEQLEN), first, dtype=torch.int32)
            return torch.tensor([0, first, SEQLEN], dtype=torch.int32), masks.ColumnMask(rows)

        for n in range(2):
            call(*drawn(n))
        with patch.object(api, "varlen_args", side_effect=AssertionError("checked again")):
            for n in range(2, 6):
                new = partial(call, *drawn(n))
                assert launched(recorder, new) == preparing + forward, recorder.launches
                assert launched(recorder, new) == forward, recorder.launches
            with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
                for _ in range(2):
                    assert launched(recorder, new) == preparing + forward


def check_fp8() -> None:
    """FP8 inputs run a kernel of FP8, dense and packed, whatever half precision the result has."""
    recorder = Recorder()
    with hopper(recorder) as fresh:
        fresh()
        for dtype in (torch.bfloat16, torch.float16):
            given = quantize(*(torch.randn(1, SEQLEN, heads, 64).to(dtype) for heads in (4, 2, 2)))
            assert warploom.attention(*given, causal=True).dtype == dtype
            name = str(dtype).removeprefix("torch.")
            assert recorder.launches[-1]["kernel"].startswith(f"attn_fwd_fp8_sm90_{name}_d64"), recorder.launches[-1]
            starts = torch.tensor([0, SEQLEN], dtype=torch.int32)
            rows = [torch.randn(SEQLEN, heads, 64).to(dtype) for heads in (4, 2, 2)]
            assert warploom.attention_varlen(*quantize(*rows, cu_seqlens_q=starts), starts, causal=True).dtype == dtype
            assert recorder.launches[-1]["kernel"].startswith(f"attn_fwd_fp8_sm90_{name}_d64"), recorder.launches[-1]


# Calls that lines of the package make, of its own functions and of torch's and Python's. Each takes the host 0.05 to 1 us, and
# Triton's launches, which are left out here, a few more. They were 34, 78, 177 and 185 (Triton 44, 72, 171, 180) before masks
# remembered what had been found out of them.
MOST_CALLS = {
    "hopper": {"plain": 34, "the same mask": 61, "a new mask of vectors": 130, "new lengths": 154},
    "triton": {"plain": 43, "the same mask": 59, "a new mask of vectors": 128, "new lengths": 151},
}


def calls_of(call: Callable[[], Any]) -> int:
    """Calls that lines of the package make, without those of what stands for a GPU here."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        caller = frame.f_back if event == "call" else frame if event == "c_call" else None
        if caller is not None and caller.f_code.co_filename.startswith(_PACKAGE):
            count += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def check_calls(backend: str) -> None:
    """From the third call on, under masks too, a call makes no more calls than these."""
    with hopper(Recorder()) as fresh, torch.no_grad():
        fresh()
        q, k, v = (torch.randn(1, SEQLEN, heads, 64).bfloat16() for heads in (4, 2, 2))
        lengths, rows = torch.tensor([100, SEQLEN - 100]), torch.full((1, 1, SEQLEN), 200, dtype=torch.int32)
        same = masks.Document(lengths)
        drawn: dict[str, Callable[[], masks.Mask | None]] = {
            "plain": lambda: None,
            "the same mask": lambda: same,
            "a new mask of vectors": lambda: masks.ColumnMask(rows.clone(), causal=True),
            "new lengths": lambda: masks.Document(lengths),
        }
        for name, draw in drawn.items():
            for _ in range(4):
                warploom.attention(q, k, v, mask=draw(), backend=backend)
            mask = draw()
            found = calls_of(partial(warploom.attention, q, k, v, mask=mask, backend=backend))
            assert found <= MOST_CALLS[backend][name], (backend, name, found)


MOST_CALLS_OVER_PAGES = {"hopper": 51, "triton": 50}  # (238; as a cache 239)


def check_pages(backend: str) -> None:
    """Chunks of prompts over pages: from the third call on nothing is checked again, whatever the table and lengths hold."""
    recorder = Recorder()
    with hopper(recorder) as fresh, torch.no_grad():
        fresh()
        q, starts = torch.randn(SEQLEN, 4, 64).bfloat16(), torch.tensor([0, 100, SEQLEN], dtype=torch.int32)
        caches = [warploom.PagedKVCache.allocate(2, 300, 2, 64) for _ in range(3)]
        options: dict[str, Any] = {"causal": True, "max_seqlen_q": SEQLEN, "backend": backend}
        kinds: list[dict[str, Any]] = [{}, {"batch_invariant": True}, {"sink": torch.zeros(4)}]
        if backend == "triton":
            kinds.append({"dropout_p": 0.1})

        def of_cache(cache: warploom.PagedKVCache, **more: Any) -> Tensor:
            return warploom.attention_varlen(q, cache, cu_seqlens_q=starts, **options, **more)

        def of_pages(cache: warploom.PagedKVCache, **more: Any) -> Tensor:
            pages = {"seqused_k": cache.lengths, "block_table": cache.block_table}
            return warploom.attention_varlen(q, cache.k_pages, cache.v_pages, starts, **pages, **options, **more)

        for call in (of_cache, of_pages):
            for more in kinds:
                first = [call(caches[0], **more) for _ in range(2)]
                recorder.clear()
                with (
                    patch.object(caches_of, "cache_args", side_effect=AssertionError("checked again")),
                    patch.object(api, "varlen_args", side_effect=AssertionError("checked again")),
                ):
                    found = calls_of(partial(call, caches[1], **more))
                    assert more or found <= MOST_CALLS_OVER_PAGES[backend], found
                    assert call(caches[2], **more).shape == first[0].shape
                one, other = recorder.launches
                assert one["kernel"] == other["kernel"] and one["constants"] == other["constants"]
                assert one["kernel"].startswith("forward_kernel" if backend == "triton" else "attn_fwd_sm90_bfloat16_d64")
                table = described(caches[1].block_table)
                assert table in one["values"] and table in other["values"]
        wide = torch.zeros(12)[::3]
        for _ in range(4):  # what is copied is copied at every call
            recorder.clear()
            of_cache(caches[0], sink=wide)
            assert "float32 [4] by [1] at 0" in recorder.launches[-1]["values"]


def check_invariant(backend: str) -> None:
    """A launcher that a plain call left is none of a batch-invariant one's, by keyword or switch, nor the other way."""
    recorder = Recorder()
    with hopper(recorder) as fresh, torch.no_grad():
        fresh()
        q, k, v = (torch.randn(1, SEQLEN, heads, 64).bfloat16() for heads in (4, 2, 2))

        def launches(**options: Any) -> list[dict[str, Any]]:
            recorder.clear()
            warploom.attention(q, k, v, backend=backend, **options)
            return [{name: each[name] for name in ("kernel", "constants")} for each in recorder.launches[-1:]]

        plain, asked = launches(), launches(batch_invariant=True)
        assert plain != asked
        for _ in range(3):
            assert launches() == plain and launches(batch_invariant=True) == asked
            with warploom.batch_invariant():
                assert launches() == asked and launches(batch_invariant=False) == plain
        starts = torch.tensor([0, SEQLEN], dtype=torch.int32)
        with patch.object(api, "dense_args", side_effect=AssertionError("checked again")), warploom.batch_invariant():
            assert launches() == asked
        for _ in range(3):
            recorder.clear()
            warploom.attention_varlen(q[0], k[0], v[0], starts, backend=backend, batch_invariant=True)
        packed = recorder.launches[-1]
        kept = ("tile_n", "warpgroups", "stages", "pv_wait") if backend == "hopper" else ("M", "N", "num_warps", "ASCENDING")
        assert all(packed["constants"][name] == asked[0]["constants"][name] for name in kept), (packed, asked)


def check_tables() -> None:
    """Both passes of a table run here, frozen or not; its gradient, which a frozen one lacks, has its size and strides."""
    recorder, distances = Recorder(), 101
    with hopper(recorder) as fresh:
        fresh()
        q, k, v = (torch.randn(1, SEQLEN, heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
        table = torch.randn(4, distances, requires_grad=True)
        for leaves, options, packed in product(((q, k, v), (q, k, v, table)), ({}, {"causal": True}), (False, True)):
            bias = Relative(table if len(leaves) == 4 else table.detach())
            recorder.clear()
            starts = torch.tensor([0, 100, SEQLEN], dtype=torch.int32)
            if packed:
                out = warploom.attention_varlen(q[0], k[0], v[0], starts, max_seqlen_q=200, bias=bias, **options)
            else:
                out = warploom.attention(q, k, v, bias=bias, **options)
                plan = warploom.explain(q, k, v, bias=bias, **options)
            assert len(torch.autograd.grad(out, leaves, torch.ones_like(out))) == len(leaves)
            forward, backward = recorder.launches[-2:]  # before them a token may warm a module
            assert forward["kernel"].startswith("attn_fwd_sm90") and "distance" in backward["kernel"], recorder.launches
            assert ("distance_grad" in backward["kernel"]) == (len(leaves) == 4), backward["kernel"]
            read, _, _, *added = backward["values"][-9]
            assert {read, *added} == {f"float32 [4, {distances}] by [{distances}, 1] at {table.data_ptr() % 16}"}, (read, added)
            assert len(added) == (len(leaves) == 4)
            if not packed:
                assert f"backward {backward['kernel']}" in str(plan) and "triton" not in str(plan).partition("refused")[0]
        with torch.no_grad():
            recorder.clear()
            warploom.prepare(q.detach(), k.detach(), v.detach(), bias=Relative(table))
            assert launched_kinds(recorder) == ["attn_fwd"], recorder.launches  # nothing asks for a gradient
        recorder.clear()
        warploom.prepare(q.detach(), k.detach(), v.detach(), bias=Relative(table))
        assert launched_kinds(recorder) == ["attn_fwd", "attn_bwd"], recorder.launches


class Largest(TorchDispatchMode):
    """The most elements that one op has made room for."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements = max([self.elements, *(t.numel() for t in tree_leaves(found) if isinstance(t, Tensor))])
        return found


def check_bias_memory() -> None:
    """No tensor of a value a pair of a query and a key is made, but for the gradient of a bias that is one."""
    seqlen = 2048
    with hopper(Recorder()) as fresh:
        fresh()
        q, k, v = (torch.randn(2, seqlen, heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
        upstream, matrix = torch.ones_like(q), torch.randn(1, 1, seqlen, seqlen)
        leaves: list[tuple[Tensor, Callable[[Tensor], Any]]] = [
            (torch.rand(4), ALiBi),
            (torch.rand(2, 4), ALiBi),
            (torch.randn(4, 2 * seqlen - 1), Relative),
            (torch.randn(4, 32), lambda t: Relative(t, 128, buckets="t5")),
            (torch.randn(2, 4, seqlen), Key),
            (matrix, lambda t: t),
        ]
        for backend, (leaf, build), gradient in product((None, "triton"), leaves, (False, True)):
            leaf = leaf.detach().requires_grad_(gradient)
            with Largest() as largest:
                out = warploom.attention(q, k, v, bias=build(leaf), causal=True, backend=backend)
                torch.autograd.grad(out, (q, k, v, leaf) if gradient else (q, k, v), upstream)
            made = matrix.numel() if gradient and leaf.ndim == 4 else seqlen * seqlen - 1
            assert q.numel() <= largest.elements <= made, (backend, build, gradient, largest.elements)


def check_handed_on() -> None:
    """What numbers of a call decide, explain() says too, and prepare() makes ready who runs it."""
    recorder = Recorder()
    with hopper(recorder) as fresh:
        fresh()
        q, k, v = (torch.randn(1, SEQLEN, heads, 64).bfloat16().requires_grad_() for heads in (4, 2, 2))
        starts = torch.tensor([0, 100, SEQLEN], dtype=torch.int32)
        packed = (starts, starts, SEQLEN, SEQLEN)
        calls: list[tuple[bool, dict[str, Any], str]] = [
            (False, {"scale": -0.5}, "positive scale"),
            (False, {"scale": 0.0, "causal": True}, "positive scale"),
            (True, {"dropout_p": 0.1, "window": (20, 0)}, "no dropout under a window"),
        ]
        for is_packed, options, words in calls:
            for backend in (None, "hopper"):
                given = (q[0], k[0], v[0], *packed) if is_packed else (q, k, v)
                attend = warploom.attention_varlen if is_packed else warploom.attention
                out = attend(*given, backend=backend, **options)
                recorder.clear()
                torch.autograd.grad(attend(*given, backend=backend, **options), (q, k, v), torch.ones_like(out))
                assert not any("sm90" in each["kernel"] for each in recorder.launches), recorder.launches
                plan = warploom.explain(*given, backend=backend, **options)
                assert plan.implementation == "triton" and plan.reason == "handed on by hopper", plan
                assert plan.refused[-1][0] == "hopper" and words in plan.refused[-1][1], plan
                recorder.clear()
                warploom.prepare(*given, backend=backend, **options)
                assert not any("sm90" in each["kernel"] for each in recorder.launches), recorder.launches
        assert warploom.explain(q, k, v, scale=0.1).implementation == "hopper"


if __name__ == "__main__":
    check_tables()
    check_bias_memory()
    check_handed_on()
    check_fp8()
    check_packed("hopper", ["packed_bounds_kernel"], ["attn_fwd"])
    check_packed("triton", [], ["forward_kernel"])
    check("hopper", ["attn_fwd"], ["attn_bwd"])
    check("triton", ["forward_kernel"], ["rows_kernel", "dkdv_kernel", "dkdv_kernel", "dq_kernel"])
    check_memory()
    check_documents()
    check_pages("hopper")
    check_pages("triton")
    check_invariant("hopper")
    check_invariant("triton")
    check_calls("hopper")
    check_calls("triton")
    print("as few as can be")
