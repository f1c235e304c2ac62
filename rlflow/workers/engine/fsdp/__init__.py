"""FSDP engine: torch fully_shard over gloo or NCCL, packed rows, chunked log-probs."""
