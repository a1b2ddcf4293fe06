"""Which prompt tokens vLLM finds cached when it is given several prompts at once.

    python -m tests.engines.cached_tokens FOLDER BATCH_TOKENS BLOCK_TOKENS < PROMPTS

Run by the Python of vLLM's environment, in the checkout. PROMPTS: JSON, a list of groups of
prompts, a prompt a list of token ids. All prompts of a group wait in the scheduler before it plans
its first step. Prints their cached tokens as JSON, a list for each group.
"""

import json
import sys

ANSWER_TOKENS = 2


def main(folder: str, batch_tokens: int, block_tokens: int) -> None:
    """Answer each group and print what was cached of it."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        block_size=block_tokens,
        max_num_batched_tokens=batch_tokens,
        max_num_seqs=8,
    )
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    found = []
    for group in json.load(sys.stdin):
        prompts = [{"prompt_token_ids": ids} for ids in group]
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        found.append([answer.num_cached_tokens for answer in answers])
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
