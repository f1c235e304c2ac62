"""vLLM's offline engine behind lines of JSON; run by the Python of vLLM's environment.

    stdin    {"prompts": [[token ids], ...], "samples": 8, "new_tokens": 32}
    stdout   {"ready": "what it is"} once, then {"tokens": n, "seconds": s} for each line

The first argument is a JSON object: "model", "dtype", "max_num_seqs", "max_model_len". Needs nothing but vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Build the engine, answer until stdin ends."""
    # What the engine and its libraries print must not get between the answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, TokensPrompt, __version__

    options = json.loads(sys.argv[1])
    llm = LLM(
        **options,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_num_batched_tokens=max(2048, options["max_num_seqs"]),
        kv_cache_memory_bytes=1 << 30,
        generation_config="vllm",
        disable_log_stats=True,
    )
    say = {"ready": f"vllm {__version__}, {options['dtype']}"}
    print(json.dumps(say), file=out, flush=True)  # noqa: T201 - the protocol
    for line in sys.stdin:
        work = json.loads(line)
        params = SamplingParams(
            n=work["samples"],
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            min_tokens=work["new_tokens"],
            max_tokens=work["new_tokens"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        # No prompt may be in the cache from the round before: training has new weights in every step.
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in work["prompts"]], params, use_tqdm=False)
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        answer = {"tokens": tokens, "seconds": time.perf_counter() - started}
        print(json.dumps(answer), file=out, flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    main()
