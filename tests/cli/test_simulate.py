"""``kvoffload simulate`` as a person and a script use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffload.cli import main
from kvoffload.testing.simulator.rules import RULES


def test_programs_that_go_well_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "50", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schedules"] == 50
    assert printed["jobs"] >= 8 * 25
    assert printed["steps"] >= 40 * 25
    assert printed["faults_injected"] > 0
    assert (printed["corrupt_blocks"], printed["lost_jobs"], printed["leaks"]) == (0, 0, 0)
    assert "failure" not in printed
    assert main(["simulate", "--seeds", "5"]) == 0
    assert "corrupt blocks: 0, lost jobs: 0, leaks: 0" in capsys.readouterr().out


def test_rules_are_listed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list-rules"]) == 0
    assert capsys.readouterr().out.splitlines() == list(RULES)


def test_a_broken_rule_exits_with_1_and_says_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rule = "stores-wait-for-compute"
    assert main(["simulate", "--break", rule]) == 1
    said = capsys.readouterr().out
    assert "What went wrong:" in said
    assert "overtook" in said
    again = next(line for line in said.splitlines() if line.startswith("Again: kvoffload "))
    arguments = again.removeprefix("Again: kvoffload ").split()
    assert main([*arguments, "--json"]) == 1
    failure = json.loads(capsys.readouterr().out)["failure"]
    assert f"--seed {failure['seed']}" in again
    assert failure["operations"]
    assert failure["corrupt"]
    # The same seed is clean without.
    assert main(["simulate", "--seed", str(failure["seed"])]) == 0


def test_a_backend_from_outside_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outside.py").write_text(
        "from kvoffload.testing.simulator import SimBackend, SimStream\n"
        "class Right(SimBackend):\n"
        "    pass\n"
        "class Stream(SimStream):\n"
        "    def wait_event(self, event):\n"
        "        pass\n"
        "class IgnoresWaits(SimBackend):\n"
        "    def new_stream(self, lane):\n"
        "        if lane not in self._streams:\n"
        "            self._streams[lane] = Stream(self.world, lane.value)\n"
        "        return self._streams[lane]\n"
        "class NoBackend:\n"
        "    pass\n"
        "class TakesNothing(SimBackend):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["simulate", "--seeds", "20", "--backend-class", "outside:Right"]) == 0
    assert main(["simulate", "--backend-class", "outside:IgnoresWaits"]) == 1
    assert "--backend-class outside:IgnoresWaits" in capsys.readouterr().out
    for name in (
        "outside:NoBackend",
        "outside:Missing",
        "nowhere:X",
        "outside",
        "",
        ":",
        "outside:TakesNothing",
    ):
        assert main(["simulate", "--backend-class", name]) == 2, name
        said = capsys.readouterr().err
        assert "--backend-class" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--break", "nonsense"], ["--seeds", "0"], ["--seed", "-1"], ["--seeds", "x"]]
)
def test_bad_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    said = capsys.readouterr().err
    assert arguments[0] in said
    assert said.count("\n") == 1


def test_what_ordering_costs_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ordering", "--blocks", "10", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["finished"] for row in rows] == [0, 1000, 100_000]
    assert main(["bench", "ordering", "--blocks", "10"]) == 0
    assert "100,000" in capsys.readouterr().out
