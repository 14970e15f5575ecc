# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# Both build their own virtual environment first; nothing outside this folder is touched.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m
RECIPE := recipes/quickstart.yaml
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# One thread per test process: two run at once, and torch would start one per core in each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: setup quickstart test check lint clean

setup: $(VENV)/.installed

# Without a GPU the small CPU build of torch is taken where the package index offers it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "== virtual environment in $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  $(PIP) torch==$(TORCH); \
	else \
	  $(PIP) torch==$(TORCH)+cpu 2>/dev/null || $(PIP) torch==$(TORCH); \
	fi
	$(PIP) -c constraints.txt -e '.[quickstart,dev]'
	@touch $@

$(MODEL)/prepared.json: | $(VENV)/.installed
	$(BIN)/python recipes/quickstart/prepare_target.py --out $(MODEL)

quickstart: $(VENV)/.installed $(MODEL)/prepared.json
	@echo "== 1/4 conversations -> sample tables"
	$(BIN)/drafttrain data prepare --recipe $(RECIPE)
	@echo "== 2/4 sample tables -> hidden states of the target"
	$(BIN)/drafttrain extract --recipe $(RECIPE)
	@echo "== 3/4 hidden states -> drafter (DeepSpeed), replay after every checkpoint"
	$(BIN)/drafttrain train --recipe $(RECIPE)
	@echo "== 4/4 live decoding with the target -> acceptance report"
	$(BIN)/drafttrain eval --recipe $(RECIPE)

test: lint $(MODEL)/prepared.json
	$(PYTEST)

check: lint

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info runs
