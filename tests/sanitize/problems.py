"""Which problems there are: a small one of each variant that the fuzzer draws, and those picked by hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from tests.fuzz import families, plan
from tests.fuzz.draw import Draw
from tests.sanitize import picked

LONGEST = 100  # queries, keys: a checked kernel is some hundred times slower
TRIES = 8


@dataclass(frozen=True)
class Options:
    """What the problems depend on."""

    seed: int = 0
    variants: int = 110  # of all families together
    backends: tuple[str, ...] = ("triton",)
    device: str = "cuda"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Options:
        return cls(**{**fields, "backends": tuple(fields["backends"])})

    def words(self) -> str:
        """As arguments of the command."""
        return f"--seed {self.seed} --variants {self.variants} " + " ".join(f"--backend {name}" for name in self.backends)


class Small(Draw):
    """Lengths are at most LONGEST."""

    def length(self, most: int) -> int:
        return super().length(min(most, LONGEST))


def names(options: Options) -> list[str]:
    """Of all problems, as family/backend/variant."""
    found = [f"{job.family}/{job.backend}/{job.index}" for job in _jobs(options)]
    return found + [f"picked/{backend}/{name}" for backend in options.backends for name in picked.problems(backend)]


def _jobs(options: Options) -> list[plan.Job]:
    fuzzed = plan.Options("cuda", (), options.backends, options.seed, options.variants)
    return [job for job in plan.jobs(fuzzed) if job.copy == 0 and job.variant is not None]


def run(options: Options, name: str) -> str:
    """Run one; "" or the words with which the package refuses it, as it should."""
    family_name, backend, which = name.split("/", 2)
    device = torch.device(options.device)
    if family_name == "picked":
        results = picked.problems(backend)[which](device)
        assert not any(t.isnan().any() for t in results), "NaN"
        return ""
    (job,) = (j for j in _jobs(options) if (j.family, j.backend, j.index) == (family_name, backend, int(which)))
    family = families.load(family_name)
    problem = small(options.seed, job)
    given = family.inputs(problem, device)
    try:
        family.run(problem, given, backend)
    except (ValueError, TypeError) as error:
        words = family.refusal(problem, given, backend)
        excuse = getattr(family, "excuse", lambda *_: None)(problem, given, error)
        if (words is not None and words in str(error)) or excuse is not None:
            return f"{error}"
        raise
    return ""


def small(seed: int, job: plan.Job) -> Any:
    """Of some problems of the variant the one that launches most of its kernels."""
    family = families.load(job.family)
    drawn = [
        family.draw(Small(seed, "sanitize", job.family, job.backend, job.index, n), job.variant, job.backend)
        for n in range(TRIES)
    ]
    return max(drawn, key=_launches)


def _launches(problem: Any) -> tuple[bool, bool, bool]:
    """Not empty; differentiated; by everything."""
    sizes = [getattr(problem, name, 1) for name in ("batch", "seqlen_q", "seqlen_k")]
    lengths = [getattr(problem, name, None) for name in ("lengths", "lengths_q", "lengths_k", "used", "sequences")]
    full = all(sizes) and all(each is None or any(each) for each in lengths)
    differentiated = bool(getattr(problem, "backward", True) and getattr(problem, "upstream", True))
    return full, differentiated, len(getattr(problem, "wants", ())) in (0, 4)
