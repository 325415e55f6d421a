# make test, make bench, make lint: each does all of its own set-up, in a virtual environment.
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

.PHONY: test bench lint build clean

test: build
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(PYTEST)

bench: build
	$(RUN) -m bench run --shapes quick
	$(RUN) -m moe_kernels train

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
	rm -rf build dist *.egg-info moe_kernels/*.so bench/out
