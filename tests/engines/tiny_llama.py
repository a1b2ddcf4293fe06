"""A folder with a random two-layer Llama that vLLM can load: weights, configuration, tokenizer. It
never ends an answer by itself, as long as the likeliest token is taken.

    python -m tests.engines.tiny_llama FOLDER FILE…

Run by the Python of vLLM's environment, in the checkout; the tokenizer is trained on the texts
in the files. The same seed and texts give the same folder.
"""

import sys
from pathlib import Path

from tests.programs.bench import tiny_model

SEED = 7
CONTEXT_TOKENS = 4096
# vLLM's attention on the CPU knows heads of 32 dimensions and more.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": CONTEXT_TOKENS}
# A key and a value of every dimension in each layer, as float32.
KV_BYTES_PER_TOKEN = 2 * SHAPE["hidden_size"] * tiny_model.CONFIG["num_hidden_layers"] * 4
_OF_THE_FILE = ("architectures", "model_type", "torch_dtype")


def write(folder: Path, files: list[str]) -> None:
    """Make all files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_model.write(folder, files)
    known = {name: value for name, value in tiny_model.CONFIG.items() if name not in _OF_THE_FILE}
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**{**known, **SHAPE}))
    with torch.no_grad():  # of thousands of tokens one is above its 0
        model.lm_head.weight[tiny_model.CONFIG["eos_token_id"]] = 0.0
    model.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not all(Path(file).is_file() for file in sys.argv[2:]):
        sys.exit(__doc__)
    write(Path(sys.argv[1]), sys.argv[2:])
