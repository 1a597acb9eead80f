# KVScope. Each target sets up what it needs in .venv first; the second time that takes under a second.

PORT ?= 8501
MODEL ?= smollm2-135m
HEADLESS ?=
ARGS ?=
WORKERS ?= 3

.PHONY: help run test lint clean

help:
	@echo "make run     open the dashboard          PORT=8501 MODEL=name|folder|file.gguf|hub-id HEADLESS=1 (no browser)"
	@echo "make test    lint, then all tests        ARGS='-k scheduler' (for pytest)  WORKERS=3 (side by side)"
	@echo "make lint    lint only"
	@echo "make clean   remove .venv and caches of this checkout"

# The browser opens when there is a screen to open it on. Streamlit itself is told "headless": it would not open an
# st.App, only advertise.
run:
	@.ci/setup run "$(MODEL)"
	@if [ -z "$(HEADLESS)" ] && { [ "$$(uname)" != Linux ] || [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ]; }; then \
		.venv/bin/python .ci/open "http://127.0.0.1:$(PORT)" & \
	fi; \
	KVSCOPE_MODEL="$(MODEL)" exec .venv/bin/streamlit run app.py --server.port "$(PORT)"

# One thread for torch in the tests' own process: small models gain nothing from more, and the browser needs a core.
test: export OMP_NUM_THREADS = 1
test: export MKL_NUM_THREADS = 1
test: export TOKENIZERS_PARALLELISM = false
test: export HF_HUB_OFFLINE = 1
test:
	@.ci/setup test
	.venv/bin/ruff check .
	.venv/bin/python -m pytest -n $(WORKERS) --no-loadscope-reorder $(ARGS)

lint:
	@.ci/setup lint
	.venv/bin/ruff check .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
