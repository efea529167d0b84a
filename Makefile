# `make` or `make help` lists the targets.

PYTHON ?= python3
NEWEST_PYTHON ?= python3.13
VENV ?= .venv
DEMO_ARGS ?= --out runs/demo --overwrite
TEST_JOBS ?= 2
TEST_ARGS ?=
BENCH_ARGS ?=

# requirements/lock.txt is resolved and tried for these; `make lock` renews it.
LOCK := requirements/lock.txt
LOCKED_PYTHONS := 3.11 3.12 3.13

PY_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# The version is in the name, so another PYTHON makes the environment anew.
READY := $(VENV)/.ready-$(PY_VERSION)
OLDEST_READY := .venv-oldest/.ready-$(PY_VERSION)

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# The compiler of TPUs, which needs none; beside the environment, because JAX looks for chips where it finds it.
TPU := requirements/tpu.txt
TPU_READY := $(VENV)/tpu/.ready
# Writers of logs and a store of objects, in an environment that sees $(VENV).
LOG := requirements/log.txt
LOG_READY := .venv-log/.ready-$(PY_VERSION)
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
# Launchers of the registry, in an environment that sees $(VENV); those of Debian with LAUNCHERS=1, as root.
LAUNCHERS ?=
# It makes the environments of the trainers; MaxText and Kauldron want it.
TRAINERS_PYTHON ?= python3.12
LAUNCHERS_READY := .venv-launchers/.ready-$(PY_VERSION)
DEBIAN := slurmctld slurmd slurm-client munge openmpi-bin mpich
# The site; beside requirements/lock.txt, whose versions it keeps.
DOCS := requirements/docs.txt
DOCS_READY := $(VENV)/.docs-ready-$(PY_VERSION)
EQUALITY := tests/test_against_reference.py tests/test_ranges.py tests/test_quantize.py tests/test_sharding.py
PYTEST := -m pytest --numprocesses $(TEST_JOBS) $(TEST_ARGS)

# $(call need_python,NAME OF THE VARIABLE)
need_python = $($(1)) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "error: lioncub_jax needs Python 3.11 or newer, and $(1)=$($(1)) is not:" \
	"$$($($(1)) --version 2>&1 | head -n 1). Name one: make $(1)=/path/to/python3" >&2; exit 1; }

# Runs a command when no other make runs one: two that made one environment at once would leave none. All that
# it starts inherit the lock, so that a pip whose make was stopped has it to its end.
alone = $(PYTHON) -c 'import fcntl, os, sys; lock = os.open(".make.lock", os.O_CREAT | os.O_RDWR); \
	fcntl.flock(lock, fcntl.LOCK_EX); os.set_inheritable(lock, True); os.execvp(sys.argv[1], sys.argv[1:])'

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long launchers trainers lint format docs docs-test oldest newest wheel-test bench lock clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "variables: PYTHON=$(PYTHON) NEWEST_PYTHON=$(NEWEST_PYTHON) DEMO_ARGS='$(DEMO_ARGS)'"
	@echo "           TEST_JOBS=$(TEST_JOBS) TEST_ARGS='$(TEST_ARGS)' BENCH_ARGS='$(BENCH_ARGS)'"

venv: $(READY) ## create .venv with everything below needs

# An environment is ready when its file is there, which is made last: a half-made one is made again.
$(READY): pyproject.toml $(LOCK)
$(OLDEST_READY): pyproject.toml requirements/oldest.txt
$(TPU_READY): $(READY) $(TPU)
$(LOG_READY): $(READY) $(LOG)
$(DOCS_READY): $(READY) $(DOCS)

ifndef ALONE
$(READY) $(OLDEST_READY) $(TPU_READY) $(LOG_READY) $(DOCS_READY):
	@$(call need_python,PYTHON)
	@$(alone) $(MAKE) --no-print-directory ALONE=1 $@
else
$(READY):
	$(PYTHON) -m venv --clear $(VENV)
ifneq ($(filter $(PY_VERSION),$(LOCKED_PYTHONS)),)
	@echo "installing the versions in $(LOCK) (about half a minute)"
	$(VENV)/bin/python $(PIP_INSTALL) --require-hashes -r $(LOCK)
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
else
	@echo "$(LOCK) is for Python $(LOCKED_PYTHONS), this is $(PY_VERSION):" \
		"installing the newest versions that pyproject.toml allows"
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[plots,test,lint]'
endif
	@touch $@

$(TPU_READY):
	rm -rf $(@D)
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --require-hashes --target $(@D) -r $(TPU)
	@touch $@

$(LOG_READY):
	$(VENV)/bin/python -m venv --clear .venv-log
	$(VENV)/bin/python -c '$(SITE)' > "$$(.venv-log/bin/python -c '$(SITE)')/seen.pth"
	.venv-log/bin/python $(PIP_INSTALL) -r $(LOG)
	@touch $@

$(DOCS_READY):
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --require-hashes -r $(DOCS)
	@touch $@

$(OLDEST_READY):
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python $(PIP_INSTALL) -c requirements/oldest.txt -e '.[plots,test]'
	@touch $@
endif

demo: $(READY) ## train the example, with output in runs/demo
	$(VENV)/bin/python examples/train_gpt.py $(DEMO_ARGS)

test: $(READY) ## run the tests and the doctests
	$(VENV)/bin/python $(PYTEST)

# The third line compiles as users do, and not by the quick flags of tests/conftest.py: what is equal to the
# bit must be so for them.
test-long: $(READY) $(TPU_READY) $(LOG_READY) ## run what is left, for a release: long tests, other flags, a TPU's compiler
	$(VENV)/bin/python $(PYTEST) -m long
	PYTHONPATH=$(CURDIR) .venv-log/bin/python $(PYTEST) -m long tests/test_logging.py tests/test_store.py
	XLA_FLAGS= $(VENV)/bin/python $(PYTEST) -m '' $(EQUALITY)
	JAX_PLATFORMS=cpu PYTHONPATH=$(CURDIR)/$(VENV)/tpu $(VENV)/bin/python $(PYTEST) -m tpu tests/test_ahead_of_time.py
	$(VENV)/bin/python tests/mutants.py --jobs $(TEST_JOBS)

$(LAUNCHERS_READY): $(READY) requirements/launchers.txt
	$(VENV)/bin/python -m venv --clear .venv-launchers
	$(VENV)/bin/python -c '$(SITE)' > "$$(.venv-launchers/bin/python -c '$(SITE)')/seen.pth"
	.venv-launchers/bin/python $(PIP_INSTALL) -r requirements/launchers.txt
	@touch $@

launchers: $(READY) $(if $(LAUNCHERS),$(LAUNCHERS_READY)) ## train by the launchers that are here (LAUNCHERS=1, as root, installs all)
	$(if $(LAUNCHERS),apt-get update && apt-get install --yes --no-install-recommends $(DEBIAN))
	$(VENV)/bin/python benchmarks/launchers.py

# Each in an environment of its own, in .venv-trainers, of Python 3.12.
trainers: $(READY) ## train by the trainers that people run, plain and with the library, and write their table
	$(VENV)/bin/python benchmarks/trainers.py --python $(TRAINERS_PYTHON)

lint: $(READY) ## check style, formatting and types
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

format: $(READY) ## rewrite the sources as lint wants them
	$(VENV)/bin/python -m ruff check --fix .
	$(VENV)/bin/python -m ruff format .

docs: $(DOCS_READY) ## build the site in build/docs, and run its tutorial
	$(VENV)/bin/python -m sphinx -q --fail-on-warning --keep-going docs build/docs

docs-test: docs ## click through the site in chromium, where that is installed
	$(VENV)/bin/python -m pytest -rs -m browser tests/test_site.py

oldest: $(OLDEST_READY) ## run the tests with the oldest supported jax, flax and optax
	.venv-oldest/bin/python $(PYTEST)

newest: ## run the tests with the newest jax on NEWEST_PYTHON, installed anew
	@$(call need_python,NEWEST_PYTHON)
	$(NEWEST_PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python $(PIP_INSTALL) -e '.[plots,test]'
	.venv-newest/bin/python $(PYTEST)

# The sdist is built first, and the wheel from it, so that nothing that a build needs is left out. The folder
# that programs start in has no source.
wheel-test: ## build sdist and wheel; run quickstart, a plan and the tutorial from the wheel alone on PYTHON
	@$(call need_python,PYTHON)
	rm -rf dist
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python $(PIP_INSTALL) build
	.venv-wheel/bin/python -m build --outdir dist .
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python $(PIP_INSTALL) dist/*.whl
	.venv-wheel/bin/python -m pip check
	cd dist && ../.venv-wheel/bin/python ../examples/quickstart.py
	cd dist && ../.venv-wheel/bin/lioncub plan --model 124M --workers 8 --bandwidth 1gbit --compute 144ms \
		--tokens-per-worker 256
	cd dist && ../.venv-wheel/bin/python -c 'import lioncub_jax; print(lioncub_jax.__version__, lioncub_jax.__file__)'
	.venv-wheel/bin/python $(PIP_INSTALL) "$$(ls dist/*.whl)[plots]"
	.venv-wheel/bin/python tests/pages.py start/tutorial.md > dist/tutorial.py
	cd dist && MPLBACKEND=agg ../.venv-wheel/bin/python tutorial.py && rm tutorial.py

bench: $(READY) ## run the benchmarks
	$(VENV)/bin/python benchmarks/local_step.py $(BENCH_ARGS)
	$(VENV)/bin/python benchmarks/compile_time.py $(BENCH_ARGS)
	$(VENV)/bin/python benchmarks/memory.py $(BENCH_ARGS)

lock: ## resolve requirements/lock.txt anew
	@$(call need_python,PYTHON)
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python $(PIP_INSTALL) uv
	.venv-lock/bin/uv pip compile pyproject.toml $(foreach x,plots test lint,--extra $(x)) --group build \
		--python-version $(firstword $(LOCKED_PYTHONS)) --universal --upgrade \
		--generate-hashes --no-emit-index-url --no-annotate \
		--custom-compile-command "make lock" --quiet --output-file $(LOCK)
	echo 'jax[tpu]' | .venv-lock/bin/uv pip compile - --constraint $(LOCK) \
		--python-version $(firstword $(LOCKED_PYTHONS)) --universal --generate-hashes \
		--no-emit-index-url --no-annotate --no-header --quiet | sed -n '/^libtpu/,/[^\\]$$/p' > $(TPU)
	.venv-lock/bin/uv pip compile --group docs --constraint $(LOCK) \
		--python-version $(firstword $(LOCKED_PYTHONS)) --universal --generate-hashes \
		--no-emit-index-url --no-annotate \
		--custom-compile-command "make lock" --quiet --output-file $(DOCS)

clean: ## remove environments, caches and builds; runs/ stays
	rm -rf .make.lock .venv .venv-oldest .venv-newest .venv-wheel .venv-lock .venv-log .venv-launchers .venv-trainers build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
