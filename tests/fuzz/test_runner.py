"""The parent of the workers: a crash or a hang costs one problem and is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fuzz.plan import Options
from tests.fuzz.runner import Run, Worker

SEED = 20261122
OPTIONS = Options(families=("attention", "sdpa"), seed=SEED)


class Struck(Run):
    """A run whose worker dies at one problem and is found hung at another."""

    crash, hang = 4, 9

    def _heard(self, worker: Worker, said: dict[str, Any]) -> None:
        super()._heard(worker, said)
        if said.get("start") == self.crash:
            worker.end()
            worker.process.wait()
        elif said.get("start") == self.hang:
            worker.last = float("-inf")


def test_a_crash_and_a_hang_cost_one_problem_each(tmp_path: Path) -> None:
    run = Struck(OPTIONS, problems=14, seconds=1e6, workers=1, folder=tmp_path, json_path=tmp_path / "out.json", quiet=True)
    # One unit, so that what follows the lost problems is in its numbers.
    run.units = [list(range(14))]
    tally = run.run()
    found = json.loads((tmp_path / "out.json").read_text())
    assert tally.done == found["problems"] == 14
    assert {n: f.status for n, f in tally.failures.items() if f.status in ("crash", "hang")} == {4: "crash", 9: "hang"}
    assert sum(found["backends"].values()) + found["statuses"].get("refused", 0) == 14
    kept = [json.loads(path.read_text()) for path in tmp_path.glob("*-*.json")]
    assert {"crash", "hang"} <= {k["status"] for k in kept}
    assert all(f"--only {n}" in " ".join(k["drawn"] for k in kept) for n in (4, 9))


def test_one_problem_runs_alone_as_it_did_among_all() -> None:
    tally = Run(OPTIONS, problems=0, numbers=[11], seconds=1e6, workers=1, quiet=True).run()
    assert tally.done == 1 and not tally.failures
