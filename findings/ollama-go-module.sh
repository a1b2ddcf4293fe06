#!/usr/bin/env bash
# Guess: a Go module that builds in its makers' checkout builds as a module.
# Seen (Ollama 0.17.4, go 1.26): it doesn't. Module archives leave out folders named `vendor`, and
# llama.cpp, of which Ollama has a copy, keeps headers of others in one. With these (from the sources
# of the Python package of llama.cpp) in the compiler's path the package builds.
set -euo pipefail
folder=$(mktemp -d)
trap 'chmod -R u+w "$folder"; rm -rf "$folder"' EXIT
go version
cd "$folder"
export GOCACHE=$folder/cache # CPATH is no part of a cached package's name
source=$(go mod download -json github.com/ollama/ollama@v0.17.4 | sed -n 's/.*"Dir": "\(.*\)",*/\1/p')
build() { (cd "$source" && go build -buildvcs=false ./llama/llama.cpp/common) >"$folder/log" 2>&1; }

build && { echo "changed: it builds"; exit 1; }
grep 'fatal error' log | sort -u
grep -q 'nlohmann/json_fwd.hpp: No such file' log
find "$source" -type d -name vendor | grep -q . && { echo "changed: it has folders named vendor"; exit 1; }
python3 -m venv env
env/bin/pip download --quiet --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
tar xzf llama_cpp_python-0.3.36.tar.gz
export CPATH=$folder/llama_cpp_python-0.3.36/vendor/llama.cpp/vendor
build || { echo "changed: it doesn't build with the headers"; cat log; exit 1; }
echo "with the headers it builds"
