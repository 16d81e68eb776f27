"""A full-size half product C = A B by mma.m16n8k16, in the three layouts of the ladder: what conflicts cost at scale.

A (M, K), B (K, N) and C (M, N) are row-major halves, sums are fp32. cp.async fills a ring of tiles of A and B, ldmatrix reads
them, C goes out through shared memory, so that all of its stores are 16 bytes wide. The layouts differ in nothing but places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from warploom.smem import copies
from warploom.smem.device.kernels.nvrtc import Kernels
from warploom.smem.layout import Swizzle, Tile
from warploom.smem.swizzle import design
from warploom.smem.walk import count

LAYOUTS = ("plain", "padded", "swizzled")
PAD = 8  # halves after each row: 16 bytes, the least that moves a row to other banks and keeps its 16-byte pieces aligned
OPERAND = ("sts.128", "ldmatrix.x4", "ldmatrix.x4.trans")  # cp.async stores like sts.128
RESULT = ("sts.32@fragment", "lds.128")


@dataclass(frozen=True)
class GemmConfig:
    """Tiles of a block and of a warp, in elements, and the layout of shared memory."""

    layout: str
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64  # rows of A of 128 bytes, each a whole line of the cache that it is copied from
    warp_m: int = 64
    warp_n: int = 64
    stages: int = 3
    blocks: int = 2  # resident on a multiprocessor at once

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout takes one of {', '.join(LAYOUTS)}, got {self.layout!r}")

    @property
    def name(self) -> str:
        return name(self.layout)

    @property
    def threads(self) -> int:
        return 32 * (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def tile_a(self) -> Tile:
        return self._laid_out(Tile(self.block_m, self.block_k), OPERAND)

    @property
    def tile_b(self) -> Tile:
        return self._laid_out(Tile(self.block_k, self.block_n), OPERAND)

    @property
    def tile_c(self) -> Tile:
        return self._laid_out(Tile(self.block_m, self.block_n), RESULT)

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * (self.tile_a.size_bytes + self.tile_b.size_bytes)
        return max(ring, self.tile_c.size_bytes)

    def grid(self, m: int, n: int) -> int:
        return (m // self.block_m) * (n // self.block_n)

    def check(self, m: int, n: int, k: int) -> None:
        """ValueError unless tiles cover the product exactly, and those of k at least fill the ring."""
        blocks = {"m": (m, self.block_m, 1), "n": (n, self.block_n, 1), "k": (k, self.block_k, self.stages - 1)}
        for side, (length, block, least) in blocks.items():
            if length < least * block or length % block:
                raise ValueError(f"{side} takes a multiple of {block} from {least * block}, got {length}")

    def _laid_out(self, tile: Tile, accesses: tuple[str, ...]) -> Tile:
        if self.layout == "plain":
            return tile
        return replace(tile, pad=PAD) if self.layout == "padded" else _swizzled(tile, accesses)


def name(layout: str) -> str:
    """The kernel of a layout."""
    return f"hgemm_{layout}"


def configs() -> dict[str, GemmConfig]:
    """The kernel of each layout for the current device, with a stage less where shared memory is short."""
    found = {layout: GemmConfig(layout) for layout in LAYOUTS}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    short = max(config.shared_bytes for config in found.values()) > device.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return {layout: replace(config, stages=2) for layout, config in found.items()} if short else found


@cache
def _swizzled(tile: Tile, accesses: tuple[str, ...]) -> Tile:
    found = design(tile, accesses)
    if found.swizzle is None or found.excess:
        raise RuntimeError(f"no swizzle of {tile} is free of bank conflicts")
    return replace(tile, swizzles=(found.swizzle,))


def wavefronts(config: GemmConfig, m: int, n: int, k: int) -> dict[str, tuple[int, int]]:
    """(wavefronts, ideal) of each access over the whole product, as Nsight Compute's source page would sum them."""
    config.check(m, n, k)
    tiles = k // config.block_k
    warps_m, warps_n = config.block_m // config.warp_m, config.block_n // config.warp_n
    # Operands are read 16 of k at a time and once more after the last, a fraction of a tile.
    read = Fraction(k + 16, config.block_k)
    moves = (
        (copies.NAME, copies.count(config.tile_a), Fraction(tiles)),
        (copies.NAME, copies.count(config.tile_b), Fraction(tiles)),
        ("ldmatrix.x4", count("ldmatrix.x4", config.tile_a), read * warps_n),
        ("ldmatrix.x4.trans", count("ldmatrix.x4.trans", config.tile_b), read * warps_m),
        ("sts.32", count("sts.32@fragment", config.tile_c), Fraction(1)),
        ("lds.128", count("lds.128", config.tile_c), Fraction(1)),
    )
    sums: dict[str, tuple[int, int]] = {}
    for access, counted, times in moves:
        all_of, ideal = sums.get(access, (0, 0))
        times *= config.grid(m, n)
        sums[access] = all_of + int(times * counted.wavefronts), ideal + int(times * counted.ideal)
    return sums


def source(config: GemmConfig) -> str:
    """CUDA C++ of a kernel `hgemm_LAYOUT(a, b, c, m, n, k)`; launched with `shared_bytes` of dynamic shared memory."""
    places = "\n".join(_place(letter, getattr(config, f"tile_{letter}")) for letter in "abc")
    sizes = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "WARP_M": config.warp_m,
        "WARP_N": config.warp_n,
        "STAGES": config.stages,
        "BLOCKS": config.blocks,
        "THREADS": config.threads,
    }
    constants = "\n".join(f"constexpr int {word} = {value};" for word, value in sizes.items())
    return _SOURCE.replace("/*CONSTANTS*/", f"{constants}\n{places}").replace("KERNEL_NAME", config.name)


class Subjects:
    """The kernel in every layout, compiled, and one square product of random halves for all of them."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self._configs = configs()
        for config in self._configs.values():
            config.check(size, size, size)
        self._kernels = {layout: Kernels(source(config)) for layout, config in self._configs.items()}
        self.size = size
        generator = torch.Generator().manual_seed(seed)
        self.a, self.b = (torch.randn(size, size, generator=generator).half().cuda() for _ in range(2))
        self._want: Tensor | None = None

    @property
    def flops(self) -> int:
        return 2 * self.size**3

    def poisoned(self) -> Tensor:
        return torch.full_like(self.a, float("nan"))

    def launch(self, layout: str, c: Tensor) -> Tensor:
        config, size = self._configs[layout], self.size
        arguments: list[Tensor | int] = [self.a, self.b, c, size, size, size]
        self._kernels[layout].launch(config.name, config.grid(size, size), config.threads, arguments, config.shared_bytes)
        return c

    def check(self, c: Tensor) -> float:
        """The largest error over that of rounding the fp64 product once."""
        if self._want is None:
            self._want = self.a.double() @ self.b.double()
        once = (self._want.half().double() - self._want).abs().max()
        return float((c.double() - self._want).abs().max() / once)


def _place(letter: str, tile: Tile) -> str:
    """A tile's pitch and swizzle on byte offsets, as a type."""
    swizzle = tile.swizzles[0].in_bytes(tile.itemsize) if tile.swizzles else Swizzle(0, 4, 1)
    if swizzle.b and swizzle.m + swizzle.s + swizzle.b > (8 * tile.pitch_bytes).bit_length() - 1:
        raise ValueError(f"{tile}: the kernel takes swizzles by the lowest 3 bits of the row")
    numbers = f"{tile.pitch_bytes}, {swizzle.b}, {swizzle.m}, {swizzle.s}, {tile.size_bytes}"
    return f"using Tile{letter.upper()} = Tile<{numbers}>;"


_SOURCE = r"""
using u16 = unsigned short;
using u32 = unsigned;

// Byte offsets in a tile: rows of PITCH bytes, bits [M, M + B) XORed with bits [M + S, M + S + B).
template <int PITCH_, int B, int M, int S, int BYTES_> struct Tile {
  static constexpr int PITCH = PITCH_, BYTES = BYTES_, FLIPS = ((1 << B) - 1) << M;
  static __device__ u32 place(u32 row, u32 byte) {
    const u32 offset = row * PITCH + byte;
    return offset ^ (((offset >> (M + S)) & ((1u << B) - 1)) << M);
  }
  // A place further on by whole blocks of 8 rows and by bytes that the place itself has none of: the swizzle looks at the
  // lowest bits of the row alone, so few places differ by more than what an instruction adds.
  static __device__ u32 on(u32 place, u32 rows, u32 bytes) {
    const u32 by = rows * PITCH + bytes;
    return (place ^ (by & FLIPS)) + (by & ~FLIPS);
  }
};

/*CONSTANTS*/

constexpr int STAGE_BYTES = TileA::BYTES + TileB::BYTES;
constexpr int ATOMS_M = WARP_M / 16, ATOMS_N = WARP_N / 16, STEPS = BLOCK_K / 16;

__device__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

template <bool TRANS> __device__ void load_matrix(u32 (&to)[4], u32 from) {
  if constexpr (TRANS)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ u32 two_halves(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// A thread's 16-byte pieces of a tile, lane after lane along its rows.
template <class TILE, int ROWS, int COLUMNS> struct Pieces {
  static constexpr int ACROSS = COLUMNS / 8, DOWN = THREADS / ACROSS, COUNT = ROWS / DOWN;
  static_assert(THREADS % ACROSS == 0 && DOWN % 8 == 0 && ROWS % DOWN == 0, "threads cover blocks of 8 whole rows");
  u32 place;
  const u16* from;
  long long below;
  __device__ Pieces(const u16* tile, int pitch) {
    const int row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * 8;
    place = TILE::place(row, column * 2);
    from = tile + (long long)row * pitch + column;
    below = (long long)DOWN * pitch;
  }
  __device__ void copy(int piece, u32 to) const { copy_async(to + TILE::on(place, piece * DOWN, 0), from + piece * below); }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
KERNEL_NAME(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ c, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = (u32)__cvta_generic_to_shared(memory);
  // Blocks that run at once share rows of A and columns of B: eight rows of blocks, column after column.
  const int blocks_m = m / BLOCK_M, blocks_n = n / BLOCK_N;
  const int group = 8 * blocks_n, first = (int)blockIdx.x / group * 8, inside = (int)blockIdx.x % group;
  const int tall = min(8, blocks_m - first);
  const int block_m = first + inside % tall, block_n = inside / tall;
  a += (long long)block_m * BLOCK_M * k;
  b += block_n * BLOCK_N;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % (BLOCK_M / WARP_M) * WARP_M, warp_n = warp / (BLOCK_M / WARP_M) * WARP_N;
  const u32 from_a = TileA::place(warp_m + lane % 16, lane / 16 * 16);
  const u32 from_b = TileB::place(lane % 16, warp_n * 2 + lane / 16 * 16);
  Pieces<TileA, BLOCK_M, BLOCK_K> pieces_a(a, k);
  Pieces<TileB, BLOCK_K, BLOCK_N> pieces_b(b, n);
  constexpr int PIECES = pieces_a.COUNT + pieces_b.COUNT, SHARE = (PIECES + STEPS - 2) / (STEPS - 1);
  auto copy = [&](int first, int end, int stage) {
#pragma unroll
    for (int piece = first; piece < end && piece < PIECES; ++piece)
      if (piece < pieces_a.COUNT) pieces_a.copy(piece, shared + stage * STAGE_BYTES);
      else pieces_b.copy(piece - pieces_a.COUNT, shared + stage * STAGE_BYTES + TileA::BYTES);
  };
  auto next_tile = [&] {
    pieces_a.from += BLOCK_K;
    pieces_b.from += (long long)BLOCK_K * n;
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  u32 left[2][ATOMS_M][4], right[2][ATOMS_N][4];
  auto load_operands = [&](int slot, int step, u32 stage) {
#pragma unroll
    for (int i = 0; i < ATOMS_M; ++i) load_matrix<false>(left[slot][i], stage + TileA::on(from_a, 16 * i, 32 * step));
#pragma unroll
    for (int j = 0; j < ATOMS_N; ++j)
      load_matrix<true>(right[slot][j], stage + TileA::BYTES + TileB::on(from_b, 16 * step, 32 * j));
  };

#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    copy(0, PIECES, stage);
    next_tile();
  }
  float sums[ATOMS_M][2 * ATOMS_N][4] = {};
  asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
  __syncthreads();
  load_operands(0, 0, shared);
  int reading = 0, writing = STAGES - 1;
  // Copies and operands of what comes next are issued between the products of a step.
  auto multiply_tile = [&](bool copying) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step == STEPS - 1) {
        next_tile();
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncthreads();
        reading = reading + 1 == STAGES ? 0 : reading + 1;
        writing = writing + 1 == STAGES ? 0 : writing + 1;
      } else if (copying) {
        copy(step * SHARE, (step + 1) * SHARE, writing);
      }
      // After the last tile these read what nobody multiplies: a branch around them would cost more.
      load_operands((step + 1) % 2, (step + 1) % STEPS, shared + reading * STAGE_BYTES);
#pragma unroll
      for (int i = 0; i < ATOMS_M; ++i)
#pragma unroll
        for (int j = 0; j < 2 * ATOMS_N; ++j)
          multiply(sums[i][j], left[step % 2][i], right[step % 2][j / 2][j % 2 * 2], right[step % 2][j / 2][j % 2 * 2 + 1]);
    }
  };
  const int copied = k / BLOCK_K - (STAGES - 1);
  for (int tile = 0; tile < copied; ++tile) multiply_tile(true);
  for (int tile = 0; tile < STAGES - 1; ++tile) multiply_tile(false);

  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ATOMS_M; ++i)
#pragma unroll
    for (int j = 0; j < 2 * ATOMS_N; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 to = TileC::place(warp_m + 16 * i + 8 * half + lane / 4, (warp_n + 8 * j + lane % 4 * 2) * 2);
        asm volatile("st.shared.b32 [%0], %1;"
                     :: "r"(shared + to), "r"(two_halves(sums[i][j][2 * half], sums[i][j][2 * half + 1])) : "memory");
      }
  __syncthreads();
  c += (long long)block_m * BLOCK_M * n + block_n * BLOCK_N;
  for (int piece = threadIdx.x; piece < BLOCK_M * BLOCK_N / 8; piece += THREADS) {
    const int row = piece / (BLOCK_N / 8), column = piece % (BLOCK_N / 8) * 8;
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(shared + TileC::place(row, column * 2)) : "memory");
    *reinterpret_cast<uint4*>(c + (long long)row * n + column) = words;
  }
}
"""
