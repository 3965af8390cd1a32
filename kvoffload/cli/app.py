"""The commands and their options. A command returns what to do; ``kvoffload.cli.main`` does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

app = typer.Typer(
    name="kvoffload",
    help="Move the KV cache of large language models off the accelerator and back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(help="Measure, as ratios within one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Command: TypeAlias = Callable[[], int]


def _count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise typer.BadParameter(f"{text!r} is not a whole number of at least 1")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]


def _version(wanted: bool) -> None:
    if wanted:
        from kvoffload import __version__

        typer.echo(f"kvoffload {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


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
            "'hash_ids', one per 512-token block. By default a built-in chat workload."
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
        int | None, typer.Option(parser=_count, metavar="N", help="Serve at most so many requests.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the built-in workload.")] = 0,
    json: Json = False,
) -> Command:
    """Serve a request trace through the whole system, moving real bytes and checking each.

    Exit code: 0 if every byte was right; 1 if anything was corrupt or failed; 2 for wrong input;
    130 for Ctrl-C.
    """

    def command() -> int:
        from kvoffload.cli.replay import run
        from kvoffload.core.sizes import parse_bytes
        from kvoffload.replay.replay import Settings

        settings = Settings(
            device_blocks=device_blocks,
            host_bytes=parse_bytes(host_bytes, "--host-bytes"),
            layers=layers,
            page_bytes=page_bytes,
            concurrency=concurrency,
            block_size_factor=block_size_factor,
        )
        return run(
            settings, trace=trace, backend_name=backend, limit=limit, seed=seed, as_json=json
        )

    return command


@bench.command("plan")
def bench_plan(
    layers: Annotated[int, typer.Option(parser=_count, metavar="N", help="Layers.")] = 64,
    blocks: Annotated[int, typer.Option(parser=_count, metavar="N", help="Blocks.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the random ids.")] = 0,
    json: Json = False,
) -> Command:
    """What it costs to turn block ids into copies, against numpy's own outer sums."""

    def command() -> int:
        from kvoffload.cli.bench import run_plan

        return run_plan(layers=layers, blocks=blocks, seed=seed, as_json=json)

    return command
