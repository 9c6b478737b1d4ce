# `make demo` and `make test` do all the set-up they need: Python 3.11+, pip and nothing else.
# pip's own configuration decides where packages come from (PIP_EXTRA_INDEX_URL, PIP_INDEX_URL, pip.conf …).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Bytecode is kept where something is imported. So pip need not compile 18,000 files, most of which never are.
export PYTHONDONTWRITEBYTECODE :=
# What pip fetches is shown, a line each, as minutes of silence look like a hang; errors are pip's own.
SHELL := bash
PIP := set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --no-compile --progress-bar off
SHOWN := | awk '/^ *Downloading .*MB\)/{print "  fetching " $$2; fflush()} /^Installing collected/{print "  unpacking …"; fflush()}'

# Workers of pytest, 2 GB each: three keep two cores busy, as tests also wait. One thread of torch in each, or they fight
# for the cores.
WORKERS ?= 3
# These seldom wait, and a worker computes for 10 to 20 s before its first test.
docs fast: WORKERS := 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test docs fast changed check unit coverage test-clients test-gateways test-quantisers test-real test-long test-gpu test-ranks format clean

demo: $(VENV)/.core
	@$(BIN)/python examples/quickstart.py

# Everything CI runs. pytest is last, so that its summary is the last line.
test: check unit

# The docs: their programs run and print what the pages show; then the site, in build/site, which a browser walks through.
# A warning is an error.
docs: $(VENV)/.dev $(VENV)/.model
	$(BIN)/sglang-lite models pull all-minilm-l6-v2
	$(PYTEST) tests/docs --ignore tests/docs/test_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python -m pytest tests/docs/test_site.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# While something is written: the tests that `make test` found to be fast.
fast: check $(VENV)/.model
	$(PYTEST) --ignore tests/docs -m 'not slow'

# Before a commit: the tests that what differs from main can break (tests/rooms.py).
changed: check $(VENV)/.model
	tests=$$($(BIN)/python -m tests.rooms) && $(PYTEST) $$tests

unit: $(VENV)/.dev $(VENV)/.model
	$(PYTEST) --ignore tests/docs --write-slow-tests

# Of the language, by its own tests: measuring takes as long as they do, so `make test` does not.
coverage: $(VENV)/.dev $(VENV)/.model
	$(PYTEST) tests/lang tests/protocol/test_protocol.py tests/wire/test_wire.py --cov=sglang_lite.errors --cov=sglang_lite.wire --cov=sglang_lite.protocol --cov=sglang_lite.lang --cov-report=term:skip-covered --cov-fail-under=90

# With the libraries that sglang_lite.integrations runs engines for, in an environment of their own: their plugins of
# pytest would change other tests. And with Node's clients of a server, where npm is.
CLIENTS := build/clients
NODE_CLIENTS := openai@6 @anthropic-ai/sdk@1 ollama@0.6 ai@6 @ai-sdk/openai-compatible@2
test-clients: $(VENV)/.model
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[clients]'
	if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix build/node $(NODE_CLIENTS); fi
	$(CLIENTS)/bin/python -m pytest -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function tests/integrations tests/lang/backend/test_litellm.py

# Behind both gateways, in an environment of their own: the tests of `make test` skip what needs them.
GATEWAYS := build/gateways
test-gateways:
	$(PYTHON) -m venv $(GATEWAYS)
	$(GATEWAYS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[gateways]'
	$(GATEWAYS)/bin/python -m pytest tests/server/replicas tests/server/test_grpc.py

# Beside bitsandbytes and torchao, which are large and make transformers slow to import.
QUANTISERS := build/quantisers
test-quantisers:
	$(PYTHON) -m venv $(QUANTISERS)
	$(QUANTISERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[quantisers]'
	$(QUANTISERS)/bin/python -m pytest tests/runtime/models/test_quantisers.py

# With models that people use: 2.1 GB, fetched once into the folder REAL. Engines run one at a time, with all threads.
REAL ?= build/real
test-real: $(VENV)/.dev $(VENV)/.model
	$(BIN)/sglang-lite models pull all-minilm-l6-v2
	$(BIN)/python -m tests.real.fetch $(REAL)
	SGLANG_LITE_REAL_MODELS=$(REAL) $(BIN)/python -m pytest tests/real

# What is random or repeated, many times more: hours.
LONG := ADAPTERS=2000 CASES=all CUTS=2000 DAMAGED_FILES=1000 ENGINES=100 EXAMPLES=500 FUZZ=10000 HOSTILE_FILES=10000 IMAGES=3000 KILLS=50 LEAVING=500 MASKBENCH=full OPENAPI=300 ORACLE=5000 PROGRAMS=3000 QUOTES=2000 RANDOM_GRAMMARS=1000 RANDOM_SCHEMAS=1000 RAY_ROWS=500 READINGS=5000 REQUESTS=500 RERUNS=2000 RESTARTS=50 RUNS=100 SAMPLES=2000 SLEEPS=1500 SOAK=20000 STREAMS=200 TYPE_SAMPLES=60 WIRE_FUZZ=10000 WIRE_RECORDS=1000

test-long: coverage
	$(LONG:%=SGLANG_LITE_%) $(PYTEST)

# On a machine with a GPU: kernels and models, then what runs engines that take or measure a share of the card's memory.
GPU := SGLANG_LITE_TEST_GPU=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
test-gpu: $(VENV)/.dev $(VENV)/.model
	$(GPU) -n 4 --dist worksteal tests/runtime/kernels tests/runtime/attention tests/runtime/models tests/effects/test_sampling.py
	$(GPU) tests/runtime/executor/test_gpu_runner.py tests/runtime/executor/test_on_gpu.py tests/runtime/executor/test_deterministic.py tests/runtime/executor/test_deterministic_gpu.py tests/runtime/executor/test_gpu_settings.py tests/engine/test_gpu_ranks.py
	SGLANG_LITE_TEST_GPU=1 $(BIN)/python -m tests.effects.hidden --gpu

# Ranks: all families over 2 and 4 of them, 200 random requests, 50 kills of any of them.
test-ranks: $(VENV)/.dev
	SGLANG_LITE_CASES=all SGLANG_LITE_REQUESTS=200 SGLANG_LITE_KILLS=50 $(BIN)/python -m pytest tests/runtime/parallel tests/engine/test_ranks.py tests/engine/test_nodes.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed; $$(command -v $(PYTHON)) is {v[0]}.{v[1]}. Say which with: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (the first time takes a few minutes) …"
	$(PIP) -e '.[cpu]' 'torch<2.14' $(SHOWN)
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (the first time takes a few minutes) …"
	@$(PIP) -e '.[dev,docs,openai,anthropic,server]' $(SHOWN)
	@touch $@ $(VENV)/.core

# The tests use no network: the default model is fetched here, once.
$(VENV)/.model: | $(VENV)/.core
	$(BIN)/sglang-lite models pull smollm2-135m
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
