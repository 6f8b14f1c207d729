"""`ds-compress doctor`: find what slows a run down or harms its loss, and what to change.

run         files that a run has left in its directories
case        the run as rules see it: medians, shares, configuration
thresholds  thresholds of the rules, each with its reason
trends      statistics of noisy series
rule        definition of a rule
rules       the rules, grouped by what they check
ladders     gradient settings one step softer or stronger
patches     configuration changes as JSON merge patches
diagnose    all rules applied to a run
outputs     text for people and JSON for programs
command     the command

Nothing here imports torch or deepspeed. This module imports nothing at all, because all `ds-compress` commands load it.
"""
