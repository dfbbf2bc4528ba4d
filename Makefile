# make demo        set up .venv, then decode prompts with the shipped drafter
# make test        set up .venv, build, run the tests that need no GPU and little time
# make test-full   the slow ones too
# make test-gpu    the tests marked gpu that take little time, in PYTHON as it is (default python3)
# make test-reference   compare the drafter with the public ones, from PyPI, in a folder of their own
# make wheel lint format clean

PYTHON ?= python3
VENV   ?= .venv
TORCH_VERSION ?= 2.13.0
# Torch for this machine: the default build where a GPU is seen, a CPU build otherwise (the configured
# index first, then PyTorch's own CPU index, and the large default build if neither has one).
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.stamp
NATIVE := setup.py CMakeLists.txt $(shell find csrc -type f)

# Two OpenMP threads on a busy two-core machine collapse, because they spin while they wait. One thread for
# the tests; the demo takes what there is and lets them spin briefly.
test test-full test-reference: export OMP_NUM_THREADS ?= 1
demo: export GOMP_SPINCOUNT ?= 1000

.PHONY: demo test test-full test-gpu test-reference wheel lint format clean
.DELETE_ON_ERROR:

demo: $(STAMP)-built-train
	$(VENV)/bin/domino-draft demo

test: $(STAMP)-built-dev
	$(PY) -m pytest -m "not gpu and not slow"

test-full: $(STAMP)-built-dev
	$(PY) -m pytest -m "not gpu"

test-gpu:
	@$(PYTHON) -c "import torch; assert torch.cuda.is_available()" 2>/dev/null || \
	  { echo "make test-gpu: $(PYTHON) finds no CUDA device (or no torch); nothing was tested"; exit 1; }
	$(PYTHON) setup.py -q build_ext --inplace
	DOMINO_REQUIRE_GPU=1 PYTHONPATH=$(CURDIR):$(CURDIR)/python $(PYTHON) -m pytest -m "gpu and not slow"

test-reference: $(STAMP)-built-dev $(STAMP)-reference
	DOMINO_REQUIRE_REFERENCE=1 PYTHONPATH=$(VENV)/reference $(PY) -m pytest tests/draft/test_reference.py

wheel: $(PY)
	$(PIP) wheel --no-deps --wheel-dir dist .

lint: $(STAMP)-built-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*')

format: $(STAMP)-built-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files 'csrc/*')

clean:
	rm -rf build dist .venv *.egg-info domino_kernels/*.so domino_kernels/_build_info.py

$(PY):
	$(PYTHON) -m venv $(VENV)

$(STAMP)-torch: | $(PY)
	@echo "Setting up $(VENV): build tools and Torch (minutes on a slow network)"
	@$(PIP) install -q --upgrade pip
	@$(PIP) install -q "setuptools>=77" wheel pybind11 cmake ninja
	@if nvidia-smi >/dev/null 2>&1; then $(PIP) install -q torch; else \
	  $(PIP) install -q "torch==$(TORCH_VERSION)+cpu" 2>/dev/null || \
	  $(PIP) install -q --retries 1 "torch==$(TORCH_VERSION)" --index-url $(TORCH_CPU_INDEX) 2>/dev/null || \
	  { echo "No CPU build of Torch $(TORCH_VERSION) found; installing the default build (gigabytes)"; \
	    $(PIP) install -q "torch>=2.8"; }; fi
	@touch $@

# Never beside the package: their dependencies pin another Torch.
$(STAMP)-reference: tests/reference-requirements.txt | $(PY)
	$(PIP) install -q --no-deps --require-hashes --upgrade --target $(VENV)/reference -r $<
	touch $@

# With the packages of an extra. Editable: a change in Python needs no step, one in csrc compiles
# what changed.
$(STAMP)-built-%: $(STAMP)-torch pyproject.toml $(NATIVE)
	@echo "Compiling the extension and installing the packages of [$*] (some twelve minutes on two idle cores for all GPUs; DOMINO_CUDA_ARCHS=90a-real: one)"
	@PYTHONWARNINGS="ignore:Editable installation" $(PIP) install -q --no-build-isolation -e '.[$*]'
	@$(PY) -c "import domino_kernels as k; print(k.build_info())"
	@touch $@
