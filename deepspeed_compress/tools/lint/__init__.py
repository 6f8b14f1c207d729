"""`ds-compress lint`: finds what is wrong with a DeepSpeed configuration, without starting DeepSpeed.

Rules are data (`rules/`), each with one function from a document (`document`) to hits (`hit`). Nothing here imports
torch, deepspeed or transformers, but for the script `generate_keys`, which the linter itself never loads.
"""
