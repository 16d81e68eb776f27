"""The page's scripts run by Node.js, without the page."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from warploom.smem.page import data, script

NODE = next(filter(None, map(shutil.which, ("node", "nodejs"))), None)


def evaluate(expression: str, inputs: list[Any]) -> list[Any]:
    """The expression of `input` for each of the inputs; an error is {"error": its message}."""
    if NODE is None:
        pytest.skip("no Node.js here to run the page's script")
    source = f"""
"use strict";
const DATA = {json.dumps(data())};
{script("model.js", "notation.js", "search.js")}
const answer = input => {{ try {{ return {expression}; }} catch (error) {{ return {{ error: error.message }}; }} }};
const inputs = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(inputs.map(answer)));
"""
    run = subprocess.run([NODE, "-e", source], input=json.dumps(inputs), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
