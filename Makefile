# `make demo` and `make test` work on a fresh checkout: each makes .venv, installs the pinned packages, does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= runs

.PHONY: demo test check format bench lock clean

# The stamp is made last, so that an install that was cut off is done again.
$(READY): requirements.lock pyproject.toml paper/pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . --editable paper
	touch $(READY)

demo: $(READY)
	$(BIN)/fedda run digits --out $(OUT)/digits --overwrite --no-summary
	$(BIN)/fedda run breast-cancer --out $(OUT)/breast-cancer --overwrite --no-summary
	$(BIN)/fedda report $(OUT)/digits $(OUT)/breast-cancer

test: $(READY)
	sh tests/all.sh $(BIN)/python

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	sh tests/all.sh $(BIN)/python

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/fedda bench --out $(OUT)/bench.json

# torch is named exactly: the tag '+cpu' of a local build is no part of the pin.
lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip install --quiet torch==2.13.0 'typer<0.21' 'rich<15' 'protobuf<7'
	.venv-lock/bin/python -m pip install --quiet '.[dev]'
	( echo '# Made by `make lock`: what make demo, make test and CI install.' ; \
	  .venv-lock/bin/python -m pip freeze --exclude fedda | sed 's/+cpu//' ) > requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .venv-lock build dist
