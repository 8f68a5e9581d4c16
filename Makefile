# Every target does its own set-up: a fresh machine needs Python 3.11 or newer and make, nothing else.
# Variables: PYTHON (interpreter for the environment), VENV (its folder), ARGS (passed on to the
# command), JOBS (tests side by side, each with servers of its own; 0 for --pdb), ROUNDS (of chaos),
# PIP_ARGS (passed to pip, such as an --index-url with other builds of torch).

VENV ?= .venv
ARGS ?=
PIP_ARGS ?=
ROUNDS ?= 100
JOBS ?= 2
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.embedstream-demo
INDEX_STAMP := $(VENV)/.embedstream-index
DEV_STAMP := $(VENV)/.embedstream-dev
BENCH_STAMP := $(VENV)/.embedstream-bench
STORES_STAMP := $(VENV)/.embedstream-stores
PEERS_STAMP := $(VENV)/.embedstream-peers

.PHONY: help env demo demo-index up test stores faults check bench chaos clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    real broker, real models, ~1,000 documents, five questions (about 2 minutes)'
	@echo 'make demo-index  pages of docs/ into a LanceDB folder, and questions (about a minute)'
	@echo 'make env     the environment alone, in .venv: what docs/tutorial.md begins with'
	@echo 'make up      a Kafka broker, a Redis server and the service, until Ctrl-C'
	@echo 'make test    every test that this machine can run, but for those of make faults and make stores'
	@echo 'make stores  the vector stores whose servers take seconds to start: Chroma, Milvus, OpenSearch'
	@echo 'make faults  kill -9, outages, rebalances and signals, on real brokers (some minutes)'
	@echo 'make chaos   ROUNDS=100 of every fault in both delivery modes, each id reconciled in chaos.jsonl, then'
	@echo '             as many kills (-9) while 20,000 documents are indexed; needs a real Kafka (some hours)'
	@echo 'make check   format, lint, types, import layers'
	@echo 'make bench   throughput and packing figures of this machine'
	@echo 'make clean   removes the environment and everything that was generated'

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer was not found: set PYTHON=/path/to/python'; exit 1; }
	@rm -f $(DEMO_STAMP) $(INDEX_STAMP) $(DEV_STAMP) $(BENCH_STAMP) $(STORES_STAMP) $(PEERS_STAMP)
	@$(PYTHON) -m venv $(VENV) || { echo 'could not make $(VENV): is the venv module installed (Debian: python3-venv)?'; exit 1; }

$(DEMO_STAMP): pyproject.toml clients/python/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e clients/python -e '.[demo]' -c constraints.txt
	@touch $@

$(INDEX_STAMP): pyproject.toml clients/python/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e clients/python -e '.[demo,lance]' -c constraints.txt
	@touch $@

$(DEV_STAMP): pyproject.toml clients/python/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e clients/python -e '.[dev]' -c constraints.txt
	@touch $@ $(DEMO_STAMP) $(INDEX_STAMP)

$(BENCH_STAMP): pyproject.toml clients/python/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e clients/python -e '.[bench]' -c constraints.txt
	@touch $@ $(DEMO_STAMP) $(INDEX_STAMP) $(DEV_STAMP)

# Servers of vector stores, in an environment over the other one: chromadb lies where its client would,
# and of what the three ask for (half a gigabyte) the servers use only what is there.
$(STORES_STAMP): $(DEV_STAMP)
	@rm -rf $(VENV)/stores && $(BIN)/python -m venv --without-pip $(VENV)/stores
	@$(BIN)/python -c 'import site; print(*site.getsitepackages(), sep="\n")' > $$($(VENV)/stores/bin/python -c 'import site; print(site.getsitepackages()[0])')/over.pth
	$(BIN)/python -m pip --python $(VENV)/stores install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps chromadb milvus-lite faiss-cpu -c constraints.txt
	@touch $@

# Peers of the engine that ask for older libraries than ours and run with these: an environment over the
# other one, and of what they depend on only what is not there.
$(PEERS_STAMP): $(BENCH_STAMP)
	@rm -rf $(VENV)/peers && $(BIN)/python -m venv --without-pip $(VENV)/peers
	@$(BIN)/python -c 'import site; print(*site.getsitepackages(), sep="\n")' > $$($(VENV)/peers/bin/python -c 'import site; print(site.getsitepackages()[0])')/over.pth
	$(BIN)/python -m pip --python $(VENV)/peers install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps fastembed infinity-emb mmh3 py-rust-stemmers loguru -c constraints.txt
	@touch $@

env: $(INDEX_STAMP)

demo: $(DEMO_STAMP)
	$(BIN)/embedstream demo $(ARGS)

demo-index: $(INDEX_STAMP)
	$(BIN)/python -m pipeline.demo.index $(ARGS)

up: $(DEMO_STAMP)
	$(BIN)/embedstream up $(ARGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(if $(findstring tests/,$(ARGS)),,--ignore=tests/fault -m 'not heavy_store') $(ARGS)

stores: $(DEV_STAMP) $(STORES_STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m heavy_store tests/conformance $(ARGS)

faults: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/fault $(ARGS)

chaos: $(DEV_STAMP)
	EMBEDSTREAM_CHAOS_ROUNDS=$(ROUNDS) EMBEDSTREAM_CHAOS_REPORT=chaos.jsonl $(BIN)/python -m pytest -s tests/fault/test_laboratory.py $(ARGS)
	EMBEDSTREAM_CHAOS_KILLS=$(ROUNDS) EMBEDSTREAM_CHAOS_RECORDS=20000 $(BIN)/python -m pytest tests/fault/test_kill_indexing.py $(ARGS)

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(PEERS_STAMP)
	$(VENV)/peers/bin/python -m benchmarks.engine $(ARGS)
	$(BIN)/python -m benchmarks.pipeline $(ARGS)

clean:
	rm -rf $(VENV) build dist .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
