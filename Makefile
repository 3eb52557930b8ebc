# `make demo` trains a tiny model on this machine; `make test` runs the tests. Both install what is missing first.
BIN := .venv/bin
INSTALLED := .venv/.complete

.PHONY: demo test test-slow gpu-check docs lint setup
demo: $(INSTALLED)
	@$(BIN)/rlhf quickstart --overwrite $(ARGS)

# Minutes here; with CI=true also the shorter end-to-end tests with real Ray, vLLM and DeepSpeed processes, 10 minutes more.
# Three files at a time, on two cores too, because tests wait for processes half of the time. In the order of their
# names, which has the long end-to-end ones first; one thread each, as OpenMP's threads starve each other when there are
# more of them than cores.
test: $(INSTALLED)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile \
		--no-loadscope-reorder -m 'not gpu and not slow$(if $(CI),, and not e2e)' $(if $(CI),--durations 40) $(ARGS)

# Learning runs, compiled models and the longer end-to-end tests: hours, weekly outside CI (.github/workflows/slow.yml).
test-slow: $(INSTALLED)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

# Ten steps on one NVIDIA GPU, and a Markdown table of them; ARGS="--steps 1 4" runs some.
gpu-check: $(INSTALLED)
	@$(BIN)/python benchmarks/gpu_check.py $(ARGS)

# The documentation site, in site/; ARGS="serve" shows it at http://127.0.0.1:8000 and follows changes.
docs: $(INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --strict)

lint: $(INSTALLED)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy rlhf_cli tests benchmarks docs/hooks.py

setup: $(INSTALLED)
	@:

$(INSTALLED): pyproject.toml .ci/setup
	@bash .ci/setup
