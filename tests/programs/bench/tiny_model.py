"""A folder that passes for a small model without weights: configuration and a real tokenizer.

    python tiny_model.py FOLDER FILE…

Run by the Python of an environment that has `tokenizers`. The tokenizer is trained on the texts
in the files: nothing is downloaded. It knows whole ASCII characters alone, because an engine
that makes up tokens would else cut one in two, and hold back an event until it has the rest.
"""

import json
import sys
from pathlib import Path

VOCABULARY = 4096
CONTEXT_TOKENS = 16_384
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT_TOKENS,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float16",
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": CONTEXT_TOKENS,
    "chat_template": TEMPLATE,
}


def write(folder: Path, files: list[str]) -> None:
    """Train the tokenizer on the files and write everything."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=[char for char in pre_tokenizers.ByteLevel.alphabet() if char.isascii()],
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_ascii, files), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))


def _ascii(file: str) -> str:
    return Path(file).read_bytes().decode("ascii", errors="ignore")


if __name__ == "__main__":
    if len(sys.argv) < 3 or not all(Path(file).is_file() for file in sys.argv[2:]):
        sys.exit(__doc__)
    write(Path(sys.argv[1]), sys.argv[2:])
