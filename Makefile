# `make quickstart` and `make test` do everything on a fresh machine (Debian 12, Python 3.11, gcc).
# PYTHON=python3.12 takes another interpreter, CORPUS=DIR other text, ARGS="-k loader" goes to pytest, JOBS=4 runs tests
# in four processes (0: in one, that can be debugged).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-extended test-all test-cpus gpu soak lint docs wheel-test bare-machine system-deps deepspeed moe clean

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
ARGS ?=
JOBS ?= 2
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS)

# Both MPIs for `launch --mpi`, SLURM for the test cluster (its pmix plugin needs libpmix-dev), Chromium to look at the
# report, g++ for torch.compile.
SYSTEM_PACKAGES := openmpi-bin libopenmpi-dev mpich slurm-wlm munge libpmix-dev iproute2 chromium g++

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

quickstart: $(VENV)/.installed ## a corpus, a trained model, a stop and a resume, samples, a report
	@$(RUN) -m megatfm quickstart $(if $(CORPUS),--corpus "$(CORPUS)")

# Where PYTHONDONTWRITEBYTECODE is set, each process would compile all modules and tests again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(RUN) -m pytest -n $(JOBS) --no-loadscope-reorder

test: test-setup ## the suite on the CPU, less what is marked extended or slow
	$(PYTEST) -m "not extended and not slow" --durations=30 $(ARGS)

test-extended: test-setup ## the extended cases, which CI runs besides
	$(PYTEST) -m "extended and not slow" --durations=30 $(ARGS)

test-all: test-setup ## the whole suite on the CPU: the further cases of each grid, too
	$(PYTEST) $(ARGS)

.PHONY: test-setup
test-setup: $(VENV)/.installed-test $(VENV)/.installed-deepspeed
	@$(MAKE) --no-print-directory system-deps || echo "system-deps failed: tests that need them are skipped"

# What a CPU of another kind would round otherwise, as far as this one can act as such: instruction sets of torch's kernels,
# oneDNN and MKL, and two threads. Whether models learn, and whether another rate shows, depends on none of it.
NUMBERS := tests/golden tests/unit/test_alignment.py tests/unit/engines/test_optimizers.py \
  tests/unit/convert/test_encoders.py tests/unit/inference/test_load.py tests/unit/ops/test_transfer.py
CPUS := ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,MKL_ENABLE_INSTRUCTIONS=AVX2 \
  ATEN_CPU_CAPABILITY=default,MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE,MEGATFM_TEST_THREADS=2,OMP_WAIT_POLICY=passive

test-cpus: $(VENV)/.installed-test ## the tests of numbers, as on other CPUs and with two threads
	@failed=; for cpu in $(CPUS); do \
	  echo "$${cpu//,/ }"; \
	  env $${cpu//,/ } $(PYTEST) -q -m "not slow" -k "not learn" $(NUMBERS) $(ARGS) || failed="$$failed $$cpu"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

soak: $(VENV)/.installed-test ## a hundred kills, then half an hour of training under kills; ARGS="--minutes 3" for less
	OMP_NUM_THREADS=1 $(RUN) benchmarks/checkpoint.py kills $(ARGS)

gpu: ## what needs a GPU, with the torch that is there, into OUT=benchmarks/results; PARTS="facts tests 124m" for some
	$(PYTHON) benchmarks/gpu.py $(PARTS) $(if $(OUT),--out "$(OUT)") $(if $(WHEELS),--wheels "$(WHEELS)") $(TINY)

lint: $(VENV)/.installed-test ## ruff, mypy and the import rules
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy -p tests.support
	$(VENV)/bin/lint-imports

docs: $(VENV)/.installed-docs ## the manual, into site/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

wheel-test: $(VENV)/.installed ## the built wheel in an empty environment, away from the checkout
	@CONSTRAINTS="$(CONSTRAINTS)" bash .ci/wheel-test "$(RUN)"

# As root, with debootstrap. TARGETS="quickstart test-setup" for others, ARGS for pytest; BIND="/srv/wheels" shows folders
# to it and PIP_* reach it where packages come from elsewhere than PyPI, MIRROR=URL is another mirror of Debian's.
TARGETS ?= quickstart test
bare-machine: ## both of README's commands on a minimal Debian 12 that holds what README asks for alone
	@bash .ci/bare-machine $(TARGETS)

system-deps: ## what comes from apt (Debian, as root); says what to install elsewhere
	@if dpkg-query -W -f '$${db:Status-Abbrev}\n' $(SYSTEM_PACKAGES) 2>/dev/null | grep -c '^ii' | \
	    grep -qx $(words $(SYSTEM_PACKAGES)); then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(SYSTEM_PACKAGES) >/dev/null; \
	else \
	  echo "not root on Debian: install these yourself for the tests that need them: $(SYSTEM_PACKAGES)"; \
	fi

deepspeed: $(VENV)/.installed-deepspeed ## DeepSpeed beside the torch that is there; compiles nothing

# MegaBlocks is no extra: pip would resolve it together with another torch.
moe: $(VENV)/.installed ## MegaBlocks 0.10.0 (needs a GPU and nvcc)
	@command -v nvcc >/dev/null && $(RUN) -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  { echo "make moe: MegaBlocks compiles for CUDA: it needs nvcc on PATH and a CUDA build of torch"; exit 1; }
	$(PIP) setuptools wheel ninja
	$(PIP) --no-deps --no-build-isolation stanford-stk grouped_gemm megablocks==0.10.0
	@$(call check_torch)

clean: ## all that was built or installed here; runs/ and corpora/ stay
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: PYTHON=python3.11")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "can't make $(VENV): on Debian, apt-get install python3-venv"; exit 1; }

define install
	@echo "installing megatfm[$(1)] into $(VENV)"
	@$(PIP) -e ".[$(1)]"
	@$(call check_torch)
	@touch $@
endef

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(RUN)
	$(call install,prep)

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(RUN)
	$(call install,test)

# Built with the torch that is there: in an isolated build pip would fetch another one.
$(VENV)/.installed-deepspeed: pyproject.toml $(CONSTRAINTS) | $(VENV)/.installed
	@echo "installing DeepSpeed into $(VENV)"
	@$(PIP) setuptools wheel ninja
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation "$$(sed -n 's/^deepspeed = \["\(.*\)"\]/\1/p' pyproject.toml)"
	@$(call check_torch)
	@touch $@

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) | $(RUN)
	$(call install,docs)

# Some package pulling its own torch would make every other result meaningless.
check_torch = want=$$(sed -n 's/^torch==//p' "$(CONSTRAINTS)"); \
	have=$$($(RUN) -c 'import torch; print(torch.__version__.split("+")[0])'); \
	[ "$$have" = "$$want" ] || { echo "torch is $$have, but $(CONSTRAINTS) says $$want"; exit 1; }
