# make test, make bench, make lint, make gpu: each does all of its own set-up, in a virtual environment.
# make gpu verifies and measures everything on this machine's GPU within ten minutes; with QUICK=1 within two.
# make fuzz MINUTES=10 compares random calls of every operation with the definition.
# make baseline saves the ratios to PyTorch; make regression fails if a kernel became slower since.
# With VENV=0 they use what is installed: make test VENV=0 PYTHON=python3

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)

ifeq ($(VENV),0)
RUN := $(PYTHON)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
endif

.PHONY: test fuzz bench gpu baseline regression docs lint build clean

# With this setting glibc allocates memory in huge pages, and Triton's compiler takes a tenth less time.
test: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

test: build
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(PYTEST)

bench: build
	$(RUN) -m bench run --shapes quick --minutes 7
	$(RUN) -m moe_kernels train

gpu: build
	$(RUN) -m bench gpu $(if $(QUICK),--quick)

SAVED := bench/out/regression
REGRESSION = $(RUN) -m pytest bench/test_regression.py --benchmark-storage=$(SAVED) \
	--benchmark-columns=median,iqr,rounds --benchmark-sort=name $(PYTEST)

baseline: build
	$(REGRESSION) --benchmark-autosave

regression: build
	$(REGRESSION) $(if $(wildcard $(SAVED)/*/*.json),--benchmark-compare --benchmark-compare-fail=median:25%)

docs: build
	$(RUN) -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html

MINUTES ?= 10

fuzz: build
	$(RUN) -m tests.fuzz --minutes $(MINUTES) --processes $(JOBS) --interpreted 0.002 $(FUZZ)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

build: $(READY)
	$(RUN) setup.py --quiet build_ext --inplace

$(VENV)/ready: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf build dist *.egg-info moe_kernels/*.so bench/out docs/_build
