# The commands anyone must know. `make up` and `make test` install what they need into .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: up test test-engines drills bench compare fidelity decide lint format schemas clean help
.PHONY: study-skywalker study-preble study-gorgo study-mesh study-federation study-chapter study-scale
.PHONY: study-gossip gossip-live gossip-heals
.PHONY: study-loss study-proactive control-cost bench-workers bench-replicas bench-agent bench-tracing gate-renew

# QUICK=1 plays a short form, FULL=1 a long one; TRACES=folder adds recorded traces.
STUDY = $(BIN)/python -m tests.benchmarks
SIZE = $(if $(QUICK),--quick) $(if $(FULL),--full) $(if $(TRACES),--traces "$(TRACES)")

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml
	@echo "installing into .venv, which takes a minute"
	infra/virtual-environment $(PYTHON) .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

up: $(STAMP) ## three regions on this machine, until Ctrl-C
	$(BIN)/mesh up

test: lint ## every check: style, types, layers, tests
	$(BIN)/pytest -n 2 --dist loadfile

test-engines: $(STAMP) ## the mesh over real vLLM, llama.cpp, Dynamo's mocker (minutes; installs 7 GB once)
	$(BIN)/python -m tests.engines.install
	$(BIN)/pytest -m "engines or not engines" tests/engines

drills: $(STAMP) ## let parts of running meshes fail, and see that they go on
	$(BIN)/pytest -m drill

bench: $(STAMP) ## the router beside others', live (25 minutes); QUICK=1, ONLY=mesh,stream,…
	$(BIN)/python -m tests.bench $(if $(QUICK),--quick) $(if $(ONLY),--only "$(ONLY)") \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(BESIDE),--beside "$(BESIDE)")

compare: $(STAMP) ## play TRACE=file under two policies, in turns, and compare (minutes)
	$(if $(TRACE),,$(error which trace? make compare TRACE=file))
	$(BIN)/python -m tests.benchmarks.compare_policies --trace "$(TRACE)"

decide: $(STAMP) ## how long a placement takes, by policy (minutes)
	$(BIN)/python -m tests.benchmarks.decide

bench-workers: $(STAMP) ## what a second worker of a router brings (minutes)
	$(BIN)/python -m tests.benchmarks.workers

bench-replicas: $(STAMP) ## a router with a thousand replicas: CPU, memory, time of a decision (minutes)
	$(BIN)/python -m tests.benchmarks.many_replicas

bench-agent: $(STAMP) ## how many requests one agent process carries
	$(BIN)/python -m tests.benchmarks.agent_limit

bench-tracing: $(STAMP) ## what tracing costs, off and with 1, 10 and 100 % sampled (minutes)
	$(BIN)/python -m tests.benchmarks.tracing_cost

gate-renew: $(STAMP) ## keep what a request costs now, in bytecodes, as what it may cost
	$(BIN)/python -m tests.benchmarks.gate_renew

fidelity: $(STAMP) ## play TRACE=file live and in the twin, and compare (minutes)
	$(if $(TRACE),,$(error which trace? make fidelity TRACE=file))
	$(BIN)/python -m tests.benchmarks.fidelity --trace "$(TRACE)"

study-skywalker: $(STAMP) ## SkyWalker's figures 8, 9 and 10 in the twin
	$(STUDY).skywalker $(SIZE)

study-preble: $(STAMP) ## Preble's figures 3 and 5
	$(STUDY).preble $(SIZE)

study-gorgo: $(STAMP) ## GORGO's central router against routers in each region
	$(STUDY).gorgo $(SIZE)

study-mesh: $(STAMP) ## the mesh policy against every other
	$(STUDY).mesh $(SIZE)

study-federation: $(STAMP) ## what late and lost news cost the mesh
	$(STUDY).federation $(SIZE)

study-gossip: $(STAMP) ## what prefix gossip brings, and the bytes it costs
	$(STUDY).gossip $(SIZE)

study-loss: $(STAMP) ## kill -9 of a region's routers, live; TOGETHER=2: of two regions at once
	$(STUDY).region_loss $(SIZE) $(if $(TOGETHER),--together $(TOGETHER))

control-cost: $(STAMP) ## what heartbeats, digests, gossip and leases cost, live and in the twin
	$(STUDY).control_cost $(SIZE)

study-chapter: $(STAMP) ## Output 23.2.1 and a fourth row
	$(STUDY).chapter $(SIZE)

study-scale: $(STAMP) ## a thousand replicas in ten regions: time and memory; REQUESTS=n
	$(STUDY).scale $(if $(REQUESTS),--requests $(REQUESTS))

study-proactive: $(STAMP) ## hot prefixes computed before they are asked for: what it brings and costs
	$(STUDY).proactive $(SIZE)

gossip-live: $(STAMP) ## three regions of two routers, live: gossip, none, one router; TRACE=file
	$(BIN)/python -m tests.benchmarks.gossip_live $(if $(TRACE),--trace "$(TRACE)")

gossip-heals: $(STAMP) ## cut a link and restart a router, 20 times, and time how soon sets are equal
	$(BIN)/python -m tests.benchmarks.gossip_heals

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite to the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schemas: $(STAMP) ## write the JSON Schema, AsyncAPI and OpenAPI files anew from the code
	$(BIN)/python -m schemas.build
	$(BIN)/python -m infra.topology_schema

clean: ## remove what the other commands made
	rm -rf .venv .mesh build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
