# Every target except clean first creates a virtual environment in .venv; all but lint and clean also build the modules.
# VENV=0 uses the installed packages instead: make test VENV=0 PYTHON=python3
# make gpu verifies and measures everything on this machine's GPU within ten minutes; QUICK=1 takes about four.
# OUT=folder is for its results. It looks for a GPU before anything is installed.
# make dist builds wheels and a source distribution for the Pythons 3.10 to 3.13 that it finds, and tries each.
# make hub writes the layout of a kernel for the Hugging Face Hub into dist/hub.
# make matrix runs tests with other versions of torch and Triton; MATRIX="--pair 2.13.0,3.6.0" with one pair.
# make fuzz MINUTES=10 compares random calls of the operations with their definitions; then, for a time as long, it
# calls the operators with wrong arguments.
# make baseline saves each kernel's time relative to PyTorch; make regression fails if one rose by over a quarter.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
# Tests that wait for a process or a time limit leave a core to one more of pytest's processes.
WORKERS = $(shell echo $$(($(JOBS) + 1)))

ifeq ($(VENV),0)
RUN := $(PYTHON)
READY :=
BUILD_TOOLS :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
BUILD_TOOLS := $(VENV)/build-tools
endif

.PHONY: quick test fuzz bench gpu visible_gpu baseline regression docs lint dist hub matrix build extension clean

# Tests start some 150 processes, each of which would compile this checkout's Python again.
quick test: export PYTHONDONTWRITEBYTECODE =

QUICK_FILES = machine/test_ptx_counters.py repo/test_contract.py repo/test_examples.py repo/test_import.py

quick: build
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal --quick $(addprefix tests/,ops nn $(QUICK_FILES)) $(PYTEST)

test: build
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST)

bench: build
	$(RUN) -m bench run --shapes quick --minutes 7
	$(RUN) -m moe_kernels train

gpu: build
	$(RUN) -m bench gpu $(if $(QUICK),--quick) $(if $(OUT),--out $(OUT))

visible_gpu:
	$(PYTHON) moe_kernels/_visible_gpus.py

# With this order, which also holds under make -j, a machine without a GPU installs and builds nothing for make gpu.
ifneq ($(filter gpu,$(MAKECMDGOALS)),)
build $(BUILD_TOOLS) $(READY): | visible_gpu
endif

SAVED := bench/out/regression
REGRESSION = $(RUN) -m pytest bench/test_regression.py --benchmark-storage=$(SAVED) \
	--benchmark-columns=median,iqr,rounds --benchmark-sort=name $(PYTEST)

baseline: build
	$(REGRESSION) --benchmark-autosave

regression: build
	$(REGRESSION) $(if $(wildcard $(SAVED)/*/*.json),--benchmark-compare --benchmark-compare-fail=median:25%)

docs: build
	@echo writing docs/_build/html with sphinx: half a minute
	$(RUN) -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html

MINUTES ?= 10

fuzz: build
	$(RUN) -m tests.fuzz --minutes $(MINUTES) --processes $(JOBS) --interpreted 0.002 $(FUZZ)
	$(RUN) -m tests.fuzz --minutes $(MINUTES) --processes $(JOBS) --operators $(FUZZ)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.citation-file-format --default-filetype yaml CITATION.cff

dist:
	$(PYTHON) -m release.dist

hub: $(READY)
	$(RUN) -m release.hub

matrix:
	$(PYTHON) -m release.matrix --write $(MATRIX)

# The build needs three of the packages; it runs while pip, which uses one core, installs the rest, and with nice leaves
# that core to it. Without MAKEFLAGS ninja does not look for a job server of make.
build: $(BUILD_TOOLS)
	@$(MAKE) --no-print-directory -s -j2 extension $(READY)

extension: $(BUILD_TOOLS)
	$(if $(wildcard build/temp*),,@echo compiling csrc: about two minutes on two cores)
	MAKEFLAGS= nice $(RUN) setup.py build_ext --inplace

$(VENV)/build-tools: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	grep -E '^(setuptools|pybind11|ninja)==' $< | xargs $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
	touch $@

$(VENV)/ready: $(VENV)/build-tools
	@echo installing the packages of requirements-dev.txt into $(VENV): some minutes
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf build dist *.egg-info moe_kernels/*.so bench/out docs/_build
