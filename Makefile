# The book from a clone: `make book`, `make test`. `make help` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
LIB    := $(BIN)/python -m lib

.DEFAULT_GOAL := help
.PHONY: help env book quick laptop paper test bench pdf audit soak gpu-check refresh clean

help:                   ## this list
	@sed -n 's/^\([a-z -]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

env: $(READY)           ## the environment alone, in .venv, at the pinned versions
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "the book needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "environment: $(VENV) (a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[book,test,cluster]'
	@touch $@

book: $(READY)          ## every chapter at the best profile that results exist for, and the site: _build/html/index.html
	@$(LIB) build

quick laptop paper: $(READY) ## the same at this profile, training what the store lacks
	@$(LIB) build --profile $@

test: $(READY)          ## everything that must hold
	@$(BIN)/python -m pytest --nbval-lax --nbval-current-env --durations=20

bench: $(READY)         ## our training loop against the textbook one, about ten minutes: _build/bench.json
	@$(LIB) bench

pdf: $(READY)           ## the built site as one PDF, where there is a Chromium: _build/book.pdf
	@$(LIB) pdf

N := 5
audit: $(READY)         ## N shipped runs, drawn at random, trained again and compared: _build/audit.json
	@$(LIB) audit -n $(N)

SOAK   := _build/soak.json
soak: $(READY)          ## every fault at its full count, at most an hour: _build/soak.json
	@BOOK_SOAK=$(abspath $(SOAK)) $(BIN)/python -m pytest -q -o timeout=2400 \
	  tests/test_faults.py tests/test_cluster.py tests/test_bad_input.py tests/test_security.py

gpu-check: $(READY)     ## the tests that need a CUDA device and the bench on it, _build/bench-gpu.json; says so where there is none
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(BIN)/python -m pytest -q -m gpu tests; held=$$?; $(LIB) bench --device cuda && exit $$held; else echo "gpu-check: no CUDA device here; nothing was checked"; fi

refresh: $(READY)       ## run every chapter at its defaults and store the outputs that the tests compare
	@set -e; for notebook in book/*.ipynb; do $(LIB) refresh $$(basename $$notebook .ipynb); done

clean:                  ## remove what was built; the environment and the store stay
	rm -rf _build
