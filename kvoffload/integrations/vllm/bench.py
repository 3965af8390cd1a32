"""What a transfer costs vLLM inside of its step: from submit to return.

``python -m kvoffload.integrations.vllm.bench`` runs a small engine on this machine's CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvoffload.integrations.vllm import tiny

TARGET_MICROSECONDS = 200
"""The median that a job should stay below."""


@dataclass(frozen=True)
class Cost:
    """Microseconds that submissions took, by share of the jobs that took no longer.

    Attributes:
        jobs: how many were submitted.
        median, p95, most: of them.
        blocks: device blocks of a job, on average.
    """

    jobs: int
    median: float
    p95: float
    most: float
    blocks: float


def measure(folder: Path, rounds: int, blocks_per_chunk: int) -> Cost:
    """Let an engine store and load the prompts of some conversations again and again."""
    from vllm import SamplingParams  # noqa: PLC0415 - only where there is one
    from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": "kvoffload.integrations.vllm",
            "cpu_bytes_to_use": "256MiB",
            "blocks_per_chunk": blocks_per_chunk,
            "offload_prompt_only": False,
        },
    }
    llm = tiny.engine(folder, config)
    numbers = random.Random(0)
    prompts = [
        TokensPrompt(prompt_token_ids=[numbers.randrange(3, tiny.VOCABULARY) for _ in range(512)])
        for _ in range(8)
    ]
    asked = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    transfers = get_kv_transfer_group().connector_worker.worker.transfers
    llm.generate(prompts, asked, use_tqdm=False)
    transfers.submit_seconds = []
    for _ in range(rounds):
        llm.generate(prompts, asked, use_tqdm=False)
    moved = sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name in ("vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes")
    )
    micros = np.array(transfers.submit_seconds) * 1e6
    block = sum(e.page_size_bytes for e in transfers.worker.engine.caches.tensors)
    llm.llm_engine.engine_core.shutdown()
    return Cost(
        jobs=len(micros),
        median=round(float(np.median(micros)), 1),
        p95=round(float(np.quantile(micros, 0.95)), 1),
        most=round(float(micros.max()), 1),
        blocks=round(moved / block / max(len(micros), 1), 1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the median is below the target, else 1."""
    parser = argparse.ArgumentParser(prog="kvoffload.integrations.vllm.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="how often all prompts are asked")
    parser.add_argument("--blocks-per-chunk", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    tiny.prepare()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save("Llama", Path(folder))
        cost = measure(model, chosen.rounds, chosen.blocks_per_chunk)
    if chosen.json:
        print(json.dumps(asdict(cost)))
    else:
        print(
            f"submit to return, inside a step: median {cost.median} µs per job, 95% within "
            f"{cost.p95} µs, most {cost.most} µs ({cost.jobs} jobs of {cost.blocks} blocks); "
            f"target: a median of {TARGET_MICROSECONDS} µs"
        )
    return 0 if cost.median <= TARGET_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
