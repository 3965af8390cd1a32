"""The commands and their options. A command returns what to do; ``kvoffload.cli.main`` does it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvoffload.cli import EXIT_USAGE
from kvoffload.core.sizes import shown

app = typer.Typer(
    name="kvoffload",
    help="Move the KV cache of large language models off the accelerator and back.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(help="Measure, as ratios within one run.")
app.add_typer(bench, name="bench")

Command: TypeAlias = Callable[[], int]

_LARGEST = (1 << 63) - 1


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:  # also for more digits than Python converts
        value = _LARGEST + 1 if text.strip().isdecimal() else least - 1
    if value < least:
        raise typer.BadParameter(f"{shown(text)} is not a whole number of at least {least}")
    if value > _LARGEST:
        raise typer.BadParameter(f"{shown(text)} is too large")
    return value


def _count(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def _seed(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def _help_unless(context: typer.Context) -> None:
    """Without a command: what there is, and the exit code of wrong input."""
    if context.invoked_subcommand is None:
        # typer prints it and returns nothing, or returns it, as its version and settings have it.
        text = context.get_help()
        if text.strip():
            typer.echo(text)
        raise typer.Exit(EXIT_USAGE)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]


def _version(wanted: bool) -> None:
    if wanted:
        from kvoffload import __version__

        typer.echo(f"kvoffload {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback has seen to it
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    _help_unless(context)


@bench.callback(invoke_without_command=True)
def bench_root(context: typer.Context) -> None:
    _help_unless(context)


@app.command()
def backends(json: Json = False) -> Command:
    """List every discovered backend: who provides it, and whether it can run here."""

    def command() -> int:
        from kvoffload.cli.backends import run

        return run(json)

    return command


@app.command()
def replay(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests as JSON lines in the Mooncake format: 'timestamp' in ms and "
            "'hash_ids', one per 512-token block. By default a built-in chat workload of 2,000 "
            "requests, or of --limit."
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Backend by name; by default chosen as 'kvoffload backends' explains."),
    ] = None,
    device_blocks: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Blocks of the device pool.")
    ] = 1000,
    host_bytes: Annotated[
        str, typer.Option(help="Budget of host memory: a number of bytes, or like '4GiB'.")
    ] = "256MiB",
    layers: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Layers of the cache.")
    ] = 4,
    page_bytes: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Bytes of one block in one layer.")
    ] = 16384,
    concurrency: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Requests in flight.")
    ] = 8,
    block_size_factor: Annotated[
        int,
        typer.Option(
            parser=_count,
            metavar="N",
            help="Device blocks per chunk; only whole chunks are stored.",
        ),
    ] = 1,
    limit: Annotated[
        int | None,
        typer.Option(
            parser=_count,
            metavar="N",
            help="Serve at most so many requests, the earliest. Without it all of a trace, or "
            "2,000 of the built-in workload.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            parser=_seed,
            metavar="N",
            help="Of the built-in workload, by default 0; a trace has none.",
        ),
    ] = None,
    json: Json = False,
) -> Command:
    """Serve a request trace through the whole system, moving real bytes and checking each.

    Exit code: 0 if every byte was right; 1 if anything was corrupt or failed, or the output could
    not be written; 2 for wrong input; 130 for Ctrl-C; 141 if nobody reads the output.
    """

    def command() -> int:
        from kvoffload.core.errors import ConfigurationError
        from kvoffload.core.sizes import parse_bytes

        if trace is not None and seed is not None:
            raise ConfigurationError("--seed is of the built-in workload; --trace has none")
        budget = parse_bytes(host_bytes, "--host-bytes")

        from kvoffload.cli.replay import run
        from kvoffload.replay.replay import Settings

        settings = Settings(
            device_blocks=device_blocks,
            host_bytes=budget,
            layers=layers,
            page_bytes=page_bytes,
            concurrency=concurrency,
            block_size_factor=block_size_factor,
        )
        return run(
            settings, trace=trace, backend_name=backend, limit=limit, seed=seed or 0, as_json=json
        )

    return command


@app.command()
def simulate(
    seeds: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Run the programs of seeds 0 to N - 1.")
    ] = 1000,
    seed: Annotated[
        int | None, typer.Option(parser=_seed, metavar="S", help="Run the program of this seed.")
    ] = None,
    list_rules: Annotated[
        bool, typer.Option("--list-rules", help="Print the rules that can be broken, one a line.")
    ] = False,
    broken: Annotated[
        str | None,
        typer.Option("--break", metavar="RULE", help="Break this rule in the engine under test."),
    ] = None,
    backend_class: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="A backend to run instead of the simulator's own; the class takes the simulated "
            "World as its argument.",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="jobs|events",
            help="Run an engine that serves requests on several ranks through this protocol of "
            "kvoffload.connector, instead of programs of single transfers.",
        ),
    ] = None,
    json: Json = False,
) -> Command:
    """Prove the order and the life of jobs: random programs on a simulated accelerator.

    It stops at the first program that goes wrong, and prints what it takes to see it again. Exit
    code: 0 if none did; 1 if one did; 2 for wrong input; 130 for Ctrl-C.
    """

    def command() -> int:
        from kvoffload.cli.simulate import list_rules as print_rules, run

        if list_rules:
            return print_rules()
        return run(
            seeds=range(seeds) if seed is None else [seed],
            broken=broken,
            backend_class=backend_class,
            protocol=protocol,
            as_json=json,
        )

    return command


def _seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{shown(text)} is not a positive number of seconds")
    return value


@app.command()
def verify(
    name: Annotated[
        str | None, typer.Argument(help="An installed backend; 'kvoffload backends' lists them.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="fake[:VARIANT]",
            help="On the fake device instead of here: in one variant of its driver, or in all.",
        ),
    ] = None,
    backend_class: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="A backend that is not installed: called with the device, or with nothing.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Such as cuda:1; by default the backend's own choice.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            "--check", metavar="TEXT", help="Only the checks whose name contains these words."
        ),
    ] = None,
    list_checks: Annotated[
        bool, typer.Option("--list-checks", help="Print the checks, and run none.")
    ] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop after the first check that fails.")
    ] = False,
    deadline: Annotated[
        float, typer.Option(parser=_seconds, metavar="SECONDS", help="For each check.")
    ] = 30.0,
    seed: Annotated[int, typer.Option(parser=_seed, metavar="N", help="Of random checks.")] = 0,
    json: Json = False,
) -> Command:
    """Prove a backend right: every check that its capabilities call for, in a process of its own.

    Exit code: 0 if none failed; 1 if one did; 2 if the backend cannot run, be made or be found; 130
    for Ctrl-C; 141 if nobody reads the output.
    """

    def command() -> int:
        from kvoffload.cli.verify import list_checks as print_checks, run

        if list_checks:
            return print_checks(json)
        return run(
            name,
            on=on,
            backend_class=backend_class,
            device=device,
            part=part,
            fail_fast=fail_fast,
            deadline=deadline,
            seed=seed,
            as_json=json,
        )

    return command


@app.command("new-backend")
def new_backend(
    name: Annotated[
        str, typer.Argument(help="Of the backend: small letters, digits and '_', such as 'npu'.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that is empty, or not there yet.")
    ],
    json: Json = False,
) -> Command:
    """Write a backend to begin with: a distribution of its own that passes every check.

    It runs on the host; its README says what to change for an accelerator, piece by piece. Exit
    code: 0 if it was written; 2 if the name or the folder cannot be used.
    """

    def command() -> int:
        from kvoffload.cli.new_backend import run

        return run(name, folder, as_json=json)

    return command


@bench.command("plan")
def bench_plan(
    layers: Annotated[int, typer.Option(parser=_count, metavar="N", help="Layers.")] = 64,
    blocks: Annotated[int, typer.Option(parser=_count, metavar="N", help="Blocks.")] = 1000,
    seed: Annotated[int, typer.Option(parser=_seed, metavar="N", help="Of the random ids.")] = 0,
    json: Json = False,
) -> Command:
    """What it costs to turn block ids into copies, against numpy's own outer sums."""

    def command() -> int:
        from kvoffload.cli.bench import run_plan

        return run_plan(layers=layers, blocks=blocks, seed=seed, as_json=json)

    return command


@bench.command("ordering")
def bench_ordering(
    blocks: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Blocks of the job.")
    ] = 1000,
    seed: Annotated[int, typer.Option(parser=_seed, metavar="N", help="Of the random ids.")] = 0,
    json: Json = False,
) -> Command:
    """What it costs to find out whom a job must wait for, after many jobs and after none."""

    def command() -> int:
        from kvoffload.cli.bench import run_ordering

        return run_ordering(blocks=blocks, seed=seed, as_json=json)

    return command


PAGES_HELP = "Bytes of a block, such as '4KiB'; several with commas."
BackendName = Annotated[
    str | None,
    typer.Option(
        "--backend", help="Backend by name; by default chosen as 'kvoffload backends' explains."
    ),
]
OnFake = Annotated[
    str | None,
    typer.Option(
        metavar="fake[:VARIANT]",
        help="On the fake device instead of here, to try the command: its figures mean nothing. "
        "The backend is then 'torch' by default.",
    ),
]
Rounds = Annotated[
    int, typer.Option(parser=_count, metavar="N", help="Medians are over so many rounds.")
]


@bench.command("copy")
def bench_copy(
    backend: BackendName = None,
    on: OnFake = None,
    pages: Annotated[str, typer.Option(metavar="SIZES", help=PAGES_HELP)] = "4KiB,64KiB,1MiB",
    blocks: Annotated[
        int,
        typer.Option(
            parser=_count,
            metavar="N",
            help="Random blocks of one job; fewer where they would take more than a quarter of "
            "the memory that is free.",
        ),
    ] = 2000,
    rounds: Rounds = 5,
    seed: Annotated[int, typer.Option(parser=_seed, metavar="N", help="Of the random ids.")] = 0,
    json: Json = False,
) -> Command:
    """How fast random blocks are stored and loaded, against one contiguous copy of the same run.

    Everything is cold: each round takes other blocks, and the caches of the CPU are flushed before
    each copy. Exit code: 0 if it was measured; 1 if a transfer failed or moved wrong bytes; 2 for
    wrong input; 130 for Ctrl-C.
    """

    def command() -> int:
        from kvoffload.cli.bench_copy import run

        return run(
            backend_name=backend,
            on=on,
            pages=pages,
            blocks=blocks,
            rounds=rounds,
            seed=seed,
            as_json=json,
        )

    return command


@bench.command("calibrate")
def bench_calibrate(backend: BackendName = None, json: Json = False) -> Command:
    """Find the page size up to which a kernel loads faster than DMA here, and write it down.

    For backends that copy in two ways; they read it the next time that they are used on this
    device with this driver. Exit code: 0 if it was written; 1 if a transfer failed; 2 if there is
    nothing to calibrate; 130 for Ctrl-C.
    """

    def command() -> int:
        from kvoffload.cli.bench_calibrate import run

        return run(backend_name=backend, as_json=json)

    return command


@bench.command("gpu")
def bench_gpu(
    backend: BackendName = None,
    on: OnFake = None,
    pages: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES", help=f"{PAGES_HELP} By default the powers of two from 2KiB to 2MiB."
        ),
    ] = None,
    blocks: Annotated[
        int,
        typer.Option(
            parser=_count, metavar="N", help="Blocks of one job; a job has 256 MiB at most."
        ),
    ] = 2000,
    rounds: Rounds = 5,
    seed: Annotated[int, typer.Option(parser=_seed, metavar="N", help="Of the random ids.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a Markdown file, too, for docs/measurements; a new one."
        ),
    ] = None,
    or_skip: Annotated[
        bool,
        typer.Option("--or-skip", help="Where there is no accelerator: say so, and exit with 0."),
    ] = False,
    json: Json = False,
) -> Command:
    """Measure an accelerator in full: copies, the host's part of a submit, and what others lose.

    Random and adjacent blocks of every size, both directions apart and at once, in each way that
    the backend copies, as ratios to the largest single pinned copy of the same run. Exit code: 0 if
    it was measured; 1 if a transfer failed or moved wrong bytes; 2 if there is no accelerator, or
    for wrong input; 130 for Ctrl-C.
    """

    def command() -> int:
        from kvoffload.cli.bench_gpu import run

        return run(
            backend_name=backend,
            on=on,
            pages=pages,
            blocks=blocks,
            rounds=rounds,
            seed=seed,
            out=out,
            or_skip=or_skip,
            as_json=json,
        )

    return command


@bench.command("naive")
def bench_naive(
    backend: BackendName = None,
    on: OnFake = None,
    pages: Annotated[str, typer.Option(metavar="SIZES", help=PAGES_HELP)] = "16KiB,64KiB",
    layers: Annotated[int, typer.Option(parser=_count, metavar="N", help="Layers.")] = 32,
    blocks: Annotated[int, typer.Option(parser=_count, metavar="N", help="Blocks.")] = 500,
    seed: Annotated[int, typer.Option(parser=_seed, metavar="N", help="Of the random ids.")] = 0,
    json: Json = False,
) -> Command:
    """What a transfer takes, against moving layer by layer and waiting for the device.

    Of an accelerator that torch knows. The bytes of both are compared.
    """

    def command() -> int:
        from kvoffload.cli.bench import run_naive

        return run_naive(
            backend, on=on, pages=pages, layers=layers, blocks=blocks, seed=seed, as_json=json
        )

    return command
