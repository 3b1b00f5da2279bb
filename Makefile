# Each target sets up its own environment. The only requirement is Python 3.11 or newer.
#
#   make demo    train on one mesh, save, restore on others, serve from one host
#   make test    all tests, three at a time on two cores (JOBS=1: one at a time)
#   make test-fast
#                the fast tests that start no child process, server or browser; on one core
#   make check   lint, types, docs, examples; one job per core (JOBS)
#   make tpu     compile every device program for TPUs; needs no TPU; takes a minute, downloads 137 MB
#   make gpu     on a machine with a GPU: check correctness, then measure speed; 10 minutes; see docs/accelerators.md
#   make faults  run the complete fault campaign and write docs/reliability.md; takes 80 minutes, ten of them
#                of fuzzing (JAXCKPT_FUZZ_SECONDS)
#   make bench   measure saves and restores compared with Orbax, PyTorch DCP, safetensors and one plain file, in about
#                an hour; ARGS=--quick only checks that it runs, ARGS="--workload b" runs one workload

# The default is the first Python that is new enough; PYTHON=/path/to/python3 chooses another one. Each minor version
# has its own stamp file, so that a change of version recreates the environment.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)
VERSION := $(shell $(or $(PYTHON),false) -c 'import sys; v = sys.version_info; print("%d.%d" % v[:2] if v >= (3, 11) else "")' \
	2>/dev/null)
BIN := .venv/bin
READY_FOR_DEMO := .venv/ready-for-demo-$(VERSION)
READY := .venv/ready-$(VERSION)
READY_TO_BENCH := .venv/ready-to-bench-$(VERSION)
READY_FOR_TPU := .venv/ready-for-tpu-$(VERSION)

JOBS ?= $(shell nproc 2>/dev/null || echo 2)

# Many tests, docs pages and examples start Python. Without .pyc files, each of them would compile the library again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast check tpu gpu faults bench clean

demo: $(READY_FOR_DEMO)
	$(BIN)/python examples/train_reshard_serve.py
	$(BIN)/python examples/pipeline_stages.py

# Tests can run in parallel: each one measures only its own process and child processes. The number of workers is
# 1.5 times the number of cores, because tests spend a quarter of their time waiting for timeouts and hung servers.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses $$(($(JOBS) + $(JOBS) / 2)) --dist worksteal

test-fast: $(READY)
	$(BIN)/python -m pytest -m "not child and not fault and not slow"

tpu: $(READY_FOR_TPU)
	$(BIN)/python -m pytest tests/tpu_aot

# Uses the machine's JAX and needs no network. GPU_WHEELS names a folder with wheels of the missing packages, GPU_OUT the
# folder for results. The checkout comes first in PYTHONPATH, then the wheels, then the caller's own entries.
gpu:
	$(PYTHON) benchmarks/gpu $(ARGS)

faults: $(READY)
	$(BIN)/python -m pytest tests/faults tests/test_soak.py --campaign --override-ini timeout=3600
	$(BIN)/python -m pytest --virtual-hosts

# The longest checks start first. The output of each check is printed when it ends.
PROGRAMS := $(wildcard examples/*.ipynb examples/*.py)
LONGEST := examples/train_reshard_serve.py examples/training_loop.py
CHECKS := $(LONGEST:%=run/%) pages types site $(patsubst %,run/%,$(filter-out $(LONGEST),$(PROGRAMS))) lint
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
.PHONY: $(CHECKS)

check: $(READY)
	$(MAKE) --no-print-directory --jobs=$(JOBS) $(SYNC) $(CHECKS)

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 84 README.md CONTRIBUTING.md SECURITY.md docs/*.md
	$(BIN)/zizmor --offline --quiet --strict-collection .

types:
	$(BIN)/basedpyright

site:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pages:
	$(BIN)/python docs/run_blocks.py README.md $(wildcard docs/*.md)

$(filter %.ipynb,$(CHECKS)): run/%:
	$(BIN)/python docs/run_notebooks.py $*

$(filter %.py,$(CHECKS)): run/%:
	JAXCKPT_DEMO_QUICK=1 $(BIN)/python $*

bench: $(READY_TO_BENCH)
	$(BIN)/python benchmarks/peers.py $(ARGS)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist site

# Python compiles a module when it is first imported. To compile all 19,000 now takes a minute; few of them are imported.
INSTALL := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint requirements-dev.lock --editable

# --clear removes packages that an older lock file or another Python installed.
define environment
	@test -n "$(VERSION)" || { echo "make: $(if $(PYTHON),$(PYTHON) is not,found no) Python 3.11 or newer;" \
		"choose one with PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
endef

# The demo installs only the packages that it needs, so that it starts quickly.
$(READY_FOR_DEMO): pyproject.toml requirements-dev.lock
	$(environment)
	$(INSTALL) '.[demo]'
	touch $(READY_FOR_DEMO)

$(READY): pyproject.toml requirements-dev.lock
	$(environment)
	$(INSTALL) '.[dev,docs]'
	touch $(READY_FOR_DEMO) $(READY)

$(READY_FOR_TPU): $(READY)
	$(INSTALL) '.[tpu]'
	touch $(READY_FOR_TPU)

$(READY_TO_BENCH): $(READY)
	$(INSTALL) '.[bench]'
	touch $(READY_TO_BENCH)
