"""`ds-compress lint`: finds what is wrong with a DeepSpeed configuration, without starting DeepSpeed.

options       of the command; all that every other command loads
command       the command: what is read, linted, fixed and written
files         finds and reads configurations
selection     which rules are wanted for which file
document      a configuration with the place of every key and value in its text
scanner       reads HJSON into one, past errors; `strings` its strings, `yaml_reader` YAML, `accelerate` Accelerate's
keys          what DeepSpeed knows: keys.json, which `generate_keys` writes
rule          what a rule is
rules         the rules, by family
placeholders  values that a script puts in
runner        applies rules to a document
fixes         edits, and how they are applied
explain       the command `rule`, and the page of all rules

Nothing here imports torch, deepspeed or transformers, but for the script `generate_keys`, which the linter itself never
loads.
"""
