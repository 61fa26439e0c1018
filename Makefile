# make setup   create .venv and install crosscut with the tested versions (done once; again when they change)
# make train   the main job: train the default model on real text          (ARGS="--mesh tp=2" adds flags)
# make test    the test suite                                              (ARGS="-k pipeline" adds flags)
# make faults  inject every fault of the corpus and write docs/faults.md
# make parity  every layout that 8 ranks admit against one device: about six minutes   (ARGS="--dtype fp32")
# make mutations   plant every seeded bug: each must be found and named
# make check   lint, formatting, types
# make benchmarks   measure the collectives and write docs/benchmarks.md: ten minutes, on a machine at rest

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: setup train test parity mutations faults check format clean benchmarks

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV): installing torch and the rest takes about a minute from disk, longer from the network"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true  # on all cores, where pip would use one
	@touch $@

train: $(STAMP)
	$(BIN)/crosscut train configs/default.toml $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q $(ARGS)

faults: $(STAMP)
	$(BIN)/python -m tests.faults --write docs/faults.md $(ARGS)

parity: $(STAMP)
	$(BIN)/crosscut parity --matrix full $(ARGS)

mutations: $(STAMP)
	$(BIN)/python -m tests.mutations.score

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmarks: $(STAMP)
	$(BIN)/python benchmarks/publish.py $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
