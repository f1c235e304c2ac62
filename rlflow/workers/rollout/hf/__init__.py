"""The embedded rollout engine (`rollout.name=hf`): a Hugging Face causal LM with continuous batching."""
