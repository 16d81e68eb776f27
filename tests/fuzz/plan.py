"""Which problems a run has: problem number N is of job N % jobs, and drawn from (seed, N)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from tests.fuzz import families
from tests.fuzz.draw import Draw


@dataclass(frozen=True)
class Options:
    """What the numbers of a run's problems depend on."""

    device: str = "cpu"
    families: tuple[str, ...] = ()  # none: all there are
    backends: tuple[str, ...] = ()  # none: all that run on the device
    seed: int = 0
    variants: int = 200  # on a GPU, of all families and backends together

    def words(self) -> str:
        """As arguments of the command."""
        parts = [f"--device {self.device} --seed {self.seed}"]
        parts += [f"--family {name}" for name in self.families]
        parts += [f"--backend {name}" for name in self.backends]
        parts += [f"--variants {self.variants}"] * (self.device == "cuda")
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Options:
        return cls(**{**fields, "families": tuple(fields["families"]), "backends": tuple(fields["backends"])})


@dataclass(frozen=True)
class Job:
    """Problems of one variant; on a CPU, where nothing is compiled ahead, of a family and backend."""

    family: str
    backend: str
    index: int  # of the variant
    variant: Any
    copy: int = 0  # several jobs share a variant whose compiled kernels serve many shapes

    @property
    def compiles(self) -> bool:
        """Whether its first problem takes long."""
        quantises = self.family == "fp8"  # by Triton's kernels
        return self.variant is not None and (quantises or self.backend in ("triton", "ampere"))


# (family, backend): share of the variants, jobs a variant. What is compiled ahead or serves many shapes has few variants and
# many jobs.
_GPU = {
    ("attention", "triton"): (0.40, 1),
    ("varlen", "triton"): (0.19, 2),
    ("sdpa", "triton"): (0.11, 3),
    ("attention", "hopper"): (0.06, 3),
    ("varlen", "hopper"): (0.05, 3),
    ("attention", "ampere"): (0.05, 2),
    ("attention", "reference"): (0.0, 4),
    ("decode", "triton"): (0.17, 2),
    ("linear", "triton"): (0.13, 2),
    ("linear", "hopper"): (0.05, 3),
    ("delta", "triton"): (0.10, 2),
    ("delta", "hopper"): (0.03, 3),
    ("fp8", "hopper"): (0.15, 1),  # a third as many modules
}
_CPU = {
    ("attention", "cpu"): 8,
    ("attention", "reference"): 5,
    ("varlen", "cpu"): 6,
    ("varlen", "reference"): 3,
    ("sdpa", "cpu"): 3,
    ("fp8", "cpu"): 2,
    ("fp8", "reference"): 1,
    ("decode", "cpu"): 5,
    ("decode", "reference"): 2,
    ("linear", "cpu"): 5,
    ("linear", "reference"): 2,
    ("delta", "cpu"): 5,
    ("delta", "reference"): 1,
    ("attention", "triton"): 3,  # under Triton's interpreter, if it is asked for
    ("varlen", "triton"): 2,
    ("decode", "triton"): 2,
    ("linear", "triton"): 2,
    ("delta", "triton"): 2,
}


def present() -> list[str]:
    """Families that this tree has."""
    return [name for name in families.NAMES if find_spec(f"tests.fuzz.families.{name}") is not None]


@cache
def jobs(options: Options) -> tuple[Job, ...]:
    """All jobs, in the order that gives problems their numbers."""
    wanted = options.families or tuple(present())
    found: list[Job] = []
    table = _GPU if options.device == "cuda" else _CPU
    for (family, backend), share in table.items():
        if family not in wanted or family not in present():
            continue
        asked = backend in options.backends if options.backends else options.device == "cuda" or backend != "triton"
        if not asked:
            continue
        if isinstance(share, int):
            found += [Job(family, backend, 0, None, copy) for copy in range(share)]
            continue
        part, copies = share
        if part == 0.0:
            found += [Job(family, backend, 0, None, copy) for copy in range(copies)]
            continue
        draw = Draw(options.seed, "variants", family, backend)
        count = max(1, round(options.variants * part))
        drawn = families.load(family).variants(draw, backend, count)
        found += [Job(family, backend, n, v, c) for n, v in enumerate(drawn) for c in range(copies)]
    if not found:
        raise ValueError(f"no family and backend is left by {options.words()}")
    return tuple(found)


def problem(options: Options, number: int) -> tuple[Job, Any]:
    """Problem `number` of a run, and its job."""
    every = jobs(options)
    job = every[number % len(every)]
    return job, families.load(job.family).draw(Draw(options.seed, number), job.variant, job.backend)
