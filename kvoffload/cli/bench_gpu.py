"""``kvoffload bench gpu``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from kvoffload.bench import gpu, product
from kvoffload.bench.copy import is_accelerator
from kvoffload.bench.machine import describe
from kvoffload.cli import EXIT_FAILED, EXIT_OK
from kvoffload.cli.choose import choose_on
from kvoffload.cli.gpu_report import heading, markdown, sections
from kvoffload.cli.measuring import ON_FAKE, check_blocks, measuring, parse_pages
from kvoffload.cli.output import print_json, say, show, stdout_to_stderr
from kvoffload.core.errors import (
    BackendError,
    BackendUnavailableError,
    ConfigurationError,
    TransferError,
)
from kvoffload.core.sizes import shortened
from kvoffload.plugins.registry import BackendRegistry

FAKE_PRODUCT = 32
"""Rows and columns of the matrices there, which the host multiplies."""


def run(
    *,
    backend_name: str | None,
    on: str | None,
    pages: str | None,
    blocks: int,
    rounds: int,
    seed: int,
    out: Path | None,
    or_skip: bool,
    as_json: bool,
) -> int:
    """Measure an accelerator, and print or write what came of it. Returns the exit code."""
    sizes = list(gpu.PAGES) if pages is None else parse_pages(pages)
    check_blocks(blocks)
    if out is not None:
        _check_out(out, on)
    with stdout_to_stderr():
        try:
            name, variant, backend = choose_on(backend_name, on)
        except (BackendError, ConfigurationError) as error:
            missing = isinstance(error, BackendUnavailableError) or isinstance(
                error.__cause__, BackendUnavailableError
            )
            if not (or_skip and missing and _accelerator() is None):
                raise
            say(f"skipped: {error}")
            return EXIT_OK
        if not is_accelerator(backend):
            backend.close()
            return _refuse(name, or_skip=or_skip)
        machine = describe(backend)
    try:
        with measuring(backend, "measuring") as (rig, step):
            report = gpu.run(
                backend,
                rig,
                pages=sizes,
                blocks=blocks,
                rounds=rounds,
                product_size=product.SIZE if variant is None else FAKE_PRODUCT,
                seed=seed,
                step=step,
            )
    except TransferError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    fake = variant is not None
    top = heading(name, str(backend.device), machine, report, fake=fake)
    parts = sections(report)
    if out is not None:
        _write(out, markdown(top, machine, shlex.join(["kvoffload", *sys.argv[1:]]), parts))
    if as_json:
        print_json(
            {
                "backend": name,
                "device": str(backend.device),
                "fake": variant,
                "notice": ON_FAKE if fake else None,
                "machine": asdict(machine),
                **asdict(report),
            }
        )
    else:
        show(*top, "", *(shown for part in parts for shown in part.for_terminal()))
    return EXIT_OK


def _accelerator() -> torch.device | None:
    """What torch can use here."""
    return torch.accelerator.current_accelerator(check_available=True)


def _refuse(name: str, *, or_skip: bool) -> int:
    """There is nothing to measure; or there is, and something else was chosen.

    Raises:
        ConfigurationError: what is missing, or what to do.
    """
    accelerator = _accelerator()
    if accelerator is not None:
        raise ConfigurationError(
            f"backend {name} was chosen, which copies in host memory, but torch sees an "
            f"accelerator ({accelerator}); name a backend that serves it"
        )
    reasons = "; ".join(
        f"{report.name}: {report.error or report.reason}"
        for report in BackendRegistry().reports()
        if not report.available
    )
    why = f"there is no accelerator to measure: backend {name} copies in host memory ({reasons})"
    if not or_skip:
        raise ConfigurationError(why)
    say(f"skipped: {why}")
    return EXIT_OK


def _check_out(out: Path, on: str | None) -> None:
    where = f"--out {shortened(str(out))}"
    if on is not None:
        raise ConfigurationError(f"{where} --on {on}: only what was measured is written down")
    if out.exists():
        raise ConfigurationError(f"{where}: it is there already; measurements are kept")
    if not out.parent.is_dir():
        raise ConfigurationError(f"{where}: there is no folder {shortened(str(out.parent))}")


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigurationError(f"--out {shortened(str(out))}: {error}") from error
