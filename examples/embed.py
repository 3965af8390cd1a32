"""kvoffload in an engine of your own: register caches, store, load, poll."""

import torch

import kvoffload as kv

BLOCKS, LAYERS, BLOCK_SHAPE = 64, 4, (16, 2, 64)  # tokens per block, heads, head size

# Your engine's paged KV cache, one tensor per layer.
cache = [torch.randn(BLOCKS, *BLOCK_SHAPE, dtype=torch.bfloat16) for _ in range(LAYERS)]
worker = kv.OffloadingWorker.for_caches(
    kv.select_backend(), kv.CanonicalKVCaches.from_tensors(cache), host_bytes="64MiB"
)
manager = kv.HostOffloadingManager(worker.num_chunks)


def run(job_id: int, src: kv.LoadStoreSpec, dst: kv.LoadStoreSpec) -> kv.TransferResult:
    worker.transfer_async(job_id, (src, dst))  # returns at once
    while not (finished := worker.get_finished()):
        pass  # an engine runs its next step here
    return finished[0]


# A request has filled blocks 3, 7 and 9; keep them under the hashes of their content.
keys = [kv.OffloadKey(b"hash of the prefix %d" % i) for i in range(3)]
first = kv.RequestContext("first")
output = manager.prepare_store(keys, first)
assert output is not None
stored = run(1, kv.DeviceLoadStoreSpec([3, 7, 9]), output.store_spec)
manager.complete_store(keys, first, stored.success)
before = [layer[[3, 7, 9]].clone() for layer in cache]

# Later another request begins with the same prefix; its blocks are 20, 21 and 22.
second = kv.RequestContext("second")
assert manager.lookup(keys, second).hits == 3
loaded = run(2, manager.prepare_load(keys, second), kv.DeviceLoadStoreSpec([20, 21, 22]))
manager.complete_load(keys, second, loaded.success)
assert all(torch.equal(layer[[20, 21, 22]], old) for layer, old in zip(cache, before, strict=True))
print(f"{loaded.transfer_size} bytes came back as they were")
worker.shutdown()
