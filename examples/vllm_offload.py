"""Several chats in turns on vLLM: time to first token, with and without offloading.

Needs vLLM; on a machine without an accelerator ``make test-vllm`` sets up what it takes:
``.venv-vllm/bin/python examples/vllm_offload.py``. The model is made on the spot, with random
weights; what it says makes no sense, what it costs does.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvoffload.integrations.vllm import tiny

CHATS, SAID, ANSWERED = 6, 96, 32  # chats at a time; tokens that a user says, and the model
OFFLOADING = {
    "kv_connector": "KVOffloadConnector",
    "kv_connector_module_path": "kvoffload.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "256MiB", "offload_prompt_only": False},
}


def talk(llm: Any, turns: int) -> tuple[list[float], list[int], list[list[int]]]:
    """Of every turn: seconds to the first token, and cached tokens; and what was said in all."""
    from vllm import SamplingParams  # noqa: PLC0415 - its environment is set first
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    def ask(tokens: list[int], count: int) -> Any:
        wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        return llm.generate(TokensPrompt(prompt_token_ids=tokens), wanted, use_tqdm=False)[0]

    numbers = random.Random(0)
    chats: list[list[int]] = [[] for _ in range(CHATS)]
    seconds, cached = [], []
    for _ in range(turns):
        waited = []
        hits = 0
        for chat in chats:
            chat.extend(numbers.randrange(3, tiny.VOCABULARY) for _ in range(SAID))
            began = time.perf_counter()
            hits += ask(chat, 1).num_cached_tokens or 0
            waited.append(time.perf_counter() - began)
            chat.extend(ask(chat, ANSWERED).outputs[0].token_ids)
        seconds.append(statistics.median(waited))
        cached.append(hits // CHATS)
    return seconds, cached, chats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    turns = parser.parse_args().turns
    tiny.prepare()
    console = Console()
    settings = {"max_model_len": 2048, "max_num_seqs": 1, "num_gpu_blocks_override": 72}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save("Llama", Path(folder), layers=12, max_position_embeddings=2048)
        results = {}
        for name, config in (("without", None), ("with", OFFLOADING)):
            with console.status(f"{CHATS} chats of {turns} turns, {name} offloading"):
                llm = tiny.engine(model, config, **settings)
                talk(llm, 1)  # warm up
                llm.reset_prefix_cache(reset_connector=config is not None)
                results[name] = talk(llm, turns)
                llm.llm_engine.engine_core.shutdown()
    table = Table(title=f"median time to first token of {CHATS} chats in turns")
    for column in ("turn", "without", "cached", "with offloading", "cached"):
        table.add_column(column, justify="right")
    for turn in range(turns):
        row = [str(turn + 1)]
        for seconds, cached, _ in results.values():
            row += [f"{seconds[turn] * 1e3:.1f} ms", f"{cached[turn]} tokens"]
        table.add_row(*row)
    console.print(table)
    same = results["with"][2] == results["without"][2]
    console.print("Both said the same." if same else "[red]They did not say the same!")


if __name__ == "__main__":
    main()
