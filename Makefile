# What a user and a developer type. Needs Linux x86-64, Python 3.11 or newer and make.
#   make up                         serve a small model on 127.0.0.1:8080
#   MODELS_DIR=~/models make up     serve a folder of GGUF files; MODELS_PRESET=models.ini likewise
#   make up PORT=9000 ARGS="--models-max 2 -c 8192"
PYTHON ?= python3
ARGS ?=
PORT ?=
export MODELS_DIR MODELS_PRESET PORT

run := .venv/bin
code := llamastead gateway supervisor measure_worker shared tests tools bench deploy

.PHONY: help up install dev test test-engine check lint soak-core soak-capacity soak test-compose lock \
	bench-policy bench-memory bench bench-quick

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
	@echo targets: $$(sed -nE "s/^([a-z][a-z -]*):( [a-z].*)?$$/\1/p" Makefile)

up:
	@exec $(PYTHON) tools/bootstrap.py up $(ARGS)

install dev:
	@$(PYTHON) tools/bootstrap.py $@

# Everything but containers. What this machine lacks for a test (root, a program) is said where it is skipped.
# The core's tests wait for nothing, so they run side by side.
test: dev
	CORE_EXAMPLES=2000 $(run)/pytest -n auto --maxschedchunk 4 tests/core
	$(run)/pytest --ignore tests/compose --ignore tests/core

# The side-by-side tests with another llama-server: make test-engine ENGINE=/path/to/llama-server
test-engine: dev
	COMPATIBILITY_ENGINE=$(ENGINE) $(run)/pytest -q tests/system/test_compatibility.py

# What to run before each commit.
check: lint
	$(run)/pytest -q -n auto tests/core tests/lua tests/shell tests/test_histories.py tests/test_design_page.py

lint: dev
	$(run)/ruff format --check -q $(code)
	$(run)/ruff check -q $(code)
	$(run)/mypy

# The scheduler's invariants over many more random histories: make soak-core EXAMPLES=20000
EXAMPLES ?= 20000
soak-core: dev
	CORE_EXAMPLES=$(EXAMPLES) $(run)/pytest -q --timeout 0 tests/core/test_core_properties.py

# Eight models on two scripted GPUs under traffic, for minutes: make soak-capacity SECONDS=300
SECONDS ?= 300
soak-capacity: dev
	CAPACITY_SECONDS=$(SECONDS) $(run)/pytest -q -s --timeout 0 tests/system/test_capacity.py

# Everything may die: random faults under mixed load, judged from outside. Repeat one with its SEED.
#   make soak DURATION=600 SEED=1 PAUSE=3 CLIENTS=8     seconds; a fault every PAUSE seconds
soak: dev
	@$(run)/python tests/soak

# Builds the images and runs the stack of docker-compose.yml; brings a Docker of its own where there is none.
test-compose: dev
	tests/compose/run

# The exact versions that `make up` and `make test` install, with hashes and without naming an index. Needs uv.
# Editable installs are built without isolation, so the build's own packages are locked as well.
compile = printf 'hatchling>=1.27\neditables\n' | uv pip compile -q --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-header --no-annotate --extra engine --extra demo pyproject.toml -
lock:
	$(compile) -o requirements.lock
	$(compile) --extra dev -c requirements.lock -o requirements-dev.lock

# Scheduling policies compared on arrival traces in virtual time; ARGS="--json" or ARGS="--seed 2".
bench-policy: dev
	@$(run)/python -m bench.policy $(ARGS)

# What models take: the estimate, the engine's own word and a real load in one table, on the CPU. REPORT=1 writes
# docs/measured-memory.md; ARGS="--quick" or ARGS="--json".
bench-memory: dev
	@$(run)/python -m bench.memory $(if $(REPORT),--report docs/measured-memory.md) $(ARGS)

# Llamastead beside llama-server's own router on this machine, in one table: ten minutes at most, or one.
# REPORT=1 writes docs/measured.md; ARGS="--json" prints all values.
bench: dev
	@$(run)/python -m bench $(if $(REPORT),--report docs/measured.md) $(ARGS)

bench-quick: dev
	@$(run)/python -m bench --quick $(ARGS)
