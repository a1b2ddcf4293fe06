# The commands anyone must know. `make up` and `make test` install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: lock sbom bench-tls up test test-pythons test-engines test-clients test-tools test-upgrade test-systemd test-compose test-benchmarks drills fault-run soak seeds fuzz bench compare versus fidelity fidelity-engines decide lint format schemas wheel clean help
.PHONY: study-skywalker study-preble study-gorgo study-mesh study-federation study-chapter study-scale
.PHONY: bad-engines bench-sync study-hygen study-offline study-gossip gossip-live gossip-heals bulk-link
.PHONY: study-loss study-kv-events study-sessions study-lora study-fair study-ablation control-cost bench-workers bench-replicas bench-agent bench-tracing bench-kv-events bench-overload bench-fair gate-renew mutants

# QUICK=1 plays a short form, FULL=1 a long one; TRACES=folder adds recorded traces;
# WRITE=folder keeps a benchmark's results there as a page (docs/benchmarks has the kept ones).
# COMPILED=1 plays a study with the twin's pure modules compiled (tests/programs/compiled.py), but for those
# of PLAIN, whose interpreted classes inherit from theirs.
PLAIN = $(BIN)/python -m tests.programs.studies
STUDY = $(BIN)/python $(if $(COMPILED),-m tests.programs.compiled) -m tests.programs.studies
LIVE = $(BIN)/python -m tests.programs.live
SIZE = $(if $(QUICK),--quick) $(if $(FULL),--full) $(if $(TRACES),--traces "$(TRACES)")

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml
	@echo "installing into $(VENV), which takes a minute or two"
	infra/virtual-environment $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

up: $(STAMP) ## three regions on this machine, until Ctrl-C
	$(BIN)/mesh up

test: lint ## every check: style, types, layers, tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 4 --dist loadfile --cache-clear || $(BIN)/python -m tests.again $$?

test-pythons: ## `make test` with every supported Python that this machine has, one after another
	$(PYTHON) tests/pythons.py

test-engines: $(STAMP) ## the mesh over real vLLM, SGLang, llama.cpp, mlx-lm, transformers serve, Ollama, Dynamo's mocker (40 minutes; installs 18 GB once; needs Go)
	$(BIN)/python -m tests.engines.install
	$(BIN)/pytest -m "engines or not engines" tests/engines; \
		status=$$?; $(BIN)/python -m tests.engines.route_table; exit $$status

test-clients: $(STAMP) ## clients that others wrote on a running mesh; their table in docs (10 minutes; installs 11 GB once)
	$(BIN)/python -m tests.clients.install
	$(BIN)/pytest -raP -m clients tests/clients
	$(BIN)/python -m tests.clients.table

test-tools: $(STAMP) ## other people's tools on a running mesh: `nats`, Jaeger, Chromium, nginx, HAProxy, pip with the wheel (minutes; needs Go and mmdebstrap)
	$(BIN)/python -m tests.tools.go_tools
	$(BIN)/python -m tests.tools.proxies
	$(BIN)/pytest -raP --cache-clear -m tools tests/tools || $(BIN)/python -m tests.again $$? -m tools

test-upgrade: $(STAMP) ## a fleet of the last release becomes one of this version, under load (minutes)
	$(BIN)/pytest -raP -m upgrade tests/upgrade

test-systemd: $(STAMP) ## the units on a systemd booted in a container of Debian 12 (minutes; root)
	$(BIN)/python -m tests.tools.go_tools nats
	$(BIN)/pytest -raP --cache-clear -m booted tests/booted || $(BIN)/python -m tests.again $$? -m booted

test-compose: $(STAMP) ## the image and the stack of infra/compose.yaml, built and run (minutes; root)
	$(BIN)/pytest -raP -m composed tests/containers

test-benchmarks: $(STAMP) ## the programs of the other targets, each played whole in a short form (minutes)
	$(BIN)/pytest tests/programs

drills: $(STAMP) ## let parts of running meshes fail, and see that they go on
	$(BIN)/pytest -m drill
	$(BIN)/python -m tests.programs.batch_jobs.drills $(if $(QUICK),--lines 1000)
	$(BIN)/python -m tests.programs.bus_drill $(if $(QUICK),--rounds 1 --lines 1000)

fault-run: $(STAMP) ## kill and stop every part in turn under 20 streams: each must end once; SEED=n; WORLDS=n: play so many worlds of `make seeds` instead, from seed FROM=n on, for MINUTES=n at most; KEEP=folder for the logs of those that break a promise
	$(if $(WORLDS),,$(if $(FROM)$(MINUTES)$(KEEP),$(error FROM, MINUTES and KEEP are of worlds: give WORLDS too)))
	$(BIN)/python $(if $(WORLDS),-m tests.programs.fault_run.worlds --worlds $(WORLDS) $(if $(FROM),--from $(FROM)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(KEEP),--keep $(KEEP)), \
		-m tests.programs.fault_run $(if $(QUICK),--quick) $(if $(SEED),--seed $(SEED)))

soak: $(STAMP) ## half an hour of load with a fault a minute; then memory, descriptors and streams must be back; MINUTES=n instead of 30
	$(BIN)/python -m tests.programs.fault_run.soak $(if $(MINUTES),--minutes $(MINUTES))

seeds: $(STAMP) ## whole routers and agents in virtual time, worlds from seeds in which every part fails; N=10000, FROM=1, SEED=n: one of them, made small; STORY=file: a world that was made small; PLANTED=1: does the judge see?
	$(BIN)/python -m tests.seeds $(if $(SEED),--seed $(SEED)) $(if $(STORY),--story $(STORY)) $(if $(N),-n $(N)) $(if $(FROM),--from $(FROM)) $(if $(PLANTED),--planted)

fuzz: $(STAMP) ## damaged inputs for each decoder: bus, engines' pages, HTTP bodies, files; N=1000000, SEED=1, DECODER=name: one of them
	$(BIN)/python -m tests.fuzz $(if $(N),-n $(N)) $(if $(DECODER),--decoder "$(DECODER)") $(if $(SEED),--seed $(SEED))

bench: $(STAMP) ## the router beside others', live (25 minutes); QUICK=1, ONLY=mesh,stream,…
	$(BIN)/python -m tests.programs.bench $(if $(QUICK),--quick) $(if $(ONLY),--only "$(ONLY)") \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(BESIDE),--beside "$(BESIDE)")

compare: $(STAMP) ## play TRACE=file under two policies, in turns, and compare (minutes)
	$(if $(TRACE),,$(error which trace? make compare TRACE=file))
	$(LIVE).compare_policies --trace "$(TRACE)"

decide: $(STAMP) ## how long a placement takes, by policy (minutes)
	$(STUDY).decide

bench-workers: $(STAMP) ## what a second worker of a router brings (minutes)
	$(LIVE).workers

bench-replicas: $(STAMP) ## a router with a thousand replicas: CPU, memory, time of a decision (minutes)
	$(LIVE).many_replicas

bench-agent: $(STAMP) ## how many requests one agent process carries
	$(LIVE).agent_limit

bench-tracing: $(STAMP) ## what tracing (off, 1, 10, 100 % sampled), access log and kept requests cost (8 minutes)
	$(LIVE).tracing_cost

study-kv-events: $(STAMP) ## the same with recorded coding agents in the twin; TRACES=folder (10 minutes)
	$(STUDY).kv_events $(SIZE)

study-sessions: $(STAMP) ## recorded coding agents whose contexts are compacted, placed by their session and without; TRACES=folder (20 minutes)
	$(PLAIN).sessions $(SIZE)

bench-kv-events: $(STAMP) ## KV events against estimates of what engines cache, over real vLLM (20 minutes; installs 7 GB once)
	$(LIVE).kv_events $(if $(QUICK),--quick)

bench-tls: $(STAMP) ## what https costs a router: CPU of a plain request, over kept connections and new ones (2 minutes)
	$(LIVE).tls_cost $(if $(QUICK),--quick)

bench-fair: $(STAMP) ## a tenant's first tokens beside another one's flood: the mesh, sglang-router, smg (25 minutes); QUICK=1
	$(LIVE).fair_beside $(if $(QUICK),--quick) $(if $(ONLY),--only "$(ONLY)")

bench-sync: $(STAMP) ## files and lines of batch jobs a second: nats-server syncs what it acknowledges, and not (2 minutes)
	$(LIVE).sync_cost

bench-overload: $(STAMP) ## a region asked for five times what it can do (5 minutes)
	$(LIVE).overload

bench-batch: $(STAMP) ## online first tokens with a batch job and without; TRACE=file (20 minutes)
	$(if $(TRACE),,$(error which trace? make bench-batch TRACE=file))
	$(BIN)/python -m tests.programs.batch_jobs.beside_online --trace "$(TRACE)"

bad-engines: $(STAMP) ## engines that misbehave in 39 ways beside two healthy ones (25 minutes); QUICK=1, ONLY=parts of names
	$(LIVE).bad_engines $(if $(QUICK),--quick) $(if $(ONLY),--only "$(ONLY)") \
		$(if $(KEEP),--keep "$(KEEP)") $(if $(BEFORE),--before "$(BEFORE)")

mutants: $(STAMP) ## put small faults into a copy of the code: which do tests not notice? COUNT, SEED, ONLY=path, KEEP=file (an hour)
	$(BIN)/python -m tests.programs.mutants $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) \
		$(if $(ONLY),--only "$(ONLY)") $(if $(KEEP),--keep "$(KEEP)")

gate-renew: $(STAMP) ## keep what a request costs now, in bytecodes, as what it may cost
	$(BIN)/python -m tests.gate.renew

versus: $(STAMP) ## beside real sglang-router, vllm-router and smg, and the twin's prediction of each; TRACE=file, LIMIT=requests (30 minutes)
	$(LIVE).versus $(if $(TRACE),--trace "$(TRACE)") $(if $(ROUNDS),--rounds $(ROUNDS)) \
		$(if $(LIMIT),--limit $(LIMIT)) $(if $(ONLY),--only "$(ONLY)") $(if $(QUICK),--quick)

fidelity: $(STAMP) ## play TRACE=file live and in the twin, and compare (minutes)
	$(if $(TRACE),,$(error which trace? make fidelity TRACE=file))
	$(LIVE).fidelity --trace "$(TRACE)"

fidelity-engines: $(STAMP) ## the same over real vLLM and llama.cpp, measured and played again (10 minutes; installs 7 GB once); ONLY=vLLM-GPU: on a GPU
	$(LIVE).fidelity_engines $(if $(QUICK),--quick) $(if $(ONLY),--only "$(ONLY)")

study-skywalker: $(STAMP) ## SkyWalker's figures 8, 9 and 10 in the twin
	$(STUDY).skywalker $(SIZE)

study-preble: $(STAMP) ## Preble's figures 3 and 5
	$(STUDY).preble $(SIZE)

study-gorgo: $(STAMP) ## GORGO's central router against routers in each region
	$(STUDY).gorgo $(SIZE)

study-mesh: $(STAMP) ## the mesh policy against every other; SEARCH=1: rivals' settings; SENSITIVITY=1
	$(STUDY).mesh $(SIZE) $(if $(SEARCH),--search) $(if $(SENSITIVITY),--sensitivity)

study-ablation: $(STAMP) ## the mesh policy without each term of its price and each rule (an hour)
	$(PLAIN).ablation $(SIZE)

study-federation: $(STAMP) ## what late and lost news cost the mesh
	$(STUDY).federation $(SIZE)

study-hygen: $(STAMP) ## HyGen's grid in the simulated engine: offline work inside the online objectives
	$(STUDY).hygen $(SIZE)

study-offline: $(STAMP) ## batch jobs beside a day of three regions: the mesh, region-local, none
	$(STUDY).offline $(if $(QUICK),--quick) $(if $(FULL),--full) $(if $(SEEDS),--seeds $(SEEDS))

study-gossip: $(STAMP) ## what prefix gossip brings, and the bytes it costs
	$(STUDY).gossip $(SIZE)

study-loss: $(STAMP) ## kill -9 of a region's routers, live; TOGETHER=2: of two regions at once
	$(LIVE).region_loss $(SIZE) $(if $(TOGETHER),--together $(TOGETHER))

control-cost: $(STAMP) ## what heartbeats, digests, gossip and leases cost, live and in the twin
	$(LIVE).control_cost $(SIZE)

study-chapter: $(STAMP) ## Output 23.2.1 and a fourth row
	$(STUDY).chapter $(SIZE)

study-scale: $(STAMP) ## a thousand replicas in ten regions: time and memory; REQUESTS=n
	$(STUDY).scale $(if $(REQUESTS),--requests $(REQUESTS))

study-lora: $(STAMP) ## LoRA adapters that replicas load for requests: knowing of them, and blind
	$(PLAIN).lora $(SIZE)

study-fair: $(STAMP) ## a tenant's chats beside another's flood: one queue, fair shares; weights, three regions
	$(PLAIN).fair $(SIZE)

gossip-live: $(STAMP) ## three regions of two routers, live: gossip, none, one router; TRACE=file
	$(LIVE).gossip_live $(if $(TRACE),--trace "$(TRACE)")

gossip-heals: $(STAMP) ## cut a link and restart a router, 20 times, and time how soon sets are equal
	$(LIVE).gossip_heals

bulk-link: $(STAMP) ## large bodies beside ordinary requests on a narrow link between two regions
	$(LIVE).bulk_link

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m tests.long_parts

format: $(STAMP) ## rewrite to the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schemas: $(STAMP) ## write the JSON Schema, AsyncAPI and OpenAPI files and docs/options.md anew from the code
	$(BIN)/python -m docs.documents
	$(BIN)/python -m docs.topology_schema
	$(BIN)/python -m docs.options

# What `build/release` has: tools of a release, apart from what they release.
RELEASE := build/release/bin
build/release/.installed: pyproject.toml
	infra/virtual-environment $(PYTHON) build/release
	$(RELEASE)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(RELEASE)/python -m pip install --quiet --group release
	@touch $@

lock: build/release/.installed ## requirements.lock anew: each dependency's version and hashes, for every supported Python
	$(RELEASE)/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --quiet --upgrade --output-file requirements.lock

sbom: wheel ## what a release holds, from what `requirements.lock` installs (CycloneDX): dist/sbom.cdx.json
	infra/virtual-environment $(PYTHON) build/locked
	build/locked/bin/python -m pip install --quiet --require-hashes --requirement requirements.lock
	build/locked/bin/python -m pip install --quiet --no-deps dist/*.whl
	$(RELEASE)/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
		--output-reproducible --output-file dist/sbom.cdx.json build/locked/bin/python

wheel: build/release/.installed ## the wheel and the source archive that it is made from, into dist
	rm -rf dist
	$(RELEASE)/python -m build --outdir dist
	$(RELEASE)/python -m twine check --strict dist/*

clean: ## remove what the other commands made
	rm -rf .venv .venv-* .mesh build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
