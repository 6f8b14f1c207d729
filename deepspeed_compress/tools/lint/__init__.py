"""`ds-compress lint`: find what is wrong with a DeepSpeed configuration, without starting DeepSpeed.

options       command-line options; all that other commands load
command       reading, linting, fixing and writing; the command `rule`, and the page of all rules (rules.md.jinja)
files         finding and reading configurations
document      a configuration with the place of every key and value in its text
scanner       reader of HJSON that continues after errors; `values` reads its strings, and `yaml_reader` YAML
keys          the keys that DeepSpeed knows: keys.json, which `launch/lint_keys.py` writes
rule          definition of a rule
rules         the rules, by family; `accelerate` also finds the file that one of Accelerate names
runner        choosing rules for a document, and applying them
fixes         edits, and applying them

Nothing here imports torch, deepspeed or transformers.
"""
