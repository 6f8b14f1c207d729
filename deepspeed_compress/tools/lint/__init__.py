"""`ds-compress lint`: find what is wrong with a DeepSpeed configuration, without starting DeepSpeed.

options       command-line options; all that other commands load
command       the command: settings, reading, linting, fixing and writing
files         finding and reading configurations
document      a configuration with the place of every key and value in its text
scanner       reader of HJSON that continues after errors; `values` reads its strings, and `yaml_reader` YAML
keys          the keys that DeepSpeed knows: keys.json, which `launch/lint_keys.py` writes
rule          definition of a rule
rules         the rules, by family; those of `accelerate` and `syntax` also read what they are about
runner        choosing rules for a document, and applying them
fixes         edits, and applying them
explain       the command `rule`, and the page of all rules

Nothing here imports torch, deepspeed or transformers.
"""
