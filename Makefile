# `make demo` trains a tiny model on this machine; `make test` runs the tests. Both install what is missing first.
BIN := .venv/bin
INSTALLED := .venv/.complete

.PHONY: demo test lint setup
demo: $(INSTALLED)
	@$(BIN)/rlhf quickstart --overwrite $(ARGS)

# Minutes here; with CI=true also the end-to-end tests with real Ray, vLLM and DeepSpeed processes, half an hour more.
test: $(INSTALLED)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m 'not gpu and not slow$(if $(CI),, and not e2e)' $(ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy rlhf_cli tests benchmarks

setup: $(INSTALLED)
	@:

$(INSTALLED): pyproject.toml .ci/setup
	@bash .ci/setup
