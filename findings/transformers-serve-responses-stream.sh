#!/usr/bin/env bash
# Guess: as in OpenAI's API, an answer is a stream only if the request has `"stream": true`, and a
# chat's stream ends with `data: [DONE]`.
# Seen (transformers 5.24.0, `transformers serve`): /v1/responses streams unless the request says
# `"stream": false`; chats and completions don't. Streams of chats end with their last chunk, which has
# the usage without being asked for it, and no [DONE].
set -euo pipefail
folder=$(mktemp -d)
pid=
cleanup() {
    [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "transformers[serving]==5.24.0" "torch==2.13.0"
"$folder/env/bin/python" - "$folder/tiny" <<'PY'
import sys

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
fast.save_pretrained(sys.argv[1])
config = LlamaConfig(vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, bos_token_id=0, eos_token_id=1)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
print("transformers", transformers.__version__)
PY
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cd "$folder"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 env/bin/transformers serve tiny --device cpu --host 127.0.0.1 --port "$port" \
    >log 2>&1 &
pid=$!
for _ in $(seq 120); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health" && break
    sleep 1
done
# kind PATH BODY: the type of the answer's content
kind() {
    curl --silent --output body --write-out '%{content_type}' "http://127.0.0.1:$port/v1/$1" \
        -H 'content-type: application/json' -d "$2" | cut -d ';' -f 1
}
chat='{"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Where?"}]'
response='{"model": "tiny", "max_output_tokens": 4, "input": "Where?"'
seen=("$(kind chat/completions "$chat}")" "$(kind responses "$response}")" "$(kind responses "$response, \"stream\": false}")")
echo "a chat: ${seen[0]}; a response: ${seen[1]}; with \"stream\": false: ${seen[2]}"
[ "${seen[*]}" = "application/json text/event-stream application/json" ] || { echo changed; exit 1; }
kind chat/completions "$chat, \"stream\": true}" >/dev/null
last=$(grep '^data: ' body | tail -1)
echo "a streamed chat ends with: $last"
[[ $last == *'"finish_reason":"'*'"usage":{'* ]] || { echo changed; exit 1; }
