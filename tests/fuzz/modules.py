"""The compiled modules that a run on a GPU needs, built ahead without one."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

from tests.fuzz import families, plan
from tests.fuzz.plan import Options
from warploom.runtime.module_spec import ModuleSpec


def needed(options: Options, problems: int) -> list[ModuleSpec]:
    """Of all problems below that number, the most often needed first."""
    counts: Counter[ModuleSpec] = Counter()
    for number in range(problems):
        every = plan.jobs(options)
        job = every[number % len(every)]
        found: Any = getattr(families.load(job.family), "modules", None)
        if found is not None and job.backend in ("hopper", "ampere"):
            counts.update(found(plan.problem(options, number)[1], job.backend))
    return [spec for spec, _ in counts.most_common()]


def build(options: Options, problems: int, folder: str) -> int:
    """Fill a cache with them; 1 where one does not compile."""
    os.environ["WARPLOOM_CACHE"] = folder
    from warploom.commands.build import build_all
    from warploom.runtime import modules

    specs = needed(options, problems)
    refused = modules.cannot_build()
    if refused is not None:
        print(f"nothing can be built here: {refused}", file=sys.stderr)
        return 1
    failed = 0
    for arch in sorted({spec.arch for spec in specs}):
        for row in build_all([spec for spec in specs if spec.arch == arch], max(1, (os.cpu_count() or 2) // 2), quiet=False):
            if "error" in row:
                failed += 1
                print(f"{row['name']}: {row['error']}", file=sys.stderr)
    print(f"{len(specs) - failed} of {len(specs)} modules in {modules.cache_folder()}")
    return int(failed > 0)
