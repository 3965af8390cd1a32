"""``kvoffload verify``: a child that hangs or dies costs one check and not the run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvoffload.cli import main
from kvoffload.core.errors import BackendUnavailableError, BrokenBackendError
from kvoffload.testing.conformance import CHECKS, Guarantee, Outcome, verify as verify_module
from kvoffload.testing.conformance.child import Request
from kvoffload.testing.conformance.report import Report, VariantReport
from kvoffload.testing.conformance.run import FAILED, PASSED, SKIPPED
from kvoffload.testing.conformance.speed import Speed
from kvoffload.testing.conformance.verify import verify_variant

HERE = "tests.testing.conformance.mutants"
COPY, PROBE = "blocks are copied on the device", "the probe answers and never raises"
STORE = "the first and the last block and chunk move"


def verify(backend_class: str, *checks: str, **options: Any) -> VariantReport:
    request = Request(None, f"{HERE}:{backend_class}", checks=list(checks), speed=False, **options)
    return verify_variant(request)


def test_a_process_that_dies_fails_its_check_and_the_next_one_runs() -> None:
    report = verify("DiesOnCopies", COPY, PROBE)
    died, went_on = report.outcomes
    assert (died.name, died.outcome, died.guarantee) == (COPY, FAILED, "5 bytes")
    assert "died of signal 11 (SIGSEGV)" in died.reason
    assert (went_on.name, went_on.outcome) == (PROBE, PASSED)
    assert report.level is None


def test_a_transfer_that_never_ends_fails_its_check_and_the_next_one_runs() -> None:
    report = verify("Hangs", STORE, PROBE, deadline=0.5)
    hung, went_on = report.outcomes
    assert (hung.outcome, hung.stuck) == (FAILED, True)
    assert "waits for ever" in hung.reason
    assert went_on.outcome == PASSED


def test_a_process_that_answers_nobody_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "GRACE_SECONDS", 0.5)
    report = verify("KeepsTheInterpreterLock", STORE, PROBE, deadline=0.5)
    hung, went_on = report.outcomes
    assert (hung.outcome, "the process hung" in hung.reason) == (FAILED, True)
    assert went_on.outcome == PASSED


def test_a_process_that_dies_between_checks_fails_the_next_one() -> None:
    report = verify("DiesWhenItIsClosed", STORE, PROBE)
    assert [outcome.outcome for outcome in report.outcomes] == [FAILED, FAILED]
    assert "ended with exit code 1" in report.outcomes[0].reason


def test_a_backend_that_writes_into_the_kits_pipe_fails_its_check() -> None:
    report = verify("WritesIntoEveryPipe", STORE, PROBE)
    wrong, went_on = report.outcomes
    assert (wrong.outcome, "a pipe that is not its own" in wrong.reason) == (FAILED, True)
    assert went_on.outcome == PASSED


def test_a_process_that_dies_while_it_is_measured_has_failed() -> None:
    request = Request(None, f"{HERE}:DiesWithLargePages", checks=[PROBE])
    report = verify_variant(request)
    assert report.level is None
    assert report.outcomes[-1].outcome == FAILED
    assert "died of signal 11" in report.outcomes[-1].reason


def test_what_is_claimed_and_then_withdrawn_is_no_level() -> None:
    skipped = Outcome("a", Guarantee.ASYNCHRONY.value, SKIPPED, "not for this memory")
    report = VariantReport("1", "d", True, [*outcomes(PASSED), skipped], Speed(0.9, 0.9))
    assert report.level == "correct"


def test_a_backend_that_cannot_be_made_is_broken() -> None:
    with pytest.raises(BrokenBackendError, match="OSError: no such driver"):
        verify("RaisesWhenItIsMade", PROBE)


def test_a_copy_that_never_works_is_found_by_the_checks_and_not_by_the_measurement() -> None:
    request = Request(None, f"{HERE}:TakesOtherArguments", checks=[STORE])
    report = verify_variant(request)
    (failed,) = report.outcomes
    assert failed.outcome == FAILED
    assert "positional argument" in failed.reason
    assert (report.speed, report.speed_reason) == (None, "a check failed")


def test_a_measurement_that_fails_is_told_and_hides_nothing() -> None:
    report = verify_variant(Request(None, f"{HERE}:HasNoRoomForMuch", checks=[PROBE]))
    assert [each.outcome for each in report.outcomes] == [PASSED]
    assert report.speed is None
    assert "MemoryError: no room for such pages" in report.speed_reason
    printed = Report("b", "", [report]).as_json()
    assert (printed["speed"], printed["speed_reason"]) == (
        {"here": None},
        {"here": report.speed_reason},
    )


def test_a_backend_that_cannot_be_closed_fails_its_check() -> None:
    closes = "a backend can be closed twice used or not"
    (failed,) = verify("CannotBeClosedUnused", closes).outcomes
    assert failed.outcome == FAILED


def test_each_line_is_told_as_its_check_ends() -> None:
    told: list[tuple[str, int]] = []
    request = Request(None, f"{HERE}:Reference", checks=[PROBE, COPY], speed=False)
    verify_variant(
        request, changed=lambda report: told.append((report.device, report.count(PASSED)))
    )
    assert told == [("cpu", 0), ("cpu", 1), ("cpu", 2)]


def test_fail_fast_stops_at_the_first_failure(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--backend-class", f"{HERE}:RaisesInProbe", "--fail-fast", "--json")
    assert main(["verify", *options]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [each["outcome"] for each in printed["checks"]] == [FAILED]


def test_a_part_of_the_checks_has_no_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "cpu", "--check", "The Probe"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cpu on cpu (here)",
        "  probe",
        f"    ok      {PROBE}",
        "",
        "1 passed, 0 failed, 0 skipped; a part of the checks has no level",
    ]


def test_the_checks_are_listed_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--list-checks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "probe"
    assert [line.strip() for line in lines if line.startswith("  ")] == list(CHECKS)
    assert main(["verify", "--list-checks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checks"]
    assert [each["name"] for each in listed] == list(CHECKS)


def test_an_interrupted_run_has_neither_a_level_nor_a_device_that_nobody_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.cli.interrupt.Interrupt.is_set", lambda _: True)
    assert main(["verify", "cpu"]) == 130
    assert capsys.readouterr().out == "0 passed, 0 failed, 0 skipped; interrupted\n"
    assert main(["verify", "cpu", "--json"]) == 130
    printed = json.loads(capsys.readouterr().out)
    assert (printed["device"], printed["level"], printed["interrupted"]) == (None, None, True)


def test_an_error_is_json_where_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, kind in (
        (["verify", "torch"], "BackendUnavailableError"),
        (["verify", "nonsense"], "BackendNotFoundError"),
        (["verify", "cpu", "--check", "no such words"], "ConfigurationError"),
        (["verify", "cpu", "--deadline", "0"], "BadParameter"),
        (["replay", "--backend", "nonsense"], "ConfigurationError"),
    ):
        assert main([*arguments, "--json"]) == 2
        out = capsys.readouterr()
        error = json.loads(out.out)["error"]
        assert error["type"] == kind
        assert " ".join(error["message"].split()) in out.err


def test_a_backend_that_cannot_run_here_says_why() -> None:
    with pytest.raises(BackendUnavailableError, match="sees no accelerator"):
        verify_variant(Request("torch"))


def test_it_stops_when_it_is_told_to() -> None:
    ended: list[int] = []
    report = verify_variant(
        Request("cpu"),
        progress=lambda done, of: ended.append(done),
        stop=lambda: len(ended) >= 3,
    )
    assert report.interrupted
    assert 3 <= len(report.outcomes) < len(CHECKS)
    assert report.level is None


def test_cpu_passes_and_the_report_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "cpu", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["failed"] == 0
    assert printed["passed"] >= 25
    assert printed["passed"] + printed["skipped"] == len(CHECKS) == len(printed["checks"])
    assert (printed["backend"], printed["device"]) == ("cpu", "cpu")
    assert printed["distribution"].startswith("kvoffload ")
    assert printed["variants"] == ["here"]
    assert printed["level"] in ("asynchronous", "fast")
    assert set(printed["speed"]["here"]) == {"store", "load"}
    assert min(printed["speed"]["here"].values()) > 0
    for check in printed["checks"]:
        assert set(check) == {"name", "guarantee", "outcome", "reason", "variant"}
        assert check["reason"] or check["outcome"] == PASSED


def test_a_failure_is_named_with_its_guarantee(capsys: pytest.CaptureFixture[str]) -> None:
    backend = f"{HERE}:ClaimsPinnedMemory"
    assert main(["verify", "--backend-class", backend]) == 1
    out = capsys.readouterr().out
    assert "  capabilities\n" in out
    assert "FAILED  memory is pinned if and only if that is claimed: " in out
    assert "1 failed" in out
    *_, verdict, begin = out.splitlines()
    assert verdict.endswith("level: none")
    assert begin.startswith("Begin with capabilities: memory is pinned if and only if")
    assert "docs/write-a-backend.md, section 7" in begin


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an installed backend, or give --backend-class"),
        (["cpu", "--backend-class", "a:B"], "one of both"),
        (["nonsense"], "no backend named 'nonsense' is installed"),
        (["cpu", "--on", "mars"], "there is only 'fake'"),
        (["torch", "--on", "fake:17"], "a variant of torch 'fake:default'"),
        (["cuda", "--on", "fake:1"], "'fake:13.0', 'fake:12.8', 'fake:12.4'"),
        (["cpu", "--check", "no such words"], "--list-checks prints them"),
        (["--backend-class", "idx"], "write it as MODULE:CLASS"),
        (["--backend-class", "nomod:X"], "no module 'nomod'; install it, or let PYTHONPATH"),
        (["--backend-class", "ctypes:CDLL"], "not a class of backends"),
        (["--backend-class", f"{HERE}:ctypes"], "not a class of backends"),
        (["--backend-class", f"{HERE}:Nobody"], "the module has no 'Nobody'"),
        (["cpu", "--device", "nonsense"], "--device nonsense: the cpu backend serves"),
        (["torch"], "sees no accelerator"),
        (["cpu", "--deadline", "0"], "not a positive number of seconds"),
        (["cpu", "--device", "cuda:0"], "serves device 'cpu'"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def outcomes(*names: str) -> list[Outcome]:
    return [Outcome("a", "5 bytes", name) for name in names]


def test_the_level_is_the_least_of_all_variants() -> None:
    fast, slow = Speed(0.9, 0.8), Speed(0.9, 0.79)
    levels = {
        "fast": VariantReport("1", "d", True, outcomes(PASSED), fast),
        "asynchronous": VariantReport("2", "d", True, outcomes(PASSED, SKIPPED), slow),
        "correct": VariantReport("3", "d", False, outcomes(PASSED), fast),
        None: VariantReport("4", "d", True, outcomes(PASSED, FAILED), fast),
    }
    for level, variant in levels.items():
        assert variant.level == level
    assert VariantReport("5", "d", True, outcomes(SKIPPED), fast).level is None
    assert VariantReport("6", "fake:0", True, outcomes(PASSED), fast).level == "asynchronous"
    variants = list(levels.values())
    assert Report("b", "", variants[:2]).as_json()["level"] == "asynchronous"
    assert Report("b", "", variants[:3]).as_json()["level"] == "correct"
    assert Report("b", "", variants).as_json()["level"] is None
    assert not Report("b", "").ok
