#!/usr/bin/env bash
# Guess: a worker that stood still for a while (a suspended machine, a debugger, SIGSTOP) answers again
# when it goes on, as it is still the same process.
# Seen (Dynamo 1.6.1, workers that are found by files): after 4 s it does. After 20 s its frontend has
# taken it from the files, and the worker goes on to renew files that are not there: the frontend answers
# 404 to its model, for good. Only a new start of the worker helps.
set -euo pipefail
folder=$(mktemp -d)
pids=()
cleanup() {
    [ "${#pids[@]}" = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet aiohttp certifi msgspec prometheus-client "pydantic<=2.13.5" pyzmq tokenizers \
    tqdm transformers typing-extensions uvloop zstandard
"$folder/env/bin/pip" install --quiet --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
"$folder/env/bin/python" - "$folder/tiny" <<'PY'
import json
import pathlib
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

folder = pathlib.Path(sys.argv[1])
folder.mkdir()
letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.save(str(folder / "tokenizer.json"))
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 0,
          "max_position_embeddings": 4096, "vocab_size": len(letters), "eos_token_id": 1, "torch_dtype": "float16"}
(folder / "config.json").write_text(json.dumps(config))
template = "{% for message in messages %}{{ message.content }}{% endfor %}"
(folder / "tokenizer_config.json").write_text(json.dumps({
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "chat_template": template}))
PY
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export DYN_FILE_KV=$folder/found DYN_TCP_RPC_HOST=127.0.0.1 DYN_EVENT_PLANE_HOST=127.0.0.1 HF_HUB_OFFLINE=1
"$folder/env/bin/python" -m dynamo.mocker --model-path "$folder/tiny" --model-name tiny --max-model-len 4096 \
    --discovery-backend file >"$folder/worker" 2>&1 &
worker=$!
"$folder/env/bin/python" -m dynamo.frontend --http-host 127.0.0.1 --http-port "$port" \
    --router-mode round-robin --discovery-backend file >"$folder/frontend" 2>&1 &
pids=("$worker" $!)
# status: of a chat
status() {
    curl --silent --max-time 10 --output /dev/null --write-out '%{http_code}' -H 'content-type: application/json' \
        -d '{"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}' \
        "http://127.0.0.1:$port/v1/chat/completions" || true
}
# within SECONDS: whether a chat is answered with 200 in that time
within() { for _ in $(seq "$1"); do [ "$(status)" = 200 ] && return; sleep 1; done; return 1; }
# paused SECONDS: what a chat gets when the worker has stood still for so long
paused() {
    kill -STOP "$worker"
    sleep "$1"
    kill -CONT "$worker"
    within 30 || true
    status
}
echo "ai-dynamo 1.6.1"
within 180 || { echo "it does not start:"; tail "$folder/worker" "$folder/frontend"; exit 2; }
seen="$(paused 4) $(paused 20)"
echo "a chat, 30 s after the worker stood still for 4 s and for 20 s: $seen"
[ "$seen" = "200 404" ] || { echo changed; exit 1; }
