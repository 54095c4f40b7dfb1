# Everything here sets itself up: a fresh machine needs python3 (3.11 to 3.13), pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCHMARKS := $(filter-out $(addprefix benchmarks/,cai_rule.py common.py loops.py),$(wildcard benchmarks/*.py))

.PHONY: setup browser demo docs notebooks test test-all test-old-cpu test-lowest test-gpu lint bench papers clean

# `make setup DEVICE=gpu` is for machines with NVIDIA GPUs; later calls keep the device of .venv.
# Another FAISS, or PyTorch for CPUs, would stay installed.
DEVICE := $(or $(patsubst $(VENV)/ready-%,%,$(wildcard $(VENV)/ready-*)),cpu)
EXTRAS_cpu := cpu,dev
EXTRAS_gpu := gpu,dev
REMOVED_cpu := faiss-gpu-cuvs
REMOVED_gpu := faiss-cpu torch torchvision

setup: $(VENV)/ready-$(DEVICE)

# uv installs in half a minute what takes pip minutes; pip is the way where uv finds no registry.
# Compiled as it is installed, everything imports faster: in each of the processes that tests start.
$(VENV)/ready-cpu $(VENV)/ready-gpu: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "error: Python 3.11 to 3.13 is needed; name one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	@rm -f $(VENV)/ready-*
	$(BIN)/uv pip uninstall --quiet --python $(BIN)/python $(REMOVED_$(DEVICE))
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[$(EXTRAS_$(DEVICE))]' || \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS_$(DEVICE))]'
	@touch $@

# The browser that tests of pages drive, from Debian; without one these tests are skipped.
browser:
	@command -v chromium > /dev/null || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } > /dev/null || \
		echo "chromium could not be installed: tests of pages are skipped"

demo: setup
	$(BIN)/rcir demo --output runs/demo

# The site, in site/. It shows the notebooks with the outputs of `make notebooks`, which takes minutes.
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

$(VENV)/docs-ready: $(VENV)/ready-$(DEVICE)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[docs]'
	@touch $@

notebooks: $(patsubst notebooks/%,build/notebooks/%,$(wildcard notebooks/*.ipynb))

build/notebooks/%.ipynb: notebooks/%.ipynb $(VENV)/docs-ready
	$(BIN)/python -m nbconvert --execute --to notebook --output-dir $(@D) $<

# Files of bytecode that one process writes save time in those that tests start.
OMP_NUM_THREADS ?= 1
# Reused memory takes a third off long simulations, see `rcir.torch_settings.keep_freed_memory`.
KEEP_MEMORY := MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 MALLOC_TOP_PAD_=67108864
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(KEEP_MEMORY) \
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 25

test: setup
	$(PYTEST) -m "not statistical" $(COVERAGE)

# Everything: the tests of `make test`, which record the lines that run (pyproject.toml has the share
# that must be reached), then slow tests and simulations.
test-all: COVERAGE := --cov
test-all: test $(VENV)/docs-ready
	$(PYTEST) --full -m "slow or statistical"

# Numeric tests with the arithmetic of an older CPU: float32 results differ in their last digits.
# NumPy warns about names that it or this CPU does not know, so it lists those that it can disable.
NUMPY_FEATURES := from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__ as found; \
	print(*(name for name in __cpu_dispatch__ if found[name]))
OLD_CPU := ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Prescott ONEDNN_MAX_CPU_ISA=SSE41 \
	MKL_ENABLE_INSTRUCTIONS=SSE4_2 FAISS_OPT_LEVEL=generic \
	NPY_DISABLE_CPU_FEATURES="$$($(BIN)/python -c '$(NUMPY_FEATURES)')"
NUMERIC_TESTS := $(addprefix tests/,losses mining metrics label_model index $(addprefix retrieval/test_, \
	draws.py label_ranking.py query_uncertainty.py rounding.py search_labelled.py templates.py whitening.py))

test-old-cpu: setup
	$(OLD_CPU) $(PYTEST) $(NUMERIC_TESTS)

# The lowest versions that pyproject.toml allows, without training, against numeric tests.
LOWEST_TESTS := tests/label_model tests/retrieval/test_from_embeddings.py $(addprefix tests/risk/test_, \
	bootstrap.py fusion.py learned.py order_statistic.py population.py probability.py score_functions.py)

test-lowest: setup
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/lowest
	$(BIN)/uv pip install --quiet --python build/lowest --resolution lowest-direct --editable '.[cpu]'
	$(BIN)/uv pip install --quiet --python build/lowest hypothesis mpmath pydantic typing-extensions \
		pytest pytest-randomly pytest-timeout pytest-xdist
	build/lowest/bin/python -m pytest --numprocesses 2 --override-ini filterwarnings=default \
		--override-ini addopts=--import-mode=importlib $(LOWEST_TESTS)

test-gpu: setup
	@$(BIN)/python -c 'import faiss, sys, torch; sys.exit(not (torch.cuda.is_available() and faiss.get_num_gpus()))' || \
		{ echo "error: PyTorch or FAISS finds no CUDA device; on a GPU machine run make setup DEVICE=gpu"; exit 1; }
	$(PYTEST) --full -m gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/hadolint Dockerfile
	$(BIN)/validate-pyproject pyproject.toml
	$(BIN)/python -m tests.size_budget

# One that cannot go on, such as without the data set, does not keep the others from running.
bench: setup
	@failed=; for script in $(BENCHMARKS); do \
		echo "== $$script"; $(BIN)/python $$script || failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "error: ended early:$$failed"; exit 1; }

papers: setup
	$(BIN)/python benchmarks/papers/claims.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
