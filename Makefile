# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed: this checkout, compiled here, or a wheel of it (PACKAGE=dist/superadam-....whl).
PACKAGE ?= .
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Where the peers of `make peers` are installed, and how their Python is called.
PEERS := build/peers
PIP_OF_PEERS := $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WITH_PEERS := DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(PEERS)/extensions PATH="$(CURDIR)/$(PEERS)/bin:$$PATH" $(PEERS)/bin/python
SOURCES := $(shell git ls-files -co --exclude-standard -- cpu gpu superadam CMakeLists.txt pyproject.toml README.md)

# Run the installed wheel, never the sources in this folder.
export PYTHONSAFEPATH := 1

# torch's OpenMP threads would spin between its operations, and slow down whatever else wants these cores.
export OMP_WAIT_POLICY := passive

# A file's tests stay together: some share what took long to make. Slow files begin. Two processes for each of two cores, because
# tests of several ranks, of commands and of threads wait for much of their time.
IN_PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo wheels test suite test-quick test-deep test-mutants sanitize docs arm-test torch-test gpu-check gpu-wheels peers lint format clean

demo: $(VENV)/installed
	rm -f demo/training.png demo/report.json  # of the demo before
	$(BIN)/python examples/train.py --verify --steps 200 --max-grad-norm 1.0 --inject-nan 70 --report demo/report.json --out demo

# What is released, in dist/: the sdist, wheels for x86-64 and 64-bit Arm, their hashes. Needs no compiler of the system.
wheels: $(VENV)/wheel-tools
	$(BIN)/python tools/wheels.py

# Linters and documentation run beside the tests, some of which wait for much of their time.
test: $(VENV)/test-tools $(VENV)/docs-tools
	$(MAKE) --no-print-directory -j3 lint docs suite

suite: $(VENV)/test-tools
	$(BIN)/python -m pytest $(IN_PARALLEL) tests

# A part of each folder's tests, and no linters.
test-quick: $(VENV)/test-tools
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow" tests

# TIMES=20 is how many times as many examples as `make test` draws.
test-deep: $(VENV)/test-tools
	SUPERADAM_DEEP=$(or $(TIMES),20) $(BIN)/python -m pytest $(IN_PARALLEL) tests

# SAMPLE=200 is how many, of FILES="superadam/step cpu/run.c"; SEED draws the same ones again; WORKERS is else the number of CPUs;
# TESTS="tests/step tests/offload" runs these in place of the folder that mirrors a file.
test-mutants: $(VENV)/test-tools
	PYTHONPATH=tests $(BIN)/python -m mutants.run $(FILES)

# PROGRAMS=100000 that move and free memory, on kernels that notice every access to memory that is not there; needs gcc.
sanitize: $(VENV)/test-tools
	tests/sanitize $(BIN)/python $(or $(PROGRAMS),2000)

# The site in build/docs; a warning, such as a link to nowhere, is an error.
docs: $(VENV)/docs-tools
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs build/docs

# The wheel for Arm, on an emulator of three CPUs, or of one (CPUS=max,sve=off); ARGS are options of pytest.
arm-test: wheels
	CPUS="$(CPUS)" tests/arm/run $(BIN)/python $(ARGS)

# The same wheel with the oldest torch that the package admits; TORCH="2.8.0 2.9.1" tries others.
torch-test: wheels
	TORCH="$(or $(TORCH),2.10.0)" tests/arm/run $(BIN)/python $(ARGS)

# On a machine with a GPU, with a Python that has superadam[cli] installed: sets up and downloads nothing.
# ARGS="--only rates" runs one stage, ARGS=--rehearse all of them without a GPU.
gpu-check:
	$(PYTHON) bench/gpu_check.py $(ARGS)

# What gpu-check needs besides torch and numpy, to be carried to a machine without a network; for another one, ARGS="--arch aarch64".
gpu-wheels: $(VENV)/installed
	$(BIN)/python bench/gpu_wheels.py $(ARGS)

# Steps against torch's, DeepSpeed's, bitsandbytes' and torchao's in an environment of their own, in at most eight minutes on a
# quiet machine. Needs a C++ compiler and OpenMP, with which DeepSpeed builds its extension, once. JSON=bench/results/NAME.json keeps
# the result elsewhere, to be put into docs by `python bench/step_cost.py`; OpenMP's threads wait as they do by default.
peers: $(PEERS)/installed
	env -u OMP_WAIT_POLICY $(WITH_PEERS) bench/compare.py --numel 67108864 --minutes 7 --json $(or $(JSON),build/steps.json) $(ARGS)

lint: $(VENV)/test-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell git ls-files 'cpu/*.c' 'cpu/*.h')

format: $(VENV)/test-tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell git ls-files 'cpu/*.c' 'cpu/*.h')

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'
	touch $@

# torch first and from the constraints, so that nothing after it pulls in another build of it.
$(VENV)/torch: $(VENV)/python constraints.txt
	$(PIP) torch numpy
	touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	$(PIP) --force-reinstall --no-deps $(PACKAGE)
	$(PIP) '$(PACKAGE)[cli]'
	touch $@

$(VENV)/test-tools: $(VENV)/installed
	$(PIP) --group test --group frameworks --group lint
	touch $@

# A peer that does not install is left out of the comparison, which says so.
$(PEERS)/installed: constraints.txt $(SOURCES)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet 'pip>=25.1'
	$(PIP_OF_PEERS) torch numpy
	$(PIP_OF_PEERS) --force-reinstall --no-deps $(PACKAGE)
	$(PIP_OF_PEERS) '$(PACKAGE)[cli]'
	for peer in 'deepspeed ninja' bitsandbytes torchao; do $(PIP_OF_PEERS) $$peer || true; done
	-$(WITH_PEERS) -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()'
	touch $@

$(VENV)/wheel-tools: $(VENV)/python constraints.txt
	$(PIP) --group wheels
	touch $@

$(VENV)/docs-tools: $(VENV)/installed
	$(PIP) --group docs
	touch $@

clean:
	rm -rf $(VENV) build dist demo
