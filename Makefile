# `make demo` trains a tiny model on this machine; `make test` runs the tests. Both install what is missing first.
BIN := .venv/bin
INSTALLED := .venv/.complete

.PHONY: demo test lint setup
demo: $(INSTALLED)
	@$(BIN)/rlhf quickstart --overwrite $(ARGS)

# Everything but the tests marked gpu and slow. ARGS="-m 'not e2e and not gpu and not slow'" leaves out the long ones.
test: $(INSTALLED)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy rlhf_cli tests benchmarks

setup: $(INSTALLED)
	@:

$(INSTALLED): pyproject.toml .ci/setup
	@bash .ci/setup
