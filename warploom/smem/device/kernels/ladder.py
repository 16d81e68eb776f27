"""A 16×16×16 half product by one warp, six times: what each kernel should cost, and its CUDA C++.

Every kernel is `NAME(a, b, c)` on row-major 16×16 halves, launched as one block of one warp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warploom.smem.access import parse_pattern
from warploom.smem.device.kernels.nvrtc import Kernels
from warploom.smem.layout import Tile, parse_swizzles
from warploom.smem.walk import count

PLAIN = Tile(16, 16, "f16")
PADDED = Tile(16, 16, "f16", pad=8)
SWIZZLED = Tile(16, 16, "f16", swizzles=parse_swizzles("1,3,3"))


@dataclass(frozen=True)
class Rung:
    """A kernel and the accesses that it makes, each once over its tile."""

    name: str
    accesses: tuple[tuple[str, Tile], ...]

    def wavefronts(self, load: bool) -> int:
        return sum(count(text, tile).wavefronts for text, tile in self._of(load))

    def excess(self, load: bool) -> int:
        return sum(count(text, tile).excess for text, tile in self._of(load))

    def _of(self, load: bool) -> list[tuple[str, Tile]]:
        return [(text, tile) for text, tile in self.accesses if parse_pattern(text).access.load == load]


def _shared(operands: Tile, result: Tile, store: str = "sts.32@fragment") -> tuple[tuple[str, Tile], ...]:
    """Write A and B by 16 bytes a lane, read them as matrices, write C from the accumulators, read it by 16 bytes a lane."""
    return (
        ("sts.128", operands),
        ("sts.128", operands),
        ("ldmatrix.x4", operands),
        ("ldmatrix.x4.trans", operands),
        (store, result),
        ("lds.128", result),
    )


RUNGS = (
    Rung("wmma_global", ()),
    Rung("wmma_shared", _shared(PLAIN, PLAIN)),
    Rung("wmma_padded", _shared(PADDED, PLAIN)),
    Rung("mma_shared", _shared(PLAIN, PLAIN)),
    Rung("mma_swizzled", _shared(SWIZZLED, SWIZZLED)),
    Rung("mma_stmatrix", _shared(SWIZZLED, SWIZZLED, "stmatrix.x4")),
)


def rungs() -> list[Rung]:
    """The rungs that this device can run: stmatrix needs compute capability 9.0."""
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    return [rung for rung in RUNGS if hopper or rung.name != "mma_stmatrix"]


class Subjects:
    """The rungs compiled, and one product for all of them: small integers, so that halves hold every sum exactly."""

    FLOPS = 2 * 16**3

    def __init__(self, seed: int = 0) -> None:
        self._kernels = Kernels(SOURCE)
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randint(-6, 7, (16, 16), generator=generator) for _ in range(2))
        self._want = (a @ b).double()
        self._a, self._b = a.half().cuda(), b.half().cuda()

    def poisoned(self) -> Tensor:
        return torch.full_like(self._a, float("nan"))

    def launch(self, name: str, c: Tensor) -> Tensor:
        self._kernels.launch(name, 1, 32, [self._a, self._b, c])
        return c

    def check(self, c: Tensor) -> float:
        """The largest error; the products are exact, so that any is wrong: infinity."""
        return 0.0 if bool((c.cpu().double() == self._want).all()) else float("inf")


SOURCE = r"""#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;
using uint32_t = unsigned;

template <bool SWIZZLE> __device__ int place(int offset) { return SWIZZLE ? offset ^ ((offset >> 6 & 1) << 3) : offset; }

__device__ void copy16(half* to, const half* from) { *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from); }

extern "C" __global__ void wmma_global(const half* a, const half* b, half* c) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> right;
  wmma::fragment<wmma::accumulator, 16, 16, 16, half> sum;
  wmma::load_matrix_sync(left, a, 16);
  wmma::load_matrix_sync(right, b, 16);
  wmma::fill_fragment(sum, __float2half(0.0f));
  wmma::mma_sync(sum, left, right, sum);
  wmma::store_matrix_sync(c, sum, 16, wmma::mem_row_major);
}

template <int PITCH> __device__ void by_wmma(const half* a, const half* b, half* c) {
  __shared__ __align__(1024) half tile_a[16 * PITCH], tile_b[16 * PITCH];
  __shared__ __align__(1024) half tile_c[16 * 16];
  const int row = threadIdx.x / 2, column = threadIdx.x % 2 * 8;
  copy16(tile_a + row * PITCH + column, a + threadIdx.x * 8);
  copy16(tile_b + row * PITCH + column, b + threadIdx.x * 8);
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> right;
  wmma::fragment<wmma::accumulator, 16, 16, 16, half> sum;
  wmma::load_matrix_sync(left, tile_a, PITCH);
  wmma::load_matrix_sync(right, tile_b, PITCH);
  wmma::fill_fragment(sum, __float2half(0.0f));
  wmma::mma_sync(sum, left, right, sum);
  wmma::store_matrix_sync(tile_c, sum, 16, wmma::mem_row_major);
  __syncthreads();
  copy16(c + threadIdx.x * 8, tile_c + threadIdx.x * 8);
}

extern "C" __global__ void wmma_shared(const half* a, const half* b, half* c) { by_wmma<16>(a, b, c); }
extern "C" __global__ void wmma_padded(const half* a, const half* b, half* c) { by_wmma<24>(a, b, c); }

__device__ void multiply(uint32_t* c, const uint32_t* a, const uint32_t* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %9};"
               : "=r"(c[0]), "=r"(c[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0), "r"(0));
}

template <bool SWIZZLE, bool STMATRIX> __device__ void by_mma(const half* a, const half* b, half* c) {
  __shared__ __align__(1024) half tile_a[256], tile_b[256], tile_c[256];
  const int lane = threadIdx.x, linear = lane * 8, matrix_row = lane % 16 * 16 + lane / 16 * 8;
  copy16(tile_a + place<SWIZZLE>(linear), a + linear);
  copy16(tile_b + place<SWIZZLE>(linear), b + linear);
  __syncthreads();
  uint32_t left[4], right[4], sum[4];
  const unsigned from_a = __cvta_generic_to_shared(tile_a + place<SWIZZLE>(matrix_row));
  const unsigned from_b = __cvta_generic_to_shared(tile_b + place<SWIZZLE>(matrix_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(left[0]), "=r"(left[1]), "=r"(left[2]), "=r"(left[3]) : "r"(from_a) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(right[0]), "=r"(right[1]), "=r"(right[2]), "=r"(right[3]) : "r"(from_b) : "memory");
  multiply(sum, left, right);
  multiply(sum + 2, left, right + 2);
  if constexpr (STMATRIX) {
#if __CUDA_ARCH__ >= 900
    const unsigned to_c = __cvta_generic_to_shared(tile_c + place<SWIZZLE>(matrix_row));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(to_c), "r"(sum[0]), "r"(sum[1]), "r"(sum[2]), "r"(sum[3]) : "memory");
#endif
  } else {
    for (int n = 0; n < 4; ++n) {
      const int row = lane / 4 + n % 2 * 8, column = lane % 4 * 2 + n / 2 * 8;
      *reinterpret_cast<uint32_t*>(tile_c + place<SWIZZLE>(row * 16 + column)) = sum[n];
    }
  }
  __syncthreads();
  copy16(c + linear, tile_c + place<SWIZZLE>(linear));
}

extern "C" __global__ void mma_shared(const half* a, const half* b, half* c) { by_mma<false, false>(a, b, c); }
extern "C" __global__ void mma_swizzled(const half* a, const half* b, half* c) { by_mma<true, false>(a, b, c); }
extern "C" __global__ void mma_stmatrix(const half* a, const half* b, half* c) { by_mma<true, true>(a, b, c); }
"""
