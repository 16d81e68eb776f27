"""The large product without a GPU: the places its source computes, its arithmetic by the model, its refusals, the tester."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from warploom.smem.device.kernels import gemm
from warploom.smem.device.kernels.gemm import GemmConfig
from warploom.smem.device.tester import Trial, report

SHAPES = [{}, {"block_n": 256, "blocks": 1}, {"block_k": 32, "stages": 4}]


class Places:
    """`Tile<PITCH, B, M, S, BYTES>` of the source: its C++ run as the Python that it is too, but for types."""

    def __init__(self, source: str, letter: str) -> None:
        (template,) = re.findall(r"template <(int PITCH_.*?)> struct Tile \{\n(.*?)\n\};", source, flags=re.DOTALL)
        (numbers,) = re.findall(rf"using Tile{letter.upper()} = Tile<(.*)>;", source)
        names = [word.split()[1] for word in template[0].split(", ")]
        self.names = dict(zip(names, map(int, numbers.split(", ")), strict=True))
        (constants,) = re.findall(r"static constexpr int (.*);", template[1])
        for constant in constants.split(", "):
            name, value = constant.split(" = ")
            self.names[name] = eval(value, dict(self.names))
        self.place, self.on = (self.function(template[1], name) for name in ("place", "on"))

    @property
    def bytes(self) -> int:
        return self.names["BYTES"]

    def function(self, body: str, name: str) -> Callable[..., int]:
        """A member function of u32, which is some `const u32 NAME = …;` and a `return …;`."""
        (parts,) = re.findall(rf"static __device__ u32 {name}\((.*?)\) \{{\n(.*?)\n  \}}", body, flags=re.DOTALL)
        arguments = parts[0].replace("u32 ", "")
        lines = [line.strip().removesuffix(";").removeprefix("const u32 ").replace("1u", "1") for line in parts[1].splitlines()]
        assert len(lines) == 2 and lines[1].startswith("return ")
        space = dict(self.names)
        exec(f"def {name}({arguments}):\n    {lines[0]}\n    {lines[1]}", space)
        return space[name]  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_places_are_the_models(layout: str, shape: dict[str, int]) -> None:
    config = GemmConfig(layout, **shape)
    source = gemm.source(config)
    for letter, tile in zip("abc", (config.tile_a, config.tile_b, config.tile_c), strict=True):
        places = Places(source, letter)
        assert places.bytes == tile.size_bytes
        for row in range(tile.rows):
            for byte in range(0, tile.row_bytes, 16):
                assert places.place(row, byte) == tile.address(row, byte, 16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_a_lanes_place_leads_to_all_of_its_others(layout: str, shape: dict[str, int]) -> None:
    config = GemmConfig(layout, **shape)
    source = gemm.source(config)
    a, b = Places(source, "a"), Places(source, "b")
    for lane in range(32):
        row, byte = lane % 16, lane // 16 * 16
        for step in range(config.block_k // 16):
            for top in range(0, config.block_m, 16):
                start = top // config.warp_m * config.warp_m
                found = a.on(a.place(start + row, byte), top - start, 32 * step)
                assert found == a.place(top + row, 32 * step + byte)
            for left in range(0, config.block_n, 16):
                start = left // config.warp_n * config.warp_n
                found = b.on(b.place(row, 2 * start + byte), 16 * step, 2 * (left - start))
                assert found == b.place(16 * step + row, 2 * left + byte)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_a_threads_pieces_lie_blocks_of_eight_rows_apart(layout: str, shape: dict[str, int]) -> None:
    config = GemmConfig(layout, **shape)
    for letter, tile in (("a", config.tile_a), ("b", config.tile_b)):
        places, across = Places(gemm.source(config), letter), tile.row_bytes // 16
        down = config.threads // across
        assert down % 8 == 0 and tile.rows % down == 0
        for thread in range(config.threads):
            row, byte = thread // across, thread % across * 16
            for top in range(0, tile.rows, down):
                assert places.on(places.place(row, byte), top, 0) == places.place(top + row, byte)


def test_wavefronts() -> None:
    """By hand: each warp reads 64 rows of A and 64 columns of B; 4 wavefronts for a matrix of 16×16 without conflicts."""
    found = {layout: gemm.wavefronts(GemmConfig(layout, block_k=32), 256, 384, 512) for layout in gemm.LAYOUTS}
    blocks, steps = 2 * 3, 512 // 32
    matrices = blocks * (512 // 16 + 1) * 4 * (64 // 16)  # steps of 16 and one past the last, warps, matrices of a step
    assert found["swizzled"]["ldmatrix.x4"] == found["padded"]["ldmatrix.x4"] == (4 * matrices, 4 * matrices)
    assert found["plain"]["ldmatrix.x4"] == (16 * matrices, 4 * matrices)  # rows of 64 bytes: 4 of 8 meet
    assert found["plain"]["ldmatrix.x4.trans"] == (32 * matrices, 4 * matrices)  # rows of 256: all 8
    stored = blocks * steps * (128 * 32 + 32 * 128) * 2 // 128
    # Rows of A are half a line of global memory each, and a line goes to one of shared memory at a time.
    assert found["swizzled"]["cp.async.128"] == found["plain"]["cp.async.128"] == (stored * 3 // 2, stored)
    whole = {layout: gemm.wavefronts(GemmConfig(layout), 256, 384, 512)["cp.async.128"] for layout in gemm.LAYOUTS}
    assert whole["swizzled"] == whole["plain"] == (stored, stored) != whole["padded"]
    assert all(moved["lds.128"][0] == moved["lds.128"][1] == blocks * 128 * 128 * 2 // 128 for moved in found.values())


def test_refuses() -> None:
    with pytest.raises(ValueError, match="layout takes one of plain, padded, swizzled, got 'twisted'"):
        GemmConfig("twisted")
    for sides, words in (
        ((100, 128, 64), "m takes a multiple of 128 from 128, got 100"),
        ((128, 128, 64), "k takes a multiple of 64 from 128, got 64"),
    ):
        with pytest.raises(ValueError, match=words):
            GemmConfig("plain").check(*sides)


@pytest.mark.parametrize(("has", "stages"), [(227 * 1024, 3), (163 * 1024, 3), (99 * 1024, 2)])
def test_the_kernel_fits(has: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    device = SimpleNamespace(shared_memory_per_block_optin=has)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: device)
    for layout, config in gemm.configs().items():
        assert (config.layout, config.threads, config.stages) == (layout, 128, stages)
        assert config.shared_bytes <= has


def test_the_report_of_a_trial() -> None:
    ran = {"ms": 0.35, "p20": 0.34, "p80": 0.36, "tflops": 392.7, "error": 1.0}
    trial = Trial("work", {"ours": ran, "theirs": {"refused": "RuntimeError: no"}}, {"ours": (80, 16)}, ("ours",))
    assert trial.right
    assert not Trial("work", {"ours": {"wrong": "the error is 3 times"}}, {}, ("ours",)).right
    assert trial.to_dict()["kernels"][0] == {"kernel": "ours", "wavefronts": 80, "excess": 16, **ran}
    lines = report(trial).splitlines()
    assert lines[2].split() == ["ours", "80", "16", "1.00", "350.0", "340.0", "to", "360.0", "392.7"]
    assert lines[3].split() == ["theirs", "no:", "RuntimeError:", "no"]
