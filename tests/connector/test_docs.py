"""The example in docs/connectors.md runs, with either protocol."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"


def test_the_example_runs_with_either_protocol(protocol: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example.replace("jobs", protocol)],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout == "3 blocks came back on 2 ranks: the same\n"
    assert done.stderr == ""
