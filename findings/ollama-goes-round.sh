#!/usr/bin/env bash
# Guess: a stream of Ollama's OpenAI API ends with a finish_reason and [DONE], whatever its model says.
# Seen (Ollama 0.17.4): where the model says the same token 31 times in turn the answer ends there
# with neither, streamed or not, and a plain one's usage counts 0 tokens. (Needs go and a C++ compiler.)
set -euo pipefail
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" && wait || true; chmod -R u+w "$folder"; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet gguf==0.19.0 numpy
# Headers that the module lacks: ollama-go-module.sh.
env/bin/pip download --quiet --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
tar xzf llama_cpp_python-0.3.36.tar.gz
export CPATH=$folder/llama_cpp_python-0.3.36/vendor/llama.cpp/vendor
source=$(go mod download -json github.com/ollama/ollama@v0.17.4 | sed -n 's/.*"Dir": "\(.*\)",*/\1/p')
(cd "$source" && go build -buildvcs=false -o "$folder/ollama" .) 2>log || { cat log; exit 1; }

# Nothing that its layers compute is added, and a token's most likely successor is itself.
env/bin/python - <<'PYTHON'
import gguf
import numpy as np

SIZE, TOKENS = 64, 128
dice, model = np.random.default_rng(1), gguf.GGUFWriter("same.gguf", "llama")
model.add_context_length(4096)
model.add_embedding_length(SIZE)
model.add_block_count(1)
model.add_feed_forward_length(SIZE)
model.add_head_count(1)
model.add_head_count_kv(1)
model.add_rope_dimension_count(SIZE)
model.add_layer_norm_rms_eps(1e-5)
model.add_vocab_size(TOKENS)
model.add_file_type(gguf.LlamaFileType.ALL_F32)
words = ["<s>", "</s>", "\u010a", "\u0120", *map(chr, range(33, 127))]
words += [f"<{n}>" for n in range(len(words), TOKENS)]
model.add_tokenizer_model("gpt2")
model.add_tokenizer_pre("default")
model.add_token_list(words)
model.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (TOKENS - 2))
model.add_token_merges(["\u0100 \u0100"])
model.add_bos_token_id(0)
model.add_eos_token_id(1)
model.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
embeddings = dice.standard_normal((TOKENS, SIZE), dtype=np.float32)
model.add_tensor("token_embd.weight", embeddings)
model.add_tensor("output.weight", embeddings)
model.add_tensor("output_norm.weight", np.ones(SIZE, np.float32))
for name in ("attn_norm", "ffn_norm"):
    model.add_tensor(f"blk.0.{name}.weight", np.ones(SIZE, np.float32))
for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
    model.add_tensor(f"blk.0.{name}.weight", np.zeros((SIZE, SIZE), np.float32))
model.write_header_to_file()
model.write_kv_data_to_file()
model.write_tensors_to_file()
model.close()
PYTHON

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export HOME=$folder OLLAMA_HOST=127.0.0.1:$port
./ollama serve 2>serve.log &
server=$!
for _ in $(seq 100); do ./ollama --version 2>&1 | grep -q 'version is 0' && break || sleep 0.1; done
printf 'FROM %s/same.gguf\nPARAMETER num_ctx 512\n' "$folder" >Modelfile
./ollama create same -f Modelfile 2>/dev/null
ask() {
    curl -sf "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' \
        -d "{\"model\": \"same\", \"temperature\": 0, \"max_tokens\": 200, \"stream\": $1,
             \"messages\": [{\"role\": \"user\", \"content\": \"again\"}]}"
}
ask true >stream
ask false >plain
env/bin/python - <<'PYTHON'
import json

events = [line[6:] for line in open("stream").read().splitlines() if line]
plain = json.load(open("plain"))
choice, usage = plain["choices"][0], plain["usage"]
print("stream's last event:", events[-1])
print("plain:", choice, usage)
choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
said = [one["delta"]["content"] for one in choices]
is_as_seen = (
    "[DONE]" not in events
    and not any(one["finish_reason"] for one in choices)
    and len(said) == 31
    and len(set(said)) == 1
    and choice["finish_reason"] is None
    and usage["total_tokens"] == 0
)
raise SystemExit(0 if is_as_seen else "changed")
PYTHON
