# The plain commands behind these targets stand in README.md.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

export NO_MKDOCS_2_WARNING = 1

# Long files first, so that both cores end together.
KERNELS := $(shell ls -S tests/interpreter/test_*.py)

.PHONY: site serve test test-package test-site test-kernels $(KERNELS) notebooks figures screenshots bench lint clean

site: $(READY)
	$(BIN)/python docs/tools/npm.py
	$(BIN)/mkdocs build --strict
	@echo "The site is in $(CURDIR)/site"
	@echo "To look at it: make serve, or $(PYTHON) -m http.server --directory site"

serve: $(READY)
	$(BIN)/python docs/tools/npm.py
	$(BIN)/mkdocs serve

# In processes of their own: Triton reads TRITON_INTERPRET when a kernel is
# defined, and the site is built once for all its tests. The longest first:
# with two cores, make -j2 -O test runs them side by side.
test: test-site test-package test-kernels

test-package: $(READY)
	$(BIN)/python -m pytest --ignore tests/site

test-site: $(READY)
	$(BIN)/python docs/tools/npm.py
	$(BIN)/python -m pytest tests/site

test-kernels: $(KERNELS)

$(KERNELS): $(READY)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $@

notebooks: $(READY)
	$(BIN)/python docs/tools/notebooks.py

figures: site
	$(BIN)/python docs/tools/figures.py

screenshots: site
	$(BIN)/python docs/tools/screenshots.py

bench: $(READY)
	$(BIN)/fwlab bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .cache site

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@
