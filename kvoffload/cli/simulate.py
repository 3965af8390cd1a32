"""``kvoffload simulate``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kvoffload.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from kvoffload.cli.interrupt import current
from kvoffload.cli.output import print_json, say, show
from kvoffload.cli.progress import progress_bar
from kvoffload.core.backend import Backend
from kvoffload.core.errors import ConfigurationError
from kvoffload.testing.simulator.backend import SimBackend
from kvoffload.testing.simulator.program import MakeBackend, Outcome, Program
from kvoffload.testing.simulator.rank import PROTOCOLS
from kvoffload.testing.simulator.rules import RULES
from kvoffload.testing.simulator.served import ServedProgram
from kvoffload.testing.simulator.simulate import MakeProgram, Simulation, simulate
from kvoffload.testing.simulator.world import World


def list_rules() -> int:
    """Print every rule that can be broken, one name a line."""
    show("\n".join(RULES))
    return EXIT_OK


def run(
    *,
    seeds: Sequence[int],
    broken: str | None,
    backend_class: str | None,
    protocol: str | None,
    as_json: bool,
) -> int:
    """Run programs, and print what came of it. Returns the exit code."""
    if broken is not None and broken not in RULES:
        raise ConfigurationError(
            f"--break {broken}: there is no such rule; --list-rules prints those there are"
        )
    if protocol is not None and protocol not in PROTOCOLS:
        raise ConfigurationError(
            f"--protocol {protocol}: there is no such protocol; there are {', '.join(PROTOCOLS)}"
        )
    make_program: MakeProgram = (
        Program if protocol is None else functools.partial(ServedProgram, protocol=protocol)
    )
    make_backend = SimBackend if backend_class is None else _load(backend_class)
    breaking = contextlib.nullcontext() if broken is None else RULES[broken].break_()
    with breaking, _quiet(), progress_bar("simulating", len(seeds)) as advance:
        simulation = simulate(
            seeds,
            make_backend,
            make_program=make_program,
            progress=advance,
            stop=current().is_set,
        )
    command = _command(simulation.failed, broken, backend_class, protocol)
    if as_json:
        print_json(_as_json(simulation, command))
    else:
        show("\n".join(_summary(simulation, command)))
    if simulation.failed is not None:
        return EXIT_FAILED
    if simulation.interrupted:
        say(f"interrupted after {simulation.schedules} of {len(seeds)} programs")
        return EXIT_INTERRUPTED
    return EXIT_OK


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The simulated devices say again and again what a real one would say once."""
    logger = logging.getLogger("kvoffload")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _load(name: str) -> MakeBackend:
    """``module:Class``, a backend that takes the simulated world as its argument."""
    module, _, attribute = name.partition(":")
    # As `python -m` has it: a module of the folder that one stands in.
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigurationError(
            f"--backend-class {name}: not found as module:Class ({error})"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigurationError(f"--backend-class {name}: not a class of backends")
    make: Callable[[World], Backend] = found
    try:
        make(World())
    except Exception as error:
        raise ConfigurationError(
            f"--backend-class {name}: must take a simulated World as its argument, as "
            f"kvoffload.testing.simulator.SimBackend does ({error})"
        ) from error
    return make


def _command(
    failed: Outcome | None, broken: str | None, backend_class: str | None, protocol: str | None
) -> str | None:
    if failed is None:
        return None
    options = [f"--protocol {protocol}"] if protocol else []
    options += [f"--seed {failed.seed}"]
    options += [f"--break {broken}"] if broken else []
    options += [f"--backend-class {backend_class}"] if backend_class else []
    return f"kvoffload simulate {' '.join(options)}"


def _as_json(simulation: Simulation, command: str | None) -> dict[str, object]:
    printed = {
        name: value
        for name, value in asdict(replace(simulation, failed=None)).items()
        if not name.startswith("_") and name != "failed"
    }
    if simulation.failed is not None:
        printed["failure"] = asdict(simulation.failed) | {"command": command}
    return printed


def _summary(simulation: Simulation, command: str | None) -> Iterator[str]:
    yield (
        f"{simulation.schedules:,} programs, {simulation.jobs:,} jobs "
        f"({simulation.median_jobs:.0f} in the median program), {simulation.steps:,} steps "
        f"({simulation.median_steps:.0f}), {simulation.faults_injected:,} faults injected"
    )
    yield (
        f"corrupt blocks: {simulation.corrupt_blocks}, lost jobs: {simulation.lost_jobs}, "
        f"leaks: {simulation.leaks}, other broken promises: {simulation.violations}"
    )
    failed = simulation.failed
    if failed is None:
        return
    sections = {
        f"\nSeed {failed.seed} goes wrong. The operations that it takes:": failed.operations,
        "What went wrong:": failed.problems,
        "Who overtook whom:": failed.overtaking[:5],
    }
    for heading, lines in sections.items():
        if lines:
            yield heading
            yield from (f"  {line}" for line in lines)
    yield f"Again: {command}"
