"""Every option is checked, and its message says what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.core.backend import HostOrder
from kvoffload.core.errors import (
    BackendNotFoundError,
    CapacityError,
    ConfigurationError,
    UnsupportedVersionError,
)
from kvoffload.integrations.vllm.memory import chunks_within
from kvoffload.integrations.vllm.options import Options, whole
from kvoffload.integrations.vllm.versions import CONTRACTS, contract_of


def test_what_is_given_is_read_and_the_rest_has_defaults() -> None:
    options = Options.read(
        {
            "spec_name": "KVOffloadSpec",
            "cpu_bytes_to_use": "4GiB",
            "backend": "cpu",
            "eviction_policy": "lru",
            "blocks_per_chunk": 4,
            "store_threshold": 2,
            "offload_prompt_only": False,
            "job_deadline": 30,
            "host_order": "planes",
            "numa_node": None,
        }
    )
    assert options.cpu_bytes_to_use == 4 << 30
    assert options.job_deadline == 30.0
    assert options.host_order is HostOrder.PLANES
    assert options.numa_node is None
    assert options.block_size is None
    assert Options.read({"cpu_bytes_to_use": 1 << 20}).offload_prompt_only is True


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "cpu_bytes_to_use is missing.*'4GiB'"),
        ({"cpu_bytes_to_use": "4 gigs"}, "cpu_bytes_to_use: '4 gigs' is not a number of bytes"),
        ({"cpu_bytes_to_use": 0}, "at least 1 byte"),
        ({"cpu_bytes": 5}, "unknown option 'cpu_bytes'.*mean 'cpu_bytes_to_use'.*known ones are"),
        ({"eviction_policy": "arc"}, "eviction_policy must be one of lru, not 'arc'"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk must be a whole number of at least 1, not 0"),
        ({"blocks_per_chunk": True}, "whole number"),
        ({"blocks_per_chunk": 2, "block_size": 64}, "give one of them"),
        ({"offload_prompt_only": "false"}, "offload_prompt_only must be true or false"),
        ({"job_deadline": -1}, "job_deadline must be a positive number of seconds, not -1"),
        ({"job_deadline": float("nan")}, "positive number of seconds"),
        ({"host_order": "columns"}, "host_order must be one of planes, "),
        ({"spec_name": ""}, "spec_name must be a name"),
        ({"numa_node": -1}, "numa_node must be a whole number of at least 0"),
        ({"sync_load_budget_bytes": 1}, "unknown option 'sync_load_budget_bytes'"),
    ],
)
def test_what_is_wrong_is_refused(given: dict[str, Any], words: str) -> None:
    options = given if not given or "cpu_bytes" in str(given) else {"cpu_bytes_to_use": 1} | given
    with pytest.raises(ConfigurationError, match=words):
        Options.read(options)


def test_a_backend_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(BackendNotFoundError, match=r"backend: no backend named 'gpu'.*cpu, cuda"):
        Options.read({"cpu_bytes_to_use": 1, "backend": "gpu"})


def test_what_one_version_reads_itself_is_checked_too() -> None:
    also = {"sync_load_budget_bytes": whole(0)}
    assert Options.read({"cpu_bytes_to_use": 1, "sync_load_budget_bytes": 5}, also)
    with pytest.raises(ConfigurationError, match="sync_load_budget_bytes must be a whole number"):
        Options.read({"cpu_bytes_to_use": 1, "sync_load_budget_bytes": "5"}, also)


def test_the_budget_is_that_of_all_workers_together() -> None:
    options = Options.read({"cpu_bytes_to_use": 1 << 20})
    assert chunks_within(options, workers=2, bytes_per_block=1 << 10, blocks_per_chunk=4) == 128
    with pytest.raises(CapacityError, match=r"1048576 bytes .1 MiB. is too small.*2097152 bytes"):
        chunks_within(options, workers=1, bytes_per_block=1 << 20, blocks_per_chunk=2)
    with pytest.raises(CapacityError, match="did not say how many bytes"):
        chunks_within(options, workers=1, bytes_per_block=0, blocks_per_chunk=1)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.0rc1.dev3+gabc"])
def test_a_version_has_the_adapter_of_its_contract(version: str) -> None:
    assert contract_of(version) == CONTRACTS[0, int(version[2:4])]


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "dev", "unknown"])
def test_another_version_is_refused_with_both_named(version: str) -> None:
    with pytest.raises(
        UnsupportedVersionError, match=f"vLLM {version} is installed.*for vLLM 0.32, 0.33"
    ):
        contract_of(version)
