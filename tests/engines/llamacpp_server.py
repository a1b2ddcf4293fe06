"""llama.cpp's own HTTP server, from the wheel that has it as a library, as one process.

    python llamacpp_server.py MODEL.gguf PORT SLOTS CONTEXT_TOKENS [OPTION] [API_KEY]

It serves the model as `tiny`, until a signal ends it. OPTION: --embeddings, --reranking, or the
name that it serves the model as, after --alias=.
"""

import signal
import sys

import xllamacpp

PROMPT_CACHE_MIB = 64  # of prompts whose slot another one has taken; 8 GiB by default
EMBEDDINGS, RERANKING, ALIAS = "--embeddings", "--reranking", "--alias="
_POOLING = xllamacpp.llama_pooling_type
POOLING = {
    EMBEDDINGS: _POOLING.LLAMA_POOLING_TYPE_MEAN,
    RERANKING: _POOLING.LLAMA_POOLING_TYPE_RANK,
}


def main(model: str, port: str, slots: str, context_tokens: str, *more: str) -> None:
    """Serve; returns never. `context_tokens`: of each slot."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    names = [each.removeprefix(ALIAS) for each in more if each.startswith(ALIAS)]
    parameters.model_alias = set(names) or {"tiny"}
    parameters.port = int(port)
    parameters.n_parallel = int(slots)
    parameters.n_ctx = int(slots) * int(context_tokens)
    parameters.api_keys = [each for each in more if not each.startswith("--")]
    for option in POOLING.keys() & set(more):
        parameters.embedding = True
        parameters.pooling_type = POOLING[option]
    parameters.endpoint_metrics = True
    parameters.cache_ram_mib = PROMPT_CACHE_MIB
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)
    print(f"listens at {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
