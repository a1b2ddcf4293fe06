"""A random Llama in GGUF, llama.cpp's format, whose tokens are single characters of ASCII.

Large enough that one core makes a few hundred tokens a second: what a test wants to see while an
answer streams must have time to be seen. The same seed gives the same file.
"""

from pathlib import Path

import gguf
import numpy as np

SEED = 7
DIMENSION, LAYERS, FEED_FORWARD, HEADS = 384, 6, 1024, 6
CONTEXT_TOKENS = 65_536
TOKENS = 128  # 2 special ones, 96 characters, and the rest to fill a block of the format
EOS = 1
NEVER = 20
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(path: Path, *, layers: int = LAYERS, ends: bool = True) -> None:
    """Make the file; 43 MB in about a second. `ends`: whether an answer may end by itself."""
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, layers)
    _tokens(writer)
    _weights(writer, np.random.default_rng(SEED), layers, ends=ends)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, layers: int) -> None:
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(DIMENSION)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(DIMENSION // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(TOKENS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _tokens(writer: gguf.GGUFWriter) -> None:
    special = ["<s>", "</s>"]
    # GPT-2's alphabet of bytes writes a line feed and a space as these two letters.
    characters = ["\u010a", "\u0120", *map(chr, range(33, 127))]
    known = [*special, *characters]
    known += [f"<unused{number}>" for number in range(len(known), TOKENS)]
    kinds = [gguf.TokenType.CONTROL] * len(special)
    kinds += [gguf.TokenType.NORMAL] * len(characters)
    kinds += [gguf.TokenType.UNUSED] * (TOKENS - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(known)
    writer.add_token_types(kinds)
    # A list may not be empty: of two zero bytes, which no text has, as a token that a merge makes
    # and the list of tokens lacks is lost.
    writer.add_token_merges(["\u0100 \u0100"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def _weights(
    writer: gguf.GGUFWriter, dice: np.random.Generator, layers: int, *, ends: bool
) -> None:
    def matrix(name: str, *shape: int) -> None:
        values = dice.standard_normal(shape, dtype=np.float32) * np.float32(0.05)
        if name == "output" and not ends:  # the other tokens' values are far from its 0
            values *= NEVER
            values[EOS] = 0
        writer.add_tensor(f"{name}.weight", values)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(DIMENSION, np.float32))

    matrix("token_embd", TOKENS, DIMENSION)
    matrix("output", TOKENS, DIMENSION)
    norm("output_norm")
    for layer in (f"blk.{number}" for number in range(layers)):
        norm(f"{layer}.attn_norm")
        norm(f"{layer}.ffn_norm")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"{layer}.{part}", DIMENSION, DIMENSION)
        matrix(f"{layer}.ffn_gate", FEED_FORWARD, DIMENSION)
        matrix(f"{layer}.ffn_up", FEED_FORWARD, DIMENSION)
        matrix(f"{layer}.ffn_down", DIMENSION, FEED_FORWARD)
