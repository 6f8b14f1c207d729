"""`ds-compress lint`: find what is wrong with a DeepSpeed configuration, without starting DeepSpeed.

options       command-line options; all that other commands load
command       the command: read, lint, fix and write
files         finding and reading configurations
selection     choice of rules for each file
document      a configuration with the place of every key and value in its text
scanner       reader of HJSON that continues after errors; `strings` reads its strings, `yaml_reader` YAML, and
              `accelerate` configurations of Accelerate
keys          the keys that DeepSpeed knows: keys.json, which `launch/lint_keys.py` writes
rule          definition of a rule
rules         the rules, by family
placeholders  values that a script fills in
runner        applying rules to a document
fixes         edits, and applying them
explain       the command `rule`, and the page of all rules

Nothing here imports torch, deepspeed or transformers.
"""
