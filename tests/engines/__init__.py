"""Real engines as the judge: vLLM prefills, transfers, decodes, and the tokens must be those of one engine alone.

``python -m tests.engines`` needs vLLM's CPU build; ``.ci/engines`` installs it and runs every pair.
"""
