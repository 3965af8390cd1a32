"""``kvoffload verify``."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from kvoffload.cli.choose import variants
from kvoffload.cli.interrupt import current
from kvoffload.cli.output import print_json, say, show
from kvoffload.cli.progress import progress_bar
from kvoffload.core.errors import ConfigurationError
from kvoffload.core.sizes import shortened
from kvoffload.plugins.registry import BackendRegistry
from kvoffload.testing.conformance import CHECKS
from kvoffload.testing.conformance.child import Request
from kvoffload.testing.conformance.report import Report, VariantReport
from kvoffload.testing.conformance.run import FAILED, PASSED, SKIPPED
from kvoffload.testing.conformance.verify import verify_variant

MARKS = {PASSED: "ok", FAILED: "FAILED", SKIPPED: "skipped"}


def list_checks(as_json: bool) -> int:
    """Print every check, in the order in which they run. Returns the exit code."""
    if as_json:
        checks = [{"name": c.name, "guarantee": c.guarantee.value} for c in CHECKS.values()]
        print_json({"checks": checks})
        return EXIT_OK
    guarantee = None
    lines = []
    for check in CHECKS.values():
        if check.guarantee is not guarantee:
            guarantee = check.guarantee
            lines.append(guarantee.value)
        lines.append(f"  {check.name}")
    show("\n".join(lines))
    return EXIT_OK


def run(
    name: str | None,
    *,
    on: str | None,
    backend_class: str | None,
    device: str | None,
    part: str | None,
    fail_fast: bool,
    deadline: float,
    seed: int,
    as_json: bool,
) -> int:
    """Verify a backend, and print what comes of it. Returns the exit code."""
    if (name is None) == (backend_class is None):
        raise ConfigurationError("name an installed backend, or give --backend-class; one of both")
    checks = None if part is None else _containing(part)
    report = Report(
        backend=name or str(backend_class),
        distribution="" if name is None else BackendRegistry().distribution(name),
    )
    for variant in [None] if on is None else variants(name or "", on):
        request = Request(
            backend=name,
            backend_class=backend_class,
            variant=variant,
            device=device,
            checks=checks,
            speed=checks is None,
            seed=seed,
            deadline=deadline,
        )
        made = _verify(request, report.backend, fail_fast=fail_fast, as_json=as_json)
        report.variants.append(made)
        if made.interrupted or (fail_fast and not made.ok):
            break
    if as_json:
        print_json(report.as_json())
    else:
        show("\n".join(_verdict(report)))
    if report.interrupted:
        say(f"interrupted after {sum(len(v.outcomes) for v in report.variants)} checks")
        return EXIT_INTERRUPTED
    return EXIT_OK if report.ok else EXIT_FAILED


def _containing(part: str) -> list[str]:
    """Names of the checks that contain these words."""
    names = [name for name in CHECKS if part.casefold() in name.casefold()]
    if not names:
        raise ConfigurationError(
            f"--check {shortened(part)}: no check's name contains that; --list-checks prints them"
        )
    return names


def _verify(request: Request, backend: str, *, fail_fast: bool, as_json: bool) -> VariantReport:
    """Verify one variant. For people every line is printed at once; for machines none is."""
    stop = current().is_set
    if as_json:
        where = "here" if request.variant is None else f"on the fake device, {request.variant}"
        with progress_bar(f"verifying {where}", 1) as advance:
            return verify_variant(request, progress=advance, stop=stop, fail_fast=fail_fast)
    printer = _Printer(backend)
    made = verify_variant(request, changed=printer, stop=stop, fail_fast=fail_fast)
    if made.speed is not None:
        means = "; on the fake device it means nothing" if made.emulated else ""
        show(
            f"  speed, as a ratio to one large copy: store {made.speed.store:.2f}, "
            f"load {made.speed.load:.2f}{means}"
        )
    elif made.speed_reason and not made.interrupted:
        show(f"  speed: not measured: {made.speed_reason}")
    if made.outcomes:
        show("")
    return made


class _Printer:
    """Prints a report as it grows.

    Args:
        backend: its name.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._printed = 0
        self._begun = False
        self._guarantee = ""

    def __call__(self, report: VariantReport) -> None:
        if not self._begun:
            self._begun = True
            show(f"{self._backend} on {report.device or 'no device'} ({report.variant})")
        for outcome in report.outcomes[self._printed :]:
            if outcome.guarantee != self._guarantee:
                self._guarantee = outcome.guarantee
                show(f"  {outcome.guarantee}")
            reason = f": {outcome.reason}" if outcome.reason else ""
            show(f"    {MARKS[outcome.outcome]:8}{outcome.name}{reason}")
        self._printed = len(report.outcomes)


def _verdict(report: Report) -> Iterator[str]:
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in MARKS)
    if report.interrupted:
        yield f"{counts}; interrupted"
    elif all(variant.whole for variant in report.variants):
        yield f"{counts}; level: {report.level or 'none'}"
    else:
        yield f"{counts}; a part of the checks has no level"
    failures = (variant.first_failure for variant in report.variants)
    first = next((failure for failure in failures if failure is not None), None)
    if first is not None:
        yield (
            f"Begin with {first.guarantee}: {first.name}. What to do about it: "
            f"docs/write-a-backend.md, section 7, {first.guarantee!r}."
        )
