"""``kvoffload verify``."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from kvoffload.cli.interrupt import current
from kvoffload.cli.output import print_json, say, show
from kvoffload.cli.progress import progress_bar
from kvoffload.cli.variants import variants_on
from kvoffload.core.errors import ConfigurationError
from kvoffload.plugins.registry import BackendRegistry
from kvoffload.testing.conformance.child import Request
from kvoffload.testing.conformance.run import FAILED, PASSED, SKIPPED
from kvoffload.testing.conformance.verify import Report, VariantReport, verify_variant

MARKS = {PASSED: "ok", FAILED: "FAILED", SKIPPED: "skipped"}


def run(
    name: str | None,
    *,
    on: str | None,
    backend_class: str | None,
    device: str | None,
    deadline: float,
    seed: int,
    as_json: bool,
) -> int:
    """Verify a backend, and print what came of it. Returns the exit code."""
    if (name is None) == (backend_class is None):
        raise ConfigurationError("name an installed backend, or give --backend-class; one of both")
    report = Report(
        backend=name or str(backend_class),
        distribution="" if name is None else BackendRegistry().distribution(name),
    )
    for variant in variants_on(name, on):
        request = Request(
            backend=name,
            backend_class=backend_class,
            variant=variant,
            device=device,
            seed=seed,
            deadline=deadline,
        )
        where = "here" if variant is None else f"on the fake device, {variant}"
        with progress_bar(f"verifying {where}", 1) as advance:
            made = verify_variant(request, progress=advance, stop=current().is_set)
        report.variants.append(made)
        if made.interrupted:
            break
    if as_json:
        print_json(report.as_json())
    else:
        show("\n".join(_lines(report)))
    if any(variant.interrupted for variant in report.variants):
        say(f"interrupted after {sum(len(v.outcomes) for v in report.variants)} checks")
        return EXIT_INTERRUPTED
    return EXIT_OK if report.ok else EXIT_FAILED


def _lines(report: Report) -> Iterator[str]:
    printed = report.as_json()
    for variant in report.variants:
        yield f"{report.backend} on {variant.device} ({variant.variant})"
        yield from _checks(variant)
        if variant.speed is not None:
            yield (
                f"  speed, as a ratio to one large copy: store {variant.speed.store:.2f}, "
                f"load {variant.speed.load:.2f}"
            )
        yield ""
    counts = ", ".join(f"{printed[outcome]} {outcome}" for outcome in MARKS)
    yield f"{counts}; level: {printed['level'] or 'none'}"


def _checks(variant: VariantReport) -> Iterator[str]:
    guarantee = None
    for outcome in variant.outcomes:
        if outcome.guarantee != guarantee:
            guarantee = outcome.guarantee
            yield f"  {guarantee}"
        reason = f": {outcome.reason}" if outcome.reason else ""
        yield f"    {MARKS[outcome.outcome]:8}{outcome.name}{reason}"
