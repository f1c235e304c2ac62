"""Checkpoints of workers as Hugging Face folders.

    python -m rlflow.model_merger merge --local_dir RUN/global_step_20/actor --target_dir OUT
    python -m rlflow.model_merger test  --local_dir RUN/global_step_20/actor --test_hf_dir OUT

| module | does |
|---|---|
| `source` | which folder is meant, and whether it is whole |
| `model` | the config and the transformers class that the weights belong to |
| `merge` | shards of any number of ranks into one folder, block by block |
| `compare` | the weights of a folder against the shards |
| `verify` | the logits of a folder against a model built from the shards |
| `hub` | upload, when asked |
"""
