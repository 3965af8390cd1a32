"""``kvoffload bench naive`` measures what it says."""

from __future__ import annotations

import json

import pytest
import torch

from kvoffload.backends.hpu.copy import HpuCopy
from kvoffload.bench.naive import NaivePath
from kvoffload.cli import main

SMALL = ["bench", "naive", "--backend", "hpu", "--pages", "64,4KiB", "--layers=2", "--blocks=9"]


@pytest.mark.fake
@pytest.mark.parametrize("on", ["fake", "fake:eager", "fake:lazy"])
def test_it_prints_both_paths_of_each_page_and_direction(
    on: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--on", on, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["page_bytes"], row["direction"], row["nbytes"]) for row in rows] == [
        (page, direction, page * 2 * 9) for page in (64, 4096) for direction in ("store", "load")
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ours"] / row["naive"])


@pytest.mark.fake
def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--on", "fake"]) == 0
    shown = capsys.readouterr().out
    for word in ("kvoffload", "naive", "ratio", "4 KiB", "store", "load"):
        assert word in shown


@pytest.mark.fake
def test_wrong_bytes_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HpuCopy, "_load", lambda *_: None)
    assert main([*SMALL, "--on", "fake"]) == 1
    assert "did not come back as they were" in capsys.readouterr().err


@pytest.mark.fake
def test_the_naive_path_moves_the_blocks_that_are_named() -> None:
    layer = torch.arange(40, dtype=torch.uint8).view(10, 4).to("fake:0")
    path = NaivePath([layer])
    path.store(torch.tensor([1, 8]), torch.tensor([4, 0]))
    path.load(torch.tensor([0, 4]), torch.tensor([2, 3]))
    wanted = torch.arange(40, dtype=torch.uint8).view(10, 4)
    wanted[2], wanted[3] = wanted[8].clone(), wanted[1].clone()
    assert torch.equal(layer.cpu(), wanted)


@pytest.mark.fake
def test_more_than_the_machine_has_is_refused_before_it_is_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--on", "fake", "--pages", "1TiB"]) == 2
    assert "both paths' host memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--on", "gpu"], "there is only 'fake'"),
        (["--on", "fake:nonsense"], "a variant of hpu 'fake:eager', 'fake:lazy'"),
        ([], "habana_frameworks.torch is not installed"),
        (["--pages", "64,x", "--on", "fake"], "--pages"),
        (["--backend", "cpu"], "no accelerator that torch knows"),
    ],
)
def test_what_cannot_be_measured_is_wrong_input(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 2
    assert says in capsys.readouterr().err
